"""The diagnosis: what fails, where, by how much and which error it is, in ten lines at most."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from refattn.mechanisms.record import Mechanism
from refattn.verify.adapters.conventions import expected
from refattn.verify.diagnose.localise import in_words
from refattn.verify.layouts import brought_back
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
    if report.no_attention:
        yield "which", f"no attention is computed: {report.no_attention}: explains everything"
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
    if words := next(filter(None, map(_not_finite, failed)), ""):
        yield "NaN", words
    if report.no_attention:
        return
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
    other = _other_axes(verdict.got, verdict.expected) if verdict.statistic == "shape" else ""
    return f"{by}: {verdict.place} is {verdict.got}, needs {verdict.expected}{off}{other} {where}"


def _not_finite(outcome: Outcome) -> str:
    """Return in which rows a result is not finite though the inputs and the reference are; "" if there are none."""
    if outcome.seen is None:
        return ""
    truth, result = outcome.seen
    if not all(np.isfinite(x).all() for x in truth.inputs.values() if x.dtype.kind == "f"):
        return ""
    for verdict in outcome.wrong:
        got, true = result.tensors[verdict.tensor], truth.values[verdict.tensor]
        if verdict.statistic != "non-finite" or got.ndim < 3:
            continue
        wrong = ~np.isfinite(got.astype(np.float64)) & np.isfinite(true)
        rows = wrong.any(axis=-1) if got.ndim > 3 else wrong
        if rows.any():
            word = "NaN" if np.isnan(got[wrong]).any() else "infinite"
            at = np.unique(np.nonzero(rows)[-1])
            whole = len(at) == at[-1] - at[0] + 1 > 2
            which = f"rows {at[0]} to {at[-1]}" if whole else f"row{'s' if len(at) > 1 else ''} {_few(at)}"
            of = f"{int(rows.sum())} of {rows.size} rows of all heads ({which})"
            return (
                f"{verdict.tensor} is {word} in {of}, where inputs and the reference are finite (case {outcome.case})"
            )
    return ""


def _few(at: NDArray[np.int64]) -> str:
    return ", ".join(map(str, at[:6])) + (f" and {len(at) - 6} more" if len(at) > 6 else "")


def _other_axes(got: str, needed: str) -> str:
    """Return in a word how the axes of a wrong shape lie: ": axes 1 and 2 are exchanged", "" where it is no such."""
    has, needs = (tuple(map(int, re.findall(r"\d{1,18}", shape))) for shape in (got, needed))
    lies = brought_back(has, needs)
    return f": {lies[0]}" if lies else ""


def causes(failed: list[Outcome]) -> list[str]:
    """Return a line for each cause of failures: cases in which the same results are wrong, or the same is raised
    but for numbers."""
    groups: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], str] = {}
    for outcome in failed:
        wrong = [verdict.tensor for verdict in outcome.wrong]
        cause = outcome.detail or f"{', '.join(wrong)} {'disagrees' if len(wrong) == 1 else 'disagree'}"
        alike = outcome.dtype, re.sub(r"[\d.]*\d", "", cause)  # one cause has other numbers in each case
        first.setdefault(alike, cause)
        groups.setdefault(alike, []).append(outcome.case)
    found = []
    for alike, cases in groups.items():
        dtype, cause = alike[0], first[alike]
        named = ", ".join(cases) if len(cases) <= 6 else f"{', '.join(cases[:5])} and {len(cases) - 5} more"
        found.append(f"{dtype}, {len(cases)} {'case' if len(cases) == 1 else 'cases'}: {cause}: {named}")
    return found
