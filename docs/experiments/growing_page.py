"""The tables and the figure of growing.md, from the lines of its results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments.growing_training import WAYS
from docs.experiments.page import bullets, sure, table
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
        | {"auto": _auto(lines), "conclusions": bullets(conclusions(lines))}
    )


def conclusions(lines: Sequence[Line]) -> list[str]:
    """Return what came out, with the numbers of the results; ValueError where they do not say so."""
    known = {name: grouped(lines, name) for name in TASKS}
    ten, one, thirty, text = (known[name] for name in TASKS)

    def over(results: Results, way: str, other: str = "scratch", reading: str = "steps") -> float:
        """Return how many times as large the loss of a way is."""
        return mean(scores(results, way, reading)) / mean(scores(results, other, reading))

    def left(results: Results, way: str, growth: int = 0) -> float:
        return mean(ratios(results, way, growth))

    first = [ratios(results, "optimal", 0) for results in (ten, thirty)]
    harmless = ("net2wider", "zero", "gradmax")
    bits = {way: np.asarray(scores(text, way, "steps")) - scores(text, "scratch", "steps") for way in text}
    level = {way: abs(float(np.mean(apart))) for way, apart in bits.items() if way not in ("additive", "optimal")}
    whole = {way: float(np.mean(scores(text, way, "operations"))) for way in text}
    worst = [sum(sorted(bits[way])[-2:]) / sum(bits[way]) for way in ("optimal", "additive")]
    rising = ratios(ten, "report", 0)
    ended = [result["growths"][-1]["widths"][0] for name in TASKS[:3] for result in known[name]["auto"]]
    ends = {name: over(known[name], "auto", "optimal") for name in TASKS[:3]}
    halves = [left(text, way) for way in ("additive", "optimal", "damped")]
    return [
        sure(
            all(0.35 < min(x) and max(x) < 0.65 for x in (first[0], first[1]))
            and all(abs(x - 1.0) < 1e-3 for way in harmless for n in range(3) for x in ratios(ten, way, n))
            and min(left(ten, "random"), left(ten, "report")) > 1.0,
            "**A growth lowers the loss at once by about half** on inputs of condition 10 and 30: the first one leaves "
            f"{min(first[0]):.2f} to {max(first[0]):.2f} of it, and {min(first[1]):.2f} to {max(first[1]):.2f}. "
            "Columns "
            "that change nothing leave all of it; random ones and those of the report raise it. The search needs two "
            "or three losses to find how far to go.",
        ),
        sure(
            left(ten, "optimal") < left(ten, "frobenius") < left(thirty, "frobenius")
            and over(thirty, "frobenius", "optimal") > 3.0,
            "**The more ill-conditioned the inputs, the more the truncation matters.** Truncated in the norm of the "
            f"weights the first growth leaves {left(ten, 'frobenius'):.2f} at condition 10 and "
            f"{left(thirty, 'frobenius'):.3f} at condition 30, where it ends "
            f"{over(thirty, 'frobenius', 'optimal'):.1f} "
            "times above the truncation in the norm of the scores.",
        ),
        sure(
            max(over(ten, "optimal"), over(thirty, "optimal")) < 0.1
            and over(ten, "optimal", reading="operations") < over(ten, "optimal")
            and over(thirty, "optimal", reading="operations") < over(thirty, "optimal")
            and min(over(ten, "random", "optimal"), over(ten, "net2wider", "optimal")) > 100.0
            and over(ten, "zero") < 0.2,
            "**On ill-conditioned inputs growing ends far below scratch**: by a factor of "
            f"{1 / over(ten, 'optimal'):.0f} "
            f"at condition 10 and of {1 / over(thirty, 'optimal'):.0f} at condition 30, after as many steps, and by "
            f"more at equal operations. Random columns and Net2Wider end {over(ten, 'random', 'optimal'):.0f} and "
            f"{over(ten, 'net2wider', 'optimal'):.0f} times above growing at condition 10. A good part of the gain "
            "comes "
            f"with any growth that does no harm: zeros in the keys end {1 / over(ten, 'zero'):.0f} times below "
            "scratch.",
        ),
        sure(
            min(over(one, "optimal"), over(one, "optimal", reading="operations")) > 10.0
            and over(one, "auto") > 1.0
            and over(one, "optimal") == min(over(one, way) for way in GROWING if way in one),
            f"**On isotropic inputs growing loses**, by a factor of {over(one, 'optimal'):.0f} after as many steps and "
            f"of {over(one, 'optimal', reading='operations'):.0f} at equal operations. Scratch learns that task by "
            "itself, and narrow blocks that stand still cost time. The step itself works: it leaves "
            f"{left(one, 'optimal'):.2f}, {left(one, 'optimal', 1):.2f} and {left(one, 'optimal', 2):.2f}. All ways of "
            "growing lose there, and among those with given steps this one loses least.",
        ),
        sure(
            max(level.values()) < 0.03 and whole["narrow"] == min(whole.values()) and min(halves) > 0.99,
            f"**On text there is nothing to gain.** A growth lowers the loss by {100 * (1 - min(halves)):.1f} per "
            "cent, "
            f"and all ways but two end within {max(level.values()):.3f} bits of scratch, as the seeds do. At equal "
            "operations the narrow model is the best, because it makes the most steps: so short a training needs "
            "steps, "
            "not width.",
        ),
        sure(
            min(float(np.mean(bits[way])) for way in ("optimal", "additive")) > 0.2
            and min(worst) > 0.8
            and abs(left(text, "optimal") - left(text, "damped")) < 0.002
            and over(thirty, "damped", "optimal") > 1.2
            and over(ten, "damped", "optimal") < 1.0,
            f"**Without damping growth ruins the training on text**: {np.mean(bits['optimal']):.2f} and "
            f"{np.mean(bits['additive']):.2f} bits are lost on average, nearly all of them with two seeds of four. "
            "After "
            "a layer normalisation the tokens hardly differ in their mean over the width. So columns along this "
            "direction get as long as the search allows, which went to amplitudes of "
            f"{max(g['amplitude'] for r in text['additive'] for g in r['growths']):.0f}. The first growth gains as "
            "much "
            "with damping as without. So damping is the default. It costs a factor of "
            f"{over(thirty, 'damped', 'optimal'):.1f} at condition 30 and nothing below.",
        ),
        sure(
            min(rising) > 0.99 and max(rising) > 1.1 and over(ten, "report") < 1.0,
            "**As the report prints it** the step raises the loss or leaves it as it is, by factors of "
            f"{min(rising):.3f} "
            f"to {max(rising):.1f} at the first growth. Its training still ends below scratch, because its columns are "
            "then trained like any others.",
        ),
        sure(
            all(0.5 < over(ten, way, "optimal") < 2.0 for way in ("additive", "damped")),
            "**Additive, optimal and damped** cannot be told apart at condition 10.",
        ),
        sure(
            sorted(set(ended)) == [7, 8]
            and all(len(r["growths"]) == 2 for name in TASKS[:3] for r in known[name]["auto"])
            and ends["condition 1"] < 0.5 < ends["condition 10"] < 1.5
            and over(thirty, "auto", "damped") > 2.0
            and over(thirty, "auto") < 0.25,
            "**The automatic schedule finds the width of the teacher.** In all trainings of the teacher task it grows "
            f"twice, and in {ended.count(8)} of {len(ended)} it ends at 8, otherwise at 7. At condition 10 it ends "
            "where "
            f"the given steps end, and at condition 1 {1 / ends['condition 1']:.1f} times below them. At condition 30 "
            "it "
            "waits for a plateau that comes late: most second growths are 100 steps before the end, and it ends "
            f"{over(thirty, 'auto', 'damped'):.1f} times above damped and {1 / over(thirty, 'auto'):.0f} times below "
            "scratch.",
        ),
        sure(
            not any(result["growths"] for result in text["auto"]) and whole["auto"] == whole["narrow"],
            "**On text it never grows**: the loss of 100 steps is always more than 1 % below that of the 100 before. "
            "So "
            "it ends as narrow does, the best way at equal operations. In a training four times as long, with one "
            "seed, "
            "it tries from step 1000 on. Up to step 1600 it grows once, by one column in one of two layers, which "
            "lowers "
            "the loss by 0.1 %.",
        ),
    ]


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
