"""What the pictures of all studies have in common."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from refattn.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "<style>svg { color: #1d1f21 } text { fill: currentColor } "
INK += "@media (prefers-color-scheme: dark) { svg { color: #dfe2e6 } }</style>"
"""Text and axes of an SVG are dark on a light page and light on a dark one."""

GROWS, SHRINKS, FRESH = "#d9730d", "#3b7dd8", "#8a9099"
"""Colours that are seen on a light and on a dark page."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, or as SVG that fits a light and a dark page, by the name of the file.

    The same picture gives the same bytes, and the file is there whole or not at all.
    """
    picture = io.BytesIO()
    if path.suffix != ".svg":
        figure.savefig(picture, format="png", dpi=120, metadata={"Software": None})
        write_atomically(path, picture.getvalue())
        return
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "refattn"}):
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    head, inside = picture.getvalue().decode().replace("#000000", "currentColor").split("<defs>", 1)
    # A hundredth of a point is not seen, and half of the file.
    inside = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), inside)
    lines = f"{head}{INK}\n <defs>{inside}".splitlines()
    write_atomically(path, "".join(f"{line.rstrip()}\n" for line in lines).encode())
