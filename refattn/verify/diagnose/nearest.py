"""The single error of an equation that comes nearest to what was got."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.mechanisms.record import Mechanism
from refattn.verify.diagnose.changes import Change
from refattn.verify.diagnose.known import shares
from refattn.verify.diagnose.residuals import Fit, Residuals, same_marks
from refattn.verify.outcome import Line, Suspect
from refattn.verify.traced import places_to_read

Floats = NDArray[np.float64]

STEP = 1e-4
"""Of the secant along which a factor is improved."""


def described(best: Fit, fits: Sequence[Fit], residuals: Sequence[Residuals]) -> tuple[Suspect, Change]:
    """Return the single error of an equation that comes nearest, where it is the same in several, and what it does."""
    known = residuals[0].templates.known[best.id]
    names = list(known)
    exact, free = int(np.argmin(best.as_is)), int(np.argmin(best.alone))
    as_is = best.as_is[exact] <= 1.1 * best.alone[free] + 1e-6
    at = exact if as_is else free
    ids = [best.id]
    for other in fits:
        if other.id != best.id and np.any(same_marks(best.id, at, other.id, residuals)):
            ids.append(other.id)
    kind, change, explained = names[at], known[names[at]], 1.0 - float(best.alone[at])
    wrong = [one for one in residuals if one.wrong]
    if not as_is:
        kind, change, explained = _scaled(best, at, wrong, kind, change, explained)
    lines = lines_of(residuals[0].templates.mechanism, [id for id in residuals[0].templates.known if id in ids])
    return Suspect(lines, kind, share(best.id, change, wrong), explained, 1.0 - best.left), change


def lines_of(mechanism: Mechanism, ids: Iterable[str]) -> tuple[Line, ...]:
    """Return where a reader finds equations: those of the paper in the definition."""
    known = places_to_read(mechanism)
    found = [(id, known[id]) for id in ids if id in known]
    return tuple(Line(id, at.formula, f"{at.file}:{at.line}", " ".join(at.code.split())) for id, at in found)


def _scaled(
    best: Fit, at: int, residuals: Sequence[Residuals], kind: str, change: Change, explained: float
) -> tuple[str, Change, float]:
    """Return, for a value that is wrong by a factor, the factor that comes nearest, by the method of secants."""
    if kind != "sign flipped" and not kind.startswith("scaled by "):
        return kind, change, explained
    known = -1.0 if kind == "sign flipped" else float(kind.removeprefix("scaled by "))
    found = [1.0 + best.factor[at] * (known - 1.0)]
    # Each result counts as much as every other at first; then each element by what it is granted.
    for even in (True, True, True, False, False, False):
        here, ahead = (_marks(best.id, found[-1] + step, residuals, even) for step in (0.0, STEP))
        if here is None or ahead is None:
            break
        slope = (ahead - here) / STEP
        size = float(slope @ slope)
        if not math.isfinite(size) or not size:
            break
        found.append(found[-1] + float(slope @ (_joined(residuals, even) - here)) / size)
    shares = {factor: share(best.id, functools.partial(operator.mul, factor), residuals) for factor in {*found}}
    factor = min(shares, key=lambda one: shares[one])
    marks, error = _marks(best.id, factor, residuals, True), _joined(residuals, True)
    left = math.inf if marks is None else float((error - marks) @ (error - marks) / (error @ error))
    if 1.0 - left < explained - 1e-6:
        return kind, change, explained
    digits = f"{factor:.4g}" if abs(factor - 1.0) > 1e-3 else f"{factor:.9g}"  # "1" would say nothing
    return f"scaled by {digits}", functools.partial(operator.mul, factor), 1.0 - left


def _joined(residuals: Sequence[Residuals], even: bool) -> Floats:
    """Return all errors as one vector; with `even` every result has the same weight."""
    parts = [_weight(one, name, even) * error for one in residuals for name, error in one.errors.items()]
    return np.concatenate(parts)


def _marks(id: str, factor: float, residuals: Sequence[Residuals], even: bool) -> Floats | None:
    """Return the marks of a factor as one vector, in the same way."""
    parts = []
    for one in residuals:
        results = one.templates.results(id, lambda x: x * factor)
        if results is None:
            return None
        parts += [_weight(one, name, even) * one.templates.marks(name, results[name]) for name in one.errors]
    return np.concatenate(parts)


def _weight(one: Residuals, name: str, even: bool) -> float:
    return math.sqrt(one.weights[name]) if even else 1.0


def share(id: str, change: Change, residuals: Sequence[Residuals]) -> float:
    """Return the largest used share of the allowed error of results that are judged against those of a wrong equation.

    Infinite where it has no results.
    """
    return max((judged(one, one.templates.results(id, change)) for one in residuals), default=math.inf)


def judged(one: Residuals, values: Mapping[str, Any] | None) -> float:
    """Return the largest used share of the allowed error of a case that is judged against wrong results."""
    return math.inf if values is None else max(shares(one, values).values(), default=math.inf)
