"""The block of a Lie-Trotter splitting with momentum, and with a connection.

With a connection (see there) it is what the authors' later manuscript calls H1 and R2. H1 turns the momentum by its
connection along the old momentum. R2 takes it along the new one, and moves the tokens by a momentum that is turned by
half of it. A learned strength may multiply the connection.

Equations (f is SYMP.attended_force for y and C is SYMP.connection_force, or 0; with oracle="linear" f is
SYMP.linear_attention_force; with "signed" f is SYMP.signed_force and C SYMP.signed_connection; eta is a learned number
of the block)::

    [SYMP.trotter_normed]  y = gain norm(x + mu p) + shift    without looking ahead, or at rest: of x
    [SYMP.trotter_blend]  w = beta p + gamma f      at rest: f
    [SYMP.trotter_connection]  c = eta C            without a strength: C
    [SYMP.trotter_momentum]  p' = gain_p norm(w - c) + shift_p    without biases the shifts are 0
    [SYMP.trotter_moved]  x' = x + p'               R2: x + gain_p norm(w - c/2)

Adjoints, for given dx' and, where p' is read later, dp'::

    [dSYMP.trotter_momentum]  dp' = dx' + later     R2: later
    [dSYMP.trotter_blend]  dw = adjoint of norm at dp'    R2: with that of the other norm at dx', and what c asks of w
    [dSYMP.attended_force]  df = gamma dw + what c asks of f    at rest: gamma = 1

and dy = dSYMP.trotter_normed at df (otherwise that of f's own file), dp = beta dw + mu dn + what c asks of p (H1), dn
the adjoint of the norm at dy, dx = dx' + dn, dbeta = sum dw p, dgamma = sum dw f, dmu = sum dn p, dC = eta dc,
deta = sum dc C, dshift = sum_i dy, dshift_p = sum_i dp'.

Axes: b batch, i token, m width.

Source: the Lie-Trotter block of arXiv:2601.23236. Without looking ahead it is what the manuscript calls H0; the
strength of the connection is learned in one of its ablations.

In their code the two substeps share one norm of the momentum: mlp="momentum(shared_norm=True)", as in all presets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.args import check_choice, check_number
from refattn.mechanisms.sympformer import maps
from refattn.mechanisms.sympformer.params import Add, Integrator, Layer, inner, plus
from refattn.ops import layer_norm
from refattn.xp import Array


@dataclass(frozen=True)
class LieTrotter(Integrator):
    """The Lie-Trotter block: this file. With linear attention its step is where the factor h of that starts.

    Attributes
    ----------
    connection
        What its momentum is turned by: "none" (H0), or the connection along the old momentum ("h1") or along the new
        one ("r2"); see `connection`.
    strength
        None, or: a learned number, which starts here, multiplies the connection.
    """

    connection: str = "none"
    strength: float | None = None

    moves: ClassVar[bool] = True
    baseline: ClassVar[bool] = True
    damped: ClassVar[str] = "nothing"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("connection", self.connection, ("none", "h1", "r2"))
        if self.strength is not None:
            check_number("strength", self.strength, positive=True)
            if self.connection == "none":
                raise ValueError(
                    f"strength: got {self.strength!r}, but connection='none' has nothing that it multiplies"
                )

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return mu, where it looks ahead, beta and gamma: none at rest; and the strength of a connection."""
        strength = {}
        if self.strength is not None and config.connects:
            strength = {"attention_eta": ("positive", self.strength)}
        if config.rests:
            return strength
        ahead = {"attention_mu": ("unit", 0.9)} if config.look_ahead else {}
        return {**ahead, "attention_beta": ("unit", 0.9), "attention_gamma": ("positive", 1.0), **strength}


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    p: Array | None
    norm: layer_norm.Saved
    attended: Any
    force: Array
    norm_p: layer_norm.Saved
    connection: Any
    bend: Array | None  # C
    norm_half: layer_norm.Saved | None


