"""What a report says, as data: sections of lines and tables, for a terminal (`tables`) and a browser (`page`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.adapters.conventions import expected
from refattn.verify.outcome import Outcome, Report, Verdict, share_text
from refattn.verify.report.texts import cases_text, printable, size
from refattn.verify.tolerance.budget import has_rows
from refattn.verify.tolerance.compare import ELEMENT, is_far

LEGEND = (
    "share: used part of the allowed error, in the case that used most of it; the limit is 1.00",
    "by: the statistic that used it, or the check that failed; index, got, expected: worst element",
    "error: how far that is off, and the largest element that was expected",
    "class: what a case is designed for",
)

WORST = tuple("dtype tensor cases share by case index got expected error verdict".split())
"""The columns of the table of the worst cases."""

NEAREST = 3
"""Cases that are named where nothing was run."""

Line = tuple[int, str]  # columns of indentation, and the text


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes
    ----------
    title
        What stands above it; "" for nothing.
    lines
        Lines of text.
    answers
        Lines of the diagnosis, each with the word that it answers.
    code
        Lines that are never broken.
    header, rows
        A table.
    """

    title: str = ""
    lines: Sequence[Line] = ()
    answers: Sequence[tuple[str, str]] = ()
    code: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()

    def __bool__(self) -> bool:
        return bool(self.lines or self.answers or self.code or self.header)


def sections(report: Report, mechanism: Mechanism, details: bool) -> Iterator[Section]:
    """Yield the parts of a report in a terminal; one that is empty has nothing to say.

    Where something fails, the diagnosis; the worst case of each dtype and tensor; every case that failed, or without
    `details` a line for each cause; why cases were declined; the counts of the case classes; and the verdict.
    """
    total, right = report.counts()["all"], expected(mechanism)
    yield _remark(heading(report, mechanism))
    if failed := report.failed:  # a run that agrees loads nothing of the diagnosis
        from refattn.verify.report import diagnosis, suspects

        yield Section(answers=[*diagnosis.lines(report, mechanism)])
    yield worst(report, mechanism)
    if details and any(outcome.verdicts for outcome in report.outcomes):
        yield Section(lines=[(0, line) for line in LEGEND])
        yield Section("Agrees though early digits differ", _indented(far(report, mechanism)))
    if details:
        conventions = [f"{what}: {got}; needs {right[what]}" for what, got in report.conventions.items()]
        yield Section("Conventions that differ, whatever else does", _indented(conventions))
    if failed:
        every = failures(failed, mechanism) if details else _indented(diagnosis.causes(failed))
        yield Section(f"Failed ({len(failed)} of {cases_text(total['run'])} run)", every)
        if report.suspects and details:
            yield Section(lines=[*suspects.lines(report.suspects)])
    yield Section("The smallest case found that fails", code=report.smallest)
    yield Section("What the verdicts on long cases stand on", _indented(notes(report)))
    declined = declines(report)
    title = f"Declined ({total['declined']} of {len(report.outcomes)} cases)"
    yield replace(declined, title=title)
    if declined and not total["run"]:
        yield Section("The cases that come nearest", _indented(nearest(report, mechanism)))
    if report.reference:
        yield _remark("It has loaded a definition of refattn: where it calls that, its agreement says nothing.")
    if report.interpreted:
        yield _remark(report.interpreted)
    if report.left_out:
        why = f"which it does not have ({report.left_out})"
        yield _remark(f"float64 was left out, {why}; --dtype float64 asks for it")
    for line in report.remarks:
        yield _remark(line)
    for line in report.not_run:
        yield _remark(f"{line}: what one carries to the next was not seen" if "crosses" in line else line)
    if report.seed:
        yield _remark(f"seed {report.seed}")
    yield counts(report)
    yield _remark(closing(report))


def _remark(line: str) -> Section:
    return Section(lines=[(0, line)])


def _indented(lines: Sequence[str]) -> list[Line]:
    return [(2, line) for line in lines]


def counts(report: Report) -> Section:
    """Return how many cases of each class agreed, failed and were declined."""
    rows = [(kind, *map(str, row.values())) for kind, row in report.counts().items()]
    return Section(header=("class", "run", "agreed", "failed", "declined"), rows=rows)


def heading(report: Report, mechanism: Mechanism) -> str:
    """Return what was verified against what."""
    what = "outputs and gradients" if report.grad else "outputs"
    return f"{report.kernel} against {mechanism.title.lower()}: {what}"


