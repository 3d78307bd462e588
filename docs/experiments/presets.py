"""Settings after each paper beside those of this library: one small training of each, and of softmax attention.

    python -m docs.experiments.presets run     # some 45 minutes of one core; goes on where it was stopped

All learn the same text with three seeds, once for equally many steps, once for equally many operations.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from docs.experiments.runs import Line, choice, read, seeds_option, trains
from docs.experiments.tasks import standard_library
from refattn import tree
from refattn.instruments.counting import Count, counting
from refattn.train import loop, settings
from refattn.train.diagnose import DivergedError
from refattn.train.step import measured, score

RESULTS = Path(__file__).with_name("presets.jsonl")

SEEDS = (0, 1, 2)

SIZE: Mapping[str, Any] = {
    "context": 64,
    "width": 32,
    "heads": 4,
    "layers": 2,
    "batch": 12,
    "accumulate": 1,
    "steps": 300,
    "learning_rate": 3e-3,
    "warmup": 30,
    "floor": 0.05,
    "score_bytes": 1 << 20,
    "mlp": None,
    "decode": "vocabulary",
}
"""What all trainings have, whatever their preset says of it; what decays and rates of single numbers are its own."""

EVERY = 16
"""Of so many sequences of the held-out bytes, the first is scored."""

PIECES = 10
"""Into so many pieces of equal length a training is cut for its losses."""

GROWS = (1 / 3, 2 / 3)
"""After which parts of a training a growing one grows."""


@dataclass(frozen=True)
class Setting:
    """What is trained: a mechanism, and a preset of it, or None for its defaults.

    Attributes
    ----------
    of
        Whose settings these are, of a preset as its record says of each: those of the authors', "in part ours", "ours,
        parts of his", or "this library's".
    whole
        Whether it is trained for equal steps, too; one whose steps take seconds is not.
    """

    mechanism: str
    preset: str | None
    of: str
    whole: bool = True

    @property
    def command(self) -> str:
        """What trains it at its own size."""
        return f"refattn train {self.mechanism}" + (f" --set preset={self.preset}" if self.preset else "")

    def settings(self, steps: int = SIZE["steps"], seed: int = 0) -> settings.Settings:
        """Return the settings of a training."""
        given: dict[str, Any] = {"preset": self.preset} if self.preset else {}
        if settings.expanded(self.mechanism, given).get("grow"):
            given |= {"grow": [max(1, round(part * steps)) for part in GROWS]}
        return settings.build(self.mechanism, {**given, **SIZE, "steps": steps, "seed": seed})


SETTINGS: dict[str, Setting] = {
    "softmax": Setting("softmax", None, "baseline"),
    "B": Setting("sympformer", "B", "authors'"),
    "presymplectic Euler": Setting("sympformer", "presymp_euler", "authors'"),
    "Y": Setting("sympformer", "Y", "authors'"),
    "H0": Setting("sympformer", "H0", "authors'"),
    "H1": Setting("sympformer", "H1", "authors'"),
    "R2": Setting("sympformer", "R2", "authors'"),
    "SympFormer": Setting("sympformer", None, "this library's"),
    "Mercat: the default": Setting("higher_order", None, "in part ours"),
    "Mercat: minus one": Setting("higher_order", "mercat2020", "in part ours"),
    "Tie": Setting("koopman", "tie2024", "in part ours", whole=False),
    "Koopman": Setting("koopman", None, "this library's"),
    "Burgund": Setting("growing", "burgund2025", "in part ours"),
    "growing": Setting("growing", "corrected", "this library's"),
    "Preetham": Setting("graph_energy", "preetham2023", "ours, parts of his"),
    "graph energy": Setting("graph_energy", None, "this library's"),
    "delta": Setting("delta", None, "this library's"),
}
"""By name, in the order of the table."""


@dataclass(frozen=True)
class Job:
    """One training."""

    setting: Setting
    steps: int
    seed: int

    text = True

    def to_json(self) -> dict[str, Any]:
        """Return the settings of the training, all of them."""
        return self.setting.settings(self.steps, self.seed).to_json()

    def result(self) -> dict[str, Any]:
        """Train."""
        return {**train(self.setting.settings(self.steps, self.seed)), "operations": cost(self.setting).of(self.steps)}

    def told(self, result: Mapping[str, Any]) -> str:
        """Return what came of it in a few words."""
        scores = result["diverged"] or f"{result['bits']:.3f} bits"
        return f"{self.setting.command}: {self.steps} steps, seed {self.seed}: {scores}"


def train(chosen: settings.Settings) -> dict[str, Any]:
    """Return what came of a training, step by step that of `refattn train`.

    Returns
    -------
    dict
        - ``bits``: per byte of what is held out; None after numbers that are not finite;
        - ``losses``: the mean, in nats, of each of the `PIECES` pieces of the training;
        - ``parameters``: how many numbers the model has at the end;
        - ``redrawn``: how often a block drew its numbers again in all, of those that do;
        - ``diverged``: where and how numbers stopped being finite, or None;
        - ``seconds``: time of the CPU.
    """
    began, text = time.process_time(), standard_library()
    losses: list[float] = []
    redrawn, bits, diverged = 0, None, None
    with loop._precision(chosen):
        state = loop.fresh(chosen)
        try:
            while state.step < chosen.steps:
                state, row = loop.step(state, chosen, text)
                losses.append(row["loss"])
                redrawn += row.get("redrawn", 0)
                state, _ = loop.grow(state, chosen, text)
            bits = score(state.params, text.heldout[: chosen.score_bytes + 1], every=EVERY)
        except (DivergedError, ArithmeticError) as error:  # the second: no inverse was found
            diverged = f"step {len(losses) + 1}: {error}"
    return {
        "bits": None if bits is None or not math.isfinite(bits) else round(bits, 5),
        "losses": [round(float(np.mean(piece)), 4) for piece in np.array_split(losses, PIECES) if len(piece)],
        "parameters": sum(leaf.size for leaf in tree.flatten(state.params).values()),
        "redrawn": redrawn,
        "diverged": diverged,
        "seconds": round(time.process_time() - began, 2),
    }


@dataclass(frozen=True)
class Cost:
    """Floating-point operations: of a step at each of the widths that a model grows through, and of all its growth."""

    steps: tuple[float, ...]
    growth: float

    def of(self, steps: int) -> float:
        """Return those of so many steps, as many at each width."""
        return steps * sum(self.steps) / len(self.steps) + self.growth


@functools.cache
def cost(setting: Setting) -> Cost:
    """Return the operations of forwards, backwards and growth, counted as a training begins; AdamW is left out."""
    chosen, text = setting.settings(), standard_library()
    state, growth = loop.fresh(chosen), 0.0
    steps = [_counted(state, chosen)]
    for step in chosen.growing[0].steps if chosen.growing is not None else ():
        state, more = _grown(replace(state, step=step), chosen, text)
        growth += more
        steps.append(_counted(state, chosen))
    return Cost(tuple(steps), growth)


def _counted(state: loop.Progress, chosen: settings.Settings) -> float:
    """Return the operations of the forward and the backward of a step."""
    batch = loop._batch(state.params, chosen, standard_library(), 1)
    with counting() as count:
        params = counted(count, state.params)
        tally = count.start()
        measured(params, *map(count.array, batch), forces=chosen.gamma is not None, chance=(chosen.seed, 1))
        return float(tally.flops)


def _grown(state: loop.Progress, chosen: settings.Settings, text: Any) -> tuple[loop.Progress, float]:
    """Return the state after a growth, and the operations of it."""
    with counting() as count:
        wrapped = replace(state, params=counted(count, state.params), moments=counted(count, state.moments))
        tally = count.start()
        grown, _ = loop.grow(wrapped, chosen, text)
        flops = float(tally.flops)
        plain: list[Any] = [
            tree.unflatten(part, {name: np.asarray(leaf) for name, leaf in tree.flatten(part).items()})
            for part in (grown.params, grown.moments)
        ]
    return replace(grown, params=plain[0], moments=plain[1]), flops


def steps_of(setting: Setting) -> int:
    """Return for how many steps a training has as many operations as the baseline, to half a step."""
    budget, own = cost(SETTINGS["softmax"]).of(SIZE["steps"]), cost(setting)
    return max(1, round((budget - own.growth) / (own.of(1) - own.growth)))


def counted(count: Count, params: Any) -> Any:
    """Return parameters as arrays that count."""
    return tree.unflatten(params, {name: count.array(leaf) for name, leaf in tree.flatten(params).items()})


def wanted(names: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """Return the trainings of some settings, one seed after the other, without repetition."""
    jobs = [
        Job(setting, steps, seed)
        for seed in seeds
        for setting in (SETTINGS[name] for name in names)
        for steps in (*((SIZE["steps"],) if setting.whole else ()), steps_of(setting))
    ]
    return list(dict.fromkeys(jobs))


def by_setting(results: Path, names: Sequence[str] = tuple(SETTINGS)) -> dict[str, dict[str, list[Line]]]:
    """Return the lines of a file by setting, those of "steps" and of "operations"; ValueError where one is missing.

    Nothing is counted again: what has another number of steps has the operations of the baseline.
    """
    every = read(results)
    found: dict[str, dict[str, list[Line]]] = {}
    for name in names:
        setting = SETTINGS[name]
        own = [
            line
            for line in every
            if line["run"]["mechanism"] == setting.mechanism
            and setting.settings(line["run"]["steps"], line["run"]["seed"]).to_json() == line["run"]
        ]
        own.sort(key=lambda line: line["run"]["seed"])
        whole = [line for line in own if line["run"]["steps"] == SIZE["steps"]]
        equal = [line for line in own if line["run"]["steps"] != SIZE["steps"]] or whole
        found[name] = ({"steps": whole} if setting.whole else {}) | {"operations": equal}
        for kind, lines in found[name].items():
            if [line["run"]["seed"] for line in lines] != list(SEEDS):
                raise ValueError(f"{results}: got {len(lines)} lines of {name} at equal {kind}, needs one of each seed")
    return found


main = click.Group(help=__doc__)


@trains(main, RESULTS, "Train all settings that have no line in the results yet.")
@seeds_option(len(SEEDS))
@choice("--setting", "names", SETTINGS)
def run(seeds: int, names: tuple[str, ...]) -> list[Job]:
    """Train all settings that have no line in the results yet."""
    return wanted(names or tuple(SETTINGS), range(seeds))


if __name__ == "__main__":
    main()
