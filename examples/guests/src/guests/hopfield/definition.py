"""Modern Hopfield attention: a query is completed from the keys that it resembles, several times, before it reads.

An associative memory stores patterns, here the keys. A state x, at first the query, is a noisy or partial pattern. One
update replaces it by the mean of the stored patterns, each weighted by how well it matches x, so that the next update
matches better. The inverse temperature beta sets how sharply: with a small one x goes to the mean of all patterns, with
a large one to the nearest alone. In the end x reads: the weights of the last state make a mean of the values. Without
updates this is softmax attention. A(i) is the set of keys that query i may attend.

    [HOP.1]  s_ij = beta x_i . k_j                      x = q at first; beta = 1 / sqrt(d), if no other is given
    [HOP.2]  w_ij = exp(s_ij) / sum_l exp(s_il)         over the l in A(i), 0 if j is not in it
    [HOP.3]  x'_i = sum_j w_ij k_j                      HOP.1 to HOP.3 are done `updates` times, each with the new x
    [HOP.4]  r_ij = beta x_i . k_j                      of the last x
    [HOP.5]  p_ij = exp(r_ij) / sum_l exp(r_il)         over the l in A(i), 0 if j is not in it
    [HOP.6]  o_i = sum_j p_ij v_j

Why the states come to rest: of one query let lse(x) = log(sum_j exp(beta x . k_j)) / beta, and the energy

    E(x) = |x|^2 / 2 - lse(x)

E is a convex function minus a convex function. The gradient of lse is sum_j w_j k_j = x'. A convex function lies above
its tangent at x, so that for every y

    E(y) <= |y|^2 / 2 - lse(x) - x' . (y - x),  which is lowest at y = x' (the concave-convex procedure, CCCP)

and there E(x') <= E(x) - |x' - x|^2 / 2: each update lowers the energy, until x is a fixed point x = x'.

Backward, for given do: [dHOP.5] is the gradient of the value of HOP.5, [dHOP.q] that of the input q. The updates are
differentiated from the last to the first. dx' comes from the scores that read x', those of the next update or HOP.4.

    [dHOP.v]  dv_j = sum_i p_ij do_i
    [dHOP.5]  dp_ij = do_i . v_j
    [dHOP.4]  dr_ij = p_ij (dp_ij - sum_l p_il dp_il)
    [dHOP.3]  dx'_i = beta sum_j ds_ij k_j              ds of the next update; of the last one dr in place of ds
    [dHOP.2]  dw_ij = dx'_i . k_j
    [dHOP.1]  ds_ij = w_ij (dw_ij - sum_l w_il dw_il)
    [dHOP.q]  dq_i = beta sum_j ds_ij k_j               of the first update; without updates dr in place of ds
    [dHOP.k]  dk_j = beta sum_i dr_ij x_i + sum over updates of (beta sum_i ds_ij x_i + sum_i w_ij dx'_i)
    [dHOP.beta]  dbeta = (sum_ij dr_ij r_ij + sum over updates of sum_ij ds_ij s_ij) / beta

With `fixed_point` the last x is taken for a fixed point, x = f(x, k) with f(x, k)_i = sum_j p_ij k_j. By the implicit
function theorem the gradient needs that x alone: dx = dx0 + (df/dx)^T dx, with dx0 of HOP.4, is solved by as many
iterations as there were updates. No gradient goes to q: where x comes to rest depends on the keys alone.

    [dHOP.fixed]  dx_i = dx0_i + beta sum_j dt_ij k_j   with the dt of the dx before, which is dx0 at first

where dt_ij = p_ij (dx_i . k_j - sum_l p_il dx_i . k_l) are the gradients of the scores of an update at the fixed point.
Then dk and dbeta have one term in place of the sums over updates: that of dx and dt, at the last x.

Axes: b batch, h head, g head of keys and values, i query, j key, d width of queries and keys, e width of values.
Source: H. Ramsauer et al. 2021, Hopfield Networks is All You Need (arXiv:2008.02217), equations 1 to 3; the values are
those of their layer Hopfield. The implicit gradient: S. Bai, Z. Kolter, V. Koltun 2019, Deep Equilibrium Models
(arXiv:1909.01377), theorem 1.
"""

