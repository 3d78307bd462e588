"""One step of tokens and momenta with one call of the oracle.

Equations (coefficients are those of `coefficients`; g, b, f as in `oracle`; what an integrator does not have is left
out)::

    [SYMP.19]  p_in = pre p                             the momentum at which the oracle is asked
    [SYMP.20]  p* = gain g + keep p_in + gain_before g_0
    [SYMP.21]  p' = post p*                             before it is normalised
    [SYMP.22]  x' = x + drift f + drift_before f_0      f of p* for moving integrators, of p_in for the others
    [SYMP.23]  h = g - alpha p_in                       what AB2 remembers; ETD-AB2 remembers g

Adjoints, for given dx', dp' and those of the history::

    [dSYMP.18]  df = drift dx' + df of the next layer's history
    [dSYMP.20]  dp* = post dp' + dB w_b^T               dB the gradient of B p*, for moving integrators
    [dSYMP.17]  dg = gain dp* + dh
    [dSYMP.19]  dp_in = keep dp* - alpha dh + what the oracle asks
    [dSYMP.p]  dp = pre dp_in
    [dSYMP.x]  dx = dx' + what the oracle asks

and the gradient of a coefficient is the inner product of the gradient of its sum with what it multiplies.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535): kick, damping, drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.mechanisms.sympformer import coefficients
from refattn.mechanisms.sympformer.numbers import Numbers, dot
from refattn.mechanisms.sympformer.oracles import module_of
from refattn.mechanisms.sympformer.params import Add, Params
from refattn.mechanisms.sympformer.prefix import Prefix
from refattn.xp import Array


@dataclass(frozen=True)
class History:
    """What a multistep integrator remembers of the layer before."""

    f: Array | None  # (b, i, m); None: the tokens were at rest
    g: Array  # (b, i, m)
    t: Array  # (1,), as the steps
    h_x: Array
    h_y: Array


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    p: Array | None
    inner: Array | None  # p_in
    kicked: Array | None  # p*
    speed: Array | None  # f
    force: Array | None  # g
    moved: Array | None  # B p* or B p
    context: Any
    oracle: Any
    history: History | None
    coefficients: coefficients.Saved


def forward(
    params: Params,
    numbers: Numbers,
    x: Array,
    p: Array | None,
    history: History | None,
    t: Array,
    causal: bool | Prefix,
) -> tuple[Array, Array | None, History | None, Saved]:
    """Return the next tokens, momenta (None where nobody reads them) and history, and what `backward` reads."""
    config = params.config
    own = equations.active(module_of(config))
    before = None if history is None else coefficients.Before(history.t, history.h_x, history.h_y)
    c, numbers_saved = coefficients.forward(config, numbers, t, before)
    inner = p  # SYMP.19 with pre = 1
    if p is not None and c.pre is not None:
        inner = c.pre * p  # (b, i, m) [SYMP.19]
    answer, oracle_saved = own.forward(params, numbers, x, inner, causal)
    kicked = raw = speed = following = None
    if answer.g is not None:
        push = c.gain * answer.g  # (b, i, m): part of SYMP.20
        if inner is not None:
            push = push + (inner if c.keep is None else c.keep * inner)  # (b, i, m): part of SYMP.20
        if history is not None:
            push = push + c.gain_before * history.g  # (b, i, m): part of SYMP.20
        kicked = push  # (b, i, m) [SYMP.20]
        raw = kicked  # SYMP.21 with post = 1
        if c.post is not None:
            raw = c.post * kicked  # (b, i, m) [SYMP.21]
    moved = own.mobilised(params, kicked) if config.moving else answer.b  # (b, i, m): B p* or B p
    result = x  # where nothing moves
    if moved is not None:
        speed = own.velocity(moved, answer.context)  # (b, i, m): SYMP.18, tagged in the function
        step = c.drift * speed  # (b, i, m): part of SYMP.22
        if history is not None and history.f is not None:
            step = step + c.drift_before * history.f  # (b, i, m): part of SYMP.22
        result = x + step  # (b, i, m) [SYMP.22]
    if config.multistep and answer.g is not None and not config.last:
        remembered = answer.g  # (b, i, m): what ETD-AB2 remembers
        if c.alpha is not None and inner is not None:
            remembered = answer.g - c.alpha * inner  # (b, i, m) [SYMP.23]
        following = History(speed, remembered, t, numbers["h_x"], numbers["h_y"])
    saved = Saved(p, inner, kicked, speed, answer.g, moved, answer.context, oracle_saved, history, numbers_saved)
    return result, raw if config.keeps else None, following, saved


def backward(
    params: Params, saved: Saved, d_result: Array, d_raw: Array | None, d_following: History | None, add: Add
) -> tuple[Array, Array | None, History | None, Array]:
    """Return the gradients of x, p, the history and t, and add those of the parameters and the numbers."""
    config, history = params.config, saved.history
    own = equations.active(module_of(config))
    inner = saved.inner  # p_in
    c, d = saved.coefficients.value, {}
    d_moved = d_context = d_speed = d_force = d_kicked = d_inner = None
    if saved.speed is not None:
        # forward: result = x + drift * speed + drift_before * history.f
        d_step = c.drift * d_result  # (b, i, m): part of dSYMP.18
        d["drift"] = dot(d_result, saved.speed)  # (1): the gradient of a coefficient
        if d_following is not None and d_following.f is not None:
            d_step = d_step + d_following.f  # (b, i, m): part of dSYMP.18
        d_speed = d_step  # (b, i, m) [dSYMP.18]
        turned = own.velocity_backward(saved.moved, saved.speed, saved.context, d_speed)
        d_moved, d_context = turned
    if saved.force is not None:
        parts = []
        if d_raw is not None:
            # forward: raw = post * kicked
            parts.append(d_raw if c.post is None else c.post * d_raw)
            if c.post is not None:
                d["post"] = dot(d_raw, saved.kicked)  # (1): the gradient of a coefficient
        if config.moving:
            # forward: moved = mobilised(kicked)
            parts.append(own.mobilised_backward(params, saved.kicked, d_moved, add))
            d_moved = None
        d_kicked = sum(parts[1:], parts[0])  # (b, i, m) [dSYMP.20]
        # forward: kicked = gain * force + keep * inner + gain_before * history.g
        d["gain"] = dot(d_kicked, saved.force)  # (1): the gradient of a coefficient
        d_push = c.gain * d_kicked  # (b, i, m): part of dSYMP.17
        if d_following is not None:
            d_push = d_push + d_following.g  # (b, i, m): part of dSYMP.17
        d_force = d_push  # (b, i, m) [dSYMP.17]
        if inner is not None:
            d_carried = d_kicked if c.keep is None else c.keep * d_kicked  # (b, i, m): part of dSYMP.19
            d["keep"] = dot(d_kicked, inner)  # (1): the gradient of a coefficient
            if d_following is not None and c.alpha is not None:
                # forward: remembered = force - alpha * inner
                d_carried = d_carried - c.alpha * d_following.g  # (b, i, m): part of dSYMP.19
                d["alpha"] = -dot(d_following.g, inner)  # (1): the gradient of a coefficient
            d_inner = d_carried  # part of dSYMP.19
    d_x, d_asked = own.backward(params, saved.oracle, d_force, d_moved, d_context, add)  # tagged in the function
    d_p = None
    if d_asked is not None:
        d_all = d_asked if d_inner is None else d_asked + d_inner  # (b, i, m) [dSYMP.19]
        d_p = d_all  # (b, i, m): dSYMP.p with pre = 1
        if c.pre is not None:
            # forward: inner = pre * p
            d_p = c.pre * d_all  # (b, i, m) [dSYMP.p]
            d["pre"] = dot(d_all, saved.p)  # (1): the gradient of a coefficient
    d_start = d_result + d_x  # (b, i, m) [dSYMP.x]
    d_history = None
    if history is not None:
        d_f = None
        d_g = 0.0 * history.g  # (b, i, m): of the history
        if d_kicked is not None and c.gain_before is not None:
            d_g = c.gain_before * d_kicked  # (b, i, m): of the history
            d["gain_before"] = dot(d_kicked, history.g)  # (1): the gradient of a coefficient
        d["drift_before"] = 0.0 * c.drift  # (1): the gradient of a coefficient
        if history.f is not None:
            d_f = c.drift_before * d_result  # (b, i, m): of the history
            d["drift_before"] = dot(d_result, history.f)  # (1): the gradient of a coefficient
    none = 0.0 * c.drift  # (1): no gradient
    d_c = coefficients.Coefficients(**{"gain": none, "drift": none, **d})
    d_numbers, d_t, d_before = coefficients.backward(config, saved.coefficients, d_c)  # of numbers
    if history is not None and d_before is not None:
        d_history = History(d_f, d_g, d_before.t, d_before.h_x, d_before.h_y)
    if d_following is not None:
        d_t = d_t + d_following.t  # (1): of the time
        d_numbers["h_x"] = d_numbers["h_x"] + d_following.h_x  # a number
        d_numbers["h_y"] = d_numbers["h_y"] + d_following.h_y  # a number
    for name, value in d_numbers.items():
        add(name, value)
    return d_start, d_p, d_history, d_t
