"""Higher-order attention, the definition: every score at once.

Softmax attention with a Taylor polynomial in place of the exponential. The polynomial is good near 0 alone; therefore
queries and keys are normalised first, without gain and bias, and |s| <= sqrt(d) / alpha whatever they are.

Equations (A(i) is the set of keys that query i may attend, LN the layer normalisation with biased variance)::

    [HOL.1]  q'_i = LN(q_i)                             without layer normalisation: q' = q
    [HOL.2]  k'_j = LN(k_j)                             without layer normalisation: k' = k
    [HOL.3]  s_ij = c q'_i . k'_j, c = 1 / (alpha sqrt(d))
    [HOL.4]  t_ij = T_p(s_ij) = sum_{r=0}^{p} s_ij^r / r!
    [HOL.5]  w_ij = t_ij - delta if j in A(i), else 0
    [HOL.6]  a_i = sum_j w_ij v_j
    [HOL.7]  z_i = sum_j w_ij                           plain denominator: the sum of t_ij over A(i)
    [HOL.8]  D_i = z_i, 1 where it is 0                 by the policy "exact"; for others see options.py
    [HOL.9]  o_i = a_i / D_i

Adjoints, for given d_o (dHOL.n is the gradient with respect to the value of HOL.n)::

    [dHOL.6]  da_i = do_i / D_i
    [dHOL.8]  dD_i = -(do_i . o_i) / D_i
    [dHOL.7]  dz_i = dD_i D'(z_i)
    [dHOL.v]  dv_j = sum_i w_ij da_i
    [dHOL.4]  dt_ij = da_i . v_j + dz_i if j in A(i), else 0
    [dHOL.3]  ds_ij = dt_ij T_{p-1}(s_ij)
    [dHOL.1]  dq'_i = c sum_j ds_ij k'_j
    [dHOL.2]  dk'_j = c sum_i ds_ij q'_i
    [dHOL.q]  dq_i = LN'(q_i) dq'_i                     without layer normalisation: dq = dq'
    [dHOL.k]  dk_j = LN'(k_j) dk'_j                     without layer normalisation: dk = dk'

Axes: b batch, h query head, g key/value head, i query, j key, d width of queries and keys, e width of values. Query
head h attends the keys and values of head floor(h g / h_total).

Source: J. Mercat 2020, Higher Order Linear Transformer (arXiv:2010.14816), equations 1 to 3.

How the paper and its code differ from this: see docs/deviations.md. Choices that the paper leaves open: the variance is
biased, 1e-5 is added to it; a query that may attend nothing gives 0; delta, the paper's 1 that may be subtracted, is 0
unless asked for, because without it z is at least half the number of keys for p = 2, and any sign with delta = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.higher_order.options import Options
from refattn.mechanisms.higher_order.taylor import divisor_of, divisor_slope, normalise, normalise_backward, taylor
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.layer_norm import Saved as Normalised
from refattn.ops.masks import allowed_pairs
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense form reads."""

    options: Options
    v: Array  # (b, g, j, e)
    q_normal: tuple[Array, Normalised | None]  # of (b, h, i, d)
    k_normal: tuple[Array, Normalised | None]  # of (b, g, j, d)
    scores: Array  # (b, h, i, j)
    allowed: Array | None  # broadcasts to (b, h, i, j)
    weights: Array  # (b, h, i, j)
    total: Array  # (b, h, i, 1)
    divisor: Array  # (b, h, i, 1)
    out: Array  # (b, h, i, e)


