"""Which equation is wrong: the suspects of a verification that failed, from outputs and gradients alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from refattn.golden.storage import DTYPES
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.blame.bank import Bank, changes
from refattn.verify.blame.evidence import chosen, evidence, fit, narrowed, rank
from refattn.verify.blame.nearest import described, elsewhere, lines_of
from refattn.verify.blame.substitution import departure, earliest
from refattn.verify.outcome import Report, Result, Suspect, Suspects, Truth

SHOWN = 3
"""Suspects that are reported: more than one where no error in the first agrees with what was got."""

MEANS_NOTHING = 0.9
"""An equation that leaves as much unexplained is not reported."""


def suspects(
    mechanism: Mechanism,
    dtype: str,
    given: Sequence[tuple[Case, Truth, Result, bool]],
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Suspects | None:
    """Rank the equations of a core by how well an error in them explains what an implementation returned.

    Parameters
    ----------
    mechanism, dtype
        What was verified, in one storage type.
    given
        The cases with their truth, what was returned, and whether they failed.
    progress
        Wraps the sequence of equations, for a progress bar.

    Returns
    -------
    Suspects
        None where no number disagrees: where shapes do, say.
    """
    known = changes(mechanism, dtype)
    results = {case.name: result for case, _, result, _ in given}
    banks = chosen([(Bank(mechanism, case, truth, known), failed) for case, truth, _, failed in given])
    seen = [evidence(bank, results[bank.case.name]) for bank in banks]
    if not any(one.wrong for one in seen):
        return None
    possible, narrow = narrowed(seen)
    fits = rank(fit(id, seen) for id in progress(possible or known))
    ranked: list[Suspect] = [*elsewhere(dtype, seen)][:SHOWN]
    taken: set[str] = set()
    for at, one in enumerate(fits):
        if one.id not in taken and len(ranked) < SHOWN and one.left < MEANS_NOTHING:
            suspect = described(one, fits[at:], seen)
            if not ranked or ranked[0].share > 1.0 or suspect.share <= 1.0:
                ranked.append(suspect)
            taken |= {*suspect.ids}
    wrong = dict.fromkeys(name for one in seen for name in one.wrong)
    right = dict.fromkeys(name for one in seen for name in one.errors if name not in wrong)
    cases = tuple(one.bank.case.name for one in seen)
    departed = earliest(mechanism, (departure(one.bank, one.result, dtype) for one in seen))
    between = lines_of(mechanism, departed.between) if departed else ()
    found = (*wrong,), (*right,), len(known), (*possible,), (*narrow,), (*ranked,)
    return Suspects(dtype, cases, *found, departed, between)


def locate(
    mechanism: Mechanism, report: Report, *, progress: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> Report:
    """Return the report of a verification with its suspects: in the widest type that something disagrees in.

    Parameters
    ----------
    mechanism
        The record that was verified against, its cases in the sizes that they were run in.
    report
        What `refattn.verify.run.verify` returned.
    progress
        Wraps the sequence of equations, for a progress bar.
    """
    for dtype in DTYPES:
        judged = [outcome for outcome in report.outcomes if outcome.dtype == dtype and outcome.seen]
        if any(outcome.status == "disagrees" for outcome in judged):
            given = [(mechanism.case(o.case), *o.seen, o.status in ("disagrees", "raises")) for o in judged if o.seen]
            found = suspects(mechanism, dtype, given, progress=progress)
            if found:
                return replace(report, suspects=found)
    return report
