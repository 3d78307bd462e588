"""Kernels of low rank: the truncations of F = M - amplitude D / nu, and the factors that become weights.

A head's kernel is M = scale w_q w_k^T, of a rank of at most its width. Growth wants the kernel M' of rank r nearest to
F (GROW.10), and distance is that of the scores, |E|^2 = <E, T(E)>. Three truncations: frobenius is nearest in the norm
of the weights, which is the report's claim. optimal is nearest in the Kronecker metric A E A, by Eckart and Young, and
so exactly nearest for one sequence, or if all C_b are equal. optimal_als goes on from there with some sweeps of
alternating least squares on <M' - F, T(M' - F)> itself. With W of the metric (GROW.4)::

    [GROW.11]  Z_F = W F W^T
    [GROW.singular_values]  kappa = the singular values of Z_F: Z_F = A_L diag(kappa) A_R^T     frobenius: of F
    [GROW.left_factor]  L_0 = W^+ A_L diag(sqrt(kappa))         the first r columns
    [GROW.right_factor]  R_0 = W^+ A_R diag(sqrt(kappa))        the first r columns; M' = L_0 R_0^T

If r reaches the width of the augmented tokens, nothing is truncated: L_0 = F and R_0 = 1, the trivial factorisation. It
also keeps what F has along directions that no token had, and needs no sweep.

Then the factors are balanced, and turned so that their columns lie as near as can be to the columns that there were:
the state that an optimiser keeps of these goes on to mean something. With L_0 = Q_L T_L and R_0 = Q_R T_R, columns of Q
orthonormal, and X diag(tau) Y^T the singular value decomposition of T_L T_R^T::

    [GROW.14]  L = Q_L X diag(sqrt(tau))                L^T L = R^T R = diag(tau), and L R^T = M'
    [GROW.15]  R = Q_R Y diag(sqrt(tau))                spare columns: random in L, 0 in R
    [GROW.16]  O = B_L B_R^T                            for B_L diag(beta) B_R^T = L^T w_q + R^T w_k of the old weights
    [GROW.17]  w_q' = L O / sqrt(scale)
    [GROW.18]  w_k' = R O / sqrt(scale)

The old weights have columns of zeros where the new ones will be. So GROW.16 says of the new columns only that they are
orthogonal to the others before they are stretched: they may be turned among themselves, in L O and R O at once, and a
single one may change its sign. Which of these one gets follows from the sign rule of `svd`, which fixes the columns of
L and R, and from how LAPACK completes B_L. Kernels and old columns are the same for all of them: who compares growths
compares these.

Axes: h head, in width of the augmented tokens, r rank.

Source: Eckart and Young 1936; Friedland and Torokhti 2007; Schoenemann 1966 for the turn.
"""

from __future__ import annotations

import math

from refattn import philox
from refattn.mechanisms.growing.growth.metric import Factor, Metric
from refattn.mechanisms.growing.growth.statistics import Statistics, apply_metric, change_of_scores
from refattn.ops.solve import conjugate_gradients
from refattn.xp import Array, backend, concrete, device, namespace, zeros

SWEEPS = 3
"""Sweeps of alternating least squares: what more of them gain is below a thousandth of the distance."""

NOISE = 1e-13
"""The part of the square of all scores of a kernel below which a change of it is rounding."""


def svd(x: Array) -> tuple[Array, Array, Array]:
    """Return (u, sigma, v) with x = u diag(sigma) v^T and signs that are always the same: the largest entry of a column
    of u is positive.

    Vectors whose singular value is 0 keep what freedom they have: only the signs of the two sides are changed together.
    """
    xp = namespace(x)
    u, sigma, v = xp.linalg.svd(x, full_matrices=False)
    highest, lowest = xp.max(u, axis=-2, keepdims=True), xp.min(u, axis=-2, keepdims=True)
    signs = xp.where(highest >= -lowest, xp.ones_like(highest), -1.0)
    return u * signs, sigma, xp.matrix_transpose(v) * signs


