"""Operators whose norm, rank or nuclear norm is limited, fitted to transitions.

In orthonormal coordinates of the observables, F with F G F^T = 1, the fit "separable" finds M, the matrix of K - tau::

    least  |W M - Y'|^2 + ridge |M|^2              M = W^T A', A = A' F, Y' = Y F^T, Z = W W^T
    norm     among those with |M|_2 <= norm        the largest singular value; so is every eigenvalue within
    rank     among those of at most so many singular values that are not 0
    nuclear  + 2 nuclear sum_n sigma_n(M)          few singular values, and small ones

Each of these depends on M by its part in the span of the transitions alone, or falls when the rest is left out, so that
the least is of this implementation: Khosravi's representer theorem. For the rank it is the ridge's own operator, cut in
the norm of what is minimised; the other two solve, with a step rho that they do not depend on,

    (Z + ridge) A' + rho (B - A') = Y',  A' = P(B)      P shrinks the singular values of W^T B: to norm, or by
                                                        nuclear / rho
    rank    A' = P(B), (Z + ridge) B = Y'               P keeps the largest singular values of W^T B, in the norm
                                                        of Z (Z + ridge) in place of Z

by B <- B - A' + (Z + ridge + rho)^-1 (Y' + rho (2 A' - B)) (Douglas, Rachford 1956), and their adjoints likewise::

    dY' = P_B^T(mu) / rho,  mu = dA' - (Z + ridge - rho) dY',  dZ = -dY' A'^T + P_Z^T(mu),  dridge = -<dY', A'>
    dG = -F^T (dY'^T Y' + A'^T dA') F / 2               whatever F is

P(B) = B H(B^T Z B) with a function H of a symmetric matrix; its derivative has the divided differences of H
(Daleckii, Krein 1965). There is one but where a singular value is norm or nuclear / rho itself, where that of one side
is taken, and where the rank cuts between two that are equal, which raises.

Source: Khosravi 2023 (arXiv:2208.01681), sections IV and V.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.record import Unsupported
from refattn.ops.solve import identity, solve
from refattn.xp import Array, concrete, known, namespace, transpose

STEPS = 5000
"""Steps of a fit at most."""

REST = 1e-9
"""The largest relative change by a last step that counts as rest, for float64; 1e-4 for float32."""


def gain_of_two(inner: Array, gram: Array, ridge: Array, delta: Any) -> Array:
    """Return by how much an error in Y grows, for |Z|, |G|, the ridge and the jitter; see `precision`."""
    xp = namespace(inner)
    beside = gram / delta if concrete(delta > 0.0) is not False else math.inf
    return xp.sqrt((1.0 + inner / ridge) * (1.0 + beside))


@dataclass(frozen=True)
class Limited:
    """The fit of an operator of which one of these numbers is given, those of the kind `Separable`."""

    norm: float | None
    rank: int | None
    nuclear: float | None

    gain = staticmethod(gain_of_two)

    def forward(self, inner: Array, gram: Array, ridge: Any, targets: Array) -> Array:
        """Return A (..., l, o) for Z, G and Y."""
        factor = _factor(gram)
        return self.within(inner, ridge, targets @ transpose(factor))[0] @ factor

    def backward(
        self, inner: Array, gram: Array, ridge: Any, targets: Array, found: Array, d_found: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
        """Return the gradient of Y for that of A (..., l, o), and what tells those of Z, G and, (..., 1, 1), the ridge.

        They come out together. Only the ridge's is computed from the gradient of Y that is handed back, -<dY, A G>, and
        not if the rank is limited.
        """
        factor = _factor(gram)
        own, d_own = targets @ transpose(factor), d_found @ transpose(factor)
        within, before = self.within(inner, ridge, own)
        d_targets, d_inner, d_ridge = self.within_backward(inner, ridge, within, before, d_own)
        d_gram = transpose(factor) @ (transpose(d_targets) @ own + transpose(within) @ d_own) @ factor / -2.0

        def rest(d_targets: Array) -> tuple[Array, Array, Array]:
            return d_inner, d_gram, d_ridge if self.rank is not None else -_summed(d_targets * (found @ gram))

        return d_targets @ factor, rest

    def within(self, inner: Array, ridge: Any, targets: Array) -> tuple[Array, Array]:
        """Return A' and B (..., l, o) for Z and Y'."""
        inner, lost_inner = finite(inner)
        targets, lost = finite(targets + 0.0 * ridge)
        values, vectors = _eigen(inner)
        start = _shifted(values, vectors, ridge, targets)
        if self.rank is not None:
            found = self._shrunk(_Spectrum(values * (values + ridge), vectors, start), 1.0)[0]
            return found + lost + lost_inner, start

        rho = _rho(values, ridge)

        def step(before: Array) -> tuple[Array, Array]:
            """Return A' = P(B), and the next B less B."""
            found = self._shrunk(_Spectrum(values, vectors, before), rho)[0]
            return found, _shifted(values, vectors, ridge + rho, targets + rho * (2.0 * found - before)) - found

        before = _settled(start, start, lambda x: step(x)[1])
        return step(before)[0] + lost + lost_inner, before

    def within_backward(
        self, inner: Array, ridge: Any, found: Array, before: Array, d_found: Array
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of Y', Z and the ridge, for what `within` gave and the gradient of A'."""
        inner, lost = finite(inner)
        d_found, lost_too = finite(d_found)
        before, _ = finite(before)
        values, vectors = _eigen(inner)
        weights = values if self.rank is None else values * (values + ridge)
        spectrum, rho = _Spectrum(weights, vectors, before), _rho(values, ridge)
        shrinking = self._shrunk(spectrum, 1.0 if self.rank is not None else rho)[1]
        if self.rank is not None:
            d_before, d_weights = spectrum.backward(shrinking, d_found)
            d_targets = _shifted(values, vectors, ridge, d_before)
            # forward: weights = Z (Z + ridge); (Z + ridge) B = Y'
            d_inner = d_weights @ inner + inner @ d_weights + ridge * d_weights - d_targets @ transpose(before)
            d_ridge = _summed(d_weights * inner) - _summed(d_targets * before)
            return d_targets + lost + lost_too, d_inner + lost + lost_too, d_ridge + lost + lost_too

        def solved(x: Array) -> Array:
            return _shifted(values, vectors, ridge + rho, x)

        def step(x: Array) -> Array:
            own = rho * solved(x)
            return spectrum.backward(shrinking, d_found + 2.0 * own - x)[0] - own

        start = 2.0 * spectrum.backward(shrinking, d_found)[0]  # of one transition this is it
        d_targets = solved(_settled(start, d_found, step))
        rest = d_found - (inner @ d_targets + (ridge - rho) * d_targets)
        d_inner = spectrum.backward(shrinking, rest)[1] - d_targets @ transpose(found)
        return d_targets + lost + lost_too, d_inner + lost + lost_too, -_summed(d_targets * found)

    def _shrunk(self, spectrum: _Spectrum, rho: Any) -> tuple[Array, tuple[Array, Array, Array, float]]:
        """Return P(B), and H: on which singular values it acts, its values, gamma of h = 1 - h_0 + gamma / sigma, h_0.

        h_0 is its value on the others.
        """
        xp, sizes = namespace(spectrum.sizes), spectrum.sizes
        if self.norm is not None:
            acts, gamma, rest = sizes > self.norm, self.norm + 0.0 * sizes, 1.0
        elif self.nuclear is not None:
            least = (self.nuclear / rho)[..., 0] + 0.0 * sizes
            acts, gamma, rest = sizes > least, -least, 0.0
        else:
            assert self.rank is not None
            eps = float(xp.finfo(sizes.dtype).eps) * sizes.shape[-1]
            order = xp.cumulative_sum(xp.ones_like(sizes), axis=-1)
            acts = (order <= self.rank) & (sizes > eps * sizes[..., :1])
            gamma, rest = 0.0 * sizes, 0.0
        known = xp.where(acts, sizes, 1.0)
        kept = xp.where(acts, 1.0 - rest + gamma / known, rest)
        return spectrum.with_values(kept, rest), (acts, kept, gamma, rest)


class _Spectrum:
    """The singular values and right singular vectors of C^T B, for the weights C C^T = U w U^T of a norm."""

    def __init__(self, weights: Array, vectors: Array, x: Array) -> None:
        xp = namespace(x)
        positive = xp.where(weights > 0.0, weights, 0.0)  # (..., l, 1)
        _, self.sizes, across = xp.linalg.svd(xp.sqrt(positive) * (transpose(vectors) @ x), full_matrices=False)
        self.x, self.across = x, across  # (..., l, o), (..., n, o)
        self.within = x @ transpose(across)  # (..., l, n)
        self.matrix = vectors @ (positive * transpose(vectors))  # (..., l, l)

    def with_values(self, kept: Array, rest: float) -> Array:
        """Return B H."""
        return rest * self.x + (self.within * (kept - rest)[..., None, :]) @ self.across

    def backward(self, shrinking: tuple[Array, Array, Array, float], d_found: Array) -> tuple[Array, Array]:
        """Return the gradients of B and of the weights, for that of B H."""
        xp, (acts, kept, gamma, rest) = namespace(d_found), shrinking
        # forward: found = B H(Q), Q = B^T weights B
        sizes = xp.where(acts, self.sizes, 1.0)
        a, b = self.sizes[..., :, None], self.sizes[..., None, :]
        known_a, known_b = sizes[..., :, None], sizes[..., None, :]
        first, second = acts[..., :, None], acts[..., None, :]
        gap = xp.where(first ^ second, xp.abs(a - b) * (a + b), 1.0)
        if concrete(xp.any((first ^ second) & (gap <= 1e-12 * self.sizes[..., :1, None] ** 2))):
            raise ValueError("fit: got singular values that are equal where they are cut, which has no gradient")
        # What h is more than h_0, without cancellation.
        more = ((1.0 - 2.0 * rest) * sizes + gamma) / sizes
        more_of = xp.where(first, more[..., :, None], more[..., None, :])
        same = -gamma[..., None] / (known_a * known_b * (known_a + known_b))
        slope = xp.where(first & second, same, xp.where(first ^ second, more_of / gap, 0.0))
        along = d_found @ transpose(self.across)  # (..., l, n)
        beyond, d_beyond = self.x - self.within @ self.across, d_found - along @ self.across  # (..., l, o)
        product = transpose(self.within) @ along
        inside = slope * (product + transpose(product)) / 2.0  # (..., n, n)
        outside = transpose(self.within) @ d_beyond + transpose(along) @ beyond
        outside = outside * (xp.where(acts, kept - rest, 0.0) / (2.0 * sizes * sizes))[..., None]  # (..., n, o)
        d_x = rest * d_found + (along * (kept - rest)[..., None, :]) @ self.across
        d_x = d_x + 2.0 * self.matrix @ self.within @ (inside @ self.across + outside)
        corner = self.within @ (outside @ transpose(beyond))
        return d_x, self.within @ inside @ transpose(self.within) + corner + transpose(corner)


def _eigen(inner: Array) -> tuple[Array, Array]:
    """Return the eigenvalues (..., l, 1), none below 0, and eigenvectors of Z."""
    xp = namespace(inner)
    values, vectors = xp.linalg.eigh((inner + transpose(inner)) / 2.0)
    return xp.where(values > 0.0, values, 0.0)[..., None], vectors


def _shifted(values: Array, vectors: Array, ridge: Any, x: Array) -> Array:
    """Return (Z + ridge)^-1 x."""
    return vectors @ ((transpose(vectors) @ x) / (values + ridge))


def _rho(values: Array, ridge: Any) -> Array:
    """Return the step, between the smallest and the largest curvature: of one transition it is the curvature."""
    return namespace(values).sqrt((values[..., :1, :] + ridge) * (values[..., -1:, :] + ridge))


def _settled(x: Array, like: Array, change: Callable[[Array], Array]) -> Array:
    """Return where x <- x + change(x) comes to rest, beside a size like that of `like`; matrices do not see others."""
    xp = namespace(x)
    eps = float(xp.finfo(x.dtype).eps)
    going = xp.sum(x, axis=(-2, -1), keepdims=True) == xp.sum(x, axis=(-2, -1), keepdims=True)
    unseen = not known(xp.any(going))
    if unseen and x.shape[-2] > 1:
        raise Unsupported("fit: got a norm or nuclear with several transitions under jax.jit, whose steps ask values")
    for n in range(1 if unseen else STEPS):
        step = change(x)
        x = xp.where(going, x + step, x)
        moved, *sizes = (xp.max(xp.abs(each), axis=(-2, -1), keepdims=True) for each in (step, x, like))
        size = xp.maximum(*sizes)
        going = going & (moved > 4.0 * eps * size)
        if concrete(~xp.any(going)):
            break
        if n == STEPS - 1 and concrete(xp.any(going & (moved > (REST if eps < 1e-12 else 1e-4) * size))):
            raise ValueError(f"ridge: got one so small that a limited fit does not settle in {STEPS} steps, needs more")
    return x


def _factor(gram: Array) -> Array:
    """Return F with F G F^T = 1."""
    gram, lost = finite(gram, identity(gram.shape[-1], gram))
    return solve(cholesky(gram, "no limit"), identity(gram.shape[-1], gram) + 0.0 * gram) + lost


def finite(x: Array, instead: Array | float = 0.0) -> tuple[Array, Array]:
    """Return matrices with others in place of those that are not finite, and NaN (..., 1, 1) for these, or 0.

    Libraries raise if they are given what is not finite to factor.
    """
    xp = namespace(x)
    lost = 0.0 * xp.sum(x, axis=(-2, -1), keepdims=True)
    return xp.where(xp.isnan(lost), instead, x), lost


def cholesky(gram: Array, instead: str) -> Array:
    """Return the lower factor of Gram matrices; ValueError, which names what else would do, if one is not positive."""
    xp = namespace(gram)
    failed: Exception | None = None
    try:
        lower = xp.linalg.cholesky(gram)
        if concrete(xp.all(xp.isfinite(lower))) is not False:
            return lower
    except (ValueError, RuntimeError) as error:  # of these classes are the errors of NumPy and PyTorch
        failed = error
    raise ValueError(
        f"jitter: the Gram matrix of the keys is not positive to rounding, needs a larger jitter, or {instead}"
    ) from failed


def _summed(x: Array) -> Array:
    return namespace(x).sum(x, axis=(-2, -1), keepdims=True)
