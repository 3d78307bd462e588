"""Reproducing kernels, and the observables that are made of their sections.

k(x, y) = x . y + c k2(x, y) is the dot product, so that coordinates are observables, and a second kernel.

With rho = |x - y|^2, the bandwidth l, and s = sqrt(3 rho) / l or sqrt(5 rho) / l::

    linear       k2 = 0
    rbf          k2 = exp(-rho / (2 l^2))
    matern32     k2 = (1 + s) exp(-s)
    matern52     k2 = (1 + s + s^2 / 3) exp(-s)
    polynomial   k2 = (x . y / l^2 + constant)^degree

All are differentiable at x = y. The derivative is dk/dx = along y + towards (x - y), where along = 1 + c dk2/d(x . y)
and towards = 2 c dk2/d rho.

Letters: p and q points, d coordinates; all other axes in front broadcast. Of observables: b batch, h head, i query,
j key, l point, o observable: keys, then coordinates if augmented.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.ops.solve import identity
from refattn.xp import Array, namespace, sum_wide, zeros


class Kernel:
    """What all kernels do with their second kernel.

    Attributes
    ----------
    bandwidth, weight
        Above 0, a float or an array (); None means sqrt(d) and 1.
    steepest
        Largest slope of k2 along a line, times the bandwidth; None where there is none.
    radial
        Whether k2 is a function of rho, otherwise of x . y.
    """

    bandwidth: Any
    weight: Any
    steepest: ClassVar[float | None]
    radial: ClassVar[bool] = True

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative: with respect to rho where it is radial, otherwise to x . y."""
        raise NotImplementedError

    def values(self, x: Array, y: Array) -> Array:
        """(..., p, d), (..., q, d) -> (..., p, q)."""
        dot, rho = products(x, y)
        return dot + self.weight * self.second(dot, rho)[0]

    def look(self, x: Array, y: Array) -> tuple[Array, Array, Array]:
        """Return (values, along, towards), (..., p, q) each: dk/dx = along y + towards (x - y)."""
        xp, (dot, rho) = namespace(x), products(x, y)
        value, slope = self.second(dot, rho)
        if not self.radial:
            return dot + self.weight * value, 1.0 + self.weight * slope, xp.zeros_like(dot)
        return dot + self.weight * value, xp.ones_like(dot), 2.0 * self.weight * slope

    def backward(self, x: Array, y: Array, d_values: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients with respect to x and y, (..., p, d) and (..., q, d), the bandwidth and the weight."""
        xp = namespace(x, y, d_values)
        dot, rho = products(x, y)
        # forward: values = x . y + weight k2, with k2 a function of rho / bandwidth^2, or of x . y / bandwidth^2
        value, slope = self.second(dot, rho)
        of_weight, d_argument = d_values * value, self.weight * d_values * slope
        of_bandwidth = d_argument * (rho if self.radial else dot) * (-2.0 / self.bandwidth)
        d_bandwidth = sum_wide(of_bandwidth)
        d_weight = sum_wide(of_weight)
        if not self.radial:
            d_dot = d_values + d_argument
            return d_dot @ y, xp.matrix_transpose(d_dot) @ x, d_bandwidth, d_weight
        # forward: rho = x . x + y . y - 2 x . y
        d_dot = d_values - 2.0 * d_argument
        d_x = d_dot @ y + 2.0 * xp.sum(d_argument, axis=-1, keepdims=True) * x
        d_y = xp.matrix_transpose(d_dot) @ x + 2.0 * xp.sum(d_argument, axis=-2)[..., None] * y
        return d_x, d_y, d_bandwidth, d_weight

    def slope_bound(self) -> float | Array:
        """Return the largest slope of c k2 along a line."""
        assert self.steepest is not None
        return self.weight * self.steepest / self.bandwidth

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

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
        """Return 0 and 0."""
        return namespace(dot).zeros_like(dot), namespace(dot).zeros_like(dot)


@dataclass(frozen=True)
class Rbf(Kernel):
    """k2 = exp(-|x - y|^2 / (2 bandwidth^2))."""

    bandwidth: Any = None
    weight: Any = None
    steepest: ClassVar[float | None] = math.exp(-0.5)

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
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

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
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

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
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
    radial: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 1:
            raise ValueError(f"degree: got {self.degree!r}, needs a whole number of at least 1")
        number = isinstance(self.constant, int | float) and not isinstance(self.constant, bool)
        if not number or not 0.0 <= self.constant < math.inf:
            raise ValueError(f"constant: got {self.constant!r}, needs a finite number of at least 0")

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative with respect to x . y."""
        base = dot / self.bandwidth**2 + self.constant
        return base**self.degree, self.degree * base ** (self.degree - 1) / self.bandwidth**2

    def linear_part(self) -> float | Array:
        """Return the factor of x . y: 1 + weight degree constant^(degree - 1) / bandwidth^2."""
        return 1.0 + self.weight * self.degree * self.constant ** (self.degree - 1) / self.bandwidth**2

    def linear_part_backward(self, d_factor: Array) -> tuple[Array, Array]:
        """Return the gradients of `linear_part` with respect to the bandwidth and the weight."""
        slope = self.degree * self.constant ** (self.degree - 1) / self.bandwidth**2
        return d_factor * slope * self.weight * (-2.0 / self.bandwidth), d_factor * slope


KERNELS: dict[str, type[Kernel]] = {
    "linear": Linear,
    "rbf": Rbf,
    "matern32": Matern32,
    "matern52": Matern52,
    "polynomial": Polynomial,
}


@dataclass(frozen=True)
class Observables:
    """The observables g of every query: sections k(k_o, .) at the keys that it sees, and, augmented, the coordinates.

    Their span is the space that the operator acts on. What is not seen has the value 0 everywhere.
    """

    kernel: Kernel
    keys: Array  # (b, h, 1 or i, j, d)
    seen: Array  # (b, h, i, j): whether the query sees the key
    augmented: bool

    def values(self, x: Array) -> Array:
        """(b, h, i, l, d) -> (b, h, i, l, o)."""
        if self.augmented:
            return visible(self, namespace(x).concat([self.kernel.values(x, self.keys), x], axis=-1))
        return visible(self, self.kernel.values(x, self.keys))

    def backward(self, x: Array, d_values: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients of x, of the keys (b, h, i, j, d), the bandwidth and the weight."""
        # forward: values = k(x, keys) where seen; augmented: x beside them
        d_seen = visible(self, d_values)
        if self.augmented:
            at_keys, beyond = d_seen[..., : self.keys.shape[3]], d_seen[..., self.keys.shape[3] :]
            d_x, d_keys, d_bandwidth, d_weight = self.kernel.backward(x, self.keys, at_keys)
            return d_x + beyond, d_keys, d_bandwidth, d_weight
        return self.kernel.backward(x, self.keys, d_seen)

    def look(self, x: Array, factors: Array) -> tuple[Array, Array, Array]:
        """Return C g(x) (b, h, i, d) for C (b, h, i, d, o), the size of its terms, and its Jacobian (b, h, i, d, d)."""
        xp, row = namespace(x), x[..., None, :]
        _, along, towards = self.kernel.look(row, self.keys)  # (b, h, i, 1, j)
        values = xp.matrix_transpose(self.values(row))  # (b, h, i, o, 1)
        value, size = (factors @ values)[..., 0], (xp.abs(factors) @ xp.abs(values))[..., 0]
        # dk/dx = along key + towards (x - key); the coordinates are their own slopes
        at_keys = factors[..., : self.keys.shape[3]] if self.augmented else factors
        pull = xp.sum(at_keys * towards, axis=-1, keepdims=True)
        jacobian = (at_keys * (along - towards)) @ self.keys + pull * row
        return value, size, jacobian + factors[..., self.keys.shape[3] :] if self.augmented else jacobian

    def count(self) -> Array:
        """Return how many keys each query sees (b, h, i, 1), 1 where it sees none."""
        xp = namespace(self.keys)
        found = xp.sum(xp.astype(self.seen, self.keys.dtype), axis=-1, keepdims=True)
        return xp.where(found == 0.0, 1.0, found)


def visible(g: Observables, x: Array) -> Array:
    """Return x (b, h, i, l, o) with 0 at keys that are not seen."""
    xp, j = namespace(x), g.keys.shape[3]
    if g.augmented:
        return xp.concat([xp.where(g.seen[..., None, :], x[..., :j], 0.0), x[..., j:]], axis=-1)
    return xp.where(g.seen[..., None, :], x, 0.0)


def coordinates(g: Observables) -> Array:
    """Return P (b, h, 1, o, d), the inner products of the observables with the coordinate functions."""
    if not g.augmented:
        return g.keys
    own = identity(g.keys.shape[-1], g.keys) / g.kernel.linear_part()
    return namespace(own).concat([g.keys, own + zeros((*g.keys.shape[:2], 1, 1, 1), g.keys)], axis=-2)


def products(x: Array, y: Array) -> tuple[Array, Array]:
    """Return x . y and rho = |x - y|^2, (..., p, q) each."""
    xp = namespace(x, y)
    dot = x @ xp.matrix_transpose(y)
    squares = xp.sum(x * x, axis=-1)[..., :, None] + xp.sum(y * y, axis=-1)[..., None, :]
    return dot, squares - 2.0 * dot


def distance(rho: Array, factor: float) -> Array:
    """Return sqrt(factor rho): below tiny the square root has no derivative, and k2 none that matters."""
    xp = namespace(rho)
    tiny = float(xp.finfo(rho.dtype).smallest_normal)
    return math.sqrt(factor) * xp.sqrt(xp.where(rho > tiny, rho, tiny))
