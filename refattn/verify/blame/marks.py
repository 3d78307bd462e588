"""How well the errors that an equation may have explain what was got.

An error in one equation leaves its mark on all results that it reaches. `refattn.verify.blame.bank` knows the marks of
many kinds of error in every equation; the equation whose marks explain best what was got stands first. The error itself
need not be in the bank: what counts is how much of it no sum of an equation's marks, times numbers, can explain.

With what was got as e, a vector for each case and result, and the marks p_n of an equation, all in units of what is
granted and each vector divided by its own norm, the equation is ranked by::

    min over a of  |e - sum_n a_n p_n|^2 / |e|^2        a_n: a number for each mark
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refattn.verify.blame.evidence import Evidence

Floats = NDArray[np.float64]

RIDGE = 1e-4
"""Keeps marks that are nearly multiples of each other from cancelling with huge numbers."""

SAME = 1e-5
"""Marks that differ by less, relative to their norm, are the same."""


@dataclass(frozen=True)
class Fit:
    """How well the marks of one equation explain the evidence.

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
    """

    id: str
    left: float
    alone: Floats
    factor: Floats
    as_is: Floats


def fit(id: str, seen: Sequence[Evidence], left_out: frozenset[int] = frozenset()) -> Fit:
    """Fit the marks of an equation, but for those left out, to the evidence."""
    count = len(seen[0].bank.known[id])
    squares, products, total = np.zeros((count, count)), np.zeros(count), 0.0
    for one in seen:
        marks = one.bank.predicted(id)
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
    return Fit(id, max(float(left), 0.0), alone, factor, as_is)


def rank(fits: Iterable[Fit]) -> list[Fit]:
    """Sort fits, the best first; where two explain as much, the one whose best single mark does."""
    return sorted(fits, key=lambda one: (round(math.log(one.left + 1e-9), 1), float(np.min(one.alone, initial=np.inf))))


def same_marks(id: str, at: int, other: str, seen: Sequence[Evidence]) -> NDArray[np.bool_]:
    """Tell which errors in another equation leave the same mark as error number `at` of an equation, in every case."""
    same = np.ones(len(seen[0].bank.known[other]), np.bool_)
    for one in seen:
        marks, mark = one.bank.predicted(other), one.bank.predicted(id)
        for name in one.errors:
            apart = np.sum((marks[name] - mark[name][at]) ** 2, axis=-1, dtype=np.float64)
            same &= apart <= SAME**2 * np.sum(mark[name][at] ** 2, dtype=np.float64)
    return same
