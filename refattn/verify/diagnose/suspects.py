"""Which error it is: the suspects of a verification that failed, from outputs and gradients alone.

Errors with names come first, where they agree (`refattn.verify.diagnose.known`). Equations are fitted only to the cases
that no name explains; of both those come first that explain more cases. Outputs are explained before gradients: a
backward that is right makes wrong gradients of a wrong output, through delta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from refattn.golden.storage_types import DTYPES, SCALED
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.diagnose.changes import Change
from refattn.verify.diagnose.error_templates import Templates, changes
from refattn.verify.diagnose.known import (
    Explained,
    also_explained,
    errors_with_names,
    explained,
    follows,
    nearest_gradients,
    outputs_of,
)
from refattn.verify.diagnose.localise import places_of, which_cases
from refattn.verify.diagnose.nearest import described, judged, lines_of
from refattn.verify.diagnose.residuals import (
    Fit,
    Residuals,
    chosen,
    entries,
    fit,
    narrowed,
    rank,
    residuals_of,
    restricted,
    sparing,
)
from refattn.verify.diagnose.substitution import departure, earliest
from refattn.verify.diagnose.symptoms import symptoms_of, unasked_of
from refattn.verify.outcome import Report, Result, Suspect, Suspects, Truth

SHOWN = 3
"""Suspects that are reported: more than one where no error in the first agrees with what was got."""

TELLS = 0.1
"""An error of an equation is reported if it explains this part of the squared error, or agrees with what was got."""

MEANS_NOTHING = 0.98
"""An equation that leaves as much unexplained tells nothing of the place."""

LEAST = 2
"""So many equations are told as the place where none explains anything, however little they explain."""

REMAINS = 0.7
"""The same for what remains in gradients once outputs are explained."""

CONFIRMED = 12
"""Failing cases that an equation's error is tried on, where it agrees with those that it was fitted to."""

Given = Sequence[tuple[Case, Truth, Result, bool]]


def suspects(
    mechanism: Mechanism,
    dtype: str,
    given: Given,
    *,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    without: Iterable[str] = (),
    others: Mapping[str, Given] = MappingProxyType({}),
    least: Given = (),
) -> Suspects | None:
    """Rank the errors that explain what a kernel returned.

    Parameters
    ----------
    mechanism, dtype
        What was verified, in one storage type.
    given
        The cases with their truth, what was returned, and whether they failed.
    progress
        Wraps the sequence of equations, for a progress bar.
    without
        Errors with names that are left out, to measure what the others are worth.
    others
        What failed in other storage types, which a suspect is tried on, too.
    least
        The smallest case that fails, which is in what is said of the cases that fail, and of places.

    Returns
    -------
    Suspects
        None where no number disagrees: where shapes do, say.
    """
    known = changes(mechanism, dtype)
    all_residuals = _residuals(mechanism, known, given)
    failing = [one for one, failed in all_residuals if failed and one.wrong]
    agreeing = [one for one, failed in all_residuals if not failed and one.errors]
    if not failing:
        return None
    with_names = (*errors_with_names(mechanism, without), *((one, "") for one in symptoms_of(failing)))
    names = explained(with_names, failing, agreeing)
    named, left = _cover(names, failing)
    if left and (unasked := [(one, "") for one in unasked_of(mechanism, left)]):
        names = sorted(
            [*names, *explained(unasked, failing, agreeing)], key=lambda one: (-len(one.whole), -len(one.cases))
        )
        named, left = _cover(names, failing)
    elsewhere = [
        one for other, cases in others.items() for one, _ in _residuals(mechanism, changes(mechanism, other), cases)
    ]
    elsewhere = [one for one in elsewhere if one.wrong]
    everywhere = [*failing, *elsewhere]
    at_hand = {one.case.name: one for one in (*failing, *agreeing)}
    looked_at = chosen([(one.templates, one in left) for one in (*(left or failing), *agreeing)])
    residuals = [at_hand[templates.case.name] for templates in looked_at]
    if not any(one.wrong for one in residuals):  # equations run in no failing case that is looked at
        residuals = left or failing
    possible, narrow = narrowed(residuals)
    ranked = [_named(mechanism, also_explained(one, elsewhere), len(everywhere)) for one in named]
    if left:
        entered = entries(left, [*agreeing, *(one for one in failing if one not in left)])
        found = _equations(mechanism, residuals, everywhere, progress, entered)
        ranked = sorted([*ranked, *found], key=lambda one: -len(one.cases) / max(one.failing, 1))[:SHOWN]
    near = [id for one in ranked[:LEAST] if not _tells(one) for id in one.ids]
    ranked = [one for one in ranked if _tells(one)]
    ranked = ranked[:SHOWN] + _remaining(mechanism, known, ranked, failing)
    wrong = dict.fromkeys(name for one in failing for name in one.wrong)
    right = dict.fromkeys(name for one in failing for name in one.errors if name not in wrong)
    cases = tuple(one.case.name for one in residuals)
    departed = earliest(mechanism, (departure(one.templates, one.result, dtype) for one in residuals))
    between = lines_of(mechanism, departed.between) if departed else ()
    smallest = [one for one, _ in _residuals(mechanism, known, least) if one.wrong]
    of_failing, of_agreeing = ([one.case for one in part] for part in ([*failing, *smallest], agreeing))
    which = which_cases(of_failing, of_agreeing, ranked[0].kind if ranked else "")
    return Suspects(
        dtype,
        cases,
        (*wrong,),
        (*right,),
        len(known),
        (*possible,),
        (*narrow,),
        (*ranked,),
        departed,
        between,
        places_of([*failing, *smallest]),
        which,
        () if ranked else (*dict.fromkeys(near),),
    )


