"""Matrices: only CuPy's shapes, and no error where a matrix is singular or not positive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupy

from ._double import tally

LinAlgError = np.linalg.LinAlgError


def _each(function: Callable[..., Any], like: Any, *arrays: Any) -> Any:
    """Return what NumPy gives for a stack of matrices; where it raises for one, what `like` gives for that."""
    for x in arrays:
        if not isinstance(x, cupy.ndarray):
            raise LinAlgError("cupy.linalg only supports cupy.ndarray")
        if x.dtype == np.float16:
            raise TypeError("float16 is unsupported in linalg")
    given = [cupy._numpy(x) for x in arrays]
    with np.errstate(all="ignore"):
        try:
            return _arrays(function(*given))
        except LinAlgError:
            pass
        shape, found = given[0].shape[:-2], []
        for at in np.ndindex(*shape):
            one = [x[at] for x in given]
            try:
                made = function(*one)
            except LinAlgError:
                made = like(*one)
            found.append(tuple(made) if isinstance(made, tuple) else (made,))
        stacks = tuple(np.reshape(np.stack(same), (*shape, *same[0].shape)) for same in zip(*found, strict=True))
        return _arrays(stacks if len(stacks) > 1 else stacks[0])


def _arrays(made: Any) -> Any:
    tally["launches"] += 2  # an operand is copied, and what happened is noted
    return tuple(map(cupy._array, made)) if isinstance(made, tuple) else cupy._array(made)


def _no_number(*shapes: tuple[int, ...]) -> Any:
    made = tuple(np.full(shape, np.nan) for shape in shapes)
    return made if len(made) > 1 else made[0]


def _square(a: Any) -> None:
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise LinAlgError("Last 2 dimensions of the array must be square")


def solve(a: Any, b: Any) -> Any:
    _square(a)
    if b.ndim == 1 and a.ndim == 2:
        return solve(a, b[:, None])[:, 0]
    if b.ndim < 2 or a.shape[:-1] != b.shape[:-1]:
        raise ValueError("a must have (..., M, M) shape and b must have (..., M, K) for multidimensional b")
    return _each(np.linalg.solve, lambda a, b: _no_number(b.shape), a, b)


def inv(a: Any) -> Any:
    _square(a)
    return _each(np.linalg.inv, lambda a: _no_number(a.shape), a)


def cholesky(a: Any) -> Any:
    _square(a)
    return _each(np.linalg.cholesky, lambda a: np.tril(_no_number(a.shape)), a)


def eigh(a: Any, UPLO: Any = "L") -> Any:
    _square(a)
    return _each(lambda x: tuple(np.linalg.eigh(x, UPLO)), lambda x: _no_number(x.shape[:1], x.shape), a)


def eigvalsh(a: Any, UPLO: Any = "L") -> Any:
    return eigh(a, UPLO)[0]


def qr(a: Any, mode: Any = "reduced") -> Any:
    return _each(lambda x: tuple(np.linalg.qr(x, mode)), None, a)


def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    def nothing(x: Any) -> Any:
        least = min(x.shape)
        sizes = x.shape if full_matrices else (least, least)
        return _no_number((x.shape[0], sizes[0]), (least,), (sizes[1], x.shape[1]))

    made = _each(lambda x: tuple(np.linalg.svd(x, full_matrices)), nothing, a)
    return made if compute_uv else made[1]


def pinv(a: Any, rcond: Any = 1e-15) -> Any:
    return _each(lambda x: np.linalg.pinv(x, cupy._numpy(rcond)), None, a)


def slogdet(a: Any) -> Any:
    _square(a)
    return _each(lambda x: tuple(np.linalg.slogdet(x)), None, a)


def det(a: Any) -> Any:
    return _each(np.linalg.det, None, a)


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    return cupy._array(np.linalg.norm(cupy._numpy(x), ord, axis, keepdims))


def matrix_rank(M: Any, tol: Any = None) -> Any:
    return _each(lambda x: np.linalg.matrix_rank(x, tol), None, M)


def lstsq(a: Any, b: Any, rcond: Any = None) -> Any:
    return cupy._array(tuple(np.linalg.lstsq(cupy._numpy(a), cupy._numpy(b), rcond)))
