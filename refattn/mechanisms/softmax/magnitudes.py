"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

A result that is rounded once errs relative to its own value; that is the rule for every equation that is absent here.
A sum of n terms is rounded n times, each time relative to a partial sum. Partial sums of terms t wander about as far
as |sum t| + sqrt(sum t^2), and n independent errors of that size add up to sqrt(n) times it::

    size = sqrt(n) (|sum t| + sqrt(sum t^2))

whatever the order of the terms. `inputs` holds the arguments of the call and d_out; `values` the traced equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, namespace

Given = Mapping[str, Any]
Magnitude = Callable[[Given, Given], Array]


def _size(terms: int, value: Array, squares: Array) -> Array:
    """Return the size of the error of a sum, from its value and the sum of the squares of its terms."""
    xp = namespace(value)
    return math.sqrt(terms) * (xp.abs(value) + xp.sqrt(squares))


def _heads(inputs: Given, name: str) -> Array:
    return repeat_heads(inputs[name], inputs["q"].shape[1])


def _scale(inputs: Given) -> float:
    return abs(inputs["scale"] if "scale" in inputs else 1.0 / math.sqrt(inputs["q"].shape[-1]))


def _squares(a: Array, b: Array) -> Array:
    """Return the sum of the squares of the terms of the matrix product a b^T."""
    return (a * a) @ namespace(a).matrix_transpose(b * b)


def _scores(inputs: Given, values: Given) -> Array:
    squares = _squares(inputs["q"], _heads(inputs, "k")) * _scale(inputs) ** 2
    return _size(inputs["q"].shape[-1], values["SM.1"], squares)


def _total(inputs: Given, values: Given) -> Array:
    return math.sqrt(max(inputs["k"].shape[2], 1)) * values["SM.6"]


def _weights(inputs: Given, values: Given) -> Array:
    # Kernels compute exp(m - lse): what is rounded is an exponent of the size of lse.
    xp = namespace(inputs["q"])
    lse = values["SM.9"][..., None]
    return values["SM.7"] * (2.0 + xp.abs(xp.where(xp.isfinite(lse), lse, 0.0)))


def _out(inputs: Given, values: Given) -> Array:
    transposed = namespace(inputs["v"]).matrix_transpose(_heads(inputs, "v"))
    return _size(inputs["k"].shape[2], values["SM.8"], _squares(values["SM.7"], transposed))


def _lse(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    lse = values["SM.9"]
    return xp.where(xp.isfinite(lse), xp.abs(xp.where(xp.isfinite(lse), lse, 0.0)) + 1.0, 0.0)


def _d_weights(inputs: Given, values: Given) -> Array:
    return _size(inputs["v"].shape[-1], values["dSM.7"], _squares(inputs["d_out"], _heads(inputs, "v")))


def _d_total(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = values["dSM.7"] * values["SM.7"]
    inner = xp.sum(terms, axis=-1, keepdims=True)
    squares = xp.sum(terms * terms, axis=-1, keepdims=True)
    over_keys = _size(inputs["k"].shape[2], inner, squares)
    # Kernels take the same number from the output, with the errors that it has by then: do_i . o_i.
    inherited = inputs["d_out"] * _out(inputs, values)
    over_width = xp.sqrt(xp.sum(inherited * inherited, axis=-1, keepdims=True))
    return (over_keys + over_width) / values["SM.6"] + _d_total_from_out(inputs, values)


def _d_total_from_out(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.sum(xp.abs(inputs["d_out"] * values["SM.8"]), axis=-1, keepdims=True) / values["SM.6"]


def _d_exponentials(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.abs(values["dSM.7"]) / values["SM.6"] + xp.abs(values["dSM.6"])


def _d_scores(values: Given) -> Array:
    return values["dSM.1"] if "dSM.1" in values else values["dSM.3"]


def _d_capped_scores(inputs: Given, values: Given) -> Array:
    # The slope 1 - tanh^2 is a difference of numbers near 1 where the cap bites.
    return 2.0 * namespace(inputs["q"]).abs(values["dSM.3"])


def _d_q(inputs: Given, values: Given) -> Array:
    transposed = namespace(inputs["k"]).matrix_transpose(_heads(inputs, "k"))
    squares = _squares(_d_scores(values), transposed) * _scale(inputs) ** 2
    return _size(inputs["k"].shape[2], values["dSM.q"], squares)


def _d_k(inputs: Given, values: Given) -> Array:
    return _per_key(inputs, values["dSM.k"], _d_scores(values), inputs["q"], _scale(inputs))


def _d_v(inputs: Given, values: Given) -> Array:
    return _per_key(inputs, values["dSM.v"], values["SM.7"], inputs["d_out"], 1.0)


def _per_key(inputs: Given, value: Array, pairs: Array, rows: Array, factor: float) -> Array:
    """Return the size for a sum over the queries of all heads that share a key/value head."""
    xp = namespace(pairs)
    squares = sum_heads(_squares(xp.matrix_transpose(pairs), xp.matrix_transpose(rows)), inputs["k"].shape[1])
    terms = rows.shape[2] * rows.shape[1] // max(inputs["k"].shape[1], 1)
    return _size(max(terms, 1), value, squares * factor**2)


def _d_scale(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = _d_scores(values) * values["SM.1"] / _scale(inputs)
    return _size(max(math.prod(terms.shape), 1), values["dSM.scale"], xp.sum(terms * terms))


def _d_softcap(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = values["dSM.3"]
    return _size(max(math.prod(terms.shape), 1), values["dSM.softcap"], xp.sum(terms * terms))


MAGNITUDES: dict[str, Magnitude] = {
    "SM.1": _scores,
    "SM.6": _total,
    "SM.7": _weights,
    "SM.8": _out,
    "SM.9": _lse,
    "dSM.7": _d_weights,
    "dSM.6": _d_total,
    "dSM.5": _d_exponentials,
    "dSM.1": _d_capped_scores,
    "dSM.q": _d_q,
    "dSM.k": _d_k,
    "dSM.v": _d_v,
    "dSM.scale": _d_scale,
    "dSM.softcap": _d_softcap,
}

STORED: dict[str, Magnitude] = {
    "SM.7": lambda inputs, values: values["SM.7"],
    "dSM.6": _d_total_from_out,
    "dSM.3": lambda inputs, values: values["dSM.3"],
    "dSM.1": lambda inputs, values: values["dSM.1"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products, and the output from which it takes the inner product of dSM.6."""
