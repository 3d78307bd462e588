"""What a kernel returned, as vectors of errors, and how well the errors that an equation may have explain it.

An error in one equation leaves its mark on all results that it reaches. `refattn.verify.diagnose.error_templates` knows
the marks of many kinds of error in every equation; the equation whose marks explain best what was got stands first. The
error itself need not be a template: what counts is how much of it no sum of an equation's marks, times numbers, can
explain.

With what was got as e, a vector for each failing case and result, and the marks p_n of an equation, all in units of
what is granted and each vector divided by its own norm, the equation is ranked by::

    min over a of  |e - sum_n a_n p_n|^2 / |e|^2        a_n: a number for each mark

Cases that agree decide between equations that explain as much: an error that would show there is less likely.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import round_to
from refattn.mechanisms.record import Case
from refattn.verify.diagnose.error_templates import Templates
from refattn.verify.outcome import Floats, Result, Truth
from refattn.verify.tolerance.compare import judge

CASES = 4
"""Cases that are looked at: the smallest that fail, one for each set of equations that run, and some that agree."""

ELEMENTS = 200
"""Cases with fewer elements in their results, or with axes of one element, tell little: they are looked at last."""

RIDGE = 1e-4
"""Keeps marks that are nearly multiples of each other from cancelling with huge numbers."""

SHOWS = 16.0
"""An error of so many times what is granted shows in a case: twice what is allowed a single element."""

DOUBT = 10.0
"""What is left unexplained counts so many times for every case that agrees and would not."""

OFTEN = 0.5
"""An argument that fewer of the cases that agree have, and all that fail, is what these have in common."""

SAME = 1e-5
"""Marks that differ by less, relative to their norm, are the same."""


@dataclass(frozen=True)
class Residuals:
    """What a kernel returned for one case: the errors of its results that can be compared.

    Attributes
    ----------
    templates
        The case, and what it predicts.
    result
        What was returned.
    errors
        By name, how far a result is from the truth, in units of what is granted; 0 where it agrees.
    weights
        By name, one over the squared norm of these, or of what is granted where it agrees.
    """

    templates: Templates
    result: Result
    errors: dict[str, Floats]
    weights: dict[str, float]

    @property
    def case(self) -> Case:
        """The case."""
        return self.templates.case

    @property
    def truth(self) -> Truth:
        """Its true results."""
        return self.templates.truth

    @property
    def wrong(self) -> tuple[str, ...]:
        """The results that disagree."""
        return tuple(name for name, error in self.errors.items() if error.any())


def residuals_of(templates: Templates, result: Result) -> Residuals:
    """Return what the results of a case tell, judged in the same way as for the report."""
    verdicts = {verdict.tensor: verdict for verdict in judge(result, templates.truth)}
    errors, weights = {}, {}
    for name, target in templates.targets.items():
        # A result of another shape or type says nothing of the equations.
        if name not in result.tensors or verdicts[name].statistic in ("shape", "dtype") or not target.size:
            continue
        value = round_to(result.tensors[name].astype(np.float64), templates.truth.stored[name])
        error = templates.errors(name, value, target)
        norm = float(error @ error)
        errors[name] = np.zeros_like(error) if verdicts[name].agrees else error
        weights[name] = 1.0 / (norm if errors[name].any() else error.size)
    return Residuals(templates, result, errors, weights)


def narrowed(residuals: Sequence[Residuals]) -> tuple[list[str], list[str]]:
    """Return the equations that can disturb every result that is wrong; and of these, those that disturb no other."""
    wrong = [one for one in residuals if one.wrong]
    if not wrong:
        return [], []
    reached = {id: [set(one.templates.reached[id]) for one in wrong] for id in residuals[0].templates.known}
    able = [id for id, sets in reached.items() if all(set(one.wrong) <= s for one, s in zip(wrong, sets, strict=True))]
    right = [set(one.errors) - set(one.wrong) for one in wrong]
    return able, [id for id in able if not any(s & spared for s, spared in zip(reached[id], right, strict=True))]


def sparing(residuals: Sequence[Residuals], names: Container[str]) -> set[str]:
    """Return the equations that can disturb each of some results that are wrong, and none that is right."""
    found = set(residuals[0].templates.known)
    for one in residuals:
        if one.wrong:
            wrong, right = {name for name in one.wrong if name in names}, {*one.errors} - {*one.wrong}
            found = {id for id in found if wrong <= (reached := {*one.templates.reached[id]}) and not reached & right}
    return found


def entries(failing: Sequence[Residuals], agreeing: Sequence[Residuals]) -> list[str]:
    """Return the equations in which an argument enters that all failing cases have, and most of the others do not."""
    has = [{*one.case.inputs, *one.case.options} for one in failing]
    others = [{*one.case.inputs, *one.case.options} for one in agreeing]
    common = set.intersection(*has) - {*"qkv"}
    telling = [name for name in sorted(common) if sum(name in one for one in others) < OFTEN * len(others)]
    smallest = min(failing, key=lambda one: one.templates.size)
    return [id for name in telling if (id := smallest.templates.entry(name))]


def chosen(all_templates: Sequence[tuple[Templates, bool]]) -> list[Templates]:
    """Return the cases to look at, of those given with whether they failed: at most `CASES`, a failed one first."""

    def cost(pair: tuple[Templates, bool]) -> tuple[bool, bool, int]:
        templates, failed = pair
        single = any(size < 2 for x in templates.targets.values() for size in x.shape[2:])
        return not failed, single or templates.size < ELEMENTS, sum(templates.ran.values())

    ordered = sorted((pair for pair in all_templates if pair[0].size), key=cost)
    first: dict[frozenset[str], tuple[Templates, bool]] = {}
    for pair in ordered:
        first.setdefault(frozenset(pair[0].ran), pair)
    rest = [pair for pair in ordered if pair[1] and pair not in first.values()]
    return [templates for templates, _ in (*first.values(), *rest)][:CASES]


@dataclass(frozen=True)
class Fit:
    """How well the marks of one equation explain the residuals.

    Attributes
    ----------
    left
        The part of the squared error that no sum of its marks explains.
    alone
        By mark, the part that it leaves when it is multiplied by the best number.
    factor
        By mark, that number.
    as_is
        By mark, the part that it leaves as it is.
    against
        How many of the cases that agree would not if the best mark were the error.
    """

    id: str
    left: float
    alone: Floats
    factor: Floats
    as_is: Floats
    against: int = 0


def fit(id: str, residuals: Sequence[Residuals], left_out: frozenset[int] = frozenset()) -> Fit:
    """Fit the marks of an equation, but for those left out, to the residuals."""
    count = len(residuals[0].templates.known[id])
    squares, products, total = np.zeros((count, count)), np.zeros(count), 0.0
    for one in residuals:
        if not one.wrong:
            continue
        marks = one.templates.predicted(id)
        for name, error in one.errors.items():
            p, weight = marks[name], one.weights[name]
            squares += weight * (p @ p.T).astype(np.float64)
            products += weight * (p @ error.astype(np.float32)).astype(np.float64)
            total += weight * float(error @ error)
    norms = np.diag(squares)
    used = np.array([n for n in range(count) if norms[n] > 0.0 and n not in left_out], dtype=int)
    alone, as_is, factor = np.full(count, np.inf), np.full(count, np.inf), np.zeros(count)
    factor[used] = products[used] / norms[used]
    alone[used] = 1.0 - factor[used] * products[used] / total
    as_is[used] = 1.0 - (2.0 * products[used] - norms[used]) / total
    if not used.size:
        return Fit(id, 1.0, alone, factor, as_is)
    size = np.sqrt(norms[used])
    matrix = squares[np.ix_(used, used)] / np.outer(size, size)
    sides = products[used] / size
    numbers = np.linalg.solve(matrix + RIDGE * np.eye(len(used)), sides)
    left = 1.0 - (2.0 * numbers @ sides - numbers @ matrix @ numbers) / total
    against = sum(_shows(one, id, int(np.argmin(alone)), float(factor[np.argmin(alone)])) for one in residuals)
    return Fit(id, max(float(left), 0.0), alone, factor, as_is, against)


def _shows(one: Residuals, id: str, at: int, factor: float) -> bool:
    """Tell whether a mark times a number would show in a case that agrees."""
    if one.wrong or id not in one.templates.ran:
        return False
    marks = one.templates.predicted(id)
    return any(float(np.max(np.abs(factor * marks[name][at]), initial=0.0)) > SHOWS for name in one.errors)


def rank(fits: Iterable[Fit]) -> list[Fit]:
    """Sort fits, the best first.

    A case that agrees and speaks against one counts as a factor of `DOUBT` in what is left; where two leave as much,
    the one whose best single mark explains more is first. What differs by rounding alone, and so from processor to
    processor, stays in the order of the equations.
    """

    def key(one: Fit) -> tuple[float, float]:
        left = math.log(one.left + 1e-9) + math.log(DOUBT) * one.against
        alone = max(float(np.min(one.alone, initial=np.inf)), sys.float_info.min)
        return round(left, 1), round(math.log(alone), 6)

    return sorted(fits, key=key)


def restricted(residuals: Sequence[Residuals], names: Container[str]) -> list[Residuals]:
    """Return the residuals with some of its results alone."""
    return [replace(one, errors={name: x for name, x in one.errors.items() if name in names}) for one in residuals]


def same_marks(id: str, at: int, other: str, residuals: Sequence[Residuals]) -> NDArray[np.bool_]:
    """Tell which errors in another equation leave the same mark as error number `at` of an equation, in every case."""
    same = np.ones(len(residuals[0].templates.known[other]), np.bool_)
    for one in residuals:
        marks, mark = one.templates.predicted(other), one.templates.predicted(id)
        for name in one.errors:
            apart = np.sum((marks[name] - mark[name][at]) ** 2, axis=-1, dtype=np.float64)
            same &= apart <= SAME**2 * np.sum(mark[name][at] ** 2, dtype=np.float64)
    return same
