"""How often the right equation is found: every mutant that is caught, with the bank that knows all but this mutant.

A mutant is judged on the outputs and gradients that implementations are asked for. Left out of the bank is what is done
to the equation, and whatever else does the same to its results; with `family`, also its relatives: all factors, all
roundings, all shifts, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.wrong import WrongKernel
from refattn.verify.blame.bank import Bank, changes
from refattn.verify.blame.evidence import Evidence, chosen, evidence, same_marks
from refattn.verify.blame.mutants import kernel, mutants
from refattn.verify.blame.suspects import ranked_fits
from refattn.verify.judge.budget import truth
from refattn.verify.judge.compare import judge

FAMILIES = {
    "factor": ("scaled by", "sign flipped"),
    "rounding": ("rounded", "truncated"),
    "heads": ("heads", "first head"),
    "shift": ("shifted",),
    "key": ("last key", "first key", "last quarter of the keys"),
    "row": ("one row", "last row", "last quarter of the rows"),
}
"""Kinds of error by how their names begin."""


@dataclass(frozen=True)
class Found:
    """What became of one mutant.

    Attributes
    ----------
    place
        Of its equation among the suspects, from 1; beyond the last one where it is not among them.
    class_place
        Of the first equation in which some error gives exactly the same results: itself, or others.
    same
        How many equations these are.
    """

    mutant: WrongKernel
    place: int
    class_place: int
    same: int


def found(
    mechanism: Mechanism, dtype: str, subjects: Iterable[WrongKernel] | None = None, *, family: bool = False
) -> Iterator[Found]:
    """Yield, for each mutant of an equation that is caught, where its equation stands among the suspects."""
    known = changes(mechanism, dtype)
    banks = [
        Bank(mechanism, case, truth(mechanism, case, dtype, grad=True), known)
        for case in mechanism.cases
        if all(0 not in given.shape for given in case.inputs.values())
    ]
    for mutant in subjects or mutants(mechanism):
        if mutant.kind == "equation" and (seen := _seen(mechanism, dtype, banks, mutant)):
            yield _found(mutant, seen, family)


def _seen(mechanism: Mechanism, dtype: str, banks: list[Bank], mutant: WrongKernel) -> list[Evidence]:
    """Return the evidence of a mutant; none where it is not caught."""
    results, failed = {}, {}
    for bank in banks:
        name = bank.case.name
        try:
            # Where the equation does not run, the mutant is an honest kernel.
            results[name] = kernel(mechanism, bank.case, bank.truth, dtype, mutant)
        except (ArithmeticError, ValueError):
            continue
        verdicts = judge(results[name], bank.truth)
        failed[name] = not all(verdict.agrees for verdict in verdicts if verdict.tensor in bank.targets)
    if not any(failed.values()):
        return []
    looked_at = chosen([(bank, failed[bank.case.name]) for bank in banks if bank.case.name in failed])
    seen = [evidence(bank, results[bank.case.name]) for bank in looked_at]
    return seen if any(one.wrong for one in seen) else []


def _found(mutant: WrongKernel, seen: list[Evidence], family: bool) -> Found:
    (id,) = mutant.of
    kinds = list(seen[0].bank.known[id])
    at = kinds.index(mutant.wrong)
    left_out = {n for n, same in enumerate(same_marks(id, at, id, seen)) if same} | {at}
    if family:
        begins = next((names for names in FAMILIES.values() if mutant.wrong.startswith(names)), (mutant.wrong,))
        left_out |= {n for n, kind in enumerate(kinds) if kind.startswith(begins)}
    order = [one.id for one in ranked_fits(seen, left_out=(id, frozenset(left_out)))]
    same = [one for one in order if one == id or np.any(same_marks(id, at, one, seen))]
    places = [order.index(id) + 1 for id in same] or [len(order) + 1]
    own = order.index(id) + 1 if id in order else len(order) + 1
    return Found(mutant, own, min(places), len(same))
