"""Adams and Bashforth's method of two steps: of second order, with one call of the layer.oracle.

Equations (g is the force at (x, p), alpha SYMP.friction, x' SYMP.extrapolated_moved; R is SYMP.extrapolated for r)::

    [SYMP.multistep_rate]  r = g - alpha p              at rest: g
    [SYMP.multistep_momentum]  p' = p + h_y R

A layer hands r, f, its time and its steps to the next one.

Adjoints, for given dp' and later, the gradient of r where the next layer reads it; those of x' are in `two_steps`::

    [dSYMP.multistep_rate]  dr = (1 + h_y/2h_0) dR + later    h_0 is h_y of the layer before; in a first one: dR + later

and dR = h_y dp', dh_y = sum dp' R, dg = dr, dp = dp' - alpha dr, dalpha = -sum dr p.

Axes: b batch, i token, m width; momenta that are matrices (oracle="reduced") have one axis m more.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its AB2 method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from refattn import equations
from refattn.mechanisms.sympformer.integrators import explicit_euler, two_steps
from refattn.mechanisms.sympformer.integrators.drift import at_rest, plus
from refattn.mechanisms.sympformer.integrators.explicit_euler import ExplicitEuler
from refattn.mechanisms.sympformer.integrators.two_steps import Drifted, History
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.xp import Array


@dataclass(frozen=True)
class AB2(ExplicitEuler):
    """AB2: this file."""

    remembers: ClassVar[bool] = True


@dataclass(frozen=True)
class Saved:
    """What the backward reads; what follows `drifted` is None where nobody reads the momentum."""

    p: Array | None
    t: Array
    history: History | None
    drifted: Drifted
    alpha: Array | None = None
    past: History | None = None
    rate: Array | None = None  # r
    ahead: Array | None = None  # R


def forward(
    layer: Layer,
    x: Array,
    p: Array | None,
    t: Array,
    history: History | None,
) -> tuple[Array, Array | None, History | None, Saved]:
    """Return the next tokens, momenta (None where nobody reads them) and history, and what `backward` reads."""
    own, h_y = equations.active(two_steps), layer.numbers["h_y"]  # -, (1)
    result, drifted = own.forward(layer, x, p, history)  # (b, i, m): SYMP.extrapolated_moved
    force = drifted.asked.force  # (b, i, m)
    if force is None:
        return result, None, None, Saved(p, t, history, drifted)
    before = at_rest(p, force)  # (b, i, m)
    alpha = equations.active(explicit_euler).rate_of_damping(layer, t)  # (1): SYMP.friction
    rate = force - alpha * before  # (b, i, m) [SYMP.multistep_rate]
    following = History(drifted.asked.speed, rate, t, layer.numbers["h_x"], h_y)
    past = following if history is None else history  # a first layer is its own
    ahead = own.ahead(rate, past.g, h_y, past.h_y)  # (b, i, m): SYMP.extrapolated
    momentum = before + h_y * ahead  # (b, i, m) [SYMP.multistep_momentum]
    return result, momentum, following, Saved(p, t, history, drifted, alpha, past, rate, ahead)


def backward(
    layer: Layer,
    saved: Saved,
    d_result: Array,
    d_momentum: Array | None,
    d_following: History | None,
    add: Add,
) -> tuple[Array, Array | None, History | None, Array]:
    """Return the gradients of x, p, the history and t, and add those of the parameters and the numbers."""
    own, history, h_y = equations.active(two_steps), saved.history, layer.numbers["h_y"]  # -, -, (1)
    d_rate, d_before, d_t = None, None, 0.0 * saved.t  # -, -, (1)
    d_g_before = d_h_before = None
    if d_momentum is not None and saved.past is not None:
        # forward: momentum = p + h_y * ahead
        d_ahead = h_y * d_momentum  # (b, i, m): dSYMP.extrapolated
        add("h_y", inner(d_momentum, saved.ahead))
        # forward: ahead = rate + h_y / 2 h_0 * (rate - g_0)
        turned = own.ahead_backward(saved.rate, saved.past.g, h_y, saved.past.h_y, d_ahead)
        d_turned, d_g_before, d_h, d_h_before = turned  # (b, i, m), (b, i, m), (1), (1)
        add("h_y", d_h)
        if history is None:
            d_turned = d_turned + d_g_before  # (b, i, m): its own past
            add("h_y", d_h_before)
        d_rate = d_turned if d_following is None else d_turned + d_following.g  # (b, i, m) [dSYMP.multistep_rate]
        # forward: rate = force - alpha * p
        d_before = d_momentum - saved.alpha * d_rate  # (b, i, m)
        d_alpha = -inner(d_rate, at_rest(saved.p, d_rate))  # (1): dSYMP.friction
        d_t = explicit_euler.rate_of_damping_backward(layer, saved.t, d_alpha, add)  # (1)
    moved = own.backward(layer, saved.drifted, history, d_result, d_rate, d_following, add)
    d_x, d_p, d_f_before, d_h_x = moved  # (b, i, m), (b, i, m), (b, i, m), (1)
    d_history, d_t = two_steps.finish(
        layer, history, (d_f_before, d_g_before, None, d_h_x, d_h_before), d_t, d_following, add
    )  # -, (1)
    return d_x, plus(d_p, d_before), d_history, d_t
