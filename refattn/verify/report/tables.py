"""What was found, as text: the tables that the command line prints.

Each function returns the whole text, `width` columns wide at most where it can be helped, with the escape codes of
colours only where `colour` asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from refattn.golden.storage_types import TYPES
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.adapters.conventions import expected
from refattn.verify.outcome import Outcome, Report, Verdict, share_text
from refattn.verify.report.texts import WIDE, cases_text, indented, natural, printable, render, size
from refattn.verify.report.texts import table as _table
from refattn.verify.tolerance.budget import has_rows
from refattn.verify.tolerance.compare import ELEMENT

if TYPE_CHECKING:
    from refattn.verify.outcome import CheckReport


LEGEND = (
    "share: used part of the allowed error, in the case that used most of it; the limit is 1.00\n"
    "by: the statistic that used it, or the check that failed; index, got, expected: worst element\n"
    "error: how far that is off, and the largest element that was expected\n"
    "class: what a case is designed for"
)

FAR = 100
"""Numbers that agree differ in early digits where they are as many units of rounding of their type apart."""


def mechanisms(records: Iterable[Mechanism], *, width: int = WIDE, colour: bool = False) -> str:
    """Return the table of mechanisms."""
    rows = [(m.name, m.title, ", ".join(m.implementations), m.source) for m in records]
    return render([_table(("name", "title", "implementations", "source"), rows, width)], width, colour)


def claims(records: Iterable[Mechanism], *, width: int = WIDE, colour: bool = False) -> str:
    """Return a table for each mechanism of what its sources claim."""
    parts: list[RenderableType] = []
    for record in records:
        # Names of tests are longer than a column.
        many = [(c, "\n".join((c.shown, *c.tests)).replace("::", "::\n  ")) for c in record.claims]
        rows = [(c.source, c.claim, c.holds, shown) for c, shown in many]
        parts += [*([""] if parts else []), Text(record.name, style="bold"), ""]
        parts += [_table(("source", "claim", "holds", "shown by"), rows, width, apart=True)]
    return render(parts, width, colour)


def backends(descriptions: Iterable[Mapping[str, Any]], *, width: int = WIDE, colour: bool = False) -> str:
    """Return the table of backends, from `refattn.backends.describe`."""
    rows = [
        (
            row["name"],
            "yes" if row["available"] else "no",
            row["version"] or "",
            ", ".join(row["devices"]),
            ("yes" if row["float64"] else "no") if row["available"] else "",
            row["note"] if row["available"] else row["why_unavailable"],
        )
        for row in descriptions
    ]
    return render([_table(("name", "available", "version", "devices", "float64", "note"), rows, width)], width, colour)


def checked(report: CheckReport, *, table: bool = True, width: int = WIDE, colour: bool = False) -> str:
    """Return the report of the reference's check of itself: a table of every row, and a line that says the verdict."""
    if not table:
        return render([check_closing(report)], width, colour)
    rows = [
        (r.section, r.name, r.status, "" if r.share is None else share_text(r.share), r.detail) for r in report.rows
    ]
    return render(
        [_table(("section", "name", "status", "share", "detail"), rows, width), "", check_closing(report)],
        width,
        colour,
    )


def check_closing(report: CheckReport) -> str:
    """Return the verdict of a check in one line."""
    counts = report.counts()
    verdict = "disagrees" if counts["disagrees"] else "agrees" if counts["agrees"] else "nothing was run"
    numbers = f"{counts['agrees']} checks agree, {counts['disagrees']} disagree, {counts['not run']} not run"
    shares = [(size(row.share), row) for row in report.rows if row.share is not None]
    if not shares:
        return f"{report.mechanism} on {report.backend}: {verdict}: {numbers}"
    share, row = max(shares, key=lambda pair: pair[0])
    worst = f"worst use of the allowed error {share_text(share)} ({row.section}: {row.name})"
    how = "" if report.full else " (a sample; --full runs all)"
    return f"{report.mechanism} on {report.backend}: {verdict}: {numbers}; {worst}{how}"


