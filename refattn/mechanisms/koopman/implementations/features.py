"""One matrix in place of all keys, where the kernel has finitely many features: an operator of one cost for any length.

With k(x, y) = f(x) . f(y), the rows f(k_j) in F, and delta the jitter, which is the same for every length where the
future is hidden, the keys come into the operator of a fit "separable" through one matrix of features by features::

    S = F^T (F F^T + delta)^-1 F = 1 - delta (F^T F + delta)^-1

which is nearly the projection onto what the keys span. With X of the rows f(x_l), and P = S C, where C picks the
coordinates, which are the first features, the equations of `dense` are::

    N' = X S                                        "full": X        kappa(x) = N' f(x)
    Z = N' X^T
    A' = (Z + ridge)^-1 (X^+ - tau X) S             X^+ of the ends of transitions
    D = A' C,  R = A' X^T

Further keys, of the rows F_2, add what they have beyond that span (Woodbury's identity); a single one a product of two
vectors, u u^T / (delta + u . f)::

    U = F_2 - F_2 S,   S' = S + U^T (delta + U F_2^T)^-1 U

S begins as 0. So nothing is factored that grows, and where the weights w of KOOP.3 are known a query costs the same
whatever it sees. The features of x . y are x; those of weight (x . y / l^2 + constant)^degree are the monomials of that
degree of x / l and sqrt(constant), each times the root of weight and of how often it comes.

Letters: b batch, h head, i query, l transition, j key, d width, f feature.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from refattn.mechanisms.koopman import dense
from refattn.mechanisms.koopman.options.kernel import Kernel, Linear, Polynomial
from refattn.mechanisms.koopman.options.perturbation import invert, left_of
from refattn.mechanisms.koopman.options.ridges import SCALES
from refattn.mechanisms.koopman.options.spaces import OnAll
from refattn.ops.solve import identity, solve
from refattn.xp import Array, device, namespace, transpose, zeros

MOST = 1024
"""Features up to which S is worth while."""


def count_of(kernel: Kernel, width: int) -> int | None:
    """Return how many features a kernel has of points of a width; None where they are infinitely many, or too many."""
    if type(kernel) is Linear:
        return width
    if type(kernel) is not Polynomial:
        return None
    count = width + math.comb(width + kernel.degree, kernel.degree)
    return count if count <= MOST else None


def features_of(kernel: Kernel, x: Array) -> Array:
    """(..., d) -> (..., f)."""
    if not isinstance(kernel, Polynomial):
        return x
    product, xp = None, namespace(x)
    for factor, _ in _factors(kernel, x):
        product = factor if product is None else product * factor
    return xp.concat([x, _roots(kernel, x) * product], axis=-1)


def slopes_of(kernel: Kernel, x: Array) -> Array:
    """(..., d) -> (..., f, d): the derivatives of the features by the coordinates."""
    xp, own = namespace(x), identity(x.shape[-1], x) + 0.0 * x[..., None]
    if not isinstance(kernel, Polynomial):
        return own
    factors, total = list(_factors(kernel, x)), 0.0
    for n, (_, slope) in enumerate(factors):
        others = 1.0
        for m, (factor, _) in enumerate(factors):
            others = others if m == n else others * factor[..., None]
        total = total + others * slope
    return xp.concat([own, _roots(kernel, x)[:, None] * total], axis=-2)


def _monomials(kernel: Polynomial, width: int) -> list[tuple[int, ...]]:
    """Return each monomial as which coordinates it multiplies; `width` stands for the constant."""
    return list(itertools.combinations_with_replacement(range(width + 1), kernel.degree))


def _factors(kernel: Polynomial, x: Array) -> Iterator[tuple[Array, Array]]:
    """Yield each factor of the monomials (..., f) and its derivatives (f, d)."""
    xp, width = namespace(x), x.shape[-1]
    longer = xp.concat([x / kernel.bandwidth, 0.0 * x[..., :1] + math.sqrt(kernel.constant)], axis=-1)
    for places in zip(*_monomials(kernel, width), strict=True):
        at = xp.asarray(places, dtype=xp.int32, device=device(x))
        yield xp.take(longer, at, axis=-1), xp.take(identity(width + 1, x)[:, :width], at, axis=0) / kernel.bandwidth


def _roots(kernel: Polynomial, x: Array) -> Array:
    """Return the roots (f,) of how often each monomial comes, times that of the weight."""
    orders = (Counter(places).values() for places in _monomials(kernel, x.shape[-1]))
    counts = [math.factorial(kernel.degree) / math.prod(map(math.factorial, order)) for order in orders]
    xp = namespace(x)
    return xp.sqrt(xp.asarray(counts, dtype=x.dtype, device=device(x)) * kernel.weight)


def with_keys(span: Array, features: Array, delta: Array) -> Array:
    """Return S' (b, h, f, f) for S and the features (b, h, j, f) of further keys, at most so many at once."""
    most = max(span.shape[-1], 1)
    for first in range(0, features.shape[2], most):
        new = features[:, :, first : min(first + most, features.shape[2]), :]
        beyond = new - new @ span
        inner = beyond @ transpose(new) + delta * identity(new.shape[2], new)
        span = span + transpose(beyond) @ solve((inner + transpose(inner)) / 2.0, beyond)
    return span


