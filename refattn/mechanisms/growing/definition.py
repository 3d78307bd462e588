"""Growing attention: a head that is too narrow for the scores that the loss asks for gets new columns.

A head makes queries y w_q and keys y w_k of the tokens y. Its scores are y M y^T with a kernel M = scale w_q w_k^T. The
rank of M is at most d, the width of the head. The loss may ask for scores that no kernel of this rank has. Training the
d columns is then no help: the head needs more of them. How many, and which?

The backward of attention knows. On its way it has g, the gradient of the loss with respect to each score. (In softmax
attention that is dSM.1. It is 0 where a mask hides a score.) Scores are linear in M, so g gives the gradient N with
respect to M, and N may have any rank. A growth step moves M against N. Then it takes the nearest kernel of rank d + c,
and the two factors of that are the new weights, wider by c columns. How far M moves is found by looking at the loss.
The scale is stored and stays as it was, so that the old columns go on to mean the same.

    [GROW.1]  M = scale w_q w_k^T                       the kernel of each head
    [dGROW.1]  N = sum over sequences of y^T g y        a change E of M changes the loss by <g, y E y^T> = <N, E>
    [GROW.2]  C = sum over sequences of y^T y           which directions tokens take

Here <X, Y> is the sum of all X_ij Y_ij, and |X|^2 = <X, X>.

What a change costs. N is right for small changes only, and small means that the scores change little, for these are
what the loss reads. So the cost of E is the sum over sequences of |y E y^T|^2 = <E, C_1 E C_1>, where C_1 = y^T y of
that sequence. Let each C_1 be replaced by the mean of all b sequences, C / b. Then the sum is
b <E, (C / b) E (C / b)> = <E, C E C> / b. This is <E, A E A> with A = C / sqrt(b): A stands in it twice, hence the
root. For any W with A = W^T W it is |W E W^T|^2. In short: Z = W E W^T is the change in units of what it costs.

    [GROW.3]  A = C / sqrt(b)                           A = U diag(lambda) U^T
    [GROW.4]  rho_k = sqrt(lambda_k + damping mean(lambda))     W = diag(rho) U^T, and V is its inverse

Damping, which W^T W has beside A, gives a price to directions that hardly any token takes. Without it columns along
them could be huge.

Where to go. E = V Z V^T, so the loss changes by <N, V Z V^T> = <V^T N V, Z> = <G, Z>. Of all Z with |Z| = |G| the best
is -G. As a change of M that is -D. The squares of what it does to the scores sum to |G|^2. (In GROW.9 and GROW.10 |G|
and the sum are those of all heads, which share one amplitude.)

    [GROW.5]  G = V^T N V                               the gradient with respect to Z
    [GROW.6]  H = (1 - P_q) G (1 - P_k)                 P_q and P_k project on the columns of W w_q and W w_k
    [GROW.7]  sigma = the singular values of H          the largest first: what each new column is worth
    [GROW.8]  D = V G V^T
    [GROW.9]  nu = |G| / sqrt(number of scores)         the root mean square of what D does to a score

What columns are worth. A small change of the d columns makes Z = scale (W dw_q (W w_k)^T + W w_q (W dw_k)^T). H is the
part of G at right angles to all such Z, so only new columns can follow it. A new column of w_q and one of w_k together
change Z by a matrix of rank 1. Of all these with length 1, the loss falls most for the first singular vectors of H, and
it falls by sigma_1. To first order, then, c new columns follow all of G but what is behind the c largest sigma of H:

    [GROW.10]  slope = -(|G|^2 - sum_(j > c) sigma_j^2) / nu    of the loss, by the amplitude of the step

The step, for an amplitude. It says by how much scores change, in the root mean square.

    [GROW.11]  F = M - amplitude D / nu                 the moved kernel, of any rank
    [GROW.12]  K = W F W^T                              in units of cost
    [GROW.13]  K' = K with its d + c largest singular values alone      nearest to K of this rank (Eckart and Young)
    [GROW.14]  M' = V K' V^T                            the new kernel, M' = Q_L diag(tau) Q_R^T with d + c columns each
    [GROW.15]  L = Q_L diag(sqrt(tau))                  M' = L R^T
    [GROW.16]  R = Q_R diag(sqrt(tau))
    [GROW.17]  O = B_L B_R^T                            for B_L diag(beta) B_R^T = L^T w_q + R^T w_k
    [GROW.18]  w_q' = L O / sqrt(scale)
    [GROW.19]  w_k' = R O / sqrt(scale)

Why these factors. M' = (L T) (R T^-T)^T for any T that has an inverse. L and R are equally large: the gradient of one
is N times the other, so a large one and a small one would learn at different speeds. An optimiser remembers something
for each column, so columns stay near where they were: of all rotations, O brings L O and R O nearest to the old
weights, with c columns of zeros behind them. The zeros leave O free to turn the new columns among themselves. Which
turn one gets depends on how singular vectors are computed; the kernel and the old columns do not.

If causal, N needs nothing: g is 0 for hidden scores. The number of scores counts the seen ones. C has the hidden ones,
too, because without them the cost would not be a product of two A. So nu is then not quite the root mean square for
which it stands. It is only the unit of the amplitude, and that is searched.

Axes: b sequence, h head, i and j token, m width of tokens, d width of a head, u width of a grown head: d + c.

Source: L. Burgund 2025, Attention Growing Networks, internship report at LISN, sections 1 and 2. It adds the gradient,
cuts M' in units of weights, and takes a step of 1; see docs/deviations.md. H: M. Verbockhaven et al. 2024, Growing Tiny
Networks, arXiv:2405.19816. O: P. Schoenemann 1966, A generalized solution of the orthogonal Procrustes problem.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from refattn.xp import Array, namespace, transpose, zeros


class Heads(NamedTuple):
    """What grows: w_q and w_k (h, m, d), and the kernels (h, m, m) that they make."""

    w_q: Array
    w_k: Array
    scale: float
    kernel: Array


class Statistics(NamedTuple):
    """What growth reads of a batch. Those of several batches of one loss add up, field by field."""

    gradient: Array  # N
    gram: Array  # C
    sequences: int
    scores: int


class Plan(NamedTuple):
    """Where the kernels would go."""

    whiten: Array  # W
    back: Array  # V
    whole: Array  # G
    worth: Array  # sigma
    way: Array  # D
    size: Array  # nu


def heads_of(w_q: Array, w_k: Array, *, scale: float) -> Heads:
    """Return the heads of w_q and w_k (h, m, d)."""
    kernel = scale * w_q @ transpose(w_k)  # (h, m, m) [GROW.1]
    return Heads(w_q, w_k, scale, kernel)


def observe(y: Array, g: Array, *, causal: bool = False) -> Statistics:
    """Return the statistics of tokens y (b, i, m) and the gradient g (b, h, i, j) of their scores."""
    xp, (b, h, n, _) = namespace(y, g), g.shape
    tokens = y[:, None, :, :]  # (b, 1, i, m)
    # forward: scores = tokens @ kernel @ transpose(tokens)
    gradient = xp.sum(transpose(tokens) @ g @ tokens, axis=0)  # (h, m, m) [dGROW.1]
    gram = xp.sum(transpose(y) @ y, axis=0)  # (m, m) [GROW.2]
    scores = b * h * (n * (n + 1) // 2 if causal else n * n)
    return Statistics(gradient, gram, b, scores)


def plan(heads: Heads, statistics: Statistics, *, damping: float = 0.01) -> Plan:
    """Return where the kernels would go, and what new columns would be worth."""
    xp = namespace(heads.kernel)
    metric = statistics.gram / math.sqrt(statistics.sequences)  # (m, m) [GROW.3]
    values, vectors = xp.linalg.eigh(metric)  # (m), (m, m)
    roots = xp.sqrt(values + damping * xp.mean(values))  # (m) [GROW.4]
    whiten, back = transpose(vectors * roots), vectors / roots  # (m, m): W, (m, m): V
    whole = transpose(back) @ statistics.gradient @ back  # (h, m, m) [GROW.5]
    span_q, _ = xp.linalg.qr(whiten @ heads.w_q)  # (h, m, d): P_q = span_q @ span_q^T
    span_k, _ = xp.linalg.qr(whiten @ heads.w_k)  # (h, m, d)
    outside = whole - span_q @ (transpose(span_q) @ whole)  # (h, m, m): (1 - P_q) G
    hidden = outside - (outside @ span_k) @ transpose(span_k)  # (h, m, m) [GROW.6]
    worth = xp.linalg.svdvals(hidden)  # (h, m) [GROW.7]
    way = back @ whole @ transpose(back)  # (h, m, m) [GROW.8]
    size = xp.sqrt(xp.sum(whole * whole) / statistics.scores)  # () [GROW.9]
    return Plan(whiten, back, whole, worth, way, size)


def columns_of(planned: Plan, *, share: float = 0.02, most: int = 4) -> int:
    """Return how many new columns are worth while: those that follow more than this share of what is hidden.

    Along a new column the loss falls at a rate of sigma^2 / nu, hence the squares. What is small may be
    noise of the batch, and what is left out can come with another growth.
    """
    xp = namespace(planned.worth)
    squares = xp.sum(planned.worth * planned.worth, axis=0)  # (m): of all heads
    return min(most, int(xp.sum(xp.astype(squares > share * xp.sum(squares), xp.int64))))


def slope_of(planned: Plan, columns: int) -> Array:
    """Return the derivative of the loss with respect to the amplitude, at 0, for so many new columns."""
    xp, left_out = namespace(planned.worth), planned.worth[:, columns:]  # -, (h, m)
    followed = xp.sum(planned.whole * planned.whole) - xp.sum(left_out * left_out)  # ()
    slope = -followed / planned.size  # () [GROW.10]
    return slope


def grow(heads: Heads, planned: Plan, *, columns: int, amplitude: float) -> tuple[Array, Array]:
    """Return w_q and w_k (h, m, u) with so many new columns, after a step as long as the amplitude says."""
    (w_q, w_k, scale, kernel), whiten, back = heads, planned.whiten, planned.back
    xp, (h, m, d) = namespace(kernel), w_q.shape
    width = d + columns
    # The kernel.
    moved = kernel - amplitude * planned.way / planned.size  # (h, m, m) [GROW.11]
    whitened = whiten @ moved @ transpose(whiten)  # (h, m, m) [GROW.12]
    left, values, right = xp.linalg.svd(whitened)  # (h, m, m), (h, m), (h, m, m): right is transposed
    cut = (left * values[:, None, :])[:, :, :width] @ right[:, :width, :]  # (h, m, m) [GROW.13]
    grown = back @ cut @ transpose(back)  # (h, m, m) [GROW.14]
    # Its factors, equally large.
    left, values, right = xp.linalg.svd(grown)  # (h, m, m), (h, m), (h, m, m)
    roots = xp.sqrt(values[:, None, :width])  # (h, 1, u)
    of_q = left[:, :, :width] * roots  # (h, m, u) [GROW.15]
    of_k = transpose(right)[:, :, :width] * roots  # (h, m, u) [GROW.16]
    # The rotation that brings them near the old weights.
    old_q, old_k = (xp.concat([w, zeros((h, m, columns), w)], axis=2) for w in (w_q, w_k))  # (h, m, u), (h, m, u)
    left, _, right = xp.linalg.svd(transpose(of_q) @ old_q + transpose(of_k) @ old_k)  # (h, u, u), -, (h, u, u)
    turn = left @ right  # (h, u, u) [GROW.17]
    new_q = of_q @ turn / math.sqrt(scale)  # (h, m, u) [GROW.18]
    new_k = of_k @ turn / math.sqrt(scale)  # (h, m, u) [GROW.19]
    return new_q, new_k


def search(loss_at: Callable[[float], float], slope: float, *, amplitude: float = 0.5, decrease: float = 1e-4) -> float:
    """Return an amplitude at which the loss falls; `loss_at` gives the loss of the weights grown at an amplitude.

    An amplitude is good if the loss falls there by at least a small part of what its slope promises. The first one is
    halved until it is good. If it is good at once, it is doubled while that is good and better still.
    """
    before = loss_at(0.0)

    def good(amplitude: float) -> bool:
        return loss_at(amplitude) <= before + decrease * amplitude * slope

    factor = 2.0 if good(amplitude) else 0.5
    while not good(amplitude):
        amplitude = factor * amplitude
    while good(factor * amplitude) and loss_at(factor * amplitude) < loss_at(amplitude):
        amplitude = factor * amplitude
    return amplitude
