"""The tables and the figure of delta.md, from the lines of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments.page import ranged, sure, table
from docs.experiments.runs import Line
from docs.experiments.tasks import Task
from docs.experiments.training import Plan, fresh
from refattn import tree

COLOURS = ("#555555", "#9b9b9b", "#6aa84f", "#2a9d55", "#3a7ca5", "#5b4b8a", "#d7191c", "#e6872b", "#111111")

SCORES = {
    "overwriting": ("accuracy", 3, "accuracy, more is better"),
    "parity": ("accuracy", 2, "accuracy, more is better"),
    "text": ("bits", 3, "bits per byte, less is better"),
}
"""By task: what is shown of the results, with how many digits, and its name."""

Tasks = Mapping[str, tuple[Task, Plan]]
Models = Mapping[str, tuple[str, dict[str, Any]]]
"""As `delta.TASKS` and `delta.MODELS`."""

Results = list[dict[str, Any]]
"""Of the seeds of one model on one task; in `grouped` followed by those of the longer trainings."""


def grouped(lines: Sequence[Line], tasks: Tasks, models: Models) -> dict[tuple[str, str], Results]:
    """Return the results by task and model; the lines are those of `delta.whole`, seed by seed."""
    names = [(task, name) for task in tasks for name in models]
    return {key: [line["result"] for line in lines[n :: len(names)]] for n, key in enumerate(names)}


def tables(lines: Sequence[Line], tasks: Tasks, models: Models, seeds: int) -> dict[str, str]:
    """Return the tables of the page by the names of their places; the first so many results are the shorter ones."""
    groups = grouped(lines, tasks, models)
    heads = ["", *(f"{task}: {SCORES[task][0]}" for task in tasks)]
    scores, longer, costs = [heads], [heads], [["", *(f"{task}: numbers, seconds" for task in tasks)]]
    for name, (mechanism, options) in models.items():
        rows: list[list[str]] = [[name], [name], [name]]
        for task, (what, plan) in tasks.items():
            results = groups[task, name]
            rows[0].append(_told(results[:seeds], *SCORES[task][:2]))
            rows[1].append(_told(results[seeds:], *SCORES[task][:2]))
            count = sum(x.size for x in tree.flatten(fresh(mechanism, options, what, plan, 0)).values())
            rows[2].append(f"{count}, {np.mean([result['seconds'] for result in results[:seeds]]):.0f}")
        for whole, row in zip((scores, longer, costs), rows, strict=True):
            whole.append(row)
    return {"scores": table(scores), "longer": table(longer), "costs": table(costs)}


def verdict(groups: Mapping[tuple[str, str], Results], seeds: int) -> str:
    """Return what the row of the claims says of overwriting; ValueError where the results do not say so."""
    found = {name: [result["accuracy"] for result in groups["overwriting", name]] for name in ("delta", "linear")}
    delta, linear = (found[name][:seeds] for name in ("delta", "linear"))
    late = {name: float(np.mean(values[seeds:])) for name, values in found.items()}
    return sure(
        min(delta) > max(linear) and late["delta"] >= 0.999 > late["linear"],
        f"sooner, {np.mean(delta):.2f} against {np.mean(linear):.2f} in the short training, and to the end, "
        f"{late['delta']:.3f} against {late['linear']:.3f} in the long one",
    )


def _told(results: Results, kind: str, digits: int) -> str:
    values = [result[kind] for result in results if result["diverged"] is None]
    stopped = len(results) - len(values)
    mean = ranged(values, digits) if len(values) > 1 else "".join(f"{x:.{digits}f}" for x in values)
    return ", ".join([mean] * bool(values) + [f"stopped: {stopped}"] * bool(stopped))


def draw(lines: Sequence[Line], tasks: Tasks, models: Models, seeds: int, path: Path) -> None:
    """Draw, for each task, the scores of all trainings, and the losses of the longer ones."""
    groups = grouped(lines, tasks, models)
    figure = Figure(figsize=(14.0, 8.0), dpi=100, facecolor="white")
    top, bottom = figure.subplots(2, len(tasks))
    for upper, lower, task in zip(top, bottom, tasks, strict=True):
        kind, _, words = SCORES[task]
        for n, (name, colour) in enumerate(zip(models, COLOURS, strict=True)):
            for number, result in enumerate(groups[task, name]):
                long = number >= seeds
                if result["diverged"] is None:
                    upper.plot(
                        [result[kind]], [n], "D" if long else "o", color=colour, fillstyle="none" if long else None
                    )
                if long:
                    parts = (np.arange(len(result["losses"])) + 0.5) / len(result["losses"])
                    lower.plot(parts, result["losses"], color=colour, label=name if number == seeds else None)
        upper.set(xlabel=words, title=task, yticks=range(len(models)), ylim=(len(models) - 0.5, -0.5))
        upper.set_yticklabels(list(models) if task == next(iter(tasks)) else [])
        upper.grid(axis="y", color="#eeeeee")
        lower.set(xlabel="part of the longer training", ylabel="loss in nats" if task == next(iter(tasks)) else "")
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
    bottom[-1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
