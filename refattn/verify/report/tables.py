"""What was found, as text: the tables that the command line prints.

Each function returns the whole text, `width` columns wide at most where it can be helped, with the escape codes of
colours only where `colour` asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from refattn.mechanisms.record import Mechanism
from refattn.verify.outcome import Report, share_text
from refattn.verify.report.sections import Section, closing, heading, sections
from refattn.verify.report.texts import WIDE, indented, natural, printable, render, size
from refattn.verify.report.texts import table as _table

if TYPE_CHECKING:
    from refattn.verify.outcome import CheckReport


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
        rows = [(f"{c.source}; ours: {c.ours}" if c.ours else c.source, c.claim, c.holds, shown) for c, shown in many]
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
    # Whoever called the verification from Python has not been told where the error is.
    unasked = not (report.suspects or report.located) and any(
        one.status == "disagrees" and one.seen for one in report.outcomes
    )
    ask = [Text("which error it is: refattn.verify.locate(record, report)", no_wrap=True)] if unasked else []
    return render([heading(report, mechanism), *answers, Text(closing(report), no_wrap=True), *ask], width, False)


def verified(
    report: Report, mechanism: Mechanism, *, details: bool = True, width: int = WIDE, colour: bool = False
) -> str:
    """Return the report of a verification, as `sections` has it."""
    drawn = (_drawn(section, width) for section in sections(report, mechanism, details) if section)
    return render([part for parts in drawn for part in (*parts, "")], width, colour).rstrip()


def _drawn(section: Section, width: int) -> Iterator[RenderableType]:
    if section.title:
        yield section.title
    yield from (_answer(word, text) for word, text in section.answers)
    yield from (indented(columns, text) for columns, text in section.lines)
    yield from (Text(printable(line), no_wrap=True) for line in section.code)
    if section.header:
        yield _table(*_fitted(section.header, section.rows, width), width)


def _fitted(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> tuple[Any, Any]:
    """Return a table with two numbers, got and expected, one above the other in one column if they are too wide."""
    if "got" not in header or natural(header, rows) + len(header) - 1 <= width:
        return header, rows
    merged = [(*row[:7], f"{row[7]}\n{row[8]}".strip(), *row[9:]) for row in rows]
    return (*header[:7], "got, expected", *header[9:]), merged


def _answer(word: str, text: str) -> RenderableType:
    """Return a line of the diagnosis."""
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(width=10, no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(Text(word, style="bold"), Text(printable(text)))
    return row
