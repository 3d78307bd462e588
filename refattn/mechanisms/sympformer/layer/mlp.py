"""The MLP substep: like attention it adds to a velocity, and the velocity moves the tokens.

Equations (u is what it looks ahead along: the velocity of the attention step, the momentum or a velocity of its own)::

    [SYMP.mlp_carried]  u = (x' - x) / h_x              "attention_velocity"; otherwise the momentum or the velocity
    [SYMP.mlp_normed]  y = gain norm(x' + mu u) + shift    where u is 0: of x'
    [SYMP.mlp_out]  d = gelu(y w_in + b_in) w_out + b_out
    [SYMP.mlp_scaled]  r = gamma d                      "attention_velocity"; "plain": r = d
    [SYMP.mlp_push]  r = gain_v norm(beta u + gamma d) + shift_v    otherwise: the next u; at u = 0: of d
    [SYMP.mlp_moved]  x'' = x' + r

Adjoints, for given dx'' and, where r is read later, dr::

    [dSYMP.mlp_moved]  dr = dx'' + later
    [dSYMP.mlp_out]  dd = gamma dw                      dw = dr, with SYMP.mlp_push the adjoint of its norm at dr
    [dSYMP.mlp_normed]  dn = adjoint of norm at dy      dy = (gelu' (dd w_out^T)) w_in^T; n is what is normalised
    [dSYMP.mlp_carried]  du = mu dn + beta dw           "attention_velocity": mu dn

The shifts, b_in and b_out are there with bias=True, and 0 otherwise; their gradients are those of y, r, y w_in + b_in
and d, summed over all tokens.

Axes: b batch, i token, m width of the model; the MLP is a whole number of times as wide.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), and the Lie-Trotter splitting of arXiv:2601.23236 before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.args import check_choice
from refattn.mechanisms.projections import check_sizes
from refattn.mechanisms.sympformer.oracles import noise
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.ops import layer_norm
from refattn.ops.linear import linear_backward, linear_forward
from refattn.ops.mlp import GELU
from refattn.xp import Array


@dataclass(frozen=True)
class Substep:
    """What every kind with an MLP has.

    Attributes
    ----------
    ratio
        Width of the MLP in widths of the tokens.
    gelu
        "exact" or "tanh".
    """

    ratio: int = 4
    gelu: str = "exact"

    def __post_init__(self) -> None:
        check_sizes(self, "ratio")
        check_choice("gelu", self.gelu, GELU)

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return mu, beta and gamma, as far as they change anything."""
        return {}


@dataclass(frozen=True)
class AttentionVelocity(Substep):
    """It looks ahead along the velocity of the attention step, which it does not change."""

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return gamma, and mu where the attention step moves anything."""
        return {**({"mu": ("unit", 0.9)} if config.drifts else {}), "gamma": ("positive", 1.0)}


@dataclass(frozen=True)
class Momentum(Substep):
    """It looks ahead along the momentum, and changes it."""

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return all three."""
        return dict(CARRIED)


@dataclass(frozen=True)
class Velocity(Substep):
    """It looks ahead along a velocity of its own, and changes it.

    Attributes
    ----------
    start
        What it is in a first layer: 0, with "rest", or looked up like first momenta, with "table"; see `tables`.
    """

    start: str = "rest"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("start", self.start, ("rest", "table"))

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return all three, but in a first layer that starts at rest."""
        return dict(CARRIED) if config.layer or self.start == "table" else {}


@dataclass(frozen=True)
class Plain(Substep):
    """x + MLP(norm x)."""


@dataclass(frozen=True)
class NoMlp:
    """There is none."""

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return nothing."""
        return {}


CARRIED = {"mu": ("unit", 0.9), "beta": ("unit", 0.9), "gamma": ("positive", 1.0)}
KINDS: dict[str, type[Substep] | type[NoMlp]] = {
    "attention_velocity": AttentionVelocity,
    "momentum": Momentum,
    "velocity": Velocity,
    "plain": Plain,
    "none": NoMlp,
}


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


