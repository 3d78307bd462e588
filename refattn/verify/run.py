"""Verification of an implementation: its results on the designed cases of a mechanism, judged one by one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.adapter import CallError, Decline, Result, call, learned, roundings
from refattn.verify.budget import Truth, truth
from refattn.verify.compare import Verdict, compare

if TYPE_CHECKING:
    from refattn.verify.suspects import Suspects

DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Outcome:
    """What became of one case in one dtype.

    Attributes
    ----------
    status
        "agrees", "disagrees", "raises" (with `detail`) or "declined" (with `detail`).
    verdicts
        One per tensor that was returned.
    seen
        What was judged: the truth, and what was returned; None where nothing was.
    """

    case: str
    kind: str
    dtype: str
    status: str
    detail: str = ""
    verdicts: tuple[Verdict, ...] = ()
    seen: tuple[Truth, Result] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Report:
    """All outcomes of one implementation.

    Attributes
    ----------
    suspects
        Where the error is, from `refattn.verify.suspects.locate`; None where nobody asked, or no number disagrees.
    smallest
        Lines of Python that run the smallest case that fails: see `refattn.verify.shrink`.
    """

    mechanism: str
    implementation: str
    grad: bool
    outcomes: tuple[Outcome, ...]
    suspects: Suspects | None = None
    smallest: tuple[str, ...] = ()
    conventions: dict[str, str] = field(default_factory=dict)
    """Where something fails, the conventions that are not those of refattn: see `refattn.verify.conventions`."""

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many cases agreed, failed and were declined: by case class, then "all"."""
        table: dict[str, dict[str, int]] = {}
        for outcome in self.outcomes:
            column = {"agrees": "agreed", "declined": "declined"}.get(outcome.status, "failed")
            for kind in (outcome.kind, "all"):
                row = table.setdefault(kind, {"run": 0, "agreed": 0, "failed": 0, "declined": 0})
                row[column] += 1
                row["run"] += column != "declined"
        total = table.pop("all", {"run": 0, "agreed": 0, "failed": 0, "declined": 0})
        return {**table, "all": total}

    @property
    def exit_code(self) -> int:
        """0 all that ran agree, 1 something fails, 3 nothing was run."""
        total = self.counts()["all"]
        if not total["run"]:
            return 3
        return 1 if total["failed"] else 0

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data for JSON; an infinite share is null."""
        data = dataclasses.asdict(replace(self, outcomes=tuple(replace(one, seen=None) for one in self.outcomes)))
        for one in data["suspects"]["ranked"] if data["suspects"] else ():
            one["share"] = None if math.isinf(one["share"]) else one["share"]
        if data["suspects"] and data["suspects"]["departure"]:
            verdict = data["suspects"]["departure"]["verdict"]
            verdict["share"] = None if math.isinf(verdict["share"]) else verdict["share"]
        for outcome in data["outcomes"]:
            del outcome["seen"]
            for verdict in outcome["verdicts"]:
                verdict["agrees"] = verdict["share"] <= 1.0
                if math.isinf(verdict["share"]):
                    verdict["share"] = None
        return {**data, "counts": self.counts(), "exit_code": self.exit_code}


def judge(result: Result, case_truth: Truth) -> tuple[Verdict, ...]:
    """Return the verdicts on the tensors that an implementation returned; unknown names are ignored."""
    return tuple(
        compare(name, tensor, result.dtypes[name], case_truth)
        for name, tensor in result.tensors.items()
        if name in case_truth.values
    )


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
        See `refattn.verify.adapter`.
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
    from refattn.verify.conventions import differing  # only here is it needed

    return replace(report, conventions=differing(implementation, mechanism, dtypes=dtypes))
