"""Graph energy attention: tokens first settle among themselves how much each of them counts; then softmax reads them.

In softmax attention each query decides alone how much a token counts. Here every token has a score x_i, one for all
queries. Tokens are the nodes of a graph. All pairs are linked, strongly if they match. The scores flow along the links:
each is pulled towards the scores of its neighbours, and held near its start. A threshold then drops tokens with small
scores. The softmax weights of the others are multiplied by their scores, and divided by the sum of these products. So a
token can lose all attention because its neighbours have low scores. Equal scores above tau give softmax attention.

The source, an article (F. Preetham 2023), has a graph of tokens, scores that flow down an energy, odd pulls such as a
sine, and a threshold. Its displayed formulas are not preserved. So these are ours: the links (GE.3, GE.4), the start
(GE.5), the spring (in GE.7), how scores weigh values (GE.10 to GE.12), all numbers. GE.6 is equation 1 of D. Sclosa
2023, with weights. The article has no experiment; ours (docs/experiments/graph_energy.md) did not train these links.

All formulas are of one head. i, j and l are tokens; token i reads and is pulled; token j is read, and pulls token i.
Every token has a query q_i, a key k_i and a value v_i; q and k have width d. The caller chooses mu, kappa, step, tau
(all above 0) and steps (by default 1, 1, 1/3, 0.4, 10: then x_i stays between 0 and 1).

    [GE.1]  s_ij = q_i . k_j / sqrt(d)                  the match: how well key j answers query i
    [GE.2]  a_ij = exp(s_ij) / sum_l exp(s_il)          softmax attention to all tokens; only best_ij uses it
    [GE.3]  r_ij = (s_ij + s_ji) / 2                    the likeness: the match, made the same both ways
    [GE.4]  n_ij = exp(r_ij) / sum_l exp(r_il)          the link by which j pulls i; the links of i sum to 1
    [GE.5]  b_i = 1 / (1 + exp(-s_ii))                  the start of the score: the sigmoid of the match with itself
    [GE.6]  c_i = sum_j n_ij sin(x_j - x_i)             the pull of all tokens (Kuramoto coupling)
    [GE.7]  rate_i = mu (b_i - x_i) + kappa c_i         a spring back to the start, and the pull
    [GE.8]  x'_i = x_i + step rate_i                    GE.6 to GE.8 `steps` times, from x = b, then from x = x'
    [GE.9]  y_j = x_j if x_j >= tau, else 0             of the last x: token j is kept, or it is dropped
            w_ij = exp(s_ij) / (sum over kept l of exp(s_il)) if j is kept, else 0      softmax again, of kept tokens
    [GE.10]  u_ij = w_ij y_j                            the part of token j
    [GE.11]  z_i = sum_j u_ij if any token is kept, else 1      the mean of kept y_j by w_ij: tau or more
    [GE.12]  p_ij = u_ij / z_i if any token is kept, else best_ij      the weights
    [GE.13]  o_i = sum_j p_ij v_j                       the output

If no token is kept, best_ij is 1 for the j with the largest a_ij x_j (of the last x; the first of equals), and 0 for
all others. u_ij is 0 then; in the code w_ij is a_ij, as a softmax of no token is 0 / 0.

Why best: the weights of i sum to 1, as in softmax, so if all tokens are dropped, i has to read a dropped one. Without a
threshold p_ij would be a_ij x_j over its sum, and i would read all the tokens that should be dropped. We choose the one
with the largest of these weights; the others stay dropped. Unless two are equal, small changes of q and k do not change
which one it is. So q and k get no gradient, and a head that always drops all gets no gradient towards keeping one.

Why links are a softmax: the links of a token sum to 1, so the pull does not grow with the number of tokens.
Why a sine: it is the source's example. Between scores in [0, 1] it is x_j - x_i, or up to 16 % smaller in size.
Why tau = 0.4: a token with s_ii = 0 starts at 1/2, and is dropped if its neighbours pull it down a bit.
Why the start is s_ii: it belongs to token i alone, and training can make it large for tokens that should count. A large
s_ii also shields i: r_ii is s_ii, so n_ii is large, which leaves little for other links, and i does not pull itself.
Why w and not a: a_ij y_j would be 0 for dropped j, too; for kept j, w_ij / a_ij depends on i alone and cancels in
GE.12. But if a dropped token matches much better than all kept ones, the a_ij of all kept j may round to 0 (as
exp(-110) in float32), and p_ij would be 0 / 0.

The energy. The flow goes down an energy E, and comes to rest (below). No line below computes this:

    pi_i n_ij = pi_j n_ji                               detailed balance, with pi_i = sum_l exp(r_il)
    E = mu/2 sum_i pi_i (x_i - b_i)^2 + kappa/2 sum_ij pi_i n_ij (1 - cos(x_j - x_i))
    dE/dx_i = -pi_i rate_i                              rate is minus the gradient, but for the weight pi_i
    dE/dt = sum_i dE/dx_i rate_i = -sum_i pi_i rate_i^2      in continuous time; pi, n and b stay

Line 1: n_ij and n_ji differ, since each row is divided by its own sum, but pi_i n_ij is exp(r_ij), the same both ways.
Line 3: x_i is in the double sum of E twice, as the pulled token and as the pulling one. By line 1 both give the same,
which cancels the 1/2; and the derivative of 1 - cos(x_j - x_i) with respect to x_i is -sin(x_j - x_i).

So links are made of r. With links a, line 1 would give pi_1 a_12 = pi_2 a_21, pi_2 a_23 = pi_3 a_32, pi_3 a_31 = pi_1
a_13 for tokens 1 to 3. Their product, a_12 a_23 a_31 = a_21 a_32 a_13 (pi cancels), is false for most s.

How long may a step be? Let a move m have the length |m|, |m|^2 = sum_i pi_i m_i^2. In this metric the gradient of E is
(dE/dx_i) / pi_i, which is -rate_i by line 3: a gradient flow. Along m the second derivative E'' of E is at most (mu + 2
kappa) |m|^2, as cos <= 1 and (m_j - m_i)^2 <= 2 m_i^2 + 2 m_j^2:

    E'' = mu sum_i pi_i m_i^2 + kappa/2 sum_ij pi_i n_ij cos(x_j - x_i) (m_j - m_i)^2
    <= mu |m|^2 + kappa sum_ij pi_i n_ij (m_i^2 + m_j^2) = (mu + 2 kappa) |m|^2

The last sum is 2 |m|^2: links of i sum to 1, and by line 1 sum_ij pi_i n_ij m_j^2 = sum_ij pi_j n_ji m_j^2 = |m|^2. A
step is the move m = step rate. By Taylor's formula it changes E by at most -step |rate|^2 + 1/2 (mu + 2 kappa) step^2
|rate|^2. So E cannot rise if step <= 2 / (mu + 2 kappa).

Does it come to rest, rate = 0? If step (mu + kappa) <= 1 (stricter), as by default, scores stay between 0 and 1: b_i <=
1 and sin(x_j - x_i) <= 1 - x_i, so x'_i <= x_i + step (mu + kappa) (1 - x_i) <= 1; likewise x'_i >= (1 - step (mu +
kappa)) x_i >= 0. Let e be the difference of two such states x (of one b and n). By the mean value theorem a step gives

    e'_i = (1 - step mu) e_i + step kappa sum_j n_ij C_ij (e_j - e_i)      C_ij: a cosine between 0.54 and 1

The factor of e_i, 1 - step mu - step kappa sum_(j != i) n_ij C_ij, is at least 1 - step (mu + kappa) >= 0, as n sums to
1 and C <= 1. Those of e_j are step kappa n_ij C_ij >= 0, and all add up to 1 - step mu. So |e'_i| is at most (1 - step
mu) times the largest |e_j|. A contraction of the cube of all such x into itself has one point of rest; 10 default steps
leave at most (2/3)^10 < 0.018 of the largest distance to it.

Backward: do_i is the gradient of a loss with respect to o_i, and so for every symbol; d alone is the width. The id
dGE.4 is that of the gradient with respect to the value of GE.4, dGE.q with respect to the input q. p can jump if a
score crosses tau or, with no token kept, where the two largest a_ij x_j are equal. Elsewhere small changes leave kept
tokens and best as they are, so tau and a have no gradient. If all tokens are dropped, only v has one.

The readout. The derivative of p_ij by z_i is -p_ij / z_i. u_ij is in its own p_ij, and in z_i; y_j is in all u_ij.

    [dGE.v]  dv_j = sum_i p_ij do_i
    [dGE.12]  dp_ij = do_i . v_j
    [dGE.11]  dz_i = -sum_j dp_ij p_ij / z_i if any token is kept, else 0
    [dGE.10]  du_ij = dp_ij / z_i + dz_i if any token is kept, else 0
    [dGE.9]  dy_j = sum_i du_ij w_ij                    0 for dropped j, as w_ij = 0; if none is kept, as du_ij = 0
             dw_ij = du_ij y_j

The flow, from the last step to the first. A step reads dx' and gives dx. Its x' is the x of the next step, so its dx'
is the dx of that; the last dx' is dy, as only GE.9 gives the last x' a gradient. x_i is in x'_i, in the spring of
rate_i, in c_i as the pulled token, and in all c_j as a pulling one. f_ij is the gradient of x_j - x_i in c_i:

    [dGE.8]  dx'_i = next_i                             next_i: dx_i of the step that follows; after the last step, dy_i
    [dGE.7]  drate_i = step dx'_i
    [dGE.6]  dc_i = kappa drate_i
             f_ij = dc_i n_ij cos(x_j - x_i)
    [dGE.before]  dx_i = dx'_i - mu drate_i + sum_j f_ji - sum_j f_ij      of x before the step: as pulling, as pulled

All steps t share b, n, mu, kappa and step: sum_t is over steps. b is the first x, too. The gradients of the three
numbers sum over batch and heads as well.

    [dGE.5]  db_i = dx_i + mu sum_t drate_i             dx of the first step; dy if steps is 0
    [dGE.mu]  dmu = sum_ti drate_i (b_i - x_i)
    [dGE.kappa]  dkappa = sum_ti drate_i c_i
    [dGE.step]  dstep = sum_ti dx'_i rate_i
    [dGE.4]  dn_ij = sum_t dc_i sin(x_j - x_i)

The graph. n and w are softmaxes: for n = softmax(r), dr is n (dn - mean) with the mean of dn weighted by n. s_ij is in
row i of w, half in r_ij and half in r_ji, and s_ii in b_i, whose derivative is b_i (1 - b_i). I_ij is 1 if i = j, or 0.

    [dGE.3]  dr_ij = n_ij (dn_ij - sum_l n_il dn_il)
    [dGE.1]  ds_ij = w_ij (dw_ij - sum_l w_il dw_il) + (dr_ij + dr_ji) / 2 + I_ij db_i b_i (1 - b_i)
    [dGE.q]  dq_i = sum_j ds_ij k_j / sqrt(d)
    [dGE.k]  dk_j = sum_i ds_ij q_i / sqrt(d)

Axes: b batch (b_i is a start), h head, i and j token, d width of q and k, e of v. It is not causal: the flow mixes all
tokens. Sources (see docs/deviations.md): F. Preetham, Graph Dynamical Systems and Odd Analytic Coupling, Medium, 2023;
D. Sclosa, From Combinatorics to Geometry: The Dynamics of Graph Gradient Diffusion, arXiv:2308.08311.

Below, x starts at (1/2, 0.06, 1/2), ends at (0.43, 0.22, 0.38). The second token pulls the last (n_32 = 0.73) below
tau, and the first less (n_12 = 0.32). Only the first is kept, so all read it; by softmax the second reads the last:

    >>> import numpy as np, refattn as ra
    >>> q, k = [[[[0.0, 0.0], [-2.0, 1.0], [0.0, 2.0]]]], [[[[0.0, -1.0], [2.0, 0.0], [-2.0, 0.0]]]]
    >>> q, k, v = np.asarray(q), np.asarray(k), np.eye(3)[None, None]
    >>> [m.forward(q, k, v)[0][0, 0, 1].round(2).tolist() for m in (ra.softmax, ra.graph_energy)]
    [[0.03, 0.0, 0.97], [1.0, 0.0, 0.0]]
"""

