"""Gradients a fourth way: the forward on arrays that carry a tangent, and the backward too.

For a map with the Jacobian J, a direction t of its leaves and upstream gradients d of its outputs::

    <d, J t> = <J^T d, t>        J t by the forward on dual arrays, J^T d by the hand-written backward
    <u, H t> = <H u, t>          H t by the backward on dual arrays: the derivative of a gradient is symmetric

The first compares a backward with the forward itself, in one call whatever the number of leaves; directions are random,
so that an error of any element shows as its share of the sum. The second fails where a backward is no gradient of
anything, and knows nothing of the forward. Both have the rounding of float64 alone, and need no other library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refattn import philox
from refattn.instruments.dual import Tangents, tangents
from refattn.verify.outcome import Floats
from refattn.verify.selfcheck.gradients import FLOOR, Subject

TOLERANCE = 1e-12
"""Allowed difference of the two sides, relative to the sum of the sizes of their terms; derived as that of autograd."""


def direction(subject: Subject, number: int) -> dict[str, Floats]:
    """Return a random direction of all leaves."""
    return {n: philox.normal(x.shape, seed=number, purpose=f"tangents.{n}") for n, x in subject.leaves.items()}


def push(function: Callable[[Any, Tangents], Mapping[str, Any]], subject: Subject, along: Mapping[str, Floats]) -> Any:
    """Return the values and the derivatives of named arrays that a function makes of the leaves."""
    with tangents() as instrument:
        found = function({n: instrument.array(x, along[n]) for n, x in subject.leaves.items()}, instrument)
    return {n: x.value for n, x in found.items()}, {n: x.tangent for n, x in found.items()}


def duality(subject: Subject, implementation: str) -> float:
    """Return how far a backward is from the derivative of its forward, as a share of what is compared."""
    upstream, along = subject.upstream(), direction(subject, 0)
    values, moved = push(lambda leaves, _: subject.forward(leaves, implementation), subject, along)
    gradients = subject.backward(subject.leaves, upstream, implementation)
    left = [d * np.where(np.isfinite(values[n]), moved[n], 0.0) for n, d in upstream.items()]
    return _apart(left, [gradients[n] * t for n, t in along.items()])


def symmetry(subject: Subject, implementation: str) -> float:
    """Return how far the derivative of a backward is from symmetric."""
    upstream = subject.upstream()

    def gradients(leaves: Any, instrument: Tangents) -> Mapping[str, Any]:
        return subject.backward(leaves, {n: instrument.array(d) for n, d in upstream.items()}, implementation)

    t, u = direction(subject, 0), direction(subject, 1)
    values, by_t = push(gradients, subject, t)
    _, by_u = push(gradients, subject, u)
    # A second derivative that is 0 but for its rounding is judged beside the gradient.
    least = FLOOR * sum(float(np.sum(np.abs(values[n] * t[n]))) for n in t)
    return _apart([by_t[n] * u[n] for n in t], [by_u[n] * t[n] for n in t], least)


WAYS: dict[str, Callable[[Subject, str], float]] = {"duality": duality, "symmetry": symmetry}


def _apart(left: list[Any], right: list[Any], least: float = 0.0) -> float:
    """Return the difference of two sums of products, as a share of the sizes of their terms."""
    apart = abs(sum(float(np.sum(x)) for x in left) - sum(float(np.sum(x)) for x in right))
    sizes = (sum(float(np.sum(np.abs(x))) for x in side) for side in (left, right))
    return 0.0 if apart == 0.0 else apart / max(*sizes, least)
