"""Rounding scales where kernels round more than the dense implementation does, in units of the unit roundoff.

Those of all other equations are measured, see `refattn.instruments.sized`; `values.size` has them. `inputs` holds the
arguments of the call and d_out; `values` the traced equations. For an equation that has passes the size is that of the
first, which the others resemble.

Steps may be solutions of equations that iterations find: their errors do not add up as those of other operations do,
so that what is relative to its own value stands here, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.graph_energy.forces import COUPLINGS, Coupling, Polynomial, polynomial
from refattn.mechanisms.graph_energy.options import Proximal
from refattn.mechanisms.graph_energy.testing import given
from refattn.mechanisms.record import RoundingScale
from refattn.mechanisms.sizes import of_sum
from refattn.xp import Array, namespace

Given = Mapping[str, Any]


def number_of(inputs: Given, name: str, usual: float) -> Any:
    value = inputs.get(name, usual)
    return usual if value is None else abs(value)


def stages_of(inputs: Given) -> int:
    return int(inputs.get("steps", 10)) * {"heun": 2, "rk4": 4}.get(given.integrator_of(inputs), 1)


def coupling_of(inputs: Given) -> Coupling:
    known = given.coupling_of(inputs)
    if isinstance(known, Polynomial):
        return polynomial([float(a) for a in known.coefficients])
    return known if isinstance(known, Coupling) else COUPLINGS[known]


def tau_of(inputs: Given) -> Any:
    """Return the threshold of a call, 0.5 where it is not given."""
    tau = given.threshold_of(inputs).tau
    return 0.5 if tau is None else abs(tau)


def _softmax(id: str, scores: str) -> RoundingScale:
    def size(inputs: Given, values: Given) -> Array:
        xp, weights = namespace(inputs["q"]), values[id]
        masked = values.get(scores, values["GE.1"])
        exponent = xp.where(xp.isfinite(masked), xp.abs(masked), 0.0)
        largest = xp.max(exponent, axis=-1, keepdims=True) if exponent.shape[-1] else exponent
        # What is rounded is an exponent, of the size of a score, and a sum over the row.
        return weights * (2.0 + exponent + largest + math.sqrt(max(weights.shape[-1], 1)))

    return size


def _pairs(inputs: Given, values: Given) -> tuple[Array, Array]:
    """Return w g(x_j - x_i) and its error, (b, h, i, j, c), of the first stage.

    Differences are rounded relative to the scores, and implementations that never take them subtract products of that
    size.
    """
    xp, coupling = namespace(inputs["q"]), coupling_of(inputs)
    x, graph = values.get("GE.point", values["GE.5"]), values["GE.links"][..., None]
    between = x[:, :, None, :, :] - x[:, :, :, None, :]
    sizes = xp.abs(x[:, :, None, :, :]) + xp.abs(x[:, :, :, None, :])
    return graph * coupling.force(between), graph * (sizes * xp.abs(coupling.slope(between)) + xp.abs(between))


def _coupled(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    pulls, errors = _pairs(inputs, values)
    total = xp.sum(pulls, axis=3)
    return of_sum(pulls.shape[3], total, xp.sum(pulls * pulls, axis=3)) + xp.sqrt(xp.sum(errors * errors, axis=3))


def _next(inputs: Given, values: Given) -> Array:
    # A threshold after the step subtracts; otherwise a sum that is rounded once.
    x = values["GE.8"]
    proximal = isinstance(given.threshold_of(inputs), Proximal)
    return abs(x) + (2.0 * tau_of(inputs) * number_of(inputs, "step", 1.0) if proximal else 0.0)


def _d_point(inputs: Given, values: Given) -> Array:
    xp, coupling = namespace(inputs["q"]), coupling_of(inputs)
    x, graph, d = values["GE.point"], values["GE.links"][..., None], values["dGE.6"]
    slopes = xp.abs(coupling.slope(x[:, :, None, :, :] - x[:, :, :, None, :])) + xp.abs(x[:, :, None, :, :])
    received = graph * slopes * d[:, :, :, None, :]
    of_squares = xp.sum(received * received, axis=2) + xp.sum(received * received, axis=3)
    steep = number_of(inputs, "mu", 1.0) + 3.0 * x * x * (inputs.get("intrinsic") == "double_well")
    return of_sum(x.shape[2], values["dGE.point"], of_squares) + steep * xp.abs(values["dGE.7"])


def _d_graph(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    pulls, errors = _pairs(inputs, {**values, "GE.links": xp.ones_like(values["GE.links"])})
    received = values["dGE.6"][:, :, :, None, :] if "dGE.6" in values else 0.0 * pulls
    terms = received * (xp.abs(pulls) + errors)
    size = math.sqrt(max(stages_of(inputs), 1)) * xp.sqrt(xp.sum(terms * terms, axis=4))
    return math.sqrt(max(stages_of(inputs), 1)) * xp.abs(values["dGE.links"]) + math.sqrt(max(terms.shape[4], 1)) * size


def _single(id: str, terms_of: Any) -> RoundingScale:
    """Return the size for a number that sums over all elements, and over stages like the first."""

    def size(inputs: Given, values: Given) -> Array:
        if "dGE.7" not in values:
            return abs(values[id])
        terms = terms_of(values)
        count = max(math.prod(terms.shape), 1) * max(stages_of(inputs), 1)
        return of_sum(count, values[id], stages_of(inputs) * namespace(terms).sum(terms * terms))

    return size


def _own(id: str) -> RoundingScale:
    return lambda inputs, values: abs(values[id])


ROUNDING_SCALES: dict[str, RoundingScale] = {
    "GE.2": _softmax("GE.2", "GE.masked"),
    "GE.4": _softmax("GE.4", "GE.3"),
    "GE.6": _coupled,
    "GE.8": _next,
    "dGE.point": _d_point,
    "dGE.links": _d_graph,
    "dGE.tau": _single("dGE.tau", lambda values: values["dGE.9"]),
    "dGE.mu": _single("dGE.mu", lambda values: values["dGE.7"] * (abs(values["GE.point"]) + abs(values["GE.5"]))),
    "dGE.kappa": _single("dGE.kappa", lambda values: values["dGE.7"] * values["GE.point"]),
    "dGE.coefficients": _single("dGE.coefficients", lambda values: values["dGE.6"]),
    "dGE.step": _single("dGE.step", lambda values: values["dGE.8"] * (abs(values["GE.7"]) + abs(values["GE.point"]))),
    **{id: _own(id) for id in ("GE.point", "GE.7", "dGE.7", "dGE.8")},
}

STORED = dict.fromkeys(("GE.12", "dGE.1"))
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products. Scores flow in float32, where a threshold that compares them can be met."""
