"""The derivatives of factorisations, of matrices that have them.

Where eigenvalues or singular values are equal to rounding any basis of their space will do, and most of them have no
derivative. The rule then exchanges the vectors for those that do: the ones which diagonalise the tangent within that
space. This is right for every function that does not depend on the choice of the basis. Where they are only nearly
equal the tangent loses digits, and a warning says by how much it may be off. Vectors of singular values that are 0
count as constants. QR is of full column rank, the pseudo-inverse of a rank that does not change. Sources: Giles 2008
(An extended collection of matrix derivative results), Lancaster 1964 (On eigenvalues of matrices dependent on a
parameter) for equal eigenvalues, Walter and Lehmann 2010 for QR, Golub and Pereyra 1973 for the pseudo-inverse.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from refattn.instruments.rules import rule, times

LOST = 1e-6
"""The relative error of a tangent, for want of a gap between eigenvalues, beyond which a warning says so."""


def _h(x: Any) -> Any:
    return np.conj(np.matrix_transpose(x))


def _over(differences: Any) -> Any:
    """Return 1 / differences, 0 where there is none."""
    return np.where(differences == 0.0, 0.0, 1.0 / np.where(differences == 0.0, 1.0, differences))


def _real_diagonal(x: Any) -> Any:
    return np.real(np.linalg.diagonal(x))


@rule("solve")
def _solve(r: Any, given: Any, options: Any, t: Any) -> Any:
    a, b = given
    # a r = b, hence a dr = db - da r
    right = (t[1] if isinstance(b, np.ndarray) else 0.0) - (t[0] @ r if isinstance(a, np.ndarray) else 0.0)
    return np.linalg.solve(a, right)


@rule("inv")
def _inv(r: Any, given: Any, options: Any, t: Any) -> Any:
    return -(r @ t[0] @ r)


@rule("pinv")
def _pinv(r: Any, given: Any, options: Any, t: Any) -> Any:
    a, d = given[0], t[0]
    rows, columns = d - a @ (r @ d), d - (d @ r) @ a
    return -(r @ d @ r) + r @ _h(r) @ _h(rows) + _h(columns) @ _h(r) @ r


@rule("det")
def _det(r: Any, given: Any, options: Any, t: Any) -> Any:
    return r * np.linalg.trace(np.linalg.solve(given[0], t[0]))


@rule("slogdet")
def _slogdet(r: Any, given: Any, options: Any, t: Any) -> Any:
    if np.iscomplexobj(given[0]):
        raise NotImplementedError("slogdet: of complex matrices has no rule for a tangent")
    return type(r)(np.zeros_like(r[0]), np.linalg.trace(np.linalg.solve(given[0], t[0])))


@rule("cholesky")
def _cholesky(r: Any, given: Any, options: Any, t: Any) -> Any:
    lower = _h(r) if options.get("upper") else r
    within = np.linalg.solve(lower, _h(np.linalg.solve(lower, (t[0] + _h(t[0])) / 2.0)))
    half = np.tril(within, -1) + 0.5 * np.eye(lower.shape[-1]) * within
    return _h(lower @ half) if options.get("upper") else lower @ half


def _rounding(values: Any) -> Any:
    """Return the rounding of the largest eigenvalue or singular value (..., 1)."""
    return np.finfo(values.dtype).eps * np.max(np.abs(values), axis=-1, keepdims=True, initial=0.0)


def _bases(values: Any, within: Any) -> tuple[Any, Any]:
    """Return how to turn the vectors of equal `values`, (..., n, n), and 1 / (l_j - l_i), 0 between equal ones.

    `within` (..., n, n) is the tangent between vectors, Hermitian. It is diagonal in the space of equal values once the
    vectors are turned.
    """
    apart = np.abs(np.diff(values, axis=-1)) > 8.0 * values.shape[-1] * _rounding(values)
    space = np.cumsum(np.insert(apart, 0, False, axis=-1), axis=-1)  # which one a vector belongs to
    turn = np.zeros_like(within) + np.eye(values.shape[-1])
    for place in map(tuple, np.argwhere(~np.all(apart, axis=-1))):
        for which in range(space[place][-1] + 1):
            own = np.ix_(*2 * [np.flatnonzero(space[place] == which)])
            turn[place][own] = np.linalg.eigh(within[place][own])[1]
    over = _over(values[..., None, :] - values[..., :, None]) * (space[..., None, :] != space[..., :, None])
    return turn, over


def _say_lost(name: str, values: Any, within: Any, over: Any) -> None:
    """Warn where the tangents of vectors have lost digits."""
    size = np.max(np.abs(within), initial=0.0)
    lost = np.max(np.abs(over * within) * _rounding(values)[..., None], initial=0.0)
    if lost > LOST * size:
        said = f"{name}: values nearly equal, the tangent may be off by {lost / size:.0e} of it"
        warnings.warn(said, RuntimeWarning, stacklevel=2)


@rule("eigh")
def _eigh(r: Any, given: Any, options: Any, t: Any) -> Any:
    values, vectors = r
    within = _h(vectors) @ ((t[0] + _h(t[0])) / 2.0) @ vectors
    turn, over = _bases(values, within)
    _say_lost("eigh", values, within, over)
    vectors[...] = vectors @ turn
    within = _h(turn) @ within @ turn
    return type(r)(_real_diagonal(within), vectors @ (over * within))


@rule("eigvalsh")
def _eigvalsh(r: Any, given: Any, options: Any, t: Any) -> Any:
    vectors = np.linalg.eigh(given[0])[1]
    within = _h(vectors) @ ((t[0] + _h(t[0])) / 2.0) @ vectors
    turn, _ = _bases(r, within)
    return _real_diagonal(_h(turn) @ within @ turn)


@rule("qr")
def _qr(r: Any, given: Any, options: Any, t: Any) -> Any:
    q, upper = r
    if upper.shape[-2] != upper.shape[-1] or q.shape[-1] != upper.shape[-1]:
        raise NotImplementedError("qr: of a matrix with more columns than rows has no rule for a tangent")
    x = _h(np.linalg.solve(_h(upper), _h(t[0])))  # dA R^-1
    within = _h(q) @ x
    below = np.tril(within, -1)
    turn = below - _h(below) + 1j * np.eye(x.shape[-1]) * np.imag(within) if np.iscomplexobj(x) else below - _h(below)
    return type(r)(x - q @ within + q @ turn, (within - turn) @ upper)


@rule("svd")
def _svd(r: Any, given: Any, options: Any, t: Any) -> Any:
    u, s, vh = r
    if options.get("full_matrices", True) and u.shape[-1] != vh.shape[-2]:
        raise NotImplementedError("svd: with full_matrices=True has no rule for a tangent")
    if np.iscomplexobj(u):
        raise NotImplementedError("svd: of complex matrices has no rule for a tangent")
    within = _h(u) @ t[0] @ _h(vh)
    even = (within + _h(within)) / 2.0
    turn, over_gaps = _bases(s, even)
    _say_lost("svd", s, even, over_gaps)
    u[...], vh[...] = u @ turn, _h(turn) @ vh
    v, d, within = _h(vh), t[0], _h(turn) @ within @ turn
    # the even part moves u and v alike, as eigenvectors; the odd part turns them against each other
    s = np.where(s > 8.0 * s.shape[-1] * _rounding(s), s, 0.0)
    even, odd = (within + _h(within)) / 2.0, (within - _h(within)) / 2.0
    alike, against = over_gaps * even, _over(s[..., None, :] + s[..., :, None]) * odd
    over = _over(s)[..., None, :]
    d_u = u @ (alike + against) + (d @ v - u @ within) * over
    d_v = v @ (alike - against) + (_h(d) @ u - v @ _h(within)) * over
    return type(r)(d_u, _real_diagonal(within), _h(d_v))


@rule("svdvals")
def _svdvals(r: Any, given: Any, options: Any, t: Any) -> Any:
    u, s, vh = np.linalg.svd(given[0], full_matrices=False)
    within = _h(u) @ t[0] @ _h(vh)
    turn, _ = _bases(s, (within + _h(within)) / 2.0)
    return _real_diagonal(_h(turn) @ within @ turn)


@rule("matrix_norm")
def _matrix_norm(r: Any, given: Any, options: Any, t: Any) -> Any:
    kind, kept = options.get("ord", "fro"), options.get("keepdims", False)
    if kind == "fro":
        found = np.sum(np.real(np.conj(given[0]) * t[0]), axis=(-2, -1), keepdims=kept)
        return times(1.0 / r, found)
    if kind != 2:
        raise NotImplementedError(f"matrix_norm: with ord={kind} has no rule for a tangent")
    found = _svdvals(r, given, {}, t)[..., 0]
    return found[..., None, None] if kept else found


@rule("vector_norm")
def _vector_norm(r: Any, given: Any, options: Any, t: Any) -> Any:
    if options.get("ord", 2) != 2:
        raise NotImplementedError(f"vector_norm: with ord={options['ord']} has no rule for a tangent")
    found = np.sum(np.real(np.conj(given[0]) * t[0]), axis=options.get("axis"), keepdims=options.get("keepdims", False))
    return times(1.0 / r, found)
