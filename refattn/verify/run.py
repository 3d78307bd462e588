"""Verification of a kernel: its results on the designed cases of a mechanism, judged one by one."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from refattn.args import One, Whole, check, checked
from refattn.golden.storage_types import DTYPES, SCALED
from refattn.mechanisms.case_features import MANY, features
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.adapters import interpreted
from refattn.verify.adapters.adapter import (
    CallError,
    attribute,
    call,
    learned,
    own_keep,
    pulls,
)
from refattn.verify.adapters.conventions import differing
from refattn.verify.adapters.declarations import of_float8, read_roundings, roundings
from refattn.verify.outcome import Decline, Outcome, Report, Result, Truth
from refattn.verify.tolerance import sampled
from refattn.verify.tolerance.budget import rounded, truth, with_equations
from refattn.verify.tolerance.compare import judge
from refattn.verify.tolerance.derivatives import DTYPES as DERIVED
from refattn.verify.tolerance.derivatives import with_derivatives

CROSSED = f"more than {MANY[0]} keys"


@checked(mechanism=Mechanism, case=Case, dtype=One((*DTYPES, *SCALED)), grad=bool, seed=Whole())
def verify_case(
    mechanism: Mechanism,
    kernel: Any,
    case: Case,
    dtype: str,
    *,
    grad: bool = False,
    seed: int = 0,
    rounding: Iterable[str] = (),
    derivatives: Iterable[str] = (),
) -> Outcome:
    """Run and judge one case in one dtype; of `derivatives`, "tangent" and "hessian", those that are asked, too.

    >>> import refattn as ra
    >>> from refattn.verify import verify_case
    >>> def attend(q, k, v):
    ...     return ra.softmax.forward(q, k, v, implementation="tiled")[0]
    >>> record = ra.mechanism("softmax")
    >>> outcome = verify_case(record, attend, record.case("tiny"), "float32")
    >>> outcome.status, outcome.verdicts[0].share < 1
    ('agrees', True)
    """
    declared = read_roundings(rounding if isinstance(rounding, Mapping) else tuple(rounding), mechanism)
    declared |= roundings(kernel, mechanism)
    small = dtype in SCALED
    further = pulls(kernel, mechanism.pulled) if grad and not small else ()
    more: dict[str, Any] = {"roundings": declared, "further": further}
    more |= of_float8(kernel) if small else {}
    asked = tuple(derivatives)
    long = sampled.is_long(mechanism, case)
    if small and long:
        raise sampled.TooLargeError(f"{case.name}: got more than {sampled.FULL} scores, which {dtype} needs at most")
    if asked and long:
        raise ValueError(f"{case.name}: its derivatives are judged where the definition can hold all scores alone")
    try:
        if "keep" in case.inputs and attribute(kernel, "keep") is not None:
            more["replaced"] = {"keep": own_keep(kernel, case.name, case.inputs["keep"].shape)}
        if long:
            case_truth = sampled.long_truth(mechanism, case, dtype, grad=grad, seed=seed, further=further)
        else:
            case_truth = truth(mechanism, case, dtype, grad=grad and not small, seed=seed, **more)
        if asked:
            case_truth = with_derivatives(case_truth, mechanism, case, dtype, asked, seed)
        factors = [case_truth.factors[name] for name in "qkv"] if small else []
        # With their shapes: lists of lists lose those of empty arrays on the way to another process.
        descale: dict[str, Any] = {"descale": [(x.shape, x.ravel().tolist()) for x in factors]} if small else {}
        descale |= (
            {"descale_whole": [((), x) for x in case_truth.factors["whole"].tolist()]} if dtype == "nvfp4" else {}
        )
        result = call(
            kernel,
            case_truth.inputs,
            {**case.options, **descale},
            dtype,
            case_truth.upstream,
            ("out", *mechanism.outputs),
            along=case_truth.along,
            asked=asked,
            further=case_truth.further,
        )
        if isinstance(result, Decline):
            return Outcome(case.name, case.kind, dtype, "declined", result.reason)
        if result.judged and not long:
            types = {id: _type_of(id, result, dtype, mechanism) for id in result.judged}
            case_truth = with_equations(mechanism, case, dtype, case_truth, types, declared, seed)
        if small and grad:
            result = replace(result, declined="no gradients in float8")
        if attribute(kernel, "slack") == "unwritten":
            result = with_slack_of(result, case_truth)
        note = ""
        if long:
            verdicts, note = sampled.judge_long(mechanism, case, dtype, case_truth, result, declared, seed)
        else:
            verdicts = judge(result, case_truth)
    except CallError as error:
        return Outcome(case.name, case.kind, dtype, "raises", str(error))
    rest: dict[str, Any] = {"verdicts": verdicts, "seen": None if long else (case_truth, result), "note": note}
    if result.declined and all(verdict.agrees for verdict in verdicts):
        return Outcome(case.name, case.kind, dtype, "declined", result.declined, **rest)
    # Other arrays have a gradient, and few kernels give it.
    given = [name for name in learned(case_truth.inputs) if name in "qkv"]
    needed = [f"d_{name}" for name in given] if grad and not result.declined else []
    if asked and not result.declined:
        needed += [
            name for name in case_truth.values if name == "t_out" or name[:2] == "h_" and name[2:] in case_truth.along
        ]
    missing = [name for name in needed if name not in result.tensors]
    if missing:
        return Outcome(case.name, case.kind, dtype, "raises", f"returned no {', '.join(missing)}", **rest)
    status = "agrees" if all(verdict.agrees for verdict in verdicts) else "disagrees"
    return Outcome(case.name, case.kind, dtype, status, "", **rest)


def with_slack_of(result: Result, known: Truth) -> Result:
    """Return a result with the rows of the truth where the lengths of its case leave them out."""
    tensors, rows, keys = dict(result.tensors), "q_lengths", "k_lengths"
    places = [(name, rows, 2) for name in ("out", "lse", "max", "d_q")] + [(name, keys, 2) for name in ("d_k", "d_v")]
    places += [place for id in result.judged for place in ((id, rows, 2), (id, keys, 3))]  # of pairs, or of queries
    sizes = {rows: known.inputs["q"].shape[2], keys: known.inputs["k"].shape[2]}
    for name, which, axis in places:
        got, size = tensors.get(name), sizes[which]
        if got is None or which not in known.inputs or got.shape != known.values[name].shape:
            continue
        if got.shape[axis : axis + 1] == (size,):
            beyond = np.arange(size) >= known.inputs[which][:, None]
            beyond = beyond.reshape(got.shape[0], *(size if n == axis else 1 for n in range(1, got.ndim)))
            tensors[name] = np.where(beyond, rounded(known, name).astype(got.dtype), got)
    return replace(result, tensors=tensors)


def _not_run(mechanism: Mechanism, outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """Return in words where cases cross a tile or chunk, and none that ran does: of each type."""
    crossing = {case.name for case in mechanism.cases if CROSSED in features(case)}
    ran: dict[str, bool] = {}
    for outcome in outcomes:
        if outcome.status != "declined":
            ran[outcome.dtype] = ran.get(outcome.dtype, False) or outcome.case in crossing
    without = [dtype for dtype, crossed in ran.items() if not crossed]
    if not crossing or not without:
        return ()
    of = "" if len(without) == len(ran) else f" in {', '.join(without)}"
    return (f"nothing that ran{of} crosses a tile or chunk of {MANY[0]} keys",)


def _type_of(id: str, result: Result, dtype: str, mechanism: Mechanism) -> str:
    """Return the storage type that an equation's value came in."""
    if id not in mechanism.equations or id.startswith("d"):
        raise CallError(f"returned {id}, which is no equation of the forward of {mechanism.name}")
    came = result.dtypes[id]
    if came not in DTYPES:
        raise CallError(f"returned {id} of dtype {came}, needs a floating one")
    return came


