"""The coefficients of an integrator that calls the oracle once.

    p_in = pre p
    p* = keep p_in + gain g + gain_before g_0
    p' = post p*
    x' = x + drift f + drift_before f_0

The table in `options` in these terms (a, b, alpha, phi and r as there; what is not named is 1, or not there)::

    presymplectic_euler, forward_euler              keep = e^-a, gain = h_y e^-a
    exponential_presymplectic, exponential_euler    keep = e^-a, gain = h_y phi(a)
    half_damped                                     pre = post = e^-a/2, gain = h_y
    explicit_euler                                  keep = 1 - h_y alpha, gain = h_y
    plain_euler                                     keep = retention, gain = h_y
    ab2             keep = 1 - gain alpha, gain = h_y (1 + r/2), gain_before = -h_y r/2; g_0 is g - alpha p_in
    etd_ab2         keep = e^-a, gain = h_y (1 + r/2) e^-a, gain_before = -h_y r/2 e^-b

and drift = h_x, with a history drift = h_x (1 + r/2) and drift_before = -h_x r/2 with the ratio r of the h_x.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.sympformer.damping import Decay, decay, phi
from refattn.mechanisms.sympformer.numbers import Numbers
from refattn.mechanisms.sympformer.options import Config
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Before:
    """What the coefficients need of the layer before: its time and its steps."""

    t: Array
    h_x: Array
    h_y: Array


@dataclass(frozen=True)
class Coefficients:
    """Arrays of one element; None where there is no such term. `alpha` is what the history subtracts."""

    gain: Array
    drift: Array
    keep: Array | None = None
    pre: Array | None = None
    post: Array | None = None
    gain_before: Array | None = None
    drift_before: Array | None = None
    alpha: Array | None = None


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    numbers: Numbers
    t: Array
    before: Before | None
    step: Decay
    long: Decay | None
    value: Coefficients


def forward(config: Config, numbers: Numbers, t: Array, before: Before | None) -> tuple[Coefficients, Saved]:
    """Return the coefficients of a step at time t."""
    xp, kind = namespace(t), config.integrator
    h_x, h_y, c_log, c_lin = (numbers[n] if n in numbers else 0.0 * t for n in ("h_x", "h_y", "c_log", "c_lin"))
    step = decay(c_log, c_lin, t, h_y, config.clip)
    long, drift, drift_before = None, h_x, None
    if before is not None:
        drift = h_x * (1.0 + 0.5 * h_x / before.h_x)
        drift_before = -0.5 * h_x * h_x / before.h_x
    if kind == "half_damped":
        half = xp.exp(-0.5 * step.a)
        value = Coefficients(h_y, drift, None, half, half)
    elif kind == "plain_euler":
        value = Coefficients(h_y, drift, numbers.get("retention"))
    elif kind in ("explicit_euler", "ab2"):
        alpha = c_log / t + c_lin
        gain, gain_before = h_y, None
        if before is not None:
            gain = h_y * (1.0 + 0.5 * h_y / before.h_y)
            gain_before = -0.5 * h_y * h_y / before.h_y
        kept = alpha if kind == "ab2" else None
        value = Coefficients(gain, drift, 1.0 - gain * alpha, None, None, gain_before, drift_before, kept)
    else:
        keep, gain_before = xp.exp(-step.a), None
        gain = h_y * (phi(step.a)[0] if kind.startswith("exponential") else keep)
        if before is not None:
            r = h_y / before.h_y
            long = decay(c_log, c_lin, before.t, (t - before.t) + h_y, config.clip)
            gain = gain * (1.0 + 0.5 * r)
            gain_before = -0.5 * h_y * r * xp.exp(-long.a)
        value = Coefficients(gain, drift, keep, None, None, gain_before, drift_before)
    return value, Saved(numbers, t, before, step, long, value)


def backward(config: Config, saved: Saved, d: Coefficients) -> tuple[Numbers, Array, Before | None]:
    """Return the gradients of the numbers, of t and of the layer before, for given gradients of the coefficients."""
    numbers, t, before, step, value, kind = (
        saved.numbers,
        saved.t,
        saved.before,
        saved.step,
        saved.value,
        config.integrator,
    )
    xp = namespace(t)
    none = xp.zeros_like(t)
    h_x, h_y, c_log = (numbers[n] if n in numbers else none for n in ("h_x", "h_y", "c_log"))
    d_keep, d_gain_before = (none if x is None else x for x in (d.keep, d.gain_before))
    d_a = d_long = d_alpha = d_retention = none
    r = none if before is None else h_y / before.h_y
    d_r = none
    if kind == "half_damped":
        # forward: pre = post = exp(-a / 2); gain = h_y
        assert value.pre is not None
        d_pre, d_post = (none if x is None else x for x in (d.pre, d.post))
        d_a = -0.5 * value.pre * (d_pre + d_post)
        d_h_y = d.gain
    elif kind == "plain_euler":
        d_h_y, d_retention = d.gain, d_keep
    elif kind in ("explicit_euler", "ab2"):
        # forward: gain = h_y (1 + r / 2); gain_before = -h_y r / 2; keep = 1 - gain alpha
        alpha = c_log / t + (numbers["c_lin"] if "c_lin" in numbers else none)
        d_gain = d.gain - d_keep * alpha
        d_alpha = (none if d.alpha is None else d.alpha) - d_keep * value.gain
        d_h_y = d_gain * (1.0 + 0.5 * r) - 0.5 * r * d_gain_before
        d_r = 0.5 * h_y * (d_gain - d_gain_before)
    else:
        # forward: keep = exp(-a); gain = h_y (1 + r / 2) (exp(-a) or phi(a)); gain_before = -h_y r / 2 exp(-b)
        assert value.keep is not None
        weight, slope = phi(step.a) if kind.startswith("exponential") else (value.keep, -value.keep)
        late = none if saved.long is None else xp.exp(-saved.long.a)
        d_a = d.gain * h_y * (1.0 + 0.5 * r) * slope - d_keep * value.keep
        d_h_y = d.gain * (1.0 + 0.5 * r) * weight - 0.5 * d_gain_before * r * late
        d_r = 0.5 * h_y * (d.gain * weight - d_gain_before * late)
        d_long = 0.5 * h_y * r * late * d_gain_before
    # forward: a = eta(t + h_y) - eta(t); alpha = c_log / t + c_lin
    d_h_y = d_h_y + d_a * step.by_h
    d_t = d_a * step.by_t - d_alpha * c_log / (t * t)
    d_c_log = d_a * step.by_c_log + d_alpha / t
    d_c_lin = d_a * step.by_c_lin + d_alpha
    d_h_x, d_before = d.drift, None
    if before is not None:
        # forward: r = h_y / h_y of the layer before
        d_h_y = d_h_y + d_r / before.h_y
        d_before_h_y = -d_r * r / before.h_y
        # forward: drift = h_x (1 + s / 2); drift_before = -h_x s / 2; s = h_x / h_x of the layer before
        s = h_x / before.h_x
        assert d.drift_before is not None
        d_s = 0.5 * h_x * (d.drift - d.drift_before)
        d_h_x = d.drift * (1.0 + 0.5 * s) - 0.5 * s * d.drift_before + d_s / before.h_x
        d_before_t = none
        if saved.long is not None:
            # forward: b = eta(t + h_y) - eta(t_0), as a(t_0, t - t_0 + h_y)
            long = saved.long
            d_h_y, d_t = d_h_y + d_long * long.by_h, d_t + d_long * long.by_h
            d_before_t = d_long * (long.by_t - long.by_h)
            d_c_log, d_c_lin = d_c_log + d_long * long.by_c_log, d_c_lin + d_long * long.by_c_lin
        d_before = Before(d_before_t, -d_s * s / before.h_x, d_before_h_y)
    found = {"h_x": d_h_x, "h_y": d_h_y, "c_log": d_c_log, "c_lin": d_c_lin, "retention": d_retention}
    return found, d_t, d_before
