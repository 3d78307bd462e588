"""Reproducing kernels: how alike two points are; their sections are the functions that the operator acts on.

k(x, y) = x . y + c k2(x, y) is the dot product, so that coordinates are observables, and a second kernel.

With rho = |x - y|^2, the bandwidth l, and s = sqrt(3 rho) / l or sqrt(5 rho) / l::

    linear       k2 = 0
    rbf          k2 = exp(-rho / (2 l^2))
    matern32     k2 = (1 + s) exp(-s)
    matern52     k2 = (1 + s + s^2 / 3) exp(-s)
    polynomial   k2 = (x . y / l^2 + constant)^degree

    rational     k2 = 1 / (1 + rho / 2)

All are differentiable at x = y. The derivative is dk/dx = cross y + own x, with own = 2 c dk2/d rho, cross = 1 - own;
for a polynomial own = 0 and cross = 1 + c dk2/d(x . y). The rational kernel has no bandwidth. It is an `Own` kernel of
the library, which shows how one is written, and has a designed case.

Letters: p and q points, d coordinates; all other axes in front broadcast.

Source of the rational kernel: Rasmussen, Williams 2006 (Gaussian Processes for Machine Learning), equation 4.19, with
alpha = l = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.args import Real, Whole, check_all
from refattn.mechanisms.option_kinds import choose
from refattn.xp import Array, namespace, sum_wide, transpose


class Kernel:
    """What all kernels do with their second kernel.

    Attributes
    ----------
    bandwidth, weight
        Above 0, a float or an array (); None means sqrt(d) and 1.
    steepest
        Largest slope of k2 along a line, times the bandwidth; None where there is none.
    """

    bandwidth: Any
    weight: Any
    steepest: ClassVar[float | None]

    def second(self, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative with respect to rho."""
        raise NotImplementedError

    def values(self, x: Array, y: Array) -> Array:
        """(..., p, d), (..., q, d) -> (..., p, q)."""
        return self.look(x, y)[0]

    def look(self, x: Array, y: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return k, cross and own of dk/dx = cross y + own x, what k2 is a function of, and k2, (..., p, q) each."""
        xp = namespace(x, y)
        dot = x @ transpose(y)
        rho = xp.sum(x * x, axis=-1)[..., :, None] + xp.sum(y * y, axis=-1)[..., None, :] - 2.0 * dot
        value, slope = self.second(rho)
        own = 2.0 * self.weight * slope
        return dot + self.weight * value, 1.0 - own, own, rho, value

    def backward(self, x: Array, y: Array, d_values: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients with respect to x and y, (..., p, d) and (..., q, d), the bandwidth and the weight."""
        xp = namespace(x, y, d_values)
        # forward: values = k(x, y)
        _, cross, own, rho, value = self.look(x, y)
        d_cross, d_own = d_values * cross, d_values * own
        of_bandwidth, of_weight = d_own * rho / -self.bandwidth, d_values * value
        d_bandwidth = sum_wide(of_bandwidth)
        d_weight = sum_wide(of_weight)
        d_x = d_cross @ y + xp.sum(d_own, axis=-1, keepdims=True) * x
        d_y = transpose(d_cross) @ x + xp.sum(d_own, axis=-2)[..., None] * y
        return d_x, d_y, d_bandwidth, d_weight

    def more(self, x: Array, y: Array, factors: Array) -> Array | float:
        """Return what there is beside cross and own: 0 but for an `Own` kernel."""
        return 0.0

    def slope_bound(self) -> float | Array:
        """Return the largest slope of c k2 along a line."""
        assert self.steepest is not None
        return self.weight * self.steepest / self.bandwidth

    def unit(self) -> float | Array:
        """Return what a jitter is in units of: weight + 1."""
        return self.weight + 1.0

    def unit_backward(self, d_unit: Array) -> Array:
        """Return the gradient of the weight for that of `unit`."""
        return d_unit

    def linear_part(self) -> float | Array:
        """Return the factor of x . y in the expansion of k: 1 over the squared norm of a coordinate function."""
        return 1.0

    def linear_part_backward(self, d_factor: Array) -> tuple[Array, Array]:
        """Return the gradients of `linear_part` with respect to the bandwidth and the weight."""
        return d_factor * 0.0, d_factor * 0.0


@dataclass(frozen=True)
class Linear(Kernel):
    """k(x, y) = x . y alone."""

    bandwidth = 1.0
    weight = 0.0
    steepest: ClassVar[float | None] = 0.0

    def unit_backward(self, d_unit: Array) -> Array:
        """Return 0: there is no weight."""
        return d_unit * 0.0

    def look(self, x: Array, y: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return x . y, 1, 0, 0 and 0."""
        dot = x @ transpose(y)
        nothing = namespace(x, y).zeros_like(dot)
        return dot, nothing + 1.0, nothing, nothing, nothing


@dataclass(frozen=True)
class Rbf(Kernel):
    """k2 = exp(-|x - y|^2 / (2 bandwidth^2))."""

    bandwidth: Any = None
    weight: Any = None
    steepest: ClassVar[float | None] = math.exp(-0.5)

    def second(self, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative with respect to rho."""
        # Rounding may leave rho below 0.
        value = namespace(rho).exp(namespace(rho).where(rho > 0.0, rho, 0.0) / (-2.0 * self.bandwidth**2))
        return value, value / (-2.0 * self.bandwidth**2)


@dataclass(frozen=True)
class Matern32(Kernel):
    """k2 = (1 + s) exp(-s) with s = sqrt(3) |x - y| / bandwidth."""

    bandwidth: Any = None
    weight: Any = None
    steepest: ClassVar[float | None] = math.sqrt(3.0) / math.e

    def second(self, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative with respect to rho."""
        scaled = distance(rho, 3.0) / self.bandwidth
        fall = namespace(rho).exp(-scaled)
        return (1.0 + scaled) * fall, fall * (-1.5 / self.bandwidth**2)


@dataclass(frozen=True)
class Matern52(Kernel):
    """k2 = (1 + s + s^2 / 3) exp(-s) with s = sqrt(5) |x - y| / bandwidth."""

    bandwidth: Any = None
    weight: Any = None
    # (5/3) t (1 + sqrt(5) t) exp(-sqrt(5) t) is largest at sqrt(5) t = (1 + sqrt(5)) / 2
    steepest: ClassVar[float | None] = (
        math.sqrt(5.0) / 3.0 * (2.0 + math.sqrt(5.0)) * math.exp(-(1.0 + math.sqrt(5.0)) / 2.0)
    )

    def second(self, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative with respect to rho."""
        scaled = distance(rho, 5.0) / self.bandwidth
        fall = namespace(rho).exp(-scaled)
        value = (1.0 + scaled + scaled * scaled / 3.0) * fall
        return value, (1.0 + scaled) * fall * (-5.0 / 6.0 / self.bandwidth**2)


@dataclass(frozen=True)
class Polynomial(Kernel):
    """k2 = (x . y / bandwidth^2 + constant)^degree, with a whole degree of at least 1 and a constant of at least 0."""

    bandwidth: Any = None
    weight: Any = None
    degree: int = 2
    constant: float = 1.0
    steepest: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_all(self, degree=Whole(1), constant=Real(0.0))

    def look(self, x: Array, y: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return what `Kernel.look` does, of a function of x . y: own is 0."""
        dot = x @ transpose(y)
        base = dot / self.bandwidth**2 + self.constant
        value, slope = base**self.degree, self.degree * base ** (self.degree - 1) / self.bandwidth**2
        return dot + self.weight * value, 1.0 + self.weight * slope, namespace(x, y).zeros_like(dot), dot, value

    def backward(self, x: Array, y: Array, d_values: Array) -> tuple[Array, Array, Array, Array]:
        """Return what `Kernel.backward` does."""
        _, cross, _, dot, value = self.look(x, y)
        slope = self.degree * (dot / self.bandwidth**2 + self.constant) ** (self.degree - 1) / self.bandwidth**2
        d_cross, of_bandwidth = d_values * cross, d_values * self.weight * slope * dot * (-2.0 / self.bandwidth)
        return d_cross @ y, transpose(d_cross) @ x, sum_wide(of_bandwidth), sum_wide(d_values * value)

    def linear_part(self) -> float | Array:
        """Return the factor of x . y: 1 + weight degree constant^(degree - 1) / bandwidth^2."""
        return 1.0 + self.weight * self.degree * self.constant ** (self.degree - 1) / self.bandwidth**2

    def linear_part_backward(self, d_factor: Array) -> tuple[Array, Array]:
        """Return the gradients of `linear_part` with respect to the bandwidth and the weight."""
        slope = self.degree * self.constant ** (self.degree - 1) / self.bandwidth**2
        return d_factor * slope * self.weight * (-2.0 / self.bandwidth), d_factor * slope


@dataclass(frozen=True)
class Own(Kernel):
    """k2 is a function of your own, with its gradient: both are checked once, on a sample, by `own`.

    Attributes
    ----------
    function
        Takes points (..., p, d) and (..., q, d), whose axes in front broadcast, and returns k2 (..., p, q), which has
        to be symmetric and positive.
    gradient
        Takes the same and returns the derivative of k2 with respect to the first point, (..., p, q, d).
    weight
        Above 0, a float or an array (); None means 1.
    """

    function: Callable[[Array, Array], Array]
    gradient: Callable[[Array, Array], Array]
    weight: Any = None
    bandwidth = 1.0
    steepest: ClassVar[float | None] = None

    def look(self, x: Array, y: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return what `Kernel.look` does, with cross and own of x . y alone: `more` has the rest."""
        dot, value = x @ transpose(y), self.function(x, y)
        nothing = namespace(x, y).zeros_like(dot)
        return dot + self.weight * value, nothing + 1.0, nothing, dot, value

    def more(self, x: Array, y: Array, factors: Array) -> Array:
        """Return sum_q factors_q c dk2(x, y_q)/dx (..., r, d) for one point x (..., 1, d), factors (..., r, q)."""
        return self.weight * (factors @ self.gradient(x, y)[..., 0, :, :])

    def backward(self, x: Array, y: Array, d_values: Array) -> tuple[Array, Array, Array, Array]:
        """Return what `Kernel.backward` does."""
        xp, d_turned = namespace(x, y, d_values), transpose(d_values)
        # forward: values = x . y + c k2(x, y), with k2(x, y) = k2(y, x)
        d_x = d_values @ y + self.weight * xp.sum(d_values[..., None] * self.gradient(x, y), axis=-2)
        d_y = d_turned @ x + self.weight * xp.sum(d_turned[..., None] * self.gradient(y, x), axis=-2)
        of_weight = sum_wide(d_values * self.function(x, y))
        return d_x, d_y, 0.0 * of_weight, of_weight


def rational(x: Array, y: Array) -> Array:
    """Return 1 / (1 + |x - y|^2 / 2), (..., p, q), of points (..., p, d) and (..., q, d)."""
    difference = x[..., :, None, :] - y[..., None, :, :]
    return 1.0 / (1.0 + 0.5 * namespace(x, y).sum(difference * difference, axis=-1))


def rational_gradient(x: Array, y: Array) -> Array:
    """Return its derivative with respect to x, -(x - y) k2^2, (..., p, q, d)."""
    value = rational(x, y)
    return (value * value)[..., None] * (y[..., None, :, :] - x[..., :, None, :])


OWN: dict[str, Own] = {"rational": Own(rational, rational_gradient)}
"""The kernels of the library that are written as a user's are."""

KERNELS: dict[str, type[Kernel]] = {
    "linear": Linear,
    "rbf": Rbf,
    "matern32": Matern32,
    "matern52": Matern52,
    "polynomial": Polynomial,
}


def kernel_of(given: Any) -> Kernel:
    """Return the kernel that is meant: an object, its name or text."""
    found = OWN.get(given, given) if isinstance(given, str) else given
    return found if isinstance(found, Own) else choose("kernel", found, KERNELS)


def distance(rho: Array, factor: float) -> Array:
    """Return sqrt(factor rho): below tiny the square root has no derivative, and k2 none that matters."""
    xp = namespace(rho)
    tiny = float(xp.finfo(rho.dtype).smallest_normal)
    return math.sqrt(factor) * xp.sqrt(xp.where(rho > tiny, rho, tiny))
