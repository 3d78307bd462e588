"""Growing attention: if a head is too narrow for the scores that the loss asks for, it gets new columns.

A head makes queries y w_q and keys y w_k of n tokens, the rows of y, without biases and without rotary positions. w_q
and w_k have m rows and d columns. The scores are s = y M y^T, with the kernel M = scale w_q w_k^T of rank d at most;
scale is a constant, which stays as d grows. If the loss asks for scores that no such kernel gives, training cannot
reach them: the head needs more columns. The gradient of the loss with respect to M may have any rank. A growth step
moves M against its gradient, then takes the nearest kernel of rank d + c (both in the metric of part 2). Two factors of
that kernel are the new weights, wider by c columns. The caller does this a few times in a training. Value weights stay.

1. What does the loss ask for? Let ds_ij be the gradient of the loss with respect to the score s_ij, 0 if it is masked;
attention's backward computes it. <X, Y> is the sum of all X_ij Y_ij, or the trace of X^T Y; |X|^2 = <X, X>. If M
changes by E, the scores change by y E y^T, and the loss, to first order, by <ds, y E y^T> = <y^T ds y, E>:

    [GROW.1]  M = scale w_q w_k^T
    [dGROW.1]  N = sum_b y_b^T ds_b y_b                 its gradient; sequences b of a batch; d in an id: a gradient

2. What does a change cost? N is right while scores change little. We charge E with a cost, the sum of the squares of
all changes of scores (of masked ones, too: without them it would not have the form <E, A E A>). Below is the cost in
one sequence b, with C_b = y_b^T y_b, then that in all n_b sequences, where the mean C / n_b replaces each C_b:

    |y_b E y_b^T|^2 = trace(y_b E^T y_b^T y_b E y_b^T) = <E, C_b E C_b>
    in all: about n_b <E, (C / n_b) E (C / n_b)> = <E, A E A> = |V E V^T|^2      if V^T V = A

    [GROW.2]  C = sum_b y_b^T y_b                       how much tokens use each direction
    [GROW.3]  A = C / sqrt(n_b)                         A = U diag(lambda) U^T, its eigenvectors and eigenvalues
    [GROW.4]  rho_r = sqrt(lambda_r + damping mean(lambda))      W = diag(rho) U^T

With damping = 0, W is such a V. But then directions that tokens hardly use would cost almost nothing, and columns along
them be huge. So the cost is |W E W^T|^2 with damping (0.01): W^T W is A + damping mean(lambda) I. Let Z = W E W^T, the
whitened change, so E = W^-1 Z (W^-1)^T. M, N, C, A, W, E, Z, G, H, D and F are m x m.

3. What can old columns not do? The loss changes by <N, E> = <G, Z> (GROW.5). Let w_q and w_k have rank d. If they
change by E_q and E_k, then M changes by scale (E_q w_k^T + w_q E_k^T), to first order, and so

    Z = scale (W E_q) (W w_k)^T + scale (W w_q) (W E_k)^T

W E_q and W E_k may be any matrices. So X is orthogonal to all such Z exactly if X W w_k = 0 and (W w_q)^T X = 0, as <X,
(W E_q) (W w_k)^T> is <X W w_k, W E_q>, and <X, (W w_q) (W E_k)^T> is <(W w_q)^T X, (W E_k)^T>. H (GROW.6) is the part
of G for which that holds; P_q projects orthogonally on the columns of W w_q, P_k on those of W w_k. G - H = P_q G + (I
- P_q) G P_k is such a Z: the first term is W w_q times a matrix, the second a matrix times (W w_k)^T.

    [GROW.5]  G = (W^-1)^T N W^-1                       the gradient with respect to Z
    [GROW.6]  H = (I - P_q) G (I - P_k)                 the part that only new columns can follow
    [GROW.7]  sigma = the singular values of H          sigma_1 is the largest

One new column of w_q and one of w_k add a matrix of rank 1 to Z. Of all these with |Z| = 1 and orthogonal to what old
columns can do, -a_1 b_1^T lowers the loss most (to first order), by sigma_1, where H = sum_r sigma_r a_r b_r^T is the
SVD (<G, Z> = <H, Z> for these Z). A step along -H goes sigma_r far along -a_r b_r^T, where the loss falls by sigma_r
per unit of length: so the r-th new column is worth sigma_r^2. H only says how many; part 4 steps along -G (GROW.19).

How many? The r-th column is added, to every head, if its worth, summed over heads, is more than 2 % of the sum of all
worths (less may be noise of the batch), and more than machine epsilon times the sum of |G|^2 (less may be rounding).
One growth adds at most min(4, m - d) columns, and none if d >= m. Heads share C, A, W and c.

4. The step. Of all Z with |Z| = |G|, -G lowers the loss most. As a change of M it is -D, W D W^T = G. D has the cost
|G|^2, about the sum of the squares of all changes of scores by D. There are `scores` scores, so D / nu changes a score
by about 1 (root mean square; less with a mask, as masked scores have a part in the cost). The step is `amplitude` times
that, a number for all heads that the caller searches (part 7). If G is 0, M stays.

    [GROW.8]  D = W^-1 G (W^-1)^T                       (W^T W)^-1 N (W^T W)^-1: a natural gradient, that of the metric
    [GROW.9]  nu = |G| / sqrt(scores)                   of all heads; scores behind a causal mask do not count; G = 0: 1
    [GROW.10]  F = M - amplitude D / nu                 of any rank
    [GROW.11]  Z_F = W F W^T                            made of F as Z of E
    [GROW.12]  Z_F' = Z_F with its d + c largest singular values alone      nearest to Z_F of this rank (Eckart, Young)
    [GROW.13]  M' = W^-1 Z_F' (W^-1)^T                  the new kernel: |Z_F' - Z_F|^2 is the cost of M' - F

5. Back to weights. M' = L R^T, but also (L T) (R (T^-1)^T)^T for every invertible T. We choose L^T L = R^T R: the
gradient of L is N R (N at M'), that of R is N^T L, so a large L beside a small R hardly learns. An orthogonal matrix O
in both, L O and R O, keeps that, and M'. (So even at amplitude 0 weights move, if w_q^T w_q and w_k^T w_k differ; M
does not.) An optimiser has a state for each column, so old columns should stay in their places: O brings L O and R O
nearest (Procrustes' problem; sqrt(scale) in GROW.17 changes no O) to the old weights with c columns of 0, (w_q, 0) and
(w_k, 0). |L O - (w_q, 0)|^2 + |R O - (w_k, 0)|^2 is least if <O, B> is largest. <O, B> = sum_r beta_r (B_L^T O B_R)_rr
is at most the sum of beta, reached by B_L B_R^T. B ends with c columns of 0, so new columns may rotate.

    [GROW.14]  L = Q_L diag(sqrt(tau))                  M' = Q_L diag(tau) Q_R^T, its singular value decomposition
    [GROW.15]  R = Q_R diag(sqrt(tau))                  so M' = L R^T; d + c columns, as other tau are 0
               B = L^T (w_q, 0) + R^T (w_k, 0) = B_L diag(beta) B_R^T      its singular value decomposition
    [GROW.16]  O = B_L B_R^T
    [GROW.17]  w_q' = L O / sqrt(scale)
    [GROW.18]  w_k' = R O / sqrt(scale)

6. How fast does the loss fall? Let t = amplitude / nu, so Z_F = W M W^T - t G. Let w_q and w_k have rank d. Take two
orthonormal bases: the first d vectors of the left one span the columns of W w_q, those of the right one the columns of
W w_k. In them W M W^T has a first block alone, Z_M, which is d x d and has an inverse, and H a last block alone, G_22:

    Z_F = ( Z_M - t G_11    -t G_12 )
          (     - t G_21    -t G_22 )

Let t |G| be small against the smallest singular value of Z_M. W M W^T is t |G| away from Z_F, the nearest X of rank d +
c no farther, so 2 t |G| at most from W M W^T. So its first block has an inverse, and its rank is d plus that of X_22 -
X_21 X_11^-1 X_12 (Schur complement). X_12 and X_21 are of order t, so their product is of order t^2, and X_22 is within
O(t^2) of a matrix K of rank c. No K is nearer to -t G_22, all of -t H, than t |H_cut|, H_cut = sum_(r > c) sigma_r a_r
b_r^T (one of several if sigma_c = sigma_(c+1)). A matrix with Z_F's other three blocks, and as last block the same
product of these minus t (H - H_cut), has rank d + c and is t |H_cut| + O(t^2) away from Z_F. X is no farther, and |.|^2
is a sum over blocks: so X has Z_F's other blocks but for O(t^1.5), and K / t is, as t falls, as near to -H as can be.
So X is Z_F + t H_cut but for less than order t. The loss changes by -t <G, G - H_cut>, <G, H_cut> = |H_cut|^2:

    [GROW.19]  slope = -(|G|^2 - sum_(r > c) sigma_r^2) / nu      summed over heads: d loss / d amplitude, at 0

The slope is exact for w_q and w_k of rank d, because N is exact. Only the metric is approximate (masks, C_b, damping),
so D is not quite best. In a head with sigma_r = 0 column r of L and R comes of that product alone: its tau is of order
t^2, the column, of its root, of order t (others: sqrt(t)). In a head with G = 0 it is rounding: it hardly learns, but
the next P_q counts it.

7. In code, if loss(w_q, w_k) is the loss of a batch and d_scores its gradient with respect to the scores:

    heads = heads_of(w_q, w_k, scale=scale)
    planned = plan(heads, observe(y, d_scores))  # causal=True if scores have a causal mask
    c = columns_of(planned)  # if 0, no new column is worth it: stop here
    amplitude = search(lambda a: loss(*grow(heads, planned, columns=c, amplitude=a)), slope_of(planned, c))
    if amplitude > 0.0:  # at 0, new columns would be rounding in both factors, and hardly learn
        w_q, w_k = grow(heads, planned, columns=c, amplitude=amplitude)

Axes: b sequence, h head, i and j token, m width of tokens, d width of a head, u = d + c. From L. Burgund (Attention
Growing Networks, internship report at LISN, 2025, sections 1 and 2): the kernel, its gradient, a step that is measured
in scores, the cut to a rank. From M. Verbockhaven et al. (Growing Tiny Networks, arXiv:2405.19816): GROW.6. Ours: the
step goes down (the report moves M by +D), the cut is nearest in scores (there: in weights), damping, how many columns,
GROW.16 (after P. Schoenemann 1966), the search. See docs/deviations.md, docs/experiments/growing.md.

If the loss is minus the sum of s_ii, ds = -I. y = I, so N = -I, A = I and G = -I / 1.01. Old columns can follow the
first row and column of G; sigma is (1 / 1.01, 1 / 1.01, 0), and two columns are added:

    >>> import numpy as np; from refattn.mechanisms.growing.definition import columns_of, heads_of, observe, plan
    >>> y, w = np.eye(3)[None], np.eye(3)[None, :, :1]  # tokens (1, 3, 3), weights (1, 3, 1)
    >>> columns_of(plan(heads_of(w, w, scale=1.0), observe(y, d_scores=-y[None])))
    2
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
    """What growth reads of a batch. For the sum of the losses of several batches, add them field by field."""

    gradient: Array  # N
    gram: Array  # C
    sequences: int  # n_b
    scores: int


class Plan(NamedTuple):
    """Where the kernels would go, and what new columns are worth."""

    whiten: Array  # W
    unwhiten: Array  # W^-1
    whitened_gradient: Array  # G
    sigma: Array
    room: int  # m - d
    direction: Array  # D
    unit: Array  # nu


def heads_of(w_q: Array, w_k: Array, *, scale: float) -> Heads:
    """Return the heads of w_q and w_k (h, m, d)."""
    kernel = scale * w_q @ transpose(w_k)  # (h, m, m) [GROW.1]
    return Heads(w_q, w_k, scale, kernel)


def observe(y: Array, d_scores: Array, *, causal: bool = False) -> Statistics:
    """Return the statistics of tokens y (b, i, m) and the gradient ds (b, h, i, j) of their scores."""
    xp, (b, h, n, _) = namespace(y, d_scores), d_scores.shape
    tokens = y[:, None, :, :]  # (b, 1, i, m)
    # forward: scores = tokens @ kernel @ transpose(tokens)
    gradient = xp.sum(transpose(tokens) @ d_scores @ tokens, axis=0)  # (h, m, m) [dGROW.1]
    gram = xp.sum(transpose(y) @ y, axis=0)  # (m, m) [GROW.2]
    scores = b * h * (n * (n + 1) // 2 if causal else n * n)
    return Statistics(gradient, gram, b, scores)


def plan(heads: Heads, statistics: Statistics, *, damping: float = 0.01) -> Plan:
    """Return where the kernels would go, and what new columns would be worth."""
    xp = namespace(heads.kernel)
    metric = statistics.gram / math.sqrt(statistics.sequences)  # (m, m) [GROW.3]
    values, vectors = xp.linalg.eigh(metric)  # (m), (m, m)
    roots = xp.sqrt(values + damping * xp.mean(values))  # (m) [GROW.4]
    whiten, unwhiten = transpose(vectors * roots), vectors / roots  # (m, m): W, (m, m): W^-1
    gradient = transpose(unwhiten) @ statistics.gradient @ unwhiten  # (h, m, m) [GROW.5]
    span_q, _ = xp.linalg.qr(whiten @ heads.w_q)  # (h, m, d): P_q = span_q @ span_q^T
    span_k, _ = xp.linalg.qr(whiten @ heads.w_k)  # (h, m, d)
    outside_q = gradient - span_q @ (transpose(span_q) @ gradient)  # (h, m, m): (I - P_q) G
    outside = outside_q - (outside_q @ span_k) @ transpose(span_k)  # (h, m, m) [GROW.6]
    sigma = xp.linalg.svdvals(outside)  # (h, m) [GROW.7]
    direction = unwhiten @ gradient @ transpose(unwhiten)  # (h, m, m) [GROW.8]
    square = xp.sum(gradient * gradient)  # (): |G|^2 of all heads
    unit = xp.where(square > 0.0, xp.sqrt(square / statistics.scores), 1.0)  # () [GROW.9]
    room = max(0, heads.w_q.shape[1] - heads.w_q.shape[2])
    return Plan(whiten, unwhiten, gradient, sigma, room, direction, unit)


def columns_of(planned: Plan, *, share: float = 0.02, most: int = 4) -> int:
    """Return c, how many new columns are worth more than a `share` of the worth of all, at most `most`."""
    xp = namespace(planned.sigma)
    worths = xp.sum(planned.sigma * planned.sigma, axis=0)  # (m): of all heads
    rounding = xp.finfo(worths.dtype).eps * xp.sum(planned.whitened_gradient**2)  # (): of |G|^2
    enough = (worths > share * xp.sum(worths)) & (worths > rounding)  # (m)
    return min(most, planned.room, int(xp.sum(xp.astype(enough, xp.int64))))


def grow(heads: Heads, planned: Plan, *, columns: int, amplitude: float) -> tuple[Array, Array]:
    """Return w_q and w_k (h, m, u) with `columns` new columns, after a step of this amplitude."""
    (w_q, w_k, scale, kernel), whiten, unwhiten = heads, planned.whiten, planned.unwhiten
    xp, (h, m, d) = namespace(kernel), w_q.shape
    width = d + columns
    moved = kernel - amplitude * planned.direction / planned.unit  # (h, m, m) [GROW.10]
    whitened = whiten @ moved @ transpose(whiten)  # (h, m, m) [GROW.11]
    left, values, right = xp.linalg.svd(whitened)  # (h, m, m), (h, m), (h, m, m): right is transposed
    cut = (left * values[:, None, :])[:, :, :width] @ right[:, :width, :]  # (h, m, m) [GROW.12]
    grown = unwhiten @ cut @ transpose(unwhiten)  # (h, m, m) [GROW.13]
    q_l, tau, q_r = xp.linalg.svd(grown)  # (h, m, m), (h, m), (h, m, m): q_r is transposed
    roots = xp.sqrt(tau[:, None, :width])  # (h, 1, u)
    of_q = q_l[:, :, :width] * roots  # (h, m, u) [GROW.14]
    of_k = transpose(q_r)[:, :, :width] * roots  # (h, m, u) [GROW.15]
    old_q, old_k = (xp.concat([w, zeros((h, m, columns), w)], axis=2) for w in (w_q, w_k))  # (h, m, u), (h, m, u)
    b_l, _, b_r = xp.linalg.svd(transpose(of_q) @ old_q + transpose(of_k) @ old_k)  # (h, u, u), -, (h, u, u): B_R^T
    orthogonal = b_l @ b_r  # (h, u, u) [GROW.16]
    new_q = of_q @ orthogonal / math.sqrt(scale)  # (h, m, u) [GROW.17]
    new_k = of_k @ orthogonal / math.sqrt(scale)  # (h, m, u) [GROW.18]
    return new_q, new_k


def slope_of(planned: Plan, columns: int) -> Array:
    """Return the derivative of the loss with respect to the amplitude, at 0, for `columns` new columns."""
    xp = namespace(planned.sigma)
    followed = xp.sum(planned.whitened_gradient**2) - xp.sum(planned.sigma[:, columns:] ** 2)  # ()
    slope = -followed / planned.unit  # () [GROW.19]
    return slope


def search(loss_at: Callable[[float], float], slope: float, *, amplitude: float = 0.5, tries: int = 30) -> float:
    """Return an amplitude at which the loss falls, or 0 if none is found (a line search).

    An amplitude is good if the loss falls by at least 1e-4 times amplitude times |slope| (Armijo's rule). If the first
    one is good, amplitudes are doubled as long as each is good and better than the last; otherwise they are halved,
    until one is good and the next one is not better.
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
