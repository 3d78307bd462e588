"""The picture of runs: the loss of each step and the scores on the way, in bits per byte."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from refattn.files import Place, write_atomically

Rows = Sequence[Mapping[str, Any]]


def draw(runs: Mapping[str, Rows], path: Place, result: Mapping[str, Any] | None = None) -> None:
    """Draw the metrics of runs by name into one PNG: each step pale, scores of the held-out text on top.

    With the result of a run its baselines and its growths are drawn too. ImportError where matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="bits per byte")
    highest = 0.0
    for n, (name, rows) in enumerate(runs.items()):
        losses = [(row["step"], row["loss"] / math.log(2.0)) for row in rows if row.get("loss") is not None]
        scores = [(row["step"], row["heldout_bits"]) for row in rows if row.get("heldout_bits") is not None]
        last = f"{scores[-1][1]:.3f} held out after step {scores[-1][0]}" if scores else "not scored yet"
        axes.plot(*_columns(losses), color=f"C{n % 10}", alpha=0.3, linewidth=0.8)
        axes.plot(*_columns(scores), "o-", color=f"C{n % 10}", markersize=3, label=f"{name}: {last}")
        for step in (row["step"] for row in rows if result and row.get("growth", {}).get("grown")):
            axes.axvline(step, color="tab:green", linewidth=0.8)
        highest = max([highest, *(bits for _, bits in losses)])
    if result is not None:
        for baseline, style in (("bigram", "--"), ("gzip", ":")):
            bits = result[f"{baseline}_bits"]
            axes.axhline(bits, color="black", linestyle=style, linewidth=0.8, label=f"{baseline} {bits:.2f}")
        axes.set_ylim(0.0, min(8.5, (highest or 8.0) * 1.05))
    axes.legend(frameon=False)
    FigureCanvasAgg(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
    write_atomically(path, picture.getvalue())


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [bits for _, bits in points]
