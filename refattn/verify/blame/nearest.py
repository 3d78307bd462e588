"""The single error that comes nearest to what was got: in an equation, or a convention."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.mechanisms.record import Mechanism
from refattn.verify.blame.evidence import Evidence, Fit, same_marks
from refattn.verify.blame.mutants import Change, kernel, mutants
from refattn.verify.judge.compare import judge
from refattn.verify.outcome import Line, Result, Suspect, Truth
from refattn.verify.traced import places

Floats = NDArray[np.float64]

STEP = 1e-4
"""Of the secant along which a factor is improved."""


def described(best: Fit, fits: Sequence[Fit], seen: Sequence[Evidence]) -> Suspect:
    """Return the single error of an equation that comes nearest, and the equations that it is the same in."""
    known = seen[0].bank.known[best.id]
    names = list(known)
    exact, free = int(np.argmin(best.as_is)), int(np.argmin(best.alone))
    as_is = best.as_is[exact] <= 1.1 * best.alone[free] + 1e-6
    at = exact if as_is else free
    ids = [best.id]
    for other in fits:
        if other.id != best.id and np.any(same_marks(best.id, at, other.id, seen)):
            ids.append(other.id)
    kind, change, explained = names[at], known[names[at]], 1.0 - float(best.alone[at])
    if not as_is:
        kind, change, explained = _scaled(best, at, seen, kind, change, explained)
    lines = lines_of(seen[0].bank.mechanism, [id for id in seen[0].bank.known if id in ids])
    return Suspect(lines, kind, share(best.id, change, seen), explained, 1.0 - best.left)


def lines_of(mechanism: Mechanism, ids: Iterable[str]) -> tuple[Line, ...]:
    """Return where equations stand."""
    known = places(mechanism)
    found = [(id, known[id]) for id in ids]
    return tuple(Line(id, at.formula, f"{at.file}:{at.line}", " ".join(at.code.split())) for id, at in found)


def _scaled(
    best: Fit, at: int, seen: Sequence[Evidence], kind: str, change: Change, explained: float
) -> tuple[str, Change, float]:
    """Return, for a value that is wrong by a factor, the factor that comes nearest, by the method of secants."""
    if kind != "sign flipped" and not kind.startswith("scaled by "):
        return kind, change, explained
    known = -1.0 if kind == "sign flipped" else float(kind.removeprefix("scaled by "))
    found = [1.0 + best.factor[at] * (known - 1.0)]
    # Each result counts as much as every other at first; then each element by what it is granted.
    for even in (True, True, True, False, False, False):
        here, ahead = (_marks(best.id, found[-1] + step, seen, even) for step in (0.0, STEP))
        if here is None or ahead is None:
            break
        slope = (ahead - here) / STEP
        size = float(slope @ slope)
        if not math.isfinite(size) or not size:
            break
        found.append(found[-1] + float(slope @ (_joined(seen, even) - here)) / size)
    shares = {factor: share(best.id, functools.partial(operator.mul, factor), seen) for factor in {*found}}
    factor = min(shares, key=lambda one: shares[one])
    marks, error = _marks(best.id, factor, seen, True), _joined(seen, True)
    left = math.inf if marks is None else float((error - marks) @ (error - marks) / (error @ error))
    if 1.0 - left < explained - 1e-6:
        return kind, change, explained
    return f"scaled by {factor:.4g}", functools.partial(operator.mul, factor), 1.0 - left


def _joined(seen: Sequence[Evidence], even: bool) -> Floats:
    """Return all errors as one vector; with `even` every result has the same weight."""
    parts = [_weight(one, name, even) * error for one in seen for name, error in one.errors.items()]
    return np.concatenate(parts)


def _marks(id: str, factor: float, seen: Sequence[Evidence], even: bool) -> Floats | None:
    """Return the marks of a factor as one vector, in the same way."""
    parts = []
    for one in seen:
        results = one.bank.results(id, lambda x: x * factor)
        if results is None:
            return None
        parts += [_weight(one, name, even) * one.bank.marks(name, results[name]) for name in one.errors]
    return np.concatenate(parts)


def _weight(one: Evidence, name: str, even: bool) -> float:
    return math.sqrt(one.weights[name]) if even else 1.0


def share(id: str, change: Change, seen: Sequence[Evidence]) -> float:
    """Return the largest used share of the allowed error of results that are judged against those of a wrong equation.

    Infinite where it has no results.
    """
    found = [one.bank.results(id, change) for one in seen]
    return max((_judged(one, values) for one, values in zip(seen, found, strict=True)), default=math.inf)


def _judged(one: Evidence, values: dict[str, Any] | None) -> float:
    if values is None:
        return math.inf
    asked = Result({name: one.result.tensors[name] for name in one.errors if name in values}, one.result.dtypes)
    granted = {name: _granted(one.bank.truth, name, values[name]) for name in asked.tensors}
    instead = replace(one.bank.truth, values=values, variance=granted, exact=frozenset())
    return max((verdict.share for verdict in judge(asked, instead)), default=math.inf)


@np.errstate(over="ignore", invalid="ignore")
def _granted(truth: Truth, name: str, value: Floats) -> Floats:
    """Return the variance of honest errors of a wrong result: where it is larger than the true one, more."""
    true = np.where(np.isfinite(truth.values[name]), truth.values[name], 0.0)
    relative = float(np.sum(truth.variance[name]) / max(np.sum(true**2), np.finfo(np.float64).tiny))
    return np.maximum(truth.variance[name], np.where(np.isfinite(value), relative * value**2, 0.0))


def elsewhere(dtype: str, seen: Sequence[Evidence]) -> Iterator[Suspect]:
    """Yield what is wrong in no single equation and agrees with what was got: conventions, and faults of storing."""
    for mutant in mutants(seen[0].bank.mechanism):
        if mutant.id:
            continue
        shares, told = [], set()
        for one in (one for one in seen if one.errors):
            bank = one.bank
            values = kernel(bank.mechanism, bank.case, bank.truth, dtype, mutant, exact=True).tensors
            shares.append(_judged(one, {name: x.astype(np.float64) for name, x in values.items()}))
            told |= {*values} & {*one.wrong}
        if told and max(shares) <= 1.0:
            yield Suspect((), mutant.kind, max(shares), 1.0, 1.0)
