"""Linear systems: by a factorisation, with their adjoints, and by conjugate gradients.

Letters: n unknowns, k right-hand sides; all other axes in front broadcast. h any number of systems, side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from refattn.xp import Array, concrete, eye_like, namespace, zeros

Linear = Callable[[Array], Array]


NUDGES = 64
"""How often a singular matrix is moved at most."""


def identity(size: int, like: Array) -> Array:
    """(n, n): ones on the diagonal, of the dtype and on the device of `like`."""
    return eye_like(size, like)


def solve(a: Array, b: Array) -> Array:
    """Return x (..., n, k) with a x = b for a (..., n, n).

    Of a matrix that is exactly singular some libraries raise, others return what is not finite. Here the diagonal of
    such a matrix, and of no other, is moved by some units of its largest element: the result is huge, and `condition`
    is infinite to rounding. What is NaN or infinite in a or b goes on, and so does what overflows.
    """
    xp = namespace(a, b)
    if a.shape[:-2] != b.shape[:-2]:  # which not every library broadcasts
        front = xp.broadcast_arrays(a[..., :0, :0], b[..., :0, :0])[0].shape[:-2]
        a, b = (xp.broadcast_to(x, (*front, *x.shape[-2:])) for x in (a, b))
    for _ in range(NUDGES):
        try:
            x = xp.linalg.solve(a, b)
        except (ValueError, RuntimeError) as error:  # NumPy's errors of linear algebra are of the first, PyTorch's of
            if not _of_algebra(error):  # the second class, as are errors of shapes and devices
                raise
            whole = xp.all(xp.isfinite(a), axis=(-2, -1))
            a = xp.where(whole[..., None, None], a, identity(a.shape[-1], a))  # some raise for these, too
            b = xp.where(whole[..., None, None], b, math.nan)
            lost = xp.linalg.slogdet(a)[0] == 0.0
        else:
            if concrete(xp.all(xp.isfinite(x))) is not False:
                return x
            of_a, of_b, of_x = (xp.all(xp.isfinite(each), axis=(-2, -1)) for each in (a, b, x))
            lost = of_a & of_b & ~of_x
            if not concrete(xp.any(lost)):
                return x
        largest = xp.max(xp.abs(a), axis=(-2, -1))
        size = 64.0 * float(xp.finfo(a.dtype).eps) * xp.where(largest == 0.0, 1.0, largest)
        # Rounding may make a matrix singular again, which then is moved again.
        a = a + xp.where(lost, size, 0.0)[..., None, None] * identity(a.shape[-1], a)
    return xp.linalg.solve(a, b)


def _of_algebra(error: Exception) -> bool:
    """Tell whether an error of a library is about numbers, and not about shapes, types or memory."""
    return type(error).__name__.endswith("LinAlgError")


def condition(a: Array) -> Array:
    """Return |a| |a^-1| (...,) of matrices (..., n, n), by their Frobenius norms over n: 1 for an orthogonal matrix.

    Solutions of a x = b, and its adjoints, lose so many units of rounding at most. It is infinite where a is 0.
    """
    xp = namespace(a)
    inverse = solve(a, identity(a.shape[-1], a) + 0.0 * a)
    sizes = [xp.linalg.matrix_norm(x) for x in (a, inverse)]
    return xp.where(sizes[0] > 0.0, sizes[0] * sizes[1] / a.shape[-1], math.inf)


def solve_backward(a: Array, x: Array, d_x: Array) -> tuple[Array, Array]:
    """Return the gradients with respect to a and b of x = `solve(a, b)`."""
    xp = namespace(a, x, d_x)
    # forward: a x = b, hence a dx = db - da x
    d_b = solve(xp.matrix_transpose(a), d_x)
    return -(d_b @ xp.matrix_transpose(x)), d_b


def conjugate_gradients(
    operator: Linear,
    target: Array,
    precondition: Linear,
    *,
    tolerance: float = 1e-8,
    iterations: int = 200,
    relative_to: Array | None = None,
) -> tuple[Array, int]:
    """Solve operator(Z) = target for matrices Z, by preconditioned conjugate gradients from Z = 0.

    Parameters
    ----------
    operator
        Linear, self-adjoint and positive semi-definite on arrays of the shape of `target`; it may not mix systems.
    target
        (h, rows, columns), in the range of the operator. An operator with a kernel does no harm then: of all solutions
        this is the one of least norm, in the norm whose square is <Z, precondition^-1(Z)>.
    precondition
        Linear, self-adjoint and positive, near the inverse of the operator.
    tolerance, iterations
        Stop where no residual is above `tolerance` times its target, or after so many iterations.
    relative_to
        What the residual is compared with in place of the target. A target that is itself a residual needs that: where
        it is what rounding left, it is outside of the range, and solutions of it grow without bound.

    Returns
    -------
    solution : Array
        (h, rows, columns).
    count : int
        The iterations that were made.

    Notes
    -----
    Hestenes and Stiefel 1952. Each system has steps of its own.
    """
    xp = namespace(target)

    def inner(a: Array, b: Array) -> Array:
        return xp.sum(a * b, axis=(-2, -1), keepdims=True)

    def ratio(a: Array, b: Array) -> Array:
        # A system that is solved has 0 over 0, and goes nowhere.
        return xp.where(b > 0.0, a / xp.where(b > 0.0, b, 1.0), 0.0)

    solution, residual = 0.0 * target, target
    conditioned = precondition(residual)
    direction, product = conditioned, inner(residual, conditioned)
    whole = target if relative_to is None else relative_to
    limit = tolerance**2 * inner(whole, whole)
    for count in range(iterations):
        if concrete(xp.all(inner(residual, residual) <= limit)):
            return solution, count
        image = operator(direction)
        step = ratio(product, inner(direction, image))
        solution, residual = solution + step * direction, residual - step * image
        conditioned = precondition(residual)
        next_product = inner(residual, conditioned)
        direction = conditioned + ratio(next_product, product) * direction
        product = next_product
    return solution, iterations


BLOCK = 8
"""Rows of the blocks of a triangular system that are inverted, all at once, so that few products are needed."""


def unit_lower(lower: Array, b: Array) -> Array:
    """Return x (..., n, k) with (I + L) x = b for a strictly lower L (..., n, n), by substitution of blocks of rows.

    What stands on and above the diagonal of `lower` is not read. No power of L is formed, and no inverse of more than a
    block: with n equal keys powers grow like binomial coefficients, of both signs.
    """
    return _forward(lower, b, _inverses(lower))


def unit_lower_transposed(lower: Array, b: Array) -> Array:
    """Return x (..., n, k) with (I + L)^T x = b: the adjoint of `unit_lower` with respect to b."""
    return _backward(lower, b, _inverses(lower))


def _forward(lower: Array, b: Array, inverses: Array) -> Array:
    n = b.shape[-2]
    if n <= BLOCK:
        return inverses[..., 0, :n, :n] @ b
    half = -(-n // (2 * BLOCK)) * BLOCK
    top = _forward(lower[..., :half, :half], b[..., :half, :], inverses)
    rest = b[..., half:, :] - lower[..., half:, :half] @ top
    below = _forward(lower[..., half:, half:], rest, inverses[..., half // BLOCK :, :, :])
    return namespace(b).concat([top, below], axis=-2)


def _backward(lower: Array, b: Array, inverses: Array) -> Array:
    xp, n = namespace(b), b.shape[-2]
    if n <= BLOCK:
        return xp.matrix_transpose(inverses[..., 0, :n, :n]) @ b
    half = -(-n // (2 * BLOCK)) * BLOCK
    bottom = _backward(lower[..., half:, half:], b[..., half:, :], inverses[..., half // BLOCK :, :, :])
    rest = b[..., :half, :] - xp.matrix_transpose(lower[..., half:, :half]) @ bottom
    return xp.concat([_backward(lower[..., :half, :half], rest, inverses), bottom], axis=-2)


def _inverses(lower: Array) -> Array:
    """Return (I + L)^-1 (..., l, i, i) of the l blocks on the diagonal, the last one filled up with rows of I."""
    xp, n = namespace(lower), lower.shape[-1]
    missing = -n % BLOCK
    if missing:
        lower = xp.concat([lower, zeros((*lower.shape[:-1], missing), lower)], axis=-1)
        lower = xp.concat([lower, zeros((*lower.shape[:-2], missing, n + missing), lower)], axis=-2)
    blocks = [lower[..., at : at + BLOCK, at : at + BLOCK] for at in range(0, n, BLOCK)]
    strict = xp.stack(blocks, axis=-3)  # (..., l, i, i)
    inverse = identity(BLOCK, lower)[:1, :] + xp.zeros_like(strict[..., :1, :])  # (..., l, 1, i)
    for row in range(1, BLOCK):
        unit = identity(BLOCK, lower)[row : row + 1, :]  # (1, i)
        inverse = xp.concat([inverse, unit - strict[..., row : row + 1, :row] @ inverse], axis=-2)
    return inverse
