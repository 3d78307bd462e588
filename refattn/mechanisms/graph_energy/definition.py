"""Graph energy attention: how much each token counts is settled between the tokens, by a flow on their graph.

The purpose: tokens that no similar token supports get no attention at all, for any query. So every token has a score
x_i between 0 and 1, the same for all queries: how much it counts. It starts from s_ii, the one score that belongs to
the token alone. As q and k are learned, training decides which tokens have a large one. The tokens are the nodes of a
graph, whose links say how alike two tokens are. Along the links the scores pull at one another, while each is also held
where it started. So a token that stands out alone comes to count less. A threshold drops the tokens whose scores are
small. The others keep their softmax weights, each multiplied by its score, and the weights of a query are divided by
their sum. If all scores are equal and none is dropped, this is softmax attention.

    [GE.1]  s_ij = q_i . k_j / sqrt(d)                  how well token j matches query i
    [GE.2]  a_ij = exp(s_ij) / sum_l exp(s_il)          softmax attention
    [GE.3]  r_ij = (s_ij + s_ji) / 2                    how alike i and j are, the same both ways
    [GE.4]  n_ij = exp(r_ij) / sum_l exp(r_il)          the link by which j pulls at i; see below
    [GE.5]  b_i = 1 / (1 + exp(-s_ii))                  where the score x_i starts
    [GE.6]  c_i = sum_j n_ij sin(x_j - x_i)             how its neighbours pull at x_i
    [GE.7]  rate_i = mu (b_i - x_i) + kappa c_i         how fast x_i moves: back to its start, and to its neighbours
    [GE.8]  x'_i = x_i + h rate_i                       x after a step of length h; there are `steps` of them
    [GE.9]  y_j = x_j if x_j >= tau, else 0             of the last x: the score of a token that is kept, 0 if dropped
    [GE.10]  u_ij = w_ij y_j                            the part of token j in what query i reads; w: see below
    [GE.11]  z_i = sum_j u_ij                           1 if no token is kept, which avoids 0 / 0
    [GE.12]  p_ij = u_ij / z_i                          if no token is kept, i reads only the j of the largest a_ij x_j
    [GE.13]  o_i = sum_j p_ij v_j

w_i is the softmax of GE.2 over the tokens that are kept, w_ij = exp(s_ij) / sum over kept l of exp(s_il), and 0 for a
token that is dropped. p_ij is a_ij y_j divided by the sum of these, all the same: w_ij and a_ij differ by a factor of
the query i, which cancels. But if a token that matches much better is dropped, a_ij may round to 0 for all tokens that
are kept, as exp(-110) does in float32. w_ij cannot for all of them.

The links of a token, that to itself included, sum to 1: so the pull, and with it the step that is allowed, does not
depend on how many tokens there are. The link to itself pulls nothing, but it takes its share from the others.

The flow goes down an energy, so it cannot go round in circles and comes to rest. Nothing below computes the energy. Let
pi_i = sum_l exp(r_il), which says how strongly token i is linked in all, and

    E = mu/2 sum_i pi_i (x_i - b_i)^2 + kappa/2 sum_ij pi_i n_ij (1 - cos(x_j - x_i)).

n is not symmetric, because each row is divided by its own sum. But pi_i n_ij = exp(r_ij) is symmetric. So in dE/dx_i
the terms in which x_i comes first equal those in which it comes second, and that cancels the 1/2. The derivative of
1 - cos is the sine, and dE/dx_i = -pi_i rate_i. The rate is thus the steepest descent of E, if a move by m is measured
by sum_i pi_i m_i^2. While x flows, E changes by sum_i dE/dx_i rate_i = -sum_i pi_i rate_i^2 per unit of time, which is
never positive. A common factor of all pi changes the unit of E alone: the tour and `energy` divide them by their sum,
so that they add up to 1. This is why links are made from r: exp(s_ij) is not symmetric, so a has in general no such pi,
and a flow along it need not go down any energy of this form.

Why a sine: the energy asks for an odd function, so that pi_i n_ij sin(x_j - x_i) is opposite for i and j. Any odd
function that rises would do. The sine is the source's. For differences up to 1 it is the difference within 16 %.

The ratio of mu and kappa decides where the flow ends; both are 1, so that neither is preferred. Along a move of length
1 in the measure above, the second derivative of E is at most mu + 2 kappa. So a step cannot raise E if h is at most
2 / (mu + 2 kappa); the default 1/3 is half of that. If h (mu + kappa) <= 1, no score leaves the range from 0 to 1.
There the sine rises with the difference, so E is convex, and if mu > 0 it has one lowest point. The largest distance of
a score from it is multiplied by at most 1 - h mu in each step: 10 steps leave at most (2/3)^10, 2 percent. tau is above
0. A token with s_ii = 0 starts at 1/2, and the default 0.4 drops those that end clearly below that.

Backwards, for the gradient do of o: dGE.n is the gradient with respect to the value of GE.n, and dGE.9 with respect to
its x. Which tokens are dropped, and which is the largest, is taken as fixed. So tau gets no gradient. If no token is
kept, q and k get none, only v. The last x of a token that is dropped gets none, as a small change of it changes
nothing; its earlier x still get some through their pull on others. The steps are gone through from the last to the
first.
x', rate and c are those of the step, x is what it began with; GE.before is that x. In dGE.1 dw_ij is du_ij y_j. One
mu, kappa and h serve all batches and heads: their gradients sum over these, too.

    [dGE.v]  dv_j = sum_i p_ij do_i
    [dGE.12]  dp_ij = do_i . v_j
    [dGE.11]  dz_i = -sum_j dp_ij p_ij / z_i            0 if no token is kept
    [dGE.10]  du_ij = dp_ij / z_i + dz_i                0 if no token is kept
    [dGE.9]  dx_j = sum_i du_ij w_ij if x_j >= tau, else 0      of the last x
    [dGE.8]  dx' = dx                                   of the step that follows; of the last by dGE.9
    [dGE.7]  drate_i = h dx'_i
    [dGE.6]  dc_i = kappa drate_i
    [dGE.before]  dx_i = dx'_i - mu drate_i + sum_j f_ji - sum_j f_ij       f_ij = dc_i n_ij cos(x_j - x_i)
    [dGE.5]  db_i = dx_i + mu sum over steps of drate_i                     dx of the first step
    [dGE.mu]  dmu = sum over steps and i of drate_i (b_i - x_i)
    [dGE.kappa]  dkappa = sum over steps and i of drate_i c_i
    [dGE.step]  dh = sum over steps and i of dx'_i rate_i
    [dGE.4]  dn_ij = sum over steps of dc_i sin(x_j - x_i)
    [dGE.3]  dr_ij = n_ij (dn_ij - sum_l n_il dn_il)
    [dGE.1]  ds_ij = w_ij (dw_ij - sum_l w_il dw_il) + (dr_ij + dr_ji) / 2      and if i = j + db_i b_i (1 - b_i)
    [dGE.q]  dq_i = sum_j ds_ij k_j / sqrt(d)
    [dGE.k]  dk_j = sum_i ds_ij q_i / sqrt(d)

Axes: b batch, h head, i token that attends and is pulled, j token that is attended and pulls, d width of q and k, e of
v; in formulas h is the length of a step, and b_i a start. q, k and v are of the same tokens. It is not causal: all
queries share one score, and the flow mixes those of all tokens.

Source: F. Preetham 2023, Graph Dynamical Systems and Odd Analytic Coupling, Medium: graph, rate, energy, threshold. Its
formulas are lost; GE.3 to GE.5, what holds a score in GE.7, and GE.10 to GE.12 are choices made here. D. Sclosa 2023,
From Combinatorics to Geometry: The Dynamics of Graph Gradient Diffusion, arXiv:2308.08311: GE.6 is its equation 1 with
weights.
"""

