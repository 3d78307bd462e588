"""What a suite is worth as text: the wrong kernels that it accepts, and its score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from refattn.verify.report.texts import WIDE, render, table


def lines(
    rows: Sequence[Mapping[str, Any]], killed: int, count: int, *, width: int = WIDE, colour: bool = False
) -> str:
    """Return the kernels that were not rejected, those that were never wrong, and the score in a line."""
    shown = [(row["status"], row["name"], row["wrong"]) for row in rows if row["status"] != "killed"]
    parts: list[Any] = [table(("status", "fault", "detail"), sorted(shown), width), ""] if shown else []
    rest = [f"{n} {what}" for what in ("never wrong", "not called") if (n := sum(r["status"] == what for r in rows))]
    part = f"{100.0 * killed / count:.1f} %" if count else "none"
    told = f"mutation score {part}: {killed} of {count} wrong kernels rejected"
    return render([*parts, "; ".join([told, *rest])], width, colour)