def truncate(
    f: Array, rank: int, how: str, metric: Metric, statistics: Statistics | None = None
) -> tuple[Array, Array]:
    """Return factors (L_0, R_0), both (h, in, at most `rank`), of a kernel of this rank near F (h, in, in).

    Parameters
    ----------
    f
        The kernel before.
    rank
        The largest rank of the kernel after.
    how
        "frobenius", "optimal" or "optimal_als".
    metric
        The Kronecker metric.
    statistics
        For "optimal_als": with the sequences kept.

    Raises
    ------
    ValueError
        Where the truncation needs sequences that were not kept.
    """
    if rank >= f.shape[2]:
        xp = namespace(f)
        one = xp.eye(f.shape[2], dtype=f.dtype, device=device(f))  # (in, in)
        left, right = f, xp.broadcast_to(one, f.shape)  # [GROW.left_factor], [GROW.right_factor]
        return left, right
    if how == "frobenius":
        return _leading(f, rank)
    whitened = metric.whiten(f)  # (h, in, in) [GROW.11]
    u_roots, v_roots = _leading(whitened, rank)
    left, right = metric.left.back @ u_roots, metric.right.back @ v_roots  # [GROW.left_factor], [GROW.right_factor]
    if how == "optimal":
        return left, right
    if statistics is None:
        raise ValueError(f"statistics: got None, needs them with how {how!r}")
    return alternate(f, left, right, metric, statistics)[:2]


def _leading(f: Array, rank: int) -> tuple[Array, Array]:
    u, sigma, v = svd(f)  # (h, in, in), (h, in) [GROW.singular_values]
    roots = namespace(f).sqrt(sigma[..., None, :rank])
    return u[..., :rank] * roots, v[..., :rank] * roots


def distance(f: Array, left: Array, right: Array, statistics: Statistics) -> float:
    """Return <M' - F, T(M' - F)> for M' = L_0 R_0^T, the square of the distance of all scores."""
    return change_of_scores(statistics, left @ namespace(f).matrix_transpose(right) - f)


def alternate(
    f: Array, left: Array, right: Array, metric: Metric, statistics: Statistics, sweeps: int = SWEEPS
) -> tuple[Array, Array, list[float]]:
    """Return better factors by alternating least squares, and the distances before and after each sweep.

    With R fixed and orthonormal, L solves T(L R^T) R = T(F) R; and so for R. A step starts from the factor that there
    is. A sweep after which the distance is not smaller is not taken: where few tokens have few scores, factors meet
    them all, and what is left is rounding. It ends there, or where the distance falls by less than `NOISE` of |F|^2.
    """
    distances = [distance(f, left, right, statistics)]
    enough = NOISE * change_of_scores(statistics, f)
    for _ in range(sweeps):
        new_left, fixed = _half(f, left, right, statistics, metric, swap=False)
        new_right, new_left = _half(f, fixed, new_left, statistics, metric, swap=True)
        reached = distance(f, new_left, new_right, statistics)
        if not reached < distances[-1]:
            break
        left, right = new_left, new_right
        distances.append(reached)
        if distances[-2] - reached <= enough:
            break
    return left, right, distances


def _half(
    f: Array, moving: Array, fixed: Array, statistics: Statistics, metric: Metric, *, swap: bool
) -> tuple[Array, Array]:
    """Return the moving factor that is best for a fixed one, and that one with orthonormal columns."""
    xp = namespace(f)
    fixed, triangle = xp.linalg.qr(fixed)
    moving = moving @ xp.matrix_transpose(triangle)
    own, other = (metric.right, metric.left) if swap else (metric.left, metric.right)
    # The side that moves is preconditioned by A^+, the fixed one by what A is on its columns.
    outer = own.back @ xp.matrix_transpose(own.back)
    projected = other.whitener @ fixed
    inner = xp.linalg.pinv(xp.matrix_transpose(projected) @ projected)

    def kernel(x: Array) -> Array:
        return fixed @ xp.matrix_transpose(x) if swap else x @ xp.matrix_transpose(fixed)

    def pulled(z: Array) -> Array:
        image = apply_metric(statistics, z)
        return (xp.matrix_transpose(image) if swap else image) @ fixed

    change, _ = conjugate_gradients(
        lambda x: pulled(kernel(x)),
        pulled(f - kernel(moving)),
        lambda x: outer @ x @ inner,
        tolerance=1e-10,
        relative_to=pulled(f),
    )
    return moving + change, fixed


