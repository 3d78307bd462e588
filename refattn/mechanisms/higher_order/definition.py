"""Higher-order attention: softmax attention with exp replaced by its Taylor polynomial of order p.

The point is cost. A polynomial of q . k is a sum of products of elements of q with elements of k: for the square
sum_j (q . k_j)^2 v_j = sum_ab (q_a q_b) (sum_j k_ja k_jb v_j). The inner sum has no query in it. It is made once and
serves all queries (if causal, it is a running sum), so that the work grows with the number of tokens and not with its
square. exp(q . k) would need infinitely many such products. The price is about d^p sums for each element of a value: it
pays if there are more tokens than that. This file forms all scores instead, and says what is computed.

The polynomial resembles exp only near 0, so the scores s have to be kept small. Each query q and each key k is shifted
and scaled to elements of mean 0 and variance 1 (eps makes it slightly less), which gives q' and k'. Their lengths are
at most sqrt(d). By the inequality of Cauchy and Schwarz |q' . k'| <= d, so that |s| <= sqrt(d) / alpha in HOL.3. The
user chooses the number alpha: alpha = 3 keeps scores between -1.34 and 1.34 for d = 16.

Weights w should be positive, so that the output is a mean. If p is even, they are: where the polynomial T_p is least,
its derivative T_(p-1) = T_p - s^p / p! is 0. So T_p = s^p / p! > 0 there; s is not 0, because T_(p-1) is 1 at 0. For
p = 2, w = (1 + (1 + s)^2) / 2. This w grows again below s = -1: a worse match gets more weight. Only alpha >= sqrt(d)
rules that out. If p is odd, w is negative for scores far below 0; then z may be 0 or negative, and o is no mean.

    [HOL.1]  q'_i = (q_i - mean q_i) / sqrt(var q_i + eps)          over the d elements of a vector; var divides by d
    [HOL.2]  k'_j = (k_j - mean k_j) / sqrt(var k_j + eps)          eps: a vector of equal elements gives 0, not 0/0
    [HOL.3]  s_ij = q'_i . k'_j / (alpha sqrt(d))                   the score: how well key j matches query i
    [HOL.4]  w_ij = 1 + s_ij + s_ij^2 / 2! + ... + s_ij^p / p!      the weight; 0 if query i does not see key j
    [HOL.5]  z_i = sum_j w_ij
    [HOL.6]  o_i = sum_j w_ij v_j / z_i                             the mean of the values

Every query sees every key, or, if causal, those up to key i + (keys - queries): the last query stands at the last key.
There must be as many keys as queries, or more. Weights are masked and not scores, because T_p(-inf) is not 0.

Backward: do_i is the gradient of a loss with respect to o_i, and a d before a symbol means the gradient with respect to
it; d alone is the width. [dHOL.4] is of the value of HOL.4, [dHOL.q] of the input q. Shifting q does not change q', and
scaling q hardly does (only through eps): hence the two subtractions in dHOL.q, which is exact with eps.

    [dHOL.v]  dv_j = sum_i w_ij do_i / z_i
    [dHOL.5]  dz_i = -do_i . o_i / z_i
    [dHOL.4]  dw_ij = do_i . v_j / z_i + dz_i                       = do_i . (v_j - o_i) / z_i: w_ij pulls o_i to v_j
    [dHOL.3]  ds_ij = dw_ij (1 + s_ij + ... + s_ij^(p-1) / (p-1)!)  0 if not seen: w_ij is 0 then, whatever s_ij is
    [dHOL.1]  dq'_i = sum_j ds_ij k'_j / (alpha sqrt(d))
    [dHOL.2]  dk'_j = sum_i ds_ij q'_i / (alpha sqrt(d))
    [dHOL.q]  dq_i = (dq'_i - mean dq'_i - q'_i mean(dq'_i q'_i)) / sqrt(var q_i + eps)
    [dHOL.k]  dk_j = (dk'_j - mean dk'_j - k'_j mean(dk'_j k'_j)) / sqrt(var k_j + eps)

Axes: b batch, h head, i query, j key, d width of queries and keys, e width of values; p is `order`. Source: Mercat,
Higher Order Linear Transformer, 2020 (arXiv:2010.14816), equations 1 to 3; the author's code has eps, p = 2, alpha = 3.
"""