def far(report: Report, mechanism: Mechanism) -> list[str]:
    """Return, for each result that agrees though its worst element is far off, how far rounding alone can move it."""
    cases = {case.name: case for case in (*mechanism.cases, *mechanism.kernel_sizes)}
    told = []
    for outcome in report.outcomes:
        for verdict in outcome.verdicts:
            if outcome.seen is None or not verdict.agrees or verdict.error is None or not verdict.largest:
                continue
            truth, name = outcome.seen[0], verdict.tensor
            if not is_far(verdict, truth):
                continue
            variance = truth.variance[name]
            row = variance[verdict.index[:-1]] if has_rows(name, variance) else variance[verdict.index]
            allowed = ELEMENT * math.sqrt(max(float(variance[verdict.index]), float(np.mean(row))))
            purpose = cases[outcome.case].purpose if outcome.case in cases else ""
            told.append(
                f"{outcome.dtype} {verdict.place}, case {outcome.case}: got {verdict.got}, needs {verdict.expected}; "
                f"rounding moves a correct kernel by up to {allowed:.1g} here{f' ({purpose})' if purpose else ''}"
            )
    return told


def notes(report: Report) -> list[str]:
    """Return what the verdicts on long cases stand on, a line for all that say the same."""
    found: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        if outcome.note:
            found.setdefault(outcome.note, []).append(f"{outcome.dtype} {outcome.case}")
    return [f"{', '.join(where)}: {note}" for note, where in found.items()]


def nearest(report: Report, mechanism: Mechanism) -> list[str]:
    """Return the declined cases that ask least, each with what was not done, and how to state what can be.

    Sizes are no help to a kernel that does not take q, k and v, that an interpreter cannot run, or without gradients.
    """
    reasons = {outcome.case: outcome.detail for outcome in reversed(report.outcomes)}
    asked = [case for case in mechanism.cases if case.name in reasons]
    asked.sort(key=lambda case: (len(case.options) + len(case.inputs), 0 in case.inputs["q"].shape))
    lines = [f"{case.name}: {call_of(case)}: {reasons[case.name]}" for case in asked[:NEAREST]]
    how = "an adapter states the sizes that it can run, attend.supports = {'d': [64, 128], 'n': {'multiple_of': 128}},"
    others = ("called by name", "interpreted on the CPU: ", "no gradients: ")
    if all(any(words in why for words in others) for why in reasons.values()):
        return lines
    return [*lines, f"{how} and --shape b=1,h=8,n=128,d=64 runs any"]


def closing(report: Report) -> str:
    """Return the verdict of a verification in one line."""
    total = report.counts()["all"]
    if not report.outcomes:
        return f"{report.mechanism}: nothing was run: there was no case"
    if not total["run"]:
        count = sum(bool(outcome.verdicts) for outcome in report.outcomes)
        if len(report.outcomes) > total["declined"]:
            return f"{report.mechanism}: nothing was judged: {_not_run(report)}"
        declined = f"all {total['declined']} cases were declined" if total["declined"] > 1 else "its case was declined"
        if count:
            return f"{report.mechanism}: no gradient was judged: {declined}; the outputs of {count} agree"
        return f"{report.mechanism}: nothing was run: {declined}"
    statuses = {outcome.status for outcome in report.outcomes}
    verdict: str = next(status for status in ("disagrees", "raises", "agrees", "not finished") if status in statuses)
    counts = f"{cases_text(total['run'])} run, {total['declined']} declined, {total['failed']} failed"
    if verdict == "agrees" and report.not_run:
        verdict = _not_run(report)
    judged = [(outcome, verdict) for outcome in report.outcomes for verdict in outcome.verdicts]
    if not judged:
        return f"{report.mechanism}: {verdict}: {counts}; no tensor could be judged"
    outcome, worst = max(judged, key=lambda pair: size(pair[1].share))
    where = f"({outcome.dtype} {worst.tensor}, case {outcome.case})"
    if not math.isfinite(worst.share) and worst.statistic in _RUNGS:
        return f"{report.mechanism}: {verdict}: {counts}; worst: {_RUNGS[worst.statistic]} {where}"
    return f"{report.mechanism}: {verdict}: {counts}; worst use of the allowed error {share_text(worst.share)} {where}"


def _not_run(report: Report) -> str:
    """Return what did not run in a few words: without the names of the cases."""
    return "; ".join(line.partition(": ")[0] for line in report.not_run)


