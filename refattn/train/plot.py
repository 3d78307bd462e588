"""Pictures of runs: the loss of each step and the scores on the way, in bits per byte."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refattn.files import Place, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_loss(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], path: Place) -> None:
    """Draw the metrics and the result of a run, beside the baselines; ImportError where matplotlib is missing."""
    figure, axes = _empty()
    axes.plot(*_losses(rows), color="0.75", linewidth=0.8, label="training, each step")
    axes.plot(*_scores(rows), "o-", markersize=3, label="held out")
    for name, style in (("bigram", "--"), ("gzip", ":")):
        value = facts[f"{name}_bits"]
        axes.axhline(value, color="black", linestyle=style, linewidth=0.8, label=f"{name} {value:.2f}")
    for n, step in enumerate(row["step"] for row in rows if row.get("growth", {}).get("grown")):
        axes.axvline(step, color="tab:green", linewidth=0.8, label="growth" if n == 0 else None)
    axes.set(title=f"held out at the end: {facts['heldout_bits']:.3f} bits per byte")
    axes.set_ylim(0.0, min(8.5, max(_losses(rows)[1], default=8.0) * 1.05))
    axes.legend(frameon=False)
    _write(figure, path)


def draw_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw the metrics of several runs into one PNG, by name: each step pale, scores of the held-out text on top."""
    figure, axes = _empty()
    for n, (name, rows) in enumerate(runs.items()):
        steps, bits = _scores(rows)
        last = f"{name}: {bits[-1]:.3f} held out after step {steps[-1]}" if bits else f"{name}: not scored yet"
        axes.plot(*_losses(rows), color=f"C{n % 10}", alpha=0.3, linewidth=0.8)
        axes.plot(steps, bits, "o-", color=f"C{n % 10}", markersize=3, label=last)
    axes.legend(frameon=False)
    _write(figure, path)


def _losses(rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    known = [row for row in rows if row.get("loss") is not None]
    return [row["step"] for row in known], [row["loss"] / math.log(2.0) for row in known]


def _scores(rows: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    known = [row for row in rows if row.get("heldout_bits") is not None]
    return [row["step"] for row in known], [row["heldout_bits"] for row in known]


def _empty() -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="bits per byte")
    return figure, axes


def _write(figure: Figure, path: Place) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
    write_atomically(path, picture.getvalue())
