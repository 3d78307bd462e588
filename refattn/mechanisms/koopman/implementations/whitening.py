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

from refattn.mechanisms.koopman.options.limited import cholesky, finite
from refattn.ops.solve import identity, solve, unit_lower
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Whitening:
    """F, and for a fit of "stein" the eigenvalues of G, which F is then made of."""

    factor: Array  # (b, h, o, o)
    gains: Array | None  # (b, h, 1, 1, o)
    size: Array | None = None  # (b, h, 1): |G|

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
    gram, lost = finite(gram, identity(gram.shape[-1], gram))
    size = xp.linalg.matrix_norm(gram)[..., None]
    if not stein:
        j = gram.shape[-1] - width
        rows = xp.concat([gram[..., j:, :], gram[..., :j, :]], axis=-2)
        lower = cholesky(xp.concat([rows[..., j:], rows[..., :j]], axis=-1), '"dense"')
        factor = triangular_inverse(lower) + lost
        return Whitening(xp.concat([factor[..., width:], factor[..., :width]], axis=-1), None, size)
    values, vectors = xp.linalg.eigh(gram)
    vectors = vectors + lost
    least = float(xp.finfo(gram.dtype).eps) * gram.shape[-1] * values[..., -1:]
    values = xp.where(values > least, values, least)
    return Whitening(xp.matrix_transpose(vectors) / xp.sqrt(values)[..., None], values[..., None, None, :], size)


def triangular_inverse(lower: Array) -> Array:
    """Return the inverse of lower triangular matrices (..., n, n); its row i reads no row after i."""
    diagonal = namespace(lower).linalg.diagonal(lower)[..., None]
    return unit_lower(lower / diagonal, identity(lower.shape[-1], lower) / diagonal)


def fit(inner: Array, gains: Array | None, ridge: Array, targets: Array) -> Array:
    """Return A' (b, h, i, l, o) for Z = `inner` (b, h, i, l, l) and Y' = `targets`; its adjoint is the same map.

    `ridge` broadcasts to (b, h, i, 1, 1); `gains` are those of a fit of "stein".
    """
    xp = namespace(inner, targets)
    if gains is None:
        targets = targets + 0.0 * ridge  # with the axis in front that ridges by coordinate have
        return solve(inner + ridge * identity(inner.shape[-1], inner), targets)
    inner, lost = finite(inner)
    values, vectors = xp.linalg.eigh((inner + xp.matrix_transpose(inner)) / 2.0)
    vectors = vectors + lost
    positive = xp.where(values > 0.0, values, 0.0)[..., None]
    return vectors @ ((xp.matrix_transpose(vectors) @ targets) / (positive + ridge / gains))
