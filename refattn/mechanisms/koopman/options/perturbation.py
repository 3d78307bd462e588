"""The perturbation psi = a pi + b phi of the identity pi by the operator's one-step map phi, and its inverse.

    identity   a = 1, b = epsilon         psi -> pi as epsilon -> 0: the update tends to phi(q')
    shift      a = epsilon, b = 1         psi -> phi as epsilon -> 0
    pencil     a = mix, b = epsilon       any of both: only a / b matters

psi(x) = t is solved by damped Newton from up to three starts, in `dense` phi(q'), q' and the last point: a step J^-1 r
of the residual r = psi(x) - t is halved until |r| falls; where the first start leads to no root the next is tried. A
position, which is a query (b, h, i), has converged where |psi(x) - t| is as small as `TOLERANCE` of the terms that it
sums, or, where rounding lets it get no smaller, `STALLED` times as much. Positions do not see each other: one that has
converged stays as it is. All take one full step in the end, which makes the error of the derivative as small as that of
the value.

Where there is no root it is NaN, and the core raises, unless what came in there was not finite: that goes on, as
everywhere in the cores. A root with a singular Jacobian, one of many, counts as none there.

psi need not be injective: with phi = tau pi + f, f(x) = D^T kappa(x), it is (a + b tau) pi + b f, injective where
|b| lip(f) < |a + b tau|, which `certify` asks with a bound of lip(f). For tau = 1 that says nothing of lip(phi) itself.
Elsewhere the root is the one that is reached from the first of the starts that leads to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.args import check
from refattn.ops.solve import condition, identity, solve
from refattn.xp import Array, backend, concrete, known, namespace, zeros

TOLERANCE = {"float64": 1e-13, "float32": 1e-6}
STALLED = 1e3
STEPS = 100
STEPS_UNSEEN = 12
"""Steps of Newton's method for each start, rejected ones included; and where values cannot be asked (jax.jit)."""


@dataclass(frozen=True)
class Perturbation:
    """What psi is made of the identity pi and the operator's one-step map phi.

    Attributes
    ----------
    epsilon
        At least 0, in the shapes of `Fit.ridge` but the last. None means 0.1.
    certify
        Whether to raise where psi is not certain to be one to one.
    of_pi, of_phi
        The numbers that a and b are, by name; "" means 1.
    """

    epsilon: float | Array | None = None
    certify: bool = False
    of_pi: ClassVar[str]
    of_phi: ClassVar[str]

    def __post_init__(self) -> None:
        check("certify", self.certify, bool)

    def shares(self, epsilon: Any) -> tuple[Any, Any]:
        """Return a and b, of psi = a pi + b phi."""
        numbers = {"": 1.0, "epsilon": epsilon, "mix": getattr(self, "mix", None)}
        return numbers[self.of_pi], numbers[self.of_phi]

    def shares_backward(self, d_a: Array, d_b: Array) -> dict[str, Array]:
        """Return the gradients of the numbers, by name, for those of a and b."""
        return {name: d for name, d in ((self.of_pi, d_a), (self.of_phi, d_b)) if name}


@dataclass(frozen=True)
class Shift(Perturbation):
    """psi = phi + epsilon pi: near the one-step map itself, which need not have an inverse."""

    of_pi, of_phi = "epsilon", ""


@dataclass(frozen=True)
class Identity(Perturbation):
    """psi = pi + epsilon phi: near the identity, and so one to one if epsilon is small."""

    of_pi, of_phi = "", "epsilon"


@dataclass(frozen=True)
class Pencil(Perturbation):
    """psi = mix pi + epsilon phi, with a mix above 0; None means 1. Any of the others, for only a / b matters."""

    mix: float | Array | None = None
    of_pi, of_phi = "mix", "epsilon"


PERTURBATIONS: dict[str, type[Perturbation]] = {"identity": Identity, "shift": Shift, "pencil": Pencil}


def invert(
    evaluate: Callable[..., Any], tried: Sequence[Array], alive: Array, step: Callable[..., Any] | None = None
) -> tuple[Array, Array]:
    """Return the roots x (..., d) of psi(x) = t, NaN where there is none, and `left` (...,).

    `evaluate` gives for x psi(x) - t (..., d), the size (...,) of the terms that it sums, and the Jacobian (..., d, d);
    or as third what `step` takes, which gives for it, r and a mask (...,) J^-1 r where the mask holds.

    By position (...,)::

        alive   given     there is something to solve; elsewhere x is the first start, and left 0
        left    returned  |psi(x) - t| in units of the tolerance: converged to 1, as far as rounding allows to STALLED;
                          above STALLED there is no root
    """
    xp, root = namespace(*tried), tried[0]
    tolerance = TOLERANCE["float64" if xp.finfo(root.dtype).bits == 64 else "float32"]
    left = xp.where(alive, math.inf, xp.zeros_like(root[..., 0]))
    for start in tried:
        x, change, length, going = start, xp.zeros_like(start), xp.zeros_like(left), left > STALLED
        norm, x_left = length + math.inf, length + math.inf
        for _ in range(STEPS if known(xp.any(going)) else STEPS_UNSEEN):
            next_x = x - length[..., None] * change
            residual, size, jacobian = evaluate(next_x)
            next_norm = xp.sqrt(xp.sum(residual * residual, axis=-1))
            accepted = going & (next_norm <= (1.0 - 1e-4 * length) * norm)
            if step is None:
                matrix = xp.where(accepted[..., None, None], jacobian, identity(x.shape[-1], x))
                next_change = solve(matrix, residual[..., None])[..., 0]
            else:
                next_change = step(jacobian, residual, accepted)
            x, change = xp.where(accepted[..., None], next_x, x), xp.where(accepted[..., None], next_change, change)
            x_left = xp.where(accepted, next_norm / (tolerance * (1.0 + size)), x_left)
            norm, length = xp.where(accepted, next_norm, norm), xp.where(accepted, 1.0, 0.5 * length)
            # What is as small as rounding allows is not halved on and on.
            going = going & (x_left > 1.0) & (length >= 2.0**-30) & ((x_left > STALLED) | (length >= 2.0**-3))
            if concrete(~xp.any(going)):
                break
        root, left = xp.where((x_left < left)[..., None], x - change, root), xp.where(x_left < left, x_left, left)
        if not concrete(xp.any(left > STALLED)):
            break
    return xp.where((left <= STALLED)[..., None], root, float("nan")), left