from __future__ import annotations

import math

# namespace(x): the library of x; arange(0, n, x): like x; transpose: last two axes; paper_alone: refuses other options
from refattn.ops.plain import normalise, normalise_backward, paper_alone
from refattn.xp import Array, arange, namespace, transpose


@paper_alone
def forward(
    q: Array, k: Array, v: Array, *, order: int = 2, alpha: float = 3.0, eps: float = 1e-5, causal: bool = False
) -> tuple[Array, tuple[Array, ...]]:
    """Return out (b, h, i, e) for q (b, h, i, d), k (b, h, j, d), v (b, h, j, e), and what `backward` reads."""
    xp, scale = namespace(q, k, v), alpha * math.sqrt(q.shape[3])
    queries, keys = q.shape[2], k.shape[2]
    offset = keys - queries if causal else keys  # query i sees the keys up to i + offset; if not causal, all
    seen = arange(0, keys, q) <= arange(0, queries, q)[:, None] + offset  # (i, j): whether query i sees key j
    q_hat, q_rate = normalise(q, eps)  # (b, h, i, d) [HOL.1], (b, h, i, 1): 1 / sqrt(var q + eps)
    k_hat, k_rate = normalise(k, eps)  # (b, h, j, d) [HOL.2], (b, h, j, 1): 1 / sqrt(var k + eps)
    scores = q_hat @ transpose(k_hat) / scale  # (b, h, i, j) [HOL.3]
    weights = xp.where(seen, taylor(scores, order), 0.0)  # (b, h, i, j) [HOL.4]
    total = xp.sum(weights, axis=-1, keepdims=True)  # (b, h, i, 1) [HOL.5]
    out = weights @ v / total  # (b, h, i, e) [HOL.6]
    return out, (q_hat, q_rate, k_hat, k_rate, v, order, scale, seen, scores, weights, total, out)


def backward(saved: tuple[Array, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v for d_out, that of out."""
    q_hat, q_rate, k_hat, k_rate, v, order, scale, seen, scores, weights, total, out = saved
    xp = namespace(d_out)
    # forward: out = weights @ v / total
    d_v = transpose(weights) @ (d_out / total)  # (b, h, j, e) [dHOL.v]
    d_total = -xp.sum(d_out * out, axis=-1, keepdims=True) / total  # (b, h, i, 1) [dHOL.5]
    # forward: out = weights @ v / total; total = sum(weights)
    d_weights = d_out @ transpose(v) / total + d_total  # (b, h, i, j) [dHOL.4]
    # forward: weights = where(seen, taylor(scores, order), 0)
    d_scores = xp.where(seen, d_weights * taylor(scores, order - 1), 0.0)  # (b, h, i, j) [dHOL.3]
    # forward: scores = q_hat @ transpose(k_hat) / scale
    d_q_hat = d_scores @ k_hat / scale  # (b, h, i, d) [dHOL.1]
    d_k_hat = transpose(d_scores) @ q_hat / scale  # (b, h, j, d) [dHOL.2]
    # forward: q_hat = normalise(q); k_hat = normalise(k)
    d_q = normalise_backward(q_hat, q_rate, d_q_hat)  # (b, h, i, d) [dHOL.q]
    d_k = normalise_backward(k_hat, k_rate, d_k_hat)  # (b, h, j, d) [dHOL.k]
    return {"q": d_q, "k": d_k, "v": d_v}


def taylor(s: Array, order: int) -> Array:
    """Return 1 + s + s^2 / 2! + ... + s^order / order! as 1 + s (1 + s/2 (1 + s/3 (...)))."""
    if order < 0:
        return 0.0 * s  # order -1, the derivative of order 0
    value = 1.0 + 0.0 * s  # ones, like s
    for r in range(order, 0, -1):
        value = 1.0 + value * s / r
    return value
