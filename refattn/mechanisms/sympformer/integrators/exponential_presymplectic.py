"""Exponential presymplectic Euler: exact for a force that stays the same, and a drift with the new momentum.

Equations (a is SYMP.15, g the force at (x, p), f SYMP.17 with the z that the oracle gave)::

    [SYMP.exact_weight]  w = h_y phi(a)                 phi(a) = (1 - e^-a) / a
    [SYMP.exact_momentum]  p' = exp(-a) p + w g
    [SYMP.exact_moved]  x' = x + h_x f(p')

Adjoints, for given dx' and later, the gradient of p' where a later layer reads it::

    [dSYMP.exact_momentum]  dp' = later + dB w_b^T      dB = df / z, that of B p'
    [dSYMP.exact_weight]  dw = sum dp' g

and df = h_x dx', dh_x = sum dx' f, dg = w dp', dp = exp(-a) dp', da = h_y phi'(a) dw - exp(-a) sum dp' p with phi'(a) =
(e^-a - phi(a)) / a, and dh_y = phi(a) dw beside that of a, whose adjoint stands with SYMP.15.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.mechanisms.sympformer import presymplectic_euler
from refattn.mechanisms.sympformer.integrators.drift import at_rest, plus
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.mechanisms.sympformer.presymplectic_euler import Integrator
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class ExponentialPresymplectic(Integrator):
    """Exponential presymplectic Euler: this file."""

    moves: ClassVar[bool] = True


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    p: Array | None
    t: Array
    force: Array  # g
    a: Array
    weight: Array
    momentum: Array  # p'
    moved: Array  # B p'
    speed: Array  # f
    context: Any  # z
    asked: Any


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array, Saved]:
    """Return the next tokens and momenta, and what `backward` reads."""
    answer, asked = layer.oracle.forward(layer, x, p)
    a = equations.active(presymplectic_euler).damping(layer, t, layer.numbers["h_y"])  # (1): SYMP.15
    weight = layer.numbers["h_y"] * phi(a)[0]  # (1) [SYMP.exact_weight]
    momentum = namespace(x).exp(-a) * at_rest(p, x) + weight * answer.g  # (b, i, m) [SYMP.exact_momentum]
    moved = layer.oracle.mobilised(layer, momentum)  # (b, i, m): B p'
    speed = layer.oracle.velocity(moved, answer.context)  # (b, i, m): B p' / z
    result = x + layer.numbers["h_x"] * speed  # (b, i, m) [SYMP.exact_moved]
    return result, momentum, Saved(p, t, answer.g, a, weight, momentum, moved, speed, answer.context, asked)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_later: Array | None, add: Add
) -> tuple[Array, Array | None, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    # forward: result = x + h_x * speed
    d_speed = layer.numbers["h_x"] * d_result  # (b, i, m): dSYMP.17
    add("h_x", inner(d_result, saved.speed))
    # forward: speed = velocity(mobilised(momentum), z)
    d_moved, d_context = layer.oracle.velocity_backward(saved.moved, saved.speed, saved.context, d_speed)  # (b, i, m)
    d_new = layer.oracle.mobilised_backward(layer, saved.momentum, d_moved, add)  # (b, i, m)
    d_momentum = d_new if d_later is None else d_later + d_new  # (b, i, m) [dSYMP.exact_momentum]
    # forward: momentum = exp(-a) * p + weight * force
    decayed = namespace(d_result).exp(-saved.a)  # (1)
    d_weight = inner(d_momentum, saved.force)  # (1) [dSYMP.exact_weight]
    d_force = saved.weight * d_momentum  # (b, i, m)
    # forward: weight = h_y * phi(a)
    value, slope = phi(saved.a)  # (1), (1)
    before = at_rest(saved.p, d_result)  # (b, i, m)
    d_a = layer.numbers["h_y"] * slope * d_weight - decayed * inner(d_momentum, before)  # (1): dSYMP.15
    own = equations.active(presymplectic_euler)
    d_t, d_h = own.damping_backward(layer, saved.t, layer.numbers["h_y"], d_a, add)  # (1), (1)
    add("h_y", value * d_weight + d_h)
    # forward: answer = oracle(x, p)
    d_x, d_p = layer.oracle.backward(layer, saved.asked, d_force, None, d_context, add)  # (b, i, m), (b, i, m)
    return d_result + d_x, plus(d_p, decayed * d_momentum), d_t


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
