"""The reference certifies itself: forms, loops, equations, laws and gradients of a mechanism on a backend.

Nothing here knows a mechanism by name: cases, forms, loops, laws and blocks come from its record. What each section
runs stands in `refattn.verify.itself.sections`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from refattn import backends
from refattn.backends import blas
from refattn.mechanisms.record import Mechanism
from refattn.verify.itself.sections import NotRun, Scope, Task, one_line, small_tiles, tasks
from refattn.verify.outcome import CheckReport, Row


def check(
    mechanism: Mechanism,
    backend: str | backends.Backend = "numpy",
    *,
    require_all: bool = False,
    progress: Callable[[Sequence[Task]], Iterable[Task]] = iter,
) -> CheckReport:
    """Check a mechanism on a backend.

    NumPy is given read-only arrays, array-api-strict runs under its strictest flags, a library that computes in
    float64 only when told is told, and tiles are cut small where they are large.

    Parameters
    ----------
    mechanism
        The record.
    backend
        A backend or its name.
    require_all
        Whether something that could not run makes `exit_code` 3.
    progress
        Wraps the sequence of tasks, for a progress bar.

    Returns
    -------
    CheckReport
        One row for each task. A task that raises disagrees; a backend that cannot be used is one row, "not run".
    """
    owner = backends.get(backend) if isinstance(backend, str) else backend
    reason = owner.why_unavailable()
    if reason is not None:
        row = Row("backend", owner.name, "not run", None, reason)
        return CheckReport(mechanism.name, owner.name, require_all, (row,))
    owner.enable_float64()
    # Threads of BLAS that wait for each other make small products many times slower on a busy machine.
    with _strictest(owner), small_tiles(owner), blas.one_thread():
        rows = tuple(_row(task) for task in progress(list(tasks(Scope(mechanism, owner)))))
    return CheckReport(mechanism.name, owner.name, require_all, rows)


def _row(task: Task) -> Row:
    try:
        share, detail = task.run()
    except NotRun as reason:
        return Row(task.section, task.name, "not run", None, str(reason))
    except Exception as error:  # whatever a broken mechanism raises is a finding, not the end of the check
        return Row(task.section, task.name, "disagrees", math.inf, one_line(error))
    return Row(task.section, task.name, "agrees" if share <= 1.0 else "disagrees", share, detail)


def _strictest(owner: backends.Backend) -> AbstractContextManager[None]:
    if owner.name != "strict":
        return nullcontext()
    strict: Any = owner.namespace()
    flags: AbstractContextManager[None] = strict.ArrayAPIStrictFlags(
        boolean_indexing=False, data_dependent_shapes=False
    )
    return flags
