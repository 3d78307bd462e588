"""The tables and the figure of sympformer.md, from the lines of its results."""

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

CALLS = {"presymplectic": 4, "strang": 4}
"""Calls of the oracle in a layer, where they are not one."""

COLOURS = {"classical": "#555555", "Yurii": "#3a7ca5", "momentum": "#d7191c", "linear start": "#e6872b"}
STYLES = {4: "solid", 1: (0, (4, 2))}

Parts = Mapping[str, Mapping[str, Sequence[Line]]]
"""The lines of every part of the experiment, by variant."""


def tables(lines: Parts, task: Task, plan: Plan) -> dict[str, str]:
    """Return the tables of the page: of the short training, and of those that are longer or at other rates."""
    said = bullets(conclusions(lines))
    return {"scores": scores(lines["short"], task, plan), "longer": longer(lines), "conclusions": said}


def conclusions(lines: Parts) -> list[str]:
    """Return what came out, with the numbers of the results; ValueError where they do not say so."""
    parts = [
        {name: [line["result"]["bits"] for line in own] for name, own in part.items() if own} for part in lines.values()
    ]
    early, _, late, _ = parts
    means = [{name: float(np.mean(values)) for name, values in part.items()} for part in parts]
    short, _, long, high = means
    steps = [next(iter(part.values()))[0]["run"]["plan"]["steps"] for part in lines.values()]
    rates = [f"{next(iter(part.values()))[0]['run']['plan']['learning_rate']:g}" for part in lines.values()]
    ab2, euler = "AB2, first momentum", "forward Euler, first momentum"
    default, strang, wide = "presymplectic Euler", "Strang, one layer", "classical, one layer"
    ahead = [{name: part["classical"] - x for name, x in part.items()} for part in means]
    apart = max(abs(a - b) for a, b in zip(late[ab2], late["classical"], strict=True))
    return [
        sure(
            all(max(early[name]) < min(early["classical"]) for name in (ab2, euler))
            and apart < 0.005
            and 0.01 < -ahead[2][euler]
            and min(ahead[1][ab2], ahead[1][euler]) > 0.05
            and ahead[3][ab2] < 0.0 < ahead[3][euler]
            and min(high[ab2], high[euler]) > long["classical"],
            f"**In a long training no four layers learn more than the classical ones.** After {steps[0]} steps AB2 and "
            f"forward Euler are {ahead[0][ab2]:.2f} and {ahead[0][euler]:.2f} bits ahead of the classical block, with "
            f"ranges apart. After {steps[2]} AB2 is level with it, within {apart:.3f} for every seed, and forward "
            f"Euler is {-ahead[2][euler]:.2f} behind. What looked like acceleration is an early start. At a rate of "
            f"{rates[1]}, with which {steps[1]} steps lead less far, they are {ahead[1][ab2]:.2f} and "
            f"{ahead[1][euler]:.2f} ahead. At {rates[3]} AB2 is {-ahead[3][ab2]:.2f} behind and forward Euler "
            f"{ahead[3][euler]:.2f} ahead, but neither is as good there as the classical block at {rates[2]}.",
        ),
        sure(
            min(early[default]) > max(early["classical"])
            and min(late[default]) < min(late["classical"]) < max(late["classical"]) < max(late[default])
            and max(np.ptp(late[name]) for name in late) == np.ptp(late[default])
            and high[default] > 4.0,
            f"**The default is not worse either.** After {steps[0]} steps every seed of presymplectic Euler is behind "
            f"every seed of the classical block. After {steps[2]} its seeds lie on both sides of it, and farther apart "
            f"than those of any other. At a rate of {rates[3]} it does not learn well: {high[default]:.2f} bits. The "
            "variants with B, with less damping and with a first momentum, and linear attention, were trained only for "
            f"{steps[0]} steps, so their worth is open.",
        ),
        sure(
            min(early["Yurii"]) < max(early["classical"])
            and max(early["Yurii"]) > min(early["classical"])
            and min(late["classical"]) < long["Yurii"] < max(late["classical"]),
            f"**Yurii's block cannot be told from the classical one**, after {steps[0]} steps or, with its one seed, "
            f"after {steps[2]}.",
        ),
        sure(
            all(part[strang] == min(part.values()) for part in means)
            and high[strang] < long[strang]
            and 0.0 < long["classical"] - long[wide] < np.ptp(late[wide]) < short["classical"] - short[wide],
            f"**Four calls in one layer keep their lead.** Strang's splitting is {ahead[0][strang]:.2f} bits ahead of "
            f"four classical layers after {steps[0]} steps and {ahead[2][strang]:.2f} after {steps[2]}, and ahead at "
            f"every rate; at {rates[3]} it is better still. The shape is not the cause: one classical layer with the "
            f"same wide MLP and a single call, {ahead[0][wide]:.2f} ahead of four layers after {steps[0]} steps, is "
            f"{ahead[2][wide]:.2f} ahead after {steps[2]}, less than its seeds differ. What remains are three more "
            "calls of the same matrices. A step of 0.3 is no close approximation of a flow, so this says nothing "
            "about the "
            "order of the splitting.",
        ),
    ]


