"""Rounding scales where kernels round more than the dense implementation does, in units of the unit roundoff.

Those of all other equations are measured, see `refattn.instruments.sized`; `values.size` has them. `inputs` holds the
arguments of the call and d_out; `values` the traced equations.

Implementations with features are what this attention is for. They sum over keys first and over C(d + p, p) features
then, so that the numerator and the normaliser do not err together; both, and T_p itself, are granted what such a sum
may err by, up to `FEATURES` of them: who has more computes the polynomial of the score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.higher_order.dense import taylor
from refattn.mechanisms.higher_order.options import Options
from refattn.mechanisms.record import RoundingScale
from refattn.xp import Array, namespace

Given = Mapping[str, Any]

FEATURES = 4096


def _features(inputs: Given) -> int:
    d, p = inputs["q"].shape[-1], Options.of(inputs).order
    return min(math.comb(d + p, p), FEATURES)


def _values(inputs: Given, values: Any) -> Array:
    sizes = taylor(namespace(inputs["q"]).abs(values["HOL.3"]), Options.of(inputs).order)
    return math.sqrt(_features(inputs)) * sizes


def _over_features(id: str, terms: str) -> RoundingScale:
    """Return what a sum over an axis of q or k, `terms`, errs by if it is one over features, too."""

    def size(inputs: Given, values: Any) -> Array:
        count = max(inputs[terms].shape[2], 1)
        return values.size(id) * (math.sqrt((count + _features(inputs)) / count) - 1.0)

    return size


def _d_divisor(inputs: Given, values: Any) -> Array:
    xp = namespace(inputs["q"])
    # Kernels take o with the errors that it has by then.
    inherited = inputs["d_out"] * values.size("HOL.summed") / values["HOL.divisor"]
    over_width = xp.sqrt(xp.sum(inherited * inherited, axis=-1, keepdims=True))
    return over_width / xp.abs(values["HOL.divisor"])


ROUNDING_SCALES: dict[str, RoundingScale | None] = {"HOL.taylor": _values}

FURTHER: dict[str, RoundingScale] = {
    "HOL.summed": _over_features("HOL.summed", "k"),
    "HOL.5": _over_features("HOL.5", "k"),
    "dHOL.divisor": _d_divisor,
    "dHOL.v": _over_features("dHOL.v", "q"),
}


def _d_divisor_from_out(inputs: Given, values: Any) -> Array:
    xp = namespace(inputs["q"])
    inner = xp.sum(xp.abs(inputs["d_out"] * values["HOL.6"]), axis=-1, keepdims=True)
    return inner / xp.abs(values["HOL.divisor"])


STORED: dict[str, RoundingScale | None] = {
    **dict.fromkeys(("HOL.1", "HOL.2", "HOL.4", "dHOL.summed", "dHOL.3")),
    "dHOL.divisor": _d_divisor_from_out,
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: what enters matrix products (the normalised
queries and keys, the weights, the adjoints of the numerator and of the scores), and the output whose inner product
dHOL.divisor is."""
