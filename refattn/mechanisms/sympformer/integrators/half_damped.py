"""Half-damped presymplectic Euler: half of the damping before the kick, half after it.

Equations (a is SYMP.15; the oracle is asked at (x, p_in) for g, and for the z of f, SYMP.17)::

    [SYMP.halved_entering]  p_in = exp(-a/2) p     at rest: 0
    [SYMP.halved_kicked]  p* = p_in + h_y g
    [SYMP.halved_momentum]  p' = exp(-a/2) p*
    [SYMP.halved_moved]  x' = x + h_x f(p*)

Adjoints, for given dx' and later, the gradient of p' where a later layer reads it::

    [dSYMP.halved_kicked]  dp* = exp(-a/2) later + dB w_b^T    dB = df / z, that of B p*
    [dSYMP.halved_entering]  dp_in = dp* + dSYMP.momentum    the latter: what the oracle asks for dg = h_y dp* and dz

and df = h_x dx', dh_x = sum dx' f, dp = exp(-a/2) dp_in, da = -(sum later p' + sum dp_in p_in) / 2, dh_y = sum dp* g
beside that of a, whose adjoint stands with SYMP.15.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.mechanisms.sympformer import presymplectic_euler
from refattn.mechanisms.sympformer.integrators.drift import at_rest
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.mechanisms.sympformer.presymplectic_euler import Integrator
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class HalfDamped(Integrator):
    """Half-damped presymplectic Euler: this file."""

    moves: ClassVar[bool] = True

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """At rest the second half alone damps, which the next layer reads."""
        return keeps or not rests


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    p: Array | None
    t: Array
    half: Array  # exp(-a/2)
    inner: Array | None  # p_in
    force: Array  # g
    kicked: Array  # p*
    moved: Array  # B p*
    speed: Array  # f
    context: Any  # z
    asked: Any


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array, Saved]:
    """Return the next tokens and momenta, and what `backward` reads."""
    a = equations.active(presymplectic_euler).damping(layer, t, layer.numbers["h_y"])  # (1): SYMP.15
    half = namespace(x).exp(-0.5 * a)  # (1)
    p_in = None
    if p is not None:
        p_in = half * p  # (b, i, m) [SYMP.halved_entering]
    answer, asked = layer.oracle.forward(layer, x, p_in)
    kicked = at_rest(p_in, x) + layer.numbers["h_y"] * answer.g  # (b, i, m) [SYMP.halved_kicked]
    momentum = half * kicked  # (b, i, m) [SYMP.halved_momentum]
    moved = layer.oracle.mobilised(layer, kicked)  # (b, i, m): B p*
    speed = layer.oracle.velocity(moved, answer.context)  # (b, i, m): B p* / z
    result = x + layer.numbers["h_x"] * speed  # (b, i, m) [SYMP.halved_moved]
    return result, momentum, Saved(p, t, half, p_in, answer.g, kicked, moved, speed, answer.context, asked)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_later: Array | None, add: Add
) -> tuple[Array, Array | None, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    half = saved.half  # (1)
    # forward: result = x + h_x * speed
    d_speed = layer.numbers["h_x"] * d_result  # (b, i, m): dSYMP.17
    add("h_x", inner(d_result, saved.speed))
    # forward: speed = velocity(mobilised(kicked), z)
    d_moved, d_context = layer.oracle.velocity_backward(saved.moved, saved.speed, saved.context, d_speed)  # (b, i, m)
    d_new = layer.oracle.mobilised_backward(layer, saved.kicked, d_moved, add)  # (b, i, m)
    # forward: momentum = half * kicked
    d_kicked = d_new if d_later is None else half * d_later + d_new  # (b, i, m) [dSYMP.halved_kicked]
    d_half = 0.0 * half if d_later is None else inner(d_later, saved.kicked)  # (1)
    # forward: kicked = p_in + h_y * force; answer = oracle(x, p_in)
    d_h_y = inner(d_kicked, saved.force)  # (1)
    d_x, d_asked = layer.oracle.backward(
        layer, saved.asked, layer.numbers["h_y"] * d_kicked, None, d_context, add
    )  # (b, i, m)
    d_p = None
    if saved.p is not None:
        d_in = d_kicked + d_asked  # (b, i, m) [dSYMP.halved_entering]
        # forward: p_in = half * p
        d_p = half * d_in  # (b, i, m)
        d_half = d_half + inner(d_in, saved.p)  # (1)
    # forward: half = exp(-a / 2)
    own, d_a = equations.active(presymplectic_euler), -0.5 * half * d_half  # -, (1)
    d_t, d_h = own.damping_backward(layer, saved.t, layer.numbers["h_y"], d_a, add)  # (1), (1)
    add("h_y", d_h_y + d_h)
    return d_result + d_x, d_p, d_t
