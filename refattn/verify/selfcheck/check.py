"""The reference certifies itself: implementations, loops, equations, properties and gradients on a backend.

Nothing here knows a mechanism by name: cases, implementations, loops, properties and blocks come from its record. What
each section runs stands in `refattn.verify.selfcheck.sections`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from typing import Any

from refattn import args, backends, many_runs
from refattn.backends import blas
from refattn.many_runs import HERE, Unit, Where
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.verify.outcome import CheckReport, Row
from refattn.verify.parallel import named
from refattn.verify.selfcheck import sharded
from refattn.verify.selfcheck.sections import Scope, Task, small_tiles, tasks


def check(
    mechanism: Mechanism,
    backend: str | backends.Backend = "numpy",
    *,
    full: bool = False,
    require_all: bool = False,
    mesh: Mapping[str, int] | None = None,
    progress: Callable[[Sequence[Task]], Iterable[Task]] = iter,
) -> CheckReport:
    """Check a mechanism on a backend, in this process.

    NumPy is given read-only arrays, array-api-strict runs under its strictest flags, a library that computes in
    float64 only when told is told, and tiles are cut small where they are large.

    Parameters
    ----------
    mechanism
        The record.
    backend
        A backend or its name.
    full
        Whether everything is run; otherwise a sample, which `refattn.verify.selfcheck.sections.Scope` describes.
    require_all
        Whether something that could not run makes `exit_code` 3.
    mesh
        Of JAX alone: what is checked is each implementation on devices of a mesh of these sizes by axis, see
        `refattn.verify.selfcheck.sharded`.
    progress
        Wraps the sequence of tasks, for a progress bar.

    Returns
    -------
    CheckReport
        One row for each task. A task that raises disagrees; a backend that cannot be used is one row, "not run".

    Examples
    --------
    >>> import refattn as ra
    >>> from refattn.verify import check
    >>> report = check(ra.mechanism("softmax"), progress=lambda tasks: tasks[:1])  # the first alone
    >>> report.counts()
    {'agrees': 1, 'disagrees': 0, 'not run': 0}
    """
    args.check("mechanism", mechanism, Mechanism)
    owner = backends.get(backend) if isinstance(backend, str) else backend
    reason = owner.why_unavailable()
    if reason is not None:
        row = Row("backend", owner.name, "not run", None, reason)
        return CheckReport(mechanism.name, owner.name, require_all, (row,), full)
    # Small tiles are for small arrays; over devices long ones are compiled, too.
    with owner.with_float64(), _quiet(owner) if mesh is None else owner.full_precision():
        listed = tasks(Scope(mechanism, owner, full)) if mesh is None else sharded.tasks(mechanism, mesh, full)
        rows = tuple(task.row() for task in progress(list(listed)))
    return CheckReport(mechanism.name, owner.name, require_all, rows, full)


def check_all(
    names: Sequence[str],
    backend: str = "numpy",
    *,
    full: bool = False,
    require_all: bool = False,
    where: Where = HERE,
    mesh: Mapping[str, int] | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Iterator[CheckReport]:
    """Check mechanisms on a backend, in processes side by side or on a cluster.

    Parameters
    ----------
    names
        The mechanisms, as `refattn.mechanism` takes them: other processes find them by these names.
    backend, full, require_all, mesh
        As for `check`; on a mesh everything runs in this process.
    where
        The processes; its `jobs` None means one alone for a library that compiles or computes on a device.
    progress
        Wraps the sequence of tasks, for a progress bar.

    Yields
    ------
    CheckReport
        In the order of `names`, each as soon as it and those before it are complete. What a row says does not depend on
        where it was found.
    """
    owner = backends.get(backend)
    if where.jobs is None:
        where = replace(where, jobs=1 if owner.name in ALONE else backends.workers())
    records = {name: registry.mechanism(name) for name in names}
    if where.plain or mesh is not None or owner.why_unavailable() is not None:
        for record in records.values():
            yield check(record, owner, full=full, require_all=require_all, mesh=mesh, progress=progress)
        return
    listed = {name: list(tasks(Scope(record, owner, full))) for name, record in records.items()}
    units = [
        Unit(f"check {named(records[name])} {backend} full={full} {part}", _run, (name, backend, full, part))
        for name, found in listed.items()
        for part in _parts(found)
    ]
    rows: dict[str, dict[int, Row]] = {name: {} for name in names}
    waiting = list(names)
    for unit, found in many_runs.run(units, where, progress=progress, lost=_lost):
        name, _, _, part = unit.arguments
        rows[name] |= {n: Row(*row) for n, row in zip(part, found, strict=True)}
        while waiting and len(rows[waiting[0]]) == len(listed[waiting[0]]):
            first = waiting.pop(0)
            ordered = tuple(rows[first][n] for n in range(len(listed[first])))
            yield CheckReport(records[first].name, owner.name, require_all, ordered, full)


ALONE = ("jax", "cupy")
"""Backends whose work is not divided: one compiles with threads of its own, the other has one device."""


def _parts(listed: Sequence[Task]) -> list[tuple[int, ...]]:
    """Return which tasks go together: those that share what is slow to compute, truths of cases; others alone."""
    together: dict[str, list[int]] = {}
    for n, task in enumerate(listed):
        together.setdefault(task.section if task.section in ("implementations", "equations") else str(n), []).append(n)
    return [tuple(part) for part in together.values()]


@functools.lru_cache(maxsize=8)
def _scope(name: str, backend: str, full: bool) -> Scope:
    """Return, in a process that checks, what was computed for the tasks before."""
    return Scope(registry.mechanism(name), backends.get(backend), full)


def _run(name: str, backend: str, full: bool, part: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return the rows of some tasks of a mechanism."""
    scope = _scope(name, backend, full)
    with scope.owner.with_float64(), _quiet(scope.owner):
        listed = list(tasks(scope))
        return [astuple(listed[n].row()) for n in part]


def _lost(unit: Unit) -> list[tuple[Any, ...]]:
    name, backend, full, part = unit.arguments
    listed = list(tasks(_scope(name, backend, full)))
    return [(listed[n].section, listed[n].name, "disagrees", math.inf, many_runs.ENDED) for n in part]


@contextmanager
def _quiet(owner: backends.Backend) -> Iterator[None]:
    # Threads of BLAS that wait for each other make small products many times slower on a busy machine.
    with owner.full_precision(), _strictest(owner), small_tiles(owner), blas.one_thread():
        yield


def _strictest(owner: backends.Backend) -> AbstractContextManager[None]:
    if owner.name != "strict":
        return nullcontext()
    strict: Any = owner.namespace()
    flags: AbstractContextManager[None] = strict.ArrayAPIStrictFlags(
        boolean_indexing=False, data_dependent_shapes=False
    )
    return flags
