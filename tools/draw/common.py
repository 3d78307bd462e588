"""What the figures share: colours, two panels side by side, and frames that are half open."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

BLUE, ORANGE, RED, VIOLET, GREEN, GREY = "#3a7ca5", "#e6872b", "#d7191c", "#5b4b8a", "#2a9d55", "#777777"
TEXT = "#222222"


def panels() -> tuple[Figure, Any]:
    """Return a figure with two panels."""
    figure = Figure(figsize=(12.0, 4.8), dpi=100, facecolor="white")
    return figure, figure.subplots(1, 2)


def finished(figure: Figure) -> Figure:
    """Return a figure without upper and right lines, laid out."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_color(TEXT)
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    return figure
