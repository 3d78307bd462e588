"""The reference certifies itself: forms, loops, equations, laws and gradients of a mechanism on a backend.

Nothing here knows a mechanism by name: cases, forms, loops, laws and blocks come from its record. What each section
runs stands in `refattn.verify.itself.sections`.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import get_context
from typing import Any

from refattn import backends
from refattn.backends import blas
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.verify.itself import sharded
from refattn.verify.itself.sections import NotRun, Scope, Task, one_line, small_tiles, tasks
from refattn.verify.outcome import CheckReport, Row


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
        Whether everything is run; otherwise a sample, which `refattn.verify.itself.sections.Scope` describes.
    require_all
        Whether something that could not run makes `exit_code` 3.
    mesh
        Of JAX alone: what is checked is each form on devices of a mesh of these sizes by axis, see
        `refattn.verify.itself.sharded`.
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
    owner = backends.get(backend) if isinstance(backend, str) else backend
    reason = owner.why_unavailable()
    if reason is not None:
        row = Row("backend", owner.name, "not run", None, reason)
        return CheckReport(mechanism.name, owner.name, require_all, (row,), full)
    # Small tiles are for small arrays; over devices long ones are compiled, too.
    with owner.with_float64(), _quiet(owner) if mesh is None else owner.full_precision():
        listed = tasks(Scope(mechanism, owner, full)) if mesh is None else sharded.tasks(mechanism, mesh, full)
        rows = tuple(_row(task) for task in progress(list(listed)))
    return CheckReport(mechanism.name, owner.name, require_all, rows, full)


def check_all(
    names: Sequence[str],
    backend: str = "numpy",
    *,
    full: bool = False,
    require_all: bool = False,
    jobs: int | None = None,
    mesh: Mapping[str, int] | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> Iterator[CheckReport]:
    """Check mechanisms of the registry on a backend, in processes side by side.

    Parameters
    ----------
    names
        The mechanisms.
    backend, full, require_all, mesh
        As for `check`; on a mesh everything runs in this process.
    jobs
        How many processes; None means one for each CPU that may be used, and one alone for a library that compiles or
        computes on a device. With 1 everything runs in this process.
    progress
        Wraps the sequence of tasks, for a progress bar.

    Yields
    ------
    CheckReport
        In the order of `names`, each as soon as it and those before it are complete. What a row says does not depend on
        the number of processes.
    """
    owner = backends.get(backend)
    if jobs is None:
        jobs = 1 if owner.name in ALONE else backends.workers()
    records = {name: registry.mechanism(name) for name in names}
    if jobs == 1 or mesh is not None or owner.why_unavailable() is not None:
        for record in records.values():
            yield check(record, owner, full=full, require_all=require_all, mesh=mesh, progress=progress)
        return
    listed = {name: list(tasks(Scope(record, owner, full))) for name, record in records.items()}
    units = [(name, part) for name, found in listed.items() for part in _units(found)]
    rows: dict[str, dict[int, Row]] = {name: {} for name in names}
    waiting = list(names)
    # A fresh interpreter for each: threads that this process has started, of BLAS for instance, do not survive a fork.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin, initargs=(backend,))
    try:
        running = {pool.submit(_run, name, backend, full, part): (name, part) for name, part in units}
        for done in progress(_Done(as_completed(running), len(running))):
            name, part = running[done]
            try:
                rows[name] |= dict(zip(part, done.result(), strict=True))
            except BrokenProcessPool:
                reason = "the process that ran it ended, of a lack of memory perhaps"
                rows[name] |= {n: _failed(listed[name][n], reason) for n in part}
            while waiting and len(rows[waiting[0]]) == len(listed[waiting[0]]):
                first = waiting.pop(0)
                ordered = tuple(rows[first][n] for n in range(len(listed[first])))
                yield CheckReport(first, owner.name, require_all, ordered, full)
    except BaseException:  # nobody waits for work that is not wanted any more
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


ALONE = ("jax", "cupy")
"""Backends whose work is not divided: one compiles with threads of its own, the other has one device."""


class _Done(Sequence[Any]):
    """Futures in the order in which they end, as a sequence whose length is known."""

    def __init__(self, futures: Iterable[Any], size: int) -> None:
        self.futures, self.size = futures, size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.futures)

    def __getitem__(self, at: Any) -> Any:
        raise TypeError("futures come in the order in which they end")


def _units(listed: Sequence[Task]) -> list[tuple[int, ...]]:
    """Return which tasks go together: those that share what is slow to compute, truths of cases; others alone."""
    together: dict[str, list[int]] = {}
    for n, task in enumerate(listed):
        together.setdefault(task.section if task.section in ("forms", "equations") else str(n), []).append(n)
    return [tuple(part) for part in together.values()]


_scopes: dict[tuple[str, str, bool], Scope] = {}
"""Of a process that checks: what was computed for the tasks before."""


def _begin(backend: str) -> None:
    # Interrupts are for the process that waits, which then ends these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    backends.get(backend).enable_float64()


def _run(name: str, backend: str, full: bool, part: Sequence[int]) -> list[Row]:
    """Run some tasks of a mechanism, in a process of its own."""
    owner = backends.get(backend)
    scope = _scopes.setdefault((name, backend, full), Scope(registry.mechanism(name), owner, full))
    listed = list(tasks(scope))
    with _quiet(owner):
        return [_row(listed[n]) for n in part]


@contextmanager
def _quiet(owner: backends.Backend) -> Iterator[None]:
    # Threads of BLAS that wait for each other make small products many times slower on a busy machine.
    with owner.full_precision(), _strictest(owner), small_tiles(owner), blas.one_thread():
        yield


def _failed(task: Task, reason: str) -> Row:
    return Row(task.section, task.name, "disagrees", math.inf, reason)


def _row(task: Task) -> Row:
    try:
        share, detail = task.run()
    except NotRun as reason:
        return Row(task.section, task.name, "not run", None, str(reason))
    except Exception as error:  # whatever a broken mechanism raises is a finding, not the end of the check
        return _failed(task, one_line(error))
    return Row(task.section, task.name, "agrees" if share <= 1.0 else "disagrees", share, detail)


def _strictest(owner: backends.Backend) -> AbstractContextManager[None]:
    if owner.name != "strict":
        return nullcontext()
    strict: Any = owner.namespace()
    flags: AbstractContextManager[None] = strict.ArrayAPIStrictFlags(
        boolean_indexing=False, data_dependent_shapes=False
    )
    return flags
