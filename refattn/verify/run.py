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
from refattn.verify.judge.derivatives import DTYPES as DERIVED
from refattn.verify.judge.derivatives import with_derivatives
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
    derivatives: Iterable[str] = (),
) -> Outcome:
    """Run and judge one case in one dtype; of `derivatives`, "tangent" and "hessian", those that are asked, too."""
    declared = (*roundings(implementation, mechanism.equations), *rounding)
    case_truth = truth(mechanism, case, dtype, grad=grad, seed=seed, roundings=declared)
    asked = tuple(derivatives)
    if asked:
        case_truth = with_derivatives(case_truth, mechanism, case, dtype, asked, seed)
    try:
        outputs = ("out", *mechanism.outputs)
        result = call(
            implementation,
            case_truth.inputs,
            case.options,
            dtype,
            case_truth.upstream,
            outputs,
            along=case_truth.along,
            asked=asked,
        )
        if isinstance(result, Decline):
            return Outcome(case.name, case.kind, dtype, "declined", result.reason)
        verdicts = judge(result, case_truth)
    except CallError as error:
        return Outcome(case.name, case.kind, dtype, "raises", str(error))
    if result.declined and all(verdict.agrees for verdict in verdicts):
        return Outcome(case.name, case.kind, dtype, "declined", result.declined, verdicts, (case_truth, result))
    needed = [f"d_{name}" for name in learned(case_truth.inputs)] if grad and not result.declined else []
    if asked and not result.declined:
        needed += [
            name for name in case_truth.values if name == "t_out" or name[:2] == "h_" and name[2:] in case_truth.along
        ]
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
    derivatives: Iterable[str] = (),
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
    derivatives
        "tangent": the derivative of its outputs along a direction of all its arrays is judged too. "hessian": that of
        its gradients, which needs `grad`. Both in float64 and float32 alone.
    progress
        Wraps the sequence of cases, for a progress bar.

    Returns
    -------
    Report
        All verdicts; `exit_code` says whether it agrees.
    """
    dtypes = tuple(dtypes)
    plan = [(case, dtype) for dtype in dtypes for case in mechanism.cases]
    asked = tuple(derivatives)
    if asked and set(dtypes) - {*DERIVED}:
        raise ValueError(f"dtypes: got {', '.join(dtypes)}, needs {' or '.join(DERIVED)} where derivatives are asked")
    if "hessian" in asked and not grad:
        raise ValueError("grad: got False, needs True where the derivatives of gradients are asked")
    known: dict[str, Any] = {"grad": grad, "rounding": tuple(rounding), "derivatives": asked}
    outcomes = [verify_case(mechanism, implementation, case, dtype, **known) for case, dtype in progress(plan)]
    report = Report(mechanism.name, label or repr(implementation), grad, tuple(outcomes))
    if report.exit_code != 1 or asked:  # conventions are of what comes out
        return report
    return replace(report, conventions=differing(implementation, mechanism, dtypes=dtypes))
