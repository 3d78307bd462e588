"""The single error of an equation that comes nearest to what was got."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from refattn.mechanisms.record import Mechanism
from refattn.verify.diagnose.changes import Change
from refattn.verify.diagnose.known import shares
from refattn.verify.diagnose.residuals import Fit, Residuals, same_marks
from refattn.verify.outcome import Floats, Line, Suspect
from refattn.verify.traced import places_to_read

Options = frozenset[str]
"""The options of a case that are no arrays, each with its value, as text."""

STEP = 1e-4
"""Of the secant along which a factor is improved."""


def described(
    best: Fit, fits: Sequence[Fit], residuals: Sequence[Residuals]
) -> tuple[Suspect, Callable[[Residuals], Change]]:
    """Return the single error of an equation that comes nearest, where it is the same in several, and what it does.

    A factor that is another one for other options has its value for each: a mean of them would mislead.
    """
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
    start = _first_factor(best, at, kind)
    if not as_is and start is not None:
        kind, change, explained = _scaled(best.id, start, wrong, kind, change, explained)
    used, change_of = share(best.id, change, wrong), _always(change)
    if start is not None and used > 1.0 and len({_options_of(one) for one in wrong}) > 1:
        if factors := _by_options(best.id, start, wrong, explained):
            kind, change_of, explained = factors
            used = max(judged(one, one.templates.results(best.id, change_of(one))) for one in wrong)
        else:
            kind = f"{kind}, over cases with different options"
    lines = lines_of(residuals[0].templates.mechanism, [id for id in residuals[0].templates.known if id in ids])
    return Suspect(lines, kind, used, explained, 1.0 - best.left), change_of


def _always(change: Change) -> Callable[[Residuals], Change]:
    return lambda one: change


def lines_of(mechanism: Mechanism, ids: Iterable[str]) -> tuple[Line, ...]:
    """Return where a reader finds equations: those of the paper in the definition."""
    known = places_to_read(mechanism)
    found = [(id, known[id]) for id in ids if id in known]
    return tuple(Line(id, at.formula, f"{at.file}:{at.line}", " ".join(at.code.split())) for id, at in found)


def _first_factor(best: Fit, at: int, kind: str) -> float | None:
    """Return the factor that the fit of a mark gives; None where the mark is that of no factor."""
    if kind != "sign flipped" and not kind.startswith("scaled by "):
        return None
    known = -1.0 if kind == "sign flipped" else float(kind.removeprefix("scaled by "))
    return float(1.0 + best.factor[at] * (known - 1.0))


def _scaled(
    id: str, start: float, residuals: Sequence[Residuals], kind: str, change: Change, explained: float
) -> tuple[str, Change, float]:
    """Return, for a value that is wrong by a factor, the factor that comes nearest."""
    factor = _nearest_factor(id, start, residuals)
    by_factor = _times(factor)
    part = 1.0 - _left(id, _always(by_factor), residuals)
    return (kind, change, explained) if part < explained - 1e-6 else (f"scaled by {_digits(factor)}", by_factor, part)


def _nearest_factor(id: str, start: float, residuals: Sequence[Residuals]) -> float:
    """Return the factor of a value whose results come nearest, by the method of secants."""
    found = [start]
    # Each result counts as much as every other at first; then each element by what it is granted.
    for even in (True, True, True, False, False, False):
        here, ahead = (_marks(id, _always(_times(found[-1] + step)), residuals, even) for step in (0.0, STEP))
        if here is None or ahead is None:
            break
        slope = (ahead - here) / STEP
        size = float(slope @ slope)
        if not math.isfinite(size) or not size:
            break
        found.append(found[-1] + float(slope @ (_joined(residuals, even) - here)) / size)
    shares = {factor: share(id, _times(factor), residuals) for factor in {*found}}
    return min(shares, key=lambda one: shares[one])


def _by_options(
    id: str, start: float, residuals: Sequence[Residuals], explained: float
) -> tuple[str, Callable[[Residuals], Change], float] | None:
    """Return a factor for each set of options of the cases; None where that leaves more than half as much as one."""
    sets: dict[Options, list[Residuals]] = {}
    for one in residuals:
        sets.setdefault(_options_of(one), []).append(one)
    factors = {options: _nearest_factor(id, start, some) for options, some in sets.items()}

    def change_of(one: Residuals) -> Change:
        options = _options_of(one)
        if options not in factors:
            factors[options] = _nearest_factor(id, start, [one])
        return _times(factors[options])

    left = _left(id, change_of, residuals)
    if not left <= 0.5 * (1.0 - explained):
        return None
    same: dict[str, list[Options]] = {}
    for options, factor in factors.items():
        same.setdefault(_digits(factor), []).append(options)
    words = (f"{digits} with {_in_words(some, [*factors])}" for digits, some in same.items())
    return f"scaled by {', by '.join(words)}", change_of, 1.0 - left


def _options_of(one: Residuals) -> Options:
    return frozenset(f"{name}={value!r}" for name, value in one.case.options.items())


def _in_words(some: Sequence[Options], every: Sequence[Options]) -> str:
    """Return which sets of options these are: by what they alone share, if there is such a thing."""
    common = frozenset.intersection(*some)
    if common and not any(common <= other for other in every if other not in some):
        return " and ".join(sorted(common))
    return " or with ".join(" and ".join(sorted(options)) or "no option" for options in some)


def _times(factor: float) -> Change:
    return functools.partial(operator.mul, factor)


def _digits(factor: float) -> str:
    return f"{factor:.4g}" if abs(factor - 1.0) > 1e-3 else f"{factor:.9g}"  # "1" would say nothing


def _left(id: str, change_of: Callable[[Residuals], Change], residuals: Sequence[Residuals]) -> float:
    """Return the part of the squared error that a change leaves, in which every result has the same weight."""
    marks, error = _marks(id, change_of, residuals, True), _joined(residuals, True)
    return math.inf if marks is None else float((error - marks) @ (error - marks) / (error @ error))


def _joined(residuals: Sequence[Residuals], even: bool) -> Floats:
    """Return all errors as one vector; with `even` every result has the same weight."""
    parts = [_weight(one, name, even) * error for one in residuals for name, error in one.errors.items()]
    return np.concatenate(parts)


def _marks(
    id: str, change_of: Callable[[Residuals], Change], residuals: Sequence[Residuals], even: bool
) -> Floats | None:
    """Return the marks of a change as one vector, in the same way."""
    parts = []
    for one in residuals:
        results = one.templates.results(id, change_of(one))
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
