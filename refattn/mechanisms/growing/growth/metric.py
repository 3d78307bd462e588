"""The direction of steepest descent in the metric of the scores: D with T(D) = N.

A change E of the kernel changes the loss by <N, E>, and the squares of all scores' changes sum to <E, T(E)>. Among all
E of one size the loss falls most along -D. There are three metrics. The exact one is T itself, by preconditioned
conjugate gradients. The Kronecker metric has A E A in place of T(E), which is equal if all C_b are. And mean is the
mean of the solutions of single sequences, the report's first choice, kept to reproduce it (it is biased if a sequence
has fewer tokens than widths, and may ascend). With N (dGROW.1), C (GROW.2), and lambda and U the eigenvalues and
eigenvectors of A::

    [GROW.3]  A = C / sqrt(b)                           b sequences
    [GROW.4]  rho_k = sqrt(lambda_k + damping mean(lambda))     W = diag(rho) U^T, and below A is W^T W
    [GROW.8]  D = A^+ N A^+                             exact: T(D) = N; mean: D = mean_b C_b^+ N_b C_b^+

The Kronecker metric may be damped: a multiple of the identity is added to A (GROW.4), so that a change costs something
even along directions that tokens hardly take. Behind a layer normalisation there is such a direction, the mean over the
width, and A has a condition of 1e9 there; columns along it would be so long that the next steps of a training ruin it.
The theorems hold for the damped metric as for any other.

The amplitude is measured in what it does to the scores: nu^2 = <D, T(D)> / pairs, and D / nu changes them by a root
mean square of 1. That is exact for `exact`, and for `kron` if all C_b are equal and nothing is masked. With a mask
`pairs` counts the scores that are seen, while A, a product over tokens, has the hidden pairs, too. So nu is then only
about the root mean square (0.7 to 1.1 of it were measured with random causal tokens). It is the unit in which the
amplitude is searched, and no more depends on it.

If keys are centred, their side has an A, and so a W, of its own.

Axes: h head, in width of the augmented tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.mechanisms.growing.growth.statistics import Statistics, apply_metric
from refattn.mechanisms.precision import bound_of, report
from refattn.ops.solve import conjugate_gradients
from refattn.xp import Array, concrete, device, namespace, sum_wide

RIDGE = 1e-6
"""What a ridge adds to A, in units of its mean eigenvalue."""

SINGULAR_FROM = 1e12
"""The condition of A from which a ridge is added."""


@dataclass(frozen=True)
class Factor:
    """A = vectors roots^2 vectors^T on the directions that were seen: a half of the Kronecker metric."""

    vectors: Array  # (in, seen)
    roots: Array  # (seen,)

    @property
    def whitener(self) -> Array:
        """(seen, in): W with W^T W = A."""
        return namespace(self.roots).matrix_transpose(self.vectors * self.roots)

    @property
    def back(self) -> Array:
        """(in, seen): W^+, so that W^+ W^+^T = A^+."""
        return self.vectors / self.roots


@dataclass(frozen=True)
class Metric:
    """The Kronecker metric: a factor for queries and one for keys, the same one unless keys are centred."""

    left: Factor
    right: Factor

    def whiten(self, m: Array) -> Array:
        """(h, in, in) -> (h, seen, seen): a kernel in coordinates in which the metric is that of Frobenius."""
        return self.left.whitener @ m @ namespace(m).matrix_transpose(self.right.whitener)

    def whiten_gradient(self, n: Array) -> Array:
        """(h, in, in) -> (h, seen, seen): the gradient with respect to the whitened kernel."""
        return namespace(n).matrix_transpose(self.left.back) @ n @ self.right.back

    def solve(self, n: Array) -> Array:
        """Return A^+ N A^+."""
        xp = namespace(n)
        left, right = (factor.back @ xp.matrix_transpose(factor.back) for factor in (self.left, self.right))
        return left @ n @ right


@dataclass(frozen=True)
class Direction:
    """D (h, in, in), the size nu of the scores' change by it, the iterations that it took, and |T(D) - N| / |N|."""

    p: Array
    size: float
    iterations: int
    residual: float = 0.0  # of "exact", which iterates