import math
from typing import NamedTuple

# namespace(x): the library of x; arange(0, n, x): like x; transpose: last two axes; paper_alone: allows no other option
from refattn.ops.plain import paper_alone, softmax, softmax_backward
from refattn.xp import Array, arange, eye_like, namespace, transpose, zeros


class Saved(NamedTuple):
    """What `backward` reads."""

    inputs: tuple[Array, Array, Array]  # q, k, v
    numbers: tuple[float, float, float]  # mu, kappa, step
    links: Array  # n
    start: Array  # b
    path: list[tuple[Array, Array, Array]]  # of each step: x before it, pull c and rate
    dropped: Array  # whether x < tau
    kept_scores: Array  # y
    kept_attention: Array  # w
    total: Array  # z
    weights: Array  # p


@paper_alone
def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mu: float = 1.0,
    kappa: float = 1.0,
    step: float = 1.0 / 3.0,
    steps: int = 10,
    tau: float = 0.4,
) -> tuple[Array, Saved]:
    """Return out (b, h, i, e) for q and k (b, h, i, d) and v (b, h, i, e), and what `backward` reads."""
    xp, root = namespace(q, k, v), math.sqrt(q.shape[3])
    # The graph, and the start of the scores.
    matches = q @ transpose(k) / root  # (b, h, i, j) [GE.1]
    attention = softmax(matches)  # (b, h, i, j) [GE.2]
    likeness = 0.5 * (matches + transpose(matches))  # (b, h, i, j) [GE.3]
    links = softmax(likeness)  # (b, h, i, j) [GE.4]
    self_match = xp.sum(matches * eye_like(q.shape[2], q), axis=-1, keepdims=True)  # (b, h, i, 1): s_ii
    start = 1.0 / (1.0 + xp.exp(-self_match))  # (b, h, i, 1) [GE.5]
    # The flow. x is a column, so that x_j - x_i of all pairs is a row minus a column.
    x, path = start, []
    for _ in range(steps):
        pull = xp.sum(links * xp.sin(transpose(x) - x), axis=-1, keepdims=True)  # (b, h, i, 1) [GE.6]
        rate = mu * (start - x) + kappa * pull  # (b, h, i, 1) [GE.7]
        path.append((x, pull, rate))
        x = x + step * rate  # (b, h, i, 1) [GE.8]
    # The readout.
    dropped = x < tau  # (b, h, j, 1)
    kept_scores = xp.where(dropped, 0.0, x)  # (b, h, j, 1) [GE.9]
    none_kept = xp.all(dropped, axis=2, keepdims=True)  # (b, h, 1, 1)
    masked = transpose(dropped) & ~none_kept  # (b, h, 1, j): a softmax needs a token
    kept_attention = softmax(xp.where(masked, -math.inf, matches))  # (b, h, i, j): w_ij
    parts = kept_attention * transpose(kept_scores)  # (b, h, i, j) [GE.10]
    total = xp.where(none_kept, 1.0, xp.sum(parts, axis=-1, keepdims=True))  # (b, h, i, 1) [GE.11]
    largest = xp.argmax(attention * transpose(x), axis=-1, keepdims=True)  # (b, h, i, 1): the j of the largest a_ij x_j
    best = xp.astype(arange(0, q.shape[2], like=q) == largest, q.dtype)  # (b, h, i, j): 1 there, else 0
    weights = xp.where(none_kept, best, parts / total)  # (b, h, i, j) [GE.12]
    out = weights @ v  # (b, h, i, e) [GE.13]
    numbers = (mu, kappa, step)
    return out, Saved((q, k, v), numbers, links, start, path, dropped, kept_scores, kept_attention, total, weights)


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, mu, kappa and step for d_out, that of out."""
    (q, k, v), (mu, kappa, step), links, start, path, dropped, kept_scores, kept_attention, total, weights = saved
    xp, root = namespace(d_out), math.sqrt(q.shape[3])
    # forward: out = weights @ v
    d_v = transpose(weights) @ d_out  # (b, h, j, e) [dGE.v]
    d_weights = d_out @ transpose(v)  # (b, h, i, j) [dGE.12]
    # forward: weights = where(none_kept, best, parts / total); total = where(none_kept, 1, sum(parts))
    none_kept = xp.all(dropped, axis=2, keepdims=True)  # (b, h, 1, 1)
    shared = xp.sum(d_weights * weights, axis=-1, keepdims=True)  # (b, h, i, 1)
    d_total = xp.where(none_kept, 0.0, -shared / total)  # (b, h, i, 1) [dGE.11]
    d_parts = xp.where(none_kept, 0.0, d_weights / total + d_total)  # (b, h, i, j) [dGE.10]
    # forward: parts = kept_attention * transpose(kept_scores)
    d_kept_attention = d_parts * transpose(kept_scores)  # (b, h, i, j): dw_ij
    d_kept_scores = transpose(xp.sum(d_parts * kept_attention, axis=-2, keepdims=True))  # (b, h, j, 1) [dGE.9]
    # forward: kept_scores = where(dropped, 0, x)
    d_x = xp.where(dropped, 0.0, d_kept_scores)  # (b, h, j, 1): of the last x
    # The flow, backwards. The sums over the steps begin at 0.
    start_sum = mu_sum = kappa_sum = step_sum = zeros(start.shape, start)  # (b, h, i, 1)
    links_sum = zeros(links.shape, links)  # (b, h, i, j)
    for x, pull, rate in reversed(path):
        # forward: x' = x + step * rate
        d_next = d_x  # (b, h, i, 1) [dGE.8]
        d_rate = step * d_next  # (b, h, i, 1) [dGE.7]
        step_sum = step_sum + d_next * rate  # (b, h, i, 1)
        # forward: rate = mu * (start - x) + kappa * pull
        start_sum = start_sum + mu * d_rate  # (b, h, i, 1)
        mu_sum = mu_sum + d_rate * (start - x)  # (b, h, i, 1)
        kappa_sum = kappa_sum + d_rate * pull  # (b, h, i, 1)
        d_pull = kappa * d_rate  # (b, h, i, 1) [dGE.6]
        # forward: pull = sum_j links * sin(x_j - x_i)
        between = transpose(x) - x  # (b, h, i, j): x_j - x_i
        links_sum = links_sum + d_pull * xp.sin(between)  # (b, h, i, j)
        d_between = d_pull * links * xp.cos(between)  # (b, h, i, j): f_ij
        d_as_j = transpose(xp.sum(d_between, axis=-2, keepdims=True))  # (b, h, j, 1)
        d_as_i = -xp.sum(d_between, axis=-1, keepdims=True)  # (b, h, i, 1)
        d_x = d_next - mu * d_rate + d_as_j + d_as_i  # (b, h, i, 1) [dGE.before]
    # forward: x = start
    d_start = d_x + start_sum  # (b, h, i, 1) [dGE.5]
    d_mu = xp.sum(mu_sum)  # () [dGE.mu]
    d_kappa = xp.sum(kappa_sum)  # () [dGE.kappa]
    d_step = xp.sum(step_sum)  # () [dGE.step]
    d_links = links_sum  # (b, h, i, j) [dGE.4]
    # forward: links = softmax(likeness); likeness = (matches + matches^T) / 2
    d_likeness = softmax_backward(links, d_links)  # (b, h, i, j) [dGE.3]
    of_likeness = 0.5 * (d_likeness + transpose(d_likeness))  # (b, h, i, j): r_ij and r_ji read s_ij
    # forward: start = sigmoid(s_ii); kept_attention = softmax(matches) over the kept tokens
    of_start = d_start * start * (1.0 - start) * eye_like(q.shape[2], q)  # (b, h, i, j): on the diagonal
    d_matches = softmax_backward(kept_attention, d_kept_attention) + of_likeness + of_start  # (b, h, i, j) [dGE.1]
    # forward: matches = q @ k^T / root
    d_q = d_matches @ k / root  # (b, h, i, d) [dGE.q]
    d_k = transpose(d_matches) @ q / root  # (b, h, j, d) [dGE.k]
    return {"q": d_q, "k": d_k, "v": d_v, "mu": d_mu, "kappa": d_kappa, "step": d_step}