def forward(
    q: Array, k: Array, v: Array, *, key_mask: Array | None, offset: int | None, options: Options
) -> tuple[Array, Array, Saved]:
    """Return (out, normaliser, saved): (b, h, i, e), (b, h, i) and what `backward` reads.

    `key_mask` is (b, j), and k and v are 0 where it is False. `offset` is the causal offset: query i may attend key j
    where j <= i + offset.
    """
    xp = namespace(q, k, v)
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    scale = options.scale(q.shape[3])
    q_normal, k_normal = normalise(q, options), normalise(k, options)
    q_hat = q_normal[0]  # (b, h, i, d) [HOL.1]
    k_hat = k_normal[0]  # (b, g, j, d) [HOL.2]
    k_heads = repeat_heads(k_hat, heads)  # (b, h, j, d): copies of k'
    v_heads = repeat_heads(v, heads)  # (b, h, j, e): copies of v
    scores = q_hat @ xp.matrix_transpose(k_heads) * scale  # (b, h, i, j) [HOL.3]
    values = taylor(scores, options.order)  # (b, h, i, j) [HOL.4]
    columns = None if key_mask is None else key_mask[:, None, None, :]  # (b, 1, 1, j): for all heads
    allowed = allowed_pairs(columns, offset, (0, queries), (0, keys), q)  # j in A(i)
    shifted = values - options.delta  # (b, h, i, j): HOL.5 before its mask
    weights = shifted if allowed is None else xp.where(allowed, shifted, 0.0)  # (b, h, i, j) [HOL.5]
    numerator = weights @ v_heads  # (b, h, i, e) [HOL.6]
    plain = values if allowed is None else xp.where(allowed, values, 0.0)  # (b, h, i, j): w with delta = 0
    counted = weights if options.denominator == "matched" else plain  # (b, h, i, j): the terms of HOL.7
    total = xp.sum(counted, axis=-1, keepdims=True)  # (b, h, i, 1) [HOL.7]
    divisor = divisor_of(total, options)  # (b, h, i, 1) [HOL.8]
    out = numerator / divisor  # (b, h, i, e) [HOL.9]
    saved = Saved(options, v, q_normal, k_normal, scores, allowed, weights, total, divisor, out)
    return out, total[..., 0], saved


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v for given d_out."""
    options, v = saved.options, saved.v
    xp = namespace(v)
    q_hat = saved.q_normal[0]  # (b, h, i, d): HOL.1
    k_hat = saved.k_normal[0]  # (b, g, j, d): HOL.2
    heads, groups, scale = q_hat.shape[1], v.shape[1], options.scale(q_hat.shape[3])
    k_heads = repeat_heads(k_hat, heads)  # (b, h, j, d): copies of k'
    v_heads = repeat_heads(v, heads)  # (b, h, j, e): copies of v
    # forward: out = numerator / divisor
    d_numerator = d_out / saved.divisor  # (b, h, i, e) [dHOL.6]
    d_divisor = -xp.sum(d_out * saved.out, axis=-1, keepdims=True) / saved.divisor  # (b, h, i, 1) [dHOL.8]
    # forward: divisor = divisor_of(total)
    d_total = d_divisor * divisor_slope(saved.total, options)  # (b, h, i, 1) [dHOL.7]
    # forward: numerator = weights @ v_heads; total = sum(weights), or of t; weights = t - delta: delta is constant
    d_v = sum_heads(xp.matrix_transpose(saved.weights) @ d_numerator, groups)  # (b, g, j, e) [dHOL.v]
    d_each = d_numerator @ xp.matrix_transpose(v_heads) + d_total  # (b, h, i, j): dHOL.4 before its mask
    d_values = d_each if saved.allowed is None else xp.where(saved.allowed, d_each, 0.0)  # (b, h, i, j) [dHOL.4]
    # forward: values = taylor(scores, order)
    d_scores = d_values * taylor(saved.scores, options.order - 1)  # (b, h, i, j) [dHOL.3]
    # forward: scores = q_hat @ k_heads^T * scale
    d_q_hat = d_scores @ k_heads * scale  # (b, h, i, d) [dHOL.1]
    d_k_hat = sum_heads(xp.matrix_transpose(d_scores) @ q_hat, groups) * scale  # (b, g, j, d) [dHOL.2]
    # forward: q_hat = normalise(q); k_hat = normalise(k)
    d_q = normalise_backward(saved.q_normal[1], d_q_hat)  # (b, h, i, d) [dHOL.q]
    d_k = normalise_backward(saved.k_normal[1], d_k_hat)  # (b, g, j, d) [dHOL.k]
    return {"q": d_q, "k": d_k, "v": d_v}
