"""The diagnosis: what fails, where, by how much and which error it is, in ten lines at most."""

from __future__ import annotations

import math
from collections.abc import Iterator

from refattn.mechanisms.record import Mechanism
from refattn.verify.adapters.conventions import expected
from refattn.verify.diagnose.localise import in_words
from refattn.verify.outcome import Outcome, Precision, Report, Verdict, share_text
from refattn.verify.report.suspects import narrowed, nothing, told
from refattn.verify.report.texts import cases_text, size

CONVENTIONS = 3
"""Conventions that are named."""


def lines(report: Report, mechanism: Mechanism) -> Iterator[tuple[str, str]]:
    """Yield the lines of the diagnosis, each with the word that it answers; nothing where nothing fails."""
    failed = report.failed
    if not failed:
        return
    yield "what", _what(report, failed)
    found = report.suspects
    if found:
        where = [in_words(found.places)] if found.places else []
        yield "where", "; ".join([*where, *([found.which] if found.which else [])]) or "no pattern"
    worst = max(
        ((outcome, verdict) for outcome in failed for verdict in outcome.wrong),
        key=lambda pair: size(pair[1].share),
        default=None,
    )
    if worst:
        yield "how much", _how_much(*worst)
    elif raised := next((outcome.detail for outcome in failed if outcome.detail), ""):
        yield "error", raised
    for one in report.precision:
        yield "precision", _precision(one)
    conventions, right = list(report.conventions.items()), expected(mechanism)
    for question, answer in conventions[:CONVENTIONS]:
        yield "convention", f"{question}: {answer}; needs {right[question]}"
    ranked = found.ranked if found else ()
    if found and any(one.dtype == found.dtype for one in report.precision):
        ranked = tuple(suspect for suspect in ranked if suspect.share <= 1.0)
    elif found and not ranked and not found.departure:
        yield "which", f"{nothing(found)}; {narrowed(found)}"
    for number, suspect in enumerate(ranked, start=1):
        yield "which" if number == 1 else "or", told(suspect)
        if suspect.link and number == 1:
            yield "report", suspect.link


def _what(report: Report, failed: list[Outcome]) -> str:
    run = report.counts()["all"]["run"]
    dtypes = ", ".join(dict.fromkeys(outcome.dtype for outcome in failed))
    wrong = dict.fromkeys(verdict.tensor for one in failed for verdict in one.wrong)
    judged = dict.fromkeys(verdict.tensor for one in failed for verdict in one.verdicts)
    right = [name for name in judged if name not in wrong]
    raised = sum(one.status == "raises" for one in failed)
    parts = [f"{', '.join(wrong)} wrong"] if wrong else []
    parts += [f"{', '.join(right)} right"] if right and wrong else []
    parts += [f"{raised} raise or give no result"] if raised else []
    return f"{len(failed)} of {cases_text(run)} {'fails' if run == 1 else 'fail'} ({dtypes}): {'; '.join(parts)}"


def _precision(one: Precision) -> str:
    """Return what would explain the failures of a dtype."""
    words = [
        f"what it multiplies were in {type_}"
        if name == "products"
        else f"{name}{' (or scale times q)' if name == 'q' else ''} were rounded to {type_}"
        for name, type_ in one.roundings.items()
    ]
    seen = "" if one.cases == one.failing else f" ({one.cases} of {one.failing} were judged again)"
    return f"{one.dtype} agrees if {' and '.join(words)}{seen}; meant so? declare roundings = {one.roundings}"


def _how_much(outcome: Outcome, verdict: Verdict) -> str:
    by = (
        f"{share_text(verdict.share)} of the allowed error"
        if math.isfinite(verdict.share)
        else f"wrong {verdict.statistic}"
    )
    off = f", off by {verdict.off}" if verdict.off else ""
    where = f"({outcome.dtype}, case {outcome.case})"
    return f"{by}: {verdict.place} is {verdict.got}, needs {verdict.expected}{off} {where}"


def causes(failed: list[Outcome]) -> list[str]:
    """Return a line for each cause of failures: cases in which the same results are wrong, or the same is raised."""
    groups: dict[tuple[str, str], list[str]] = {}
    for outcome in failed:
        wrong = [verdict.tensor for verdict in outcome.wrong]
        cause = outcome.detail or f"{', '.join(wrong)} {'disagrees' if len(wrong) == 1 else 'disagree'}"
        groups.setdefault((outcome.dtype, cause), []).append(outcome.case)
    found = []
    for (dtype, cause), cases in groups.items():
        named = ", ".join(cases) if len(cases) <= 6 else f"{', '.join(cases[:5])} and {len(cases) - 5} more"
        found.append(f"{dtype}, {len(cases)} {'case' if len(cases) == 1 else 'cases'}: {cause}: {named}")
    return found
