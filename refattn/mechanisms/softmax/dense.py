"""Softmax attention with all its options: every score at once.

The paper's own case, SM.1 to SM.5, stands in `refattn.mechanisms.softmax.definition`: read that first. Here scores may
also be capped, biased and masked in any way, logits without a value (sinks) may take part, and weights may be dropped.
The equations of these options have names, and so have the parts of SM.3 and SM.4. If an option is not given, its
equation is left out, and the next one reads the value before it: without a soft-cap c is s. A(i) is the set of keys
that query i may attend. In the order of computing::

    [SM.1]  s_ij = scale q_i . k_j
    [SM.capped]  c_ij = softcap tanh(s_ij / softcap)    with a soft-cap
    [SM.biased]  a_ij = c_ij + bias_ij                  with a bias
    [SM.2]  m_ij = a_ij if j in A(i), else -inf         with a mask
    [SM.largest]  x_i = max_j m_ij                      -inf if A(i) is empty
    [SM.top]  t_i = max(x_i, max_s sink_s)              without sinks: x_i; 0 if that is -inf
    [SM.3]  u_ij = exp(m_ij - t_i)
    [SM.sunk]  u_is = exp(sink_s - t_i)                 with sinks
    [SM.total]  z_i = sum_j u_ij + sum_s u_is           1 if there is neither key nor sink
    [SM.4]  w_ij = u_ij / z_i
    [SM.kept]  y_ij = keep_ij w_ij                      with dropout
    [SM.5]  o_i = sum_j y_ij v_j
    [SM.lse]  lse_i = t_i + log z_i                     -inf if there is neither key nor sink

Adjoints, for given d_o and d_lse (dSM.n is the gradient with respect to the value of SM.n; t has none, because neither
o nor lse changes when t does; that of SM.sunk is dz)::

    [dSM.v]  dv_j = sum_i y_ij do_i
    [dSM.kept]  dy_ij = do_i . v_j                      without dropout this is dw
    [dSM.keep]  dkeep_ij = dy_ij w_ij                   summed over the axes that keep was broadcast along
    [dSM.4]  dw_ij = keep_ij dy_ij
    [dSM.total]  dz_i = (dlse_i - sum_j dw_ij w_ij) / z_i
    [dSM.sink]  dsink_s = sum_i dz_i u_is               summed over the batch, too
    [dSM.3]  du_ij = dw_ij / z_i + dz_i
    [dSM.2]  dm_ij = du_ij u_ij                         w_ij (dw_ij - sum_l w_il dw_il) + w_ij dlse_i
    [dSM.bias]  dbias_ij = dm_ij                        summed over the axes that the bias was broadcast along
    [dSM.1]  ds_ij = dm_ij (1 - (c_ij / softcap)^2)     without a soft-cap: ds = dm; outside A(i) u = 0, and so dm = 0
    [dSM.q]  dq_i = scale sum_j ds_ij k_j
    [dSM.k]  dk_j = scale sum_i ds_ij q_i
    [dSM.scale]  dscale = sum_ij ds_ij q_i . k_j
    [dSM.softcap]  dsoftcap = sum_ij dm_ij (tanh(r_ij) - r_ij (1 - tanh(r_ij)^2)), r_ij = s_ij / softcap

Axes: b batch, h query head, g key/value head, i query, j key, d width of queries and keys, e width of values, s sink of
a query head. Query head h attends the keys and values of head floor(h g / h_total).

Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; soft-cap: Gemma 2 (arXiv:2408.00118), section 2; grouped
heads: Ainslie et al. 2023 (arXiv:2305.13245); windows: Beltagy et al. 2020 (arXiv:2004.05150), section 3.1; biases:
Press et al. 2022 (arXiv:2108.12409), equation 1; sinks: gpt-oss (arXiv:2508.10925), section 2.2; dropout of weights:
the code of Vaswani et al. (tensor2tensor).

How libraries and the paper differ: the paper fixes scale = 1/sqrt(d) and says nothing of empty rows, for which a plain
softmax gives NaN, some libraries the mean of all values, and this one 0 with lse = -inf. PyTorch aligns a causal mask
of unequal lengths top left, FlashAttention (from 2.1 on) bottom right, as here. Some publish lse to base 2, and some
leave the sinks out of it; here it is natural, and includes them. The soft-cap comes before the bias and the mask.
docs/conventions.md has the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import band_pairs, existing, where_allowed
from refattn.xp import Array, max_last, namespace, sum_wide, sum_wide_to, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense implementation reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    scale: float | Array
    softcap: float | Array | None
    bias: Array | None  # (b, h, i, j), each axis of its own size or 1
    keep: Array | None  # (b, h, i, j), each axis of its own size or 1
    scores: Array  # (b, h, i, j)
    largest: Array  # (b, h, i)
    exponentials: Array  # (b, h, i, j)
    of_sinks: Array | None  # (b, h, i, s)
    total: Array  # (b, h, i, 1)
    weights: Array  # (b, h, i, j)
    alive: Array  # (b, h, i, 1)


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None,
    first: int | Array | None,
    last: int | Array | None,
    q_lengths: Array | None,
    k_lengths: Array | None,
    bias: Array | None,
    sink: Array | None,
    keep: Array | None,
    scale: float | Array,
    softcap: float | Array | None,
) -> tuple[Array, Array, Saved]:
    """Return (out, lse, saved): (b, h, i, e), (b, h, i) and what `backward` reads.

    Query i may attend keys i + first to i + last, each a number or one for each batch element, (b, 1, 1, 1). Queries
    and keys from their lengths (b,) on do not exist; they hold 0. `sink` is (h, s).
    """
    xp = namespace(q, k, v)
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    k_heads = k if k.shape[1] == heads else repeat_heads(k, heads)  # (b, h, j, d): copies of k
    v_heads = v if v.shape[1] == heads else repeat_heads(v, heads)  # (b, h, j, e): copies of v
    scores = q @ xp.matrix_transpose(k_heads) * scale  # (b, h, i, j) [SM.1]
    if softcap is None:
        capped = scores  # (b, h, i, j): SM.capped without a soft-cap
    else:
        capped = softcap * xp.tanh(scores / softcap)  # (b, h, i, j) [SM.capped]
    if bias is None:
        biased = capped  # (b, h, i, j): SM.biased without a bias
    else:
        biased = capped + bias  # (b, h, i, j) [SM.biased]
    allowed = band_pairs(mask, first, last, q_lengths, k_lengths, queries, keys, q)  # j in A(i)
    if allowed is None:
        masked = biased  # (b, h, i, j): SM.2 without a mask
    else:
        masked = xp.where(allowed, biased, -math.inf)  # (b, h, i, j) [SM.2]
    largest = max_last(masked)[..., 0]  # (b, h, i) [SM.largest]
    if sink is None:
        top = largest[..., None]  # (b, h, i, 1): part of SM.top
    else:
        # A query that does not exist has no sinks.
        sinks = where_allowed(existing(q_lengths, queries, q), sink[None, :, None, :], -math.inf)  # of each query
        top = xp.maximum(largest[..., None], max_last(sinks))  # (b, h, i, 1): part of SM.top
    alive = top != -math.inf  # (b, h, i, 1): whether there is a key or a sink
    maximum = xp.where(alive, top, 0.0)  # (b, h, i, 1) [SM.top]
    exponentials = xp.exp(masked - maximum)  # (b, h, i, j) [SM.3]
    added = xp.sum(exponentials, axis=-1, keepdims=True)  # (b, h, i, 1): part of SM.total
    if sink is None:
        of_sinks = None
    else:
        of_sinks = xp.exp(sinks - maximum)  # (b, h, i, s) [SM.sunk]
        added = added + xp.sum(of_sinks, axis=-1, keepdims=True)  # (b, h, i, 1): part of SM.total
    total = xp.where(alive, added, 1.0)  # (b, h, i, 1) [SM.total]
    weights = exponentials / total  # (b, h, i, j) [SM.4]
    if keep is None:
        kept = weights  # (b, h, i, j): SM.kept without dropout
    else:
        kept = keep * weights  # (b, h, i, j) [SM.kept]
    out = kept @ v_heads  # (b, h, i, e) [SM.5]
    lse = xp.where(alive, maximum + xp.log(total), -math.inf)[..., 0]  # (b, h, i) [SM.lse]
    saved = Saved(q, k, v, scale, softcap, bias, keep, scores, largest, exponentials, of_sinks, total, weights, alive)
    return out, lse, saved


def backward(saved: Saved, d_out: Array, d_lse: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v, scale and what there is of softcap, bias, sink, keep, for d_out and d_lse."""
    q, k, v, scale, softcap, keep = saved.q, saved.k, saved.v, saved.scale, saved.softcap, saved.keep
    xp = namespace(q, k, v)
    heads = q.shape[1]
    k_heads = k if k.shape[1] == heads else repeat_heads(k, heads)  # (b, h, j, d): copies of k
    v_heads = v if v.shape[1] == heads else repeat_heads(v, heads)  # (b, h, j, e): copies of v
    if d_lse is None:
        d_lse_rows = zeros(saved.total.shape, q)  # (b, h, i, 1): no gradient came in
    else:
        d_lse_rows = xp.where(saved.alive, d_lse[..., None], 0.0)  # (b, h, i, 1): -inf is constant
    gradients = {}
    # forward: out = kept @ v_heads
    kept = saved.weights if keep is None else keep * saved.weights  # (b, h, i, j): y again
    d_v = sum_heads(xp.matrix_transpose(kept) @ d_out, v.shape[1])  # (b, g, j, e) [dSM.v]
    if keep is None:
        d_weights = d_out @ xp.matrix_transpose(v_heads)  # (b, h, i, j) [dSM.4]
    else:
        d_kept = d_out @ xp.matrix_transpose(v_heads)  # (b, h, i, j) [dSM.kept]
        # forward: kept = keep * weights
        d_keep = sum_wide_to(d_kept * saved.weights, keep.shape)  # (b, h, i, j) [dSM.keep]
        d_weights = keep * d_kept  # (b, h, i, j) [dSM.4]
        gradients["keep"] = d_keep
    # forward: weights = exponentials / total; lse = maximum + log(total)
    inner = xp.vecdot(d_weights, saved.weights)[..., None]  # (b, h, i, 1): part of dSM.total
    d_total = (d_lse_rows - inner) / saved.total  # (b, h, i, 1) [dSM.total]
    if saved.of_sinks is not None:
        # forward: total = sum(exponentials) + sum(of_sinks); of_sinks = exp(sinks - maximum)
        d_sinks = d_total * saved.of_sinks  # (b, h, i, s): part of dSM.sink
        d_sink = sum_wide_to(d_sinks, (1, heads, 1, d_sinks.shape[3]))[0, :, 0, :]  # (h, s) [dSM.sink]
        gradients["sink"] = d_sink
    # forward: total = sum(exponentials) + sum(of_sinks)
    d_exponentials = d_weights / saved.total + d_total  # (b, h, i, j) [dSM.3]
    # forward: exponentials = exp(masked - maximum)
    d_masked = d_exponentials * saved.exponentials  # (b, h, i, j) [dSM.2]
    if saved.bias is not None:
        # forward: biased = capped + bias
        d_bias = sum_wide_to(d_masked, saved.bias.shape)  # (b, h, i, j) [dSM.bias]
        gradients["bias"] = d_bias
    if softcap is None:
        d_scores = d_masked  # (b, h, i, j): dSM.1 without a soft-cap
    else:
        # forward: capped = softcap * tanh(scores / softcap)
        ratio = saved.scores / softcap  # (b, h, i, j): the argument of SM.capped
        tanh = xp.tanh(ratio)  # (b, h, i, j): part of SM.capped
        slope = 1.0 - tanh * tanh  # (b, h, i, j): part of dSM.1
        d_scores = d_masked * slope  # (b, h, i, j) [dSM.1]
        d_softcap = sum_wide(d_masked * (tanh - ratio * slope))  # () [dSM.softcap]
        gradients["softcap"] = d_softcap
    # forward: scores = q @ k_heads^T * scale
    d_product = d_scores @ k_heads  # (b, h, i, d): dSM.q without its scale
    d_q = d_product * scale  # (b, h, i, d) [dSM.q]
    d_k = sum_heads(xp.matrix_transpose(d_scores) @ q, k.shape[1]) * scale  # (b, g, j, d) [dSM.k]
    d_scale = sum_wide(xp.vecdot(d_product, q))  # () [dSM.scale]
    return {"q": d_q, "k": d_k, "v": d_v, "scale": d_scale, **gradients}
