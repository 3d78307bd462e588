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
    """What all kernels do with their second kernel; by itself that has the weight 0.

    Attributes
    ----------
    steepest
        Largest slope of k2 along a line, times the bandwidth; None where there is none.
    """

    bandwidth: Any = 1.0
    weight: Any = 0.0
    steepest: ClassVar[float | None] = 0.0
    radial: ClassVar[bool] = False

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative: with respect to rho where it is radial, otherwise to x . y."""
        return namespace(dot).zeros_like(dot), namespace(dot).zeros_like(dot)

    def values(self, x: Array, y: Array) -> Array:
        """(..., p, d), (..., q, d) -> (..., p, q)."""
        dot, rho = products(x, y)
        return dot + self.weight * self.second(dot, rho)[0]

    def look(self, x: Array, y: Array) -> tuple[Array, Array, Array]:
        """Return (values, along, towards), (..., p, q) each: dk/dx = along y + towards (x - y)."""
        dot, rho = products(x, y)
        value, slope = self.second(dot, rho)
        one, nothing = namespace(dot).ones_like(dot), namespace(dot).zeros_like(dot)
        along, towards = (one, 2.0 * self.weight * slope) if self.radial else (one + self.weight * slope, nothing)
        return dot + self.weight * value, along, towards

    def backward(self, x: Array, y: Array, d_values: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients with respect to x and y, shaped as these, and to the bandwidth and the weight."""
        xp = namespace(x, y, d_values)
        dot, rho = products(x, y)
        # forward: values = x . y + weight k2, with k2 a function of rho / bandwidth^2, or of x . y / bandwidth^2
        value, slope = self.second(dot, rho)
        d_weight = sum_wide(d_values * value)
        d_argument = self.weight * d_values * slope
        d_bandwidth = sum_wide(d_argument * (rho if self.radial else dot)) * (-2.0 / self.bandwidth)
        if self.radial:
            # forward: rho = x . x + y . y - 2 x . y
            d_dot = d_values - 2.0 * d_argument
            d_x = d_dot @ y + 2.0 * xp.sum(d_argument, axis=-1, keepdims=True) * x
            d_y = xp.matrix_transpose(d_dot) @ x + 2.0 * xp.sum(d_argument, axis=-2)[..., None] * y
        else:
            d_dot = d_values + d_argument
            d_x, d_y = d_dot @ y, xp.matrix_transpose(d_dot) @ x
        return sum_to(d_x, x.shape), sum_to(d_y, y.shape), d_bandwidth, d_weight

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


@dataclass(frozen=True)
class _Second(Kernel):
    """A kernel with a second one.

    Attributes
    ----------
    bandwidth, weight
        Above 0, a float or an array (); None means sqrt(d) and 1.
    """

    bandwidth: Any = None
    weight: Any = None


@dataclass(frozen=True)
class Rbf(_Second):
    """k2 = exp(-|x - y|^2 / (2 bandwidth^2))."""

    steepest: ClassVar[float | None] = math.exp(-0.5)
    radial: ClassVar[bool] = True

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative with respect to rho."""
        # Rounding may leave rho below 0.
        value = namespace(rho).exp(namespace(rho).where(rho > 0.0, rho, 0.0) / (-2.0 * self.bandwidth**2))
        return value, value / (-2.0 * self.bandwidth**2)


@dataclass(frozen=True)
class Matern32(_Second):
    """k2 = (1 + s) exp(-s) with s = sqrt(3) |x - y| / bandwidth."""

    steepest: ClassVar[float | None] = math.sqrt(3.0) / math.e
    radial: ClassVar[bool] = True

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative with respect to rho."""
        scaled = distance(rho, 3.0) / self.bandwidth
        fall = namespace(rho).exp(-scaled)
        return (1.0 + scaled) * fall, fall * (-1.5 / self.bandwidth**2)


