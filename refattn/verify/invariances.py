"""What checks without designed cases share: a kernel that is called, a row of what came of it, and the report.

`large`, `memory` and `bitwise` have the checks; each is a function without arguments that returns the used share of the
allowed error and a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from refattn.mechanisms.record import Mechanism
from refattn.verify.adapters.adapter import CallError, call
from refattn.verify.outcome import CheckReport, Decline, Result, Row
from refattn.verify.selfcheck.sections import NotRun, one_line

Found = tuple[float, str]
Tasks = Sequence[tuple[str, Callable[[], Found]]]


def answered(kernel: Any, *given: Any, partly: bool = False, **more: Any) -> Result:
    """Call a kernel, as `call` does; NotRun if it declines, or without `partly` if it declines gradients alone."""
    found = call(kernel, *given, **more)
    reason = found.reason if isinstance(found, Decline) else found.declined
    if isinstance(found, Decline) or (reason and not partly):
        raise NotRun(f"declined: {reason}")
    return found


def report(
    mechanism: Mechanism,
    label: str,
    section: str,
    tasks: Tasks,
    progress: Callable[[Sequence[Any]], Iterable[Any]],
) -> CheckReport:
    """Run tasks, each of which is a row."""
    rows = tuple(_row(section, name, run) for name, run in progress(tasks))
    return CheckReport(mechanism.name, label, False, rows, full=True)


def _row(section: str, name: str, run: Callable[[], Found]) -> Row:
    try:
        share, detail = run()
    except NotRun as reason:
        return Row(section, name, "not run", None, str(reason))
    except CallError as error:
        return Row(section, name, "disagrees", math.inf, str(error))
    except Exception as error:  # what it returned cannot be compared
        return Row(section, name, "disagrees", math.inf, one_line(error))
    return Row(section, name, "agrees" if share <= 1.0 else "disagrees", share, detail)