def verify(
    mechanism: Mechanism,
    kernel: Any,
    *,
    label: str = "",
    dtypes: Iterable[str] = DTYPES,
    grad: bool = False,
    rounding: Iterable[str] = (),
    derivatives: Iterable[str] = (),
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    outcomes: Callable[..., Iterable[Outcome]] | None = None,
    first: Container[tuple[str, str]] = (),
) -> Report:
    """Verify a kernel on all cases of a mechanism, which are the designed ones unless the record has others.

    Parameters
    ----------
    mechanism
        The record to verify against.
    kernel
        See `refattn.verify.adapters.adapter`.
    label
        The name that the report gives it.
    dtypes
        Storage types to run.
    grad
        Whether gradients are asked and judged too.
    rounding
        What it rounds beside its attribute `roundings`: names, or "NAME=TYPE".
    derivatives
        "tangent": the derivative of its outputs along a direction of all its arrays is judged too. "hessian": that of
        its gradients, which needs `grad`. Both in float64 and float32 alone.
    seed
        Of the random numbers of all inputs.
    progress
        Wraps the sequence of cases, for a progress bar.
    outcomes
        Runs the cases in place of `verify_case`, one after the other: `refattn.verify.parallel.outcomes` with its first
        arguments.
    first
        Names of cases, each with a type, that are run before all others; the report has them in their usual order.

    Returns
    -------
    Report
        All verdicts; `exit_code` says whether it agrees.

    Examples
    --------
    >>> import dataclasses, refattn as ra
    >>> from refattn.verify import verify
    >>> record = ra.mechanism("softmax")
    >>> few = dataclasses.replace(record, cases=(record.case("tiny"), record.case("plain")))
    >>> def unscaled(q, k, v):
    ...     return ra.softmax.forward(q, k, v, scale=1.0)[0]
    >>> report = verify(few, unscaled, dtypes=["float32"])
    >>> report.counts()["all"], report.exit_code
    ({'run': 2, 'agreed': 0, 'failed': 2, 'declined': 0}, 1)
    """
    check("mechanism", mechanism, Mechanism)
    dtypes = tuple(dtypes)
    usual = [(case, dtype) for dtype in dtypes for case in mechanism.cases]
    plan = sorted(usual, key=lambda one: (one[0].name, one[1]) not in first)
    asked = tuple(derivatives)
    if asked and set(dtypes) - {*DERIVED}:
        raise ValueError(f"dtypes: got {', '.join(dtypes)}, needs {' or '.join(DERIVED)} where derivatives are asked")
    if "hessian" in asked and not grad:
        raise ValueError("grad: got False, needs True where the derivatives of gradients are asked")
    known: dict[str, Any] = {"grad": grad, "rounding": tuple(rounding), "derivatives": asked, "seed": seed}
    if outcomes is None:
        found = [verify_case(mechanism, kernel, case, dtype, **known) for case, dtype in progress(plan)]
    else:
        found = [*outcomes(plan, progress=progress, **known)]
    places = {(case.name, dtype): number for number, (case, dtype) in enumerate(usual)}
    found.sort(key=lambda one: places[one.case, one.dtype])
    report = Report(mechanism.name, label or repr(kernel), grad, tuple(found), seed=seed, record=mechanism)
    where: dict[str, Any] = {name: str(attribute(kernel, name) or "") for name in ("framework", "device")}
    told = getattr(kernel, "interpreted", None)
    where["interpreted"] = interpreted.told() if told is None else str(told)
    report = replace(report, reference=getattr(kernel, "reference", False) is True, **where)
    report = replace(report, not_run=_not_run(mechanism, found))
    # Conventions are of what comes out: one that only hangs or raises would be waited for again.
    if asked or not any(outcome.status == "disagrees" for outcome in found):
        return report
    plain = tuple(dtype for dtype in dtypes if dtype not in SCALED)  # nine calls without factors
    return replace(report, conventions=differing(kernel, mechanism, dtypes=plain)) if plain else report
