"""Softmax attention: a query gets a weighted mean of the values; the better a key matches, the more its value counts.

Every token has a query, a key and a value, which are vectors. The score (logit) of a query and a key is their inner
product, divided by sqrt(d), where d is the width of both. Why: if their elements are independent, of mean 0 and
variance 1, the inner product is a sum of d terms of variance 1. Its standard deviation is sqrt(d), and that of the
score is 1 for any d. Larger scores would give nearly all weight to one key. sqrt(d) acts as the temperature: dividing
by more makes the weights of a query more equal.

The softmax turns the scores of a query into weights. exp makes them positive: w_ij / w_il = exp(s_ij - s_il). Dividing
by the sum makes the weights add up to 1, so that the output is a mean. exp overflows for large scores. Therefore the
largest score of the query is subtracted first. That multiplies numerator and denominator of each weight by the same
number, and changes none.

A model that predicts the next token must not see that token: its attention is causal. With n queries and N keys, query
i sees the keys j <= i + N - n if `causal`, otherwise all keys. So the last query sees all: a model that writes token
after token has one new query, and has kept the keys and values of all earlier tokens (KV cache). If `causal`, n <= N is
needed: with more queries than keys, the first queries would see no key.

    [SM.1]  s_ij = q_i . k_j / sqrt(d)                      the score: how well key j matches query i
    [SM.2]  m_ij = s_ij if query i sees key j, else -inf    exp(-inf) = 0: a key that is not seen gets no weight
    [SM.3]  u_ij = exp(m_ij - max_l m_il)                   the unnormalised weight; l is a key, like j
    [SM.4]  w_ij = u_ij / sum_l u_il                        the weights of query i; they add up to 1
    [SM.5]  o_i = sum_j w_ij v_j                            the mean of the values

Backward. L is the loss, a number that depends on the outputs. A d before a symbol means the gradient of L with respect
to it (d alone is the width): if q_i changes by a small vector t, L changes by dq_i . t. The caller gives do_i, that of
o_i. [dSM.4] is the gradient with respect to the value of SM.4, [dSM.q] that with respect to the input q:

    [dSM.v]  dv_j = sum_i w_ij do_i                         v_j is in every o_i, with the factor w_ij
    [dSM.4]  dw_ij = do_i . v_j
    [dSM.2]  dm_ij = w_ij (dw_ij - sum_l w_il dw_il)        weights compete: one grows at the others' expense
    [dSM.q]  dq_i = sum_j dm_ij k_j / sqrt(d)               dm_ij is ds_ij: if j is not seen, both are 0, as w_ij is
    [dSM.k]  dk_j = sum_i dm_ij q_i / sqrt(d)

dSM.2 goes back through SM.4 and SM.3 at once. The maximum cancels in SM.4; take it for a constant. If m_ij grows by a
small number t, u_ij grows by t u_ij, to first order. The sum grows by as much, the fraction t w_ij of itself. Every
weight w_il is u_il over this sum, so w_il changes by -t w_ij w_il. The numerator of w_ij grows too, which adds t w_ij
to the change of w_ij. So L changes by

    t w_ij dw_ij - sum_l t w_ij w_il dw_il = t dm_ij

Axes: b batch, h head, i query, j key, d width of queries and keys, e width of values. Source: Vaswani et al., Attention
Is All You Need, 2017 (arXiv:1706.03762), equation 1; the mask: section 3.2.3.

A query that is 0 matches all keys alike and gets the plain mean of the values; one that matches key 2 (the third, as
they count from 0) gets value 2:

    >>> import numpy as np, refattn as ra
    >>> k, v = 10.0 * np.eye(4)[None, None], np.asarray([[[[0.0], [1.0], [2.0], [3.0]]]])
    >>> ra.softmax.forward(np.concat([0.0 * k[:, :, 2:3], k[:, :, 2:3]], axis=2), k, v)[0].round(6).tolist()
    [[[[1.5], [2.0]]]]
"""

from __future__ import annotations

import math

# namespace(x): the library of x; arange(0, n, x): like x; transpose: last two axes; paper_alone: allows no other option
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
    exponentials = xp.exp(masked - xp.max(masked, axis=-1, keepdims=True))  # (b, h, i, j) [SM.3]
    weights = exponentials / xp.sum(exponentials, axis=-1, keepdims=True)  # (b, h, i, j) [SM.4]
    out = weights @ v  # (b, h, i, e) [SM.5]
    return out, (q, k, v, weights)


def backward(saved: tuple[Array, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v for d_out, that of out."""
    q, k, v, weights = saved
    xp, root = namespace(d_out), math.sqrt(q.shape[3])
    # forward: out = weights @ v
    d_v = transpose(weights) @ d_out  # (b, h, j, e) [dSM.v]
    d_weights = d_out @ transpose(v)  # (b, h, i, j) [dSM.4]
    # forward: weights = exponentials / sum(exponentials); exponentials = exp(masked - max(masked))
    mean = xp.sum(weights * d_weights, axis=-1, keepdims=True)  # (b, h, i, 1): sum_l w_il dw_il, a mean of dw_il
    d_masked = weights * (d_weights - mean)  # (b, h, i, j) [dSM.2]
    # forward: masked = where(seen, scores, -inf); scores = q @ transpose(k) / root
    d_q = d_masked @ k / root  # (b, h, i, d) [dSM.q]
    d_k = transpose(d_masked) @ q / root  # (b, h, j, d) [dSM.k]
    return {"q": d_q, "k": d_k, "v": d_v}
