"""Reproducing kernels k(x, y) = x . y + c k2(x, y): the dot product, so that coordinates are observables, and a second.

With rho = |x - y|^2, the bandwidth l, and s = sqrt(3 rho) / l or sqrt(5 rho) / l::

    rbf          k2 = exp(-rho / (2 l^2))
    matern32     k2 = (1 + s) exp(-s)
    matern52     k2 = (1 + s + s^2 / 3) exp(-s)
    polynomial   k2 = (x . y / l^2 + constant)^degree

All are differentiable at x = y. The derivative is dk/dx = along y + towards (x - y), where along = 1 + c dk2/d(x . y)
and towards = 2 c dk2/d rho.

Letters: p and q points, d coordinates; all other axes in front broadcast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.xp import Array, namespace, sum_wide

KERNELS = ("linear", "linear+rbf", "linear+polynomial", "linear+matern32", "linear+matern52")

STEEPEST = {
    "linear": 0.0,
    "linear+rbf": math.exp(-0.5),
    "linear+matern32": math.sqrt(3.0) / math.e,
    # (5/3) t (1 + sqrt(5) t) exp(-sqrt(5) t) is largest at sqrt(5) t = (1 + sqrt(5)) / 2
    "linear+matern52": math.sqrt(5.0) / 3.0 * (2.0 + math.sqrt(5.0)) * math.exp(-(1.0 + math.sqrt(5.0)) / 2.0),
}
"""Largest slope of k2 along a line, times the bandwidth; the polynomial has none."""


@dataclass(frozen=True)
class Kernel:
    """A kernel with its numbers.

    Attributes
    ----------
    name
        One of `KERNELS`.
    bandwidth, weight
        l and c, above 0.
    degree, constant
        Of the polynomial.
    """

    name: str
    bandwidth: float | Array
    weight: float | Array
    degree: int = 2
    constant: float = 1.0

    def values(self, x: Array, y: Array) -> Array:
        """(..., p, d), (..., q, d) -> (..., p, q)."""
        dot = x @ namespace(x, y).matrix_transpose(y)
        return dot if self.name == "linear" else dot + self.weight * self._second(dot, x, y)[0]

    def diagonal(self, x: Array) -> Array:
        """(..., p, d) -> (..., p): k(x, x)."""
        dot = namespace(x).sum(x * x, axis=-1)
        if self.name == "linear":
            return dot
        if self.name == "linear+polynomial":
            return dot + self.weight * (dot / self.bandwidth**2 + self.constant) ** self.degree
        return dot + self.weight

    def slopes(self, x: Array, y: Array) -> tuple[Array, Array]:
        """Return (along, towards), (..., p, q) each: dk/dx = along y + towards (x - y)."""
        xp = namespace(x, y)
        dot = x @ xp.matrix_transpose(y)
        along, towards = xp.ones_like(dot), xp.zeros_like(dot)
        if self.name == "linear":
            return along, towards
        slope = self.weight * self._second(dot, x, y)[1]
        return (along + slope, towards) if self.name == "linear+polynomial" else (along, 2.0 * slope)

    def all(self, x: Array, y: Array) -> tuple[Array, Array, Array]:
        """Return the `values` and both `slopes` at once."""
        xp = namespace(x, y)
        dot = x @ xp.matrix_transpose(y)
        if self.name == "linear":
            return dot, xp.ones_like(dot), xp.zeros_like(dot)
        value, slope = self._second(dot, x, y)
        one = xp.ones_like(dot)
        if self.name == "linear+polynomial":
            return dot + self.weight * value, one + self.weight * slope, xp.zeros_like(dot)
        return dot + self.weight * value, one, 2.0 * self.weight * slope

    def all_backward(self, x: Array, y: Array, d_values: Array) -> tuple[Array, Array, Array, Array]:
        """Return what `backward` and `numbers_backward` do, for x (..., p, d) and y (..., q, d) with the same axes."""
        xp, transpose = namespace(x, y, d_values), namespace(x, y).matrix_transpose
        if self.name == "linear":
            nothing = xp.sum(d_values) * 0.0
            return d_values @ y, transpose(d_values) @ x, nothing, nothing
        dot = x @ transpose(y)
        second, slope = self._second(dot, x, y)
        # forward: values = x . y + weight k2, with k2 a function of x . y / l^2, or of rho / l^2
        d_slope = self.weight * d_values * slope
        d_weight = sum_wide(d_values * second)
        if self.name == "linear+polynomial":
            cross, d_bandwidth = d_values + d_slope, sum_wide(d_slope * dot) * (-2.0 / self.bandwidth)
            return cross @ y, transpose(cross) @ x, d_bandwidth, d_weight
        cross, own = d_values - 2.0 * d_slope, 2.0 * d_slope
        d_bandwidth = sum_wide(d_slope * self._rho(dot, x, y)) * (-2.0 / self.bandwidth)
        d_x = cross @ y + xp.sum(own, axis=-1)[..., None] * x
        return d_x, transpose(cross) @ x + xp.sum(own, axis=-2)[..., None] * y, d_bandwidth, d_weight

    def backward(self, x: Array, y: Array, d_values: Array) -> tuple[Array, Array]:
        """Return the gradients with respect to x and y for given gradients of the `values`, shaped as x and y."""
        xp = namespace(x, y, d_values)
        # forward: values = k(x, y) with dk/dx = along y + towards (x - y)
        along, towards = self.slopes(x, y)
        cross, own = d_values * (along - towards), d_values * towards
        d_x = cross @ y + xp.sum(own, axis=-1, keepdims=True) * x
        d_y = xp.matrix_transpose(cross) @ x + xp.sum(own, axis=-2)[..., None] * y
        return sum_to(d_x, x.shape), sum_to(d_y, y.shape)

    def numbers_backward(self, x: Array, y: Array, d_values: Array) -> tuple[Array, Array]:
        """Return the gradients with respect to the bandwidth and the weight: two arrays without axes."""
        xp = namespace(x, y, d_values)
        if self.name == "linear":
            return xp.sum(d_values) * 0.0, xp.sum(d_values) * 0.0
        dot = x @ xp.matrix_transpose(y)
        second, slope = self._second(dot, x, y)
        # forward: k2 is a function of rho / l^2, or of x . y / l^2
        argument = dot if self.name == "linear+polynomial" else self._rho(dot, x, y)
        d_second = d_values * second
        return sum_wide(d_values * slope * argument) * self.weight * (-2.0 / self.bandwidth), sum_wide(d_second)

    def _rho(self, dot: Array, x: Array, y: Array) -> Array:
        xp = namespace(dot)
        squares = xp.sum(x * x, axis=-1)[..., :, None] + xp.sum(y * y, axis=-1)[..., None, :]
        return squares - 2.0 * dot

    def _second(self, dot: Array, x: Array, y: Array) -> tuple[Array, Array]:
        """Return k2 and its derivative with respect to rho, or to x . y for the polynomial."""
        xp, bandwidth = namespace(dot), self.bandwidth
        if self.name == "linear+polynomial":
            base = dot / bandwidth**2 + self.constant
            return base**self.degree, self.degree * base ** (self.degree - 1) / bandwidth**2
        rho = self._rho(dot, x, y)
        if self.name == "linear+rbf":
            # Rounding may leave it below 0.
            value = xp.exp(xp.where(rho > 0.0, rho, 0.0) / (-2.0 * bandwidth**2))
            return value, value / (-2.0 * bandwidth**2)
        # Below tiny the square root has no derivative, and k2 none that matters.
        tiny = float(xp.finfo(dot.dtype).smallest_normal)
        factor = 3.0 if self.name == "linear+matern32" else 5.0
        scaled = math.sqrt(factor) * xp.sqrt(xp.where(rho > tiny, rho, tiny)) / bandwidth
        fall = xp.exp(-scaled)
        if self.name == "linear+matern32":
            return (1.0 + scaled) * fall, fall * (-1.5 / bandwidth**2)
        return (1.0 + scaled + scaled * scaled / 3.0) * fall, (1.0 + scaled) * fall * (-5.0 / 6.0 / bandwidth**2)

    def linear_part(self) -> float | Array:
        """Return the factor of x . y in the expansion of k: 1 over the squared norm of a coordinate function."""
        if self.name != "linear+polynomial":
            return 1.0
        return 1.0 + self.weight * self.degree * self.constant ** (self.degree - 1) / self.bandwidth**2

    def linear_part_backward(self, d_factor: Array) -> tuple[Array, Array]:
        """Return the gradients of `linear_part` with respect to the bandwidth and the weight."""
        if self.name != "linear+polynomial":
            return d_factor * 0.0, d_factor * 0.0
        slope = self.degree * self.constant ** (self.degree - 1) / self.bandwidth**2
        return d_factor * slope * self.weight * (-2.0 / self.bandwidth), d_factor * slope


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Return x summed over the axes that broadcasting from `shape` had repeated."""
    axes = tuple(n for n, size in enumerate(shape) if size == 1 and x.shape[n] != 1)
    return namespace(x).sum(x, axis=axes, keepdims=True) if axes else x
