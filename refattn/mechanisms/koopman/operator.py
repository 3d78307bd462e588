"""The fit of a Koopman operator to transitions: the coefficients A of the regularised least squares, and their adjoint.

The operator is (K f)(x) = kappa(x)^T A f(P), with f(P) the values that identify f (at the keys); its error over the
observables g and its Hilbert-Schmidt norm are those of A alone, with Z and G symmetric and positive::

    stein        |Z A G - Y|^2 + ridge tr(A^T Z A G) is least where Z A G + ridge A = Y
    separable    (Z + ridge I) A G = Y, where the error is measured in the norm of the kernel's space instead

Both are unique for ridge > 0. The maps from Y to A are linear and their own adjoints, up to transposes.

`spectral` is the same by eigenvectors, for many transitions and keys and for a ridge that is tiny: it leaves out what A
has in the kernel of Z, which grows as 1 / ridge and never enters the operator. The derivative wants all of A.

Letters: l transition, o observable.
Source: Khosravi 2023 (arXiv:2208.01681), sections IV and V; "separable" is kernel ridge regression.
"""

from __future__ import annotations

from typing import Any

from refattn.ops.solve import identity, solve
from refattn.xp import Array, concrete, namespace

FITS = ("stein", "separable")


def coefficients(fit: str, inner: Array, gram: Array, ridge: Any, targets: Array) -> Array:
    """Return A (..., l, o) for Z = `inner` (..., l, l), G = `gram` (..., o, o) and Y = `targets` (..., l, o)."""
    xp = namespace(inner, gram, targets)
    if fit == "separable":
        left = solve(inner + ridge * identity(inner.shape[-1], inner), targets)
        return xp.matrix_transpose(solve(xp.matrix_transpose(gram), xp.matrix_transpose(left)))
    rows, columns = targets.shape[-2:]
    flat = xp.reshape(targets, (*targets.shape[:-2], rows * columns, 1))
    return xp.reshape(solve(_kronecker(inner, gram, ridge), flat), targets.shape)


def adjoint(fit: str, inner: Array, gram: Array, ridge: Any, d_coefficients: Array) -> Array:
    """Return the gradient with respect to Y."""
    transpose = namespace(inner).matrix_transpose
    return coefficients(fit, transpose(inner), transpose(gram), ridge, d_coefficients)


def d_inner(fit: str, gram: Array, ridge: Any, found: Array, d_targets: Array) -> Array:
    """Return the gradient with respect to Z, for A = `found` and the gradient of Y."""
    transpose = namespace(found).matrix_transpose
    # forward: Z A G + ridge A = Y, hence dY = dZ A G + ...; separable: dZ A G + ... too
    return -(d_targets @ transpose(gram) @ transpose(found))


def d_gram(fit: str, inner: Array, ridge: Any, found: Array, d_targets: Array) -> Array:
    """Return the gradient with respect to G."""
    transpose = namespace(found).matrix_transpose
    # forward: Z A G + ridge A = Y; separable: Z A G + ridge A G = Y
    left = inner @ found if fit == "stein" else inner @ found + ridge * found
    return -(transpose(left) @ d_targets)


def d_ridge(fit: str, gram: Array, found: Array, d_targets: Array) -> Array:
    """Return the gradient with respect to the ridge, an array (...) without its last two axes."""
    xp = namespace(found)
    factor = found if fit == "stein" else found @ gram
    return -xp.sum(d_targets * factor, axis=(-2, -1))


def slope(fit: str, inner: Array, gram: Array, ridge: Any, found: Array) -> Array:
    """Return minus the derivative of A = `found` with respect to the ridge."""
    if fit == "stein":
        return coefficients(fit, inner, gram, ridge, found)
    # (Z + ridge) A G = Y, whatever G is
    return solve(inner + ridge * identity(inner.shape[-1], inner), found)


def distinct(ridge: Array) -> tuple[tuple[Array, Array | None], ...]:
    """Return the values of a ridge, each with a row (d,) that has 1 at its coordinates, or None for all.

    Where values cannot be compared, under ``jax.jit``, every coordinate has a value of its own.
    """
    if ridge.shape == ():
        return ((ridge, None),)
    eye, found = identity(ridge.shape[0], ridge), list[tuple[Array, Array]]()
    for p in range(ridge.shape[0]):
        same = [n for n, (value, _) in enumerate(found) if concrete(value == ridge[p])]
        if same:
            value, own = found[same[0]]
            found[same[0]] = (value, own + eye[p, :])
        else:
            found.append((ridge[p], eye[p, :]))
    return tuple(found)


def _kronecker(inner: Array, gram: Array, ridge: Any) -> Array:
    """Return the matrix of A -> Z A G + ridge A over the elements of A, row by row."""
    xp = namespace(inner, gram)
    rows, columns = inner.shape[-1], gram.shape[-1]
    # element (l, o) takes Z_ll' G_o'o of element (l', o')
    product = inner[..., :, None, :, None] * xp.matrix_transpose(gram)[..., None, :, None, :]
    size = rows * columns
    return xp.reshape(product, (*product.shape[:-4], size, size)) + ridge * identity(size, inner)


def spectral(fit: str, inner: Array, gram: Array, ridge: Any, targets: Array) -> Array:
    """Return A without its part in the kernel of Z: A = U (keep (U^T Y V) / (ridge + z g^T)) V^T.

    With Z = U z U^T and G = V g V^T; kept is z > 1e-12 max z in float64, and 1e-6 max z in float32.
    """
    xp = namespace(inner, gram, targets)
    transpose = xp.matrix_transpose
    z, left = xp.linalg.eigh((inner + transpose(inner)) / 2.0)
    g, right = xp.linalg.eigh(gram)
    least = 1e-12 if xp.finfo(z.dtype).bits == 64 else 1e-6
    keep = (z > least * xp.max(z, axis=-1, keepdims=True))[..., None]
    z, g = z[..., :, None], g[..., None, :]
    pairs = ridge + z * g if fit == "stein" else (ridge + z) * g
    turned = transpose(left) @ targets @ right
    return left @ xp.where(keep, turned / xp.where(keep, pairs, 1.0), 0.0) @ transpose(right)
