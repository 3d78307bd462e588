"""Rounding scales where kernels round more than the dense implementation does, in units of the unit roundoff.

Those of all other equations are measured, see `refattn.instruments.sized`. `inputs` holds the arguments of the call and
d_out; `values` the traced equations. If an equation has passes, its size is that of the first, which the others
resemble.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.graph_energy.options import integrator_of, threshold_of
from refattn.mechanisms.graph_energy.options.threshold import Proximal
from refattn.mechanisms.record import RoundingScale
from refattn.mechanisms.rounding_sizes import of_exponents, of_sum
from refattn.xp import Array, namespace

Given = Mapping[str, Any]


def number_of(inputs: Given, name: str, usual: float) -> Any:
    value = inputs.get(name, usual)
    return usual if value is None else abs(value)


def stages_of(inputs: Given) -> int:
    return int(inputs.get("steps", 10)) * {"heun": 2, "rk4": 4}.get(integrator_of(inputs), 1)


def tau_of(inputs: Given) -> Any:
    """Return the threshold of a call, 0.5 where it is not"""
    tau = threshold_of(inputs).tau
    return 0.5 if tau is None else abs(tau)


def _weights(inputs: Given, values: Given) -> Array:
    return of_exponents(values["GE.2"], values.get("GE.masked", values["GE.1"]))


def _next(inputs: Given, values: Given) -> Array:
    # A threshold after the step subtracts; otherwise a sum that is rounded once.
    x = values["GE.8"]
    proximal = isinstance(threshold_of(inputs), Proximal)
    return abs(x) + (2.0 * tau_of(inputs) * number_of(inputs, "step", 1.0) if proximal else 0.0)


def _single(id: str, terms_of: Any) -> RoundingScale:
    """Return the size for a number that sums over all elements, and over stages like the first."""

    def size(inputs: Given, values: Given) -> Array:
        if "dGE.7" not in values:
            return abs(values[id])
        terms = terms_of(values)
        count = max(math.prod(terms.shape), 1) * max(stages_of(inputs), 1)
        return of_sum(count, values[id], stages_of(inputs) * namespace(terms).sum(terms * terms))

    return size


ROUNDING_SCALES: dict[str, RoundingScale | None] = {
    "GE.2": _weights,
    "GE.8": _next,
    "dGE.mu": _single("dGE.mu", lambda values: values["dGE.7"] * (abs(values["GE.point"]) + abs(values["GE.5"]))),
    "dGE.kappa": _single("dGE.kappa", lambda values: values["dGE.7"] * values["GE.point"]),
    "dGE.coefficients": _single("dGE.coefficients", lambda values: values["dGE.6"]),
    "dGE.step": _single("dGE.step", lambda values: values["dGE.8"] * (abs(values["GE.7"]) + abs(values["GE.point"]))),
    **dict.fromkeys(("GE.point", "GE.7", "dGE.7", "dGE.8")),
}

STORED = dict.fromkeys(("GE.12", "dGE.1"))
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products. Scores flow in float32, where a threshold that compares them can be met."""
