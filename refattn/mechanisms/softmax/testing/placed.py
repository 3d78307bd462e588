"""Plausible wrong readings of windows, offsets, biases, sinks, lengths and dropout: other conventions, frequent slips.

Each has the signature of the core without `implementation` and returns (out, lse). Where an option is not given it is
the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from refattn.mechanisms.softmax import core as softmax
from refattn.mechanisms.wrong import Changed, Outputs, if_given, other_outputs, scale_of
from refattn.ops.heads import repeat_heads
from refattn.ops.masks import existing
from refattn.xp import Array, namespace

Given = dict[str, Any]
Wrong = Callable[..., tuple[Array, Array]]


def core(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Return (out, lse) of the core."""
    out, saved = softmax.forward(q, k, v, **options)
    return out, saved.lse


_with = partial(if_given, core)


def _moved_window(left: int, right: int) -> Changed:
    """Return the core with bounds that are so much wider."""

    def change(given: Given) -> Given:
        by = zip(given["window"], (left, right), strict=True)
        return {"window": tuple(None if n is None else max(0, n + more) for n, more in by)}

    return _with("window", change)


def _place(given: Given) -> Any:
    """Return the offset of a call: a number, or one for each batch element."""
    if given.get("offset") is not None:
        return given["offset"]
    if given.get("causal") == "top_left":
        return 0
    last = {name: given.get(f"{name}_lengths") for name in "qk"}
    own, other = (given[name].shape[2] if x is None else x for name, x in last.items())
    return other - own


def _placed(change: Callable[[Given], Any], needed: str = "window") -> Changed:
    """Return the core with queries at another place."""

    def moved(given: Given) -> Given:
        return {"causal": given.get("causal", False) is not False, "offset": change(given)}

    return _with(needed, moved)


def _open_where_empty(right: Outputs, given: Given) -> Outputs:
    """Let a query whose window holds no key see all of them."""
    if given.get("window") is None:
        return right
    (out, lse), (open_out, open_lse) = right, core(**{**given, "window": None, "causal": False})
    xp = namespace(lse)
    empty = ~xp.isfinite(lse)
    return xp.where(empty[..., None], open_out, out), xp.where(empty, open_lse, lse)


def _minus_one(given: Given) -> Given:
    """Take a bound that is not given for the number -1, which ends the window one key before the query."""
    if None not in given["window"]:
        return {}
    xp, right, mask = namespace(given["q"]), given["window"][1], given.get("mask")
    key, row = xp.arange(given["k"].shape[2]), xp.arange(given["q"].shape[2])[:, None]
    place = _place(given)
    place = row + (place if isinstance(place, int) else place[:, None, None, None])
    seen = (key <= place - 1) if right is None else (key >= place + 1)
    return {"mask": seen if mask is None else mask & seen}


def _bounds_below_the_keys(given: Given) -> Given:
    """Drop a bound of as many neighbours as there are keys, though queries may stand outside of them."""
    return {"window": tuple(None if n is None or n >= given["k"].shape[2] else n for n in given["window"])}


def _bias_before_softcap(given: Given) -> Given:
    """Cap the sum of score and bias."""
    q, softcap = given["q"], given.get("softcap")
    if softcap is None:
        return {}
    xp = namespace(q)
    scores = q @ xp.matrix_transpose(repeat_heads(given["k"], q.shape[1])) * scale_of(given)
    capped = softcap * xp.tanh((scores + given["bias"]) / softcap)
    return {"scale": 0.0, "softcap": None, "bias": xp.astype(capped, q.dtype)}


def _finite_bias(given: Given) -> Given:
    xp, bias = namespace(given["bias"]), given["bias"]
    return {"bias": xp.where(xp.isfinite(bias), bias, xp.zeros_like(bias))}


def _subtracted(given: Given) -> Given:
    xp, bias = namespace(given["bias"]), given["bias"]
    return {"bias": xp.where(xp.isfinite(bias), -bias, bias)}


def _of_distances(change: Callable[[Array, Array, Array, Array], Array]) -> Wrong:
    """Return the core with another bias where one falls off with the distance from the queries' places.

    The change is of the bias, the slopes, the places of the queries and those of the keys.
    """

    def changed(given: Given) -> Given:
        q, bias = given["q"], given["bias"]
        xp = namespace(q)
        if len(bias.shape) != 4 or min(bias.shape[2:]) < 2 or not bool(xp.all(bias <= 0.0)):
            return {}
        slopes = xp.max(xp.abs(bias[..., 1:] - bias[..., :-1]), axis=(-1, -2), keepdims=True)
        at = _place(given)
        at = at if isinstance(at, int) else at[:, None, None, None]
        rows = xp.arange(q.shape[2])[:, None] + at
        return {"bias": xp.astype(change(bias, slopes, rows, xp.arange(given["k"].shape[2])), q.dtype)}

    return _with("bias", changed)


