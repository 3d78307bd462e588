"""Higher-order attention: in place of exp it has a Taylor polynomial, so that its cost grows linearly with the tokens.

The point is cost. Softmax attention visits every pair of a query and a key. A polynomial of the inner product x . y is
itself an inner product phi(x) . phi(y), of longer vectors (phi is the feature map). For the square, (x . y)^2 = sum_ab
(x_a x_b) (y_a y_b): the elements of phi(x) are all products x_a x_b. If weights are w_ij = phi(q_i) . phi(k_j), queries
and keys come apart (linear attention; vectors are columns):

    sum_j w_ij v_j = phi(q_i)^T (sum_j phi(k_j) v_j^T)

The sum in parentheses is the state. It has no query in it: it is made once and serves all queries (if causal, it is a
running sum). So the work grows with the number of tokens and not with its square. exp would need infinitely many
products. A polynomial of order p has about d^p / p! different ones, where d is the width of queries and keys: the state
pays if there are more tokens than that. `forward` is the definition, and visits all pairs. For p = 2, not causal,
`from_state` computes the same from the state; for brevity it keeps x_a x_b and x_b x_a apart.

The polynomial resembles exp near 0 only, so scores have to be small. LayerNorm without gain and bias shifts and scales
each query and key to q' and k', whose elements have mean 0 and variance 1, and scores are divided by alpha sqrt(d),
where alpha is a number. q' and k' have the length sqrt(d) (but for eps), in the d - 1 dimensions of vectors with mean
0. If their directions are random, q' . k' has the standard deviation d / sqrt(d - 1), and that of a score is about 1 /
alpha for any d. With the author's alpha = 3 about two scores in three (if normally distributed) are within 1/3 of 0,
where the polynomial of order 2 and exp differ by less than 1 %. The largest possible score is sqrt(d) / alpha, if q' =
k' (Cauchy and Schwarz). For d = 64 it is 2.7: such a key has the weight 7.2, where exp would give 14.4.

Let T_p(s) = 1 + s + s^2 / 2! + ... + s^p / p!. Its derivative is T_(p-1)(s), 0 if p = 0. Weights should be positive, so
that the output is a mean. If p is even, they are: T_0 is 1, and for p > 0 T_p has a least value, where its derivative
T_(p-1) is 0, so that T_p = T_(p-1) + s^p / p! = s^p / p! > 0 (s is not 0 there, as T_(p-1)(0) = 1). But T_2(s) = (1 +
(1 + s)^2) / 2 grows again below s = -1, so a key that matches worse gets more weight; only alpha >= sqrt(d) excludes
such scores, as the least possible one is -sqrt(d) / alpha. If p is odd, scores far below 0 have negative weights, and
o_i is no mean. Their sum z_i may even be 0; then o_i is not finite.

    [HOL.1]  q'_i = (q_i - mean q_i) / sqrt(var q_i + eps)    over the d elements of a vector; var divides by d
    [HOL.2]  k'_j = (k_j - mean k_j) / sqrt(var k_j + eps)    eps: a vector of equal elements gives 0, not 0/0
    [HOL.3]  s_ij = q'_i . k'_j / (alpha sqrt(d))             the score: how well key j matches query i
    [HOL.4]  w_ij = T_p(s_ij)                                 1 + s_ij + ... + s_ij^p / p!; 0 if i does not see j
    [HOL.5]  z_i = sum_j w_ij
    [HOL.6]  o_i = sum_j w_ij v_j / z_i                       the mean of the values

With n queries and N keys, query i sees the keys j <= i + N - n if `causal`, otherwise all: the last query sees all. If
`causal`, n <= N is needed. Weights are masked, not scores as in softmax attention, because T_p(-inf) is not 0.

Backward. A d before a symbol means the gradient of a loss L with respect to it (d alone is the width): if q_i changes
by a small vector t, L changes by dq_i . t. The caller gives do_i, that of o_i. [dHOL.4] is the gradient with respect to
the value of HOL.4, [dHOL.q] that with respect to the input q.

    [dHOL.v]  dv_j = sum_i w_ij do_i / z_i
    [dHOL.5]  dz_i = -do_i . o_i / z_i                        if z_i grows by t, o_i changes by -t o_i / z_i
    [dHOL.4]  dw_ij = do_i . v_j / z_i + dz_i                 w_ij is in both sums; together do_i . (v_j - o_i) / z_i
    [dHOL.3]  ds_ij = dw_ij T_(p-1)(s_ij)                     0, whatever dw_ij is, if query i does not see key j
    [dHOL.1]  dq'_i = sum_j ds_ij k'_j / (alpha sqrt(d))
    [dHOL.2]  dk'_j = sum_i ds_ij q'_i / (alpha sqrt(d))
    [dHOL.q]  dq_i = (dq'_i - mean dq'_i - q'_i mean(dq'_i q'_i)) / sqrt(var q_i + eps)
    [dHOL.k]  dk_j = (dk'_j - mean dk'_j - k'_j mean(dk'_j k'_j)) / sqrt(var k_j + eps)

dHOL.q: let c = q - mean q, r = 1 / sqrt(var q + eps), q' = r c, and let u be the vector of d ones. If q changes by a
small vector t, c changes by t - mean t, and var q = c . c / d by 2 c . t / d (as u . c = 0). The derivative of r with
respect to var q is -r^3 / 2, so r changes by -r^3 c . t / d = -r^2 q' . t / d. Together q' = r c changes by

    r (t - mean t) - r^2 c (q' . t) / d = r (I - u u^T / d - q' q'^T / d) t

The matrix is symmetric. So dq is the same matrix times dq', which is dHOL.q: mean(dq' q'), over the products of
elements, is dq' . q' / d.

Axes: b batch, h head, i query, j key, d width of queries and keys, e width of values; p is `order`. Source: Mercat,
Higher Order Linear Transformer, 2020 (arXiv:2010.14816), equations 1 to 3; the author's code has eps, p = 2, alpha = 3.

The state has 1 + d + d^2 rows, here 21, for any number of keys, and gives the same as all pairs:

    >>> import numpy as np, refattn as ra, refattn.mechanisms.higher_order.definition as ho
    >>> q, k, v = np.sin(np.arange(4800.0) ** 2).reshape(3, 1, 2, 200, 4)
    >>> bool(np.max(np.abs(ho.from_state(q, k, v) - ra.higher_order.forward(q, k, v)[0])) < 1e-14)
    True
"""

