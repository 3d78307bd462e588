"""Rounding scales where kernels round more than the dense implementation does, in units of the unit roundoff.

Those of all other equations are measured, see `refattn.instruments.sized`; `values.size` has them. `inputs` holds the
arguments of the call and d_out; `values` the traced equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from refattn.mechanisms.record import RoundingScale
from refattn.mechanisms.rounding_sizes import heads_of, of_all, scale_of
from refattn.ops.heads import sum_heads
from refattn.xp import Array, namespace, transpose

Given = Mapping[str, Any]


def _weights(inputs: Given, values: Any) -> Array:
    # Kernels compute exp(m - lse), and round an exponent of the size of lse.
    xp, lse = namespace(inputs["q"]), values["SM.lse"][..., None]
    return values["SM.4"] * (2.0 + xp.abs(xp.where(xp.isfinite(lse), lse, 0.0)))


def _d_out(inputs: Given, values: Any) -> Array:
    """Return d_out, 0 for queries that attend nothing, whatever they hold."""
    xp = namespace(inputs["q"])
    return xp.where(xp.isfinite(values["SM.lse"])[..., None], inputs["d_out"], 0.0)


def _d_total(inputs: Given, values: Any) -> Array:
    # Kernels take the inner product from the output, with the errors that it has by then: do_i . o_i.
    inherited = _d_out(inputs, values) * values.size("SM.5")
    over_width = namespace(inherited).sum(inherited**2, axis=-1, keepdims=True) ** 0.5
    return over_width / values["SM.total"] + _d_total_from_out(inputs, values)


def _d_total_from_out(inputs: Given, values: Any) -> Array:
    """Return the size of the same where the output was rounded to its storage type first."""
    xp, terms = namespace(inputs["q"]), _d_out(inputs, values) * values["SM.5"]
    return xp.sum(xp.abs(terms), axis=-1, keepdims=True) / values["SM.total"]


def _recomputed(inputs: Given, values: Any) -> Array:
    """Return what is missing where weights stand in the backward as they came out of the forward, relative to them.

    Kernels compute the scores once more, and exp(m - lse) from these is no longer of sum 1. An error e of a score and
    another one of the forward change a weight w by w (e' - sum w e); the definition's, with e' = e, has 2 w e^2 less in
    the square: nearly all where a key has nearly all of the weight.
    """
    return values.size("SM.1") * namespace(inputs["q"]).sqrt(2.0 * values["SM.4"])


def _d_masked(inputs: Given, values: Any) -> Array:
    return namespace(inputs["q"]).abs(values["dSM.2"]) * _recomputed(inputs, values)


def _d_v(inputs: Given, values: Any) -> Array:
    errors = values.get("SM.kept", values["SM.4"]) * _recomputed(inputs, values)
    squares = transpose(errors**2) @ _d_out(inputs, values) ** 2
    return sum_heads(squares, inputs["v"].shape[1]) ** 0.5


def _d_scale(inputs: Given, values: Any) -> Array:
    # Kernels sum over all pairs.
    scale = scale_of(inputs)
    products = values["SM.1"] / scale if scale else inputs["q"] @ transpose(heads_of(inputs, "k"))
    return of_all(values["dSM.scale"], values.get("dSM.1", values["dSM.2"]) * products)


def _log(x: Array) -> Array:
    """Return the size of the argument that an exponential is of, 0 where this is -inf: there it is exact."""
    xp = namespace(x)
    return xp.where(x > 0.0, xp.abs(xp.log(xp.where(x > 0.0, x, 1.0))), 0.0)


def _exponent(id: str, inputs: Given, values: Any) -> Array:
    return values[id] * _log(values[id])


def _d_masked_of_exponent(inputs: Given, values: Any) -> Array:
    return namespace(inputs["q"]).abs(values["dSM.2"]) * _log(values["SM.4"])


def _d_v_of_exponent(inputs: Given, values: Any) -> Array:
    errors = values.get("SM.kept", values["SM.4"]) * _log(values["SM.4"])
    return sum_heads(transpose(errors**2) @ _d_out(inputs, values) ** 2, inputs["v"].shape[1]) ** 0.5


ROUNDING_SCALES: dict[str, RoundingScale | None] = {
    "SM.4": _weights,
    "dSM.scale": _d_scale,
    "dSM.softcap": lambda inputs, values: of_all(values["dSM.softcap"], values["dSM.2"]),
}

FURTHER: dict[str, RoundingScale] = {"dSM.total": _d_total, "dSM.2": _d_masked, "dSM.v": _d_v}

STORED: dict[str, RoundingScale | None] = {
    **dict.fromkeys(("SM.4", "SM.kept", "dSM.2", "dSM.1")),
    "dSM.total": _d_total_from_out,
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products, and the output from which it takes the inner product of dSM.total."""

NAMED: dict[str, dict[str, RoundingScale]] = {
    "exponent": {
        "SM.3": partial(_exponent, "SM.3"),
        "SM.sunk": partial(_exponent, "SM.sunk"),
        "dSM.2": _d_masked_of_exponent,
        "dSM.v": _d_v_of_exponent,
    }
}
"""What a kernel may round beside that: the argument m - t of the exponentials, in the backward m - lse."""
