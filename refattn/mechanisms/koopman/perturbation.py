"""The perturbation psi = a pi + b phi of the identity pi by the operator's one-step map phi, and its inverse.

    identity   a = 1, b = epsilon         psi -> pi as epsilon -> 0: the update tends to phi(q')
    shift      a = epsilon, b = 1         psi -> phi as epsilon -> 0
    pencil     a = mix, b = epsilon       any of both: only a / b matters

psi(x) = z is solved by damped Newton from up to three starts, in `dense` phi(q'), q' and the last point: a step J^-1 r
of the residual r = psi(x) - z is halved until |r| falls; where the first start leads to no root the next is tried. A
position, which is a query (b, h, i), has converged where |psi(x) - z| is as small as `TOLERANCE` of the terms that it
sums, or, where rounding lets it get no smaller, `STALLED` times as much. Positions do not see each other: one that has
converged stays as it is. All take one full step in the end, which makes the error of the derivative as small as that of
the value.

A root with a singular Jacobian, one of many, counts as none.

Where the points of a position, or the keys of its head, are not finite, its root is NaN: what was not finite before
goes on, as everywhere in the cores, and nothing failed to be inverted.

psi need not be injective: with phi = tau pi + f, f(x) = D^T kappa(x), it is (a + b tau) pi + b f, injective where
|b| lip(f) < |a + b tau|, which `certify` asks with a bound of lip(f). For tau = 1 that says nothing of lip(phi) itself.
Elsewhere the root is the one that is reached from the first of the starts that leads to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from refattn.mechanisms.koopman.kernel import Observables
from refattn.ops.solve import identity, solve
from refattn.xp import Array, backend, concrete, namespace, zeros

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
            f"largest relative residual {residual:.1e}; needs another epsilon or ridge, or the perturbation identity"
        )


def a_and_b(perturbation: str, epsilon: Any, mix: Any) -> tuple[Any, Any]:
    """Return a and b."""
    if perturbation == "identity":
        return 1.0, epsilon
    return (epsilon, 1.0) if perturbation == "shift" else (mix, epsilon)


def picked(table: Array, candidate: int, number: int) -> Array:
    """Return the number (), or those of the coordinates (d,), of a candidate and an update from 2 on."""
    return table[min(candidate, table.shape[0] - 1), min(number - 2, table.shape[1] - 1), ...]


def placed(table: Array, chosen: tuple[int, ...], parts: list[Array]) -> Array:
    """Return the gradient of a table from those of the updates: a candidate that was not taken has none."""
    xp, gradient = namespace(table), zeros(table.shape, table)
    for later, (candidate, part) in enumerate(zip(chosen, parts, strict=True)):
        row = identity(table.shape[0], table)[min(candidate, table.shape[0] - 1), :]
        column = identity(table.shape[1], table)[min(later, table.shape[1] - 1), :]
        place = row[:, None] * column[None, :]  # 1 at the number that was taken
        gradient = gradient + (part * place if part.shape == () else place[..., None] * part)
    return xp.astype(gradient, table.dtype, copy=False)


class OneStep:
    """phi(x) - tau x = D^T kappa(x) = C g(x) with C = D^T N; in the full space C = D^T, and g the sections at starts.

    Letters: b batch, h head, i query, l transition, o observable, d coordinate, c centre: a key, or in the full space
    the start of a transition.
    """

    def __init__(self, observables: Observables, dual: Array | None, first: Array, modes: Array) -> None:
        back = namespace(modes).matrix_transpose(modes)
        self.observables, self.dual, self.first = observables, dual, first
        self.centres = first if dual is None else observables.keys[:, :, None, :, :]  # (b, h, i or 1, c, d)
        self.factors = back if dual is None else back @ dual  # (b, h, i, d, c or o): C

    def kappa(self, x: Array) -> Array:
        """Return kappa(x) (b, h, i, l) for x (b, h, i, d): N g(x), in the full space k(x_l, x)."""
        if self.dual is None:
            return self.observables.kernel.values(self.first, x[..., None, :])[..., 0]
        return (self.dual @ namespace(x).matrix_transpose(self.observables.values(x[..., None, :])))[..., 0]

    def at(self, x: Array) -> tuple[Array, Array, Array]:
        """Return D^T kappa(x) (b, h, i, d), the sizes of the terms of its sums, and its Jacobian (b, h, i, d, d)."""
        xp, count = namespace(x), self.centres.shape[-2]
        transpose, row = xp.matrix_transpose, x[..., None, :]
        sections, along, towards = self.observables.kernel.look(row, self.centres)
        values = sections if self.dual is None else self.observables.values(row)  # (b, h, i, 1, c or o)
        value = (self.factors @ transpose(values))[..., 0]
        size = (xp.abs(self.factors) @ transpose(xp.abs(values)))[..., 0]
        # dk/dx = along centre + towards (x - centre); the coordinates are their own slopes
        at_centres, beyond = self.factors[..., :count], self.factors[..., count:]
        pull = xp.sum(at_centres * towards, axis=-1, keepdims=True)
        jacobian = (at_centres * (along - towards)) @ self.centres + pull * row
        return value, size, jacobian if beyond.shape[-1] == 0 else jacobian + beyond

    def certify(self, own: Any, share: Any, alive: Array) -> None:
        """Raise ValueError where psi(x) = own x + share D^T kappa(x) is not certain to be one to one."""
        certify(self.steepness(), own, share, alive)

    def steepness(self) -> Array:
        """Return a bound on |D^T kappa(x) - D^T kappa(y)| / |x - y|, (b, h, i)."""
        xp, count, kernel = namespace(self.factors), self.centres.shape[-2], self.observables.kernel
        at_centres, beyond = self.factors[..., :count], self.factors[..., count:]
        linear = at_centres @ self.centres
        linear = linear if beyond.shape[-1] == 0 else linear + beyond
        lengths = xp.sum(xp.sqrt(xp.sum(at_centres * at_centres, axis=-2)), axis=-1)
        return xp.linalg.matrix_norm(linear, ord=2) + kernel.slope_bound() * lengths


def certify(steepness: Array, own: Any, share: Any, alive: Array) -> None:
    """Raise ValueError where psi(x) = own x + share f(x), with f of a given steepness, is not sure to be one to one."""
    xp = namespace(steepness)
    rate = share * steepness / own
    worst = xp.max(xp.where(alive, rate, 0.0))
    if concrete(worst >= 1.0):
        raise ValueError(
            f"certify: got a perturbation whose share of the one-step map is {float(worst):.3g} times as steep as the "
            "identity's, needs less than 1: a smaller epsilon of the perturbation identity, or certify=False"
        )


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
    evaluate: Evaluate, starts: Sequence[Array], alive: Array, lost: Array, system: System = WHOLE
) -> tuple[Array, Array]:
    """Return the roots x (..., d), and how far each is from convergence, `left` (...,).

    By position (...,)::

        alive   given     there is something to solve; elsewhere x is the first start, and left 0
        lost    given     its numbers are not finite; x is NaN, and left 0
        left    returned  |psi(x) - z| in units of the tolerance: converged to 1, as far as rounding allows to STALLED
        failed  of left   above STALLED, or psi singular at x: no root from any start; x is NaN
    """
    xp = namespace(*starts)
    alive = alive & ~lost
    best, left = _newton(evaluate, starts[0], alive, system)
    for start in starts[1:]:
        if concrete(xp.any(failed(left))) is not True:
            break
        other, other_left = _newton(evaluate, start, alive & failed(left), system)
        better = failed(left) & ~failed(other_left)
        best = xp.where(better[..., None], other, best)
        left = xp.where(better, other_left, left)
    return xp.where((lost | failed(left))[..., None], float("nan"), best), left


def failed(left: Array) -> Array:
    """Return whether psi was not inverted, for the distance from convergence that `invert` returns."""
    return ~(left <= STALLED)


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


def failure_of(left: Array, update: int) -> KoopmanInverseError | None:
    """Return what tells where psi was not inverted, for the distance (b, h, i) from convergence; None: nowhere.

    It is None, too, where values cannot be asked, under ``jax.jit``.
    """
    if not concrete(namespace(left).any(failed(left))):
        return None
    owner = backend(left)
    flags, sizes = owner.to_numpy(failed(left)), owner.to_numpy(left)
    places = [tuple(int(n) for n in place) for place in zip(*flags.nonzero(), strict=True)]
    dtype = "float64" if namespace(left).finfo(left.dtype).bits == 64 else "float32"
    return KoopmanInverseError(places[:8], len(places), float(sizes[flags].max()) * TOLERANCE[dtype], update)