def _residuals(mechanism: Mechanism, known: dict[str, dict[str, Change]], given: Given) -> list[tuple[Residuals, bool]]:
    """Return the residuals of cases that have results, each with whether it failed."""
    return [
        (residuals_of(Templates(mechanism, case, truth, known), result), failed)
        for case, truth, result, failed in given
        if any(x.size for x in truth.values.values())
    ]


def _cover(found: Sequence[Explained], failing: Sequence[Residuals]) -> tuple[list[Explained], list[Residuals]]:
    """Return errors with names that together explain what they can, and the failing cases that are left.

    Where the first explains all, others follow that do, too.
    """
    taken: list[Explained] = []
    left = list(failing)
    for one in found:
        news = [case for case in left if case.case.name in one.cases]
        if news and len(taken) < SHOWN:
            taken.append(one)
            left = [case for case in left if case.case.name not in one.cases]
    if not left and len(taken) == 1:
        taken += [one for one in found[1:] if one.cases == taken[0].cases and one.whole == taken[0].whole][: SHOWN - 1]
    return taken, left


def _named(mechanism: Mechanism, one: Explained, failing: int) -> Suspect:
    wrong, part = one.wrong, len(one.cases) / failing
    placed = wrong.kind in ("fault", "storing") or wrong.name.endswith("unasked")
    lines = lines_of(mechanism, wrong.of if placed else ())
    sort = "convention" if wrong.kind == "gradient" else wrong.kind
    return Suspect(
        lines, wrong.in_words(one.size), one.share, part, part, sort, wrong.link, one.cases, failing, len(one.whole)
    )


def _equations(
    mechanism: Mechanism,
    residuals: Sequence[Residuals],
    failing: Sequence[Residuals],
    progress: Callable[[Iterable[Any]], Iterable[Any]],
    entered: Sequence[str],
) -> list[Suspect]:
    """Return the equations whose errors explain most; where none agrees with all results, by wrong outputs alone.

    Then those come first in which enters what failing cases alone have, and those that disturb nothing that is right.
    """
    found = _best(ranked_fits(residuals, progress), residuals, failing)
    if any(one.share <= 1.0 for one in found):
        return found
    outputs = outputs_of(mechanism)
    if not any({*one.wrong} & {*outputs} for one in residuals):
        outputs = tuple(dict.fromkeys(name for one in residuals for name in one.errors))
    spared = sparing(residuals, outputs)
    residuals = [one for one in restricted(residuals, outputs) if one.errors]
    fits = sorted(ranked_fits(residuals), key=lambda one: (one.id not in entered, one.id not in spared))
    return _best(fits, residuals, failing)


def _best(fits: Sequence[Fit], residuals: Sequence[Residuals], failing: Sequence[Residuals]) -> list[Suspect]:
    """Return the first equations of an order, those that give the same together, those that agree first."""
    found: list[Suspect] = []
    taken: set[str] = set()
    for at, one in enumerate(fits):
        agrees = any(suspect.share <= 1.0 for suspect in found)
        if one.id in taken or len(found) >= SHOWN or (one.left >= MEANS_NOTHING and (agrees or len(found) >= LEAST)):
            continue
        suspect, change_of = described(one, fits[at:], residuals)
        taken |= {*suspect.ids}
        if suspect.share <= 1.0:
            suspect = _confirmed(suspect, one.id, change_of, residuals, failing)
        found.append(suspect)
    return sorted(found, key=lambda one: one.share > 1.0)


def _tells(suspect: Suspect) -> bool:
    return suspect.sort != "equation" or suspect.share <= 1.0 or suspect.explained >= TELLS


def ranked_fits(
    residuals: Sequence[Residuals],
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    left_out: tuple[str, frozenset[int]] | None = None,
) -> list[Fit]:
    """Return the fits of the equations that can disturb what is wrong, the best first; `left_out` are kinds of one."""
    fits = rank(
        fit(id, residuals, left_out[1] if left_out and id == left_out[0] else frozenset())
        for id in progress(candidates(residuals))
    )
    wrong = {name for one in residuals for name in one.wrong}
    if not fits or wrong <= _disturbed(fits[0].id, residuals):
        return fits
    rest = wrong - _disturbed(fits[0].id, residuals)  # which another equation has to explain
    return [fits[0], *sorted(fits[1:], key=lambda one: not rest & _disturbed(one.id, residuals))]