def forward(layer: Layer, x_before: Array, x: Array, carried: Array | None) -> tuple[Array, Array, Saved]:
    """Return the next tokens, what moved them, and what `backward` reads."""
    kind, mlp = layer.params.config.mlp, layer.params.mlp
    assert mlp is not None
    ahead = carried  # (b, i, m)
    if isinstance(kind, AttentionVelocity) and "mu" in layer.numbers:
        ahead = (x - x_before) / layer.numbers["h_x"]  # (b, i, m) [SYMP.mlp_carried]
    point = x if ahead is None else x + layer.numbers["mu"] * ahead  # (b, i, m)
    if layer.keep:
        point = equations.active(noise).noisy(layer.keep, "noise_mlp_ahead", point)  # (b, i, m): SYMP.noisy
    seen, norm = layer_norm.layer_norm_forward(point, mlp.gain, mlp.shift)  # (b, i, m) [SYMP.mlp_normed]
    hidden = linear_forward(seen, mlp.w_in, mlp.b_in)  # as wide as the MLP
    active, gate = GELU[kind.gelu][0](hidden)  # as wide as the MLP
    added = linear_forward(active, mlp.w_out, mlp.b_out)  # (b, i, m) [SYMP.mlp_out]
    if "mlp" in layer.keep:
        added = layer.keep["mlp"] * added  # (b, i, m): what is left of it
    if layer.keep:
        added = equations.active(noise).noisy(layer.keep, "noise_mlp_force", added)  # (b, i, m): SYMP.noisy
    norm_v = None
    if isinstance(kind, Plain):
        push = added  # (b, i, m): SYMP.mlp_scaled with gamma = 1
    elif isinstance(kind, AttentionVelocity):
        push = layer.numbers["gamma"] * added  # (b, i, m) [SYMP.mlp_scaled]
    else:
        total = added  # (b, i, m)
        if ahead is not None:
            total = layer.numbers["beta"] * ahead + layer.numbers["gamma"] * added  # (b, i, m)
        if layer.keep:
            total = equations.active(noise).noisy(layer.keep, "noise_mlp_momentum", total)  # (b, i, m): SYMP.noisy
        push, norm_v = layer_norm.layer_norm_forward(total, mlp.gain_v, mlp.shift_v)  # (b, i, m) [SYMP.mlp_push]
    result = x + push  # (b, i, m) [SYMP.mlp_moved]
    return result, push, Saved(ahead, norm, seen, hidden, gate, active, added, norm_v)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_later: Array | None, add: Add
) -> tuple[Array | None, Array, Array | None]:
    """Return the gradients of x before attention, of x, and of what was carried in; add those of the parameters."""
    kind, mlp, ahead = layer.params.config.mlp, layer.params.mlp, saved.ahead
    assert mlp is not None
    # forward: result = x + push
    d_push = d_result if d_later is None else d_result + d_later  # (b, i, m) [dSYMP.mlp_moved]
    d_total = d_push  # (b, i, m): the gradient of what is multiplied by gamma
    if saved.norm_v is not None:
        # forward: push = norm(beta * ahead + gamma * added)
        d_total, d_gain, d_shift = layer_norm.layer_norm_backward(saved.norm_v, d_push)  # (b, i, m), (m), (m)
        add("mlp.gain_v", d_gain)
        add("mlp.shift_v", d_shift)
    d_added = d_total  # (b, i, m): where gamma is 1
    if "gamma" in layer.numbers:
        d_added = layer.numbers["gamma"] * d_total  # (b, i, m) [dSYMP.mlp_out]
        add("gamma", inner(d_total, saved.added))
    if "mlp" in layer.keep:
        # forward: added = keep * added
        d_added = layer.keep["mlp"] * d_added  # (b, i, m): of all of it
    # forward: added = gelu(seen @ w_in + b_in) @ w_out + b_out
    d_active, d_w_out, d_b_out = linear_backward(saved.active, mlp.w_out, d_added)  # as wide as the MLP
    d_hidden = GELU[kind.gelu][1](saved.hidden, saved.gate, d_active)  # as wide as the MLP
    d_seen, d_w_in, d_b_in = linear_backward(saved.y, mlp.w_in, d_hidden)  # (b, i, m)
    # forward: seen = norm(x + mu * ahead)
    back = layer_norm.layer_norm_backward(saved.norm, d_seen)
    d_point, d_gain, d_shift = back  # (b, i, m) [dSYMP.mlp_normed], (m), (m)
    found = {"w_out": d_w_out, "b_out": d_b_out, "w_in": d_w_in, "b_in": d_b_in, "gain": d_gain, "shift": d_shift}
    for name, value in found.items():
        add(f"mlp.{name}", value)
    d_x = d_result + d_point  # (b, i, m)
    if ahead is None:
        return None, d_x, None
    add("mu", inner(d_point, ahead))
    d_ahead = layer.numbers["mu"] * d_point  # (b, i, m): dSYMP.mlp_carried but for beta
    if not isinstance(kind, AttentionVelocity):
        add("beta", inner(d_total, ahead))
        d_carried = d_ahead + layer.numbers["beta"] * d_total  # (b, i, m) [dSYMP.mlp_carried]
        return None, d_x, d_carried
    # forward: speed = (x - x_before) / h_x
    d_before = d_ahead / layer.numbers["h_x"]  # (b, i, m): what moves x one way and x before the other
    if not layer.params.config.detach:
        add("h_x", -inner(d_before, ahead))
    return -d_before, d_x + d_before, None
