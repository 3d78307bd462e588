"""The methods of two steps: of second order, with one call of the force, by the line through the layer before.

A value y that was y_0 a step ago is carried half a step ahead. Equations (g and f are SYMP.13 and SYMP.17 for the
momentum that came in, r the ratio of a step to the one before it; a is SYMP.15, b the same from t_0, the time of the
layer before, to t + h_y, alpha SYMP.friction)::

    [SYMP.extrapolated]  Y = y + r/2 (y - y_0)          r = h / h_0
    [SYMP.extrapolated_moved]  x' = x + h_x F           F is Y of f; at rest: x
    [SYMP.handed_rate]  s = g - alpha p                 "ab2"; "etd_ab2": s = g
    [SYMP.rate]  y = s                                  "ab2"; "etd_ab2": y = exp(-a) s
    [SYMP.earlier_rate]  y_0 = s_0                      "ab2"; "etd_ab2": y_0 = exp(-b) s_0
    [SYMP.multistep_momentum]  p' = kept p + h_y Y      "ab2": kept = 1; "etd_ab2": kept = exp(-a)

With a step that stays the same the weights of y and y_0 are 3/2 and -1/2, those of Adams and Bashforth. A layer hands
s, f, its time and its steps to the next one. A first layer is its own past, y_0 = y, and takes a step of Euler's.

Adjoints, for given dx', dp' and later, the gradient of s if the next layer reads it::

    [dSYMP.rate]  dy = (1 + r/2) dY                     dY = h_y dp'
    [dSYMP.earlier_rate]  dy_0 = -r/2 dY
    [dSYMP.handed_rate]  ds = dy + later                "etd_ab2": exp(-a) dy + later; in a first layer ds_0, too

and dF = h_x dx', dh_x = sum dx' F, dh_y = sum dp' Y; with dr = sum dY (y - y_0) / 2 also dh = dr / h_0 and dh_0 = -dr
r / h_0. "ab2": dg = ds, dp = dp' - alpha ds, dalpha = -sum ds p. "etd_ab2": dg = ds, dp = exp(-a) dp', ds_0 = exp(-b)
dy_0, da = -sum dy y - exp(-a) sum dp' p, db = -sum dy_0 y_0; b depends on t and h_y through its length, t + h_y - t_0.

Axes: b batch, i token, m width; momenta that are matrices (oracle="reduced") have one axis m more.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its AB2 and ETD-AB2 methods.

How the authors' code differs: it takes 3/2 and -1/2, though the steps of layers differ, and the damping of h_x for that
of h_y. In its ETD-AB2 tokens move by h_x B p' / z, as those of presymplectic Euler, which is of first order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.mechanisms.sympformer.integrators import damping
from refattn.mechanisms.sympformer.params import Add, Integrator, Layer, at_rest, inner, plus
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class History:
    """What an integrator remembers of the layer before."""

    f: Array | None  # (b, i, m): the velocity; None: the tokens were at rest
    g: Array  # (b, i, m): the rate s
    t: Array  # (1,), as the steps
    h_x: Array
    h_y: Array


class AB2(Integrator):
    """Adams and Bashforth's method for the whole rate of the momentum."""

    remembers: ClassVar[bool] = True
    damped: ClassVar[str] = "old"

    def shares(self, layer: Layer, t: Array, t_before: Array) -> tuple[Array, Array, Array]:
        """Return alpha, and the shares that are kept of the momentum and of s_0."""
        one = namespace(t).ones_like(t)
        return equations.active(damping).friction(layer, t), one, one

    def shares_backward(
        self, layer: Layer, t: Array, t_before: Array, d_minus: tuple[Array, Array, Array], add: Add
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of t, t_0 and h_y for those of -alpha, -a and -b."""
        return equations.active(damping).friction_backward(layer, t, d_minus[0], add), 0.0 * t, 0.0 * t


class EtdAB2(Integrator):
    """Exponential differences: the damping is exact, and the damped force follows Adams and Bashforth."""

    remembers: ClassVar[bool] = True

    def shares(self, layer: Layer, t: Array, t_before: Array) -> tuple[Array, Array, Array]:
        """Return alpha, and the shares that are kept of the momentum and of s_0."""
        xp, own, h_y = namespace(t), equations.active(damping), layer.numbers["h_y"]
        left = xp.exp(-own.damping(layer, t_before, (t - t_before) + h_y))
        return 0.0 * t, xp.exp(-own.damping(layer, t, h_y)), left

    def shares_backward(
        self, layer: Layer, t: Array, t_before: Array, d_minus: tuple[Array, Array, Array], add: Add
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of t, t_0 and h_y for those of -alpha, -a and -b."""
        own, h_y = equations.active(damping), layer.numbers["h_y"]
        d_start, d_length = own.damping_backward(layer, t_before, (t - t_before) + h_y, d_minus[2], add)
        d_now, d_h = own.damping_backward(layer, t, h_y, d_minus[1], add)
        return d_now + d_length, d_start - d_length, d_h + d_length


@dataclass(frozen=True)
class Saved:
    """What the backward reads; no drift of tokens at rest, no kick of a momentum that nobody reads."""

    p: Array | None
    t: Array
    history: History | None
    asked: Any
    drift: tuple[Any, ...] | None
    kick: tuple[Any, ...] | None


def forward(
    layer: Layer, x: Array, p: Array | None, t: Array, history: History | None
) -> tuple[Array, Array | None, History | None, Saved]:
    """Return the next tokens, momenta (None where nobody reads them) and history, and what `backward` reads."""
    kind, h_x, h_y = layer.params.config.integrator, layer.numbers["h_x"], layer.numbers["h_y"]  # -, (1), (1)
    answer, asked = layer.force.forward(layer, x, p)
    result, speed, drift = x, None, None  # (b, i, m): at rest
    if answer.b is not None:
        speed = layer.force.velocity(answer.b, answer.context)  # (b, i, m): B p / z
        before = speed if history is None else at_rest(history.f, x)  # (b, i, m): f_0
        speed_ahead = ahead(speed, before, h_x, h_x if history is None else history.h_x)  # (b, i, m): F
        result = x + h_x * speed_ahead  # (b, i, m) [SYMP.extrapolated_moved]
        drift = (answer, speed, before, speed_ahead)
    if answer.g is None:
        return result, None, None, Saved(p, t, history, asked, drift, None)
    old = at_rest(p, answer.g)  # (b, i, m)
    alpha, kept, left = kind.shares(layer, t, t if history is None else history.t)  # (1), (1), (1)
    handed = answer.g - alpha * old  # (b, i, m) [SYMP.handed_rate]
    following = History(speed, handed, t, h_x, h_y)
    past = following if history is None else history  # a first layer is its own
    rate = kept * handed  # (b, i, m) [SYMP.rate]
    earlier = left * past.g  # (b, i, m) [SYMP.earlier_rate]
    rate_ahead = ahead(rate, earlier, h_y, past.h_y)  # (b, i, m): SYMP.extrapolated
    momentum = kept * old + h_y * rate_ahead  # (b, i, m) [SYMP.multistep_momentum]
    kick = (past, alpha, kept, left, rate, earlier, rate_ahead)
    return result, momentum, following, Saved(p, t, history, asked, drift, kick)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, d_following: History | None, add: Add
) -> tuple[Array, Array | None, History | None, Array]:
    """Return the gradients of x, p, the history and t, and add those of the parameters and the numbers."""
    kind, h_x, h_y = layer.params.config.integrator, layer.numbers["h_x"], layer.numbers["h_y"]  # -, (1), (1)
    history, none = saved.history, 0.0 * saved.t  # -, (1)
    d_handed = d_own = d_before = d_past = d_moved = d_context = None
    d_t, d_t_before, d_h_x, d_h_y = none, none, none, none  # (1), (1), (1), (1): the last two of the layer before
    if d_momentum is not None and saved.kick is not None:
        past, alpha, kept, left, rate, earlier, rate_ahead = saved.kick  # as they were given to it
        # forward: momentum = kept * old + h_y * rate_ahead
        old = at_rest(saved.p, d_momentum)  # (b, i, m)
        d_own = kept * d_momentum  # (b, i, m)
        add("h_y", inner(d_momentum, rate_ahead))
        # forward: rate_ahead = rate + h_y / 2 h_0 * (rate - earlier)
        d_rate, d_earlier, d_h, d_h_y = ahead_backward(
            rate, earlier, h_y, past.h_y, h_y * d_momentum
        )  # (b, i, m) [dSYMP.rate], (b, i, m) [dSYMP.earlier_rate], (1), (1)
        add("h_y", d_h)
        # forward: rate = kept * handed; earlier = left * past
        d_minus_a, d_minus_b = inner(d_rate, rate) + inner(d_own, old), inner(d_earlier, earlier)  # (1), (1)
        d_past = left * d_earlier  # (b, i, m)
        d_handed = kept * d_rate  # (b, i, m): where nobody reads it later
        if history is None:
            d_handed = d_handed + d_past  # (b, i, m): its own past
            add("h_y", d_h_y)
        d_handed = plus(d_handed, None if d_following is None else d_following.g)  # (b, i, m) [dSYMP.handed_rate]
        # forward: handed = force - alpha * old
        d_own = d_own - alpha * d_handed  # (b, i, m)
        # forward: alpha, kept, left = shares(t, t_before)
        d_minus = (inner(d_handed, old), d_minus_a, d_minus_b)  # (1) each
        d_t, d_t_before, d_h = kind.shares_backward(layer, saved.t, past.t, d_minus, add)  # (1), (1), (1)
        add("h_y", d_h)
        if history is None:
            d_t = d_t + d_t_before  # (1): its own past
    if saved.drift is not None:
        answer, speed, before, speed_ahead = saved.drift  # as they were given to it
        # forward: result = x + h_x * speed_ahead
        add("h_x", inner(d_result, speed_ahead))
        # forward: speed_ahead = speed + h_x / 2 h_0 * (speed - before)
        h_before = h_x if history is None else history.h_x  # (1)
        turned = ahead_backward(speed, before, h_x, h_before, h_x * d_result)
        d_speed, d_before, d_h, d_h_x = turned  # (b, i, m), (b, i, m), (1), (1)
        add("h_x", d_h)
        if history is None:
            d_speed = d_speed + d_before  # (b, i, m): its own past
            add("h_x", d_h_x)
        d_speed = plus(d_speed, None if d_following is None else d_following.f)  # (b, i, m)
        # forward: speed = velocity(mobilised(p), z)
        turned = layer.force.velocity_backward(answer.b, speed, answer.context, d_speed)
        d_moved, d_context = turned  # (b, i, m)
    # forward: answer = force(x, p); the force has the gradient of what is handed on
    turned = layer.force.backward(layer, saved.asked, d_handed, d_moved, d_context, add)
    d_x, d_p = turned  # (b, i, m), (b, i, m)
    if d_following is not None:
        # forward: following = History(..., t, h_x, h_y)
        d_t = d_t + d_following.t  # (1)
        add("h_x", d_following.h_x)
        add("h_y", d_following.h_y)
    d_history = None
    if history is not None:
        d_past = 0.0 * history.g if d_past is None else d_past  # (b, i, m)
        d_history = History(None if history.f is None else d_before, d_past, d_t_before, d_h_x, d_h_y)
    return d_result + d_x, plus(d_p, d_own), d_history, d_t


def ahead(y: Array, before: Array, h: Array, h_before: Array) -> Array:
    """Return Y."""
    line = y + (0.5 * h / h_before) * (y - before)  # (b, i, m) [SYMP.extrapolated]
    return line


def ahead_backward(y: Array, before: Array, h: Array, h_before: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of y, y_0, h and h_0."""
    ratio = h / h_before  # (1): r
    # forward: line = y + ratio / 2 * (y - before)
    d_ratio = 0.5 * inner(d, y - before)  # (1)
    return (1.0 + 0.5 * ratio) * d, -0.5 * ratio * d, d_ratio / h_before, -d_ratio * ratio / h_before