def short(report: Report, mechanism: Mechanism, *, width: int = 120) -> str:
    """Return what was verified, the diagnosis where something fails, and one line that says the verdict."""
    from refattn.verify.report import diagnosis

    answers = [_answer(word, text) for word, text in diagnosis.lines(report, mechanism)]
    return render([heading(report, mechanism), *answers, Text(closing(report), no_wrap=True)], width, False)


def heading(report: Report, mechanism: Mechanism) -> str:
    """Return what was verified against what."""
    what = "outputs and gradients" if report.grad else "outputs"
    return f"{report.kernel} against {mechanism.title.lower()}: {what}"


def verified(
    report: Report, mechanism: Mechanism, *, details: bool = True, width: int = WIDE, colour: bool = False
) -> str:
    """Return the report of a verification.

    Where something fails, the diagnosis; a table of the worst case of each dtype and tensor; every case that failed, or
    without `details` a line for each cause; why cases were declined; the counts of the case classes; and one line that
    says the verdict.
    """
    parts: list[RenderableType] = [heading(report, mechanism), ""]
    if report.failed:
        from refattn.verify.report import diagnosis

        told = diagnosis.lines(report, mechanism)
        parts += [*(_answer(word, text) for word, text in told), ""]
    parts += [_table(*_worst(report, mechanism, width), width), ""]
    if details and any(outcome.verdicts for outcome in report.outcomes):
        parts += [LEGEND, ""]
        if lines := far(report, mechanism):
            parts += ["Agrees though early digits differ", *(indented(2, line) for line in lines), ""]
    if report.conventions and details:
        parts.append("Conventions that differ, whatever else does")
        right = expected(mechanism)
        parts += [indented(2, f"{what}: {got}; needs {right[what]}") for what, got in report.conventions.items()]
        parts.append("")
    if failed := report.failed:
        every = _failures(failed, mechanism) if details else [indented(2, line) for line in diagnosis.causes(failed)]
        parts += [f"Failed ({len(failed)} of {cases_text(report.counts()['all']['run'])} run)", *every]
        parts.append("")
    if report.suspects and details:
        from refattn.verify.report import suspects as suspects_text

        parts += [*(indented(columns, text) for columns, text in suspects_text.lines(report.suspects)), ""]
    if report.smallest:
        parts += [
            "The smallest case found that fails",
            *(Text(printable(line), no_wrap=True) for line in report.smallest),
            "",
        ]
    if notes := _notes(report):
        parts += ["What the verdicts on long cases stand on", *(indented(2, note) for note in notes), ""]
    declined = [outcome for outcome in report.outcomes if outcome.status == "declined"]
    if declined:
        parts.append(f"Declined ({len(declined)} of {len(report.outcomes)} cases)")
        parts += [_table(("cases", "reason", "where"), decline_rows(declined), width), ""]
    if declined and not report.counts()["all"]["run"]:
        parts += ["The cases that come nearest", *(indented(2, line) for line in nearest(report, mechanism)), ""]
    if report.reference:
        parts += ["It has loaded a definition of refattn: where it calls that, its agreement says nothing.", ""]
    if report.interpreted:
        parts += [indented(0, report.interpreted), ""]
    if report.left_out:
        parts += [f"float64 was left out, which it does not have ({report.left_out}); --dtype float64 asks for it", ""]
    for line in report.not_run:
        parts += [f"{line}: what one carries to the next was not seen", ""]
    if report.seed:
        parts += [f"seed {report.seed}", ""]
    counts = [(kind, *map(str, row.values())) for kind, row in report.counts().items()]
    parts += [_table(("class", "run", "agreed", "failed", "declined"), counts, width), "", closing(report)]
    return render(parts, width, colour)


