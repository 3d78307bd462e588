"""Intrinsic forces: what acts on a score by itself, and the potential F of each, f = -F'.

::

    name         f               F                            f'          df/db  df/dmu    dF/db        dF/dmu
    anchor       -mu (x - b)     mu (x - b)^2 / 2             -mu         mu     -(x - b)  -mu (x - b)  (x - b)^2 / 2
    none         0               0                            0           0      0         0            0
    double_well  mu x - x^3 + b  -mu x^2 / 2 + x^4 / 4 - b x  mu - 3 x^2  1      x         -x           -x^2 / 2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from refattn.xp import Array, namespace

Number = float | Array
Function = Callable[[Array, Array, Number], Array]


@dataclass(frozen=True)
class Intrinsic:
    """An intrinsic force.

    Attributes
    ----------
    name
        What the option `intrinsic` calls it.
    force, potential
        f and F of (x, b, mu).
    d_x, d_b, d_mu
        The derivatives of f.
    potential_b, potential_mu
        The derivatives of F.
    largest_slope
        sup |f'| as a function of mu, where |b| <= 1 and the flow starts at b.
    """

    name: str
    force: Function
    potential: Function
    d_x: Function
    d_b: Function
    d_mu: Function
    potential_b: Function
    potential_mu: Function
    largest_slope: Callable[[Number], Number]


def _anchor(x: Array, b: Array, mu: Number) -> Array:
    return mu * (b - x)


def _anchor_potential(x: Array, b: Array, mu: Number) -> Array:
    return 0.5 * mu * (x - b) * (x - b)


def _minus_mu(x: Array, b: Array, mu: Number) -> Array:
    return -mu + namespace(x).zeros_like(x)


def _mu(x: Array, b: Array, mu: Number) -> Array:
    return mu + namespace(x).zeros_like(x)


def _distance(x: Array, b: Array, mu: Number) -> Array:
    return b - x


def _half_square_distance(x: Array, b: Array, mu: Number) -> Array:
    return 0.5 * (x - b) * (x - b)


def _nothing(x: Array, b: Array, mu: Number) -> Array:
    return namespace(x).zeros_like(x)


def _wells(x: Array, b: Array, mu: Number) -> Array:
    return mu * x - x * x * x + b


def _wells_potential(x: Array, b: Array, mu: Number) -> Array:
    square = x * x
    return 0.25 * square * square - 0.5 * mu * square - b * x


def _wells_slope(x: Array, b: Array, mu: Number) -> Array:
    return mu - 3.0 * x * x


def _one(x: Array, b: Array, mu: Number) -> Array:
    return namespace(x).ones_like(x)


def _x(x: Array, b: Array, mu: Number) -> Array:
    return x


def _minus_x(x: Array, b: Array, mu: Number) -> Array:
    return -x


def _minus_half_square(x: Array, b: Array, mu: Number) -> Array:
    return -0.5 * x * x


def _size(mu: Number) -> Number:
    return abs(mu)


def _no_slope(mu: Number) -> Number:
    return 0.0 * mu


def _wells_largest(mu: Number) -> Number:
    """At |x| = 1 + sqrt(mu) the force x (mu - x^2) + b points inwards."""
    return abs(mu) + 3.0 * (1.0 + abs(mu) ** 0.5) ** 2


INTRINSICS: dict[str, Intrinsic] = {
    known.name: known
    for known in (
        Intrinsic(
            "anchor",
            *(_anchor, _anchor_potential, _minus_mu, _mu, _distance, _anchor, _half_square_distance, _size),
        ),
        Intrinsic("none", *(_nothing,) * 7, _no_slope),
        Intrinsic(
            "double_well",
            *(_wells, _wells_potential, _wells_slope, _one, _x, _minus_x, _minus_half_square, _wells_largest),
        ),
    )
}
"""The intrinsic forces by name."""