import math

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import where_allowed
from refattn.ops.plain import softmax, softmax_backward
from refattn.xp import Array, sum_wide, transpose


def forward(
    q: Array,
    k: Array,
    v: Array,
    allowed: Array | None = None,
    beta: float | None = None,
    updates: int = 2,
    fixed_point: bool = False,
) -> tuple[Array, tuple]:
    """Return out (b, h, i, e) for q (b, h, i, d), k (b, g, j, d), v (b, g, j, e), and what `backward` reads."""
    beta = 1.0 / math.sqrt(q.shape[3]) if beta is None else beta
    k_heads, v_heads = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])  # (b, h, j, d), (b, h, j, e)
    x, path = q, []
    for _ in range(updates):
        scores = beta * x @ transpose(k_heads)  # (b, h, i, j) [HOP.1]
        weights = softmax(where_allowed(allowed, scores, -math.inf))  # (b, h, i, j) [HOP.2]
        path.append((x, scores, weights))
        x = weights @ k_heads  # (b, h, i, d) [HOP.3]
    last = beta * x @ transpose(k_heads)  # (b, h, i, j) [HOP.4]
    reading = softmax(where_allowed(allowed, last, -math.inf))  # (b, h, i, j) [HOP.5]
    out = reading @ v_heads  # (b, h, i, e) [HOP.6]
    return out, (k, v, beta, path, x, last, reading, fixed_point)


def backward(saved: tuple, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v and beta for d_out, that of out."""
    k, v, beta, path, x, last, reading, fixed_point = saved
    h, g = x.shape[1], k.shape[1]
    k_heads, v_heads = repeat_heads(k, h), repeat_heads(v, h)  # (b, h, j, d), (b, h, j, e)
    # forward: out = reading @ v_heads
    d_v = sum_heads(transpose(reading) @ d_out, g)  # (b, g, j, e) [dHOP.v]
    d_reading = d_out @ transpose(v_heads)  # (b, h, i, j) [dHOP.5]
    # forward: reading = softmax(where_allowed(allowed, last, -math.inf))
    d_last = softmax_backward(reading, d_reading)  # (b, h, i, j) [dHOP.4]
    # forward: last = beta * x @ transpose(k_heads)
    d_x = beta * d_last @ k_heads  # (b, h, i, d)
    d_keys = beta * transpose(d_last) @ x  # (b, h, j, d)
    by_scores = sum_wide(d_last * last)  # ()
    if fixed_point and path:
        d_state, d_scores = d_x, softmax_backward(reading, d_x @ transpose(k_heads))  # (b, h, i, d), (b, h, i, j)
        for _ in path:
            # forward: x = reading @ k_heads, for the x that reading is made of
            d_state = d_x + beta * d_scores @ k_heads  # (b, h, i, d) [dHOP.fixed]
            d_scores = softmax_backward(reading, d_state @ transpose(k_heads))  # (b, h, i, j)
        d_keys = d_keys + transpose(reading) @ d_state + beta * transpose(d_scores) @ x  # (b, h, j, d)
        by_scores = by_scores + sum_wide(d_scores * last)  # ()
        d_x = 0.0 * d_x  # (b, h, i, d)
        path = []
    for x, scores, weights in reversed(path):
        # forward: x' = weights @ k_heads
        d_moved = d_x  # (b, h, i, d) [dHOP.3]
        d_weights = d_moved @ transpose(k_heads)  # (b, h, i, j) [dHOP.2]
        # forward: weights = softmax(where_allowed(allowed, scores, -math.inf))
        d_scores = softmax_backward(weights, d_weights)  # (b, h, i, j) [dHOP.1]
        # forward: scores = beta * x @ transpose(k_heads)
        d_x = beta * d_scores @ k_heads  # (b, h, i, d)
        d_keys = d_keys + transpose(weights) @ d_moved + beta * transpose(d_scores) @ x  # (b, h, j, d)
        by_scores = by_scores + sum_wide(d_scores * scores)  # ()
    d_q = d_x  # (b, h, i, d) [dHOP.q]
    d_k = sum_heads(d_keys, g)  # (b, g, j, d) [dHOP.k]
    d_beta = by_scores / beta  # () [dHOP.beta]
    return {"q": d_q, "k": d_k, "v": d_v, "beta": d_beta}
