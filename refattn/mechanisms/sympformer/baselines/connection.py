"""What a momentum is turned by along its way: the connection of the authors' later manuscript.

The scores of attention bend the space of the tokens. Their derivative along a direction u, s'_ij = (uq_i . k_j +
q_i . uk_j) / sqrt(d), has under the weights of attention a mean for each token, and no pair has to be kept for it.

Equations (q, k, v, f as in `attend`, d the width of a head)::

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

Source: the connection of the methods that the authors' manuscript of October 2026 calls H1 (along the old momentum) and
R2 (along the new one). There the scores are kept for their derivatives; here three more values are attended.
"""

from __future__ import annotations

import math
from typing import Any

from refattn.mechanisms.sympformer import maps
from refattn.mechanisms.sympformer.baselines import attend
from refattn.mechanisms.sympformer.params import Add, Layer
from refattn.ops.heads import merge_heads, split_heads
from refattn.xp import Array, namespace

Saved = tuple[Any, ...]
"""What the backward reads; the names there are those of the equations."""


def forward(layer: Layer, u: Array, q: Array, k: Array, v: Array, f: Array) -> tuple[Array, Saved]:
    """Return c along u (b, i, m), for queries, keys and values by head and the force f, and what `backward` reads."""
    xp, d = namespace(u), q.shape[-1]
    factor = 1.0 / (layer.params.config.heads * math.sqrt(d))
    square = xp.sum(u * u, axis=-1, keepdims=True)  # (b, i, 1) [SYMP.connection_squares]
    uq = attend.heads_of(layer, u, "q")  # (b, h, i, d) [SYMP.connection_queries]
    uk = attend.heads_of(layer, u, "k")  # (b, h, i, d) [SYMP.connection_keys]
    values = xp.concat([square[:, None, ...] * v, k, uk], axis=-1)  # three values in one
    found, attended = attend.attention(q, k, values, layer.causal)  # (b, h, i, 3*d) [SYMP.connection_attended]
    a, b, c = found[..., :d], found[..., d : 2 * d], found[..., 2 * d :]  # parts of SYMP.connection_attended
    rate = factor * xp.sum(uq * b + q * c, axis=(1, 3))[..., None]  # (b, i, 1) [SYMP.connection_rate]
    joined = merge_heads(a)  # (b, i, m): part of SYMP.connection_pull
    pull = maps.affine(layer.params, joined, "o")  # (b, i, m) [SYMP.connection_pull]
    turn = rate * u - 0.5 * (square * f + pull)  # (b, i, m) [SYMP.connection_force]
    return turn, (u, square, q, v, uq, b, c, rate, f, joined, attended)


def backward(layer: Layer, saved: Saved, d_turn: Array, add: Add) -> tuple[Array, Array, Array, Array, Array]:
    """Return the gradients of u, q, k, v and f, and add those of the parameters."""
    u, square, q, v, uq, b, c, rate, f, joined, attended = saved  # as they were given to it
    xp, heads, d = namespace(d_turn), layer.params.config.heads, q.shape[-1]
    factor = 1.0 / (heads * math.sqrt(d))
    # forward: turn = rate * u - (square * f + pull) / 2
    d_f = -0.5 * square * d_turn  # (b, i, m) [dSYMP.connection_force]
    d_pull = -0.5 * d_turn  # (b, i, m) [dSYMP.connection_pull]
    d_rate = xp.sum(d_turn * u, axis=-1, keepdims=True)  # (b, i, 1) [dSYMP.connection_rate]
    # forward: pull = merge(a) @ w_o
    d_joined = maps.affine_backward(layer.params, joined, "o", d_pull, add)  # (b, i, m)
    # forward: rate = factor * sum(uq * b + q * c)
    shared = factor * d_rate[:, None, ...]  # of every head
    parts = [split_heads(d_joined, heads), shared * uq, shared * q]
    d_together = xp.concat(parts, axis=-1)  # (b, h, i, 3*d) [dSYMP.connection_attended]
    d_q, d_k, d_values = attend.attention_backward(attended, d_together)  # of q, k and the three values
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
    d_u = d_u + attend.heads_of_backward(layer, u, "q", d_uq, add)  # (b, i, m)
    d_u = d_u + attend.heads_of_backward(layer, u, "k", d_uk, add)  # (b, i, m)
    return d_u, d_q, d_k + d_key, d_v, d_f
