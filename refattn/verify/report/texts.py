"""What all texts share: tables, shares of the allowed error, and how they become one text."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence

from rich.box import Box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from refattn.messages import shown
from refattn.verify.outcome import LONGEST

WIDE = 200
"""Columns of a text that goes to a file or a pipe."""

# A line of dashes below the header and nothing else, in plain ASCII.
_PLAIN = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)

_COLOURS = {"agrees": "green", "disagrees": "red", "raises": "red"}
_COLOURS |= dict.fromkeys(("not run", "not finished", "declined"), "yellow")

_NUMBERS = ("cases", "share", "run", "agreed", "failed", "declined")
_PROSE = ("title", "source", "note", "detail", "reason", "where", "devices", "claim", "holds", "shown by")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int, apart: bool = False) -> Table:
    """Return a table; columns of numbers stand to the right, and only columns of prose are broken into lines.

    With `apart` an empty line stands between rows.
    """
    rows = list(rows)
    needed, prose = natural(header, rows), any(name in _PROSE for name in header)
    gap = 2 if prose or needed + 2 * (len(header) - 1) <= width else 1
    whole = prose or needed + gap * (len(header) - 1) <= width
    made = Table(
        box=_PLAIN, show_edge=False, show_lines=apart, pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="bold"
    )
    for name in header:
        made.add_column(
            name,
            justify="right" if name in _NUMBERS else "left",
            no_wrap=whole and name not in _PROSE,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(Text("\n".join(map(printable, cell.split("\n"))), style=_style(cell)) for cell in row))
    return made


def cases_text(count: int) -> str:
    """Return so many cases in words."""
    return f"{count} case{'' if count == 1 else 's'}"


def natural(header: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    """Return the width that a table needs when nothing is broken into lines and there are no gaps."""
    return sum(max(map(len, column)) for column in zip(header, *rows, strict=True))


def _style(cell: str) -> str:
    return "red" if cell.endswith(" disagree") else _COLOURS.get(cell, "")


def render(parts: Iterable[RenderableType], width: int, colour: bool) -> str:
    """Return texts and tables, one below the other, as one text."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=colour,
        force_jupyter=False,
        color_system="standard" if colour else None,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )
    for part in parts:
        part = "\n".join(map(printable, part.split("\n"))) if isinstance(part, str) else part
        # A text that must not be wrapped, such as a line of code, may be longer than the line.
        console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def size(share: float) -> float:
    """Return the share for sorting: one that is no number is the worst."""
    return math.inf if math.isnan(share) else share


def indented(columns: int, text: str) -> Padding:
    return Padding(Text(printable(text)), (0, 0, 0, columns))


def printable(text: str) -> str:
    """Return text of foreign code in one line, and what a terminal would obey as escapes."""
    return shown(" ".join(text.splitlines()), LONGEST)
