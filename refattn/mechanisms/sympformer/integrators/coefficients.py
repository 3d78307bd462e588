"""What a step of one call makes of the momentum: the coefficients of `one_call`, and what their gradients are worth.

A step damps, kicks and damps: p_in = before p, p* = kept p_in + weight g, p' = after p*. A coefficient that is not
named is 1. With a = SYMP.15 of the step, alpha = SYMP.friction, and eta' = alpha::

    euler        weight = h_y               after = exp(-a)
    half         weight = h_y               before = after = exp(-a/2)
    exponential  weight = h_y phi(a)        kept = exp(-a)      exact if the force stays the same and alpha, too
    midpoint     weight = I                 kept = exp(-a)      exact if the force stays the same
    explicit     weight = h_y               kept = 1 - h_y alpha
    plain        weight = h_y               kept = retention, a learned number whatever the time and the steps

    phi(a) = (1 - exp(-a)) / a,    I = int_t^(t + h_y) exp(-(eta(t + h_y) - eta(s))) ds

The integral is taken with 16 nodes of Gauss and Legendre. With T = t + h_y, E(s) = exp(-(eta(T) - eta(s))) and alpha at
T its derivatives are dI/dh_y = 1 - alpha I, dI/dt = 1 - E(t) - alpha I, dI/dc_log = -int E(s) log(T / s) ds and
dI/dc_lin = -int E(s) (T - s) ds; phi'(a) = (exp(-a) - phi(a)) / a.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535); the midpoint is that of the authors' second version, for the force
`reduced`, here with all forces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from refattn import equations
from refattn.mechanisms.sympformer.integrators import damping
from refattn.mechanisms.sympformer.params import Add, Integrator, Layer, plus
from refattn.xp import Array, namespace


class Coefficients(NamedTuple):
    """Coefficients of a step, or their gradients, of `before` and `after` those of the logarithms: (1) each."""

    before: Array
    kept: Array
    weight: Array
    after: Array


Slopes = Mapping[str, Mapping[str, Array]]
"""The derivatives of a coefficient by what it is made of: -a, -alpha, and numbers. Logarithms stand for factors."""
Rule = Callable[[Layer, Array], tuple[Coefficients, Slopes]]
"""How coefficients follow from the numbers of a layer at a time, and their derivatives."""


def euler(layer: Layer, t: Array) -> tuple[Coefficients, Slopes]:
    """The kick acts as it is, and is damped as all of the momentum."""
    one = namespace(t).ones_like(t)
    after = namespace(t).exp(-_damping(layer, t))
    return Coefficients(one, one, layer.numbers["h_y"], after), {"weight": {"h_y": one}, "after": {"-a": one}}


def half(layer: Layer, t: Array) -> tuple[Coefficients, Slopes]:
    """Half of the damping before the kick, half after it."""
    one = namespace(t).ones_like(t)
    factor, slope = namespace(t).exp(-0.5 * _damping(layer, t)), {"-a": 0.5 * one}
    slopes = {"before": slope, "weight": {"h_y": one}, "after": slope}
    return Coefficients(factor, one, layer.numbers["h_y"], factor), slopes


def exponential(layer: Layer, t: Array) -> tuple[Coefficients, Slopes]:
    """Exact for a force that stays the same, with the mean of the damping."""
    one, a, h_y = namespace(t).ones_like(t), _damping(layer, t), layer.numbers["h_y"]
    kept, (value, slope) = namespace(t).exp(-a), phi(a)
    slopes = {"kept": {"-a": kept}, "weight": {"-a": -h_y * slope, "h_y": value}}
    return Coefficients(one, kept, h_y * value, one), slopes


def midpoint(layer: Layer, t: Array) -> tuple[Coefficients, Slopes]:
    """Exact for a force that stays the same."""
    one, kept = namespace(t).ones_like(t), namespace(t).exp(-_damping(layer, t))
    weight, slopes = integral(layer, t)
    return Coefficients(one, kept, weight, one), {"kept": {"-a": kept}, "weight": slopes}


def explicit(layer: Layer, t: Array) -> tuple[Coefficients, Slopes]:
    """The friction that the momentum has at the beginning of the step."""
    one, h_y = namespace(t).ones_like(t), layer.numbers["h_y"]
    alpha = equations.active(damping).friction(layer, t)
    slopes = {"kept": {"-alpha": h_y, "h_y": -alpha}, "weight": {"h_y": one}}
    return Coefficients(one, 1.0 - h_y * alpha, h_y, one), slopes


def plain(layer: Layer, t: Array) -> tuple[Coefficients, Slopes]:
    """A learned share of the momentum is kept; at rest there is nothing to keep."""
    one = namespace(t).ones_like(t)
    kept = layer.numbers.get("retention", one)
    return Coefficients(one, kept, layer.numbers["h_y"], one), {"kept": {"retention": one}, "weight": {"h_y": one}}


@dataclass(frozen=True)
class Ruled(Integrator):
    """An integrator with such coefficients."""

    rule: ClassVar[Rule] = staticmethod(euler)


def backward(layer: Layer, t: Array, slopes: Slopes, d: Coefficients, add: Add) -> tuple[Array, Array]:
    """Return the gradients of t and h_y for those of the coefficients, and add those of other numbers."""
    found: dict[str, Array] = {}
    for name, by in slopes.items():
        for of, slope in by.items():
            found[of] = plus(found.get(of), slope * getattr(d, name))
    d_t, d_h_y, own = found.pop("t", 0.0 * t), found.pop("h_y"), equations.active(damping)
    if "-a" in found:
        d_now, d_h = own.damping_backward(layer, t, layer.numbers["h_y"], found.pop("-a"), add)
        d_t, d_h_y = d_t + d_now, d_h_y + d_h
    if "-alpha" in found:
        d_t = d_t + own.friction_backward(layer, t, found.pop("-alpha"), add)
    for name, value in found.items():
        add(name, value)
    return d_t, d_h_y


def _damping(layer: Layer, t: Array) -> Array:
    """Return a (1), that of the whole step."""
    a: Array = equations.active(damping).damping(layer, t, layer.numbers["h_y"])
    return a


TERMS = 15
"""Of the series of phi and its derivative, which below 1/2 lose no digits."""


def phi(a: Array) -> tuple[Array, Array]:
    """Return phi(a) = (1 - e^-a) / a and phi'(a): h phi(a) is what a constant force adds in a damped step."""
    xp = namespace(a)
    small = xp.abs(a) < 0.5  # (1): where the series are taken
    safe = xp.where(small, 1.0, a)  # (1): for the others
    whole = (1.0 - xp.exp(-safe)) / safe  # (1)
    slope = (xp.exp(-safe) - whole) / safe  # (1)
    near = xp.where(small, a, 0.0)  # (1): for the series
    series = derivative = xp.zeros_like(a)  # (1)
    for k in range(TERMS, -1, -1):  # phi = sum_k (-a)^k / (k + 1)!
        series = series * near + (-1.0) ** k / math.factorial(k + 1)  # (1)
    for k in range(TERMS, 0, -1):
        derivative = derivative * near + (-1.0) ** k * k / math.factorial(k + 1)  # (1)
    return xp.where(small, series, whole), xp.where(small, derivative, slope)


