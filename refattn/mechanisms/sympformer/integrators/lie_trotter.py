"""The block of a Lie-Trotter splitting with momentum, and with a connection.

With a connection it is what the authors' later manuscript calls H1 and R2. H1 turns the momentum by its
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

The connection is what a momentum is turned by along its way. The scores of attention bend the space of the tokens.
Their derivative along a direction u, s'_ij = (uq_i . k_j + q_i . uk_j) / sqrt(d), has under the weights of attention a
mean for each token, and no pair has to be kept for it.

Equations of the connection (q, k, v of the heads, f as above, d the width of a head)::

    [SYMP.connection_squares]  s_i = <u_i, u_i>
    [SYMP.connection_queries]  uq = heads(u w_q)
    [SYMP.connection_keys]  uk = heads(u w_k)
    [SYMP.connection_attended]  (a, b, c) = attention with the values (s v, k, uk)
    [SYMP.connection_rate]  r_i = 1/(h sqrt(d)) sum_heads (<uq_i, b_i> + <q_i, c_i>)
    [SYMP.connection_pull]  g = merge(a) w_o
    [SYMP.connection_force]  c_i = r_i u_i - (s_i f_i + g_i) / 2

Adjoints, for a given dc::

    [dSYMP.connection_force]  df = -s dc / 2
    [dSYMP.connection_pull]  dg = -dc / 2
    [dSYMP.connection_rate]  dr = sum_m dc u
    [dSYMP.connection_attended]  (da, db, dc) = (heads(dg w_o^T), dr uq / (h sqrt(d)), dr q / (h sqrt(d)))
    [dSYMP.connection_keys]  duk = V3                   (V1, V2, V3) the adjoint of attention by its three values
    [dSYMP.connection_queries]  duq = dr b / (h sqrt(d))
    [dSYMP.connection_squares]  ds = sum_h,e v V1 - sum_m dc f / 2

and du = r dc + 2 ds u + merge(duq) w_q^T + merge(duk) w_k^T.

Axes: b batch, h head, i token, d and e widths of a head, m width.

Source: the Lie-Trotter block of arXiv:2601.23236, and the authors' manuscript of October 2026, which calls it H0
without looking ahead, and learns the strength of the connection in one ablation. There the scores are kept for their
derivatives; here three more values are attended. In their code the two substeps share one norm of the momentum:
mlp="momentum(shared_norm=True)", as in all presets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.args import check_choice, check_number
from refattn.mechanisms.sympformer.integrators import classical
from refattn.mechanisms.sympformer.params import (
    Add,
    Integrator,
    Layer,
    affine,
    affine_backward,
    ahead,
    ahead_backward,
    inner,
    normed,
    normed_backward,
    plus,
)
from refattn.ops import layer_norm
from refattn.ops.heads import merge_heads, split_heads
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class LieTrotter(Integrator):
    """The Lie-Trotter block: this file. With linear attention its step is where the factor h of that starts.

    Attributes
    ----------
    connection
        What its momentum is turned by: "none" (H0), or the connection along the old momentum ("h1") or along the new
        one ("r2").
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
    y, norm = normed(layer.params, ahead(layer, x, p, "attention_mu"))  # (b, i, m) [SYMP.trotter_normed]
    force, attended = layer.force.attend(layer, y)  # (b, i, m): SYMP.attended_force
    whole = force  # (b, i, m): SYMP.trotter_blend at rest
    if p is not None:
        beta, gamma = layer.numbers["attention_beta"], layer.numbers["attention_gamma"]  # (1), (1)
        whole = beta * p + gamma * force  # (b, i, m) [SYMP.trotter_blend]
    turned, bent, bend, norm_half = whole, None, None, None  # (b, i, m): without a connection
    along = {"h1": p, "r2": whole}.get(kind)  # (b, i, m): what the connection is taken along
    if along is not None:
        turning = equations.active(layer.params.config.turning)
        bend, bent = turning.connect(layer, along, *attended.qkv, force)  # (b, i, m)
        turn = bend  # (b, i, m): SYMP.trotter_connection without a strength
        if "attention_eta" in layer.numbers:
            turn = layer.numbers["attention_eta"] * bend  # (b, i, m) [SYMP.trotter_connection]
        turned = whole - turn  # (b, i, m): what is normalised
    momentum, norm_p = normed(layer.params, turned, "_p")  # (b, i, m) [SYMP.trotter_momentum]
    push = momentum  # (b, i, m)
    if kind == "r2":
        half = 0.5 * (whole + turned)  # (b, i, m): w - c/2
        push, norm_half = normed(layer.params, half, "_p")  # (b, i, m): part of SYMP.trotter_moved
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
    d_turned = normed_backward(layer.params, saved.norm_p, d_momentum, add, "_p")  # (b, i, m)
    d_normed, d_turn, d_p = d_turned, -d_turned, None  # (b, i, m), (b, i, m), (b, i, m)
    if saved.norm_half is not None:
        # forward: push = norm(whole - turn / 2)
        d_half = normed_backward(layer.params, saved.norm_half, d_result, add, "_p")  # (b, i, m)
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
        d_along, *d_qkv, d_own = turning.connect_backward(layer, saved.connection, d_bend, add)  # (b, i, m)
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
    d_y = layer.force.attend_backward(layer, saved.attended, d_force, d_bent, add)  # (b, i, m): dSYMP.trotter_normed
    # forward: y = norm(x + mu * p)
    d_ahead = normed_backward(layer.params, saved.norm, d_y, add)  # (b, i, m)
    return d_result + d_ahead, ahead_backward(layer, p, d_ahead, d_p, add, "attention_mu"), None, None


