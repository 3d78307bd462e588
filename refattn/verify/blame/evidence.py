"""What an implementation returned, case by case, as vectors of errors; and the cases and equations to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage import round_to
from refattn.verify.blame.bank import Bank
from refattn.verify.judge.compare import judge
from refattn.verify.outcome import Result

Floats = NDArray[np.float64]

CASES = 4
"""Cases that are looked at: the smallest that fail, one for each set of equations that run, and some that agree."""

ELEMENTS = 200
"""Cases with fewer elements in their results, or with axes of one element, tell little: they are looked at last."""


@dataclass(frozen=True)
class Evidence:
    """What an implementation returned for one case: the errors of its results that can be compared.

    Attributes
    ----------
    bank
        The case, and what it predicts.
    result
        What was returned.
    errors
        By name, how far a result is from the truth, in units of what is granted; 0 where it agrees.
    weights
        By name, one over the squared norm of these, or of what is granted where it agrees.
    """

    bank: Bank
    result: Result
    errors: dict[str, Floats]
    weights: dict[str, float]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The results that disagree."""
        return tuple(name for name, error in self.errors.items() if error.any())


def evidence(bank: Bank, result: Result) -> Evidence:
    """Return what the results of a case tell, judged in the same way as for the report."""
    verdicts = {verdict.tensor: verdict for verdict in judge(result, bank.truth)}
    errors, weights = {}, {}
    for name, target in bank.targets.items():
        if name not in result.tensors or result.tensors[name].shape != target.shape or not target.size:
            continue
        value = round_to(result.tensors[name].astype(np.float64), bank.truth.stored[name])
        error = bank.errors(name, value, target)
        norm = float(error @ error)
        errors[name] = np.zeros_like(error) if verdicts[name].agrees else error
        weights[name] = 1.0 / (norm if errors[name].any() else error.size)
    return Evidence(bank, result, errors, weights)


def narrowed(seen: Sequence[Evidence]) -> tuple[list[str], list[str]]:
    """Return the equations that can disturb every result that is wrong; and of these, those that disturb no other."""
    wrong = [one for one in seen if one.wrong]
    reached = {id: [set(one.bank.reached[id]) for one in wrong] for id in seen[0].bank.known}
    able = [id for id, sets in reached.items() if all(set(one.wrong) <= s for one, s in zip(wrong, sets, strict=True))]
    right = [set(one.errors) - set(one.wrong) for one in wrong]
    return able, [id for id in able if not any(s & spared for s, spared in zip(reached[id], right, strict=True))]


def chosen(banks: Sequence[tuple[Bank, bool]]) -> list[Bank]:
    """Return the cases to look at, of those given with whether they failed: at most `CASES`, a failed one first."""

    def cost(pair: tuple[Bank, bool]) -> tuple[bool, bool, int]:
        bank, failed = pair
        single = any(size < 2 for x in bank.targets.values() for size in x.shape[2:])
        return not failed, single or bank.size < ELEMENTS, sum(bank.ran.values())

    ordered = sorted((pair for pair in banks if pair[0].size), key=cost)
    first: dict[frozenset[str], tuple[Bank, bool]] = {}
    for pair in ordered:
        first.setdefault(frozenset(pair[0].ran), pair)
    rest = [pair for pair in ordered if pair[1] and pair not in first.values()]
    return [bank for bank, _ in (*first.values(), *rest)][:CASES]
