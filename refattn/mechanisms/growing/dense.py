"""The attention whose queries and keys grow, the definition: every score at once.

Equations (A(i) is the set of keys that query i may attend, s the scale that is stored with the weights)::

    [GROW.1]  s_ij = s q_i . k_j
    [GROW.2]  m_ij = s_ij if j in A(i), else -inf       without a mask: m = s
    [GROW.3]  p_ij = exp(m_ij - max_l m_il)             0 where A(i) is empty
    [GROW.4]  z_i = sum_j p_ij                          1 where A(i) is empty
    [GROW.5]  a_ij = p_ij / z_i
    [GROW.6]  o_i = sum_j a_ij v_j

Adjoints, for given d_o (dGROW.n is the gradient with respect to the value of GROW.n)::

    [dGROW.v]  dv_j = sum_i a_ij do_i
    [dGROW.5]  da_ij = do_i . v_j
    [dGROW.4]  dz_i = -(sum_j a_ij da_ij) / z_i
    [dGROW.1]  g_ij = a_ij (da_ij + z_i dz_i)           the functional gradient; 0 outside A
    [dGROW.q]  dq_i = s sum_j g_ij k_j
    [dGROW.k]  dk_j = s sum_i g_ij q_i
    [dGROW.scale]  ds = sum_ij g_ij q_i . k_j

g is the gradient of the loss with respect to the scores before the softmax, and all that growth does follows from it.
Its rows sum to 0, because a softmax does not see what is added to a whole row.

Axes: b batch, h query head, g key/value head, i query, j key, d width of queries and keys, e width of values. Query
head h attends the keys and values of head floor(h g / h_total); the block has as many of the one as of the other.

Source: L. Burgund, Attention Growing Networks (internship report, LISN), section 1.

How the report differs from this: it writes softmax(S) where the scores S_i of head i are meant, and says nothing of
masks; a query that may attend no key gives 0 here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import allowed_pairs
from refattn.xp import Array, max_last, namespace, sum_wide


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense form reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    scale: float | Array
    total: Array  # (b, h, i, 1)
    weights: Array  # (b, h, i, j)


def forward(
    q: Array, k: Array, v: Array, *, mask: Array | None, offset: int | None, scale: float | Array
) -> tuple[Array, Saved]:
    """Return (out, saved): (b, h, i, e) and what `backward` reads.

    `offset` is the causal offset: query i may attend key j where j <= i + offset.
    """
    xp = namespace(q, k, v)
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    k_heads = repeat_heads(k, heads)  # (b, h, j, d): copies of k
    v_heads = repeat_heads(v, heads)  # (b, h, j, e): copies of v
    scores = q @ xp.matrix_transpose(k_heads) * scale  # (b, h, i, j) [GROW.1]
    allowed = allowed_pairs(mask, offset, (0, queries), (0, keys), q)  # j in A(i)
    if allowed is None:
        masked = scores  # (b, h, i, j): GROW.2 without a mask
    else:
        masked = xp.where(allowed, scores, -math.inf)  # (b, h, i, j) [GROW.2]
    top = max_last(masked)  # (b, h, i, 1): part of GROW.3, -inf where A(i) is empty
    alive = top != -math.inf  # (b, h, i, 1): whether A(i) has a key
    exponentials = xp.exp(masked - xp.where(alive, top, 0.0))  # (b, h, i, j) [GROW.3]
    total = xp.where(alive, xp.sum(exponentials, axis=-1, keepdims=True), 1.0)  # (b, h, i, 1) [GROW.4]
    weights = exponentials / total  # (b, h, i, j) [GROW.5]
    out = weights @ v_heads  # (b, h, i, e) [GROW.6]
    return out, Saved(q, k, v, scale, total, weights)


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, scale and scores for a given d_out; the last is the functional gradient."""
    q, k, v, scale = saved.q, saved.k, saved.v, saved.scale
    xp = namespace(q, k, v)
    heads = q.shape[1]
    k_heads = repeat_heads(k, heads)  # (b, h, j, d): copies of k
    v_heads = repeat_heads(v, heads)  # (b, h, j, e): copies of v
    # forward: out = weights @ v_heads
    d_v = sum_heads(xp.matrix_transpose(saved.weights) @ d_out, v.shape[1])  # (b, g, j, e) [dGROW.v]
    d_weights = d_out @ xp.matrix_transpose(v_heads)  # (b, h, i, j) [dGROW.5]
    # forward: weights = exponentials / total; total = sum(exponentials)
    inner = xp.sum(d_weights * saved.weights, axis=-1, keepdims=True)  # (b, h, i, 1): part of dGROW.4
    d_total = -inner / saved.total  # (b, h, i, 1) [dGROW.4]
    # forward: exponentials = exp(masked - max(masked))
    d_scores = saved.weights * (d_weights + saved.total * d_total)  # (b, h, i, j) [dGROW.1]
    # forward: scores = q @ k_heads^T * scale
    d_product = d_scores @ k_heads  # (b, h, i, d): dGROW.q without its scale
    d_q = d_product * scale  # (b, h, i, d) [dGROW.q]
    d_k = sum_heads(xp.matrix_transpose(d_scores) @ q, k.shape[1]) * scale  # (b, g, j, d) [dGROW.k]
    d_scale = sum_wide(d_product * q)  # () [dGROW.scale]
    return {"q": d_q, "k": d_k, "v": d_v, "scale": d_scale, "scores": d_scores}


def contract(saved: Saved, d_out: Array, x: Array, total: bool) -> tuple[Array, Array]:
    """Return x^T g x of each sequence (b, h, in, in), or their sum (h, in, in), for tokens x (b, n, in); and |g|^2."""
    xp = namespace(x)
    d_scores = xp.astype(backward(saved, d_out)["scores"], x.dtype, copy=False)  # (b, h, i, j): dGROW.1
    b, h, n, _ = d_scores.shape
    # All heads of a sequence at once, and where the sum is wanted all sequences: few large products are quicker.
    pulled = xp.reshape(xp.reshape(d_scores, (b, h * n, n)) @ x, (b, h, n, x.shape[2]))  # (b, h, i, in): g x
    square = sum_wide(d_scores * d_scores)  # (): |g|^2
    if not total:
        return xp.matrix_transpose(x)[:, None, :, :] @ pulled, square
    pulled = xp.reshape(xp.permute_dims(pulled, (1, 0, 2, 3)), (h, b * n, x.shape[2]))  # (h, b*i, in): g x
    return xp.matrix_transpose(xp.reshape(x, (b * n, x.shape[2]))) @ pulled, square
