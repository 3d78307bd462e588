"""The tables and the figure of higher_order.md, from the lines of its results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments.page import bullets, ranged, sure, table
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
    return found | {"conclusions": bullets(conclusions(lines))}


def conclusions(lines: Sequence[Line]) -> list[str]:
    """Return what came out, with the numbers of the results; ValueError where they do not say so."""
    groups = {task: grouped(lines, task) for task in SCORES}
    every = {
        (task, *key): [result[SCORES[task][0]] for result in results]
        for task, own in groups.items()
        for key, results in own.items()
    }
    means = {key: float(np.mean(values)) for key, values in every.items()}

    def at(order: int | str, alpha: float | None, task: str = "text") -> float:
        return means[task, f"order {order}" if isinstance(order, int) else order, alpha]

    alphas = (1.0, 2.0, 3.0, 4.0, 5.0)
    three = (1.0, 3.0, 5.0)
    behind = max(at(2, a) - at(20, a) for a in alphas)
    recalled = max(at(20, a, "recall") - at(2, a, "recall") for a in alphas)
    four = max(abs(at(4, a) - at(20, a)) for a in alphas)
    softmax, guess = at("softmax", None), at("elu", None, "recall")
    jumps = {key: jump(results) for key, results in groups["text"].items()}
    lost = [a for a in alphas if min(every["recall", "order 20", a]) < 0.3]
    freed = "order 1, alpha = 1, clamp(eps=32.0)"
    return [
        sure(
            all(at(n, a) < at(n, b) for n in (2, 4) for a, b in zip(alphas, alphas[1:], strict=False))
            and all(at(20, a) < at(20, b) for a, b in zip(alphas, alphas[1:], strict=False))
            and at(2, 1.0, "recall") > at(2, 3.0, "recall") > at(2, 5.0, "recall"),
            "**A small alpha is better, as long as no weight is below 0.** With every even order the bits per byte "
            "rise "
            f"with alpha. For order 2 they rise from {at(2, 1.0):.2f} over {at(2, 3.0):.2f} at the default of 3 to "
            f"{at(2, 5.0):.2f}, and its recall falls from "
            f"{at(2, three[0], 'recall'):.2f} over {at(2, three[1], 'recall'):.2f} to {at(2, three[2], 'recall'):.2f}. "
            "The exponential itself, order 20, loses as much, so the polynomial is not the cause. At alpha = 5 scores "
            "of "
            "at most 1.1 weigh the best key at most 10 times as much as the worst, and most keys nearly alike.",
        ),
        sure(
            behind < 0.06 and recalled < 0.09 and four < 0.02,
            f"**The polynomial costs little.** At the same alpha order 2 is at most {behind:.2f} bits and "
            f"{recalled:.2f} of accuracy behind order 20, and order 4 cannot be told from it, except for the seed of "
            "the "
            "last point.",
        ),
        sure(
            softmax == min(x for (task, *_), x in means.items() if task == "text")
            and max(every["text", "softmax", None]) > min(every["text", "order 4", 1.0])
            and at("softmax", None, "recall") > 0.99,
            f"**Softmax is the best on text**: {at(4, 1.0) - softmax:.2f} bits ahead of order 4 at alpha = 1, where "
            "the "
            f"ranges touch, {at(2, 1.0) - softmax:.2f} ahead of order 2 there, and {at(2, 3.0) - softmax:.2f} ahead of "
            "order 2 at the default.",
        ),
        sure(
            abs(at("elu", None) - at(2, 5.0)) < 0.02
            and at(2, 1.0) < at("elu", None)
            and abs(at("separate", None) - at(2, 1.0)) < 0.03 > abs(at("separate", None) - at(4, 1.0))
            and max(guess, at("separate", None, "recall")) < 0.3
            and min(at(n, a, "recall") for n in (2, 4) for a in alphas) > 0.7,
            "**Of the older linear attentions** elu is as good on text as any order at alpha = 5, and "
            f"{at('elu', None) - at(2, 1.0):.2f} bits behind order 2 at alpha = 1. Separate is level with orders 2 "
            "and 4 "
            f"at alpha = 1, and {at(2, 3.0) - at('separate', None):.2f} ahead of order 2 at the default. Neither "
            "recalls "
            "after this training: both name the most frequent value, while even orders find the keys.",
        ),
        sure(
            at(freed, None, "recall") > 0.95 and at(2, 1.0) < at(freed, None) < at(1, 1.0) - 0.5,
            "**Odd orders fail because of their normalisation**, see above: without it order 1 learns both tasks, "
            "behind "
            "order 2.",
        ),
        sure(
            min(jumps["order 1", a] for a in alphas[:3]) > 100.0 > 10.0 > jumps["order 1", 4.0]
            and min(jumps["order 3", a] for a in alphas[:2]) > 50.0
            and at(1, 4.0) > at(2, 4.0)
            and at(3, 1.0, "recall") < 0.5
            and max(at(1, a, "recall") for a in alphas[3:]) < 0.35
            and all(max(every["recall", "order 1", a]) > 0.8 for a in alphas[:3])
            and abs(at(3, 3.0) - at(2, 3.0)) < 0.05,
            "**Divided by their sums, odd orders need a large alpha.** On text order 1 fails up to alpha = 3 and is "
            "behind "
            "at 4, and order 3 fails up to 2: there the norm of the gradients jumps. Fresh models have small sums "
            "only up "
            "to alpha = 2 and 1, so the others develop them during training. On recall order 3 fails at alpha = 1, and "
            "order 1 finds the keys with some seeds up to alpha = 3 and with none beyond. If order 3 is steady it is "
            "as "
            "good as orders 2 and 4.",
        ),
        sure(
            max(jumps[f"order {n}", a] for n in (2, 4) for a in alphas) < 1.2 * jumps["softmax", None],
            "**Gradients of even orders are as steady as those of softmax** on text, for every alpha. On recall the "
            "first "
            "number is large if the task is fully learnt: then the norm falls by orders of magnitude within a tenth of "
            "the training.",
        ),
        sure(
            lost == [1.0] and min(x for n in (2, 4) for x in every["recall", f"order {n}", 1.0]) > 0.99,
            "**Alpha = 1 is not safe with sharp weights.** One seed of order 20 still names the most frequent value "
            "at the "
            "end of the training; no seed of orders 2 and 4 does. Three seeds say no more about it.",
        ),
    ]


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
