"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

A result that is rounded once errs relative to its own value; that is the rule for every equation that is absent here.
The size for a sum of n terms t is sqrt(n) (|sum t| + sqrt(sum t^2)), whatever the order of the terms, as in
docs/tolerances.md. `inputs` holds the arguments of the call and d_out; `values` the traced equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, max_last, namespace

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
    return _size(inputs["q"].shape[-1], values["GROW.1"], squares)


def _total(inputs: Given, values: Given) -> Array:
    return math.sqrt(max(inputs["k"].shape[2], 1)) * values["GROW.4"]


def _weights(inputs: Given, values: Given) -> Array:
    # Kernels compute exp(m - lse): what is rounded is an exponent of the size of lse.
    xp = namespace(inputs["q"])
    top = max_last(values.get("GROW.2", values["GROW.1"]))
    lse = xp.where(xp.isfinite(top), top, 0.0) + xp.log(values["GROW.4"])
    return values["GROW.5"] * (2.0 + xp.abs(lse))


def _out(inputs: Given, values: Given) -> Array:
    transposed = namespace(inputs["v"]).matrix_transpose(_heads(inputs, "v"))
    return _size(inputs["k"].shape[2], values["GROW.6"], _squares(values["GROW.5"], transposed))


def _d_weights(inputs: Given, values: Given) -> Array:
    return _size(inputs["v"].shape[-1], values["dGROW.5"], _squares(inputs["d_out"], _heads(inputs, "v")))


def _d_total(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = values["dGROW.5"] * values["GROW.5"]
    inner = xp.sum(terms, axis=-1, keepdims=True)
    over_keys = _size(inputs["k"].shape[2], inner, xp.sum(terms * terms, axis=-1, keepdims=True))
    # Kernels take the same number from the output, with the errors that it has by then: do_i . o_i.
    inherited = inputs["d_out"] * _out(inputs, values)
    over_width = xp.sqrt(xp.sum(inherited * inherited, axis=-1, keepdims=True))
    return (over_keys + over_width) / values["GROW.4"] + _d_total_from_out(inputs, values)


def _d_total_from_out(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.sum(xp.abs(inputs["d_out"] * values["GROW.6"]), axis=-1, keepdims=True) / values["GROW.4"]


def _d_scores(inputs: Given, values: Given) -> Array:
    # A difference of two numbers that may be nearly equal.
    xp = namespace(inputs["q"])
    return values["GROW.5"] * (xp.abs(values["dGROW.5"]) + xp.abs(values["GROW.4"] * values["dGROW.4"]))


def _d_q(inputs: Given, values: Given) -> Array:
    transposed = namespace(inputs["k"]).matrix_transpose(_heads(inputs, "k"))
    squares = _squares(values["dGROW.1"], transposed) * _scale(inputs) ** 2
    return _size(inputs["k"].shape[2], values["dGROW.q"], squares)


def _d_k(inputs: Given, values: Given) -> Array:
    return _per_key(inputs, values["dGROW.k"], values["dGROW.1"], inputs["q"], _scale(inputs))


def _d_v(inputs: Given, values: Given) -> Array:
    return _per_key(inputs, values["dGROW.v"], values["GROW.5"], inputs["d_out"], 1.0)


def _per_key(inputs: Given, value: Array, pairs: Array, rows: Array, factor: float) -> Array:
    """Return the size for a sum over the queries of all heads that share a key/value head."""
    xp = namespace(pairs)
    squares = sum_heads(_squares(xp.matrix_transpose(pairs), xp.matrix_transpose(rows)), inputs["k"].shape[1])
    terms = rows.shape[2] * rows.shape[1] // max(inputs["k"].shape[1], 1)
    return _size(max(terms, 1), value, squares * factor**2)


def _d_scale(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = values["dGROW.1"] * (inputs["q"] @ xp.matrix_transpose(_heads(inputs, "k")))
    return _size(max(math.prod(terms.shape), 1), values["dGROW.scale"], xp.sum(terms * terms))


MAGNITUDES: dict[str, Magnitude] = {
    "GROW.1": _scores,
    "GROW.4": _total,
    "GROW.5": _weights,
    "GROW.6": _out,
    "dGROW.5": _d_weights,
    "dGROW.4": _d_total,
    "dGROW.1": _d_scores,
    "dGROW.q": _d_q,
    "dGROW.k": _d_k,
    "dGROW.v": _d_v,
    "dGROW.scale": _d_scale,
}

STORED: dict[str, Magnitude] = {
    "GROW.5": lambda inputs, values: values["GROW.5"],
    "dGROW.4": _d_total_from_out,
    "dGROW.1": lambda inputs, values: values["dGROW.1"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products, and the output from which it takes the inner product of dGROW.4."""