HALF = (
    (0.0950125098376374, 0.1894506104550685),
    (0.2816035507792589, 0.1826034150449236),
    (0.4580167776572274, 0.1691565193950025),
    (0.6178762444026438, 0.1495959888165767),
    (0.7554044083550030, 0.1246289712555339),
    (0.8656312023878318, 0.0951585116824928),
    (0.9445750230732326, 0.0622535239386479),
    (0.9894009349916499, 0.0271524594117541),
)
"""The positive nodes between -1 and 1, each with its weight; the others mirror them."""
NODES = tuple((0.5 * (1.0 + sign * node), 0.5 * weight) for node, weight in HALF for sign in (-1.0, 1.0))


def integral(layer: Layer, t: Array) -> tuple[Array, dict[str, Array]]:
    """Return I, and its derivatives by c_log, c_lin, t and h_y."""
    xp, h = namespace(t), layer.numbers["h_y"]  # -, (1)
    c_log, c_lin = damping.numbers(layer, t)
    whole = by_log = by_lin = 0.0 * t  # (1), (1), (1)
    for place, share in NODES:
        rest = (1.0 - place) * h  # (1): t + h - s
        grown = xp.log((t + h) / (t + place * h))  # (1)
        value = share * h * xp.exp(-c_log * grown - c_lin * rest)  # (1)
        whole, by_log, by_lin = whole + value, by_log - value * grown, by_lin - value * rest  # (1), (1), (1)
    left = xp.exp(-c_log * xp.log((t + h) / t) - c_lin * h)  # (1): e
    lost = (c_log / (t + h) + c_lin) * whole  # (1)
    return whole, {"c_log": by_log, "c_lin": by_lin, "t": 1.0 - left - lost, "h_y": 1.0 - lost}
