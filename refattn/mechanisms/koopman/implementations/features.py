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
from dataclasses import dataclass, replace
from typing import Any

from refattn.mechanisms.koopman import dense
from refattn.mechanisms.koopman.options.kernel import Kernel, Linear, Polynomial
from refattn.mechanisms.koopman.options.spaces import Observables, Projected, counted
from refattn.ops.solve import identity, solve
from refattn.xp import Array, constants, namespace, transpose, zeros

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
        at = constants(places, xp.int32, x)
        yield xp.take(longer, at, axis=-1), xp.take(identity(width + 1, x)[:, :width], at, axis=0) / kernel.bandwidth


def _roots(kernel: Polynomial, x: Array) -> Array:
    """Return the roots (f,) of how often each monomial comes, times that of the weight."""
    orders = (Counter(places).values() for places in _monomials(kernel, x.shape[-1]))
    counts = [math.factorial(kernel.degree) / math.prod(map(math.factorial, order)) for order in orders]
    xp = namespace(x)
    return xp.sqrt(constants(counts, x.dtype, x) * kernel.weight)


def with_keys(span: Array, features: Array, delta: Array) -> Array:
    """Return S' (b, h, f, f) for S and the features (b, h, j, f) of further keys, at most so many at once."""
    most = max(span.shape[-1], 1)
    for first in range(0, features.shape[2], most):
        new = features[:, :, first : min(first + most, features.shape[2]), :]
        beyond = new - new @ span
        inner = beyond @ transpose(new) + delta * identity(new.shape[2], new)
        span = span + transpose(beyond) @ solve((inner + transpose(inner)) / 2.0, beyond)
    return span


@dataclass(frozen=True)
class Features(Observables):
    """The features of a kernel in place of its sections at the keys: every query sees all."""

    def forward(self, x: Array) -> Array:
        """Return f(x): (b, h, i, l, d) -> (b, h, i, l, f)."""
        return features_of(self.kernel, x)

    def look(self, x: Array, factors: Array) -> tuple[Array, Array, Array]:
        """Return C f(x) (b, h, i, d) for C (b, h, i, d, f), the size of its terms, and its Jacobian (b, h, i, d, d)."""
        at_x, xp = features_of(self.kernel, x)[..., None], namespace(x)
        value, size = (factors @ at_x)[..., 0], (xp.abs(factors) @ xp.abs(at_x))[..., 0]
        return value, size, factors @ slopes_of(self.kernel, x)

    def coordinates(self) -> Array:
        """Return C (f, d): the coordinates are the first features."""
        width = self.keys.shape[-1]
        return identity(count_of(self.kernel, width) or width, self.keys)[:, :width]


@dataclass(frozen=True)
class InFeatures:
    """The space, and the fit "separable", where S stands in the place of the Gram matrix."""

    full: bool

    def kappa(self, g: Features, first: Array, starts: Array, span: Array, dual_of: Any) -> Projected:
        """Return kappa(x) = N' f(x)."""
        return Projected(g, starts if self.full else starts @ span, starts, span)

    def forward(self, inner: Array, span: Array, ridge: Any, targets: Array) -> Array:
        """Return A' with (Z + ridge) A' = Y S."""
        return solve(inner + ridge * identity(inner.shape[-1], inner), targets @ span)


def forward(q: Array, k: Array, v: Array, span: Array, options: dense.Options) -> tuple[Array, dense.Saved]:
    """Return what `dense.forward` does, for queries that see all keys; `span` is the S (b, h, f, f) of these keys."""
    seen = zeros((*q.shape[:3], k.shape[2]), q) == 0.0
    g = Features(options.kernel, k[:, :, None, :, :], seen, counted(k, seen))
    place: Any = InFeatures(options.space.full)
    return dense.moved(q, k, v, g, span[:, :, None, :, :], q.shape[1], replace(options, space=place, fit=place))
