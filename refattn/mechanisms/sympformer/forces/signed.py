"""Linear attention of several heads, for the baselines: products of queries and keys, of either sign, and no softmax.

Equations (y the normalised tokens, d the width of a head, n_i the number of tokens that i attends)::

    [SYMP.signed_queries]  q = heads(y w_q + b_q) d^(-1/4)
    [SYMP.signed_keys]  k = heads(y w_k + b_k) d^(-1/4)
    [SYMP.signed_values]  w = heads(y w_v + b_v)
    [SYMP.signed_attended]  a_i = 1/n_i sum_j <q_i, k_j> w_j
    [SYMP.signed_force]  f = merge(a) w_o + b_o         without biases the b_ are 0

Adjoints, for a given df::

    [dSYMP.signed_attended]  da = heads(df w_o^T)
    [dSYMP.signed_values]  dw_j = sum_{i>=j} <q_i, k_j> da_i / n_i
    [dSYMP.signed_keys]  dk_j = sum_{i>=j} <da_i, w_j> q_i / n_i
    [dSYMP.signed_queries]  dq_i = 1/n_i sum_j <da_i, w_j> k_j

and dy = merge(dq) w_q^T d^(-1/4) + merge(dk) w_k^T d^(-1/4) + merge(dw) w_v^T. A connection asks of q and k besides.

The connection is what a momentum is turned by along its way: here a proxy, with a ridge. Linear attention has no
weights that are a mean, so that the way along which scores change is found by least squares:
E takes queries to directions, J, T and s take keys to what the scores are made of, all over the tokens that i attends.

Equations of the connection (u the direction, I the identity)::

    [SYMP.signed_moved_queries]  uq = heads(u w_q) d^(-1/4)
    [SYMP.signed_moved_keys]  uk = heads(u w_k) d^(-1/4)
    [SYMP.signed_query_moments]  S_i = sum_j q_j (q_j, u_j)^T    two matrices side by side
    [SYMP.signed_key_moments]  R_i = sum_j k_j (k_j, uk_j, q_j)^T    three
    [SYMP.signed_query_solution]  E = (S_q + ridge I)^-1 S_u    S_q, S_u the parts of S, and so for R
    [SYMP.signed_key_solution]  (J, T, s) = (R_k + ridge I)^-1 (R_uk, R_q, uq)
    [SYMP.signed_rest]  r = uq - ridge s + J q
    [SYMP.signed_turn]  t = T^T E u
    [SYMP.signed_connection]  c = (d^(-1/4) merge(t) w_k^T - sum_heads E^T r) / h

Adjoints, for a given dc::

    [dSYMP.signed_turn]  dt = d^(-1/4)/h heads(dc w_k)
    [dSYMP.signed_rest]  dr = -E dc / h
    [dSYMP.signed_key_solution]  d(J, T, s) = (dr q^T, E u dt^T, -ridge dr)
    [dSYMP.signed_query_solution]  dE = T dt u^T - r dc^T / h
    [dSYMP.signed_key_moments]  dR = (-A (J, T, s)^T, A)    A = (R_k + ridge I)^-T d(J, T, s), there without s
    [dSYMP.signed_query_moments]  dS = (-B E^T, B)      B = (S_q + ridge I)^-T dE
    [dSYMP.signed_moved_keys]  duk_j = D_uk^T k_j       D, C: dR and dS summed over the tokens i that attend j
    [dSYMP.signed_moved_queries]  duq = dr + the last column of A

and dq = J^T dr + (C_q + C_q^T) q + C_u u + D_q^T k, dk = (D_k + D_k^T) k + D_uk uk + D_q q, du = sum_heads (E^T T dt +
C_u^T q) + merge(duq) w_q^T d^(-1/4) + merge(duk) w_k^T d^(-1/4).

Axes: b batch, h head, i token, d and e widths of a head, m width.

Source: the signed linear family of the authors' manuscript of October 2026, with its H1 and R2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.args import check_number
from refattn.mechanisms.sympformer.forces import linear
from refattn.mechanisms.sympformer.forces.linear import Kernel, Linear
from refattn.mechanisms.sympformer.forces.prefix import Prefix
from refattn.mechanisms.sympformer.integrators import classical
from refattn.mechanisms.sympformer.integrators.classical import Heads
from refattn.mechanisms.sympformer.params import Add, Layer, affine, affine_backward
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward
from refattn.ops.solve import identity, solve, solve_backward
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Signed(Linear):
    """Linear attention of heads, with the four matrices of softmax attention, which baselines alone have: this file.

    Attributes
    ----------
    ridge
        What is added to the matrices that a connection divides by.
    """

    ridge: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ridge", self.ridge, positive=True)

    def weights(self, kicks: bool, drifts: bool) -> set[str]:
        """Return the matrices of a block."""
        return {"w_q", "w_k", "w_v", "w_o"}


@dataclass(frozen=True)
class Attended:
    """What `attend_backward` reads."""

    kernel: Kernel
    qkv: Heads
    joined: Array


def scaled(layer: Layer, x: Array, name: str) -> Array:
    """Return heads(x w + b) d^(-1/4) for the matrix and the bias of a name, "q" or "k"."""
    part = classical.heads_of(layer, x, name)  # (b, h, i, d)
    return part * part.shape[-1] ** -0.25


def scaled_backward(layer: Layer, x: Array, name: str, d_part: Array, add: Add) -> Array:
    """Return the gradient of x, and add those of the matrix and the bias."""
    return classical.heads_of_backward(layer, x, name, d_part * d_part.shape[-1] ** -0.25, add)


def attend(layer: Layer, y: Array) -> tuple[Array, Attended]:
    """Return f of normalised tokens y, and what `attend_backward` reads."""
    q = scaled(layer, y, "q")  # (b, h, i, d) [SYMP.signed_queries]
    k = scaled(layer, y, "k")  # (b, h, i, d) [SYMP.signed_keys]
    w = classical.heads_of(layer, y, "v")  # (b, h, i, d) [SYMP.signed_values]
    kernel = linear.kernel_of(layer, y, None)
    mean = kernel.mix("force", q, k, w) / kernel.n  # (b, h, i, d) [SYMP.signed_attended]
    joined = merge_heads(mean)  # (b, i, m)
    force = affine(layer.params, joined, "o")  # (b, i, m) [SYMP.signed_force]
    return force, Attended(kernel, (q, k, w), joined)


def attend_backward(layer: Layer, saved: Attended, d_force: Array, d_further: Heads | None, add: Add) -> Array:
    """Return the gradient of y, and add those of the weights; `d_further` is what else asks of q, k and w."""
    kernel = saved.kernel
    # forward: force = merge(mean) @ w_o
    d_joined = affine_backward(layer.params, saved.joined, "o", d_force, add)  # (b, i, m)
    d_mean = split_heads(d_joined, layer.params.config.heads)  # (b, h, i, d) [dSYMP.signed_attended]
    # forward: mean = mix(q, k, w) / n
    d_q, d_k, d_w = kernel.mix_backward(
        *saved.qkv, d_mean / kernel.n
    )  # (b, h, i, d) [dSYMP.signed_queries], (b, h, i, d) [dSYMP.signed_keys], (b, h, i, d) [dSYMP.signed_values]
    d_q, d_k, d_w = classical.both((d_q, d_k, d_w), d_further)  # (b, h, i, d), (b, h, i, d), (b, h, i, d)
    # forward: q, k, w = scaled(y @ w_q), scaled(y @ w_k), split(y @ w_v)
    d_y = scaled_backward(layer, kernel.y, "q", d_q, add)  # (b, i, m)
    d_y = d_y + scaled_backward(layer, kernel.y, "k", d_k, add)  # (b, i, m)
    return d_y + classical.heads_of_backward(layer, kernel.y, "v", d_w, add)


Bent = tuple[Any, ...]
"""What `connect_backward` reads: of the two systems first the matrix, with its ridge, then the solution."""


def connect(layer: Layer, u: Array, q: Array, k: Array, v: Array, f: Array) -> tuple[Array, Bent]:
    """Return c along u (b, i, m) for queries and keys by head, and what is saved; v and f are not read."""
    xp, heads, d, ridge = namespace(u), q.shape[1], q.shape[-1], layer.params.config.oracle.ridge
    uq = scaled(layer, u, "q")  # (b, h, i, d) [SYMP.signed_moved_queries]
    uk = scaled(layer, u, "k")  # (b, h, i, d) [SYMP.signed_moved_keys]
    along = xp.broadcast_to(u[:, None, ...], (u.shape[0], heads, *u.shape[1:]))  # (b, h, i, m): of every head
    of_q = _summed(layer, "queries", q, xp.concat([q, along], axis=-1))  # [SYMP.signed_query_moments]
    of_k = _summed(layer, "keys", k, xp.concat([k, uk, q], axis=-1))  # [SYMP.signed_key_moments]
    s_matrix = of_q[..., :d] + ridge * identity(d, q)  # (b, h, i, d, d)
    r_matrix = of_k[..., :d] + ridge * identity(d, q)  # (b, h, i, d, d)
    e = solve(s_matrix, of_q[..., d:])  # (b, h, i, d, m) [SYMP.signed_query_solution]
    solved = solve(r_matrix, xp.concat([of_k[..., d:], uq[..., None]], axis=-1))  # [SYMP.signed_key_solution]
    r = uq - ridge * solved[..., 2 * d] + _times(solved[..., :d], q)  # (b, h, i, d) [SYMP.signed_rest]
    ahead = _times(e, along)  # (b, h, i, d): E u
    t = _times(xp.matrix_transpose(solved[..., d : 2 * d]), ahead)  # (b, h, i, d) [SYMP.signed_turn]
    pulled = merge_heads(t) @ xp.matrix_transpose(layer.params.w_k) * d**-0.25  # (b, i, m)
    turn = (pulled - xp.sum(_times(xp.matrix_transpose(e), r), axis=1)) / heads  # (b, i, m) [SYMP.signed_connection]
    return turn, (u, q, k, uk, s_matrix, e, r_matrix, solved, r, t, ahead, layer.causal is not False)


def connect_backward(layer: Layer, saved: Bent, d_turn: Array, add: Add) -> tuple[Array, Array, Array, Array, Array]:
    """Return the gradients of u, q, k, v and f, of which the last two are 0, and add those of the parameters."""
    u, q, k, uk, s_matrix, e, r_matrix, solved, r, t, ahead, causal = saved  # as they were given to it
    xp = namespace(d_turn)
    heads, d, ridge = q.shape[1], q.shape[-1], layer.params.config.oracle.ridge
    j_matrix, t_matrix = solved[..., :d], solved[..., d : 2 * d]  # (b, h, i, d, d), (b, h, i, d, d)
    along = xp.broadcast_to(u[:, None, ...], (u.shape[0], heads, *u.shape[1:]))  # (b, h, i, m): of every head
    # forward: turn = (merge(t) @ w_k^T * d^(-1/4) - sum(E^T r)) / heads
    shared = d_turn / heads  # (b, i, m)
    d_merged, d_back, _ = linear_backward(
        merge_heads(t), xp.matrix_transpose(layer.params.w_k), shared * d**-0.25
    )  # (b, i, m), (m, m)
    add("w_k", xp.matrix_transpose(d_back))
    d_t = split_heads(d_merged, heads)  # (b, h, i, d) [dSYMP.signed_turn]
    asked = xp.broadcast_to(shared[:, None, ...], along.shape)  # (b, h, i, m)
    d_r = -_times(e, asked)  # (b, h, i, d) [dSYMP.signed_rest]
    # forward: t = T^T (E u); r = uq - ridge * s + J q
    d_ahead = _times(t_matrix, d_t)  # (b, h, i, d): of E u
    parts = [_outer(d_r, q), _outer(ahead, d_t), -ridge * d_r[..., None]]
    d_solved = xp.concat(parts, axis=-1)  # [dSYMP.signed_key_solution]
    d_e = _outer(d_ahead, along) - _outer(r, asked)  # (b, h, i, d, m) [dSYMP.signed_query_solution]
    # forward: (J, T, s) = solve(R_k + ridge, (R_uk, R_q, uq)); E = solve(S_q + ridge, S_u)
    d_r_matrix, d_right = solve_backward(r_matrix, solved, d_solved)  # (b, h, i, d, d)
    d_of_k = xp.concat([d_r_matrix, d_right[..., : 2 * d]], axis=-1)  # [dSYMP.signed_key_moments]
    d_s_matrix, d_right_q = solve_backward(s_matrix, e, d_e)  # (b, h, i, d, d), (b, h, i, d, m)
    d_of_q = xp.concat([d_s_matrix, d_right_q], axis=-1)  # [dSYMP.signed_query_moments]
    d_uq = d_r + d_right[..., 2 * d]  # (b, h, i, d) [dSYMP.signed_moved_queries]
    # forward: S = sum(q (q, u)^T); R = sum(k (k, uk, q)^T)
    d_left, d_pair = _summed_backward(q, xp.concat([q, along], axis=-1), d_of_q, causal)  # of q, of q and u
    d_left_k, d_three = _summed_backward(k, xp.concat([k, uk, q], axis=-1), d_of_k, causal)  # three
    d_q = d_left + d_pair[..., :d] + d_three[..., 2 * d :] + _times(xp.matrix_transpose(j_matrix), d_r)  # (b, h, i, d)
    d_k = d_left_k + d_three[..., :d]  # (b, h, i, d)
    d_uk = d_three[..., d : 2 * d]  # (b, h, i, d) [dSYMP.signed_moved_keys]
    d_u = xp.sum(d_pair[..., d:] + _times(xp.matrix_transpose(e), d_ahead), axis=1)  # (b, i, m)
    # forward: uq, uk = heads(u @ w_q), heads(u @ w_k)
    d_u = d_u + scaled_backward(layer, u, "q", d_uq, add)  # (b, i, m)
    d_u = d_u + scaled_backward(layer, u, "k", d_uk, add)  # (b, i, m)
    return d_u, d_q, d_k, xp.zeros_like(q), xp.zeros_like(u)


def _times(a: Array, x: Array) -> Array:
    """Return a x for matrices a (..., n, k) and vectors x (..., k)."""
    return (a @ x[..., None])[..., 0]


def _outer(a: Array, b: Array) -> Array:
    """Return a b^T of vectors."""
    return a[..., :, None] * b[..., None, :]


def _summed(layer: Layer, name: str, a: Array, b: Array) -> Array:
    """Return sum_j a_j b_j^T over the tokens j that each token attends."""
    xp, pairs = namespace(a), _outer(a, b)  # -, of each token alone
    if isinstance(layer.causal, Prefix):
        return layer.causal.add_up(name, pairs)
    if layer.causal is False:
        return xp.broadcast_to(xp.sum(pairs, axis=2, keepdims=True), pairs.shape)
    return xp.cumulative_sum(pairs, axis=2)


def _summed_backward(a: Array, b: Array, d: Array, causal: bool) -> tuple[Array, Array]:
    """Return the gradients of a and b."""
    xp = namespace(a)
    # forward: summed_i = sum_j a_j b_j^T
    if causal:
        d_pairs = xp.flip(xp.cumulative_sum(xp.flip(d, axis=2), axis=2), axis=2)  # from a token on
    else:
        d_pairs = xp.broadcast_to(xp.sum(d, axis=2, keepdims=True), d.shape)  # of all
    return _times(d_pairs, b), _times(xp.matrix_transpose(d_pairs), a)
