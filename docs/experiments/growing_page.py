"""The tables and the figure of growing.md, from the lines of its results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments.growing_training import WAYS
from docs.experiments.page import sure, table
from docs.experiments.runs import Line

Results = dict[str, list[dict[str, Any]]]
"""By way: those of the seeds."""

TASKS = ("condition 10", "condition 1", "condition 30", "text")
GROWING = [way for way in WAYS if way not in ("narrow", "scratch", "auto")]

STYLES = {
    "narrow": ("#999999", "dotted"),
    "scratch": ("#222222", "solid"),
    "random": ("#e6872b", "dashed"),
    "net2wider": ("#d7191c", "dashed"),
    "zero": ("#b08ac9", "dashed"),
    "gradmax": ("#5b4b8a", "dashed"),
    "report": ("#c9a400", "dotted"),
    "frobenius": ("#8fbf6a", "solid"),
    "additive": ("#3a7ca5", "solid"),
    "optimal": ("#2a9d55", "solid"),
    "damped": ("#00d0b0", "solid"),
    "auto": ("#d94fa0", "solid"),
}


def grouped(lines: Iterable[Line], task: str) -> Results:
    """Return the results of a task by way."""
    found: Results = {}
    for line in lines:
        own = line["run"]["task"]
        name = f"condition {own['condition']:g}" if "condition" in own else "text"
        if name == task:
            found.setdefault(line["run"]["way"], []).append(line["result"])
    return found


def mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def scores(results: Results, way: str, reading: str) -> list[float]:
    """Return the scores of the seeds of a way, at equal "steps" or at equal "operations"."""
    return [result[reading]["score"] for result in results[way]]


def ratios(results: Results, way: str, growth: int) -> list[float]:
    """Return the loss right after a growth over that before it, of every seed."""
    found = [result["growths"][growth] for result in results[way]]
    return [growth["after"] / growth["before"] for growth in found]


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Return the tables of the page by the names of their places."""
    return (
        {name: _scores(grouped(lines, name), name) for name in TASKS}
        | {f"{name} growths": _growths(grouped(lines, name)) for name in TASKS}
        | {"auto": _auto(lines)}
    )


def verdict(lines: Iterable[Line]) -> str:
    """Return what the row of the claims says; ValueError where the results do not say so."""
    tasks = {name: grouped(lines, name) for name in TASKS}
    least = {}
    for name in TASKS[:3]:
        least[name] = mean(scores(tasks[name], "optimal", "steps")) / mean(scores(tasks[name], "scratch", "steps"))
    text, apart = tasks["text"], {}
    for way in ("damped", "optimal", "additive"):
        apart[way] = [a - b for a, b in zip(scores(text, way, "steps"), scores(text, "scratch", "steps"), strict=True)]
    damped, means = apart["damped"], {way: float(np.mean(own)) for way, own in apart.items()}
    grew = [look["after"] < look["before"] for result in text["auto"] for look in result["growths"]]
    better = max(least["condition 10"], least["condition 30"]) < 1.0 < least["condition 1"]
    told = sure(better, "measured here: better on tokens of condition 10 and 30, worse on isotropic ones. ")
    told += sure(
        min(damped) < means["damped"] < 0.0 < max(damped),
        f"On text nothing is gained: damped ends {-means['damped']:.2f} bits below "
        f"(seeds from {-min(damped):.2f} below to {max(damped):.2f} above), ",
    )
    told += f"undamped {means['optimal']:.2f} above, additive {means['additive']:.2f} above, "
    return told + sure(not any(grew), "and the automatic schedule never grows")


