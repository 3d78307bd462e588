"""How large the terms are that each equation sums: what a rounding error is relative to.

A sum of terms that cancel is small, its rounding error is not: it is relative to the sum of their absolute values, here
by equation id. An equation that is absent rounds relative to its own value. Error budgets are made from these.

`inputs` holds the arguments of the call and d_out; `values` the traced equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, namespace

Given = Mapping[str, Any]
Magnitude = Callable[[Given, Given], Array]


def _scale(inputs: Given) -> float:
    return abs(inputs.get("scale") or 1.0 / math.sqrt(inputs["q"].shape[-1]))


def _k_sizes(inputs: Given) -> Array:
    return repeat_heads(namespace(inputs["k"]).abs(inputs["k"]), inputs["q"].shape[1])


def _v_sizes(inputs: Given) -> Array:
    return repeat_heads(namespace(inputs["v"]).abs(inputs["v"]), inputs["q"].shape[1])


def _scores(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return _scale(inputs) * (xp.abs(inputs["q"]) @ xp.matrix_transpose(_k_sizes(inputs)))


def _weights(inputs: Given, values: Given) -> Array:
    # Kernels compute exp(m - lse): what is rounded is an exponent of the size of lse.
    xp = namespace(inputs["q"])
    lse = values["SM.9"][..., None]
    return values["SM.7"] * (2.0 + xp.abs(xp.where(xp.isfinite(lse), lse, 0.0)))


def _out(inputs: Given, values: Given) -> Array:
    return values["SM.7"] @ _v_sizes(inputs)


def _lse(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    lse = values["SM.9"]
    return xp.where(xp.isfinite(lse), xp.abs(lse) + 1.0, 0.0)


def _d_weights(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["v"])
    return xp.abs(inputs["d_out"]) @ xp.matrix_transpose(_v_sizes(inputs))


def _d_total(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["v"])
    return xp.sum(_d_weights(inputs, values) * values["SM.7"], axis=-1, keepdims=True) / values["SM.6"]


def _d_total_from_out(inputs: Given, values: Given) -> Array:
    # Kernels take the sum over keys from the stored output: sum_j dw_ij w_ij = do_i . o_i.
    xp = namespace(inputs["v"])
    return xp.sum(xp.abs(inputs["d_out"] * values["SM.8"]), axis=-1, keepdims=True) / values["SM.6"]


def _d_exponentials(inputs: Given, values: Given) -> Array:
    return _d_weights(inputs, values) / values["SM.6"] + _d_total(inputs, values)


def _d_scores(values: Given) -> Array:
    return values["dSM.1"] if "dSM.1" in values else values["dSM.3"]


def _d_q(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return _scale(inputs) * (xp.abs(_d_scores(values)) @ _k_sizes(inputs))


def _d_k(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    per_head = _scale(inputs) * (xp.matrix_transpose(xp.abs(_d_scores(values))) @ xp.abs(inputs["q"]))
    return sum_heads(per_head, inputs["k"].shape[1])


def _d_v(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return sum_heads(xp.matrix_transpose(values["SM.7"]) @ xp.abs(inputs["d_out"]), inputs["v"].shape[1])


def _d_scale(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.sum(xp.abs(_d_scores(values)) * _scores(inputs, values)) / _scale(inputs)


def _d_softcap(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.sum(xp.abs(values["dSM.3"]))


MAGNITUDES: dict[str, Magnitude] = {
    "SM.1": _scores,
    "SM.7": _weights,
    "SM.8": _out,
    "SM.9": _lse,
    "dSM.7": _d_weights,
    "dSM.6": _d_total,
    "dSM.5": _d_exponentials,
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
    "dSM.1": lambda inputs, values: _d_scores(values),
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products, and the output from which it takes the inner product of dSM.6."""
