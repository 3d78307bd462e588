"""The tables and the figure of delta.md, from the lines of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments.page import bullets, ranged, sure, table
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
    said = bullets(conclusions(groups, seeds))
    return {"scores": table(scores), "longer": table(longer), "costs": table(costs), "conclusions": said}


def conclusions(groups: Mapping[tuple[str, str], Results], seeds: int) -> list[str]:
    """Return what came out, with the numbers of the results; ValueError where they do not say so."""

    def of(task: str, part: slice) -> dict[str, list[float]]:
        return {name: [each[SCORES[task][0]] for each in own[part]] for (at, name), own in groups.items() if at == task}

    def mean(part: Mapping[str, Sequence[float]]) -> dict[str, float]:
        return {name: float(np.mean(values)) for name, values in part.items()}

    early, late = slice(0, seeds), slice(seeds, None)
    short, long = of("overwriting", early), mean(of("overwriting", late))
    parity, parity_long = of("parity", early), mean(of("parity", late))
    text, bits = of("text", early), mean(of("text", late))
    first, other = mean(short), ("linear", "gated", "gated by channel")
    rules = [name for name in long if name != "softmax"]
    teaching = [name for name in rules if name not in other]
    gain = {name: bits["linear"] - bits[name] for name in rules}
    solved = sum(x > 0.99 for x in parity["delta, beta to 2"])
    fading = [name for name in rules if name not in ("linear", "delta", "delta, beta to 2", "momentum delta")]
    overwrites = [first[name] for name in other]
    momentum = bits["momentum delta"] - bits["gated delta"]
    lost = {name: own[-1]["losses"][-1] for (task, name), own in groups.items() if task == "parity"}
    channel = [bits["gated"] - bits["gated by channel"], bits["gated delta"] - bits["KDA"]]
    short_gain = float(np.mean(text["linear"])) - float(np.mean(text["delta"]))
    return [
        sure(
            min(min(short[name]) for name in ("delta", "gated delta")) > max(max(short[name]) for name in other)
            and min(long[name] for name in teaching) >= 0.999,
            "**The delta rule learns to overwrite sooner and more fully.** In the short training delta and gated delta "
            f"are ahead of linear and both gated rules with every seed, {first['delta']:.2f} and "
            f"{first['gated delta']:.2f} against {min(overwrites):.2f} to {max(overwrites):.2f}. In the long training "
            "every rule that predicts has at least 999 of 1,000 values right.",
        ),
        sure(
            0.98 < long["linear"] < long["gated"] < long["gated by channel"] < 0.999,
            "**A memory that only adds nearly learns it, too.** Linear attention, which holds the sum of all three "
            f"values of a key, gets {long['linear']:.3f} in the long training, and fading memories get "
            f"{long['gated']:.3f} and {long['gated by channel']:.3f}. In a task of this size the delta rule gains "
            "speed of learning and the last hundredth; the task is not impossible without it.",
        ),
        sure(
            1 <= solved < seeds
            and parity_long["delta, beta to 2"] > 0.99
            and min(parity["delta, beta to 2"]) < 0.51
            and max(parity_long[name] for name in parity_long if name != "delta, beta to 2") < 0.52
            and max(x for name in parity if name != "delta, beta to 2" for x in parity[name]) < 0.52
            and max(lost["gated delta"], lost["KDA"]) < min(lost[name] for name in ("delta", "linear", "gated")),
            f"**Parity needs a beta up to 2.** With it {solved} of {seeds} seeds solve the task in the short training, "
            "and so does the long one; the others stay at 0.5. Without it no rule leaves 0.5, even in the long "
            "training: a memory that fades, or is overwritten, cannot flip a sign. The training losses of gated delta "
            f"and KDA fall lower there, to {lost['gated delta']:.2f} and {lost['KDA']:.2f} nats, but only by the first "
            "bits of a sequence. Momentum, whose step may overshoot as well, did not find a solution.",
        ),
        sure(
            all(a < b for name in fading for a, b in zip(text[name], text["linear"], strict=True))
            and gain["gated delta"] > gain["gated"] > gain["delta"] > 0.0
            and bits["KDA"] > bits["gated by channel"],
            f"**On text, fading helps.** The rules with a gate and no momentum, {', '.join(fading)}, are ahead of "
            f"linear attention with every seed. In the long training gated by head gains {gain['gated']:.2f} bits "
            "over it, "
            f"delta {gain['delta']:.2f}, both together {gain['gated delta']:.2f}. So on top of a gate the delta rule "
            f"is worth {gain['gated delta'] - gain['gated']:.2f}, and by channel nothing ({bits['KDA']:.3f} against "
            f"{bits['gated by channel']:.3f}).",
        ),
        sure(
            min(channel) > 0.0 and first["KDA"] < first["gated delta"],
            "**Gates by channel are ahead of gates by head only in the long training**, by "
            f"{channel[0]:.2f} bits without the delta rule and by {channel[1]:.2f} with it. They have an eighth more "
            "parameters there. In the short training the order depends on the seed, and KDA learns to overwrite later "
            "than gated delta.",
        ),
        sure(
            momentum > 0.0
            and long["momentum delta"] >= 0.999
            and max(np.ptp(values) for values in short.values()) == np.ptp(short["momentum delta"]),
            "**Momentum gained nothing.** It has all that gated delta has, and is "
            f"{momentum:.2f} bits behind it on text in the long training. It overwrites as well in the end, and its "
            f"seeds differ most: {min(short['momentum delta']):.2f} to {max(short['momentum delta']):.2f} in the short "
            "training.",
        ),
        sure(
            short_gain < 0.1 < gain["delta"],
            "**Confirmed by the long training**: only rules that predict overwrite fully, parity needs a beta up to 2, "
            "a gate helps on text, and momentum does not. Not confirmed: that delta is hardly better than linear "
            f"attention on text ({short_gain:.2f} bits in the short training, {gain['delta']:.2f} in the long one).",
        ),
        sure(
            all(each["diverged"] is None for own in groups.values() for each in own),
            "All numbers stayed finite in all trainings.",
        ),
    ]


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
