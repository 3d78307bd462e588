"""Higher-order attention with all its options: every score at once.

The paper's own case, HOL.1 to HOL.6, stands in `refattn.mechanisms.higher_order.definition`: read that first. Here the
normalisation of queries and keys may be left out, delta may be subtracted from every weight, any mask may hide keys,
and the normaliser says what divides. The equations that the paper does without have names. A(i) is the set of keys
that query i may attend::

    [HOL.1]  q'_i = (q_i - mean q_i) / sqrt(var q_i + norm_eps)    without layer normalisation: q' = q
    [HOL.2]  k'_j = (k_j - mean k_j) / sqrt(var k_j + norm_eps)    without layer normalisation: k' = k
    [HOL.3]  s_ij = c q'_i . k'_j, c = 1 / (alpha sqrt(d))
    [HOL.taylor]  t_ij = T_p(s_ij) = sum_{r=0}^{p} s_ij^r / r!    p is the order
    [HOL.4]  w_ij = t_ij - delta if j in A(i), else 0
    [HOL.5]  z_i = sum_j w_ij                           if the normaliser is plain, the sum of t_ij over A(i)
    [HOL.summed]  a_i = sum_j w_ij v_j
    [HOL.divisor]  D_i = z_i, 1 if it is 0              by "exact"; "add": z + eps; "clamp": max(z, eps); see below
    [HOL.6]  o_i = a_i / D_i

Adjoints, for given d_o (dHOL.n is the gradient with respect to the value of HOL.n)::

    [dHOL.summed]  da_i = do_i / D_i
    [dHOL.divisor]  dD_i = -(do_i . o_i) / D_i
    [dHOL.5]  dz_i = dD_i                               0 if the normaliser puts another number in place of z
    [dHOL.v]  dv_j = sum_i w_ij da_i
    [dHOL.taylor]  dt_ij = da_i . v_j + dz_i if j in A(i), else 0
    [dHOL.3]  ds_ij = dt_ij T_{p-1}(s_ij)               for T_p' = T_{p-1}, and T_{-1} = 0
    [dHOL.1]  dq'_i = c sum_j ds_ij k'_j
    [dHOL.2]  dk'_j = c sum_i ds_ij q'_i
    [dHOL.q]  dq_i = r_i (dq'_i - mean dq'_i - q'_i mean(dq'_i q'_i)), r_i = 1 / sqrt(var q_i + norm_eps)
    [dHOL.k]  dk_j = r_j (dk'_j - mean dk'_j - k'_j mean(dk'_j k'_j)), r_j = 1 / sqrt(var k_j + norm_eps)
    [dHOL.alpha]  dalpha = -(1 / alpha) sum_ij ds_ij s_ij
    [dHOL.delta]  ddelta = -sum_ij dt_ij                if the normaliser is plain, the sum of da_i . v_j, j in A(i)

Without layer normalisation dq = dq' and dk = dk'. The fourth normaliser, "signed", moves z away from 0:
D = sgn(z) max(|z|, eps) with sgn(0) = 1.

By "exact" a query that may attend nothing gives 0, because a = 0. So does one whose weights are all 0: with delta = 1
a query whose elements are equal, for there s = 0 and T_p(0) = 1. What rounding leaves of such weights must not divide.
Therefore with a delta other than 0 and 1/2 D is infinite where |z_i| <= 32 u n_i, with the unit roundoff u and the
number n_i of keys in A(i): output and gradients are 0 there.

Axes: b batch, h query head, g key/value head, i query, j key, d width of queries and keys, e width of values. Query
head h attends the keys and values of head floor(h g / h_total).

Source: Mercat 2020 (arXiv:2010.14816), equations 1 to 3; grouped heads: Ainslie et al. 2023 (arXiv:2305.13245); the
normalisers are those of published implementations.

How the paper and its code differ from this: see docs/deviations.md. Choices that the paper leaves open: the variance is
biased, 1e-5 is added to it; a query that may attend nothing gives 0; delta, the paper's 1 that may be subtracted, is 0
unless asked for, because without it z is at least half the number of keys for p = 2, and any sign with delta = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.mechanisms.higher_order.options import Add, Clamp, Normaliser, Options, Signed
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.layer_norm import normalise, normalise_backward
from refattn.ops.masks import allowed_pairs, both
from refattn.xp import Array, namespace, sum_wide


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense implementation reads."""

    options: Options
    v: Array  # (b, g, j, e)
    q_hat: Array  # (b, h, i, d)
    k_hat: Array  # (b, g, j, d)
    q_normal: tuple[Array, Array] | None  # q' and r_i (b, h, i, 1); None without layer normalisation
    k_normal: tuple[Array, Array] | None  # k' and r_j (b, g, j, 1)
    scores: Array  # (b, h, i, j)
    allowed: Array | None  # broadcasts to (b, h, i, j)
    weights: Array  # (b, h, i, j)
    total: Array  # (b, h, i, 1)
    divisor: Array  # (b, h, i, 1)
    out: Array  # (b, h, i, e)


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    key_mask: Array | None,
    offset: int | None,
    options: Options,
) -> tuple[Array, Array, Saved]:
    """Return (out, normaliser, saved): (b, h, i, e), (b, h, i) and what `backward` reads.

    `mask` broadcasts to (b, h, i, j); `key_mask` is (b, j), and k and v are 0 where it is False. `offset` is the causal
    offset: query i may attend key j where j <= i + offset.
    """
    xp, normaliser = namespace(q, k, v), options.normaliser
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    scale = 1.0 / (options.alpha * math.sqrt(q.shape[3]))  # (): c
    normal, eps = options.layer_norm, options.norm_eps
    q_hat, q_normal = normalise(q, eps) if normal else (q, None)  # (b, h, i, d) [HOL.1], -
    k_hat, k_normal = normalise(k, eps) if normal else (k, None)  # (b, g, j, d) [HOL.2], -
    k_heads = repeat_heads(k_hat, heads)  # (b, h, j, d): copies of k'
    v_heads = repeat_heads(v, heads)  # (b, h, j, e): copies of v
    scores = q_hat @ xp.matrix_transpose(k_heads) * scale  # (b, h, i, j) [HOL.3]
    values = taylor(scores, options.order)  # (b, h, i, j) [HOL.taylor]
    given = mask if key_mask is None else both(mask, key_mask[:, None, None, :])  # broadcasts to (b, h, i, j)
    allowed = allowed_pairs(given, offset, queries, keys, q)  # j in A(i)
    weights = masked(values - normaliser.delta, allowed)  # (b, h, i, j) [HOL.4]
    counted = masked(values, allowed) if normaliser.plain else weights  # (b, h, i, j): the terms of HOL.5
    total = xp.sum(counted, axis=-1, keepdims=True)  # (b, h, i, 1) [HOL.5]
    numerator = weights @ v_heads  # (b, h, i, e) [HOL.summed]
    attended = None
    if normaliser.counts:
        attended = xp.sum(masked(xp.ones_like(values), allowed), axis=-1, keepdims=True)  # (b, h, i, 1): n_i
    divisor = divisor_of(total, normaliser, attended)  # (b, h, i, 1) [HOL.divisor]
    out = numerator / divisor  # (b, h, i, e) [HOL.6]
    saved = Saved(options, v, q_hat, k_hat, q_normal, k_normal, scores, allowed, weights, total, divisor, out)
    return out, total[..., 0], saved


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, alpha and delta for given d_out."""
    options, v, q_hat, k_hat = saved.options, saved.v, saved.q_hat, saved.k_hat
    xp = namespace(v)
    heads, groups = q_hat.shape[1], v.shape[1]
    scale = 1.0 / (options.alpha * math.sqrt(q_hat.shape[3]))  # (): c
    k_heads = repeat_heads(k_hat, heads)  # (b, h, j, d): copies of k'
    v_heads = repeat_heads(v, heads)  # (b, h, j, e): copies of v
    # forward: out = numerator / divisor
    d_numerator = d_out / saved.divisor  # (b, h, i, e) [dHOL.summed]
    d_divisor = -xp.sum(d_out * saved.out, axis=-1, keepdims=True) / saved.divisor  # (b, h, i, 1) [dHOL.divisor]
    # forward: divisor = divisor_of(total)
    d_total = through_divisor(d_divisor, saved.total, options.normaliser)  # (b, h, i, 1) [dHOL.5]
    # forward: numerator = weights @ v_heads; total = sum(weights), or of t; weights = t - delta
    d_v = sum_heads(xp.matrix_transpose(saved.weights) @ d_numerator, groups)  # (b, g, j, e) [dHOL.v]
    d_own = d_numerator @ xp.matrix_transpose(v_heads)  # (b, h, i, j): through the numerator
    d_values = masked(d_own + d_total, saved.allowed)  # (b, h, i, j) [dHOL.taylor]
    d_weights = masked(d_own, saved.allowed) if options.normaliser.plain else d_values  # (b, h, i, j): where delta is
    d_delta = -sum_wide(d_weights)  # () [dHOL.delta]
    # forward: values = taylor(scores, order)
    d_scores = d_values * taylor(saved.scores, options.order - 1)  # (b, h, i, j) [dHOL.3]
    # forward: scores = q_hat @ k_heads^T * scale, scale = 1 / (alpha sqrt(d))
    d_alpha = -sum_wide(d_scores * saved.scores) / options.alpha  # () [dHOL.alpha]
    d_q_hat = d_scores @ k_heads * scale  # (b, h, i, d) [dHOL.1]
    d_k_hat = sum_heads(xp.matrix_transpose(d_scores) @ q_hat, groups) * scale  # (b, g, j, d) [dHOL.2]
    # forward: q_hat = normalise(q); k_hat = normalise(k)
    q_normal, k_normal = saved.q_normal, saved.k_normal
    d_q = d_q_hat if q_normal is None else normalise_backward(*q_normal, d_q_hat)  # (b, h, i, d) [dHOL.q]
    d_k = d_k_hat if k_normal is None else normalise_backward(*k_normal, d_k_hat)  # (b, g, j, d) [dHOL.k]
    return {"q": d_q, "k": d_k, "v": d_v, "alpha": d_alpha, "delta": d_delta}


def masked(pairs: Array, allowed: Array | None) -> Array:
    """Return an array of pairs (b, h, i, j), 0 where j is not in A(i); its own adjoint."""
    return pairs if allowed is None else namespace(pairs).where(allowed, pairs, 0.0)


def taylor(s: Array, order: int) -> Array:
    """Return T_p(s) for p = order >= -1, by Horner's rule: 1 + s (1 + s/2 (1 + s/3 (...)))."""
    xp = namespace(s)
    if order < 0:
        return xp.zeros_like(s)
    value = xp.ones_like(s)  # of the shape of s
    for r in range(order, 0, -1):
        value = 1.0 + value * s / r  # of the shape of s
    return value