def verdict(lines: Parts) -> str:
    """Return what the row of the claims says; ValueError where the results do not say so."""
    short, _, longest, _ = lines.values()
    bits = [
        {name: [line["result"]["bits"] for line in own] for name, own in part.items() if own} for part in lines.values()
    ]
    early, _, late, _ = bits
    one, plain = late["Strang, one layer"], late["classical"]
    said = sure(
        all(np.mean(x["Strang, one layer"]) < min(np.mean(x[name]) for name in x if name[:6] != "Strang") for x in bits)
        and max(one) < min(plain),
        "not at one call a layer. Strang's splitting, four calls in one layer in place of four layers of one, is ahead "
        f"at every rate: after {longest['classical'][0]['run']['plan']['steps']} steps {ranged(one, 3)} bits against "
        f"{ranged(plain, 3)} of the classical block at equal parameters. ",
    )
    two = ("AB2, first momentum", "forward Euler, first momentum")
    said += sure(
        all(max(early[name]) < min(early["classical"]) and max(late[name]) > min(plain) for name in two)
        and np.mean(early["presymplectic Euler"]) > np.mean(early["classical"]),
        "With one call AB2 and forward Euler are ahead after "
        f"{short['classical'][0]['run']['plan']['steps']} steps and no longer then, and the default is not",
    )
    return said


def scores(by_name: Mapping[str, Sequence[Line]], task: Task, plan: Plan) -> str:
    """Return the table: of each variant of a training what it has, what it asks for and what it learned."""
    rows = [["", "parameters", "calls", "bits per byte", "accuracy", "seconds of the CPU"]]
    for name, lines in by_name.items():
        options = lines[0]["run"]["options"]
        calls = CALLS.get(options.get("integrator", ""), 1) * lines[0]["run"]["plan"]["layers"]
        values = {key: [line["result"][key] for line in lines] for key in ("bits", "accuracy", "seconds")}
        rows.append(
            [
                name,
                f"{parameters(lines[0], task, plan):,}",
                f"{calls}",
                ranged(values["bits"], 3),
                ranged(values["accuracy"], 3),
                f"{np.mean(values['seconds']):.0f}",
            ]
        )
    return table(rows)


def longer(lines: Parts) -> str:
    """Return the bits of each variant by steps and rate: of all seeds, or of the first one."""
    rows = [["", *(_said(part) for part in lines.values())]]
    for name in lines["short"]:
        bits = [[line["result"]["bits"] for line in part.get(name, ())] for part in lines.values()]
        if any(bits[1:]):
            rows.append([name, *(ranged(each, 3) if each[1:] else "".join(f"{x:.3f}" for x in each) for each in bits)])
    return table(rows)


def _said(part: Mapping[str, Sequence[Line]]) -> str:
    plan = next(iter(part.values()))[0]["run"]["plan"]
    return f"{plan['steps']:,} steps, rate {plan['learning_rate']:g}"


def parameters(line: Line, task: Task, plan: Plan) -> int:
    """Return the number of parameters of the model of a line."""
    run: dict[str, Any] = line["run"]
    params = fresh(run["mechanism"], run["options"], task, replace(plan, layers=run["plan"]["layers"]), 0)
    return sum(int(leaf.size) for leaf in tree.flatten(params).values())


def kind(line: Line) -> str:
    """Return what a variant is drawn as."""
    options = line["run"]["options"]
    integrator = options.get("integrator", "")
    if integrator == "classical":
        return "classical"
    if options.get("start") == "linear":
        return "linear start"
    return "Yurii" if integrator == "lie_trotter" else "momentum"


def draw(lines: Parts, path: Path) -> None:
    """Draw the bits of every seed after the short and the long training, and mean losses during the long one."""
    figure = Figure(figsize=(13.0, 5.6), dpi=100, facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1.0))
    said = {"momentum": "SympFormer, from rest", "linear start": "with a first momentum"}
    shown: set[str] = set()
    rate = next(iter(lines["short"].values()))[0]["run"]["plan"]["learning_rate"]
    long = lines[f"{rate:g}"]
    for place, (name, short) in enumerate(lines["short"].items()):
        what, layers = kind(short[0]), short[0]["run"]["plan"]["layers"]
        colour = COLOURS[what]
        for of_it, face in ((short, "white"), (long.get(name, ()), colour)):
            bits = [line["result"]["bits"] for line in of_it]
            left.plot(bits, [place] * len(bits), "o", color=colour, markerfacecolor=face, markersize=5, alpha=0.7)
        if name not in long:
            continue
        losses = np.mean([line["result"]["losses"] for line in long[name]], axis=0)
        parts = (np.arange(len(losses)) + 0.5) / len(losses)
        label = None if what in shown else said.get(what, what)
        shown.add(what)
        right.plot(parts, losses, color=colour, linestyle=STYLES[layers], linewidth=1.3, label=label, alpha=0.85)
    left.set_yticks(range(len(lines["short"])), list(lines["short"]))
    left.invert_yaxis()
    steps = [_said(part) for part in (lines["short"], long)]
    left.set(xlabel="bits per byte of what is held out, each seed; less is better")
    left.set_title(f"open: {steps[0]}; full: {steps[1]}", fontsize=10)
    left.grid(axis="x", color="#dddddd", linewidth=0.6)
    right.set(xlabel=f"part of the training of {steps[1]}", ylabel="mean loss in nats", ylim=(1.8, 3.4))
    right.set_title("dashed: one layer", fontsize=10)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
