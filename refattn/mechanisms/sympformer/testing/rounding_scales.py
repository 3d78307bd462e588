"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

A result that is rounded once errs relative to its own value; that is the rule for every equation that is absent here.
What sizes are made from stands in `refattn.mechanisms.sizes`. `inputs` holds the arguments of the call and d_out;
`values` the traced equations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Magnitude
from refattn.mechanisms.sizes import heads_of, of_sum, scale_of, scores, squares_of
from refattn.ops.heads import sum_heads
from refattn.xp import Array, namespace

Given = Mapping[str, Any]


def _transposed(x: Array) -> Array:
    return namespace(x).matrix_transpose(x)


def _tokens(inputs: Given) -> int:
    return int(inputs["q"].shape[2])


def _z(values: Given) -> Array:
    return namespace(values["SYMP.7"]).exp(values["SYMP.7"])


def _scores(inputs: Given, values: Given) -> Array:
    return scores(inputs, values["SYMP.unmasked"])


def _total(inputs: Given, values: Given) -> Array:
    return math.sqrt(_tokens(inputs)) * values["SYMP.total"]


def _lse(values: Given) -> Array:
    return values["SYMP.largest"] + namespace(values["SYMP.total"]).log(values["SYMP.total"])


def _weights(inputs: Given, values: Given) -> Array:
    # Kernels compute exp(m - lse): what is rounded is an exponent of the size of lse.
    return values["SYMP.6"] * (2.0 + namespace(inputs["q"]).abs(_lse(values)))


def _log_z(inputs: Given, values: Given) -> Array:
    # lse and log n are rounded before their difference is; at the bound nothing is.
    xp = namespace(inputs["q"])
    size = xp.abs(_lse(values)) + math.log(_tokens(inputs)) + 1.0
    return xp.where(xp.abs(values["SYMP.7"]) < 20.0, size, 0.0)


def _push(inputs: Given, values: Given) -> Array:
    # A square and a quotient, or an exponential of a doubled number.
    return namespace(inputs["q"]).abs(values["SYMP.10"]) * (2.0 + 2.0 * namespace(inputs["q"]).abs(values["SYMP.7"]))


def _factor(values: Given) -> Array:
    """Return the size of 1 + (u_i + u_j) / 2, whose terms may cancel."""
    size = namespace(values["SYMP.10"]).abs(values["SYMP.10"])
    return 1.0 + 0.5 * size + 0.5 * _transposed(size)


def _pairs(inputs: Given, values: Given) -> Array:
    return 2.0 * values["SYMP.6"] * _factor(values)


def _out(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["v"])
    squares = squares_of(values["SYMP.11"], _transposed(heads_of(inputs, "v"))) * _z(values) ** 2
    return of_sum(_tokens(inputs), values["SYMP.12"], squares) + xp.abs(values["SYMP.7"] * values["SYMP.12"])


def _d_pairs(inputs: Given, values: Given) -> Array:
    squares = squares_of(inputs["d_out"], heads_of(inputs, "v")) * _z(values) ** 2
    return of_sum(inputs["v"].shape[-1], values["dSYMP.11"], squares)


def _d_push(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = 0.5 * values["dSYMP.11"] * values["SYMP.6"]
    rows, columns = (xp.sum(terms * terms, axis=axis, keepdims=True) for axis in (-1, -2))
    return of_sum(2 * _tokens(inputs), values["dSYMP.10"], rows + _transposed(columns))


def _d_kinetic(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.abs(values["dSYMP.kinetic"]) * (2.0 + 2.0 * xp.abs(values["SYMP.7"]))


def _along(inputs: Given, values: Given) -> Array:
    """Return the size of do . o, with the errors that o has by then."""
    xp = namespace(inputs["q"])
    terms = inputs["d_out"] * values["SYMP.12"]
    inherited = inputs["d_out"] * _out(inputs, values)
    squares = xp.sum(terms * terms, axis=-1, keepdims=True)
    over_width = of_sum(inputs["v"].shape[-1], xp.sum(terms, axis=-1, keepdims=True), squares)
    return over_width + xp.sqrt(xp.sum(inherited * inherited, axis=-1, keepdims=True))


def _d_log_z(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return _along(inputs, values) + 4.0 * xp.abs(values["SYMP.10"] * values["dSYMP.10"]) + xp.abs(values["dSYMP.7"])


def _d_weights(inputs: Given, values: Given) -> Array:
    return 2.0 * namespace(inputs["q"]).abs(values["dSYMP.11"]) * _factor(values)


def _d_total(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = values["dSYMP.6"] * values["SYMP.6"]
    inner = xp.sum(terms, axis=-1, keepdims=True)
    over_keys = of_sum(_tokens(inputs), inner, xp.sum(terms * terms, axis=-1, keepdims=True))
    # Kernels take the inner product from the output.
    return (over_keys + _along(inputs, values) + xp.abs(values["dSYMP.7"])) / values["SYMP.total"]


def _d_exponentials(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.abs(values["dSYMP.6"]) / values["SYMP.total"] + xp.abs(values["dSYMP.total"])


def _d_q(inputs: Given, values: Given) -> Array:
    squares = squares_of(values["dSYMP.5"], _transposed(heads_of(inputs, "k"))) * scale_of(inputs) ** 2
    return of_sum(_tokens(inputs), values["dSYMP.q"], squares)


def _d_k(inputs: Given, values: Given) -> Array:
    return _per_key(inputs, values["dSYMP.k"], values["dSYMP.5"], scale_of(inputs) * inputs["q"])


def _d_v(inputs: Given, values: Given) -> Array:
    return _per_key(inputs, values["dSYMP.v"], values["SYMP.11"], _z(values) * inputs["d_out"])


def _per_key(inputs: Given, value: Array, pairs: Array, rows: Array) -> Array:
    """Return the size for a sum over the queries of all heads that share a key/value head."""
    squares = sum_heads(squares_of(_transposed(pairs), _transposed(rows)), inputs["k"].shape[1])
    return of_sum(_tokens(inputs) * rows.shape[1] // max(inputs["k"].shape[1], 1), value, squares)


ROUNDING_SCALES: dict[str, Magnitude] = {
    "SYMP.unmasked": _scores,
    "SYMP.total": _total,
    "SYMP.6": _weights,
    "SYMP.7": _log_z,
    "SYMP.10": _push,
    "SYMP.11": _pairs,
    "SYMP.12": _out,
    "dSYMP.11": _d_pairs,
    "dSYMP.10": _d_push,
    "dSYMP.kinetic": _d_kinetic,
    "dSYMP.7": _d_log_z,
    "dSYMP.6": _d_weights,
    "dSYMP.total": _d_total,
    "dSYMP.exponentials": _d_exponentials,
    "dSYMP.q": _d_q,
    "dSYMP.k": _d_k,
    "dSYMP.v": _d_v,
}


def _rounded(id: str) -> Magnitude:
    return lambda inputs, values: values[id]


STORED: dict[str, Magnitude] = {id: _rounded(id) for id in ("SYMP.11", "dSYMP.10", "dSYMP.5")}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights of the values and the adjoint of the
scores, before their matrix products, and the gradient of u, which one pass over the pairs hands to the next."""
