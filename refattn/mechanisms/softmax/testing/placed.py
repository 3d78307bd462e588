"""Plausible wrong readings of windows, offsets, biases, sinks, lengths and dropout: other conventions, frequent slips.

Each has the signature of the core without `implementation` and returns (out, lse). Where an option is not given it is
the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from refattn.mechanisms.softmax import core
from refattn.ops.heads import repeat_heads
from refattn.ops.masks import existing
from refattn.xp import Array, namespace

Given = dict[str, Any]
Wrong = Callable[..., tuple[Array, Array]]


def _core(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    out, saved = core.forward(q, k, v, **options)
    return out, saved.lse


def _with(needed: str, change: Callable[[Array, Array, Given], Given]) -> Wrong:
    """Return the core with other options, where the option `needed` is given."""

    def reading(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
        if options.get(needed) is None:
            return _core(q, k, v, **options)
        return _core(q, k, v, **{**options, **change(q, k, options)})

    return reading


def _moved_window(left: int, right: int) -> Wrong:
    """Return the core with bounds that are so much wider."""

    def change(q: Array, k: Array, given: Given) -> Given:
        by = zip(given["window"], (left, right), strict=True)
        return {"window": tuple(None if n is None else max(0, n + more) for n, more in by)}

    return _with("window", change)


def _place(q: Array, k: Array, given: Given) -> Any:
    """Return the offset of a call: a number, or one for each batch element."""
    if given.get("offset") is not None:
        return given["offset"]
    if given.get("causal") == "top_left":
        return 0
    lengths = given.get("q_lengths"), given.get("k_lengths")
    own, other = (n if x is None else x for n, x in zip((q.shape[2], k.shape[2]), lengths, strict=True))
    return other - own


def _placed(change: Callable[[Array, Array, Given], Any], needed: str = "window") -> Wrong:
    """Return the core with queries at another place."""

    def moved(q: Array, k: Array, given: Given) -> Given:
        return {"causal": given.get("causal", False) is not False, "offset": change(q, k, given)}

    return _with(needed, moved)


def window_is_none_where_empty(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Let a query whose window holds no key see all of them."""
    out, lse = _core(q, k, v, **options)
    if options.get("window") is None:
        return out, lse
    open_out, open_lse = _core(q, k, v, **{**options, "window": None, "causal": False})
    xp = namespace(q)
    empty = ~xp.isfinite(lse)
    return xp.where(empty[..., None], open_out, out), xp.where(empty, open_lse, lse)


def window_of_minus_one(q: Array, k: Array, v: Array, *, window: Any = None, **options: Any) -> tuple[Array, Array]:
    """Take a bound that is not given for the number -1, which ends the window one key before the query."""
    if window is None or None not in window:
        return _core(q, k, v, window=window, **options)
    xp, right = namespace(q), window[1]
    key, row = xp.arange(k.shape[2]), xp.arange(q.shape[2])[:, None]
    place = _place(q, k, options)
    place = row + (place if isinstance(place, int) else place[:, None, None, None])
    seen = (key <= place - 1) if right is None else (key >= place + 1)
    mask = options.pop("mask", None)
    return _core(q, k, v, window=window, mask=seen if mask is None else mask & seen, **options)


def _bounds_below_the_keys(q: Array, k: Array, given: Given) -> Given:
    """Drop a bound of as many neighbours as there are keys, though queries may stand outside of them."""
    return {"window": tuple(None if n is None or n >= k.shape[2] else n for n in given["window"])}


def _scale(q: Array, given: Given) -> Any:
    return 1.0 / math.sqrt(q.shape[3]) if given.get("scale") is None else given["scale"]


