"""The reference certifies itself: forms, loops, equations, laws and gradients of a mechanism on a backend.

Nothing here knows a mechanism by name: cases, forms, loops, laws and blocks come from its record. What each section
runs stands in `refattn.verify.sections`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from refattn import backends
from refattn.backends import blas
from refattn.mechanisms.record import Mechanism
from refattn.verify.sections import NotRun, Scope, Task, one_line, small_tiles, tasks


@dataclass(frozen=True)
class Row:
    """What became of one check.

    Attributes
    ----------
    section
        "forms", "loops", "equations", "laws" or "gradients".
    name
        What was checked.
    status
        "agrees", "disagrees" or "not run".
    share
        The largest used share of the allowed error: infinite where no error is allowed or something raised, None where
        nothing was measured.
    detail
        Where that was, what went wrong, or how to get what is missing.
    """

    section: str
    name: str
    status: str
    share: float | None
    detail: str


@dataclass(frozen=True)
class CheckReport:
    """All rows of one mechanism on one backend."""

    mechanism: str
    backend: str
    require_all: bool
    rows: tuple[Row, ...]

    def counts(self) -> dict[str, int]:
        """Return the number of rows by status."""
        return {status: sum(row.status == status for row in self.rows) for status in ("agrees", "disagrees", "not run")}

    @property
    def exit_code(self) -> int:
        """0 all that ran agrees, 1 something disagrees, 3 nothing ran or, where all is required, not all did."""
        counts = self.counts()
        if counts["disagrees"]:
            return 1
        return 3 if not counts["agrees"] or (self.require_all and counts["not run"]) else 0

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data for JSON; a share that is not finite is null."""
        data = dataclasses.asdict(self)
        for row in data["rows"]:
            if row["share"] is not None and not math.isfinite(row["share"]):
                row["share"] = None
        return {**data, "counts": self.counts(), "exit_code": self.exit_code}


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
