"""Softmax attention: a query gets a mean of the values, in which a value counts the more, the better its key matches.

A token asks with a query, and every token offers a key and a value. The product of a query and a key is their score. It
is divided by sqrt(d), because a sum of d products of independent numbers of size 1 has the size sqrt(d): without that,
wide vectors would have large scores, and nearly all weight would go to one key. exp makes every weight positive and
turns a difference of scores into a ratio of weights. Dividing by their sum makes the weights of a query add up to 1, so
that the result is a mean. exp overflows for large scores; therefore the largest score of each query is subtracted
first, which divides numerator and denominator of a weight by the same number. A model that predicts the next token must
not see it: if the attention is causal, a query sees the keys up to its own.

    [SM.1]  s_ij = q_i . k_j / sqrt(d)                      the score: how well key j matches query i
    [SM.2]  m_ij = s_ij if query i sees key j, else -inf    exp(-inf) = 0: what is not seen gets no weight
    [SM.3]  p_ij = exp(m_ij - max_l m_il)
    [SM.4]  w_ij = p_ij / sum_l p_il                        the weights of query i; they add up to 1
    [SM.5]  o_i = sum_j w_ij v_j                            the mean of the values

Every query sees every key, or, if causal, those up to its own place; the last query stands at the last key. There are
at least as many keys as queries then, so that each query sees one.

Backward: a loss changes by do_i . (change of o_i), and from do follow the gradients of all that led to o. [dSM.4] is
the gradient of the value of SM.4, [dSM.q] that of the input q:

    [dSM.v]  dv_j = sum_i w_ij do_i
    [dSM.4]  dw_ij = do_i . v_j
    [dSM.2]  dm_ij = w_ij (dw_ij - sum_l w_il dw_il)        weights compete: one grows at the others' expense
    [dSM.q]  dq_i = sum_j dm_ij k_j / sqrt(d)               what is not seen has w_ij = 0, and so dm_ij = 0
    [dSM.k]  dk_j = sum_i dm_ij q_i / sqrt(d)

Axes: b batch, h head, i query, j key, d width of queries and keys, e width of values; l is a key, too. Source: Vaswani
et al., Attention Is All You Need, 2017 (arXiv:1706.03762), equation 1; the mask: section 3.2.3.
"""

from __future__ import annotations

import math

from refattn.ops.plain import paper_alone
from refattn.xp import Array, arange, namespace, transpose


@paper_alone
def forward(q: Array, k: Array, v: Array, *, causal: bool = False) -> tuple[Array, tuple[Array, ...]]:
    """Return out (b, h, i, e) for q (b, h, i, d), k (b, h, j, d), v (b, h, j, e), and what `backward` reads."""
    xp, root = namespace(q, k, v), math.sqrt(q.shape[3])
    queries, keys = q.shape[2], k.shape[2]
    last = keys - queries if causal else keys  # query i sees the keys up to i + last
    seen = arange(0, keys, q) <= arange(0, queries, q)[:, None] + last  # (i, j): whether query i sees key j
    scores = q @ transpose(k) / root  # (b, h, i, j) [SM.1]
    masked = xp.where(seen, scores, -math.inf)  # (b, h, i, j) [SM.2]
    powers = xp.exp(masked - xp.max(masked, axis=-1, keepdims=True))  # (b, h, i, j) [SM.3]
    weights = powers / xp.sum(powers, axis=-1, keepdims=True)  # (b, h, i, j) [SM.4]
    out = weights @ v  # (b, h, i, e) [SM.5]
    return out, (q, k, v, root, weights)


def backward(saved: tuple[Array, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v for d_out, that of out."""
    q, k, v, root, weights = saved
    xp = namespace(d_out)
    # forward: out = weights @ v
    d_v = transpose(weights) @ d_out  # (b, h, j, e) [dSM.v]
    d_weights = d_out @ transpose(v)  # (b, h, i, j) [dSM.4]
    # forward: weights = powers / sum(powers); powers = exp(masked - max(masked))
    mean = xp.sum(weights * d_weights, axis=-1, keepdims=True)  # (b, h, i, 1): of dw, by the weights of the query
    d_masked = weights * (d_weights - mean)  # (b, h, i, j) [dSM.2]
    # forward: masked = where(seen, scores, -inf); scores = q @ transpose(k) / root
    d_q = d_masked @ k / root  # (b, h, i, d) [dSM.q]
    d_k = transpose(d_masked) @ q / root  # (b, h, j, d) [dSM.k]
    return {"q": d_q, "k": d_k, "v": d_v}