def bias_before_softcap(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Cap the sum of score and bias."""
    bias, softcap = options.get("bias"), options.get("softcap")
    if bias is None or softcap is None:
        return _core(q, k, v, **options)
    xp = namespace(q)
    scores = q @ xp.matrix_transpose(repeat_heads(k, q.shape[1])) * _scale(q, options)
    capped = softcap * xp.tanh((scores + bias) / softcap)
    return _core(q, k, v, **{**options, "scale": 0.0, "softcap": None, "bias": xp.astype(capped, q.dtype)})


def _finite_bias(q: Array, k: Array, given: Given) -> Given:
    xp, bias = namespace(q), given["bias"]
    return {"bias": xp.where(xp.isfinite(bias), bias, xp.zeros_like(bias))}


def _subtracted(q: Array, k: Array, given: Given) -> Given:
    xp, bias = namespace(q), given["bias"]
    return {"bias": xp.where(xp.isfinite(bias), -bias, bias)}


def _of_distances(change: Callable[[Array, Array, Array, Array], Array]) -> Wrong:
    """Return the core with another bias where one falls off with the distance from the queries' places.

    The change is of the bias, the slopes, the places of the queries and those of the keys.
    """

    def changed(q: Array, k: Array, given: Given) -> Given:
        xp, bias = namespace(q), given["bias"]
        if len(bias.shape) != 4 or min(bias.shape[2:]) < 2 or not bool(xp.all(bias <= 0.0)):
            return {}
        slopes = xp.max(xp.abs(bias[..., 1:] - bias[..., :-1]), axis=(-1, -2), keepdims=True)
        at = _place(q, k, given)
        at = at if isinstance(at, int) else at[:, None, None, None]
        rows = xp.arange(q.shape[2])[:, None] + at
        return {"bias": xp.astype(change(bias, slopes, rows, xp.arange(k.shape[2])), q.dtype)}

    return _with("bias", changed)


def _of_key_heads(q: Array, k: Array, given: Given) -> Given:
    """Take the sink of a query head by its key/value head."""
    xp, shared = namespace(q), q.shape[1] // max(k.shape[1], 1)
    return {"sink": xp.take(given["sink"], xp.arange(q.shape[1]) // max(shared, 1), axis=0)}


def _interleaved_sinks(q: Array, k: Array, given: Given) -> Given:
    xp, groups = namespace(q), max(k.shape[1], 1)
    heads = xp.arange(q.shape[1])
    shared = max(q.shape[1] // groups, 1)
    return {"sink": xp.take(given["sink"], heads % shared * groups + heads // shared, axis=0)}


def _capped_sink(q: Array, k: Array, given: Given) -> Given:
    cap = given.get("softcap")
    return {} if cap is None else {"sink": cap * namespace(q).tanh(given["sink"] / cap)}


def _weight_sink(q: Array, k: Array, given: Given) -> Given:
    """Add the sink to the sum, not its exponential."""
    xp = namespace(q)
    return {"sink": xp.log(xp.abs(given["sink"]) + 1e-30)}


def sink_left_out_of_lse(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Return the logarithm of the sum over the keys alone."""
    out, lse = _core(q, k, v, **options)
    return out, _core(q, k, v, **{**options, "sink": None})[1] if options.get("sink") is not None else lse


def empty_rows_with_infinite_lse(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Return +inf for a query that may attend nothing, as FlashAttention 2 does."""
    out, lse = _core(q, k, v, **options)
    return out, namespace(q).where(lse == -math.inf, math.inf, lse)


def dropped_before_normalising(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Multiply the exponentials, so that the sum has lost what was dropped."""
    keep = options.get("keep")
    if keep is None:
        return _core(q, k, v, **options)
    mask = options.get("mask")
    stays = keep != 0
    return _core(q, k, v, **{**options, "keep": None, "mask": stays if mask is None else mask & stays})


def _by_part_kept(q: Array, k: Array, given: Given) -> Given:
    xp, keep = namespace(q), given["keep"]
    stays = xp.astype(keep != 0, q.dtype)
    return {"keep": stays / xp.mean(stays)}


def _inverted(q: Array, k: Array, given: Given) -> Given:
    xp, keep = namespace(q), given["keep"]
    return {"keep": xp.astype(keep == 0, q.dtype) * xp.max(xp.astype(keep, q.dtype))}


def slack_has_sinks(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Treat a query that does not exist as one without keys."""
    out, lse = _core(q, k, v, **options)
    if options.get("q_lengths") is None:
        return out, lse
    xp, exists = namespace(q), existing(options["q_lengths"], q.shape[2], q)
    assert exists is not None
    _, whole = _core(q, k, v, **{**options, "q_lengths": None, "offset": _place(q, k, options)})
    return out, xp.where(exists[..., 0], lse, xp.where(xp.isnan(whole), lse, whole))


PLACED: dict[str, Wrong] = {
    "window one wider": _moved_window(1, 1),
    "window one narrower": _moved_window(-1, -1),
    "window aligned top left": _placed(lambda q, k, given: 0),
    "left bound of the window excluded": _moved_window(-1, 0),
    "a bound as large as the keys is none": _with("window", _bounds_below_the_keys),
    "window bounds exchanged": _with("window", lambda q, k, given: {"window": given["window"][::-1]}),
    "right bound of the window left out": _with("window", lambda q, k, given: {"window": (given["window"][0], None)}),
    "window left out": _with("window", lambda q, k, given: {"window": None}),
    "a bound of None is -1": window_of_minus_one,
    "causal ignored beside a window": _with("window", lambda q, k, given: {"causal": False}),
    "an empty window is no window": window_is_none_where_empty,
    "offset ignored": _with("offset", lambda q, k, given: {"offset": None}),
    "offset of the other sign": _with("offset", lambda q, k, given: {"offset": -given["offset"]}),
    "offset one too far": _with("offset", lambda q, k, given: {"offset": given["offset"] + 1}),
    "bias ignored": _with("bias", lambda q, k, given: {"bias": None}),
    "bias subtracted": _with("bias", _subtracted),
    "bias scaled with the scores": _with("bias", lambda q, k, given: {"bias": given["bias"] * _scale(q, given)}),
    "bias before the soft-cap": bias_before_softcap,
    "infinite bias ignored": _with("bias", _finite_bias),
    "distances of the bias signed": _of_distances(
        lambda bias, slopes, rows, keys: namespace(bias).where(keys > rows, -bias, bias)
    ),
    "distances of the bias from top left": _of_distances(
        lambda bias, slopes, rows, keys: -slopes * abs(rows - rows[..., :1, :] - keys)
    ),
    "distances of the bias from the first key": _of_distances(
        lambda bias, slopes, rows, keys: slopes * keys + 0 * rows
    ),
    "sink ignored": _with("sink", lambda q, k, given: {"sink": None}),
    "sink scaled": _with("sink", lambda q, k, given: {"sink": given["sink"] * _scale(q, given)}),
    "sink capped": _with("sink", _capped_sink),
    "sink always 0": _with("sink", lambda q, k, given: {"sink": 0.0 * given["sink"]}),
    "sink taken for a weight": _with("sink", _weight_sink),
    "sink by key/value head": _with("sink", _of_key_heads),
    "sinks of interleaved heads": _with("sink", _interleaved_sinks),
    "sink counted twice": _with("sink", lambda q, k, given: {"sink": given["sink"] + math.log(2.0)}),
    "first of several sinks alone": _with(
        "sink", lambda q, k, given: {"sink": given["sink"] if given["sink"].ndim == 1 else given["sink"][:, 0]}
    ),
    "sink left out of lse": sink_left_out_of_lse,
    "key lengths ignored": _with(
        "k_lengths", lambda q, k, given: {"k_lengths": None, "causal": given.get("causal", False)}
    ),
    "query lengths ignored": _with("q_lengths", lambda q, k, given: {"q_lengths": None}),
    "a length is the last index": _with(
        "k_lengths", lambda q, k, given: {"k_lengths": namespace(q).clip(given["k_lengths"] + 1, 0, k.shape[2])}
    ),
    "bottom right of padded lengths": _with(
        "k_lengths", lambda q, k, given: {"offset": k.shape[2] - q.shape[2]} if given.get("causal") is True else {}
    ),
    "queries beyond their length have sinks": slack_has_sinks,
    "lse of empty rows +inf": empty_rows_with_infinite_lse,
    "dropped before normalising": dropped_before_normalising,
    "dropout not scaled": _with("keep", lambda q, k, given: {"keep": namespace(q).astype(given["keep"] != 0, q.dtype)}),
    "dropout scaled by the part kept": _with("keep", _by_part_kept),
    "dropout inverted": _with("keep", _inverted),
    "dropout left out": _with("keep", lambda q, k, given: {"keep": None}),
}
"""Wrong readings by name."""
