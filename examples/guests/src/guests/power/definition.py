"""Power attention: the weight of a key is an even power of its score, which a state of fixed size can add up.

In softmax attention exp makes weights of scores. Here s^p does, with an even p, so that no weight is negative; those of
a query are divided by their sum. By the multinomial theorem (q . k)^p is an inner product of features, phi(q) . phi(k),
and phi has C(d + p - 1, p) numbers, one for each product of p coordinates whatever their order. So a state, the sum
over tokens of phi(k) v^T, holds all that any query can read, and its size does not grow with the tokens: `chunked` uses
it. A(i) is the set of keys that query i may attend.

    [POW.1]  s_ij = scale q_i . k_j                     scale = 1 / sqrt(d), if no other is given
    [POW.2]  w_ij = s_ij^p if j in A(i), else 0         p is even
    [POW.3]  z_i = sum_j w_ij                           or 1 if that is 0
    [POW.4]  o_i = sum_j w_ij v_j / z_i

The scale changes no output: it is in every weight of a query as scale^p. It keeps numbers from overflowing.

Backward, for given do: [dPOW.2] is the gradient of the value of POW.2, [dPOW.q] that of the input q:

    [dPOW.v]  dv_j = sum_i w_ij do_i / z_i
    [dPOW.3]  dz_i = -do_i . o_i / z_i
    [dPOW.2]  dw_ij = do_i . v_j / z_i + dz_i
    [dPOW.1]  ds_ij = p s_ij^(p - 1) dw_ij if j in A(i), else 0
    [dPOW.q]  dq_i = scale sum_j ds_ij k_j
    [dPOW.k]  dk_j = scale sum_i ds_ij q_i

Axes: b batch, h head, g head of keys and values, i query, j key, d width of queries and keys, e width of values.
Source: J. Buckman, C. Gelada, S. Zhang 2024, Symmetric Power Transformers (manifestai.com/articles); C. Gelada,
J. Buckman, S. Zhang, T. Bach 2025, Scaling Context Requires Rethinking Attention (arXiv:2507.04239), without its gates.
"""

import math

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import where_allowed
from refattn.xp import Array, namespace, transpose


def forward(
    q: Array, k: Array, v: Array, allowed: Array | None = None, scale: float | None = None, p: int = 2
) -> tuple[Array, tuple]:
    """Return out (b, h, i, e) for q (b, h, i, d), k (b, g, j, d), v (b, g, j, e), and what `backward` reads."""
    if p % 2:
        raise ValueError(f"p: got {p}, needs an even number: an odd power of a score may be negative")
    xp, h = namespace(q), q.shape[1]
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    k_heads, v_heads = repeat_heads(k, h), repeat_heads(v, h)  # (b, h, j, d), (b, h, j, e)
    scores = scale * q @ transpose(k_heads)  # (b, h, i, j) [POW.1]
    weights = where_allowed(allowed, scores**p, 0.0)  # (b, h, i, j) [POW.2]
    sums = xp.sum(weights, axis=-1, keepdims=True)  # (b, h, i, 1)
    total = xp.where(sums == 0.0, 1.0, sums)  # (b, h, i, 1) [POW.3]
    out = weights @ v_heads / total  # (b, h, i, e) [POW.4]
    return out, (q, k, v, scale, p, allowed, scores, weights, total, out)


def backward(saved: tuple, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k and v for d_out, that of out."""
    q, k, v, scale, p, allowed, scores, weights, total, out = saved
    xp, h, g = namespace(q), q.shape[1], k.shape[1]
    k_heads, v_heads = repeat_heads(k, h), repeat_heads(v, h)  # (b, h, j, d), (b, h, j, e)
    # forward: out = weights @ v_heads / total
    d_sums = d_out / total  # (b, h, i, e)
    d_v = sum_heads(transpose(weights) @ d_sums, g)  # (b, g, j, e) [dPOW.v]
    d_total = -xp.sum(d_sums * out, axis=-1, keepdims=True)  # (b, h, i, 1) [dPOW.3]
    # forward: sums = xp.sum(weights, axis=-1, keepdims=True)
    d_weights = d_sums @ transpose(v_heads) + d_total  # (b, h, i, j) [dPOW.2]
    # forward: weights = where_allowed(allowed, scores**p, 0.0)
    d_scores = where_allowed(allowed, p * scores ** (p - 1) * d_weights, 0.0)  # (b, h, i, j) [dPOW.1]
    # forward: scores = scale * q @ transpose(k_heads)
    d_q = scale * d_scores @ k_heads  # (b, h, i, d) [dPOW.q]
    d_k = sum_heads(scale * transpose(d_scores) @ q, g)  # (b, g, j, d) [dPOW.k]
    return {"q": d_q, "k": d_k, "v": d_v}