def factor(gram: Array, sequences: int, singular: str = "ridge", damping: float = 0.0) -> Factor:
    """Return the factor of A = gram / sqrt(sequences), to which `damping` times its mean eigenvalue is added.

    `singular` says what becomes of directions that were not seen, where A is numerically singular: "ridge" keeps them,
    at the price of a small error elsewhere, "drop" cuts them off, and with them what a kernel has there.
    """
    xp = namespace(gram)
    a = gram / math.sqrt(sequences)  # (in, in) [GROW.3]
    values, vectors = xp.linalg.eigh(a)  # (in), (in, in)
    width = values.shape[0]
    largest = values[-1]
    if singular == "ridge" and concrete(values[0] * SINGULAR_FROM < largest):
        values = xp.where(values > 0.0, values, 0.0) + RIDGE * xp.mean(values)
    cut = width * xp.finfo(values.dtype).eps * largest
    seen = int(xp.sum(xp.astype(values > cut, xp.int64)))  # the last ones: eigh sorts them
    if not seen:
        raise ValueError("statistics: got tokens that are all 0, needs some that are not")
    damped = values + damping * xp.mean(values) if damping else values  # (in)
    roots = xp.sqrt(damped[width - seen :])  # [GROW.4]
    return Factor(vectors[:, width - seen :], roots)


def kronecker(
    statistics: Statistics, *, center_keys: bool = False, singular: str = "ridge", damping: float = 0.0
) -> Metric:
    """Return the Kronecker metric of the statistics."""
    left = factor(statistics.gram, statistics.sequences, singular, damping)
    if not center_keys:
        return Metric(left, left)
    if statistics.masked:
        raise ValueError("center_keys: got True with a mask, needs False: hidden keys have no mean")
    return Metric(left, factor(statistics.gram_keys, statistics.sequences, singular, damping))


def direction(
    statistics: Statistics,
    how: str = "kron",
    *,
    metric: Metric | None = None,
    center_keys: bool = False,
    tolerance: float = 1e-8,
    iterations: int = 200,
) -> Direction:
    """Return D and its size.

    Parameters
    ----------
    statistics
        Of `observe`; kept ones for "exact" and "mean".
    how
        "exact", "kron" or "mean".
    metric
        The Kronecker metric, where there is one already: for "exact" it is the preconditioner.
    center_keys
        Whether changes that are constant along a row of scores, which a softmax does not see, cost nothing.
    tolerance, iterations
        Where the conjugate gradients stop.

    Warns
    -----
    PrecisionWarning
        Where the conjugate gradients end with a residual above 1e-6 of N in float64, or 1e-2 in float32.

    Raises
    ------
    PrecisionError
        Where they end with one above half of N.
    ValueError
        Where the metric needs sequences that were not kept.
    """
    metric = metric or kronecker(statistics, center_keys=center_keys)
    n, count, residual = statistics.gradient, 0, 0.0
    if how == "kron":
        p = metric.solve(n)  # (h, in, in) [GROW.8]
        whitened = metric.whiten_gradient(n)
        square = _inner(whitened, whitened)  # <D, A D A>, which would be noise where A is ill-conditioned
    elif how == "exact":

        def operator(z: Array) -> Array:
            return apply_metric(statistics, z, center_keys=center_keys)

        solved = conjugate_gradients(operator, n, metric.solve, tolerance=tolerance, iterations=iterations)
        p, count = solved  # (h, in, in) [GROW.8]
        square, missing, size = _inner(p, n), operator(p) - n, _inner(n, n)
        residual = math.sqrt(_inner(missing, missing) / size) if size > 0.0 else 0.0
        error = namespace(n).asarray(residual, dtype=n.dtype, device=device(n))
        report("residual", error, bound_of(n), "more iterations, or a damped metric", stacklevel=2)
    else:
        p = mean_of_sequences(statistics)  # (h, in, in) [GROW.8]
        square = _inner(p, apply_metric(statistics, p, center_keys=center_keys))
    return Direction(p, math.sqrt(max(square, 0.0) / max(statistics.pairs, 1.0)), count, residual)


def mean_of_sequences(statistics: Statistics, kernel: Array | None = None) -> Array:
    """Return mean_b C_b^+ N_b C_b^+, in which C_b^+ = X_b^+ X_b^+^T and N_b = X_b^T G_b X_b give X_b^+ G_b X_b^+^T.

    With a kernel M (h, in, in): mean_b X_b^+ (X_b M X_b^T + G_b) X_b^+^T.
    """
    xp = namespace(statistics.gradient)
    total = 0.0 * statistics.gradient
    for kept in statistics.remembered:
        # From the tokens' own pseudo-inverse: squaring them first would square their condition.
        of_tokens = xp.linalg.pinv(kept.tokens)
        inverse = (of_tokens @ xp.matrix_transpose(of_tokens))[:, None, :, :]
        total = total + xp.sum(inverse @ kept.gradient @ inverse, axis=0)
        if kernel is not None:
            seen = (of_tokens @ kept.tokens)[:, None, :, :]  # X^+ X, onto the tokens
            total = total + xp.sum(seen @ kernel @ seen, axis=0)
    return total / statistics.sequences


def _inner(a: Array, b: Array) -> float:
    return float(sum_wide(a * b))
