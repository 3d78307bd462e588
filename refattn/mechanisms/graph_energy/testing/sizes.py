"""What sizes of rounding errors are made from: sums, products, and the arguments of a call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.graph_energy.forces import COUPLINGS, Coupling, Polynomial, polynomial
from refattn.mechanisms.graph_energy.testing import given
from refattn.ops.heads import repeat_heads
from refattn.xp import Array, namespace

Given = Mapping[str, Any]


def size_of_sum(terms: int, value: Array, squares: Array) -> Array:
    """Return the size of the error of a sum, from its value and the sum of the squares of its terms."""
    xp = namespace(value)
    return math.sqrt(max(terms, 1)) * (xp.abs(value) + xp.sqrt(squares))


def squares(a: Array, b: Array) -> Array:
    """Return the sum of the squares of the terms of the matrix product a b^T."""
    return (a * a) @ namespace(a).matrix_transpose(b * b)


def transposed(x: Array) -> Array:
    return namespace(x).matrix_transpose(x)


def absolute(x: Array) -> Array:
    return namespace(x).abs(x)


def heads_of(inputs: Given, name: str) -> Array:
    return repeat_heads(inputs[name], inputs["q"].shape[1])


def number_of(inputs: Given, name: str, usual: float) -> Any:
    value = inputs.get(name, usual)
    return usual if value is None else abs(value)


def scale_of(inputs: Given) -> Any:
    return number_of(inputs, "scale", 1.0 / math.sqrt(inputs["q"].shape[-1]))


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
