"""Softmax attention: a query gets a weighted mean of the values; the better a key matches, the more its value counts.

A token asks with a query, and every token offers a key and a value. The product of a query and a key is their score. It
is divided by sqrt(d), because the sum of d products of independent numbers of mean 0 and variance 1 has the standard
deviation sqrt(d): without that, wide vectors would have large scores, and nearly all weight would go to one key. exp
makes the weight of every seen key positive, and turns a difference of scores into a ratio of weights. Dividing by the
sum makes the weights of a query add up to 1, so that the result is a mean. exp overflows for large scores; therefore
the largest score of each query is subtracted first. That multiplies numerator and denominator of SM.4 by the same
number and changes nothing.

A model that predicts the next token must not see that token: its attention is causal. If not causal, every query sees
every key. If causal, query i sees the keys up to key i + (keys - queries). So the last query stands at the last key, as
if earlier keys were kept from previous steps. There must be as many keys as queries, or more: else one sees no key.

    [SM.1]  s_ij = q_i . k_j / sqrt(d)                      the score: how well key j matches query i
    [SM.2]  m_ij = s_ij if query i sees key j, else -inf    exp(-inf) = 0: what is not seen gets no weight
    [SM.3]  p_ij = exp(m_ij - max_l m_il)                   the weight before it is divided
    [SM.4]  w_ij = p_ij / sum_l p_il                        the weights of query i; they add up to 1
    [SM.5]  o_i = sum_j w_ij v_j                            the mean of the values

Backward: do_i is the gradient of a loss L with respect to o_i, so that L changes by sum_i do_i . (change of o_i). A d
before a symbol means the gradient of L with respect to it; d alone is the width. [dSM.4] is the gradient with respect
to the value of SM.4, [dSM.q] that of the input q:

    [dSM.v]  dv_j = sum_i w_ij do_i
    [dSM.4]  dw_ij = do_i . v_j
    [dSM.2]  dm_ij = w_ij (dw_ij - sum_l w_il dw_il)        weights compete: one grows at the others' expense
    [dSM.q]  dq_i = sum_j dm_ij k_j / sqrt(d)               ds = dm: where j is not seen, w_ij = 0 makes both 0
    [dSM.k]  dk_j = sum_i dm_ij q_i / sqrt(d)

dSM.2 goes back through SM.4 and SM.3 at once. The maximum cancels in SM.4, so it needs no gradient. What is left is the
derivative of w_il by m_ij, which is w_il ((1 if l = j, else 0) - w_ij). Times dw_il, the sum over l is dSM.2.

Axes: b batch, h head, i query, j key, d width of queries and keys, e width of values; l is a key, too. Source: Vaswani
et al., Attention Is All You Need, 2017 (arXiv:1706.03762), equation 1; the mask: section 3.2.3.
"""

from __future__ import annotations

import math

# namespace(x): the library of x; arange(0, n, x): like x; transpose: last two axes; paper_alone: refuses other options
from refattn.ops.plain import paper_alone
from refattn.xp import Array, arange, namespace, transpose


@paper_alone
def forward(q: Array, k: Array, v: Array, *, causal: bool = False) -> tuple[Array, tuple[Array, ...]]:
    """Return out (b, h, i, e) for q (b, h, i, d), k (b, h, j, d), v (b, h, j, e), and what `backward` reads."""
    xp, root = namespace(q, k, v), math.sqrt(q.shape[3])
    queries, keys = q.shape[2], k.shape[2]
    offset = keys - queries if causal else keys  # query i sees the keys up to i + offset; if not causal, all
    seen = arange(0, keys, q) <= arange(0, queries, q)[:, None] + offset  # (i, j): whether query i sees key j
    scores = q @ transpose(k) / root  # (b, h, i, j) [SM.1]
    masked = xp.where(seen, scores, -math.inf)  # (b, h, i, j) [SM.2]
    powers = xp.exp(masked - xp.max(masked, axis=-1, keepdims=True))  # (b, h, i, j) [SM.3]
    weights = powers / xp.sum(powers, axis=-1, keepdims=True)  # (b, h, i, j) [SM.4]
    out = weights @ v  # (b, h, i, e) [SM.5]
    return out, (q, k, v, weights)


def backward(saved: tuple[Array, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v for d_out, that of out."""
    q, k, v, weights = saved
    xp, root = namespace(d_out), math.sqrt(q.shape[3])
    # forward: out = weights @ v
    d_v = transpose(weights) @ d_out  # (b, h, j, e) [dSM.v]
    d_weights = d_out @ transpose(v)  # (b, h, i, j) [dSM.4]
    # forward: weights = powers / sum(powers); powers = exp(masked - max(masked))
    mean = xp.sum(weights * d_weights, axis=-1, keepdims=True)  # (b, h, i, 1): of dw_ij over j, by weights w_ij
    d_masked = weights * (d_weights - mean)  # (b, h, i, j) [dSM.2]
    # forward: masked = where(seen, scores, -inf); scores = q @ transpose(k) / root
    d_q = d_masked @ k / root  # (b, h, i, d) [dSM.q]
    d_k = transpose(d_masked) @ q / root  # (b, h, j, d) [dSM.k]
    return {"q": d_q, "k": d_k, "v": d_v}
