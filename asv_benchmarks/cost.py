"""What a change costs each mechanism, in a table that is read in ten seconds, and all numbers as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from asv_benchmarks.judge import WORSE, Verdict
from asv_benchmarks.touched import mechanism_of

COLUMNS = {
    "forward": r"^instructions core\..*forward",
    "backward": r"^instructions core\..*backward",
    "block": r"^instructions (block|instructions)\.",
    "stream": r"^instructions stream\.",
    "training step": r"^instructions language\.",
    "operations": r"^work .*operations",
    "bytes written": r"^work .*written",
    "bytes held": r"^work .*held",
    "share of the error": r"^share ",
    "memory": r"^memory ",
    "clock": r"^(time|rate) ",
}
"""What each column is about, by kind and name of benchmarks."""

READING = "forward to training step: instructions of small calls; a cell is what changed most, = is no difference"


def costs(verdicts: Sequence[Verdict]) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """Return the head and the rows of the table: each cell with the word of what differs most in it.

    A row is a mechanism, or what is of none, in which something differs; a cell is the change of the number that
    changed most, "=" where none did, and "" where nothing was measured.
    """
    measured = [verdict for verdict in verdicts if verdict.word != "n/a"]
    cells: dict[str, dict[str, list[Verdict]]] = {}
    for verdict in measured:
        kind = f"{verdict.benchmark.kind} {verdict.benchmark}"
        column = next(name for name, pattern in COLUMNS.items() if re.search(pattern, kind))
        cells.setdefault(mechanism_of(verdict.benchmark) or "other", {}).setdefault(column, []).append(verdict)
    columns = [name for name in COLUMNS if any(name in row for row in cells.values())]
    rows = [
        [(mechanism, ""), *(_cell(row.get(name, [])) for name in columns)]
        for mechanism, row in cells.items()
        if any(verdict.word for many in row.values() for verdict in many)
    ]
    return ["", *columns], rows


def _cell(verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """Return the text of a cell and the word that gives it its colour: what is worse before what is better."""
    different = [verdict for verdict in verdicts if verdict.word]
    if not different:
        return "=" if verdicts else "", ""
    worst = max(different, key=lambda verdict: (verdict.word in WORSE, _size(verdict)))
    return (change(worst.ratio[1]) if worst.ratio else worst.word), worst.word


def _size(verdict: Verdict) -> float:
    ratio = verdict.ratio[1] if verdict.ratio else math.inf
    return abs(math.log(ratio)) if 0.0 < ratio < math.inf else math.inf


def change(ratio: float) -> str:
    """Return a ratio as a change in per cent, and as a factor where it is a large one.

    >>> change(1.0123), change(0.5), change(614.0), change(1.00001)
    ('+1.2 %', '-50 %', 'x 614', '+0.001 %')
    """
    if not 0.1 < ratio < 10.0:
        return f"x {ratio:.3g}"
    return f"{100.0 * (ratio - 1.0):+.{1 if abs(ratio - 1.0) < 1e-3 else 2}g} %"


def unchanged(verdicts: Sequence[Verdict]) -> str:
    """Return in one line the mechanisms in which nothing differs."""
    words: dict[str, set[str]] = {}
    for verdict in verdicts:
        words.setdefault(mechanism_of(verdict.benchmark) or "other", set()).add(verdict.word)
    same = [name for name, found in words.items() if found <= {"", "n/a"} and "" in found]
    return f"unchanged: {', '.join(same)}" if same else ""


def write(file: Path, title: str, verdicts: Sequence[Verdict]) -> None:
    """Write all numbers as JSON."""
    rows = [
        {
            "benchmark": str(verdict.benchmark),
            "kind": verdict.benchmark.kind,
            "word": verdict.word,
            "base": verdict.base,
            "head": verdict.head,
            "ratio": verdict.ratio,
            "detail": verdict.detail,
        }
        for verdict in verdicts
    ]
    file.write_text(json.dumps({"title": title, "benchmarks": rows}, indent=1) + "\n", encoding="utf-8")
