"""What checks without designed cases share: a kernel that is called, a row of what came of it, and the report.

`large`, `memory` and `bitwise` have the checks; each is a function without arguments that returns the used share of the
allowed error and a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from refattn.mechanisms.record import Mechanism
from refattn.verify.adapters.adapter import CallError, call
from refattn.verify.outcome import CheckReport, Decline, Result
from refattn.verify.selfcheck.sections import Found, NotRun, Task

Tasks = Sequence[tuple[str, Callable[[], Found]]]


def answered(kernel: Any, *given: Any, partly: bool = False, **more: Any) -> Result:
    """Call a kernel, as `call` does; NotRun if it declines, or without `partly` if it declines gradients alone."""
    found = call(kernel, *given, **more)
    reason = found.reason if isinstance(found, Decline) else found.declined
    if isinstance(found, Decline) or (reason and not partly):
        raise NotRun(f"declined: {reason}")
    return found


def report(
    mechanism: Mechanism, label: str, section: str, tasks: Tasks, progress: Callable[[Sequence[Any]], Iterable[Any]]
) -> CheckReport:
    """Run tasks, each of which is a row."""
    listed = [Task(section, name, partial(_ended, run)) for name, run in tasks]
    return CheckReport(mechanism.name, label, False, tuple(task.row() for task in progress(listed)), full=True)


def _ended(run: Callable[[], Found]) -> Found:
    """Run a task; what is wrong with a call is told as it is."""
    try:
        return run()
    except CallError as error:
        return math.inf, str(error)