def divisor_of(total: Array, normaliser: Normaliser, attended: Array | None) -> Array:
    """Return D(z); `attended` are the numbers n of keys in A(i), None where the normaliser does not ask for them."""
    xp = namespace(total)
    if isinstance(normaliser, Add):
        return total + normaliser.eps
    if isinstance(normaliser, Clamp):
        return xp.where(total > normaliser.eps, total, normaliser.eps)
    if isinstance(normaliser, Signed):
        least = xp.where(total < 0.0, -normaliser.eps, xp.zeros_like(total) + normaliser.eps)  # (b, h, i, 1)
        return xp.where(xp.abs(total) > normaliser.eps, total, least)
    if attended is not None and not normaliser.plain:
        rounding = 16.0 * float(xp.finfo(total.dtype).eps) * attended  # (b, h, i, 1): 32 u n, the eps being 2 u
        return xp.where(xp.abs(total) <= rounding, math.inf, total)
    return xp.where(total == 0.0, 1.0, total)


def through_divisor(d_divisor: Array, total: Array, normaliser: Normaliser) -> Array:
    """Return dz for dD: the same, but 0 where eps stands in place of z; by "exact" dD is 0 where 1 does."""
    if isinstance(normaliser, Clamp):
        return d_divisor * namespace(total).astype(total > normaliser.eps, total.dtype)
    if isinstance(normaliser, Signed):
        return d_divisor * namespace(total).astype(namespace(total).abs(total) > normaliser.eps, total.dtype)
    return d_divisor
