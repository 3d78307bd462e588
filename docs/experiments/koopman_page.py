"""The tables and the figure of koopman.md, from the lines of its results."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments.koopman import ONCE, RIDGES, SMALLER, TIMES, TRANSITIONS, UPDATES
from docs.experiments.koopman_paths import Path as Measured
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


def verdict(groups: Mapping[tuple[str, str], Results], updates: Groups) -> str:
    """Return what the row of the claims says."""
    bits = {name: np.mean(_values(groups, "text", name)) for _, name in groups}
    worse = bits["Koopman"] > bits["attention"] and bits["Koopman + MLP"] > bits["attention + MLP"]
    printed = {
        name: [[result["bits"] for result in updates["text", name, times]] for times in TIMES]
        for name in ("attention", "Tie")
    }
    behind = all(max(own) < min(tie) for own, tie in zip(printed["attention"], printed["Tie"], strict=True))
    said = "measured here, the article has no experiment: it does not help"
    return sure(worse and behind, f"{said}, neither with the settings of this library nor with those of the article")


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
            f"**A ridge to 0, as in the sources, is the worst**: {bits['Koopman, ridge to 0']:.3f} bits on the text, "
            "and no seed recalls. Such an operator [forgets most of a query](#what-an-update-leaves-of-a-query). With "
            "a ridge to the identity what it has not seen stays as it is, and the same update is "
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


Measures = Mapping[Measured, Mapping[str, float]]
"""What was measured of each of `koopman.PATHS`."""


def path_tables(found: Measures, trained: Sequence[Line]) -> dict[str, str]:
    """Return the tables of what an update leaves of a query, and what follows, for `koopman.trained_paths`."""
    rows = [["transitions"]]
    for words in ("its own path", "of attention"):
        rows[0] += [f"{words}: seen", *(f"length, ridge {ridge:g}" for ridge in RIDGES)]
    for n in TRANSITIONS:
        rows.append([str(n)])
        for path in ("own", "attention"):
            own = [found[Measured(n, ridge, path=path)] for ridge in RIDGES]
            rows[-1] += [f"{own[1]['seen']:.2f}", *(f"{each['length']:.3f}" for each in own)]
    other = [["", *(f"{words}: {kind}" for words in ("one transition", "three") for kind in ("seen", "length"))]]
    for words, options in {"as above": {}, **OTHER_WORDS}.items():
        each = [found[Measured(n, **options)] for n in (1, 3)]
        other.append([words, *(f"{x[kind]:.{digits}f}" for x in each for kind, digits in (("seen", 2), ("length", 3)))])
    return {"paths": table(rows), "others": table(other), "forgets": bullets(forgets(found, trained))}


OTHER_WORDS: dict[str, dict[str, Any]] = {
    "the fit of the sources, stein": {"fit": "stein"},
    "kernel x . y alone": {"kernel": "linear"},
    "kernel x . y with Matern 5/2": {"kernel": "matern52"},
    "8 keys": {"keys": 8},
    "128 keys": {"keys": 128},
    "width 4": {"width": 4},
    "width 64": {"width": 64},
    "a ridge to the identity": {"tau": 1},
}
"""The rows of the second table: one thing at a time is another."""


def forgets(found: Measures, trained: Sequence[Line]) -> list[str]:
    """Return why queries become short, with the numbers of the results; ValueError where they do not say so."""
    own, again = (
        {n: [found[Measured(n, ridge, path=path)] for ridge in RIDGES] for n in TRANSITIONS}
        for path in ("own", "attention")
    )
    length = {n: [each["length"] for each in own[n]] for n in TRANSITIONS}
    kept = {n: [each["length"] for each in again[n]] for n in TRANSITIONS}
    seen = {n: own[n][1]["seen"] for n in TRANSITIONS}
    widths = [found[Measured(1, width=width)]["seen"] for width in (4, 16, 64)]
    later = [each for n in TRANSITIONS[1:] for each in length[n]]
    layers = {tau: _layers(trained, tau) for tau in (0.0, 1.0)}
    shown = {tau: {kind: _between([x[kind] for x in layers[tau]]) for kind in ("seen", "length")} for tau in layers}
    return [
        sure(
            max(length[1]) < 1.1 * min(length[1]) and max(length[1]) < seen[1] < 0.2 and widths == sorted(widths)[::-1],
            "**With one transition it is the rank, not the ridge.** The operator has rank 1, and has seen "
            f"{seen[1]:.2f} of q'. The rest goes to 0: {length[1][0]:.3f} of its length is left at a ridge of "
            f"{RIDGES[0]:g}, and {length[1][-1]:.3f} at {RIDGES[-1]:g}. The one start that it knows is the query "
            "itself, and a mean of values is little like it, the less the wider: "
            f"{widths[0]:.2f} are seen at width 4, {widths[2]:.2f} at 64.",
        ),
        sure(
            min(seen[n] for n in TRANSITIONS[1:]) > 0.85 and max(later) < 0.2,
            f"**With more transitions it is what the operator was shown.** With two it has seen {seen[2]:.2f} of q', "
            f"with eight {seen[8]:.2f}. Yet {min(later):.2f} to {max(later):.2f} of the length is left, whatever the "
            "ridge. The second update has moved the query almost to 0, and every later operator is fitted to this "
            "move, and repeats it.",
        ),
        sure(
            all(kept[n][1] > 0.7 for n in TRANSITIONS[1:])
            and kept[3][1] > 0.9
            and all(kept[n][0] > kept[n][1] > 1.05 * kept[n][2] for n in TRANSITIONS[1:]),
            "**Fitted to what attention does, the same operator keeps a query**: with two, three and eight transitions "
            f"{kept[2][1]:.2f}, {kept[3][1]:.2f} and {kept[8][1]:.2f} of its length at a ridge of {RIDGES[1]:g}. Here "
            f"the ridge counts: at {RIDGES[2]:g} it is {kept[2][2]:.2f}, {kept[3][2]:.2f} and {kept[8][2]:.2f}.",
        ),
        sure(
            max(x["length"] for x in layers[0.0]) < 0.5 < 0.8 < min(x["length"] for x in layers[1.0]),
            "Training does not mend it. In the layers of the models above that learnt the text, of three seeds, the "
            f"operator has seen {shown[0.0]['seen']} of q', and leaves {shown[0.0]['length']} of its length. With a "
            f"ridge to the identity {shown[1.0]['length']} is left.",
        ),
    ]


def _layers(trained: Sequence[Line], tau: float) -> list[Mapping[str, float]]:
    """Return what was measured of all layers whose ridge draws to tau times the identity."""
    fit = "separable(tau=1.0)" if tau else "separable"
    lines = [line for line in trained if line["run"]["path of"]["options"].get("fit", "separable") == fit]
    return [layer for line in lines for layer in line["result"]["layers"]]


def _between(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


Groups = Mapping[tuple[str, str, int], Results]
"""Of the seeds by task, model and how often the steps: of `koopman.updates_grid`."""


def by_update(lines: Sequence[Line]) -> Groups:
    """Return the results of lines of `koopman.updates_grid`."""
    groups: dict[tuple[str, str, int], Results] = {}
    for line in lines:
        run = line["run"]
        (task,) = (name for name, (what, _) in SMALLER.items() if type(what).__name__.lower() == run["task"]["name"])
        (model,) = (name for name, own in UPDATES.items() if own == (run["mechanism"], run["options"]))
        times = run["plan"]["steps"] // SMALLER[task][1].steps
        groups.setdefault((task, model, times), []).append(line["result"])
    return groups


def update_tables(groups: Groups) -> dict[str, str]:
    """Return the table of the article's own system and of longer paths, and what follows."""
    each = [(task, times) for task in SMALLER for times in TIMES]
    head = [f"{task}: {SCORES[task][0]}, {times * SMALLER[task][1].steps} steps" for task, times in each]
    rows = [["", *head, "drawn again for 100 draws", "seconds a step of text"]]
    for name in UPDATES:
        rows.append([name, *(_score(task, groups.get((task, name, times))) for task, times in each)])
        rows[-1] += [_again(groups, name), _seconds(groups, name)]
    seconds = sum(result["seconds"] for results in groups.values() for result in results)
    count = sum(map(len, groups.values()))
    later = f"The {count} trainings of the preset and of longer paths took {seconds:.0f} s of one core."
    return {"updates": table(rows), "longer": bullets(longer(groups)), "later": later}


