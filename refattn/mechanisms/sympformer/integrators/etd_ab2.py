"""Exponential differences of two steps: the damping is exact, and the damped force follows Adams and Bashforth.

Equations (a is SYMP.15, b the same from t_0, the time of the layer before, to t + h_y; g the force at (x, p); x'
SYMP.extrapolated_moved; G is SYMP.extrapolated for y and y_0; a first layer is its own past)::

    [SYMP.etd_force]  y = exp(-a) g
    [SYMP.etd_earlier_force]  y_0 = exp(-b) g_0
    [SYMP.etd_momentum]  p' = exp(-a) p + h_y G

A layer hands g, f, its time and its steps to the next one.

Adjoints, for given dp' and later, the gradient of g where the next layer reads it; those of x' are in `two_steps`::

    [dSYMP.etd_force]  dy = (1 + h_y/2h_0) dG           h_0 the h_y of the layer before
    [dSYMP.etd_earlier_force]  dy_0 = -h_y/2h_0 dG

and dG = h_y dp', dh_y = sum dp' G, dg = exp(-a) dy + later, dg_0 = exp(-b) dy_0, dp = exp(-a) dp', da = -sum dy y -
exp(-a) sum dp' p, db = -sum dy_0 y_0; b depends on t and h_y through its length, t + h_y - t_0.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its ETD-AB2 method.

How the authors' code differs: tokens move by h_x B p' / z, as those of presymplectic Euler, which is of first order;
and it takes 3/2 and -1/2, and the damping of h_x for that of h_y, though steps differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from refattn import equations
from refattn.mechanisms.sympformer import presymplectic_euler
from refattn.mechanisms.sympformer.integrators import two_steps
from refattn.mechanisms.sympformer.integrators.drift import at_rest, plus
from refattn.mechanisms.sympformer.integrators.two_steps import Drifted, History
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.mechanisms.sympformer.presymplectic_euler import Integrator
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class EtdAB2(Integrator):
    """ETD-AB2: this file."""

    remembers: ClassVar[bool] = True


@dataclass(frozen=True)
class Saved:
    """What the backward reads; what follows `drifted` is None where nobody reads the momentum."""

    p: Array | None
    t: Array
    history: History | None
    drifted: Drifted
    past: History | None = None
    a: Array | None = None
    b: Array | None = None
    damped: Array | None = None  # y
    before: Array | None = None  # y_0
    ahead: Array | None = None  # G


def forward(
    layer: Layer,
    x: Array,
    p: Array | None,
    t: Array,
    history: History | None,
) -> tuple[Array, Array | None, History | None, Saved]:
    """Return the next tokens, momenta (None where nobody reads them) and history, and what `backward` reads."""
    xp, own, h_y = namespace(x), equations.active(two_steps), layer.numbers["h_y"]  # -, -, (1)
    result, drifted = own.forward(layer, x, p, history)  # (b, i, m): SYMP.extrapolated_moved
    force = drifted.asked.force  # (b, i, m)
    if force is None:
        return result, None, None, Saved(p, t, history, drifted)
    clock = equations.active(presymplectic_euler)
    a = clock.damping(layer, t, h_y)  # (1): SYMP.15
    damped = xp.exp(-a) * force  # (b, i, m) [SYMP.etd_force]
    following = History(drifted.asked.speed, force, t, layer.numbers["h_x"], h_y)
    past = following if history is None else history  # a first layer is its own
    b = clock.damping(layer, past.t, (t - past.t) + h_y)  # (1): SYMP.15 over both steps
    before = xp.exp(-b) * past.g  # (b, i, m) [SYMP.etd_earlier_force]
    ahead = own.ahead(damped, before, h_y, past.h_y)  # (b, i, m): SYMP.extrapolated
    momentum = xp.exp(-a) * at_rest(p, x) + h_y * ahead  # (b, i, m) [SYMP.etd_momentum]
    return result, momentum, following, Saved(p, t, history, drifted, past, a, b, damped, before, ahead)


def backward(
    layer: Layer,
    saved: Saved,
    d_result: Array,
    d_momentum: Array | None,
    d_following: History | None,
    add: Add,
) -> tuple[Array, Array | None, History | None, Array]:
    """Return the gradients of x, p, the history and t, and add those of the parameters and the numbers."""
    xp, history, past, h_y = namespace(d_result), saved.history, saved.past, layer.numbers["h_y"]  # -, -, -, (1)
    own, clock = equations.active(two_steps), equations.active(presymplectic_euler)
    d_force, d_before, d_t = None, None, 0.0 * saved.t  # -, -, (1)
    d_g_before = d_h_before = d_t_before = None
    if d_momentum is not None and past is not None and saved.a is not None and saved.b is not None:
        # forward: momentum = exp(-a) * p + h_y * ahead
        decayed = xp.exp(-saved.a)  # (1)
        d_before = decayed * d_momentum  # (b, i, m)
        d_ahead = h_y * d_momentum  # (b, i, m): dSYMP.extrapolated
        add("h_y", inner(d_momentum, saved.ahead))
        # forward: ahead = damped + h_y / 2 h_0 * (damped - before)
        d_damped, d_late, d_h, d_h_before = own.ahead_backward(
            saved.damped, saved.before, h_y, past.h_y, d_ahead
        )  # (b, i, m) [dSYMP.etd_force], (b, i, m) [dSYMP.etd_earlier_force], (1), (1)
        add("h_y", d_h)
        # forward: before = exp(-b) * g_0
        d_g_before = xp.exp(-saved.b) * d_late  # (b, i, m)
        d_b = -inner(d_late, saved.before)  # (1): dSYMP.15
        d_start, d_length = clock.damping_backward(layer, past.t, (saved.t - past.t) + h_y, d_b, add)  # (1), (1)
        d_t_before, d_t = d_start - d_length, d_length  # (1), (1)
        add("h_y", d_length)
        # forward: damped = exp(-a) * force
        d_force = decayed * d_damped  # (b, i, m)
        if d_following is not None:
            d_force = d_force + d_following.g  # (b, i, m)
        if history is None:
            d_force, d_t = d_force + d_g_before, d_t + d_t_before  # (b, i, m), (1): its own past
            add("h_y", d_h_before)
        d_a = -inner(d_damped, saved.damped) - inner(d_before, at_rest(saved.p, d_result))  # (1): dSYMP.15
        d_now, d_h = clock.damping_backward(layer, saved.t, h_y, d_a, add)  # (1), (1)
        d_t = d_t + d_now  # (1)
        add("h_y", d_h)
    moved = own.backward(layer, saved.drifted, history, d_result, d_force, d_following, add)
    d_x, d_p, d_f_before, d_h_x = moved  # (b, i, m), (b, i, m), (b, i, m), (1)
    d_history, d_t = two_steps.finish(
        layer, history, (d_f_before, d_g_before, d_t_before, d_h_x, d_h_before), d_t, d_following, add
    )  # -, (1)
    return d_x, plus(d_p, d_before), d_history, d_t
