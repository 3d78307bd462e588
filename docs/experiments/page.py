"""What the page of an experiment is made of: means with their range, tables, and the places where they stand."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def ranged(values: Sequence[float], digits: int) -> str:
    """Return the mean of some numbers with the least and the largest: ``2.50 [2.41, 2.62]``."""
    mean, least, most = (f"{x:.{digits}f}" for x in (np.mean(values), np.min(values), np.max(values)))
    return f"{mean} [{least}, {most}]"


def sure(holds: bool, text: str) -> str:
    """Return a conclusion if the results say so; ValueError where they do not."""
    if not holds:
        raise ValueError(f"the results do not say: {text}")
    return text


def bullets(sentences: Sequence[str]) -> str:
    """Return sentences as a list of Markdown."""
    return "\n".join(textwrap.fill(f"- {each}", 120, subsequent_indent="  ") for each in sentences)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells, the first of which is the head, as a table of Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("---" for _ in rows[0]) + " |")
    return "\n".join(lines)


def put(page: Path, texts: dict[str, str]) -> None:
    """Write texts into a page, each between the comments ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    whole = page.read_text(encoding="utf-8")
    for name, text in texts.items():
        first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = whole.partition(first)
        _, ended, after = rest.partition(last)
        if not found or not ended:
            raise ValueError(f"{page}: no place for {name!r}, needs the lines {first} and {last}")
        whole = f"{before}{first}\n\n{text}\n\n{last}{after}"
    page.write_text(whole, encoding="utf-8")
