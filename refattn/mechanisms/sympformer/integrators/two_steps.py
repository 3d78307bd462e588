"""What the integrators of two steps share: the drift, and the line through this layer and the one before it.

A value y that was y_0 a step ago is carried half a step ahead. Equations (f is SYMP.17 for the momentum that came in,
r the ratio of a step to the one before it, in the drift that of h_x)::

    [SYMP.extrapolated]  Y = y + r/2 (y - y_0)          r = h / h_0
    [SYMP.extrapolated_moved]  x' = x + h_x F           F is Y of f; at rest: x

With a step that stays the same these are the weights 3/2 and -1/2 of Adams and Bashforth. A first layer is its own
past, y_0 = y, and takes a step of Euler's.

Adjoints, for given dx' and dY: dF = h_x dx' and dh_x = sum dx' F; dy = (1 + r/2) dY, dy_0 = -r/2 dY, and with dr = sum
dY (y - y_0) / 2 also dh = dr / h_0 and dh_0 = -dr r / h_0.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its AB2 methods.

How the authors' code differs: it takes 3/2 and -1/2, though the steps of layers differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.sympformer.integrators import drift
from refattn.mechanisms.sympformer.integrators.drift import at_rest
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.xp import Array


@dataclass(frozen=True)
class History:
    """What an integrator remembers of the layer before."""

    f: Array | None  # (b, i, m): the velocity; None: the tokens were at rest
    g: Array  # (b, i, m): the force, or the rate of the momentum
    t: Array  # (1,), as the steps
    h_x: Array
    h_y: Array


@dataclass(frozen=True)
class Drifted:
    """What the backward of the drift reads."""

    asked: drift.Saved
    ahead: Array | None  # F
    before: Array | None  # f_0


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


def forward(layer: Layer, x: Array, p: Array | None, history: History | None) -> tuple[Array, Drifted]:
    """Return the next tokens, and what was saved: the force among it."""
    asked, h_x = drift.ask(layer, x, p), layer.numbers["h_x"]  # -, (1)
    if asked.speed is None:
        return x, Drifted(asked, None, None)
    before = asked.speed if history is None else at_rest(history.f, x)  # (b, i, m): f_0
    speed = ahead(asked.speed, before, h_x, h_x if history is None else history.h_x)  # (b, i, m): F
    result = x + h_x * speed  # (b, i, m) [SYMP.extrapolated_moved]
    return result, Drifted(asked, speed, before)


def backward(
    layer: Layer,
    saved: Drifted,
    history: History | None,
    d_result: Array,
    d_force: Array | None,
    d_following: History | None,
    add: Add,
) -> tuple[Array, Array | None, Array | None, Array]:
    """Return the gradients of x, p, and of f_0 and h_x of the layer before."""
    h_x = layer.numbers["h_x"]  # (1)
    d_speed, d_before, d_h_before = None, None, 0.0 * h_x  # -, -, (1)
    if saved.ahead is not None:
        # forward: result = x + h_x * ahead
        d_ahead = h_x * d_result  # (b, i, m): dSYMP.extrapolated
        add("h_x", inner(d_result, saved.ahead))
        h_before = h_x if history is None else history.h_x  # (1)
        turned = ahead_backward(saved.asked.speed, saved.before, h_x, h_before, d_ahead)
        d_speed, d_before, d_h, d_h_before = turned  # (b, i, m), (b, i, m), (1), (1)
        add("h_x", d_h)
        if history is None:
            d_speed = d_speed + d_before  # (b, i, m): its own past
            add("h_x", d_h_before)
        if d_following is not None and d_following.f is not None:
            # forward: following = History(speed, ...)
            d_speed = d_speed + d_following.f  # (b, i, m)
    d_x, d_p = drift.ask_backward(layer, saved.asked, d_speed, d_force, add)  # (b, i, m), (b, i, m)
    return d_result + d_x, d_p, d_before, d_h_before


def finish(
    layer: Layer, history: History | None, d: tuple[Any, ...], d_t: Array, d_following: History | None, add: Add
) -> tuple[History | None, Array]:
    """Return the gradients of the history and of t; `d` are those of f_0, g_0, t, h_x and h_y of the layer before."""
    if d_following is not None:
        # forward: following = History(..., t, h_x, h_y)
        d_t = d_t + d_following.t  # (1)
        add("h_x", d_following.h_x)
        add("h_y", d_following.h_y)
    if history is None:
        return None, d_t
    d_f, d_g, d_t_before, d_h_x, d_h_y = d
    none = 0.0 * history.t  # (1)
    d_g = 0.0 * history.g if d_g is None else d_g  # (b, i, m)
    d_t_before, d_h_y = (none if each is None else each for each in (d_t_before, d_h_y))
    return History(None if history.f is None else d_f, d_g, d_t_before, d_h_x, d_h_y), d_t