from __future__ import annotations

import math

# namespace(x): the library of x; arange(0, n, x): like x; transpose: last two axes; paper_alone: no other option;
# normalise(x, eps): HOL.1 and the factor 1 / sqrt(var x + eps); normalise_backward: dHOL.q
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
    """Return T_p(s) for p = order, as 1 + s (1 + s/2 (1 + s/3 (...)))."""
    if order < 0:
        return 0.0 * s  # order -1, the derivative of order 0
    value = 1.0 + 0.0 * s  # ones, like s
    for r in range(order, 0, -1):
        value = 1.0 + value * s / r
    return value


def from_state(q: Array, k: Array, v: Array, *, alpha: float = 3.0, eps: float = 1e-5) -> Array:
    """Return the out of `forward` for order 2, not causal, without pairs: phi(q') . phi(k') = 1 + s + s^2 / 2."""
    xp, scale = namespace(q, k, v), alpha * math.sqrt(q.shape[3])
    phi_q, phi_k = phi(normalise(q, eps)[0], scale), phi(normalise(k, eps)[0], scale)  # (b, h, i, m), (b, h, j, m)
    state = transpose(phi_k) @ v  # (b, h, m, e): sum_j phi(k'_j) v_j^T
    count = xp.sum(phi_k, axis=2, keepdims=True)  # (b, h, 1, m): sum_j phi(k'_j), the state of values that are 1
    return phi_q @ state / (phi_q @ transpose(count))


def phi(x: Array, scale: float) -> Array:
    """Return (1, all x_a / sqrt(scale), all x_a x_b / (sqrt(2) scale)) of each x: m = 1 + d + d^2 elements."""
    xp, products = namespace(x), x[..., :, None] * x[..., None, :]  # -, (b, h, n, d, d)
    products = xp.reshape(products, (*x.shape[:-1], -1)) / (math.sqrt(2.0) * scale)  # (b, h, n, d*d)
    return xp.concat([xp.ones_like(x[..., :1]), x / math.sqrt(scale), products], axis=-1)
