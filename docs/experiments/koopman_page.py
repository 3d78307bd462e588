"""The tables and the figure of koopman.md, from the lines of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments.page import ranged, table
from docs.experiments.runs import Line
from docs.experiments.tasks import Task
from docs.experiments.training import Plan, fresh
from refattn import tree

COLOURS = ("#555555", "#999999", "#e6872b", "#d7191c", "#3a7ca5", "#5b4b8a", "#2a9d55")

SCORES = {
    "text": ("bits", 3, "bits per byte, less is better"),
    "recall": ("accuracy", 2, "accuracy, more is better"),
    "one layer": ("accuracy", 2, "accuracy, more is better"),
}
"""By task: what is shown of the results, with how many digits, and its name."""

Tasks = Mapping[str, tuple[Task, Plan, int]]
Models = Mapping[str, tuple[str, dict[str, Any], bool]]
"""As `koopman.TASKS` and `koopman.MODELS`."""

Results = list[dict[str, Any]]
"""Of the seeds of one model on one task."""


def grouped(lines: Sequence[Line], tasks: Tasks, models: Models) -> dict[tuple[str, str], Results]:
    """Return the results by task and model; the lines are those of `koopman.grid`, seed by seed."""
    names = [(task, name) for task in tasks for name in models]
    return {key: [line["result"] for line in lines[n :: len(names)]] for n, key in enumerate(names)}


def tables(lines: Sequence[Line], tasks: Tasks, models: Models) -> dict[str, str]:
    """Return the tables of the page by the names of their places."""
    groups = grouped(lines, tasks, models)
    scores = [["", *(f"{task}: {SCORES[task][0]}" for task in tasks)]]
    costs = [["", *(f"{task}: numbers, seconds" for task in tasks)]]
    for name, (mechanism, options, mlp) in models.items():
        row, cost = [name], [name]
        for task, (what, plan, narrow) in tasks.items():
            results = groups[task, name]
            kind, digits, _ = SCORES[task]
            values = [result[kind] for result in results if result["diverged"] is None]
            lost = len(results) - len(values)
            cells = [ranged(values, digits)] if values else []
            row.append(", ".join(cells + ([f"stopped: {lost}"] if lost else [])))
            plan = replace(plan, mlp=True, width=narrow) if mlp else plan
            count = sum(x.size for x in tree.flatten(fresh(mechanism, options, what, plan, 0)).values())
            cost.append(f"{count}, {np.mean([result['seconds'] for result in results]):.0f}")
        scores.append(row)
        costs.append(cost)
    return {"scores": table(scores), "costs": table(costs)}


def draw(lines: Sequence[Line], tasks: Tasks, models: Models, path: Path) -> None:
    """Draw, for each task, the score of every seed, and the mean loss on the way."""
    groups = grouped(lines, tasks, models)
    figure = Figure(figsize=(14.0, 8.0), dpi=100, facecolor="white")
    top, bottom = figure.subplots(2, len(tasks))
    for upper, lower, task in zip(top, bottom, tasks, strict=True):
        kind, _, words = SCORES[task]
        for n, (name, colour) in enumerate(zip(models, COLOURS, strict=True)):
            results = [result for result in groups[task, name] if result["diverged"] is None]
            upper.plot([result[kind] for result in results], [n] * len(results), "o", color=colour)
            for result in results:
                parts = (np.arange(len(result["losses"])) + 0.5) / len(result["losses"])
                label = name if result is results[0] else None
                lower.plot(parts, result["losses"], color=colour, linewidth=1.3, label=label)
        upper.set(xlabel=words, title=task, yticks=range(len(models)), ylim=(len(models) - 0.5, -0.5))
        upper.set_yticklabels(list(models) if task == "text" else [])
        upper.grid(axis="y", color="#eeeeee")
        lower.set(xlabel="part of the training", ylabel="loss in nats" if task == "text" else "")
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
    bottom[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