def _scores(results: Results, task: str) -> str:
    head = ["", "equal steps", "over scratch", "equal operations", "over scratch", "operations at equal steps"]
    if task == "text":
        head = [cell.replace("over", "minus") for cell in head]
    rows = [head]
    for way in (way for way in WAYS if way in results):
        row = [way]
        for reading in ("steps", "operations"):
            own, least = scores(results, way, reading), scores(results, "scratch", reading)
            if task == "text":
                pairs = [a - b for a, b in zip(own, least, strict=True)]
                row += [f"{np.mean(own):.4f}", f"{np.mean(pairs):+.4f} [{min(pairs):+.4f}, {max(pairs):+.4f}]"]
            else:
                row += [f"{mean(own):.2e} [{min(own):.1e}, {max(own):.1e}]", f"{mean(own) / mean(least):.3g}"]
        spent, whole = (
            np.mean([result["steps"]["operations"] for result in results[name]]) for name in (way, "scratch")
        )
        rows.append([*row, f"{spent / whole:.2f}"])
    return table(rows)


def _growths(results: Results) -> str:
    rows = [["", "first growth", "second", "third", "amplitudes", "evaluations"]]
    for way in (way for way in GROWING if way in results):
        found = [growth for result in results[way] for growth in result["growths"]]
        cells = [ratios(results, way, n) for n in range(3)]
        row = [way, *(f"{mean(cell):.3f} [{min(cell):.3f}, {max(cell):.3f}]" for cell in cells)]
        amplitudes = [growth["amplitude"] for growth in found if growth.get("amplitude")]
        row += [f"{min(amplitudes):g} to {max(amplitudes):g}" if amplitudes else ""]
        row += [f"{np.mean([growth['evaluations'] for growth in found]):.1f}" if amplitudes else ""]
        rows.append(row)
    return table(rows)


def _auto(lines: Sequence[Line]) -> str:
    """Return the table of when the automatic schedule grew, seed by seed, to which widths, and what was left."""
    rows = [["", "grew after these steps, to these widths of a head", "first growth", "second", "looked in vain"]]
    for task in TASKS:
        looks = [result["growths"] for result in grouped(lines, task)["auto"]]
        grown = [[look for look in own if look["after"] < look["before"]] for own in looks]
        cells = [", ".join(f"{look['step']} ({_widths(look)})" for look in own) or "never" for own in grown]
        row = [task, "; ".join(cells)]
        for n in range(2):
            kept = [own[n]["after"] / own[n]["before"] for own in grown if len(own) > n]
            row.append(f"{mean(kept):.3f} [{min(kept):.3f}, {max(kept):.3f}]" if kept else "")
        rows.append([*row, str(sum(map(len, looks)) - sum(map(len, grown)))])
    return table(rows)


def _widths(look: dict[str, Any]) -> str:
    return "/".join(map(str, look["widths"]))


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw, for every task, the loss by the operations that were spent."""
    figure = Figure(figsize=(14.0, 8.6), dpi=100, facecolor="white")
    for axes, task in zip(figure.subplots(2, 2).flat, TASKS, strict=True):
        results = grouped(lines, task)
        for way, (colour, style) in STYLES.items():
            if way in results:
                points = np.asarray([result["curve"] for result in _shortest(results[way])])
                spent, losses = np.mean(points[..., 1], axis=0), np.exp(np.mean(np.log(points[..., 2]), axis=0))
                width = 2.2 if way in ("scratch", "optimal") else 1.3
                axes.plot(spent, losses, color=colour, linestyle=style, linewidth=width, label=way)
        budget = max(result["operations"]["operations"] for result in results["scratch"])
        axes.set(xlabel="operations", xlim=(0.0, budget), ylabel="nats per byte" if task == "text" else "squared error")
        axes.set_title("text" if task == "text" else f"teacher task, inputs of {task}")
        if task == "text":
            axes.set_ylim(2.2, 3.2)
        else:
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.axes[0].legend(handles, labels, frameon=False, fontsize=9, loc="lower left", ncols=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _shortest(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results with curves of the same number of points."""
    points = min(len(result["curve"]) for result in results)
    return [result | {"curve": result["curve"][:points]} for result in results]