def candidates(residuals: Sequence[Residuals]) -> list[str]:
    """Return the equations that may be to blame: where outputs are right those of the backward, if there are some.

    Where none can disturb all that is wrong, there are several errors, and those that disturb some of it are tried.
    """
    known = list(residuals[0].templates.known)
    able = narrowed(residuals)[0]
    wrong = {name for one in residuals for name in one.wrong}
    if wrong & {*outputs_of(residuals[0].templates.mechanism)}:
        return able or known
    backward = [id for id in able if id.startswith("d")]
    return backward or [id for id in known if id.startswith("d") and wrong & _disturbed(id, residuals)] or able or known


def _disturbed(id: str, residuals: Sequence[Residuals]) -> set[str]:
    return {name for one in residuals if one.wrong for name in one.templates.reached[id]}


def _confirmed(
    suspect: Suspect,
    id: str,
    change_of: Callable[[Residuals], Change],
    residuals: Sequence[Residuals],
    failing: Sequence[Residuals],
) -> Suspect:
    """Return a suspect with the failing cases that its error explains."""
    names = {name for one in residuals for name in one.errors}
    tried = failing if len(failing) <= CONFIRMED else failing[:: -(-len(failing) // CONFIRMED)]
    cases, whole = [], 0
    for one, part in zip(tried, restricted(tried, names), strict=True):
        results = one.templates.results(id, change_of(one))
        if judged(part, results) <= 1.0:
            cases.append(one.case.name)
            whole += judged(one, results) <= 1.0 or ({*one.errors} != {*part.errors} and follows(one))
    return replace(suspect, cases=(*cases,), failing=len(tried), whole=whole)


def _remaining(
    mechanism: Mechanism, known: dict[str, dict[str, Change]], ranked: Sequence[Suspect], failing: Sequence[Residuals]
) -> list[Suspect]:
    """Return what explains the gradients that do not follow from outputs which the first suspect explains."""
    if not ranked or ranked[0].share > 1.0 or len(ranked[0].cases) <= ranked[0].whole or not ranked[0].cases:
        return []
    rest = []
    for one in failing:
        if one.case.name not in ranked[0].cases:
            continue
        base, shown = nearest_gradients(one)
        errors = {}
        for name in shown:
            error = one.templates.errors(name, one.result.tensors[name], np.asarray(base[name]))
            errors[name] = np.zeros_like(error) if shown[name] <= 1.0 else error
        weights = {name: 1.0 / max(float(x @ x), float(x.size)) for name, x in errors.items()}
        if any(x.any() for x in errors.values()):
            rest.append(replace(one, errors=errors, weights=weights))
    if not rest:
        return []
    few = rest[:4]
    backward = [id for id in narrowed(few)[0] if id.startswith("d")] or [id for id in known if id.startswith("d")]
    best = rank(fit(id, few) for id in backward)[:1]
    return [suspect for one in best if one.left < REMAINS and _tells(suspect := described(one, best, few)[0])]


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

    Examples
    --------
    >>> import dataclasses, refattn as ra
    >>> from refattn.verify import locate, verify
    >>> record = ra.mechanism("softmax")
    >>> few = dataclasses.replace(record, cases=(record.case("tiny"),))
    >>> def unscaled(q, k, v):
    ...     return ra.softmax.forward(q, k, v, scale=1.0)[0]
    >>> report = locate(few, verify(few, unscaled, dtypes=["float32"]))
    >>> report.suspects.ranked[0].kind
    'scale left out'
    """
    if report.no_attention.startswith("every"):  # no equation explains what has no numbers
        return replace(report, located=True)
    given: dict[str, Given] = {}
    for dtype in (*DTYPES, *SCALED):
        judged_ = [outcome for outcome in report.outcomes if outcome.dtype == dtype and outcome.seen]
        if any(outcome.status == "disagrees" for outcome in judged_):
            given[dtype] = [(mechanism.case(o.case), *o.seen, o.failed) for o in judged_ if o.seen]
    for dtype in given:
        others: dict[str, Given] = {
            other: [
                (replace(case, name=f"{case.name} ({other})"), truth, got, True)
                for case, truth, got, wrong in rows
                if wrong
            ]
            for other, rows in given.items()
            if other != dtype
        }
        least: Given = ()
        if report.least and report.least[1].seen and report.least[1].dtype == dtype:
            least = ((report.least[0], *report.least[1].seen, True),)
        found = suspects(mechanism, dtype, given[dtype], progress=progress, others=others, least=least)
        if found:
            return replace(report, suspects=found, located=True)
    return replace(report, located=True) if given else report