@dataclass(frozen=True)
class Matern52(_Second):
    """k2 = (1 + s + s^2 / 3) exp(-s) with s = sqrt(5) |x - y| / bandwidth."""

    # (5/3) t (1 + sqrt(5) t) exp(-sqrt(5) t) is largest at sqrt(5) t = (1 + sqrt(5)) / 2
    steepest: ClassVar[float | None] = (
        math.sqrt(5.0) / 3.0 * (2.0 + math.sqrt(5.0)) * math.exp(-(1.0 + math.sqrt(5.0)) / 2.0)
    )
    radial: ClassVar[bool] = True

    def second(self, dot: Array, rho: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative with respect to rho."""
        scaled = distance(rho, 5.0) / self.bandwidth
        fall = namespace(rho).exp(-scaled)
        value = (1.0 + scaled + scaled * scaled / 3.0) * fall
        return value, (1.0 + scaled) * fall * (-5.0 / 6.0 / self.bandwidth**2)


@dataclass(frozen=True)
class Polynomial(_Second):
    """k2 = (x . y / bandwidth^2 + constant)^degree, with a whole degree of at least 1 and a constant of at least 0."""

    degree: int = 2
    constant: float = 1.0
    steepest: ClassVar[float | None] = None

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
    """The observables g of every query: sections k(k_j, .) at the keys that it sees, and, augmented, the coordinates.

    Their span is the space that the operator acts on. What is not seen has the value 0 everywhere.
    """

    kernel: Kernel
    keys: Array  # (b, h, j, d)
    seen: Array  # (b, h, i, j): whether the query sees the key
    augmented: bool

    def values(self, x: Array) -> Array:
        """(b, h, i, l, d) -> (b, h, i, l, o)."""
        at_keys = self.seen_alone(self.kernel.values(x, self.keys[:, :, None, :, :]))
        return namespace(x).concat([at_keys, x], axis=-1) if self.augmented else at_keys

    def backward(self, x: Array, d_values: Array) -> tuple[Array, dict[str, Array]]:
        """Return the gradient of x, and those of the keys (b, h, j, d) and the kernel's numbers."""
        j = self.keys.shape[2]
        # forward: values = concat(k(x, keys) where seen, x)
        d_at_keys = self.seen_alone(d_values[..., :j])
        d_x, d_keys, d_bandwidth, d_weight = self.kernel.backward(x, self.keys[:, :, None, :, :], d_at_keys)
        passed = {"k": d_keys[:, :, 0, :, :], "bandwidth": d_bandwidth, "weight": d_weight}
        return (d_x + d_values[..., j:] if self.augmented else d_x), passed

    def seen_alone(self, x: Array) -> Array:
        """Return x (b, h, i, l, o) with 0 at keys that are not seen."""
        xp, j = namespace(x), self.keys.shape[2]
        at_keys = xp.where(self.seen[:, :, :, None, :], x[..., :j], 0.0)
        return at_keys if x.shape[-1] == j else xp.concat([at_keys, x[..., j:]], axis=-1)

    def count(self) -> Array:
        """Return how many keys each query sees (b, h, i, 1), 1 where it sees none."""
        xp = namespace(self.keys)
        found = xp.sum(xp.astype(self.seen, self.keys.dtype), axis=-1, keepdims=True)
        return xp.where(found == 0.0, 1.0, found)

    def coordinates(self) -> Array:
        """Return P (b, h, 1, o, d), the inner products of the observables with the coordinate functions."""
        xp, at_keys = namespace(self.keys), self.keys[:, :, None, :, :]
        if not self.augmented:
            return at_keys
        own = identity(self.keys.shape[-1], self.keys) / self.kernel.linear_part()
        return xp.concat([at_keys, own + zeros((*self.keys.shape[:2], 1, 1, 1), self.keys)], axis=-2)

    def gram(self, between: Array, delta: Array) -> Array:
        """Return G (b, h, i, o, o) for k(K, K) (b, h, j, j), with delta (b, h, i, 1) added to its diagonal.

        A key that is not seen has a row and a column of the identity.
        """
        xp, seen, width = namespace(between), self.seen, self.keys.shape[-1]
        pairs = seen[..., :, None] & seen[..., None, :]
        own = xp.where(seen, 0.0 * delta, 1.0) + delta
        g = xp.where(pairs, between[:, :, None, :, :], 0.0) + own[..., None] * identity(seen.shape[-1], between)
        if not self.augmented:
            return g
        beside = xp.where(seen[..., None], self.keys[:, :, None, :, :], 0.0)
        corner = (1.0 / self.kernel.linear_part() + delta[..., None]) * identity(width, between)
        upper = xp.concat([g, beside], axis=-1)
        return xp.concat([upper, xp.concat([xp.matrix_transpose(beside), corner], axis=-1)], axis=-2)

    def gram_backward(self, d_gram: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients of k(K, K), delta, the keys (b, h, j, d) and 1 / `linear_part` in `gram`."""
        xp, seen, j = namespace(d_gram), self.seen, self.keys.shape[2]
        # forward: G = k(K, K) where both are seen, + (1 where not seen + delta) I
        diagonal = xp.sum(d_gram * identity(d_gram.shape[-1], d_gram), axis=-1)
        d_delta = xp.sum(diagonal, axis=-1, keepdims=True)
        pairs = seen[..., :, None] & seen[..., None, :]
        d_between = xp.sum(xp.where(pairs, d_gram[..., :j, :j], 0.0), axis=2)
        if not self.augmented:
            return d_between, d_delta, xp.zeros_like(self.keys), xp.sum(d_delta) * 0.0
        # forward: G = [[G, keys], [keys^T, I / linear_part + delta I]]
        beside = d_gram[..., :j, j:] + xp.matrix_transpose(d_gram[..., j:, :j])
        d_keys = xp.sum(xp.where(seen[..., None], beside, 0.0), axis=2)
        return d_between, d_delta, d_keys, xp.sum(diagonal[..., j:])


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


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Return x summed over the axes that broadcasting from `shape` had repeated."""
    axes = tuple(n for n, size in enumerate(shape) if size == 1 and x.shape[n] != 1)
    return namespace(x).sum(x, axis=axes, keepdims=True) if axes else x
