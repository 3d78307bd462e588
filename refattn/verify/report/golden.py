"""Golden vectors as text: the tables of ``refattn golden``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from refattn.verify.outcome import share_text
from refattn.verify.report.texts import WIDE, render, table


def agreement(
    rows: Sequence[Mapping[str, Any]], lacking: Mapping[str, str], *, width: int = WIDE, colour: bool = False
) -> str:
    """Return the worst case of each mechanism, every case that disagrees, and one line that says the verdict.

    `lacking` says of which mechanisms the set lacks cases.
    """
    failed = [row for row in rows if not row["share"] <= 1.0]
    worst = []
    for name in dict.fromkeys(row["mechanism"] for row in rows):
        of_it = [row for row in rows if row["mechanism"] == name]
        row = max(of_it, key=lambda row: row["share"] if not math.isnan(row["share"]) else math.inf)
        wrong = sum(row["mechanism"] == name for row in failed)
        status = f"{wrong} disagree" if wrong else "agrees"
        worst.append((name, str(len(of_it)), status, share_text(row["share"]), f"{row['case']}: {row['where']}"))
    parts: list[Any] = [table(("mechanism", "cases", "status", "share", "detail"), worst, width), ""]
    if failed:
        cells = [(f"{row['mechanism']}/{row['case']}", share_text(row["share"]), row["where"]) for row in failed]
        parts += [table(("case", "share", "detail"), cells, width), ""]
    parts += [f"{name}: {words}" for name, words in lacking.items()]
    verdict = f"{len(failed)} disagree" if failed else "all agree"
    return render([*parts, f"golden vectors: {len(rows)} cases: {verdict}"], width, colour)


def cases(manifest: Mapping[str, Any], *, width: int = WIDE, colour: bool = False) -> str:
    """Return the cases of a set."""
    rows = [
        (
            f"{entry['mechanism']}/{entry['case']}",
            entry["kind"],
            str(len(entry["equations"])),
            str(len(entry["dtypes"])),
            str(entry["bytes"]),
            entry["purpose"],
        )
        for entry in manifest["cases"]
    ]
    made = ", ".join(f"{name} {version}" for name, version in manifest["producer"].items())
    total = sum(entry["bytes"] for entry in manifest["cases"])
    closing = f"{manifest['count']} {manifest['size']} cases, {total} bytes, by {made}\nsha256 {manifest['sha256']}"
    return render(
        [table(("case", "kind", "equations", "types", "bytes", "purpose"), rows, width), "", closing], width, colour
    )


def arrays(
    entry: Mapping[str, Any], found: Mapping[str, tuple[str, NDArray[Any]]], *, width: int = WIDE, colour: bool = False
) -> str:
    """Return the arrays of a case, with the range of their values."""
    rows = [
        (name, dtype, str(x.shape), f"{x.min():.4g} to {x.max():.4g}" if x.size and dtype != "bool" else "")
        for name, (dtype, x) in found.items()
    ]
    options = ", ".join(f"{name}={value!r}" for name, value in entry["options"].items())
    title = f"{entry['mechanism']}/{entry['case']}({options}): {entry['purpose']}"
    return render([title, "", table(("array", "type", "shape", "values"), rows, width)], width, colour)
