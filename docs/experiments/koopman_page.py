"""The tables and the figure of koopman.md, from the lines of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments.page import bullets, ranged, sure, table
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
    return {"scores": table(scores), "costs": table(costs), "conclusions": bullets(conclusions(groups))}


def verdict(groups: Mapping[tuple[str, str], Results]) -> str:
    """Return what the row of the claims says."""
    bits = {name: np.mean(_values(groups, "text", name)) for _, name in groups}
    worse = bits["Koopman"] > bits["attention"] and bits["Koopman + MLP"] > bits["attention + MLP"]
    said = "measured here, the article has no experiment: it does not help"
    return sure(worse, f"{said}, with fixed numbers, psi near the identity and the separable fit")


def conclusions(groups: Mapping[tuple[str, str], Results]) -> list[str]:
    """Return what came out, with the numbers of the results; ValueError where they do not say so."""
    text = {name: _values(groups, "text", name) for _, name in groups}
    bits = {name: float(np.mean(values)) for name, values in text.items()}
    done = {
        task: {name: sum(x > 0.9 for x in _values(groups, task, name)) for name in bits} for task in groups_of(groups)
    }
    recall, one, seeds = done["recall"], done["one layer"], len(text["Koopman"])
    return [
        sure(
            min(bits, key=bits.__getitem__) == "attention" and recall["attention"] == seeds and recall["Koopman"] == 1,
            f"**The update does not help.** On text attention alone is the best model, "
            f"{bits['attention']:.3f} bits per byte against {bits['Koopman']:.3f} with the update. With two layers "
            f"attention alone recalls with all {seeds} seeds, and the model with the update with {recall['Koopman']}.",
        ),
        sure(
            bits["Koopman"] < bits["attention + MLP"] < bits["Koopman + MLP"] and recall["attention + MLP"] == 0,
            f"**It is better than an MLP at equal parameters**, on the text by "
            f"{bits['attention + MLP'] - bits['Koopman']:.3f} bits, and on recall, where the model with "
            "MLPs never gets past naming the most frequent value. But so is attention alone, by more: at this size the "
            "width that the MLP costs is worth more than the MLP. Beside the MLP the update makes the text worse, "
            f"{bits['Koopman + MLP']:.3f} against {bits['attention + MLP']:.3f}.",
        ),
        sure(
            max(text["Koopman"]) < min(text["attention twice"]) and one["attention twice"] == seeds > one["Koopman"],
            "**The operator helps on the text, and not on recall.** Against attention that attends twice, which has "
            f"everything but the operator, the update wins {bits['attention twice'] - bits['Koopman']:.3f} bits, with "
            f"ranges apart. With one layer a query that attends twice finds the value with all {seeds} seeds; with the "
            f"operator in between {one['Koopman']} do. Attention that attends once cannot do it at all.",
        ),
        sure(
            max(bits, key=bits.__getitem__) == "Koopman, ridge to 0" and recall["Koopman, ridge to 0"] == 0,
            "**An operator of two updates forgets most of a query.** It is fitted to one transition, and so has rank "
            "1: what it has not seen goes to 0, whatever the ridge. With random numbers of width 16 the last query "
            "is 0.09 times as long as what it attends at a ridge of 0.001, and 0.08 times at 1. As the sources have "
            f"it, it is the worst model on the text, {bits['Koopman, ridge to 0']:.3f} bits, and recalls with no seed. "
            "Where the ridge draws to the identity, unseen directions stay as they are, and the same update is "
            f"{bits['Koopman, ridge to 0'] - bits['Koopman']:.2f} bits better.",
        ),
        sure(
            abs(bits["Koopman, 3 updates"] - bits["Koopman"]) < 0.01 and not recall["Koopman, 3 updates"],
            f"**A third update gives nothing**: {bits['Koopman, 3 updates']:.3f} bits on the text, and no recall "
            "within this training, with two layers or with one.",
        ),
        sure(
            all(result["diverged"] is None for results in groups.values() for result in results),
            "No perturbation failed to be inverted, and no number stopped being finite, in any of the trainings.",
        ),
    ]


def groups_of(groups: Mapping[tuple[str, str], Results]) -> list[str]:
    """Return the tasks."""
    return list(dict.fromkeys(task for task, _ in groups))


def _values(groups: Mapping[tuple[str, str], Results], task: str, name: str) -> list[float]:
    return [result[SCORES[task][0]] for result in groups[task, name]]


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
