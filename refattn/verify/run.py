"""Verification of an implementation: its results on the designed cases of a mechanism, judged one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from refattn.checked import One, Whole, checked
from refattn.golden.storage import DTYPES
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.foreign.adapter import CallError, call, learned, roundings
from refattn.verify.foreign.conventions import differing
from refattn.verify.judge.budget import truth
from refattn.verify.judge.compare import judge
from refattn.verify.outcome import Decline, Outcome, Report


@checked(mechanism=Mechanism, case=Case, dtype=One(tuple(DTYPES)), grad=bool, seed=Whole())
def verify_case(
    mechanism: Mechanism,
    implementation: Any,
    case: Case,
    dtype: str,
    *,
    grad: bool = False,
    seed: int = 0,
    rounding: Iterable[str] = (),
) -> Outcome:
    """Run and judge one case in one dtype."""
    declared = (*roundings(implementation, mechanism.equations), *rounding)
    case_truth = truth(mechanism, case, dtype, grad=grad, seed=seed, roundings=declared)
    try:
        outputs = ("out", *mechanism.outputs)
        result = call(implementation, case_truth.inputs, case.options, dtype, case_truth.upstream, outputs)
        if isinstance(result, Decline):
            return Outcome(case.name, case.kind, dtype, "declined", result.reason)
        verdicts = judge(result, case_truth)
    except CallError as error:
        return Outcome(case.name, case.kind, dtype, "raises", str(error))
    if result.declined and all(verdict.agrees for verdict in verdicts):
        return Outcome(case.name, case.kind, dtype, "declined", result.declined, verdicts, (case_truth, result))
    needed = [f"d_{name}" for name in learned(case_truth.inputs)] if grad and not result.declined else []
    missing = [name for name in needed if name not in result.tensors]
    if missing:
        return Outcome(
            case.name, case.kind, dtype, "raises", f"returned no {', '.join(missing)}", verdicts, (case_truth, result)
        )
    status = "agrees" if all(verdict.agrees for verdict in verdicts) else "disagrees"
    return Outcome(case.name, case.kind, dtype, status, "", verdicts, (case_truth, result))


def verify(
    mechanism: Mechanism,
    implementation: Any,
    *,
    label: str = "",
    dtypes: Iterable[str] = DTYPES,
    grad: bool = False,
    rounding: Iterable[str] = (),
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Report:
    """Verify an implementation on all designed cases of a mechanism.

    Parameters
    ----------
    mechanism
        The record to verify against.
    implementation
        See `refattn.verify.foreign.adapter`.
    label
        The name that the report gives it.
    dtypes
        Storage types to run.
    grad
        Whether gradients are asked and judged too.
    rounding
        Equations that it rounds to the storage type, beside those of the record and of its attribute `roundings`.
    progress
        Wraps the sequence of cases, for a progress bar.

    Returns
    -------
    Report
        All verdicts; `exit_code` says whether it agrees.
    """
    dtypes = tuple(dtypes)
    plan = [(case, dtype) for dtype in dtypes for case in mechanism.cases]
    known: dict[str, Any] = {"grad": grad, "rounding": tuple(rounding)}
    outcomes = [verify_case(mechanism, implementation, case, dtype, **known) for case, dtype in progress(plan)]
    report = Report(mechanism.name, label or repr(implementation), grad, tuple(outcomes))
    if report.exit_code != 1:
        return report
    return replace(report, conventions=differing(implementation, mechanism, dtypes=dtypes))
