"""How often the right equation is found: every mutant that is caught, with all error
templates but its own.

A mutant is judged on the outputs and gradients that kernels are asked for. Left out of the templates is what is done
to the equation, and whatever else does the same to its results; with `family`, also its relatives: all factors, all
roundings, all shifts, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from refattn.mechanisms.record import Mechanism
from refattn.mechanisms.wrong import WrongKernel
from refattn.verify.diagnose.error_templates import Templates, changes
from refattn.verify.diagnose.mutants import kernel, mutants
from refattn.verify.diagnose.residuals import Residuals, chosen, residuals_of, same_marks
from refattn.verify.diagnose.suspects import ranked_fits
from refattn.verify.tolerance.budget import truth
from refattn.verify.tolerance.compare import judge

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
    all_templates = [
        Templates(mechanism, case, truth(mechanism, case, dtype, grad=True), known)
        for case in mechanism.cases
        if all(0 not in given.shape for given in case.inputs.values())
    ]
    for mutant in subjects or mutants(mechanism):
        if mutant.kind == "equation" and (residuals := _residuals(mechanism, dtype, all_templates, mutant)):
            yield _found(mutant, residuals, family)


def _residuals(
    mechanism: Mechanism, dtype: str, all_templates: list[Templates], mutant: WrongKernel
) -> list[Residuals]:
    """Return the residuals of a mutant; none if it is not caught."""
    results, failed = {}, {}
    for templates in all_templates:
        name = templates.case.name
        try:
            # Where the equation does not run, the mutant is an honest kernel.
            results[name] = kernel(mechanism, templates.case, templates.truth, dtype, mutant)
        except (ArithmeticError, ValueError):
            continue
        verdicts = judge(results[name], templates.truth)
        failed[name] = not all(verdict.agrees for verdict in verdicts if verdict.tensor in templates.targets)
    if not any(failed.values()):
        return []
    looked_at = chosen(
        [(templates, failed[templates.case.name]) for templates in all_templates if templates.case.name in failed]
    )
    residuals = [residuals_of(templates, results[templates.case.name]) for templates in looked_at]
    return residuals if any(one.wrong for one in residuals) else []


def _found(mutant: WrongKernel, residuals: list[Residuals], family: bool) -> Found:
    (id,) = mutant.of
    kinds = list(residuals[0].templates.known[id])
    at = kinds.index(mutant.wrong)
    left_out = {n for n, same in enumerate(same_marks(id, at, id, residuals)) if same} | {at}
    if family:
        begins = next((names for names in FAMILIES.values() if mutant.wrong.startswith(names)), (mutant.wrong,))
        left_out |= {n for n, kind in enumerate(kinds) if kind.startswith(begins)}
    order = [one.id for one in ranked_fits(residuals, left_out=(id, frozenset(left_out)))]
    same = [one for one in order if one == id or np.any(same_marks(id, at, one, residuals))]
    places = [order.index(id) + 1 for id in same] or [len(order) + 1]
    place = order.index(id) + 1 if id in order else len(order) + 1
    return Found(mutant, place, min(places), len(same))
