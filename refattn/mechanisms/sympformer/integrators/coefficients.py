"""What a step of one call makes of the momentum: the coefficients of `one_call`, and what their gradients are worth.

A step damps, kicks and damps: p_in = before p, p* = kept p_in + weight g, p' = after p*. A coefficient that is not
named is 1. With a = SYMP.15 of the step, alpha = SYMP.friction, and eta' = alpha::

    Euler        weight = h_y               after = exp(-a)
    Half         weight = h_y               before = after = exp(-a/2)
    Exponential  weight = h_y phi(a)        kept = exp(-a)      exact if the force stays the same and alpha, too
    Midpoint     weight = I                 kept = exp(-a)      exact if the force stays the same
    Explicit     weight = h_y               kept = 1 - h_y alpha
    Plain        weight = h_y               kept = retention, a learned number whatever the time and the steps

    phi(a) = (1 - exp(-a)) / a,    I = int_t^(t + h_y) exp(-(eta(t + h_y) - eta(s))) ds

The integral is taken with 16 nodes of Gauss and Legendre. With T = t + h_y, E(s) = exp(-(eta(T) - eta(s))) and alpha at
T its derivatives are dI/dh_y = 1 - alpha I, dI/dt = 1 - E(t) - alpha I, dI/dc_log = -int E(s) log(T / s) ds and
dI/dc_lin = -int E(s) (T - s) ds; phi'(a) = (exp(-a) - phi(a)) / a.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535); the midpoint is that of the authors' second version, for the oracle
`reduced`, here with all oracles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from refattn import equations
from refattn.mechanisms.sympformer.integrators import damping
from refattn.mechanisms.sympformer.params import Add, Integrator, Layer
from refattn.xp import Array, namespace


class Coefficients(NamedTuple):
    """Coefficients of a step, or their gradients, of `before` and `after` those of the logarithms: (1) each."""

    before: Array
    kept: Array
    weight: Array
    after: Array
    damping: Array | None = None  # a, or alpha, for the backward


class Rule:
    """How coefficients follow from the numbers of a layer."""

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """Return whether the damping of a layer changes anything that is read."""
        return kicks

    def forward(self, layer: Layer, t: Array) -> Coefficients:
        """Return the coefficients."""
        raise NotImplementedError

    def backward(self, layer: Layer, t: Array, c: Coefficients, d: Coefficients, add: Add) -> tuple[Array, Array]:
        """Return the gradients of t and h_y, and add those of other numbers."""
        raise NotImplementedError


class Euler(Rule):
    """The kick acts as it is, and is damped as all of the momentum."""

    def forward(self, layer: Layer, t: Array) -> Coefficients:
        """Return the coefficients."""
        return Coefficients(one(t), one(t), layer.numbers["h_y"], namespace(t).exp(-_damping(layer, t)))

    def backward(self, layer: Layer, t: Array, c: Coefficients, d: Coefficients, add: Add) -> tuple[Array, Array]:
        """Return the gradients of t and h_y, and add those of other numbers."""
        d_t, d_h = _damping_backward(layer, t, d.after, add)
        return d_t, d.weight + d_h


class Half(Rule):
    """Half of the damping before the kick, half after it."""

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """At rest the second half alone damps, which the next layer reads."""
        return keeps or not rests

    def forward(self, layer: Layer, t: Array) -> Coefficients:
        """Return the coefficients."""
        half = namespace(t).exp(-0.5 * _damping(layer, t))
        return Coefficients(half, one(t), layer.numbers["h_y"], half)

    def backward(self, layer: Layer, t: Array, c: Coefficients, d: Coefficients, add: Add) -> tuple[Array, Array]:
        """Return the gradients of t and h_y, and add those of other numbers."""
        d_t, d_h = _damping_backward(layer, t, 0.5 * (d.before + d.after), add)
        return d_t, d.weight + d_h


class Exponential(Rule):
    """Exact for a force that stays the same, with the mean of the damping."""

    def forward(self, layer: Layer, t: Array) -> Coefficients:
        """Return the coefficients."""
        a = _damping(layer, t)
        return Coefficients(one(t), namespace(t).exp(-a), layer.numbers["h_y"] * phi(a)[0], one(t), a)

    def backward(self, layer: Layer, t: Array, c: Coefficients, d: Coefficients, add: Add) -> tuple[Array, Array]:
        """Return the gradients of t and h_y, and add those of other numbers."""
        value, slope = phi(c.damping)
        d_minus_a = c.kept * d.kept - layer.numbers["h_y"] * slope * d.weight
        d_t, d_h = _damping_backward(layer, t, d_minus_a, add)
        return d_t, value * d.weight + d_h


class Midpoint(Rule):
    """Exact for a force that stays the same."""

    def forward(self, layer: Layer, t: Array) -> Coefficients:
        """Return the coefficients."""
        return Coefficients(one(t), namespace(t).exp(-_damping(layer, t)), integral(layer, t)[0], one(t))

    def backward(self, layer: Layer, t: Array, c: Coefficients, d: Coefficients, add: Add) -> tuple[Array, Array]:
        """Return the gradients of t and h_y, and add those of other numbers."""
        d_t, d_h = _damping_backward(layer, t, c.kept * d.kept, add)
        _, by_log, by_lin, by_t, by_h = integral(layer, t)
        add("c_log", by_log * d.weight)
        add("c_lin", by_lin * d.weight)
        return d_t + by_t * d.weight, by_h * d.weight + d_h


class Explicit(Rule):
    """The friction that the momentum has at the beginning of the step."""

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """A momentum of 0 is not damped."""
        return kicks and not rests

    def forward(self, layer: Layer, t: Array) -> Coefficients:
        """Return the coefficients."""
        alpha, h_y = equations.active(damping).friction(layer, t), layer.numbers["h_y"]
        return Coefficients(one(t), 1.0 - h_y * alpha, h_y, one(t), alpha)

    def backward(self, layer: Layer, t: Array, c: Coefficients, d: Coefficients, add: Add) -> tuple[Array, Array]:
        """Return the gradients of t and h_y, and add those of other numbers."""
        own = equations.active(damping)
        d_t = own.friction_backward(layer, t, layer.numbers["h_y"] * d.kept, add)
        return d_t, d.weight - c.damping * d.kept


class Plain(Rule):
    """A learned share of the momentum is kept."""

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """There is no damping."""
        return False

    def forward(self, layer: Layer, t: Array) -> Coefficients:
        """Return the coefficients; at rest there is nothing to keep."""
        return Coefficients(one(t), layer.numbers.get("retention", one(t)), layer.numbers["h_y"], one(t))

    def backward(self, layer: Layer, t: Array, c: Coefficients, d: Coefficients, add: Add) -> tuple[Array, Array]:
        """Return the gradients of t and h_y, and add those of other numbers."""
        add("retention", d.kept)
        return 0.0 * t, d.weight


@dataclass(frozen=True)
class Ruled(Integrator):
    """An integrator with such coefficients."""

    rule: ClassVar[Rule] = Euler()

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """Return whether the damping of a layer changes anything that is read."""
        return self.rule.damps(rests, kicks, keeps)


def one(t: Array) -> Array:
    """Return 1 as an array (1)."""
    return namespace(t).ones_like(t)


def _damping(layer: Layer, t: Array) -> Array:
    """Return a (1), that of the whole step."""
    a: Array = equations.active(damping).damping(layer, t, layer.numbers["h_y"])
    return a


def _damping_backward(layer: Layer, t: Array, d_minus_a: Array, add: Add) -> tuple[Array, Array]:
    """Return the gradients of t and h_y, and add those of c_log and c_lin."""
    d: tuple[Array, Array] = equations.active(damping).damping_backward(layer, t, layer.numbers["h_y"], d_minus_a, add)
    return d


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


def integral(layer: Layer, t: Array) -> tuple[Array, Array, Array, Array, Array]:
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
    return whole, by_log, by_lin, 1.0 - left - lost, 1.0 - lost
