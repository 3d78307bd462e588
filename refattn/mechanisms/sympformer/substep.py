"""The MLP substep: like attention it adds to a velocity, and the velocity moves the tokens.

Equations (u is what it looks ahead along: the velocity of the attention step, the momentum or a velocity of its own)::

    [SYMP.33]  u = (x' - x) / h_x                       "attention_velocity"; otherwise the momentum or the velocity
    [SYMP.34]  y = gain norm(x' + mu u)                 where u is 0: gain norm(x')
    [SYMP.35]  d = gelu(y w_in) w_out
    [SYMP.36]  r = gamma d                              "attention_velocity"; "plain": r = d
    [SYMP.37]  r = gain_v norm(beta u + gamma d)        otherwise: the next momentum or velocity; where u was 0: of d
    [SYMP.38]  x'' = x' + r

Adjoints, for given dx'' and, where r is read later, dr::

    [dSYMP.38]  dr = dx'' + later
    [dSYMP.35]  dd = gamma dr, or gamma times the adjoint of the norm at dr
    [dSYMP.34]  dn = adjoint of norm and MLP at dd
    [dSYMP.33]  du = mu dn + beta times the adjoint of the norm at dr

Axes: b batch, i token, m width of the model; the MLP is a whole number of times as wide.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), and the Lie-Trotter splitting of arXiv:2601.23236 before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.sympformer.numbers import Numbers, dot
from refattn.mechanisms.sympformer.params import Add, Params
from refattn.ops import layer_norm
from refattn.ops.linear import linear_backward, linear_forward
from refattn.ops.mlp import GELU
from refattn.xp import Array


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    ahead: Array | None  # u
    norm: layer_norm.Saved
    y: Array
    hidden: Array
    gate: Array
    active: Array
    added: Array  # d
    norm_v: layer_norm.Saved | None


def forward(
    params: Params, numbers: Numbers, x_before: Array, x: Array, carried: Array | None
) -> tuple[Array, Array, Saved]:
    """Return the next tokens, what moved them, and what `backward` reads."""
    config, mlp = params.config, params.mlp
    assert mlp is not None
    ahead = carried  # it came in
    if config.mlp == "attention_velocity" and "mu" in numbers:
        speed = (x - x_before) / numbers["h_x"]  # (b, i, m) [SYMP.33]
        ahead = speed  # SYMP.33
    point = x if ahead is None else x + numbers["mu"] * ahead  # (b, i, m): what is normalised
    y, norm = layer_norm.layer_norm_forward(point, mlp.gain)  # the first is SYMP.34
    seen = y  # (b, i, m) [SYMP.34]
    hidden = linear_forward(seen, mlp.w_in, None)  # part of SYMP.35
    active, gate = GELU[config.gelu][0](hidden)  # part of SYMP.35
    added = linear_forward(active, mlp.w_out, None)  # (b, i, m) [SYMP.35]
    norm_v = None
    if config.mlp == "plain":
        push = added  # (b, i, m): SYMP.36 with gamma = 1
    elif config.mlp == "attention_velocity":
        push = numbers["gamma"] * added  # (b, i, m) [SYMP.36]
    else:
        total = added  # (b, i, m): what is normalised
        if ahead is not None:
            total = numbers["beta"] * ahead + numbers["gamma"] * added  # (b, i, m): what is normalised
        unit, norm_v = layer_norm.layer_norm_forward(total, mlp.gain_v)  # the first is SYMP.37
        push = unit  # (b, i, m) [SYMP.37]
    result = x + push  # (b, i, m) [SYMP.38]
    return result, push, Saved(ahead, norm, seen, hidden, gate, active, added, norm_v)


def backward(
    params: Params, numbers: Numbers, saved: Saved, d_result: Array, d_later: Array | None, add: Add
) -> tuple[Array | None, Array, Array | None]:
    """Return the gradients of x before attention, of x, and of what was carried in; add those of the parameters."""
    config, mlp, ahead = params.config, params.mlp, saved.ahead
    assert mlp is not None
    # forward: result = x + push
    d_push = d_result if d_later is None else d_result + d_later  # (b, i, m) [dSYMP.38]
    d_total = d_push  # (b, i, m): the gradient of what is multiplied by gamma
    if saved.norm_v is not None:
        # forward: push = norm(beta * ahead + gamma * added)
        d_total, d_gain, _ = layer_norm.layer_norm_backward(saved.norm_v, d_push)  # part of dSYMP.35
        add("mlp.gain_v", d_gain)
    d_added = d_total  # (b, i, m): where gamma is 1
    if "gamma" in numbers:
        d_added = numbers["gamma"] * d_total  # (b, i, m) [dSYMP.35]
        add("gamma", dot(d_total, saved.added))
    # forward: added = gelu(seen @ w_in) @ w_out
    d_active, d_w_out, _ = linear_backward(saved.active, mlp.w_out, d_added)  # part of dSYMP.34
    d_hidden = GELU[config.gelu][1](saved.hidden, saved.gate, d_active)  # part of dSYMP.34
    d_seen, d_w_in, _ = linear_backward(saved.y, mlp.w_in, d_hidden)  # part of dSYMP.34
    # forward: seen = norm(x + mu * ahead)
    d_inner, d_gain, _ = layer_norm.layer_norm_backward(saved.norm, d_seen)  # the first is dSYMP.34
    d_point = d_inner  # (b, i, m) [dSYMP.34]
    for name, value in (("mlp.w_out", d_w_out), ("mlp.w_in", d_w_in), ("mlp.gain", d_gain)):
        add(name, value)
    d_x = d_result + d_point  # (b, i, m): the gradient of x
    if ahead is None:
        return None, d_x, None
    add("mu", dot(d_point, ahead))
    d_ahead = numbers["mu"] * d_point  # (b, i, m): dSYMP.33 but for beta
    if config.mlp != "attention_velocity":
        add("beta", dot(d_total, ahead))
        d_carried = d_ahead + numbers["beta"] * d_total  # (b, i, m) [dSYMP.33]
        return None, d_x, d_carried
    # forward: speed = (x - x_before) / h_x
    d_before = d_ahead / numbers["h_x"]  # (b, i, m): what moves x one way and x before the other
    if not config.detach:
        add("h_x", -dot(d_before, ahead))
    return -d_before, d_x + d_before, None
