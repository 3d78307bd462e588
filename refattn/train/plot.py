"""The picture of a run: the loss of each step and the scores on the way, in bits per byte, beside the baselines."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refattn.files import write_atomically


def draw_loss(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], path: Path) -> None:
    """Draw the metrics and the result of a run into a file; ImportError where matplotlib is broken."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    bits = [row["loss"] / math.log(2.0) for row in rows]
    axes.plot(steps, bits, color="0.75", linewidth=0.8, label="training, each step")
    scored = [row for row in rows if row.get("heldout_bits") is not None]
    axes.plot(
        [row["step"] for row in scored], [row["heldout_bits"] for row in scored], "o-", markersize=3, label="held out"
    )
    for name, style in (("bigram", "--"), ("gzip", ":")):
        value = facts[f"{name}_bits"]
        axes.axhline(value, color="black", linestyle=style, linewidth=0.8, label=f"{name} {value:.2f}")
    for n, step in enumerate(row["step"] for row in rows if row.get("growth", {}).get("grown")):
        axes.axvline(step, color="tab:green", linewidth=0.8, label="growth" if n == 0 else None)
    axes.set(
        xlabel="step", ylabel="bits per byte", title=f"held out at the end: {facts['heldout_bits']:.3f} bits per byte"
    )
    axes.set_ylim(0.0, min(8.5, max(bits, default=8.0) * 1.05))
    axes.legend(frameon=False)
    FigureCanvasAgg(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
    write_atomically(path, picture.getvalue())
