"""Odd polynomials as couplings, g(x) = sum_n a_n x^(2n+1), whose coefficients may be learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from refattn.mechanisms.arguments import check_arrays, check_floating
from refattn.mechanisms.graph_energy.couplings import Coupling, Terms
from refattn.xp import Array, concrete, device, is_array, namespace, raised


def polynomial(coefficients: Sequence[float | Array]) -> Coupling:
    """Return the coupling with the coefficients a_0, a_1, ...: numbers, or arrays without axes.

    It may bend down, and its slope has no bound: a flow needs a step.
    """
    a = tuple(coefficients)

    def force(x: Array) -> Array:
        return x * _even(a, x)

    def potential(x: Array) -> Array:
        return x * x * _even(tuple(c / (2 * n + 2) for n, c in enumerate(a)), x)

    def slope(x: Array) -> Array:
        return _even(tuple((2 * n + 1) * c for n, c in enumerate(a)), x)

    def curvature(x: Array) -> Array:
        return x * _even(tuple((2 * n + 1) * 2 * n * c for n, c in enumerate(a))[1:], x)

    def terms(x: Array) -> Terms:
        return tuple(_term(a, power, x) for power in range(2 * len(a)))

    return Coupling(
        "polynomial", force, potential, slope, curvature, lambda reach: math.inf, 0.0, terms, _powers(len(a))
    )


def check_coefficients(coefficients: Any, q: Array) -> Array:
    """Return coefficients as an array (m,) of the dtype that is computed in; raise where they are none."""
    xp = namespace(q)
    needs = "an array (m,) of at least one finite number"
    if not is_array(coefficients):
        if not isinstance(coefficients, (tuple, list)) or not all(type(c) in (int, float) for c in coefficients):
            raise TypeError(f"coefficients: got {coefficients!r}, needs {needs}, or a tuple of numbers")
        coefficients = xp.asarray([float(c) for c in coefficients], dtype=raised(q).dtype, device=device(q))
    check_arrays(q=q, coefficients=coefficients)
    check_floating(coefficients=coefficients)
    if len(coefficients.shape) != 1 or coefficients.shape[0] == 0:
        raise ValueError(f"coefficients: got shape {tuple(coefficients.shape)}, needs {needs}")
    if concrete(xp.all(xp.isfinite(coefficients))) is False:
        raise ValueError(f"coefficients: got a number that is not finite, needs {needs}")
    return xp.astype(coefficients, raised(q).dtype)


def _even(coefficients: Sequence[float | Array], x: Array) -> Array:
    """Return sum_n c_n x^(2n), by Horner's rule."""
    total = namespace(x).zeros_like(x)
    for c in reversed(coefficients):
        total = total * (x * x) + c
    return total


def _term(a: Sequence[float | Array], power: int, x: Array) -> tuple[Array, Array, Array, Array]:
    """Return what x_j^power is multiplied with in sum_n a_n (x_j - x_i)^(2n+1), x_j^power, and both derivatives."""
    xp = namespace(x)
    zero = xp.zeros_like(x)
    alpha, d_alpha = zero, zero
    for n, c in enumerate(a):
        rest = 2 * n + 1 - power
        if rest >= 0:
            factor = c * float(math.comb(2 * n + 1, power) * (-1) ** rest)
            alpha = alpha + factor * _power(x, rest)
            d_alpha = d_alpha + (factor * float(rest) * _power(x, rest - 1) if rest else zero)
    return alpha, _power(x, power), d_alpha, float(power) * _power(x, power - 1) if power else zero


def _power(x: Array, exponent: int) -> Array:
    result = namespace(x).ones_like(x)
    for _ in range(exponent):
        result = result * x
    return result


def _powers(count: int) -> tuple[Coupling, ...]:
    """Return x, x^3, ... as couplings: the derivatives of g with respect to its coefficients."""
    return tuple(_only(n) for n in range(count))


def _only(n: int) -> Coupling:
    """Return x^(2n+1), of which a backward needs force and potential."""

    def force(x: Array) -> Array:
        return _power(x, 2 * n + 1)

    def potential(x: Array) -> Array:
        return _power(x, 2 * n + 2) / (2.0 * n + 2.0)

    def terms(x: Array) -> Terms:
        return tuple(_term((0.0,) * n + (1.0,), power, x) for power in range(2 * n + 2))

    return Coupling(f"x^{2 * n + 1}", force, potential, force, force, lambda reach: math.inf, math.inf, terms)
