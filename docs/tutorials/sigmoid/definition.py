"""Sigmoid attention: every query decides of every key for itself how much of its value it takes.

In softmax attention the weights of a query add up to 1, so that keys compete. Here a score alone decides about its
weight, which lies between 0 and 1: a query may take much from all keys, or nothing from any. A key that query i must
not see has the weight 0, and A(i) is the set of those that it may see:

    [SIG.1]  s_ij = scale q_i . k_j                                     scale = 1 / sqrt(d), if no other is given
    [SIG.2]  w_ij = (1 + tanh(s_ij / 2)) / 2 if j in A(i), else 0       which is 1 / (1 + exp(-s_ij))
    [SIG.3]  o_i = sum_j w_ij v_j

Backward, for given do: [dSIG.2] is the gradient of the value of SIG.2, [dSIG.q] that of the input q:

    [dSIG.v]  dv_j = sum_i w_ij do_i
    [dSIG.2]  dw_ij = do_i . v_j
    [dSIG.1]  ds_ij = dw_ij w_ij (1 - w_ij)
    [dSIG.q]  dq_i = scale sum_j ds_ij k_j
    [dSIG.k]  dk_j = scale sum_i ds_ij q_i

Axes: b batch, h head, g head of keys and values, i query, j key, d width of queries and keys, e width of values.
Source: Ramapuram et al. 2024 (arXiv:2409.04431), without its bias of -log n.
"""

from __future__ import annotations

import math

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import where_allowed
from refattn.xp import Array, namespace, transpose


def forward(
    q: Array, k: Array, v: Array, allowed: Array | None = None, scale: float | None = None
) -> tuple[Array, tuple[Array, ...]]:
    """Return out (b, h, i, e) for q (b, h, i, d), k (b, g, j, d), v (b, g, j, e), and what `backward` reads."""
    xp, h = namespace(q), q.shape[1]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    k_heads, v_heads = repeat_heads(k, h), repeat_heads(v, h)  # (b, h, j, d), (b, h, j, e): h/g queries share one
    scores = scale * q @ transpose(k_heads)  # (b, h, i, j) [SIG.1]
    weights = where_allowed(allowed, 0.5 * (1.0 + xp.tanh(0.5 * scores)), 0.0)  # (b, h, i, j) [SIG.2]
    out = weights @ v_heads  # (b, h, i, e) [SIG.3]
    return out, (q, k, v, weights, scale)


def backward(saved: tuple[Array, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v for d_out, that of out."""
    q, k, v, weights, scale = saved
    h, g = q.shape[1], k.shape[1]
    k_heads, v_heads = repeat_heads(k, h), repeat_heads(v, h)  # (b, h, j, d), (b, h, j, e)
    # forward: out = weights @ v_heads
    d_v = sum_heads(transpose(weights) @ d_out, g)  # (b, g, j, e) [dSIG.v]
    d_weights = d_out @ transpose(v_heads)  # (b, h, i, j) [dSIG.2]
    # forward: weights = where_allowed(allowed, 0.5 * (1.0 + xp.tanh(0.5 * scores)), 0.0)
    d_scores = d_weights * weights * (1.0 - weights)  # (b, h, i, j) [dSIG.1]
    # forward: scores = scale * q @ transpose(k_heads)
    d_q = scale * d_scores @ k_heads  # (b, h, i, d) [dSIG.q]
    d_k = sum_heads(scale * transpose(d_scores) @ q, g)  # (b, g, j, d) [dSIG.k]
    return {"q": d_q, "k": d_k, "v": d_v}