_RUNGS = {
    "shape": "wrong shape",
    "dtype": "wrong dtype",
    "non-finite": "non-finite numbers differ",
    "exact": "exact numbers differ",
}


def worst(report: Report, mechanism: Mechanism) -> Section:
    """Return a row for each dtype and tensor, with the case that used most of the allowed error."""
    rows: list[tuple[str, ...]] = []
    for dtype in dict.fromkeys(outcome.dtype for outcome in report.outcomes):
        outcomes = [outcome for outcome in report.outcomes if outcome.dtype == dtype]
        found: dict[str, list[tuple[Outcome, Verdict]]] = {}
        for outcome in outcomes:
            for verdict in outcome.verdicts:
                found.setdefault(verdict.tensor, []).append((outcome, verdict))
        if not found:
            statuses = {outcome.status for outcome in outcomes}
            word: str = next(status for status in ("raises", "not finished", "declined") if status in statuses)
            rows.append((dtype, "", "0", *[""] * 7, word))
            continue
        run = {outcome.case for outcome in outcomes if outcome.status not in ("declined", "not finished")}
        given = [pair for case in mechanism.cases if case.name in run for pair in case.inputs.items()]
        inputs = [name for name, x in given if x.design not in ("mask", "counts")]
        asked = ("out", *mechanism.pulled, *(f"d_{name}" for name in dict.fromkeys(inputs) if report.grad))
        for tensor in dict.fromkeys((*asked, *found)):
            if tensor not in found:
                rows.append((dtype, tensor, "0", *[""] * 7, "not given"))
                continue
            outcome, worst = max(found[tensor], key=lambda pair: size(pair[1].share))
            wrong = sum(not verdict.agrees for _, verdict in found[tensor])
            place = (outcome.case, worst.at, worst.got, worst.expected, worst.off)
            shown = (share_text(worst.share), worst.statistic, *place)
            word = f"{wrong} disagree" if wrong else "agrees"
            rows.append((dtype, tensor, str(len(found[tensor])), *shown, word))
    return Section(header=WORST, rows=rows)


def failures(failed: Sequence[Outcome], mechanism: Mechanism) -> list[Line]:
    """Return for each case that failed what it is, what it raised, and a line for each tensor that disagrees."""
    purposes = {case.name: f": {case.purpose}" for case in mechanism.cases if case.purpose}
    calls = {case.name: call_of(case) for case in mechanism.cases}
    wrong = [outcome.wrong for outcome in failed]
    cells = [[(v.tensor, share_text(v.share), v.statistic, v.at, v.got) for v in verdicts] for verdicts in wrong]
    widths = [max(map(len, column)) for column in zip(*(row for rows in cells for row in rows), strict=True)]
    lines: list[Line] = []
    for outcome, verdicts, rows in zip(failed, wrong, cells, strict=True):
        lines.append((2, f"{outcome.dtype} {outcome.case} ({outcome.kind}{purposes.get(outcome.case, '')})"))
        if outcome.case in calls:
            lines.append((6, calls[outcome.case]))
        if outcome.detail:
            lines.append((6, outcome.detail))
        for verdict, row in zip(verdicts, rows, strict=True):
            tensor, share, by, index, got = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            off = f", off by {verdict.off}" if verdict.off else ""
            lines.append((6, f"{tensor} {share} {by} {index} got {got} expected {verdict.expected}{off}"))
    return lines


def call_of(case: Case) -> str:
    """Return the arguments of a case in a line: "q (2, 4, 37, 16), ..., causal=True"."""
    arrays = (f"{name} {given.shape}" for name, given in case.inputs.items())
    return ", ".join((*arrays, *(f"{name}={value!r}" for name, value in case.options.items())))


def declines(report: Report) -> Section:
    """Return for each reason how many cases were declined, the reason, and the cases by dtype, or some of them."""
    reasons: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        if outcome.status == "declined":
            reasons.setdefault(" ".join(printable(str(outcome.detail)).split()), []).append(outcome)
    rows = []
    for reason, outcomes in sorted(reasons.items(), key=lambda item: -len(item[1])):
        dtypes = ", ".join(dict.fromkeys(outcome.dtype for outcome in outcomes))
        cases = list(dict.fromkeys(outcome.case for outcome in outcomes))
        named = ", ".join(cases) if len(cases) <= 3 else f"{', '.join(cases[:2])} and {len(cases) - 2} more"
        rows.append((str(len(outcomes)), reason, f"{dtypes}: {named}"))
    return Section(header=("cases", "reason", "where") if rows else (), rows=rows)
