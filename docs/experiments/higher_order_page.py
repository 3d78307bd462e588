"""The tables and the figure of higher_order.md, from the lines of its results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments.page import ranged, table
from docs.experiments.runs import Line

Results = list[dict[str, Any]]
"""Of the seeds of one configuration."""

COLOURS = {1: "#d7191c", 2: "#e6872b", 3: "#3a7ca5", 4: "#5b4b8a", 20: "#2a9d55"}
OTHERS = {"softmax": "solid", "separate": (0, (5, 2)), "elu": (0, (2, 2)), "order 0": (0, (1, 3))}
GREY = "#555555"
SHOWN = 2.0
"""The alpha whose losses are drawn."""

TICKS = (1.5, 2, 3, 5, 10)

SCORES = {"text": ("bits", 3, "bits per byte"), "recall": ("accuracy", 2, "accuracy")}
"""By task: what is shown of the results, with how many digits, and its name."""


def grouped(lines: Iterable[Line], task: str) -> dict[tuple[str, float | None], Results]:
    """Return the results of a task by the name of a row and by alpha, which is None where there is none."""
    found: dict[tuple[str, float | None], Results] = {}
    for line in lines:
        run = line["run"]
        if run["task"]["name"] == task:
            found.setdefault(_named(run["mechanism"], run["options"]), []).append(line["result"])
    return found


def _named(mechanism: str, options: Mapping[str, Any]) -> tuple[str, float | None]:
    if "order" not in options:
        return options.get("kind", mechanism), None
    order, alpha = f"order {options['order']}", options["alpha"]
    if "eps" in options.get("normaliser", ""):
        return f"{order}, alpha = {alpha:g}, {options['normaliser']}", None
    return order, alpha if options["order"] else None


def scores(results: Results, task: str) -> str:
    """Return the scores of some seeds; where numbers stopped being finite, how often."""
    name, digits, _ = SCORES[task]
    values = [result[name] for result in results if result["diverged"] is None]
    lost = len(results) - len(values)
    parts = [ranged(values, digits)] if values else []
    return ", ".join(parts + ([f"not finite: {lost}"] if lost else []))


def spread(results: Results) -> float:
    """Return how far the norm of the gradients goes up and down: the 0.9 quantile over the 0.1 quantile.

    It is taken within each piece of a training but the first, which is the warm-up, and the geometric mean of all is
    returned: so it tells nothing of how the norm changes from the beginning to the end.
    """
    ratios = [math.log(piece[2] / piece[0]) for result in results for piece in result["norms"][1:]]
    return math.exp(sum(ratios) / len(ratios))


def jump(results: Results) -> float:
    """Return the largest norm of a step over the median of its piece, but for the first piece."""
    return max(piece[3] / piece[1] for result in results for piece in result["norms"][1:])


def steady(results: Results) -> str:
    """Return the spread and the largest jump."""
    return f"{spread(results):.2f}, {jump(results):.1f}"


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Return the tables of the page by the names of their places."""
    found = {}
    for task in SCORES:
        groups = grouped(lines, task)
        found[f"{task} scores"] = _tables(groups, {key: scores(results, task) for key, results in groups.items()})
        found[f"{task} gradients"] = _tables(groups, {key: steady(results) for key, results in groups.items()})
    return found


def _tables(groups: Mapping[tuple[str, float | None], Results], cells: Mapping[tuple[str, float | None], str]) -> str:
    """Return a table of orders and alphas, and one of what has no alpha."""
    alphas = sorted({alpha for _, alpha in groups if alpha is not None})
    orders = dict.fromkeys(name for name, alpha in groups if alpha is not None)
    head = ["", *(f"alpha = {alpha:g}" for alpha in alphas)]
    grid = [head, *([name, *(cells.get((name, alpha), "") for alpha in alphas)] for name in orders)]
    rest = [(name, cell) for (name, alpha), cell in cells.items() if alpha is None]
    return "\n\n".join([table(grid), table([[name for name, _ in rest], [cell for _, cell in rest]])])


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw, for both tasks, scores and spreads of the gradients by alpha, and the losses of one alpha."""
    figure = Figure(figsize=(14.0, 8.4), dpi=100, facecolor="white")
    for row, task in zip(figure.subplots(2, 3), SCORES, strict=True):
        name, _, words = SCORES[task]
        groups = grouped(lines, task)
        _by_alpha(row[0], groups, lambda result, name=name: result[name])
        row[0].set(xlabel="alpha", title=f"{task}: {words}, {'less' if task == 'text' else 'more'} is better")
        _by_alpha(row[1], groups, lambda result: spread([result]))
        row[1].set(xlabel="alpha", title=f"{task}: spread of the norm of the gradients", yscale="log")
        row[1].set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        row[1].minorticks_off()
        _losses(row[2], groups)
        row[2].set(xlabel="part of the training", title=f"{task}: loss in nats, alpha = {SHOWN:g}")
        for axes in row:
            axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.axes[2].legend(handles, labels, frameon=False, fontsize=9, loc="upper right", ncols=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _by_alpha(axes: Any, groups: Mapping[tuple[str, float | None], Results], value: Any) -> None:
    """Draw the mean of the seeds by alpha with their range; what has no alpha is a line across."""
    alphas = sorted({alpha for _, alpha in groups if alpha is not None})
    for order, colour in COLOURS.items():
        name = f"order {order}"
        found = [_values(groups.get((name, alpha), []), value) for alpha in alphas]
        kept = [(alpha, each) for alpha, each in zip(alphas, found, strict=True) if each]
        places = [alpha for alpha, _ in kept]
        axes.plot(places, [np.mean(x) for _, x in kept], color=colour, marker="o", markersize=4, label=name)
        axes.fill_between(places, [min(x) for _, x in kept], [max(x) for _, x in kept], color=colour, alpha=0.15, lw=0)
    for name, style in OTHERS.items():
        if whole := _values(groups.get((name, None), []), value):
            axes.axhline(np.mean(whole), color=GREY, linestyle=style, linewidth=1.4, label=name, zorder=0)
    axes.set_xticks(alphas)


def _values(results: Results, value: Any) -> list[float]:
    return [value(result) for result in results if result["diverged"] is None]


def _losses(axes: Any, groups: Mapping[tuple[str, float | None], Results]) -> None:
    """Draw the mean loss of each piece."""
    for (name, alpha), results in groups.items():
        curves = [result["losses"] for result in results if result["diverged"] is None]
        if curves and (alpha == SHOWN or name in OTHERS):
            style = {"color": GREY, "linestyle": OTHERS[name], "linewidth": 1.4} if name in OTHERS else {}
            style = style or {"color": COLOURS[int(name.split()[1])]}
            parts = (np.arange(len(curves[0])) + 0.5) / len(curves[0])
            axes.plot(parts, np.mean(curves, axis=0), **style)
