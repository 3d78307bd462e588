"""The force of a Hamiltonian of all tokens: it is the gradient, and a token is pushed by all others.

    H = 1/2 sum_i <p_i, B p_i> / z_i - 1/2n sum_ij E_ij       E_ij = e^(scale q_i . k_j), z_i = 1/n sum_j E_ij

Any w_q and w_k will do, but B has to be symmetric, or B p / z is no dH/dp. Positions are the normalised tokens, whose
norm is left out of H.

A token is a query, and a key of the others: through its key it is pushed by what attends it. With causal scores these
would be the tokens that come later, and so there is no causal form of this force; `softmax` is what there is instead.

Equations (o(q, k, v) and c are SYMP.12 and SYMP.7 at rest, without causality: o_i = 1/n sum_j E_ij v_j)::

    [SYMP.hamiltonian_normed]  y = gain norm(x + look p) + shift    without looking ahead, or at rest: of x
    [SYMP.hamiltonian_queries]  q = y w_q + b_q         without biases b_q, b_k and the shift are 0
    [SYMP.hamiltonian_keys]  k = y w_k + b_k
    [SYMP.hamiltonian_share]  s = <p, B p> exp(-2 c) + 1    at rest: 1
    [SYMP.hamiltonian_as_query]  r = s o(q, k, k)       as a query
    [SYMP.hamiltonian_as_key]  t = o(k, q, s q)         as a key: the same E, transposed
    [SYMP.hamiltonian_force]  g = scale/2 (r w_q^T + t w_k^T)    -dH/dy, for a symmetric B

Adjoints, for given dg and what else asks for a gradient of B p and c::

    [dSYMP.hamiltonian_as_query]  dr = scale/2 dg w_q
    [dSYMP.hamiltonian_as_key]  dt = scale/2 dg w_k
    [dSYMP.hamiltonian_share]  ds = sum_m dr o(q, k, k) + sum_m q V2
    [dSYMP.hamiltonian_keys]  dk = K1 + V1 + Q2
    [dSYMP.hamiltonian_queries]  dq = Q1 + K2 + s V2
    [dSYMP.hamiltonian_normed]  dy = dq w_q^T + dk w_k^T

where (Q1, K1, V1) is the core's adjoint of o(q, k, k) at do = s dr and dlog_z = dc, (Q2, K2, V2) that of o(k, q, s q)
at do = dt; dc = further - 2 (s - 1) ds, de = exp(-2 c) ds, and e = <p, B p> asks of p as SYMP.9 does.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), with the normalised tokens for the positions, as in their program.

How their code differs: its potential lacks the 1/n, and B comes from an inverse of the scores' matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn import equations
from refattn.args import check_choice
from refattn.mechanisms.sympformer import core
from refattn.mechanisms.sympformer.forces import softmax
from refattn.mechanisms.sympformer.forces.softmax import MOBILITIES, Answer
from refattn.mechanisms.sympformer.params import (
    Add,
    Layer,
    affine,
    affine_backward,
    ahead,
    ahead_backward,
    normed,
    normed_backward,
    plus,
)
from refattn.ops.linear import linear_backward
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Hamiltonian:
    """The force of a Hamiltonian of all tokens, which may not be causal: this file.

    Attributes
    ----------
    mobility
        "learned", the matrix B, from the identity on; "identity": none.
    """

    mobility: str = "learned"

    may_be_causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("mobility", self.mobility, MOBILITIES)

    def weights(self, kicks: bool, drifts: bool) -> set[str]:
        """Return the matrices of a block, where the force is read, and where positions change."""
        return {"w_q", "w_k"} | ({"w_b"} if drifts and self.mobility == "learned" else set())


Saved = tuple[tuple[Any, ...], ...]
"""What the backward reads: of the tokens, of them as queries, and of the force; the names there are those above."""


def forward(layer: Layer, x: Array, p: Array | None) -> tuple[Answer, Saved]:
    """Return the answer for tokens x (b, i, m) with momenta p, or at rest, and what `backward` reads."""
    if layer.causal is not False:
        raise ValueError(
            "oracle: got hamiltonian with causal=True, needs causal=False: the force of a Hamiltonian of all tokens "
            "pushes a token by those that come later, which attend it; oracle='softmax' does not"
        )
    xp, kicks, scale = namespace(x), layer.params.config.kicks, layer.params.config.scale
    y, norm = normed(layer.params, ahead(layer, x, p))  # (b, i, m) [SYMP.hamiltonian_normed]
    q = affine(layer.params, y, "q")  # (b, i, m) [SYMP.hamiltonian_queries]
    k = affine(layer.params, y, "k")  # (b, i, m) [SYMP.hamiltonian_keys]
    moved = None if p is None else equations.active(softmax).mobilised(layer, p)  # (b, i, m): SYMP.8
    values = k if kicks else k[..., :0]  # no value where only z is asked for
    three = (each[:, None, ...] for each in (q, k, values))
    out, as_query = core.forward(*three, scale=scale)  # (b, 1, i, e)
    attended = out[:, 0, ...]  # (b, i, e): SYMP.12 without the head
    log_z = as_query.log_z[:, 0, :, None]  # (b, i, 1): SYMP.7 without the head
    inverse = xp.exp(-2.0 * log_z)  # (b, i, 1): part of SYMP.hamiltonian_share
    share = query = key = as_key = force = None
    if kicks:
        share = xp.ones_like(log_z)  # (b, i, 1): SYMP.hamiltonian_share at rest
        if p is not None:
            share = xp.sum(moved * p, axis=-1, keepdims=True) * inverse + 1.0  # (b, i, 1) [SYMP.hamiltonian_share]
        query = share * attended  # (b, i, m) [SYMP.hamiltonian_as_query]
        shared = share * q  # (b, i, m): the values of SYMP.hamiltonian_as_key
        three = (each[:, None, ...] for each in (k, q, shared))
        turned, as_key = core.forward(*three, scale=scale)  # (b, 1, i, m)
        key = turned[:, 0, ...]  # (b, i, m) [SYMP.hamiltonian_as_key]
        back_q, back_k = xp.matrix_transpose(layer.params.w_q), xp.matrix_transpose(layer.params.w_k)  # (m, m), (m, m)
        force = 0.5 * scale * (query @ back_q + key @ back_k)  # (b, i, m) [SYMP.hamiltonian_force]
    saved = ((p, moved, y, norm, q), (inverse, attended, as_query), (share, query, key, as_key))
    return Answer(force, moved, log_z), saved


def velocity(moved: Array, log_z: Array) -> Array:
    """Return B p / z."""
    return equations.active(softmax).velocity(moved, log_z)


def velocity_backward(moved: Array, speed: Array, log_z: Array, d_speed: Array) -> tuple[Array, Array]:
    """Return the gradients of B p and of log z."""
    return equations.active(softmax).velocity_backward(moved, speed, log_z, d_speed)


def backward(
    layer: Layer, saved: Saved, d_force: Array | None, d_moved: Array | None, d_log_z: Array | None, add: Add
) -> tuple[Array, Array | None]:
    """Return the gradients of x and p, and add those of the parameters."""
    (p, moved, y, norm, q), (inverse, attended, as_query), (share, query, key, as_key) = (
        saved  # as they were given to it
    )
    xp, params, scale = namespace(y), layer.params, layer.params.config.scale
    d_bounded = xp.zeros_like(inverse) if d_log_z is None else d_log_z  # (b, i, 1): of SYMP.7
    d_attended = xp.zeros_like(attended)  # (b, i, e): where nobody asks for the force
    d_ask, d_pull = d_moved, None  # (b, i, m): of B p, and of p beside it
    d_q, d_k = xp.zeros_like(q), xp.zeros_like(q)  # (b, i, m), (b, i, m)
    if d_force is not None and share is not None:
        # forward: force = scale / 2 * (query @ w_q^T + key @ w_k^T)
        asked = 0.5 * scale * d_force  # (b, i, m): without the matrices
        d_query = asked @ params.w_q  # (b, i, m) [dSYMP.hamiltonian_as_query]
        d_key = asked @ params.w_k  # (b, i, m) [dSYMP.hamiltonian_as_key]
        for name, value in (("w_q", query), ("w_k", key)):
            add(name, linear_backward(asked, params.w_q, value)[1])
        # forward: key = core(k, q, share * q); query = share * core(q, k, k)
        d = core.backward(as_key, d_key[:, None, ...])
        d_k = d["q"][:, 0, ...]  # (b, i, m)
        d_value = d["v"][:, 0, ...]  # (b, i, m): of s q
        d_q = d["k"][:, 0, ...] + share * d_value  # (b, i, m)
        d_attended = share * d_query  # (b, i, m): of SYMP.12
        d_shared = d_query * attended + d_value * q  # (b, i, m)
        d_share = xp.sum(d_shared, axis=-1, keepdims=True)  # (b, i, 1) [dSYMP.hamiltonian_share]
        if p is not None:
            # forward: share = sum(moved * p) * exp(-2 log_z) + 1
            d_kinetic = d_share * inverse  # (b, i, 1): of <p, B p>
            d_bounded = d_bounded - 2.0 * (share - 1.0) * d_share  # (b, i, 1): of SYMP.7
            d_ask, d_pull = plus(d_ask, d_kinetic * p), d_kinetic * moved  # (b, i, m), (b, i, m)
    d_p = None
    if p is not None and d_ask is not None:
        d_p = plus(equations.active(softmax).mobilised_backward(layer, p, d_ask, add), d_pull)  # (b, i, m)
    # forward: attended, log_z = core(q, k, k)
    d = core.backward(as_query, d_attended[:, None, ...], xp.permute_dims(d_bounded, (0, 2, 1)))
    d_queries = d_q + d["q"][:, 0, ...]  # (b, i, m) [dSYMP.hamiltonian_queries]
    d_own = d["k"][:, 0, ...]  # (b, i, m)
    if as_key is not None:
        d_own = d_own + d["v"][:, 0, ...]  # (b, i, m)
    d_keys = d_k + d_own  # (b, i, m) [dSYMP.hamiltonian_keys]
    d_y_q = affine_backward(params, y, "q", d_queries, add)  # (b, i, m)
    d_y = d_y_q + affine_backward(params, y, "k", d_keys, add)  # (b, i, m) [dSYMP.hamiltonian_normed]
    # forward: y = norm(x + look * p)
    d_ahead = normed_backward(params, norm, d_y, add)  # (b, i, m)
    return d_ahead, ahead_backward(layer, p, d_ahead, d_p, add)