def is_regular(conditions: Array, n: int) -> Array:
    """Return whether matrices (..., n, n) of these conditions (...,) are regular to rounding."""
    return conditions * n * n * float(namespace(conditions).finfo(conditions.dtype).eps) < 1.0


def left_of(left: Array, jacobian: Array) -> tuple[Array, Array]:
    """Return `left` of `invert`, infinite where psi is singular at its root, for Jacobians (..., d, d) there.

    Behind it come their conditions (...,).
    """
    xp, eye = namespace(left), identity(jacobian.shape[-1], jacobian)
    known = xp.where((left <= STALLED)[..., None, None], jacobian, eye)
    conditions = condition(known)
    return xp.where(is_regular(conditions, jacobian.shape[-1]), left, math.inf), conditions


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


class KoopmanInverseError(ArithmeticError):
    """Raised where psi(x) = t was not solved at some positions.

    Attributes
    ----------
    positions
        (batch, head, query) of the first of them, at most 8.
    count
        How many there are.
    residual
        The largest |psi(x) - t| / (1 + the size of the terms that it sums), infinite where psi is singular at its root.
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


def failure_of(left: Array, lost: Callable[[], Array], update: int) -> KoopmanInverseError | None:
    """Return what tells where psi was not inverted, for `left` (b, h, i) of `invert`; None: nowhere but where lost.

    It is None, too, where values cannot be asked, under ``jax.jit``.
    """
    xp = namespace(left)
    failed = ~(left <= STALLED)
    if not concrete(xp.any(failed)) or not concrete(xp.any(failed := failed & ~lost())):
        return None
    owner = backend(left)
    flags, sizes = owner.to_numpy(failed), owner.to_numpy(xp.where(xp.isnan(left), math.inf, left))
    places = [tuple(int(n) for n in place) for place in zip(*flags.nonzero(), strict=True)]
    dtype = "float64" if xp.finfo(left.dtype).bits == 64 else "float32"
    return KoopmanInverseError(places[:8], len(places), float(sizes[flags].max()) * TOLERANCE[dtype], update)


def first_that_inverts(
    run: Callable[[tuple[int, ...]], tuple[Array, Any, KoopmanInverseError | None]], candidates: int, later: int
) -> tuple[Array, Any, tuple[int, ...]]:
    """Return what `run` gives for the first candidates of ridge and epsilon by which psi is inverted in all updates.

    A candidate is one for all queries. Where an update fails it takes its next one, and those after it start again.

    Raises
    ------
    KoopmanInverseError
        Where an update has no further candidate.
    """
    chosen = [0] * later
    while True:
        out, inner, failure = run(tuple(chosen))
        if failure is None:
            return out, inner, tuple(chosen)
        at = failure.update - 2
        if chosen[at] == candidates - 1:
            raise failure
        chosen[at:] = [chosen[at] + 1, *[0] * (later - at - 1)]


def picked(table: Array, chosen: tuple[int, ...]) -> Array:
    """Return the numbers of the candidates that are taken, (updates - 1,) or (updates - 1, d)."""
    rows, columns = table.shape[:2]
    found = [table[min(candidate, rows - 1), min(n, columns - 1), ...] for n, candidate in enumerate(chosen)]
    return namespace(table).stack(found) if found else table[0, :0, ...]


def picked_backward(table: Array, chosen: tuple[int, ...], d_picked: Array) -> Array:
    """Return the gradient of a table for that of `picked`: a candidate that was not taken has none."""
    (rows, columns), gradient = table.shape[:2], zeros(table.shape, table)
    for n, candidate in enumerate(chosen):
        row = identity(rows, table)[min(candidate, rows - 1), :]
        place = row[:, None] * identity(columns, table)[min(n, columns - 1), :]  # 1 at the number that was taken
        part = d_picked[n, ...]
        gradient = gradient + (part * place if part.shape == () else place[..., None] * part)
    return namespace(table).astype(gradient, table.dtype, copy=False)