def longer(groups: Groups) -> list[str]:
    """Return what came of the preset and of longer paths, where both lengths of the training say the same."""
    scores = {
        (task, name, times): [result[SCORES[task][0]] for result in results if result["diverged"] is None]
        for (task, name, times), results in groups.items()
    }
    mean = {key: float(np.mean(values)) for key, values in scores.items() if values}
    stopped = {key: len(groups[key]) - len(values) for key, values in scores.items()}
    steps = [times * SMALLER["text"][1].steps for times in TIMES]

    def bits(name: str) -> str:
        return " and ".join(f"{mean['text', name, times]:.3f}" for times in TIMES)

    def ahead(one: str, other: str) -> list[bool]:
        """Tell for each length of the training whether every seed of the one is ahead of every seed of the other."""
        return [max(scores["text", one, times]) < min(scores["text", other, times]) for times in TIMES]

    identity, four = "to the identity, 4 updates", "Koopman, 4 updates"
    three, longest = ONCE[1], ONCE[-1]
    alone, preset = (scores["recall", name, TIMES[-1]] for name in ("attention", "Tie"))
    others = ("Koopman", four, identity)
    last = [
        max(scores["recall", "Tie", times]) < min(min(scores["recall", name, times]) for name in ("attention", *others))
        for times in TIMES
    ]
    plateau = [x for name in others for x in scores["recall", name, TIMES[-1]]]
    gaps = [mean["text", "Tie", times] - mean["text", "Koopman", times] for times in TIMES]
    return [
        sure(
            all(ahead("attention", "Koopman") + ahead("Koopman", "Tie")) and gaps[0] > gaps[1],
            f"**The article's own system does not help either.** On the text it has {bits('Tie')} bits after "
            f"{steps[0]} and {steps[1]} steps, the default {bits('Koopman')}, and attention {bits('attention')}: "
            "every seed of each is behind every seed of the next, after both. The longer training brings it nearer to "
            f"the default, from {gaps[0]:.2f} bits to {gaps[1]:.2f}.",
        ),
        sure(
            all(ahead("attention", identity) + ahead(identity, "Koopman")),
            f"With a ridge to the identity four updates are ahead of the default, {bits(identity)} bits, and behind "
            "attention, with ranges apart after both.",
        ),
        sure(
            not all(ahead(four, "Koopman")) and not all(ahead("Koopman", four)),
            f"Two and four updates with a ridge to 0 are not yet separated: {bits('Koopman')} bits, and {bits(four)}. "
            "Eight were trained for the shorter time alone.",
        ),
        sure(
            min(scores["text", three, 1] + scores["text", longest, 1]) > max(scores["text", "Tie", 1]),
            f"With three and four updates the preset has {mean['text', three, 1]:.3f} and "
            f"{mean['text', longest, 1]:.3f} bits after {steps[0]} steps, behind every seed of two. It was not trained "
            "for longer.",
        ),
        sure(
            max(plateau) < 0.45 and all(last),
            "On recall nothing is separated but the preset, which is last after both. After the longer training "
            f"attention is better than naming the most frequent value with {sum(x > 0.45 for x in alone)} of "
            f"{len(alone)} seeds, and no other model: the default and longer paths have {_between(plateau)}, the "
            f"preset {_between(preset)}.",
        ),
        sure(
            not any(count for (_, name, _), count in stopped.items() if name != longest),
            "Near the identity no training stopped, and of the preset none with two or three updates.",
        ),
    ]


