"""Higher-order attention: softmax attention with a polynomial, the Taylor series of exp cut off, in place of exp.

The point is cost. A polynomial of q . k is a sum of products of elements of q with elements of k: for example, (q .
k)^2 is the sum of (q_a q_b)(k_a k_b) over a and b. Whatever holds the keys and values alone can then be summed once and
serves all queries, so that the work grows with the number of tokens and not with its square. With exp that cannot be.
This file does not do it; it says what is computed, with every score at once.

The polynomial resembles exp only near 0, so the scores have to be kept small. Each query and each key is shifted and
scaled to elements of mean 0 and variance 1 (or a little less, through eps); its length is then at most sqrt(d). By the
inequality of Cauchy and Schwarz |q' . k'| <= d, and so |s| <= sqrt(d) / alpha: alpha = 3 keeps scores below 1.4 for d =
16. Weights should be positive, so that the output is a mean. An even order p does that: where the polynomial T_p is
smallest, its derivative T_(p-1) vanishes, which leaves the last term s^p / p! > 0. For p = 2, w = (1 + (1 + s)^2) / 2.
An odd order has negative weights for scores that are far enough below 0.

    [HOL.1]  q'_i = (q_i - mean q_i) / sqrt(var q_i + eps)          mean and variance of the d elements of a vector
    [HOL.2]  k'_j = (k_j - mean k_j) / sqrt(var k_j + eps)          eps: a vector of equal elements gives 0, not 0/0
    [HOL.3]  s_ij = q'_i . k'_j / (alpha sqrt(d))                   the score: how well key j matches query i
    [HOL.4]  w_ij = 1 + s_ij + s_ij^2 / 2! + ... + s_ij^p / p!      p is `order`; 0 if query i does not see key j
    [HOL.5]  z_i = sum_j w_ij
    [HOL.6]  o_i = sum_j w_ij v_j / z_i                             the mean of the values

Every query sees every key, or, if causal, those up to its own place; the last query stands at the last key. There are
at least as many keys as queries then, so that each query sees one.

Backward, for the gradient do of o. [dHOL.4] is the gradient of the value of HOL.4, [dHOL.q] that of the input q:

    [dHOL.v]  dv_j = sum_i w_ij do_i / z_i
    [dHOL.5]  dz_i = -do_i . o_i / z_i
    [dHOL.4]  dw_ij = do_i . v_j / z_i + dz_i                       = do_i . (v_j - o_i) / z_i: w_ij pulls o_i to v_j
    [dHOL.3]  ds_ij = dw_ij (1 + s_ij + ... + s_ij^(p-1) / (p-1)!)  if seen, else 0; T_(p-1), the derivative of T_p
    [dHOL.1]  dq'_i = sum_j ds_ij k'_j / (alpha sqrt(d))
    [dHOL.2]  dk'_j = sum_i ds_ij q'_i / (alpha sqrt(d))
    [dHOL.q]  dq_i = (dq'_i - mean dq'_i - q'_i mean(dq'_i q'_i)) / sqrt(var q_i + eps)
    [dHOL.k]  dk_j = (dk'_j - mean dk'_j - k'_j mean(dk'_j k'_j)) / sqrt(var k_j + eps)

Axes: b batch, h head, i query, j key, d width of queries and keys, e width of values. Source: Mercat, Higher Order
Linear Transformer, 2020 (arXiv:2010.14816), equations 1 to 3; eps is of its code.
"""

from __future__ import annotations

import math

from refattn.ops.plain import normalise, normalise_backward, paper_alone
from refattn.xp import Array, arange, namespace, transpose


@paper_alone
def forward(
    q: Array, k: Array, v: Array, *, order: int = 2, alpha: float = 3.0, eps: float = 1e-5, causal: bool = False
) -> tuple[Array, tuple[Array, ...]]:
    """Return out (b, h, i, e) for q (b, h, i, d), k (b, h, j, d), v (b, h, j, e), and what `backward` reads."""
    xp, scale = namespace(q, k, v), alpha * math.sqrt(q.shape[3])
    queries, keys = q.shape[2], k.shape[2]
    last = keys - queries if causal else keys  # query i sees the keys up to i + last
    seen = arange(0, keys, q) <= arange(0, queries, q)[:, None] + last  # (i, j): whether query i sees key j
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
    """Return 1 + s + s^2 / 2! + ... + s^order / order! as 1 + s (1 + s/2 (1 + s/3 (...))); 0 for order -1."""
    if order < 0:
        return 0.0 * s
    value = 1.0 + 0.0 * s
    for r in range(order, 0, -1):
        value = 1.0 + value * s / r
    return value
