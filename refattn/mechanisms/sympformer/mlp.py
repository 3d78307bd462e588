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

With momentum(shared_norm=True) gain_v and shift_v are gain_p and shift_p, of the norm after attention.

The shifts, b_in and b_out are there with bias=True, and 0 otherwise; their gradients are those of y, r, y w_in + b_in
and d, summed over all tokens.

Axes: b batch, i token, m width of the model; the MLP is a whole number of times as wide.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), and the Lie-Trotter splitting of arXiv:2601.23236 before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.args import check, check_choice
from refattn.mechanisms.projections import check_sizes
from refattn.mechanisms.sympformer.params import (
    Add,
    Layer,
    Mlp,
    Params,
    affine,
    affine_backward,
    ahead,
    ahead_backward,
    inner,
    normed,
    normed_backward,
)
from refattn.ops import layer_norm
from refattn.ops.activations import gelu_exact_backward, gelu_exact_forward
from refattn.xp import Array


@dataclass(frozen=True)
class Substep:
    """What every kind with an MLP has.

    Attributes
    ----------
    ratio
        Width of the MLP in widths of the tokens.
    """

    ratio: int = 4

    def __post_init__(self) -> None:
        check_sizes(self, "ratio")

    def names(self, config: Any) -> tuple[str, ...]:
        """Return which of the numbers mu, beta and gamma change anything."""
        return ()


class AttentionVelocity(Substep):
    """It looks ahead along the velocity of the attention step, which it does not change."""

    def names(self, config: Any) -> tuple[str, ...]:
        """Return gamma, and mu where the attention step moves anything."""
        return ("mu", "gamma") if config.drifts else ("gamma",)


@dataclass(frozen=True)
class Momentum(Substep):
    """It looks ahead along the momentum, and changes it.

    Attributes
    ----------
    shared_norm
        Whether the norm of the momentum after the MLP has the gain and the shift of that after attention, as in the
        authors' code; otherwise it has its own.
    """

    shared_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check("shared_norm", self.shared_norm, bool)

    def names(self, config: Any) -> tuple[str, ...]:
        """Return all three."""
        return tuple(NUMBERS)


@dataclass(frozen=True)
class Velocity(Substep):
    """It looks ahead along a velocity of its own, and changes it.

    Attributes
    ----------
    start
        What it is in a first layer: 0, with "rest", or looked up like first momenta, with "table"; see `block`.
    """

    start: str = "rest"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("start", self.start, ("rest", "table"))

    def names(self, config: Any) -> tuple[str, ...]:
        """Return all three, but in a first layer that starts at rest."""
        return tuple(NUMBERS) if config.layer or self.start == "table" else ()


class Plain(Substep):
    """x + MLP(norm x)."""


@dataclass(frozen=True)
class NoMlp:
    """There is none."""

    def names(self, config: Any) -> tuple[str, ...]:
        """Return nothing."""
        return ()


NUMBERS = {"mu": ("unit", 0.9), "beta": ("unit", 0.9), "gamma": ("positive", 1.0)}
"""The numbers of a substep: what keeps each where it has to be, and where it starts."""
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
    u = carried  # (b, i, m)
    if isinstance(kind, AttentionVelocity) and "mu" in layer.numbers:
        u = (x - x_before) / layer.numbers["h_x"]  # (b, i, m) [SYMP.mlp_carried]
    seen, norm = normed(mlp, ahead(layer, x, u, "mu"))  # (b, i, m) [SYMP.mlp_normed]
    hidden = affine(mlp, seen, "in")  # as wide as the MLP
    active, gate = gelu_exact_forward(hidden)  # as wide as the MLP
    added = affine(mlp, active, "out")  # (b, i, m) [SYMP.mlp_out]
    norm_v = None
    if isinstance(kind, Plain):
        push = added  # (b, i, m): SYMP.mlp_scaled with gamma = 1
    elif isinstance(kind, AttentionVelocity):
        push = layer.numbers["gamma"] * added  # (b, i, m) [SYMP.mlp_scaled]
    else:
        total = added  # (b, i, m)
        if u is not None:
            total = layer.numbers["beta"] * u + layer.numbers["gamma"] * added  # (b, i, m)
        owner, of = _norm(layer, mlp)
        push, norm_v = normed(owner, total, of)  # (b, i, m) [SYMP.mlp_push]
    result = x + push  # (b, i, m) [SYMP.mlp_moved]
    return result, push, Saved(u, norm, seen, hidden, gate, active, added, norm_v)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_later: Array | None, add: Add
) -> tuple[Array | None, Array, Array | None]:
    """Return the gradients of x before attention, of x, and of what was carried in; add those of the parameters."""
    kind, mlp, u = layer.params.config.mlp, layer.params.mlp, saved.ahead
    assert mlp is not None
    # forward: result = x + push
    d_push = d_result if d_later is None else d_result + d_later  # (b, i, m) [dSYMP.mlp_moved]
    d_total = d_push  # (b, i, m): the gradient of what is multiplied by gamma
    if saved.norm_v is not None:
        # forward: push = norm(beta * u + gamma * added)
        owner, of = _norm(layer, mlp)
        d_total = normed_backward(owner, saved.norm_v, d_push, add, of)  # (b, i, m)
    d_added = d_total  # (b, i, m): where gamma is 1
    if "gamma" in layer.numbers:
        d_added = layer.numbers["gamma"] * d_total  # (b, i, m) [dSYMP.mlp_out]
        add("gamma", inner(d_total, saved.added))
    # forward: added = gelu(seen @ w_in + b_in) @ w_out + b_out
    d_active = affine_backward(mlp, saved.active, "out", d_added, add)  # as wide as the MLP
    d_hidden = gelu_exact_backward(saved.hidden, saved.gate, d_active)  # as wide as the MLP
    d_seen = affine_backward(mlp, saved.y, "in", d_hidden, add)  # (b, i, m)
    # forward: seen = norm(x + mu * u)
    d_point = normed_backward(mlp, saved.norm, d_seen, add)  # (b, i, m) [dSYMP.mlp_normed]
    d_x = d_result + d_point  # (b, i, m)
    d_u = ahead_backward(layer, u, d_point, None, add, "mu")  # (b, i, m): dSYMP.mlp_carried but for beta
    if u is None or d_u is None:
        return None, d_x, None
    if not isinstance(kind, AttentionVelocity):
        add("beta", inner(d_total, u))
        d_carried = d_u + layer.numbers["beta"] * d_total  # (b, i, m) [dSYMP.mlp_carried]
        return None, d_x, d_carried
    # forward: u = (x - x_before) / h_x
    d_before = d_u / layer.numbers["h_x"]  # (b, i, m): what moves x one way and x before the other
    if not layer.params.config.detach:
        add("h_x", -inner(d_before, u))
    return -d_before, d_x + d_before, None


def _norm(layer: Layer, mlp: Mlp) -> tuple[Params | Mlp, str]:
    """Return whose norm the new momentum or velocity gets, and its name."""
    shared = getattr(layer.params.config.mlp, "shared_norm", False)
    return (layer.params, "_p") if shared else (mlp, "_v")
