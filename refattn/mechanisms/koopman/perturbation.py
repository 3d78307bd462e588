"""The perturbation psi = a pi + b phi of the identity pi by the operator's one-step map phi, and its inverse.

    identity   a = 1, b = epsilon         psi -> pi as epsilon -> 0: the update tends to phi(q')
    shift      a = epsilon, b = 1         psi -> phi as epsilon -> 0
    pencil     a = mix, b = epsilon       any of both: only a / b matters

psi(x) = z is solved by Newton's method, damped: a step that does not reduce |psi(x) - z| is halved. A position has
converged where |psi(x) - z| is as small as `TOLERANCE` of the terms that it sums, or, where rounding lets it get no
smaller, `STALLED` times as much. Positions do not see each other: one that has converged stays as it is. All take one
full step in the end, which makes the error of the derivative as small as that of the value.

A root with a singular Jacobian, one of many, counts as none.

Where the points of a position, or the keys of its head, are not finite, its root is NaN: what was not finite before
goes on, as everywhere in the cores, and nothing failed to be inverted.

psi need not be injective: it is where |b| lip(phi) < |a + b tau|. Elsewhere the root is the one that is reached from
the first of the starts that leads to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from refattn.ops.solve import identity, solve
from refattn.xp import Array, backend, concrete, namespace

PERTURBATIONS = ("identity", "shift", "pencil")

TOLERANCE = {"float64": 1e-13, "float32": 1e-6}
STALLED = 1e3
STEPS = 100
"""Steps of Newton's method, rejected ones included, for each start."""

STEPS_UNSEEN = 12
"""Steps where nothing can be asked about values (under jax.jit); there a position that has not converged is NaN."""

LEAST = 2.0**-30


class KoopmanInverseError(ArithmeticError):
    """Raised where psi(x) = z was not solved at some positions.

    Attributes
    ----------
    positions
        (batch, head, query) of the first of them, at most 8.
    count
        How many there are; where queries are cut into chunks, of the first chunk that has one.
    residual
        The largest |psi(x) - z| / (1 + the size of the terms that it sums), infinite where psi is singular at its root.
    update
        Which update it was, from 2 on.
    """

    def __init__(self, positions: Sequence[tuple[int, ...]], count: int, residual: float, update: int) -> None:
        self.positions = tuple(positions)
        self.count = count
        self.residual = residual
        self.update = update
        places = ", ".join(map(str, self.positions)) + (", ..." if count > len(self.positions) else "")
        super().__init__(
            f"update {update}: the perturbation was not inverted at {count} positions (batch, head, query) {places}; "
            f"largest relative residual {residual:.1e}; needs another epsilon or ridge, or perturbation='identity'"
        )


def coefficients_of(perturbation: str, epsilon: Any, mix: Any) -> tuple[Any, Any]:
    """Return (a, b)."""
    if perturbation == "identity":
        return 1.0, epsilon
    return (epsilon, 1.0) if perturbation == "shift" else (mix, epsilon)


Evaluate = Callable[[Array], tuple[Array, Array, Array]]
"""x -> psi(x) - z (..., d), the size (...,) of the terms that it sums, and the Jacobian, as a `System` takes it."""


class System(Protocol):
    """How a Jacobian, in the shape that an `Evaluate` gives it, is solved with."""

    def step(self, jacobian: Array, residual: Array, taking: Array) -> Array:
        """Return J^-1 r (..., d) where taking (...,), anything finite elsewhere."""
        ...

    def last(self, jacobian: Array, residual: Array, near: Array) -> tuple[Array, Array]:
        """Return J^-1 r where near, and whether J is regular (...,)."""
        ...


class Whole:
    """Of Jacobians (..., d, d)."""

    def step(self, jacobian: Array, residual: Array, taking: Array) -> Array:
        """Return J^-1 r where taking."""
        xp = namespace(residual)
        safe = xp.where(taking[..., None, None], jacobian, identity(residual.shape[-1], residual))
        return solve(safe, xp.where(taking[..., None], residual, 0.0)[..., None])[..., 0]

    def last(self, jacobian: Array, residual: Array, near: Array) -> tuple[Array, Array]:
        """Return J^-1 r where near, and whether J is regular."""
        xp, eye = namespace(residual), identity(residual.shape[-1], residual)
        safe = xp.where(near[..., None, None], jacobian, eye)
        inverse = solve(safe, eye + 0.0 * safe)
        return (inverse @ residual[..., None])[..., 0], _regular(safe, inverse)


WHOLE = Whole()