def balance(left: Array, right: Array, width: int, seed: int = 0) -> tuple[Array, Array]:
    """Return factors (h, in, width) of the same kernel with L^T L = R^T R, diagonal and falling.

    Where the kernel has a lower rank than the width, L has random columns in place of zeros, as long as the others are
    in the mean, and R has zeros. Zeros in both would never get a gradient.
    """
    xp = namespace(left)
    (q_left, r_left), (q_right, r_right) = xp.linalg.qr(left), xp.linalg.qr(right)
    u, sigma, v = svd(r_left @ xp.matrix_transpose(r_right))
    inputs, rank = left.shape[1], sigma.shape[-1]
    roots = xp.sqrt(sigma)[..., None, :]
    left, right = q_left @ u * roots, q_right @ v * roots  # [GROW.14], [GROW.15]
    if width > rank:
        pad = zeros((left.shape[0], inputs, width - rank), left)
        left, right, sigma = (
            xp.concat([left, pad], axis=2),
            xp.concat([right, pad], axis=2),
            xp.concat([sigma, pad[:, 0, :]], axis=1),
        )
    dead = (sigma <= inputs * xp.finfo(left.dtype).eps * sigma[:, :1])[:, None, :]
    if concrete(xp.any(dead)) is False:
        return left, right
    size = xp.sqrt(xp.mean(xp.sum(left * left, axis=1, keepdims=True), axis=2, keepdims=True))
    columns = random_columns(left.shape[0], inputs, width, width, seed, left)
    fresh = xp.where(size > 0.0, size, 1.0) * columns
    return xp.where(dead, fresh, left), xp.where(dead, 0.0, right)


def align(left: Array, right: Array, w_q: Array, w_k: Array) -> tuple[Array, Array]:
    """Return L O and R O, the same kernel, with the orthogonal O that brings them nearest to w_q and w_k.

    The latter may have fewer columns; they count as having zeros behind them, and how the new columns are turned among
    themselves is then not determined: compare kernels and old columns.
    """
    xp = namespace(left)
    missing = left.shape[2] - w_q.shape[2]
    pad = zeros((*w_q.shape[:2], missing), w_q)
    w_q, w_k = (xp.concat([w, pad], axis=2) for w in (w_q, w_k))
    u, _, v = svd(xp.matrix_transpose(left) @ w_q + xp.matrix_transpose(right) @ w_k)
    turn = u @ xp.matrix_transpose(v)  # [GROW.16]
    w_q, w_k = left @ turn, right @ turn  # [GROW.17], [GROW.18]
    return w_q, w_k


def random_columns(heads: int, inputs: int, columns: int, width: int, seed: int, like: Array) -> Array:
    """Return (h, in, columns) random columns of unit length in the mean; others for every width that they lead to."""
    drawn = philox.normal((heads, inputs, columns), seed=seed, purpose="growing.columns", step=width)
    draw = drawn / math.sqrt(inputs)
    return backend(like).from_numpy(draw, device=device(like))


def projector(metric_side: Factor, w: Array) -> Array:
    """Return the projector (h, seen, seen) on the whitened columns of w (h, in, d)."""
    xp = namespace(w)
    u, sigma, _ = svd(metric_side.whitener @ w)
    kept = u * xp.astype(sigma > 1e-10 * sigma[:, :1], u.dtype)[:, None, :]
    return kept @ xp.matrix_transpose(kept)
