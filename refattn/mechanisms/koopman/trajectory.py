"""The way of a trajectory: which candidate of ridge and epsilon an update takes, and what goes into its numbers.

Letters: b batch, h head, i query, j key, d width.
"""

from __future__ import annotations

from typing import Any

from refattn import equations
from refattn.mechanisms.koopman import update
from refattn.mechanisms.koopman.observables import Observables
from refattn.mechanisms.koopman.options import Numbers, Options
from refattn.mechanisms.koopman.perturbation import KoopmanInverseError
from refattn.ops.solve import identity
from refattn.xp import Array, namespace, zeros


def jitter_unit(observables: Observables, between: Array, causal: bool) -> Array:
    """Return delta / jitter (b, h, i, 1)."""
    xp, seen = namespace(between), observables.seen
    if causal:
        second = 0.0 if observables.kernel.name == "linear" else observables.kernel.weight
        return zeros((*seen.shape[:3], 1), between) + second + 1.0
    diagonal = xp.sum(between * identity(between.shape[-1], between), axis=-1)
    own = xp.where(seen, diagonal[:, :, None, :], 0.0)
    return xp.sum(own, axis=-1, keepdims=True) / count(seen, between)


def count(seen: Array, like: Array) -> Array:
    """Return how many keys each query sees (b, h, i, 1), 1 where it sees none."""
    xp = namespace(like)
    found = xp.sum(xp.astype(seen, like.dtype), axis=-1, keepdims=True)
    return xp.where(found == 0.0, 1.0, found)


def advance(
    trajectory: list[Array], attended: Array, observables: Observables, gram: Any, numbers: Numbers, options: Options
) -> tuple[Array, update.Saved, int]:
    """Return the next query by the first candidate of ridge and epsilon that can be inverted, and which that is."""
    xp, number = namespace(attended), len(trajectory)
    points = xp.stack(trajectory[first_points(number, options.window) :], axis=3)
    tables = (numbers.ridge, numbers.epsilon)
    candidates = max(table.shape[0] for table in tables)
    for candidate in range(candidates):
        ridge, epsilon = (pick(table, candidate, number - 2) for table in tables)
        try:
            root, saved = equations.active(update).forward(
                points,
                attended,
                observables,
                gram,
                ridge=ridge,
                epsilon=epsilon,
                mix=numbers.mix,
                options=options,
                update=number,
            )
        except KoopmanInverseError:
            if candidate == candidates - 1:
                raise
            continue
        return root, saved, candidate
    raise AssertionError("there is at least one candidate")


def pick(table: Array, candidate: int, later: int) -> Array:
    """Return the number (), or those of the coordinates (d,), of one candidate and update.

    The table may have 1 in place of either size.
    """
    return table[min(candidate, table.shape[0] - 1), min(later, table.shape[1] - 1), ...]


def jitter_backward(
    observables: Observables, between: Array, causal: bool, d_unit: Array
) -> tuple[Array | None, Array | None]:
    """Return the gradients of `jitter_unit` with respect to k(K, K), or where causal to the kernel's weight."""
    xp, seen = namespace(between), observables.seen
    if causal:
        # forward: delta / jitter = weight + 1
        return None, None if observables.kernel.name == "linear" else xp.sum(d_unit)
    # forward: delta / jitter = mean of E_jj over the keys that are seen
    own = xp.where(seen, d_unit / count(seen, between), 0.0)
    return xp.sum(own, axis=2)[..., None] * identity(between.shape[-1], between), None


def first_points(trajectory_length: int, window: int | None) -> int:
    """Return the index of the first point that the operator is fitted to, after so many points."""
    return 0 if window is None else max(0, trajectory_length - window - 1)


def table_gradient(table: Array, chosen: tuple[int, ...], parts: list[Array]) -> Array:
    """Return the gradient of a table of ridges or epsilons from those of the updates: what was not taken has none."""
    xp = namespace(table)
    rows, columns = table.shape[:2]
    gradient = zeros(table.shape, table)
    for later, (candidate, part) in enumerate(zip(chosen, parts, strict=True)):
        row = identity(rows, table)[min(candidate, rows - 1), :]
        column = identity(columns, table)[min(later, columns - 1), :]
        place = row[:, None] * column[None, :]
        gradient = gradient + (part * place if part.shape == () else place[..., None] * part)
    return xp.astype(gradient, table.dtype, copy=False)
