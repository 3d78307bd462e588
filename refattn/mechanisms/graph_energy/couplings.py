"""Couplings: odd analytic functions g by which two scores act on each other.

A coupling has its even antiderivative G with G(0) = 0, the potential of an edge, and two derivatives::

    name      g              G                                   g'            g''                     sup |g'|
    sin       sin x          2 sin^2(x/2)                        cos x         -sin x                  1
    tanh      tanh x         |x| + log1p(e^(-2|x|)) - log 2      1 - tanh^2    -2 tanh (1 - tanh^2)    1
    identity  x              x^2 / 2                             1             0                       1
    arctan    atan x         x atan x - log1p(x^2) / 2           1/(1+x^2)     -2x / (1+x^2)^2         1
    sinh      sinh x         2 sinh^2(x/2)                       cosh x        sinh x                  cosh R
    cubic     x - x^3/6      x^2/2 - x^4/24                      1 - x^2/2     -x                      1 for R <= 2

where R bounds |x|. Below `increasing` in size of its argument g increases: there the flow is that of a convex energy.

Source: D. Sclosa, From Combinatorics to Geometry: The Dynamics of Graph Gradient Diffusion (arXiv:2308.08311), equation
1, for odd analytic coupling; sin is that of Kuramoto.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from refattn.xp import Array, namespace

Function = Callable[[Array], Array]
Terms = tuple[tuple[Array, Array, Array, Array], ...]


@dataclass(frozen=True)
class Coupling:
    """An odd analytic function.

    Attributes
    ----------
    name
        What the option `coupling` calls it.
    force, potential, slope, curvature
        g, G, g' and g''.
    largest_slope
        sup |g'| over |x| <= R, as a function of R; R may be infinite.
    increasing
        g increases where |x| is below this.
    terms
        What gives all (alpha_t, beta_t, alpha_t', beta_t') at x, where g(x_j - x_i) is the sum of
        alpha_t(x_i) beta_t(x_j); None where no finite sum is.
    powers
        Of a polynomial, what its coefficients multiply: x, x^3, ...
    """

    name: str
    force: Function
    potential: Function
    slope: Function
    curvature: Function
    largest_slope: Callable[[float], float]
    increasing: float = math.inf
    terms: Callable[[Array], Terms] | None = None
    powers: tuple[Coupling, ...] = ()


def _sin(x: Array) -> Array:
    return namespace(x).sin(x)


def _sin_potential(x: Array) -> Array:
    half = namespace(x).sin(0.5 * x)
    return 2.0 * half * half


def _cos(x: Array) -> Array:
    return namespace(x).cos(x)


def _minus_sin(x: Array) -> Array:
    return -namespace(x).sin(x)


def _tanh(x: Array) -> Array:
    return namespace(x).tanh(x)


def _tanh_potential(x: Array) -> Array:
    xp = namespace(x)
    return xp.abs(x) + xp.log1p(xp.exp(-2.0 * xp.abs(x))) - math.log(2.0)


def _tanh_slope(x: Array) -> Array:
    y = namespace(x).tanh(x)
    return 1.0 - y * y


def _tanh_curvature(x: Array) -> Array:
    y = namespace(x).tanh(x)
    return -2.0 * y * (1.0 - y * y)


def _identity(x: Array) -> Array:
    return x


def _half_square(x: Array) -> Array:
    return 0.5 * x * x


def _one(x: Array) -> Array:
    return namespace(x).ones_like(x)


def _zero(x: Array) -> Array:
    return namespace(x).zeros_like(x)


def _arctan(x: Array) -> Array:
    return namespace(x).atan(x)


def _arctan_potential(x: Array) -> Array:
    xp = namespace(x)
    return x * xp.atan(x) - 0.5 * xp.log1p(x * x)


def _arctan_slope(x: Array) -> Array:
    return 1.0 / (1.0 + x * x)


def _arctan_curvature(x: Array) -> Array:
    y = 1.0 + x * x
    return -2.0 * x / (y * y)


def _sinh(x: Array) -> Array:
    return namespace(x).sinh(x)


def _sinh_potential(x: Array) -> Array:
    half = namespace(x).sinh(0.5 * x)
    return 2.0 * half * half


def _cosh(x: Array) -> Array:
    return namespace(x).cosh(x)


def _cubic(x: Array) -> Array:
    return x - x * x * x / 6.0


def _cubic_potential(x: Array) -> Array:
    y = x * x
    return 0.5 * y - y * y / 24.0


def _cubic_slope(x: Array) -> Array:
    return 1.0 - 0.5 * x * x


def _minus(x: Array) -> Array:
    return -x


def _up_to_1(reach: float) -> float:
    return 1.0


def _sinh_largest(reach: float) -> float:
    return math.cosh(reach) if reach < 700.0 else math.inf


def _cubic_largest(reach: float) -> float:
    return max(1.0, 0.5 * reach * reach - 1.0)


def _sin_terms(x: Array) -> Terms:
    """sin(x_j - x_i) = cos x_i sin x_j - sin x_i cos x_j."""
    s, c = namespace(x).sin(x), namespace(x).cos(x)
    return (c, s, -s, c), (-s, c, -c, -s)


def _identity_terms(x: Array) -> Terms:
    one, zero = _one(x), _zero(x)
    return (one, x, zero, one), (-x, one, -one, zero)


def _cubic_terms(x: Array) -> Terms:
    """d - d^3 / 6 with d^3 = x_j^3 - 3 x_j^2 x_i + 3 x_j x_i^2 - x_i^3."""
    one, zero, square = _one(x), _zero(x), x * x
    return (
        (one, x - x * square / 6.0, zero, 1.0 - 0.5 * square),
        (0.5 * x, square, 0.5 * one, 2.0 * x),
        (-0.5 * square, x, -x, one),
        (x * square / 6.0 - x, one, 0.5 * square - 1.0, zero),
    )


COUPLINGS: dict[str, Coupling] = {
    known.name: known
    for known in (
        Coupling("sin", _sin, _sin_potential, _cos, _minus_sin, _up_to_1, math.pi / 2.0, _sin_terms),
        Coupling("tanh", _tanh, _tanh_potential, _tanh_slope, _tanh_curvature, _up_to_1),
        Coupling("identity", _identity, _half_square, _one, _zero, _up_to_1, terms=_identity_terms),
        Coupling("arctan", _arctan, _arctan_potential, _arctan_slope, _arctan_curvature, _up_to_1),
        Coupling("sinh", _sinh, _sinh_potential, _cosh, _sinh, _sinh_largest),
        Coupling("cubic", _cubic, _cubic_potential, _cubic_slope, _minus, _cubic_largest, math.sqrt(2.0), _cubic_terms),
    )
}
"""The couplings by name."""