def far(report: Report, mechanism: Mechanism) -> list[str]:
    """Return, for each result that agrees though its worst element is far off, how far rounding alone can move it."""
    cases = {case.name: case for case in (*mechanism.cases, *mechanism.kernel_sizes)}
    told = []
    for outcome in report.outcomes:
        for verdict in outcome.verdicts:
            if outcome.seen is None or not verdict.agrees or verdict.error is None or not verdict.largest:
                continue
            truth, name = outcome.seen[0], verdict.tensor
            if not verdict.error > FAR * TYPES[truth.stored[name]].unit * verdict.largest:
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


def _notes(report: Report) -> list[str]:
    """Return what the verdicts on long cases stand on, a line for all that say the same."""
    found: dict[str, list[str]] = {}
    for outcome in report.outcomes:
        if outcome.note:
            found.setdefault(outcome.note, []).append(f"{outcome.dtype} {outcome.case}")
    return [f"{', '.join(where)}: {note}" for note, where in found.items()]


NEAREST = 3
"""Cases that are named where nothing was run."""


def nearest(report: Report, mechanism: Mechanism) -> list[str]:
    """Return the declined cases that ask least, each with what was not done, and how to state what can be.

    Sizes are no help to a kernel that does not take q, k and v, or that an interpreter cannot run.
    """
    reasons = {outcome.case: outcome.detail for outcome in reversed(report.outcomes)}
    asked = [case for case in mechanism.cases if case.name in reasons]
    asked.sort(key=lambda case: (len(case.options) + len(case.inputs), 0 in case.inputs["q"].shape))
    lines = [f"{case.name}: {call_of(case)}: {reasons[case.name]}" for case in asked[:NEAREST]]
    how = "an adapter states the sizes that it can run, attend.supports = {'d': [64, 128], 'n': {'multiple_of': 128}},"
    if all("called by name" in why or "interpreted on the CPU: " in why for why in reasons.values()):
        return lines
    return [*lines, f"{how} and --shape b=1,h=8,n=128,d=64 runs any"]


def closing(report: Report) -> str:
    """Return the verdict of a verification in one line."""
    total = report.counts()["all"]
    if not report.outcomes:
        return f"{report.mechanism}: nothing was run: there was no case"
    if not total["run"]:
        count = sum(bool(outcome.verdicts) for outcome in report.outcomes)
        declined = f"all {total['declined']} cases were declined" if total["declined"] > 1 else "its case was declined"
        outputs = f"; the outputs of {count} were judged all the same, and agree" if count else ""
        return f"{report.mechanism}: nothing was run: {declined}{outputs}"
    statuses = {outcome.status for outcome in report.outcomes}
    verdict: str = next(status for status in ("disagrees", "raises", "agrees") if status in statuses)
    counts = f"{cases_text(total['run'])} run, {total['declined']} declined, {total['failed']} failed"
    if verdict == "agrees" and report.not_run:
        verdict = "; ".join(report.not_run)
    judged = [(outcome, verdict) for outcome in report.outcomes for verdict in outcome.verdicts]
    if not judged:
        return f"{report.mechanism}: {verdict}: {counts}; no tensor could be judged"
    outcome, worst = max(judged, key=lambda pair: size(pair[1].share))
    where = f"({outcome.dtype} {worst.tensor}, case {outcome.case})"
    if not math.isfinite(worst.share) and worst.statistic in _RUNGS:
        return f"{report.mechanism}: {verdict}: {counts}; worst: {_RUNGS[worst.statistic]} {where}"
    return f"{report.mechanism}: {verdict}: {counts}; worst use of the allowed error {share_text(worst.share)} {where}"


_RUNGS = {
    "shape": "wrong shape",
    "dtype": "wrong dtype",
    "non-finite": "non-finite numbers differ",
    "exact": "exact numbers differ",
}