def condition(x: Array) -> Array:
    """Return whether matrices (..., n, n) are regular to rounding."""
    return _regular(x, solve(x, identity(x.shape[-1], x) + 0.0 * x))


def _regular(x: Array, inverse: Array) -> Array:
    size = _norm(x)
    return (size > 0.0) & (size * _norm(inverse) * (float(namespace(x).finfo(x.dtype).eps) * x.shape[-1]) < 1.0)


def not_finite(keys: Array, *points: Array) -> Array:
    """Return whether a position (b, h, i) is not finite in its points (b, h, i, d), or its head in the keys."""
    xp = namespace(keys)
    found = xp.sum(0.0 * keys, axis=(-2, -1))[..., None]
    for x in points:
        found = found + xp.sum(0.0 * x, axis=-1)
    return xp.isnan(found)


def invert(
    evaluate: Evaluate, starts: Sequence[Array], alive: Array, lost: Array, update: int, system: System = WHOLE
) -> Array:
    """Return the roots x (..., d); NaN where `lost` (...,); positions that are not `alive` (...,) keep their start.

    Raises
    ------
    KoopmanInverseError
        Where a position has not converged from any of the starts.
    """
    xp = namespace(*starts)
    alive = alive & ~lost
    best, left = _newton(evaluate, starts[0], alive, system)
    for start in starts[1:]:
        if concrete(xp.any(left > STALLED)) is not True:
            break
        other, other_left = _newton(evaluate, start, alive & (left > STALLED), system)
        better = (left > STALLED) & (other_left <= STALLED)
        best = xp.where(better[..., None], other, best)
        left = xp.where(better, other_left, left)
    failed = ~(left <= STALLED)
    some = concrete(xp.any(failed))
    if some:
        raise _error(failed, left, update, starts[0])
    if some is None:
        best = xp.where(failed[..., None], float("nan"), best)
    return xp.where(lost[..., None], float("nan"), best)


def _newton(evaluate: Evaluate, start: Array, active: Array, system: System) -> tuple[Array, Array]:
    """Return x and how far it is from convergence, in units of the tolerance: at most 1 where it has converged."""
    xp = namespace(start)
    tolerance = TOLERANCE["float64" if xp.finfo(start.dtype).bits == 64 else "float32"]

    def look(x: Array) -> tuple[Array, Array, Array, Array]:
        residual, size, jacobian = evaluate(x)
        norm = xp.sqrt(xp.sum(residual * residual, axis=-1))
        return residual, norm, norm / (tolerance * (1.0 + size)), jacobian

    x = start
    residual, norm, left, jacobian = look(x)
    length = xp.ones_like(norm)
    going = active & ~(left <= 1.0)
    known = concrete(xp.any(going))
    for _ in range(STEPS_UNSEEN if known is None else STEPS):
        if known is not None and not concrete(xp.any(going)):
            break
        tried = x - length[..., None] * system.step(jacobian, residual, going)
        new_residual, new_norm, new_left, new_jacobian = look(tried)
        accepted = going & (new_norm <= (1.0 - 1e-4 * length) * norm)
        x = xp.where(accepted[..., None], tried, x)
        residual = xp.where(accepted[..., None], new_residual, residual)
        jacobian = xp.where(accepted[..., None, None], new_jacobian, jacobian)
        norm, left = xp.where(accepted, new_norm, norm), xp.where(accepted, new_left, left)
        length = xp.where(accepted, xp.ones_like(length), 0.5 * length)
        # What is as small as rounding allows is not halved on and on.
        going = going & ~(left <= 1.0) & (length >= xp.where(left <= STALLED, 0.0 * left + 2.0**-3, LEAST))
    near = active & (left <= STALLED)
    change, unique = system.last(jacobian, residual, near)
    x = x - xp.where(near[..., None], change, 0.0)
    # Where the Jacobian is singular, the root is one of many.
    return x, xp.where(active, xp.where(unique, left, math.inf), 0.0)


def _norm(x: Array) -> Array:
    """Return the square root of the sum of squares of matrices (..., d, d)."""
    xp = namespace(x)
    return xp.sqrt(xp.sum(x * x, axis=(-2, -1)))


def _error(failed: Array, left: Array, update: int, like: Array) -> KoopmanInverseError:
    owner = backend(like)
    flags, sizes = owner.to_numpy(failed), owner.to_numpy(left)
    places = [tuple(int(n) for n in place) for place in zip(*flags.nonzero(), strict=True)]
    dtype = "float64" if namespace(like).finfo(like.dtype).bits == 64 else "float32"
    return KoopmanInverseError(places[:8], len(places), float(sizes[flags].max()) * TOLERANCE[dtype], update)
