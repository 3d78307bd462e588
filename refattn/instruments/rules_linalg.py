"""The derivatives of factorisations, of matrices that have them.

Where eigenvalues or singular values are equal the vectors that belong to them have no derivative; the rule turns none
of these into the others, which is right for every function that does not depend on their choice. QR is of full column
rank, the pseudo-inverse of a rank that does not change. Sources: Giles 2008 (An extended collection of matrix
derivative results), Walter and Lehmann 2010 for QR, Golub and Pereyra 1973 for the pseudo-inverse.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.instruments.rules import rule, times


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


@rule("eigh")
def _eigh(r: Any, given: Any, options: Any, t: Any) -> Any:
    values, vectors = r
    within = _h(vectors) @ ((t[0] + _h(t[0])) / 2.0) @ vectors
    gaps = values[..., None, :] - values[..., :, None]
    return type(r)(_real_diagonal(within), vectors @ (_over(gaps) * within))


@rule("eigvalsh")
def _eigvalsh(r: Any, given: Any, options: Any, t: Any) -> Any:
    return _eigh(np.linalg.eigh(given[0]), given, options, t)[0]


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
    v, d = _h(vh), t[0]
    within = _h(u) @ d @ v
    gaps = _over(s[..., None, :] ** 2 - s[..., :, None] ** 2)
    left = gaps * (within * s[..., None, :] + s[..., :, None] * _h(within))
    right = gaps * (s[..., :, None] * within + _h(within) * s[..., None, :])
    over = _over(s)[..., None, :]
    d_u = u @ left + (d @ v - u @ within) * over
    d_v = v @ right + (_h(d) @ u - v @ _h(within)) * over
    return type(r)(d_u, _real_diagonal(within), _h(d_v))


@rule("svdvals")
def _svdvals(r: Any, given: Any, options: Any, t: Any) -> Any:
    u, _, vh = np.linalg.svd(given[0], full_matrices=False)
    return _real_diagonal(_h(u) @ t[0] @ _h(vh))


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