def _of_key_heads(given: Given) -> Given:
    """Take the sink of a query head by its key/value head."""
    heads, groups = (given[name].shape[1] for name in "qk")
    xp, shared = namespace(given["q"]), heads // max(groups, 1)
    return {"sink": xp.take(given["sink"], xp.arange(heads) // max(shared, 1), axis=0)}


def _interleaved_sinks(given: Given) -> Given:
    xp, groups = namespace(given["q"]), max(given["k"].shape[1], 1)
    heads = xp.arange(given["q"].shape[1])
    shared = max(given["q"].shape[1] // groups, 1)
    return {"sink": xp.take(given["sink"], heads % shared * groups + heads // shared, axis=0)}


def _capped_sink(given: Given) -> Given:
    cap, sink = given.get("softcap"), given["sink"]
    return {} if cap is None else {"sink": cap * namespace(sink).tanh(sink / cap)}


def _weight_sink(given: Given) -> Given:
    """Add the sink to the sum, not its exponential."""
    xp = namespace(given["sink"])
    return {"sink": xp.log(xp.abs(given["sink"]) + 1e-30)}


def _dropped_before_normalising(given: Given) -> Given:
    """Multiply the exponentials, so that the sum has lost what was dropped."""
    stays, mask = given["keep"] != 0, given.get("mask")
    return {"keep": None, "mask": stays if mask is None else mask & stays}


def _kept(given: Given) -> Array:
    """Return 1 where dropout keeps, and 0."""
    return namespace(given["q"]).astype(given["keep"] != 0, given["q"].dtype)


def _by_part_kept(given: Given) -> Given:
    stays = _kept(given)
    return {"keep": stays / namespace(stays).mean(stays)}


def _inverted(given: Given) -> Given:
    xp, q = namespace(given["q"]), given["q"]
    return {"keep": (1.0 - _kept(given)) * xp.max(xp.astype(given["keep"], q.dtype))}


def _sinks_of_slack(right: Outputs, given: Given) -> Outputs:
    """Treat a query that does not exist as one without keys."""
    (out, lse), q = right, given["q"]
    if given.get("q_lengths") is None:
        return right
    xp, exists = namespace(q), existing(given["q_lengths"], q.shape[2], q)
    assert exists is not None
    _, whole = core(**{**given, "q_lengths": None, "offset": _place(given)})
    return out, xp.where(exists[..., 0], lse, xp.where(xp.isnan(whole), lse, whole))


PLACED: dict[str, Wrong] = {
    "window one wider": _moved_window(1, 1),
    "window one narrower": _moved_window(-1, -1),
    "window aligned top left": _placed(lambda given: 0),
    "left bound of the window excluded": _moved_window(-1, 0),
    "a bound as large as the keys is none": _with("window", _bounds_below_the_keys),
    "window bounds exchanged": _with("window", lambda given: {"window": given["window"][::-1]}),
    "right bound of the window left out": _with("window", lambda given: {"window": (given["window"][0], None)}),
    "window left out": _with("window", lambda given: {"window": None}),
    "a bound of None is -1": _with("window", _minus_one),
    "causal ignored beside a window": _with("window", lambda given: {"causal": False}),
    "an empty window is no window": other_outputs(core, _open_where_empty),
    "offset ignored": _with("offset", lambda given: {"offset": None}),
    "offset of the other sign": _with("offset", lambda given: {"offset": -given["offset"]}),
    "offset one too far": _with("offset", lambda given: {"offset": given["offset"] + 1}),
    "bias ignored": _with("bias", lambda given: {"bias": None}),
    "bias subtracted": _with("bias", _subtracted),
    "bias scaled with the scores": _with("bias", lambda given: {"bias": given["bias"] * scale_of(given)}),
    "bias before the soft-cap": _with("bias", _bias_before_softcap),
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
    "sink ignored": _with("sink", lambda given: {"sink": None}),
    "sink scaled": _with("sink", lambda given: {"sink": given["sink"] * scale_of(given)}),
    "sink capped": _with("sink", _capped_sink),
    "sink always 0": _with("sink", lambda given: {"sink": 0.0 * given["sink"]}),
    "sink taken for a weight": _with("sink", _weight_sink),
    "sink by key/value head": _with("sink", _of_key_heads),
    "sinks of interleaved heads": _with("sink", _interleaved_sinks),
    "sink counted twice": _with("sink", lambda given: {"sink": given["sink"] + math.log(2.0)}),
    "first of several sinks alone": _with(
        "sink", lambda given: {"sink": given["sink"] if given["sink"].ndim == 1 else given["sink"][:, 0]}
    ),
    "sink left out of lse": other_outputs(core, lambda right, given: (right[0], core(**{**given, "sink": None})[1])),
    "key lengths ignored": _with("k_lengths", lambda given: {"k_lengths": None, "causal": given.get("causal", False)}),
    "query lengths ignored": _with("q_lengths", lambda given: {"q_lengths": None}),
    "a length is the last index": _with(
        "k_lengths",
        lambda given: {"k_lengths": namespace(given["k"]).clip(given["k_lengths"] + 1, 0, given["k"].shape[2])},
    ),
    "bottom right of padded lengths": _with(
        "k_lengths",
        lambda given: {"offset": given["k"].shape[2] - given["q"].shape[2]} if given.get("causal") is True else {},
    ),
    "queries beyond their length have sinks": other_outputs(core, _sinks_of_slack),
    # As FlashAttention 2 has it.
    "lse of empty rows +inf": other_outputs(
        core, lambda right, given: (right[0], namespace(right[1]).where(right[1] == -math.inf, math.inf, right[1]))
    ),
    "dropped before normalising": _with("keep", _dropped_before_normalising),
    "dropout not scaled": _with("keep", lambda given: {"keep": _kept(given)}),
    "dropout scaled by the part kept": _with("keep", _by_part_kept),
    "dropout inverted": _with("keep", _inverted),
    "dropout left out": _with("keep", lambda given: {"keep": None}),
}
"""Wrong readings by name."""
