"""The exponential midpoint: exact damping for a force that stays the same, and a drift with the mean of both momenta.

Equations (a is SYMP.15, g the force at (x, p), f the velocity with what the oracle gave, eta' = alpha)::

    [SYMP.midpoint_weight]  I = int_t^(t + h_y) exp(-(eta(t + h_y) - eta(s))) ds
    [SYMP.midpoint_momentum]  p' = exp(-a) p + I g
    [SYMP.midpoint_moved]  x' = x + h_x f((p + p') / 2)

The integral is taken with 16 nodes of Gauss and Legendre.

Adjoints, for given dx' and later, the gradient of p' where a later layer reads it (dq that of the mean momentum)::

    [dSYMP.midpoint_moved]  df = h_x dx'
    [dSYMP.midpoint_momentum]  dp' = later + dq / 2
    [dSYMP.midpoint_weight]  dI = sum dp' g

and dg = I dp', dp = exp(-a) dp' + dq / 2, da = -exp(-a) sum dp' p, dh_x = sum dx' f; of I, with T = t + h_y, E(s) =
exp(-(eta(T) - eta(s))) and alpha at T: dh_y = dI (1 - alpha I), dt = dI (1 - E(t) - alpha I), dc_log = -dI int E(s)
log(T / s) ds and dc_lin = -dI int E(s) (T - s) ds.

Axes: b batch, i token, m width; momenta that are matrices have one axis m more.

Source: the linear exponential midpoint of the authors' second version, for the oracle `reduced`; here also with others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.mechanisms.sympformer import presymplectic_euler
from refattn.mechanisms.sympformer.integrators.drift import at_rest, plus
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.mechanisms.sympformer.presymplectic_euler import Integrator
from refattn.xp import Array, namespace

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


@dataclass(frozen=True)
class ExponentialMidpoint(Integrator):
    """The exponential midpoint: this file."""

    moves: ClassVar[bool] = True


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    p: Array | None
    t: Array
    force: Array  # g
    a: Array
    weight: Array  # I
    mean: Array
    moved: Array  # B times the mean
    speed: Array  # f
    context: Any
    asked: Any


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array, Saved]:
    """Return the next tokens and momenta, and what `backward` reads."""
    answer, asked = layer.oracle.forward(layer, x, p)
    a = equations.active(presymplectic_euler).damping(layer, t, layer.numbers["h_y"])  # (1): SYMP.15
    weight = integral(layer, t)[0]  # (1) [SYMP.midpoint_weight]
    before = at_rest(p, answer.g)  # (b, i, m)
    momentum = namespace(x).exp(-a) * before + weight * answer.g  # (b, i, m) [SYMP.midpoint_momentum]
    mean = 0.5 * (before + momentum)  # (b, i, m)
    moved = layer.oracle.mobilised(layer, mean)  # (b, i, m): B times it
    speed = layer.oracle.velocity(moved, answer.context)  # (b, i, m)
    result = x + layer.numbers["h_x"] * speed  # (b, i, m) [SYMP.midpoint_moved]
    return result, momentum, Saved(p, t, answer.g, a, weight, mean, moved, speed, answer.context, asked)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_later: Array | None, add: Add
) -> tuple[Array, Array | None, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    # forward: result = x + h_x * speed
    d_speed = layer.numbers["h_x"] * d_result  # (b, i, m) [dSYMP.midpoint_moved]
    add("h_x", inner(d_result, saved.speed))
    # forward: speed = velocity(mobilised((p + momentum) / 2), context)
    d_moved, d_context = layer.oracle.velocity_backward(saved.moved, saved.speed, saved.context, d_speed)  # (b, i, m)
    d_half = 0.5 * layer.oracle.mobilised_backward(layer, saved.mean, d_moved, add)  # (b, i, m): of p and p'
    d_momentum = d_half if d_later is None else d_later + d_half  # (b, i, m) [dSYMP.midpoint_momentum]
    # forward: momentum = exp(-a) * p + weight * force
    decayed = namespace(d_result).exp(-saved.a)  # (1)
    d_weight = inner(d_momentum, saved.force)  # (1) [dSYMP.midpoint_weight]
    d_a = -decayed * inner(d_momentum, at_rest(saved.p, d_momentum))  # (1): dSYMP.15
    own = equations.active(presymplectic_euler)
    d_t, d_h = own.damping_backward(layer, saved.t, layer.numbers["h_y"], d_a, add)  # (1), (1)
    # forward: weight = integral(t, h_y)
    _, by_log, by_lin, by_t, by_h = integral(layer, saved.t)  # (1), (1), (1), (1)
    add("c_log", by_log * d_weight)
    add("c_lin", by_lin * d_weight)
    add("h_y", by_h * d_weight + d_h)
    # forward: answer = oracle(x, p)
    d_force = saved.weight * d_momentum  # (b, i, m)
    d_x, d_p = layer.oracle.backward(layer, saved.asked, d_force, None, d_context, add)  # (b, i, m), (b, i, m)
    return d_result + d_x, plus(d_p, decayed * d_momentum + d_half), d_t + by_t * d_weight


def integral(layer: Layer, t: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Return I, and its derivatives by c_log, c_lin, t and h_y."""
    xp, h = namespace(t), layer.numbers["h_y"]  # -, (1)
    c_log, c_lin = (layer.numbers.get(name, 0.0 * t) for name in ("c_log", "c_lin"))
    whole = by_log = by_lin = 0.0 * t  # (1), (1), (1)
    for place, share in NODES:
        rest = (1.0 - place) * h  # (1): t + h - s
        grown = xp.log((t + h) / (t + place * h))  # (1)
        value = share * h * xp.exp(-c_log * grown - c_lin * rest)  # (1)
        whole, by_log, by_lin = whole + value, by_log - value * grown, by_lin - value * rest  # (1), (1), (1)
    left = xp.exp(-c_log * xp.log((t + h) / t) - c_lin * h)  # (1): e
    lost = (c_log / (t + h) + c_lin) * whole  # (1)
    return whole, by_log, by_lin, 1.0 - left - lost, 1.0 - lost