Bent = tuple[Any, ...]
"""What `connect_backward` reads; the names there are those of the equations."""


def connect(layer: Layer, u: Array, q: Array, k: Array, v: Array, f: Array) -> tuple[Array, Bent]:
    """Return c along u (b, i, m), for queries, keys and values by head and the force f, and what is saved."""
    xp, d = namespace(u), q.shape[-1]
    factor = 1.0 / (layer.params.config.heads * math.sqrt(d))
    square = xp.sum(u * u, axis=-1, keepdims=True)  # (b, i, 1) [SYMP.connection_squares]
    uq = classical.heads_of(layer, u, "q")  # (b, h, i, d) [SYMP.connection_queries]
    uk = classical.heads_of(layer, u, "k")  # (b, h, i, d) [SYMP.connection_keys]
    values = xp.concat([square[:, None, ...] * v, k, uk], axis=-1)  # three values in one
    found, attended = classical.attention(q, k, values, layer.causal)  # (b, h, i, 3*d) [SYMP.connection_attended]
    a, b, c = found[..., :d], found[..., d : 2 * d], found[..., 2 * d :]  # parts of SYMP.connection_attended
    rate = factor * xp.sum(uq * b + q * c, axis=(1, 3))[..., None]  # (b, i, 1) [SYMP.connection_rate]
    joined = merge_heads(a)  # (b, i, m): part of SYMP.connection_pull
    pull = affine(layer.params, joined, "o")  # (b, i, m) [SYMP.connection_pull]
    turn = rate * u - 0.5 * (square * f + pull)  # (b, i, m) [SYMP.connection_force]
    return turn, (u, square, q, v, uq, b, c, rate, f, joined, attended)


def connect_backward(layer: Layer, saved: Bent, d_turn: Array, add: Add) -> tuple[Array, Array, Array, Array, Array]:
    """Return the gradients of u, q, k, v and f, and add those of the parameters."""
    u, square, q, v, uq, b, c, rate, f, joined, attended = saved  # as they were given to it
    xp, heads, d = namespace(d_turn), layer.params.config.heads, q.shape[-1]
    factor = 1.0 / (heads * math.sqrt(d))
    # forward: turn = rate * u - (square * f + pull) / 2
    d_f = -0.5 * square * d_turn  # (b, i, m) [dSYMP.connection_force]
    d_pull = -0.5 * d_turn  # (b, i, m) [dSYMP.connection_pull]
    d_rate = xp.sum(d_turn * u, axis=-1, keepdims=True)  # (b, i, 1) [dSYMP.connection_rate]
    # forward: pull = merge(a) @ w_o
    d_joined = affine_backward(layer.params, joined, "o", d_pull, add)  # (b, i, m)
    # forward: rate = factor * sum(uq * b + q * c)
    shared = factor * d_rate[:, None, ...]  # of every head
    parts = [split_heads(d_joined, heads), shared * uq, shared * q]
    d_together = xp.concat(parts, axis=-1)  # (b, h, i, 3*d) [dSYMP.connection_attended]
    d_q, d_k, d_values = classical.attention_backward(attended, d_together)  # of q, k and the three values
    d_q = d_q + shared * c  # (b, h, i, d): the gradient of q
    d_scaled, d_key = d_values[..., :d], d_values[..., d : 2 * d]  # of the first two values
    d_uk = d_values[..., 2 * d :]  # (b, h, i, d) [dSYMP.connection_keys]
    d_uq = shared * b  # (b, h, i, d) [dSYMP.connection_queries]
    # forward: values = (square * v, k, uk)
    d_v = square[:, None, ...] * d_scaled  # (b, h, i, e): the gradient of v
    own = xp.sum(d_scaled * v, axis=(1, 3))[..., None]  # (b, i, 1)
    d_square = own - 0.5 * xp.sum(d_turn * f, axis=-1, keepdims=True)  # (b, i, 1) [dSYMP.connection_squares]
    d_u = rate * d_turn + 2.0 * d_square * u  # (b, i, m)
    # forward: uq = split(u @ w_q), uk = split(u @ w_k)
    d_u = d_u + classical.heads_of_backward(layer, u, "q", d_uq, add)  # (b, i, m)
    d_u = d_u + classical.heads_of_backward(layer, u, "k", d_uk, add)  # (b, i, m)
    return d_u, d_q, d_k + d_key, d_v, d_f