def _worst(report: Report, mechanism: Mechanism, width: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows, one for each dtype and tensor, with the case that used most of the allowed error."""
    header: tuple[str, ...] = (
        "dtype",
        "tensor",
        "cases",
        "share",
        "by",
        "case",
        "index",
        "got",
        "expected",
        "error",
        "verdict",
    )
    rows: list[tuple[str, ...]] = []
    for dtype in dict.fromkeys(outcome.dtype for outcome in report.outcomes):
        outcomes = [outcome for outcome in report.outcomes if outcome.dtype == dtype]
        found: dict[str, list[tuple[Outcome, Verdict]]] = {}
        for outcome in outcomes:
            for verdict in outcome.verdicts:
                found.setdefault(verdict.tensor, []).append((outcome, verdict))
        if not found:
            word = "raises" if any(outcome.status == "raises" for outcome in outcomes) else "declined"
            rows.append((dtype, "", "0", *[""] * 7, word))
            continue
        run = {outcome.case for outcome in outcomes if outcome.status != "declined"}
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
    if natural(header, rows) + len(header) - 1 > width:  # the two numbers, one above the other, in one column
        header = (*header[:7], "got, expected", *header[9:])
        rows = [(*row[:7], f"{row[7]}\n{row[8]}".strip(), *row[9:]) for row in rows]
    return header, rows


def _answer(word: str, text: str) -> RenderableType:
    """Return a line of the diagnosis."""
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(width=10, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(Text(word, style="bold"), Text(printable(text)))
    return row


def _failures(failed: Sequence[Outcome], mechanism: Mechanism) -> list[RenderableType]:
    """Return for each case that failed what it is, what it raised, and a line for each tensor that disagrees."""
    purposes = {case.name: f": {case.purpose}" for case in mechanism.cases if case.purpose}
    calls = {case.name: call_of(case) for case in mechanism.cases}
    wrong = [outcome.wrong for outcome in failed]
    cells = [[(v.tensor, share_text(v.share), v.statistic, v.at, v.got) for v in verdicts] for verdicts in wrong]
    widths = [max(map(len, column)) for column in zip(*(row for rows in cells for row in rows), strict=True)]
    lines: list[RenderableType] = []
    for outcome, verdicts, rows in zip(failed, wrong, cells, strict=True):
        lines.append(indented(2, f"{outcome.dtype} {outcome.case} ({outcome.kind}{purposes.get(outcome.case, '')})"))
        if outcome.case in calls:
            lines.append(indented(6, calls[outcome.case]))
        if outcome.detail:
            lines.append(indented(6, outcome.detail))
        for verdict, row in zip(verdicts, rows, strict=True):
            tensor, share, by, index, got = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            off = f", off by {verdict.off}" if verdict.off else ""
            lines.append(indented(6, f"{tensor} {share} {by} {index} got {got} expected {verdict.expected}{off}"))
    return lines


def call_of(case: Case) -> str:
    """Return the arguments of a case in a line: "q (2, 4, 37, 16), ..., causal=True"."""
    arrays = (f"{name} {given.shape}" for name, given in case.inputs.items())
    return ", ".join((*arrays, *(f"{name}={value!r}" for name, value in case.options.items())))


def decline_rows(declined: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return one row for each reason: how many cases, the reason, and the cases by dtype, or some of them."""
    reasons: dict[str, list[Outcome]] = {}
    for outcome in declined:
        reasons.setdefault(" ".join(printable(str(outcome.detail)).split()), []).append(outcome)
    rows: list[tuple[str, ...]] = []
    for reason, outcomes in sorted(reasons.items(), key=lambda item: -len(item[1])):
        dtypes = ", ".join(dict.fromkeys(outcome.dtype for outcome in outcomes))
        cases = list(dict.fromkeys(outcome.case for outcome in outcomes))
        named = ", ".join(cases) if len(cases) <= 3 else f"{', '.join(cases[:2])} and {len(cases) - 2} more"
        rows.append((str(len(outcomes)), reason, f"{dtypes}: {named}"))
    return rows
