"""Softmax attention, the definition: every score at once.

Equations (A(i) is the set of keys that query i may attend)::

    [SM.1]  s_ij = scale q_i . k_j
    [SM.2]  c_ij = softcap tanh(s_ij / softcap)         without a soft-cap: c = s
    [SM.3]  m_ij = c_ij if j in A(i), else -inf         without a mask: m = c
    [SM.4]  t_i = max_j m_ij                            0 where A(i) is empty
    [SM.5]  p_ij = exp(m_ij - t_i)
    [SM.6]  z_i = sum_j p_ij                            1 where A(i) is empty
    [SM.7]  w_ij = p_ij / z_i
    [SM.8]  o_i = sum_j w_ij v_j
    [SM.9]  lse_i = t_i + log z_i                       -inf where A(i) is empty

Adjoints, for given d_o and d_lse (dSM.n is the gradient with respect to the value of SM.n; t has none, because neither
o nor lse changes when t does)::

    [dSM.v]  dv_j = sum_i w_ij do_i
    [dSM.7]  dw_ij = do_i . v_j
    [dSM.6]  dz_i = (dlse_i - sum_j dw_ij w_ij) / z_i
    [dSM.5]  dp_ij = dw_ij / z_i + dz_i
    [dSM.3]  dm_ij = dp_ij p_ij
    [dSM.1]  ds_ij = dc_ij (1 - (c_ij / softcap)^2)     without a soft-cap: ds = dc; dc = dm, for p = 0 outside A
    [dSM.q]  dq_i = scale sum_j ds_ij k_j
    [dSM.k]  dk_j = scale sum_i ds_ij q_i
    [dSM.scale]  dscale = sum_ij ds_ij q_i . k_j
    [dSM.softcap]  dsoftcap = sum_ij dc_ij (tanh(u_ij) - u_ij (1 - tanh(u_ij)^2)), u_ij = s_ij / softcap

Axes: b batch, h query head, g key/value head, i query, j key, d width of queries and keys, e width of values. Query
head h attends the keys and values of head floor(h g / h_total).

Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; soft-cap: Gemma 2 (arXiv:2408.00118), section 2; grouped
heads: Ainslie et al. 2023 (arXiv:2305.13245).

How libraries and the paper differ: the paper fixes scale = 1/sqrt(d) and says nothing of empty rows, for which a plain
softmax gives NaN, some libraries the mean of all values, and this one 0 with lse = -inf. PyTorch aligns a causal mask
of unequal lengths top left, FlashAttention (from 2.1 on) bottom right, as here. Some publish lse to base 2; here it is
natural. The soft-cap comes before the mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import allowed_pairs
from refattn.xp import Array, max_last, namespace, sum_wide, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense form reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    scale: float | Array
    softcap: float | Array | None
    scores: Array  # (b, h, i, j)
    exponentials: Array  # (b, h, i, j)
    total: Array  # (b, h, i, 1)
    weights: Array  # (b, h, i, j)
    alive: Array  # (b, h, i, 1)


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None,
    offset: int | None,
    scale: float | Array,
    softcap: float | Array | None,
) -> tuple[Array, Array, Saved]:
    """Return (out, lse, saved): (b, h, i, e), (b, h, i) and what `backward` reads.

    `offset` is the causal offset: query i may attend key j where j <= i + offset.
    """
    xp = namespace(q, k, v)
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    k_heads = repeat_heads(k, heads)  # (b, h, j, d): copies of k
    v_heads = repeat_heads(v, heads)  # (b, h, j, e): copies of v
    scores = q @ xp.matrix_transpose(k_heads) * scale  # (b, h, i, j) [SM.1]
    if softcap is None:
        capped = scores  # (b, h, i, j): SM.2 without a soft-cap
    else:
        capped = softcap * xp.tanh(scores / softcap)  # (b, h, i, j) [SM.2]
    allowed = allowed_pairs(mask, offset, queries, keys, q)  # j in A(i)
    if allowed is None:
        masked = capped  # (b, h, i, j): SM.3 without a mask
    else:
        masked = xp.where(allowed, capped, -math.inf)  # (b, h, i, j) [SM.3]
    top = max_last(masked)  # (b, h, i, 1): part of SM.4, -inf where A(i) is empty
    alive = top != -math.inf  # (b, h, i, 1): whether A(i) has a key
    maximum = xp.where(alive, top, 0.0)  # (b, h, i, 1) [SM.4]
    exponentials = xp.exp(masked - maximum)  # (b, h, i, j) [SM.5]
    total = xp.where(alive, xp.sum(exponentials, axis=-1, keepdims=True), 1.0)  # (b, h, i, 1) [SM.6]
    weights = exponentials / total  # (b, h, i, j) [SM.7]
    out = weights @ v_heads  # (b, h, i, e) [SM.8]
    lse = xp.where(alive, maximum + xp.log(total), -math.inf)[..., 0]  # (b, h, i) [SM.9]
    return out, lse, Saved(q, k, v, scale, softcap, scores, exponentials, total, weights, alive)


def backward(saved: Saved, d_out: Array, d_lse: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v, scale and, where there is one, softcap for given d_out and d_lse."""
    q, k, v, scale, softcap = saved.q, saved.k, saved.v, saved.scale, saved.softcap
    xp = namespace(q, k, v)
    heads = q.shape[1]
    k_heads = repeat_heads(k, heads)  # (b, h, j, d): copies of k
    v_heads = repeat_heads(v, heads)  # (b, h, j, e): copies of v
    if d_lse is None:
        d_lse_rows = zeros(saved.total.shape, q)  # (b, h, i, 1): no gradient came in
    else:
        d_lse_rows = xp.where(saved.alive, d_lse[..., None], 0.0)  # (b, h, i, 1): -inf is constant
    # forward: out = weights @ v_heads
    d_v = sum_heads(xp.matrix_transpose(saved.weights) @ d_out, v.shape[1])  # (b, g, j, e) [dSM.v]
    d_weights = d_out @ xp.matrix_transpose(v_heads)  # (b, h, i, j) [dSM.7]
    # forward: weights = exponentials / total; lse = maximum + log(total)
    inner = xp.sum(d_weights * saved.weights, axis=-1, keepdims=True)  # (b, h, i, 1): part of dSM.6
    d_total = (d_lse_rows - inner) / saved.total  # (b, h, i, 1) [dSM.6]
    # forward: total = sum(exponentials)
    d_exponentials = d_weights / saved.total + d_total  # (b, h, i, j) [dSM.5]
    # forward: exponentials = exp(masked - maximum)
    d_masked = d_exponentials * saved.exponentials  # (b, h, i, j) [dSM.3]
    gradients = {}
    if softcap is None:
        d_scores = d_masked  # (b, h, i, j): dSM.1 without a soft-cap
    else:
        # forward: capped = softcap * tanh(scores / softcap)
        ratio = saved.scores / softcap  # (b, h, i, j): the argument of SM.2
        tanh = xp.tanh(ratio)  # (b, h, i, j): part of SM.2
        slope = 1.0 - tanh * tanh  # (b, h, i, j): part of dSM.1
        d_scores = d_masked * slope  # (b, h, i, j) [dSM.1]
        d_softcap = sum_wide(d_masked * (tanh - ratio * slope))  # () [dSM.softcap]
        gradients["softcap"] = d_softcap
    # forward: scores = q @ k_heads^T * scale
    d_product = d_scores @ k_heads  # (b, h, i, d): dSM.q without its scale
    d_q = d_product * scale  # (b, h, i, d) [dSM.q]
    d_k = sum_heads(xp.matrix_transpose(d_scores) @ q, k.shape[1]) * scale  # (b, g, j, d) [dSM.k]
    d_scale = sum_wide(d_product * q)  # () [dSM.scale]
    return {"q": d_q, "k": d_k, "v": d_v, "scale": d_scale, **gradients}