import math
from typing import NamedTuple

# namespace(x): the library of x; arange(0, n, x): like x; transpose: last two axes; paper_alone: refuses other options
from refattn.ops.plain import paper_alone, softmax, softmax_backward
from refattn.xp import Array, arange, eye_like, namespace, transpose, zeros


class Saved(NamedTuple):
    """What `backward` reads."""

    inputs: tuple[Array, Array, Array]  # q, k, v
    numbers: tuple[float, float, float]  # mu, kappa, step
    links: Array
    start: Array
    path: list[tuple[Array, Array, Array]]  # x before each step, its pull and its rate
    dropped: Array
    kept: Array
    near: Array
    total: Array
    weights: Array


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
    # The graph, and where the scores start.
    logits = q @ transpose(k) / root  # (b, h, i, j) [GE.1]
    attention = softmax(logits)  # (b, h, i, j) [GE.2]
    alike = 0.5 * (logits + transpose(logits))  # (b, h, i, j) [GE.3]
    links = softmax(alike)  # (b, h, i, j) [GE.4]
    own = xp.sum(logits * eye_like(q.shape[2], q), axis=-1, keepdims=True)  # (b, h, i, 1): s_ii
    start = 1.0 / (1.0 + xp.exp(-own))  # (b, h, i, 1) [GE.5]
    # The flow. x is a column, so that x_j - x_i of all pairs is a row minus a column.
    x, path = start, []
    for _ in range(steps):
        pull = xp.sum(links * xp.sin(transpose(x) - x), axis=-1, keepdims=True)  # (b, h, i, 1) [GE.6]
        rate = mu * (start - x) + kappa * pull  # (b, h, i, 1) [GE.7]
        path.append((x, pull, rate))
        x = x + step * rate  # (b, h, i, 1) [GE.8]
    # The readout.
    dropped = x < tau  # (b, h, j, 1)
    kept = xp.where(dropped, 0.0, x)  # (b, h, j, 1) [GE.9]
    empty = xp.all(dropped, axis=2, keepdims=True)  # (b, h, 1, 1): whether no token is kept
    hidden = transpose(dropped) & ~empty  # (b, h, 1, j): the softmax of a row needs a token
    near = softmax(xp.where(hidden, -math.inf, logits))  # (b, h, i, j): w_ij
    parts = near * transpose(kept)  # (b, h, i, j) [GE.10]
    total = xp.where(empty, 1.0, xp.sum(parts, axis=-1, keepdims=True))  # (b, h, i, 1) [GE.11]
    best = xp.argmax(attention * transpose(x), axis=-1, keepdims=True)  # (b, h, i, 1): which a_ij x_j is the largest
    alone = xp.astype(arange(0, q.shape[2], like=q) == best, q.dtype)  # (b, h, i, j): 1 there, else 0
    weights = xp.where(empty, alone, parts / total)  # (b, h, i, j) [GE.12]
    out = weights @ v  # (b, h, i, e) [GE.13]
    numbers = (mu, kappa, step)
    return out, Saved((q, k, v), numbers, links, start, path, dropped, kept, near, total, weights)


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, mu, kappa and step for d_out, that of out."""
    (q, k, v), (mu, kappa, step), links, start, path, dropped, kept, near, total, weights = saved
    xp, root = namespace(d_out), math.sqrt(q.shape[3])
    # forward: out = weights @ v
    d_v = transpose(weights) @ d_out  # (b, h, j, e) [dGE.v]
    d_weights = d_out @ transpose(v)  # (b, h, i, j) [dGE.12]
    # forward: weights = where(empty, alone, parts / total); total = sum(parts)
    empty = xp.all(dropped, axis=2, keepdims=True)  # (b, h, 1, 1)
    shared = xp.sum(d_weights * weights, axis=-1, keepdims=True)  # (b, h, i, 1)
    d_total = xp.where(empty, 0.0, -shared / total)  # (b, h, i, 1) [dGE.11]
    d_parts = xp.where(empty, 0.0, d_weights / total + d_total)  # (b, h, i, j) [dGE.10]
    # forward: parts = near * transpose(kept)
    d_near = d_parts * transpose(kept)  # (b, h, i, j)
    d_kept = transpose(xp.sum(d_parts * near, axis=-2, keepdims=True))  # (b, h, j, 1)
    # forward: kept = where(dropped, 0, x)
    d_x = xp.where(dropped, 0.0, d_kept)  # (b, h, j, 1) [dGE.9]
    # The flow, backwards. What is summed over the steps begins at 0.
    anchor_sum = mu_sum = kappa_sum = step_sum = zeros(start.shape, start)  # (b, h, i, 1)
    links_sum = zeros(links.shape, links)  # (b, h, i, j)
    for x, pull, rate in reversed(path):
        # forward: x' = x + step * rate
        d_next = d_x  # (b, h, i, 1) [dGE.8]
        d_rate = step * d_next  # (b, h, i, 1) [dGE.7]
        step_sum = step_sum + d_next * rate  # (b, h, i, 1)
        # forward: rate = mu * (start - x) + kappa * pull
        anchor_sum = anchor_sum + mu * d_rate  # (b, h, i, 1)
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
    d_start = d_x + anchor_sum  # (b, h, i, 1) [dGE.5]
    d_mu = xp.sum(mu_sum)  # () [dGE.mu]
    d_kappa = xp.sum(kappa_sum)  # () [dGE.kappa]
    d_step = xp.sum(step_sum)  # () [dGE.step]
    d_links = links_sum  # (b, h, i, j) [dGE.4]
    # forward: links = softmax(alike); alike = (logits + logits^T) / 2
    d_alike = softmax_backward(links, d_links)  # (b, h, i, j) [dGE.3]
    d_both = 0.5 * (d_alike + transpose(d_alike))  # (b, h, i, j): what s_ij and s_ji get of it
    # forward: start = sigmoid(s_ii); near = softmax(logits) of the tokens that are kept
    d_own = d_start * start * (1.0 - start) * eye_like(q.shape[2], q)  # (b, h, i, j): on the diagonal
    d_logits = softmax_backward(near, d_near) + d_both + d_own  # (b, h, i, j) [dGE.1]
    # forward: logits = q @ k^T / root
    d_q = d_logits @ k / root  # (b, h, i, d) [dGE.q]
    d_k = transpose(d_logits) @ q / root  # (b, h, j, d) [dGE.k]
    return {"q": d_q, "k": d_k, "v": d_v, "mu": d_mu, "kappa": d_kappa, "step": d_step}
