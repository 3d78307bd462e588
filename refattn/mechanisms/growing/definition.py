"""Growing attention: a head that is too narrow for the scores that the loss asks for gets new columns.

A head makes queries y w_q and keys y w_k of the tokens y, with no biases and no rotation by position. Its scores are
y M y^T with a kernel M = scale w_q w_k^T, whose rank is at most d, the width of the head. If the loss asks for scores
that no kernel of this rank has, training cannot reach them: the head needs more columns. How many, and which?

The backward of attention knows. On its way it has g, the gradient of the loss with respect to each score before the
softmax (0 if the score is masked). Scores are linear in M, so g gives the gradient N with respect to M, which may have
any rank. A growth step moves M against N, as far as the loss says. Then it takes the nearest kernel of rank d + c, and
the two factors of that are the new weights, wider by c columns. Nothing else grows. The scale, such as 1 / sqrt(d) of
the first d, stays, so that old columns go on to mean the same. With the tokens and the loss of g, a step is

    heads = heads_of(w_q, w_k, scale=scale)
    planned = plan(heads, observe(y, g))
    c = columns_of(planned)
    amplitude = search(lambda a: loss(*grow(heads, planned, columns=c, amplitude=a)), slope_of(planned, c))
    if amplitude > 0.0:  # at 0, new columns would be 0 in both factors and never learn
        w_q, w_k = grow(heads, planned, columns=c, amplitude=amplitude)

    [GROW.1]  M = scale w_q w_k^T                       the kernel of a head
    [dGROW.1]  N = sum over sequences of y^T g y        a change E of M changes the loss by <g, y E y^T> = <N, E>
    [GROW.2]  C = sum over sequences of y^T y           which directions tokens take

Here <X, Y> is the sum of all X_ij Y_ij, and |X|^2 = <X, X>. V and K below are no values and keys.

What a change costs. N is right while the scores change little, for these are what the loss reads. So the cost of E is
the sum over sequences of |y E y^T|^2 = <E, C_1 E C_1>, where C_1 = y^T y. Let each C_1 be replaced by their mean, C / b
for b sequences. Then the sum is b <E, (C / b) E (C / b)> = <E, A E A> with A = C / sqrt(b). For any W with W^T W = A it
is |W E W^T|^2: Z = W E W^T is the change in units of what it costs.

    [GROW.3]  A = C / sqrt(b)                           A = U diag(lambda) U^T
    [GROW.4]  rho_r = sqrt(lambda_r + damping mean(lambda))     W = diag(rho) U^T, and V is its inverse

So W^T W = A + damping mean(lambda) 1. Undamped, columns along directions that hardly any token takes could be huge.

Where to go. E = V Z V^T, so the loss changes by <N, V Z V^T> = <V^T N V, Z> = <G, Z>. Of all Z of one length, the best
is along -G, which as a change of M is -D. It costs |G|^2, so nu is about the root mean square change of a score by it.

    [GROW.5]  G = V^T N V                               the gradient with respect to Z
    [GROW.6]  H = (1 - P_q) G (1 - P_k)                 P_q and P_k project on the columns of W w_q and W w_k
    [GROW.7]  sigma = the singular values of H          the largest first: sigma_r^2 is what the r-th column is worth
    [GROW.8]  D = V G V^T                               which is (W^T W)^-1 N (W^T W)^-1
    [GROW.9]  nu = |G| / sqrt(number of scores)         of all heads

What columns are worth. To first order, changes dw_q and dw_k of the old columns change Z by scale times
W dw_q (W w_k)^T + W w_q (W dw_k)^T. X is at right angles to all of these if X W w_k = 0 and (W w_q)^T X = 0. H is the
part of G for which that holds: it is out of reach for old columns. A new column of w_q and one of w_k add to Z a matrix
of rank 1. Of all such out of reach and of length 1, minus the first singular pair of H lowers the loss most: sigma_1.

How many. The heads share C, A, W, V, nu, the amplitude and c. The r-th new column is worth while if, summed over heads,
sigma_r^2 is more than 2 % of |H|^2; less may be noise of the batch. One growth adds at most 4, and no more than m - d.
2 %, 4, damping 0.01 and the first amplitude 0.5 are chosen by hand. Whether to grow at all is for the caller to say.

    [GROW.10]  F = M - amplitude D / nu                 of any rank; scores change by about the amplitude
    [GROW.11]  K = W F W^T                              in units of cost
    [GROW.12]  K' = K with its d + c largest singular values alone      nearest to K of this rank (Eckart and Young)
    [GROW.13]  M' = V K' V^T                            the new kernel: nearest to F in what scores become
    [GROW.14]  L = Q_L diag(sqrt(tau))                  by the singular value decomposition M' = Q_L diag(tau) Q_R^T
    [GROW.15]  R = Q_R diag(sqrt(tau))                M' = L R^T, with d + c columns each
    [GROW.16]  O = B_L B_R^T                            for B_L diag(beta) B_R^T = L^T (w_q, 0) + R^T (w_k, 0)
    [GROW.17]  w_q' = L O / sqrt(scale)
    [GROW.18]  w_k' = R O / sqrt(scale)

Why these factors. M' = (L T) (R T^-T)^T for any T that has an inverse. L and R are equally large: the gradient of one
is N times the other, so unequal ones would learn unequally fast. An optimiser keeps a state for each column, such as
a momentum (zeros for new ones). So after balancing, one O for both, which leaves M' as it is, brings L O and R O as
near as a rotation can to (w_q, 0) and (w_k, 0): the old weights, then c columns of zeros. O may mix the new ones.

How far. To first order, a matrix of rank d can follow any change but H without gaining rank. So if w_q and w_k have
rank d, the cut to d + c keeps of -G all but H, and of -H the best matrix of rank c. A small step is amplitude / nu
times what is kept, so the loss falls by amplitude / nu times the square of its length (all summed over heads):

    [GROW.19]  slope = -(|G|^2 - sum_(r > c) sigma_r^2) / nu    the derivative of the loss by the amplitude, at 0

If causal, g is 0 where scores are masked, so N needs nothing, and the number of scores counts the others. C has the
masked pairs, too, or the cost would not be <E, A E A>. So D is not quite the best direction, and nu may be too large,
by about sqrt(2) if D changes all scores alike. The search makes up for nu: it is only the unit of the amplitude.

Axes: b sequence, h head, i and j token (n of them), m width of tokens, d width of a head, u that of a grown one, d + c.

Source: L. Burgund 2025, Attention Growing Networks, internship report at LISN, sections 1 and 2. There M moves by +D,
without a search, and M' is nearest to F in its entries; see docs/deviations.md. H: M. Verbockhaven et al. 2024, Growing
Tiny Networks, arXiv:2405.19816. O: P. Schoenemann 1966, A generalized solution of the orthogonal Procrustes problem.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

# namespace(x): the library of x; zeros(shape, x): like x; transpose: last two axes
from refattn.xp import Array, namespace, transpose, zeros


class Heads(NamedTuple):
    """What grows: w_q and w_k (h, m, d), and the kernels (h, m, m) that they make."""

    w_q: Array
    w_k: Array
    scale: float
    kernel: Array


class Statistics(NamedTuple):
    """What growth reads of a batch. If the loss is the sum of those of batches, so are these, field by field."""

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
    room: int  # m - d
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
    beyond = outside - (outside @ span_k) @ transpose(span_k)  # (h, m, m) [GROW.6]
    worth = xp.linalg.svdvals(beyond)  # (h, m) [GROW.7]
    way = back @ whole @ transpose(back)  # (h, m, m) [GROW.8]
    size = xp.sqrt(xp.sum(whole * whole) / statistics.scores)  # () [GROW.9]
    room = max(0, heads.w_q.shape[1] - heads.w_q.shape[2])
    return Plan(whiten, back, whole, worth, room, way, size)


def columns_of(planned: Plan, *, share: float = 0.02, most: int = 4) -> int:
    """Return how many new columns are worth while: c. The loss falls along one as sigma^2 / nu, hence the squares."""
    xp = namespace(planned.worth)
    squares = xp.sum(planned.worth * planned.worth, axis=0)  # (m): of all heads
    return min(most, planned.room, int(xp.sum(xp.astype(squares > share * xp.sum(squares), xp.int64))))


def grow(heads: Heads, planned: Plan, *, columns: int, amplitude: float) -> tuple[Array, Array]:
    """Return w_q and w_k (h, m, u) with so many new columns, after a step as long as the amplitude says."""
    (w_q, w_k, scale, kernel), whiten, back = heads, planned.whiten, planned.back
    xp, (h, m, d) = namespace(kernel), w_q.shape
    width = d + columns
    moved = kernel - amplitude * planned.way / planned.size  # (h, m, m) [GROW.10]
    whitened = whiten @ moved @ transpose(whiten)  # (h, m, m) [GROW.11]
    left, values, right = xp.linalg.svd(whitened)  # (h, m, m), (h, m), (h, m, m): right is transposed
    cut = (left * values[:, None, :])[:, :, :width] @ right[:, :width, :]  # (h, m, m) [GROW.12]
    grown = back @ cut @ transpose(back)  # (h, m, m) [GROW.13]
    left, values, right = xp.linalg.svd(grown)  # (h, m, m), (h, m), (h, m, m)
    roots = xp.sqrt(values[:, None, :width])  # (h, 1, u)
    of_q = left[:, :, :width] * roots  # (h, m, u) [GROW.14]
    of_k = transpose(right)[:, :, :width] * roots  # (h, m, u) [GROW.15]
    old_q, old_k = (xp.concat([w, zeros((h, m, columns), w)], axis=2) for w in (w_q, w_k))  # (h, m, u), (h, m, u)
    left, _, right = xp.linalg.svd(transpose(of_q) @ old_q + transpose(of_k) @ old_k)  # (h, u, u), -, (h, u, u)
    turn = left @ right  # (h, u, u) [GROW.16]
    new_q = of_q @ turn / math.sqrt(scale)  # (h, m, u) [GROW.17]
    new_k = of_k @ turn / math.sqrt(scale)  # (h, m, u) [GROW.18]
    return new_q, new_k


def slope_of(planned: Plan, columns: int) -> Array:
    """Return the derivative of the loss with respect to the amplitude, at 0, for so many new columns."""
    xp = namespace(planned.worth)
    falls = xp.sum(planned.whole**2) - xp.sum(planned.worth[:, columns:] ** 2)  # ()
    slope = -falls / planned.size  # () [GROW.19]
    return slope


def search(loss_at: Callable[[float], float], slope: float, *, amplitude: float = 0.5, tries: int = 30) -> float:
    """Return an amplitude at which the loss falls, or 0 if none is found.

    Good is one at which it falls by at least 1e-4 of what the slope promises (Armijo's rule). The first one is doubled
    if it is good, otherwise halved. That goes on until one is good and the next is not, or no better.
    """
    before = loss_at(0.0)
    best, lowest, factor = 0.0, before, 0.5
    for tried in range(tries):
        loss = loss_at(amplitude)
        if loss < lowest and loss <= before + 1e-4 * amplitude * slope:
            best, lowest = amplitude, loss
            factor = 2.0 if tried == 0 else factor
        elif best > 0.0:
            break
        amplitude = factor * amplitude
    return best
