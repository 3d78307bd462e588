"""The tables of presets.md, from the lines of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

import refattn as ra
from docs.experiments.page import bullets, ranged, sure, table
from docs.experiments.presets import SETTINGS, SIZE
from docs.experiments.runs import Line
from refattn.train.settings import expanded, flat

Readings = Mapping[str, Mapping[str, Sequence[Line]]]
"""By setting the lines of "steps" and of "operations", one of each seed; those of "steps" may be missing."""


def tables(lines: Readings) -> dict[str, str]:
    """Return the tables of the page by the names of their places."""
    names = list(SETTINGS)
    return {
        "scores": table([HEAD, *(_scores(name, lines[name]) for name in names)]),
        "settings": table([["", "source", "what differs from the default"], *map(_differs, names)]),
        "conclusions": bullets(conclusions(lines)),
    }


HEAD = ["", "whose", "parameters", "10^6 operations a step", "bits, equal steps", "steps", "bits, equal operations"]


def _scores(name: str, own: Mapping[str, Sequence[Line]]) -> list[str]:
    setting, equal = SETTINGS[name], own["operations"]
    first = own.get("steps", equal)[0]
    each = first["result"]["operations"] / first["run"]["steps"] / 1e6
    parameters = sorted({line["result"]["parameters"] for line in own.get("steps", equal)})
    return [
        name,
        setting.of,
        ", ".join(f"{count:,}" for count in parameters),
        f"{each:,.0f}",
        shown(own["steps"]) if "steps" in own else "not run",
        str(equal[0]["run"]["steps"]),
        shown(equal),
    ]


def shown(lines: Sequence[Line]) -> str:
    """Return the mean of the bits of some seeds with the least and the largest, and how many were stopped."""
    values = bits(lines)
    stopped = [f"stopped: {len(lines) - len(values)}"] if len(values) < len(lines) else []
    return ", ".join(([ranged(values, 3)] if values else []) + stopped)


def bits(lines: Sequence[Line]) -> list[float]:
    """Return the bits of the seeds that came to their end."""
    return [line["result"]["bits"] for line in lines if line["result"]["bits"] is not None]


def _differs(name: str) -> list[str]:
    """Return what a preset sets, sizes and rates that this page replaces aside."""
    setting = SETTINGS[name]
    given = expanded(setting.mechanism, {"preset": setting.preset}) if setting.preset else {}
    own = {key: value for key, value in flat(given).items() if key not in SIZE and key != "grow"}
    said = ", ".join(f"`{key}={value}`" for key, value in own.items())
    return [f"{name}: `{setting.command}`", ra.mechanism(setting.mechanism).source, said or "nothing"]


def conclusions(lines: Readings) -> list[str]:
    """Return what came out, with the numbers of the results; ValueError where they do not say so."""
    steps = {name: bits(own["steps"]) for name, own in lines.items() if "steps" in own}
    equal = {name: bits(own["operations"]) for name, own in lines.items()}
    mean = {name: float(np.mean(values)) for name, values in steps.items()}
    same = {name: float(np.mean(values)) for name, values in equal.items()}
    seeds, authors = len(steps["softmax"]), ("Y", "H0", "H1", "R2")
    least = {name: parameters(lines[name]["steps"][0]) for name in steps}
    more = min(least[name] for name in authors) / least["softmax"] - 1.0
    ahead = [name for name in authors if max(equal[name]) < min(equal["softmax"])]
    behind = [name for name in authors if min(equal[name]) > min(equal["softmax"])]
    tie = lines["Tie"]["operations"][0]
    return [
        sure(
            all(max(steps[name]) < min(steps["softmax"]) for name in authors)
            and min(mean, key=mean.__getitem__) == "H1",
            f"**Yurii's and the Hamiltonian blocks lead at equal steps**, H1 with {mean['H1']:.3f} bits against "
            f"{mean['softmax']:.3f} of softmax attention, every seed of each ahead of every seed of softmax attention. "
            f"They have {100 * more:.0f} % more parameters, most of them in tables of first velocities.",
        ),
        sure(
            ahead == ["Y", "H0"]
            and mean["H1"] < mean["Y"]
            and min(same["H1"], same["R2"]) > max(same["Y"], same["H0"]),
            f"At equal operations Y ({same['Y']:.3f}) and H0 ({same['H0']:.3f}) are still ahead of softmax attention "
            f"with every seed; H1 ({same['H1']:.3f}) and R2 ({same['R2']:.3f}), whose steps take half as much again, "
            f"are not{', R2 is behind' if behind == ['R2'] else ''}.",
        ),
        sure(
            max(steps["presymplectic Euler"])
            < min(steps["SympFormer"])
            < max(steps["SympFormer"])
            < min(steps["softmax"]),
            f"The authors' presymplectic Euler ({mean['presymplectic Euler']:.3f}) is ahead of this library's default "
            f"of the same block ({mean['SympFormer']:.3f}), and both are ahead of softmax attention.",
        ),
        sure(
            min(steps["Mercat"]) > max(steps["higher order"]) > min(steps["higher order"]) > max(steps["softmax"]),
            f"**Higher order**: as printed, with 1 always subtracted, {mean['Mercat']:.3f} bits; "
            f"the default {mean['higher order']:.3f}; softmax attention is ahead of both.",
        ),
        sure(
            min(steps["Burgund"]) > max(steps["growing"])
            and abs(mean["growing"] - mean["softmax"]) < 0.01
            and min(*equal["Burgund"], *equal["growing"]) > max(equal["softmax"]),
            f"**Growth**: twice by four columns, the report's steps end at {mean['Burgund']:.3f} bits and the "
            f"corrected ones at {mean['growing']:.3f}, with ranges apart. Softmax attention, which does not grow, has "
            f"{mean['softmax']:.3f}: nothing is gained, and at equal operations both are behind it.",
        ),
        sure(
            min(steps["graph energy"]) > max(steps["softmax"])
            and min(steps["Preetham"]) > max(steps["graph energy"])
            and min(equal["Preetham"]) > max(equal["graph energy"]),
            f"**Graph energy**: the default has {mean['graph energy']:.3f} bits, behind softmax attention. With an "
            f"energy for every prefix, levels, classes and a regulariser it has {mean['Preetham']:.3f} at equal steps, "
            f"{_than(mean['Preetham'] - mean['graph energy'])} the default's. A step takes "
            f"{_per_step(lines, 'Preetham') / _per_step(lines, 'graph energy'):.0f} times the operations, and at equal "
            f"operations, after {lines['Preetham']['operations'][0]['run']['steps']} steps, it has "
            f"{same['Preetham']:.3f}.",
        ),
        sure(
            min(steps["Koopman"]) < max(steps["softmax"]) and min(equal["Koopman"]) > max(equal["softmax"]),
            f"**Koopman**: the default is not ahead at equal steps, {mean['Koopman']:.3f} bits, with a step that takes "
            f"{_per_step(lines, 'Koopman') / _per_step(lines, 'softmax'):.1f} times the operations. Tie's preset takes "
            f"{_per_step(lines, 'Tie') / _per_step(lines, 'softmax'):.0f} times those of softmax attention: it was "
            f"trained for {tie['run']['steps']} steps alone, in which it drew "
            f"{tie['result']['redrawn']} times again (first seed), and "
            f"{_fate(lines['Tie']['operations'])}.",
        ),
        sure(
            mean["delta"] < min(steps["softmax"]) and len(steps["delta"]) == seeds,
            f"The delta rule, here for comparison, has {mean['delta']:.3f} bits at equal steps and {same['delta']:.3f} "
            "at equal operations.",
        ),
    ]


def parameters(line: Line) -> int:
    """Return how many numbers the model of a line has."""
    return int(line["result"]["parameters"])


def _than(difference: float) -> str:
    return f"{abs(difference):.3f} {'above' if difference > 0.0 else 'below'}"


def _fate(lines: Sequence[Line]) -> str:
    values = bits(lines)
    if len(values) < len(lines):
        return f"{len(lines) - len(values)} of {len(lines)} seeds were stopped"
    return f"has {np.mean(values):.3f} bits, which says nothing about a training"


def _per_step(lines: Readings, name: str) -> float:
    line = lines[name]["operations"][0]
    return float(line["result"]["operations"]) / float(line["run"]["steps"])
