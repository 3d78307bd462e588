"""One factorisation of the Gram matrix for all queries of a head: F with F G F^T = 1.

In the features w(x) = F g(x) of a point, the systems of `dense.update` have as many unknowns as there are transitions::

    N = W F,  Z = W W^T,  A = A' F,  Y = Y' F^-T,  G^-1 = F^T F        with W of the rows w(x_l)
    stein        (Z + ridge / g_o) A'_o = Y'_o     for each column o, where G = V g V^T and F = g^-1/2 V^T
    separable    (Z + ridge) A' = Y'               with any F

Where the future is hidden, the systems of a query are those of the leading part of G. The Cholesky factor of a leading
part is the leading part of the Cholesky factor, so that F = L^-1 serves all queries: each takes the features that it
sees. This is for "separable"; the shifts ridge / g_o of "stein" are other ones for each query.

Letters: b batch, h head, i query of a chunk, l transition, o observable, or one of as many features.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.ops.solve import identity, solve
from refattn.xp import Array, concrete, namespace, zeros

BLOCK = 16
"""Rows of a triangular matrix that are inverted one after the other."""


@dataclass(frozen=True)
class Whitening:
    """F, and for a fit of "stein" the eigenvalues of G, which F is then made of."""

    factor: Array  # (b, h, o, o)
    gains: Array | None  # (b, h, 1, 1, o)

    def features(self, sections: Array) -> Array:
        """Return F g (b, h, i, o) for sections g (b, h, i, o)."""
        return sections @ namespace(sections).matrix_transpose(self.factor)

    def back(self, features: Array) -> Array:
        """Return F^T w (b, h, i, o) for features w (b, h, i, o)."""
        return features @ self.factor


def whiten(gram: Array, stein: bool, width: int = 0) -> Whitening:
    """Return the whitening of G (b, h, o, o): by eigenvectors for a fit of "stein", otherwise by Cholesky's factor.

    The last `width` observables, the coordinates, come first in Cholesky's factor, because every query sees them. Of a
    matrix that is not finite the whitening is NaN.

    Raises
    ------
    ValueError
        Where G is not positive, which takes a jitter that is too small.
    """
    xp = namespace(gram)
    gram, lost = _finite(gram)
    if not stein:
        j = gram.shape[-1] - width
        rows = xp.concat([gram[..., j:, :], gram[..., :j, :]], axis=-2)
        lower = _cholesky(xp.concat([rows[..., j:], rows[..., :j]], axis=-1))
        factor = triangular_inverse(lower) + lost
        return Whitening(xp.concat([factor[..., width:], factor[..., :width]], axis=-1), None)
    values, vectors = xp.linalg.eigh(gram)
    vectors = vectors + lost
    least = float(xp.finfo(gram.dtype).eps) * gram.shape[-1] * values[..., -1:]
    values = xp.where(values > least, values, least)
    return Whitening(xp.matrix_transpose(vectors) / xp.sqrt(values)[..., None], values[..., None, None, :])


def _finite(x: Array) -> tuple[Array, Array]:
    """Return matrices (..., n, n) with the identity for those that are not finite, and NaN (..., 1, 1) for these, or 0.

    Libraries raise where they are given others to factor.
    """
    xp = namespace(x)
    lost = 0.0 * xp.sum(x, axis=(-2, -1), keepdims=True)
    return xp.where(xp.isnan(lost), identity(x.shape[-1], x), x), lost


def _cholesky(gram: Array) -> Array:
    xp = namespace(gram)
    failed: Exception | None = None
    try:
        lower = xp.linalg.cholesky(gram)
        if concrete(xp.all(xp.isfinite(lower))) is not False:
            return lower
    except (ValueError, RuntimeError) as error:  # of these classes are the errors of NumPy and PyTorch
        failed = error
    raise ValueError(
        'jitter: the Gram matrix of the keys is not positive to rounding, needs a larger jitter, or "dense"'
    ) from failed


def triangular_inverse(lower: Array) -> Array:
    """Return the inverse of lower triangular matrices (..., n, n); its row i reads no row after i.

    Blocks on the diagonal are inverted row by row, all at once; then neighbours are joined, [[A, 0], [C, B]] having the
    inverse [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
    """
    xp, size = namespace(lower), lower.shape[-1]
    front, blocks = lower.shape[:-2], 1
    while blocks * BLOCK < size:
        blocks *= 2
    padded = _padded(lower, blocks * BLOCK)

    def diagonal(width: int, above: bool) -> Array:
        """Return the blocks on the diagonal (..., blocks, width, width), or those beside them."""
        count = blocks * BLOCK // width
        parts = []
        for n in range(0, count, 1 if above else 2):
            row = n if above else n + 1
            parts.append(padded[..., row * width : (row + 1) * width, n * width : (n + 1) * width])
        return xp.stack(parts, axis=-3)

    within = diagonal(BLOCK, True)
    rows: list[Array] = []
    for i in range(BLOCK):
        own = zeros((*front, blocks, BLOCK), lower) + identity(BLOCK, lower)[i, :]
        for j in range(i):
            own = own - within[..., i, j][..., None] * rows[j]
        rows.append(own / within[..., i, i][..., None])
    inverse, width = xp.stack(rows, axis=-2), BLOCK
    while inverse.shape[-3] > 1:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ (diagonal(width, False) @ first))
        nothing = xp.zeros_like(corner)
        upper = xp.concat([first, nothing], axis=-1)
        inverse = xp.concat([upper, xp.concat([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :size, :size]


def _padded(x: Array, size: int) -> Array:
    """Return matrices (..., n, n) with ones on a longer diagonal."""
    xp, own = namespace(x), x.shape[-1]
    if own == size:
        return x
    right = zeros((*x.shape[:-2], own, size - own), x)
    below = zeros((*x.shape[:-2], size - own, size), x) + identity(size, x)[own:, :]
    return xp.concat([xp.concat([x, right], axis=-1), below], axis=-2)


def fit(inner: Array, gains: Array | None, ridge: Array, targets: Array) -> Array:
    """Return A' (b, h, i, l, o) for Z = `inner` (b, h, i, l, l) and Y' = `targets`; its adjoint is the same map.

    `ridge` broadcasts to (b, h, i, 1, 1); `gains` are those of a fit of "stein".
    """
    xp = namespace(inner, targets)
    if gains is None:
        targets = targets + 0.0 * ridge  # with the axis in front that ridges by coordinate have
        return solve(inner + ridge * identity(inner.shape[-1], inner), targets)
    inner, lost = _finite(inner)
    values, vectors = xp.linalg.eigh((inner + xp.matrix_transpose(inner)) / 2.0)
    vectors = vectors + lost
    positive = xp.where(values > 0.0, values, 0.0)[..., None]
    return vectors @ ((xp.matrix_transpose(vectors) @ targets) / (positive + ridge / gains))