def redrawn(groups: Groups, presets: Sequence[Line]) -> str:
    """Return how often numbers were drawn again, here and in the trainings of the preset on the page of the presets."""
    ends = [result["diverged"] for (_, name, _), results in groups.items() if name == ONCE[-1] for result in results]
    stops = [int(end.split()[1].rstrip(":")) for end in ends if end is not None]
    again = sum(line["result"]["redrawn"] for line in presets)
    needed = sum(line["run"]["steps"] * line["run"]["layers"] for line in presets)
    small, first = SMALLER["text"][1].batch * SMALLER["text"][0].context, presets[0]["run"]
    often = [float(_again(groups, name)) for name in ("Tie", *ONCE[1:])]
    text = sure(
        often == sorted(often) and len(stops) == 1,
        f"For 100 numbers that it needed it drew {often[0]:.1f} again in calls of {small} to 192 tokens, and "
        f"{100 * again / needed:.0f} in calls of {first['batch'] * first['context']}. With three updates and the small "
        f"calls it was {often[1]:.1f}, with four {often[2]:.1f}; and one of these {len(ends)} trainings stopped, in "
        f"step {stops[0]}, because 64 draws for an update were not enough.",
    )
    return textwrap.fill(text, 120)


def _score(task: str, results: Results | None) -> str:
    if results is None:
        return "not run"
    kind, digits, _ = SCORES[task]
    values = [result[kind] for result in results if result["diverged"] is None]
    stopped = [f"stopped: {len(results) - len(values)}"] if len(values) < len(results) else []
    return ", ".join(([ranged(values, digits)] if values else []) + stopped)


def _again(groups: Groups, name: str) -> str:
    """Return how often numbers were drawn again, of trainings that came to their end."""
    options, again, needed = UPDATES[name][1], 0, 0
    for (task, model, times), results in groups.items():
        done = [result for result in results if model == name and "redrawn" in result and result["diverged"] is None]
        plan = SMALLER[task][1]
        needed += len(done) * times * plan.steps * plan.layers * (options.get("updates", 2) - 1)
        again += sum(result["redrawn"] for result in done)
    return f"{100 * again / needed:.1f}" if needed else ""


def _seconds(groups: Groups, name: str) -> str:
    """Return the mean of a step of the text, of trainings that came to their end, and their scoring in it."""
    seconds = [result["seconds"] for result in groups["text", name, 1] if result["diverged"] is None]
    return f"{np.mean(seconds) / SMALLER['text'][1].steps:.3f}" if seconds else ""


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
