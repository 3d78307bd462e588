"""Verification of a kernel: its results on the designed cases of a mechanism, judged one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from refattn.args import One, Whole, check, checked
from refattn.golden.storage_types import DTYPES, SCALED
from refattn.mechanisms.case_features import MANY, features, fewest
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.adapters import interpreted
from refattn.verify.adapters.adapter import Adapter, CallError, LateCallError, call, learned, read_roundings
from refattn.verify.adapters.conventions import differing
from refattn.verify.outcome import Decline, Outcome, Report, Result, Truth
from refattn.verify.tolerance import sampled
from refattn.verify.tolerance.budget import granting, rounded, with_equations, without_values
from refattn.verify.tolerance.compare import is_far, judge
from refattn.verify.tolerance.derivatives import DTYPES as DERIVED
from refattn.verify.tolerance.derivatives import with_derivatives

LARGE = 3 << 19
"""Bytes of a case that are kept in any case; those of a larger one if they show something."""

CROSSED = f"more than {MANY[0]} keys"

NAMED = 3
"""Cases that are named of each type that did not run."""

FEW = 0.2
"""If no more of the cases ran, the report says what none of these has in place of "agrees"."""


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
    small = dtype in SCALED
    asked = tuple(derivatives)
    long = sampled.is_long(mechanism, case)
    if small and long:
        raise sampled.TooLargeError(f"{case.name}: got more than {sampled.FULL} scores, which {dtype} needs at most")
    if asked and long:
        raise ValueError(f"{case.name}: its derivatives are judged where the definition can hold all scores alone")
    adapter = Adapter.of(kernel)
    declared |= adapter.rounds(mechanism)
    try:
        further = tuple(name for name in mechanism.pulled if grad and not small and name in adapter.pulls)
        more: dict[str, Any] = {"further": further, **(adapter.scaled() if small else {})}
        if "keep" in case.inputs and adapter.keep is not None:
            more["replaced"] = {"keep": adapter.drawn(case.name, case.inputs["keep"].shape)}
        if long:
            case_truth = sampled.long_truth(mechanism, case, dtype, grad=grad, seed=seed, further=further)
        else:
            case_truth = without_values(mechanism, case, dtype, grad=grad and not small, seed=seed, **more)
        first = bool(asked or case.given)  # arrays that are given may be no call of the core
        if first and not long:
            case_truth = granting(mechanism, case, case_truth.stored["out"], case_truth, declared, seed)
        if asked:
            case_truth = with_derivatives(case_truth, mechanism, case, dtype, asked, seed)
        result = call(
            adapter,
            case_truth.inputs,
            case.options,
            dtype,
            case_truth.upstream,
            ("out", *mechanism.outputs),
            factors=case_truth.factors,
            along=case_truth.along,
            asked=asked,
            further=case_truth.further,
        )
        if isinstance(result, Decline):
            return Outcome(case.name, case.kind, dtype, "declined", result.reason)
        if not (first or long):  # after the call, as most kernels decline most cases
            case_truth = granting(mechanism, case, case_truth.stored["out"], case_truth, declared, seed)
        if result.judged and not long:
            types = {id: _type_of(id, result, dtype, mechanism) for id in result.judged}
            case_truth = with_equations(mechanism, case, dtype, case_truth, types, declared, seed)
        if small and grad:
            result = replace(result, declined="no gradients in float8")
        if adapter.slack == "unwritten":
            result = with_slack_of(result, case_truth)
        note = ""
        if long:
            verdicts, note = sampled.judge_long(mechanism, case, dtype, case_truth, result, declared, seed)
        else:
            verdicts = judge(result, case_truth)
    except LateCallError as error:
        return Outcome(case.name, case.kind, dtype, "not finished", str(error))
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


def _small(outcome: Outcome) -> Outcome:
    """Return an outcome without arrays that are large and agree: no report has them."""
    if outcome.status != "agrees" or outcome.seen is None:
        return outcome
    known, result = outcome.seen
    if any(is_far(verdict, known) for verdict in outcome.verdicts):
        return outcome
    held = (known.inputs, known.values, known.variance, result.tensors)
    size = sum(x.nbytes for arrays in held for x in arrays.values())
    return outcome if size <= LARGE else replace(outcome, seen=None)


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
    """Return in words what no case that ran has: to cross a tile or chunk, and features if most cases were declined."""
    by_name = {case.name: features(case) for case in mechanism.cases if {*"qkv"} <= {*case.inputs}}
    crossing = {name for name, has in by_name.items() if CROSSED in has}
    ran: dict[str, set[str]] = {}
    asked: set[str] = set()
    for outcome in outcomes:
        asked.add(outcome.case)
        if outcome.status not in ("declined", "not finished"):
            ran.setdefault(outcome.dtype, set()).add(outcome.case)
    found: list[str] = []
    without = [dtype for dtype, names in ran.items() if not names & crossing]
    if crossing and without:
        of = "" if len(without) == len(ran) else f" in {', '.join(without)}"
        found.append(f"nothing that ran{of} crosses a tile or chunk of {MANY[0]} keys")
    every = {name for names in ran.values() for name in names}
    if every and len(every) <= FEW * len(asked):
        seen = {feature for name in every for feature in by_name.get(name, ())}
        unseen = sorted({feature for name in asked for feature in by_name.get(name, ())} - seen)
        if unseen:
            found.append(f"only {len(every)} of {len(asked)} cases ran, none with {', '.join(unseen)}")
    return tuple(found)


def _listed(cases: Sequence[tuple[str, str]]) -> str:
    """Return cases, each with its type, in words: "2 in float32 (tiny, plain), 1 in float16 (tiny)"."""
    by_dtype: dict[str, list[str]] = {}
    for name, dtype in cases:
        by_dtype.setdefault(dtype, []).append(name)
    return ", ".join(
        f"{len(names)} in {dtype} ({', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''})"
        for dtype, names in by_dtype.items()
    )


def _by_use(mechanism: Mechanism, plan: list[tuple[Case, str]]) -> list[tuple[Case, str]]:
    """Return cases, each with its type, in the order in which a run that may be stopped should have them.

    First the fewest that have every feature, in every type; then the others, of which those in float32 show most.
    The cheap ones are first among each.
    """
    telling = {case.name for case in fewest(mechanism.cases)}
    cost = {case.name: _cost(case) for case in mechanism.cases}

    def order(one: tuple[Case, str]) -> tuple[bool, bool, int]:
        name, dtype = one[0].name, one[1]
        return name not in telling, name not in telling and dtype != "float32", cost[name]

    return sorted(plan, key=order)


def _cost(case: Case) -> int:
    """Return about how many numbers a case computes: its scores times their width."""
    (b, h, queries, width), keys = case.inputs["q"].shape, case.inputs["k"].shape[2]
    return b * h * queries * keys * (width + case.inputs["v"].shape[3])


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
    interrupted: Callable[[KeyboardInterrupt], Any] | None = None,
    limit: float | None = None,
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
    interrupted
        Is given the interrupt that ends the run after at least one case; the report then has the cases before it. If
        absent, an interrupt is raised.
    limit
        Seconds after which no further case begins; the report says which did not run. If absent all are run.

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
    dtypes, adapter = tuple(dtypes), Adapter.of(kernel)
    usual = [(case, dtype) for dtype in dtypes for case in mechanism.cases]
    ordered = _by_use(mechanism, usual) if outcomes is None else usual
    plan = sorted(ordered, key=lambda one: (one[0].name, one[1]) not in first)
    asked = tuple(derivatives)
    if asked and set(dtypes) - {*DERIVED}:
        raise ValueError(f"dtypes: got {', '.join(dtypes)}, needs {' or '.join(DERIVED)} where derivatives are asked")
    if "hessian" in asked and not grad:
        raise ValueError("grad: got False, needs True where the derivatives of gradients are asked")
    known: dict[str, Any] = {"grad": grad, "rounding": tuple(rounding), "derivatives": asked, "seed": seed}
    found: list[Outcome] = []
    not_run: list[str] = []
    stopped = False
    if outcomes is None:
        end = None if limit is None else time.monotonic() + limit
        try:
            for case, dtype in progress(plan):
                if found and end is not None and time.monotonic() > end:
                    break
                found.append(_small(verify_case(mechanism, adapter, case, dtype, **known)))
        except KeyboardInterrupt as error:
            if interrupted is None or not found:
                raise
            interrupted(error)
            stopped = True
        if left := [(case.name, dtype) for case, dtype in plan[len(found) :]]:
            why = "it was interrupted" if stopped else f"the limit of {limit:g} s is over (--limit 0 for none)"
            not_run = [f"{len(left)} of {len(plan)} cases did not run, {why}: {_listed(left)}"]
    else:
        found = [*outcomes(plan, progress=progress, **known)]
    places = {(case.name, dtype): number for number, (case, dtype) in enumerate(usual)}
    found.sort(key=lambda one: places[one.case, one.dtype])
    if late := [one for one in found if one.status == "not finished"]:
        which = _listed([(one.case, one.dtype) for one in late])
        not_run.append(f"{len(late)} of {len(plan)} cases {late[0].detail} (--timeout): {which}")
    told = getattr(adapter.kernel, "interpreted", None)
    report = Report(
        mechanism.name,
        label or repr(kernel),
        grad,
        tuple(found),
        seed=seed,
        record=mechanism,
        reference=getattr(adapter.kernel, "reference", False) is True,
        interpreted=interpreted.told() if told is None else str(told),
        framework=str(adapter.framework or ""),
        device=str(adapter.device or ""),
        not_run=(*not_run, *_not_run(mechanism, found)),
        waiting=len(plan) - len(found),
    )
    # Conventions are of what comes out: one that only hangs or raises would be waited for again.
    if asked or stopped or not any(outcome.status == "disagrees" for outcome in found):
        return report
    from refattn.verify.diagnose.no_attention import no_attention  # what agrees needs no diagnosis

    if words := no_attention(found):
        return replace(report, no_attention=words)
    plain = tuple(dtype for dtype in dtypes if dtype not in SCALED)  # nine calls without factors
    try:
        return replace(report, conventions=differing(adapter, mechanism, dtypes=plain)) if plain else report
    except KeyboardInterrupt as error:  # all cases have run
        if interrupted is None:
            raise
        interrupted(error)
        return report
