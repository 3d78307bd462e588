"""Plausible wrong readings of higher-order attention: what an implementation computes that follows another convention.

Each has the signature of the core without `implementation` and returns (out,). Verification has to tell them from the
core. Several are errors that published implementations have, or had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from refattn import equations
from refattn.mechanisms.higher_order import core
from refattn.mechanisms.higher_order.dense import masked, taylor
from refattn.mechanisms.higher_order.options import Options
from refattn.mechanisms.wrong import Changed, conventions, if_given, of_group_gradients, of_masks, recomputed
from refattn.ops.heads import repeat_heads
from refattn.ops.masks import allowed_pairs, both, causal_offset
from refattn.xp import Array, namespace

Out = tuple[Array]
Wrong = Callable[..., Out]


def _core(q: Array, k: Array, v: Array, **options: Any) -> Out:
    return (core.forward(q, k, v, implementation="dense", **options)[0],)


Given = dict[str, Any]


def _options(given: Given) -> Options:
    return Options.of({name: x for name, x in given.items() if name not in "qkv"})


def _recomputed(id: str, value: Callable[[Given, Given, Options], Array]) -> Wrong:
    """Return the core with another value of one equation: of the values up to it, all arguments and the options."""
    return recomputed(_core, {id: lambda seen, given: value(seen, given, _options(given))})


def _normalised(normal: Callable[[Array, float], Array]) -> Wrong:
    """Return the core with another layer normalisation, in calls that have one."""

    def of(name: str, id: str) -> Callable[[Given, Given], Array]:
        def value(seen: Given, given: Given) -> Array:
            options = _options(given)
            return normal(given[name], options.norm_eps) if options.layer_norm else seen[id]

        return value

    return recomputed(_core, {"HOL.1": of("q", "HOL.1"), "HOL.2": of("k", "HOL.2")})


def _unbiased(x: Array, eps: float) -> Array:
    xp = namespace(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    return centred / xp.sqrt(xp.sum(centred * centred, axis=-1, keepdims=True) / (x.shape[-1] - 1) + eps)


def _root_mean_square(x: Array, eps: float) -> Array:
    xp = namespace(x)
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps)


def _summed(given: Given, values: Array) -> Array:
    """Return the sum over the keys that each query may attend."""
    queries, keys, mask = given["q"].shape[2], given["k"].shape[2], given.get("mask")
    if given.get("key_mask") is not None:
        mask = both(mask, given["key_mask"][:, None, None, :])
    offset = causal_offset(given.get("causal", False), queries, keys)
    allowed = allowed_pairs(mask, offset, queries, keys, given["q"])
    return namespace(values).sum(masked(values, allowed), axis=-1, keepdims=True)


def _powers(seen: Given, given: Given, options: Options) -> Array:
    s = seen["HOL.3"]
    return sum((s**r for r in range(1, options.order + 1)), 0.0 * s + 1.0)


def _element_squares(seen: Given, given: Given, options: Options) -> Array:
    if options.order != 2:
        return seen["HOL.taylor"]
    q, k = seen["HOL.1"], repeat_heads(seen["HOL.2"], seen["HOL.1"].shape[1])
    scale = options.scale(q.shape[3])
    squares = (q * q) @ namespace(q).matrix_transpose(k * k) * (0.5 * scale * scale)
    return 1.0 + seen["HOL.3"] + squares


def _with(change: Callable[[Given, Options], Given]) -> Wrong:
    """Return the core with other arguments."""
    return Changed(_core, lambda given: change(given, _options(given)))


def _zeroed_keys(given: Given) -> Given:
    mask = given["key_mask"]
    return {"k": namespace(mask).where(mask[:, None, :, None], given["k"], 0.0), "key_mask": None}


def query_contraction(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Sum the squared scores of order 2 over the queries and keep the key, as the author's code does."""
    if Options.of(given).order != 2 or q.shape[2] != k.shape[2] or given.get("causal", False) is not False:
        return _core(q, k, v, **given)
    xp, values = namespace(q), repeat_heads(v, q.shape[1])
    with equations.trace() as traced:
        (out,) = _core(q, k, v, **given)
    squares = traced["HOL.3"] ** 2
    wrong = xp.matrix_transpose(xp.sum(squares, axis=-2, keepdims=True)) * values
    return (out + 0.5 * (wrong - squares @ values) / traced["HOL.divisor"],)


READINGS: dict[str, Wrong] = {
    "the exponential itself": _recomputed(  # softmax attention
        "HOL.taylor",
        lambda seen, given, options: namespace(seen["HOL.3"]).exp(seen["HOL.3"]) + options.normaliser.delta,
    ),
    # As the paper's formula for the normaliser reads.
    "a sum of exponentials divides": _recomputed(
        "HOL.5", lambda seen, given, options: _summed(given, namespace(seen["HOL.3"]).exp(seen["HOL.3"]))
    ),
    # Who takes equation 3 of the paper, the square alone, for a term.
    "factorials left out": _recomputed("HOL.taylor", _powers),
    "highest order left out": _recomputed(
        "HOL.taylor", lambda seen, given, options: taylor(seen["HOL.3"], max(options.order - 1, 0))
    ),
    # x_a^2, without the products of different elements.
    "squares of elements for order 2": _recomputed("HOL.taylor", _element_squares),
    # As the author's code does.
    "1 always subtracted": recomputed(
        _core,
        {
            "HOL.taylor": lambda seen, given: seen["HOL.taylor"] + (_options(given).normaliser.delta - 1.0),
            "HOL.5": lambda seen, given: _summed(given, seen["HOL.4"]),
        },
    ),
    "nothing subtracted": _with(lambda given, options: {"normaliser": replace(options.normaliser, delta=0.0)}),
    # In the numerator where both were asked, and the other way round.
    "subtracted in one sum alone": _recomputed(
        "HOL.5",
        lambda seen, given, options: _summed(given, seen["HOL.4" if options.normaliser.plain else "HOL.taylor"]),
    ),
    # Or put in where it was left out.
    "layer normalisation left out": _with(lambda given, options: {"layer_norm": not options.layer_norm}),
    "unbiased variance": _normalised(_unbiased),
    "mean not subtracted": _normalised(_root_mean_square),
    "nothing added to the variance": _with(lambda given, options: {"norm_eps": 0.0}),
    "alpha left out": _with(lambda given, options: {"alpha": 1.0 if options.alpha != 1.0 else Options.alpha}),
    "scale on queries and keys": _with(
        lambda given, options: {"alpha": options.alpha**2 * math.sqrt(given["q"].shape[3])}
    ),
    "scale without the width": _with(lambda given, options: {"alpha": options.alpha / math.sqrt(given["q"].shape[3])}),
    # A zeroed key has a score of 0, and a weight of 1.
    "padding by zeroed keys": if_given(_core, "key_mask", _zeroed_keys),
    **of_masks(_core, "mask ignored", "mask inverted"),
    **of_masks(_core, "top-left causality", "bottom-right causality", "interleaved groups"),
    "normaliser ignored": _recomputed(
        "HOL.divisor",
        lambda seen, given, options: namespace(seen["HOL.5"]).where(seen["HOL.5"] == 0.0, 1.0, seen["HOL.5"]),
    ),
    "order 2 summed over queries": query_contraction,
}

WRONG = {
    **conventions(READINGS),
    **of_group_gradients(core),
}