def forward(layer: Layer, x: Array, p: Array | None, t: Array, history: None) -> tuple[Array, Array, None, Saved]:
    """Return the next tokens and momenta, no history, and what `backward` reads."""
    kind = layer.params.config.integrator.connection
    y, norm = maps.normed(layer.params, maps.ahead(layer, x, p, "attention_mu"))  # (b, i, m) [SYMP.trotter_normed]
    force, attended = layer.oracle.forward(layer, y)  # (b, i, m): SYMP.attended_force
    whole = force  # (b, i, m): SYMP.trotter_blend at rest
    if p is not None:
        beta, gamma = layer.numbers["attention_beta"], layer.numbers["attention_gamma"]  # (1), (1)
        whole = beta * p + gamma * force  # (b, i, m) [SYMP.trotter_blend]
    turned, bent, bend, norm_half = whole, None, None, None  # (b, i, m): without a connection
    along = {"h1": p, "r2": whole}.get(kind)  # (b, i, m): what the connection is taken along
    if along is not None:
        turning = equations.active(layer.params.config.turning)
        bend, bent = turning.forward(layer, along, *attended.qkv, force)  # (b, i, m)
        turn = bend  # (b, i, m): SYMP.trotter_connection without a strength
        if "attention_eta" in layer.numbers:
            turn = layer.numbers["attention_eta"] * bend  # (b, i, m) [SYMP.trotter_connection]
        turned = whole - turn  # (b, i, m): what is normalised
    momentum, norm_p = maps.normed(layer.params, turned, "_p")  # (b, i, m) [SYMP.trotter_momentum]
    push = momentum  # (b, i, m)
    if kind == "r2":
        half = 0.5 * (whole + turned)  # (b, i, m): w - c/2
        push, norm_half = maps.normed(layer.params, half, "_p")  # (b, i, m): part of SYMP.trotter_moved
    result = x + push  # (b, i, m) [SYMP.trotter_moved]
    return result, momentum, None, Saved(p, norm, attended, force, norm_p, bent, bend, norm_half)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_later: Array | None, d_following: None, add: Add
) -> tuple[Array, Array | None, None, None]:
    """Return the gradients of x and p, none of a history and the time, and add those of parameters and numbers."""
    p, kind = saved.p, layer.params.config.integrator.connection  # (b, i, m)
    # forward: result = x + push
    d_moved = d_result if saved.norm_half is None else 0.0 * d_result  # (b, i, m): where tokens move by p'
    d_momentum = d_moved if d_later is None else d_moved + d_later  # (b, i, m) [dSYMP.trotter_momentum]
    # forward: momentum = norm(whole - turn)
    d_turned = maps.normed_backward(layer.params, saved.norm_p, d_momentum, add, "_p")  # (b, i, m)
    d_normed, d_turn, d_p = d_turned, -d_turned, None  # (b, i, m), (b, i, m), (b, i, m)
    if saved.norm_half is not None:
        # forward: push = norm(whole - turn / 2)
        d_half = maps.normed_backward(layer.params, saved.norm_half, d_result, add, "_p")  # (b, i, m)
        d_turn = d_turn - 0.5 * d_half  # (b, i, m): of c, with that of SYMP.trotter_momentum
        d_normed = d_turned + d_half  # (b, i, m): part of dSYMP.trotter_blend
    d_along, d_bent, d_own = None, None, 0.0 * d_result  # (b, i, m), -, (b, i, m): what the connection asks for
    if saved.connection is not None:
        d_bend = d_turn  # (b, i, m): where nothing multiplies it
        if "attention_eta" in layer.numbers:
            # forward: turn = attention_eta * bend
            add("attention_eta", inner(d_turn, saved.bend))
            d_bend = layer.numbers["attention_eta"] * d_turn  # (b, i, m)
        # forward: bend = connection(along, q, k, v, force)
        turning = equations.active(layer.params.config.turning)
        d_along, *d_qkv, d_own = turning.backward(layer, saved.connection, d_bend, add)  # (b, i, m)
        d_bent = tuple(d_qkv)
    d_whole = d_normed + d_along if kind == "r2" else d_normed  # (b, i, m) [dSYMP.trotter_blend]
    # forward: whole = beta * p + gamma * force
    gamma = 1.0  # at rest
    if p is not None:
        add("attention_beta", inner(d_whole, p))
        add("attention_gamma", inner(d_whole, saved.force))
        d_p = layer.numbers["attention_beta"] * d_whole  # (b, i, m): without looking ahead
        d_p = plus(d_along if kind == "h1" else None, d_p)  # (b, i, m)
        gamma = layer.numbers["attention_gamma"]  # (1)
    d_force = gamma * d_whole + d_own  # (b, i, m) [dSYMP.attended_force]
    d_y = layer.oracle.backward(layer, saved.attended, d_force, d_bent, add)  # (b, i, m): dSYMP.trotter_normed
    # forward: y = norm(x + mu * p)
    d_ahead = maps.normed_backward(layer.params, saved.norm, d_y, add)  # (b, i, m)
    return d_result + d_ahead, maps.ahead_backward(layer, p, d_ahead, d_p, add, "attention_mu"), None, None