def forward(q: Array, k: Array, v: Array, span: Array, options: dense.Options) -> tuple[Array, list[Array]]:
    """Return the last queries (b, h, i, d) that see all keys, and how far psi is from having been inverted by update.

    `span` is the S (b, h, f, f) of these keys.
    """
    xp, seen, lefts = namespace(q), zeros((*q.shape[:3], k.shape[2]), q) == 0.0, list[Array]()
    points = [q, dense.attend(q, k, v, seen, options)[1]]
    for number in range(1, options.updates):
        recent = points if options.window is None else points[-options.window - 1 :]
        attended = dense.attend(points[-1], k, v, seen, options)[1]
        root, left = update(xp.stack(recent, axis=3), attended, span, k.shape[2], options, number - 1)
        points, lefts = [*points, root], [*lefts, left]
    return points[-1], lefts


def update(
    points: Array, attended: Array, span: Array, keys: int, options: dense.Options, number: int
) -> tuple[Array, Array]:
    """Return the next query, for points (b, h, i, l + 1, d), and how far psi is from having been inverted."""
    xp, kernel, tau, width = namespace(points), options.kernel, options.tau, points.shape[-1]
    a, b = options.perturbation.shares(options.epsilon[number, ...])
    at_points, span = features_of(kernel, points), span[:, :, None, :, :]
    starts = at_points[..., :-1, :]  # (b, h, i, l, f): X
    targets = at_points[..., 1:, :] - tau * starts  # (b, h, i, l, f)
    dual = starts if isinstance(options.space, OnAll) else starts @ span  # (b, h, i, l, f): N'
    inner = dual @ transpose(starts)  # (b, h, i, l, l): Z
    lam = options.ridge[number, ...] * (1.0 if options.scale == SCALES["sum"] else float(starts.shape[-2] * keys))
    found = solve(inner + lam * identity(inner.shape[-1], inner), targets @ span)  # (b, h, i, l, f): A'
    modes = found[..., :width]  # (b, h, i, l, d): D
    koopman = found @ transpose(starts)  # (b, h, i, l, l): R
    lifted = (a + 2.0 * tau * b) * modes + b * koopman @ modes  # (b, h, i, l, d): H
    section = dual @ features_of(kernel, attended)[..., None]  # (b, h, i, l, 1): c
    image = (a + b) * tau * attended + xp.sum(lifted * section, axis=-2)  # (b, h, i, d): z
    expected = tau * attended + xp.sum(modes * section, axis=-2)  # (b, h, i, d): phi(q')
    own, factors = a + b * tau, transpose(modes) @ dual  # (), (b, h, i, d, f)

    def psi(x: Array) -> tuple[Array, Array, Array]:
        """Return psi(x) - t, the size of the terms that it sums, and its Jacobian."""
        at_x = features_of(kernel, x)[..., None]
        value, size = (factors @ at_x)[..., 0], (xp.abs(factors) @ xp.abs(at_x))[..., 0]
        terms = xp.abs(own * x) + xp.abs(b * size) + xp.abs(image)
        jacobian = own * identity(width, x) + b * factors @ slopes_of(kernel, x)
        return own * x + b * value - image, xp.sqrt(xp.sum(terms * terms, axis=-1)), jacobian

    everywhere = attended[..., 0] == attended[..., 0]
    root, left = invert(psi, (expected, attended, points[..., -1, :]), everywhere)
    return root, left_of(left, psi(root)[2])
