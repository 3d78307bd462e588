"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

A result that is rounded once errs relative to its own value; that is the rule for every equation that is absent here.
For a sum of n terms t the size is ``sqrt(n) (|sum t| + sqrt(sum t^2))``, whatever the order of the terms: see
docs/tolerances.md. `inputs` holds the arguments of the call and d_out; `values` the traced equations. For an equation
that has passes the size is that of the first, which the others resemble.
"""

from __future__ import annotations

import math
from typing import Any

from refattn.mechanisms.graph_energy.options.threshold import Proximal, Soft
from refattn.mechanisms.graph_energy.testing.given import integrator_of, threshold_of
from refattn.mechanisms.graph_energy.testing.graph_magnitudes import GRAPH, per_key
from refattn.mechanisms.graph_energy.testing.sizes import (
    Given,
    absolute,
    coupling_of,
    heads_of,
    number_of,
    size_of_sum,
    squares,
    stages_of,
    tau_of,
    transposed,
)
from refattn.mechanisms.record import Magnitude
from refattn.xp import Array, namespace


def _stage(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    euler = integrator_of(inputs) == "euler"
    return xp.zeros_like(values["GE.point"]) if euler else xp.abs(values["GE.point"])


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
    return size_of_sum(pulls.shape[3], total, xp.sum(pulls * pulls, axis=3)) + xp.sqrt(xp.sum(errors * errors, axis=3))


def _rate(inputs: Given, values: Given) -> Array:
    xp, x = namespace(inputs["q"]), absolute(values["GE.point"])
    mu, kappa = number_of(inputs, "mu", 1.0), number_of(inputs, "kappa", 1.0)
    terms = {
        "anchor": mu * (x + xp.abs(values["GE.5"])),
        "none": 0.0 * x,
        "double_well": mu * x + x**3 + xp.abs(values["GE.5"]),
    }[inputs.get("intrinsic", "anchor")]
    return terms + kappa * xp.abs(values["GE.6"])


def _next(inputs: Given, values: Given) -> Array:
    # A threshold after the step subtracts; otherwise a sum that is rounded once.
    x = values["GE.8"]
    proximal = isinstance(threshold_of(inputs), Proximal)
    return absolute(x) + (2.0 * tau_of(inputs) * number_of(inputs, "step", 1.0) if proximal else 0.0)


def _kept(inputs: Given, values: Given) -> Array:
    y = values["GE.9"]
    if not isinstance(threshold_of(inputs), Soft):
        return 0.0 * y
    return namespace(y).where(y == 0.0, 0.0, absolute(y) + 2.0 * tau_of(inputs))


def _total(inputs: Given, values: Given) -> Array:
    return math.sqrt(max(inputs["q"].shape[2], 1)) * values["GE.11"]


def _out(inputs: Given, values: Given) -> Array:
    return size_of_sum(
        inputs["q"].shape[2], values["GE.13"], squares(values["GE.12"], transposed(heads_of(inputs, "v")))
    )


def _d_weights(inputs: Given, values: Given) -> Array:
    return size_of_sum(inputs["v"].shape[-1], values["dGE.12"], squares(inputs["d_out"], heads_of(inputs, "v")))


def _d_total(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = values["dGE.12"] * values["GE.12"]
    inner = xp.sum(terms, axis=-1, keepdims=True)
    of_squares = xp.sum(terms * terms, axis=-1, keepdims=True)
    return xp.where(values["dGE.11"] == 0.0, 0.0, size_of_sum(terms.shape[-1], inner, of_squares) / values["GE.11"])


def _d_parts(inputs: Given, values: Given) -> Array:
    xp, d = namespace(inputs["q"]), values["dGE.10"]
    return xp.where(d == 0.0, 0.0, xp.abs(values["dGE.12"]) / values["GE.11"] + xp.abs(values["dGE.11"]))


def _d_kept(inputs: Given, values: Given) -> Array:
    d = values["dGE.9"]
    if inputs.get("state", "token") != "token":
        return absolute(d)
    terms = values["dGE.10"] * values["GE.2"]
    of_squares = namespace(d).sum(terms * terms, axis=2)[..., None]
    return namespace(d).where(d == 0.0, 0.0, size_of_sum(terms.shape[2], d, of_squares))


def _d_point(inputs: Given, values: Given) -> Array:
    xp, coupling = namespace(inputs["q"]), coupling_of(inputs)
    x, graph, d = values["GE.point"], values["GE.links"][..., None], values["dGE.6"]
    slopes = xp.abs(coupling.slope(x[:, :, None, :, :] - x[:, :, :, None, :])) + xp.abs(x[:, :, None, :, :])
    received = graph * slopes * d[:, :, :, None, :]
    of_squares = xp.sum(received * received, axis=2) + xp.sum(received * received, axis=3)
    steep = number_of(inputs, "mu", 1.0) + 3.0 * x * x * (inputs.get("intrinsic") == "double_well")
    return size_of_sum(x.shape[2], values["dGE.point"], of_squares) + steep * xp.abs(values["dGE.7"])


def _d_next(inputs: Given, values: Given) -> Array:
    # Of later passes: a sum of what came in and what each stage adds.
    return absolute(values["dGE.8"]) + absolute(values["dGE.point"])


def _d_graph(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    pulls, errors = _pairs(inputs, {**values, "GE.links": xp.ones_like(values["GE.links"])})
    received = values["dGE.6"][:, :, :, None, :] if "dGE.6" in values else 0.0 * pulls
    terms = received * (xp.abs(pulls) + errors)
    size = math.sqrt(max(stages_of(inputs), 1)) * xp.sqrt(xp.sum(terms * terms, axis=4))
    return math.sqrt(max(stages_of(inputs), 1)) * xp.abs(values["dGE.links"]) + math.sqrt(max(terms.shape[4], 1)) * size


def _d_start(inputs: Given, values: Given) -> Array:
    steps = math.sqrt(max(stages_of(inputs), 1))
    more = absolute(values["dGE.8"]) if "dGE.8" in values else 0.0
    return steps * (absolute(values["dGE.5"]) + more)


def _d_v(inputs: Given, values: Given) -> Array:
    return per_key(inputs, values["dGE.v"], values["GE.12"], inputs["d_out"], 1.0)


def _single(id: str, terms_of: Any) -> Magnitude:
    """Return the size for a number that sums over all elements, and over stages like the first."""

    def size(inputs: Given, values: Given) -> Array:
        if "dGE.7" not in values:
            return absolute(values[id])
        terms = terms_of(values)
        count = max(math.prod(terms.shape), 1) * max(stages_of(inputs), 1)
        return size_of_sum(count, values[id], stages_of(inputs) * namespace(terms).sum(terms * terms))

    return size


MAGNITUDES: dict[str, Magnitude] = {
    **GRAPH,
    "GE.point": _stage,
    "GE.6": _coupled,
    "GE.7": _rate,
    "GE.8": _next,
    "GE.9": _kept,
    "GE.11": _total,
    "GE.13": _out,
    "dGE.12": _d_weights,
    "dGE.11": _d_total,
    "dGE.10": _d_parts,
    "dGE.9": _d_kept,
    "dGE.8": _d_next,
    "dGE.point": _d_point,
    "dGE.5": _d_start,
    "dGE.links": _d_graph,
    "dGE.v": _d_v,
    "dGE.tau": _single("dGE.tau", lambda values: values["dGE.9"]),
    "dGE.mu": _single("dGE.mu", lambda values: values["dGE.7"] * (abs(values["GE.point"]) + abs(values["GE.5"]))),
    "dGE.kappa": _single("dGE.kappa", lambda values: values["dGE.7"] * values["GE.point"]),
    "dGE.coefficients": _single("dGE.coefficients", lambda values: values["dGE.6"]),
    "dGE.step": _single("dGE.step", lambda values: values["dGE.8"] * (abs(values["GE.7"]) + abs(values["GE.point"]))),
}

STORED: dict[str, Magnitude] = {
    "GE.12": lambda inputs, values: values["GE.12"],
    "dGE.1": lambda inputs, values: values["dGE.1"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products. Scores flow in float32, where a threshold that compares them can be met."""
