"""One training of growing attention: a task, a way to come to the last width and a seed in, losses out.

Every way is read twice: after as many steps as the others, and after as many operations as the last width takes for
these steps. What growth costs itself is counted. The rate is constant, so that a training may end anywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from docs.experiments import flops, teacher, training
from docs.experiments.tasks import Text
from refattn import philox
from refattn.mechanisms.registry import mechanism
from refattn.train import growing
from refattn.train.optimiser import AdamW, clip, default_groups

Facts = dict[str, Any]

WAYS: dict[str, Mapping[str, Any] | None] = {
    "narrow": None,
    "scratch": None,
    "random": None,
    "net2wider": {"mode": "net2wider", "damping": 0.0},
    "zero": {"mode": "zero", "damping": 0.0},
    "gradmax": {"mode": "gradmax", "damping": 0.0},
    "report": {"method": "report", "metric": "mean", "damping": 0.0},
    "frobenius": {"method": "frobenius", "damping": 0.0},
    "additive": {"mode": "additive", "damping": 0.0},
    "optimal": {"damping": 0.0},
    "damped": {"damping": 0.01},
    "auto": {"damping": 0.01},
}
"""The options of growth of each way; None: the first width for good, the last one from the start, and columns of random
numbers in both weights, which is no mode of the library. The way "auto" is not told when to grow, nor by how much."""

AUTO = growing.Schedule()
"""When the way "auto" looks whether growth is worth while: the schedule of the library, as it is."""

FREE = ("random", "net2wider", "zero")
"""What needs no statistics."""


@dataclass(frozen=True)
class Plan:
    """What a training is given beside its task, its way and its seed.

    Attributes
    ----------
    first, columns, grows
        The first width of a head, how many columns come at a time, and after which steps.
    sequences
        Of the statistics and the search.
    steps, batch
        Updates of the first reading, and sequences of each.
    learning_rate, warmup, beta2, weight_decay, clip
        AdamW; the rate rises for `warmup` steps and stays; the gradients have at most the norm `clip`, or any.
    every
        Steps of a point of the curve of losses.
    """

    first: int
    columns: int
    grows: tuple[int, ...]
    sequences: int
    steps: int
    batch: int
    learning_rate: float
    warmup: int
    beta2: float
    weight_decay: float
    clip: float | None
    every: int

    @property
    def last(self) -> int:
        """The last width of a head."""
        return self.first + self.columns * len(self.grows)


class Learner(Protocol):
    """A task with its model, for one seed."""

    def fresh(self, width: int) -> Any:
        """Return parameters whose heads have a width."""

    def loss_and_gradients(self, params: Any, step: int) -> tuple[float, Any]:
        """Return those of the batch of a step."""

    def score(self, params: Any) -> float:
        """Return the loss of what is held out."""

    def forward(self, params: Any) -> int:
        """Return the operations of a forward of one sequence."""

    def grow(self, params: Any, moments: Any, way: str, step: int) -> tuple[Any, Any, Facts]:
        """Return grown parameters and moments, and facts with "before", "after" and "operations".

        Of the way "auto" they have "widths", too, those of a head in every layer.
        """


@dataclass(frozen=True)
class Run:
    """One training: what `docs.experiments.runs` runs."""

    task: Teacher | Written
    way: str
    plan: Plan
    seed: int

    def to_json(self) -> Facts:
        """Return the run as JSON has it."""
        task = {"name": type(self.task).__name__.lower()} | asdict(self.task)
        plan = asdict(self.plan)
        plan["grows"] = list(self.plan.grows)
        return {"task": task, "way": self.way, "options": WAYS[self.way], "plan": plan, "seed": self.seed}

    def result(self) -> Facts:
        """Train."""
        return train(self.task.learner(self.plan, self.seed), self.way, self.plan)

    @property
    def text(self) -> bool:
        """Whether it reads the text."""
        return isinstance(self.task, Written)

    def told(self, result: Mapping[str, Any]) -> str:
        """Return the readings in a few words."""
        scores = ", ".join(f"{result[name]['score']:.4g} at equal {name}" for name in ("steps", "operations"))
        task = self.to_json()["task"]
        condition = f" {task['condition']:g}" if "condition" in task else ""
        return f"{task['name']}{condition} {self.way} seed {self.seed}: {scores}"


def train(learner: Learner, way: str, plan: Plan) -> Facts:
    """Return what came of a training.

    Returns
    -------
    dict
        - ``steps``, ``operations``: the two readings, each with its ``score``, ``step`` and ``operations``;
        - ``curve``: after every so many steps the step, the operations and the mean loss since the last point;
        - ``growths``: of each the facts of `Learner.grow`; of the way "auto" also of those that were not worth while,
          after which the widths are what they were;
        - ``seconds``: time of the CPU.
    """
    began = time.process_time()
    params = learner.fresh(plan.last if way == "scratch" else plan.first)
    cost = 3 * plan.batch
    budget = plan.steps * cost * learner.forward(learner.fresh(plan.last))
    optimiser = AdamW(plan.learning_rate, 0.9, plan.beta2, 1e-8, default_groups(plan.weight_decay))
    moments = optimiser.start(params)
    readings: Facts = {}
    growths, curve, losses = [], [], []
    history = growing.History()
    step = operations = 0
    while True:
        following = operations + cost * learner.forward(params)
        for name, there in (("steps", step == plan.steps), ("operations", following > budget)):
            if there and name not in readings:
                readings[name] = {"score": learner.score(params), "step": step, "operations": operations}
        if len(readings) == 2:
            break
        step, operations = step + 1, following
        loss, gradients = learner.loss_and_gradients(params, step)
        gradients = gradients if plan.clip is None else clip(gradients, plan.clip)[0]
        rate = plan.learning_rate * min(1.0, step / max(plan.warmup, 1))
        params, moments = optimiser.update(moments, params, gradients, rate)
        losses.append(loss)
        if step % plan.every == 0:
            curve.append([step, operations, float(f"{np.mean(losses):.4g}")])
            losses = []
        history = history.after(loss, AUTO.window)
        due = growing.due(AUTO, history, step) if way == "auto" else step in plan.grows
        if due and way not in ("narrow", "scratch"):
            grown, moments, facts = learner.grow(params, moments, way, step)
            growths.append({"step": step, **facts})
            history = replace(history, grown=step) if grown is not params else history
            if operations + facts["operations"] > budget and "operations" not in readings:
                readings["operations"] = {"score": learner.score(params), "step": step, "operations": operations}
            params, operations = grown, operations + facts["operations"]
    return readings | {"curve": curve, "growths": growths, "seconds": round(time.process_time() - began, 2)}


@dataclass(frozen=True)
class Teacher:
    """The teacher task: inputs of a condition, so many of them to learn from and as many held out."""

    condition: float
    sequences: int = 512

    def learner(self, plan: Plan, seed: int) -> Learner:
        """Return the task for a seed."""
        given, held_out = (teacher.task(seed, self.condition, self.sequences, part) for part in ("x", "held out"))
        return _Teacher(plan, seed, given, held_out)


@dataclass(frozen=True)
class _Teacher:
    plan: Plan
    seed: int
    given: teacher.Data
    held_out: teacher.Data

    def fresh(self, width: int) -> Any:
        return teacher.fresh(width, self.seed)

    def loss_and_gradients(self, params: Any, step: int) -> tuple[float, Any]:
        part = teacher.batch(self.given, self.plan.batch, self.seed, step)
        loss, saved, d_state = teacher.gradient(params, part)
        return loss, teacher.BLOCK.backward(params, saved, d_state)[1]

    def score(self, params: Any) -> float:
        return teacher.loss(params, self.held_out)

    def forward(self, params: Any) -> int:
        return flops.block(params.config, teacher.TOKENS)

    def grow(self, params: Any, moments: Any, way: str, step: int) -> tuple[Any, Any, Facts]:
        part = self.given.part(slice(self.plan.sequences))
        if way == "random":
            grown = random_columns(params, self.plan.columns, self.seed, step)
            facts = {"before": teacher.loss(params, part), "after": teacher.loss(grown, part)}
        elif way == "auto":
            grown, facts = self._worth_while(params, part)
        else:
            options = teacher.GROWTH.Options(**(WAYS[way] or {}), seed=self.seed)
            statistics = teacher.observe(params, part, options.keeps)
            grown, found = teacher.GROWTH.grow(
                params, statistics, lambda p: teacher.loss(p, part), options, columns=self.plan.columns
            )
            facts = _facts(found, [found])
        points = int(facts.get("evaluations", 0))
        operations = growth_operations(way, [params.config], self.forward(params), self.plan, teacher.TOKENS, points)
        if grown is params:
            return params, moments, facts | {"operations": operations}
        # The report's columns have nothing to do with the old ones.
        return grown, growing.widened(moments, grown, reset=way == "report"), facts | {"operations": operations}

    def _worth_while(self, params: Any, part: teacher.Data) -> tuple[Any, Facts]:
        """Return what `refattn.train.growing` makes of a model's blocks where nobody says how many columns they get."""
        growth, half = teacher.GROWTH, self.plan.sequences // 2
        options = growth.Options(**(WAYS["auto"] or {}), seed=self.seed)
        halves = tuple(teacher.observe(params, part.part(at)) for at in (slice(half), slice(half, None)))
        before = teacher.loss(params, part)
        # Each half knows the mean loss of its own sequences: twice their part in that of all.
        plan = growth.plan(params, growth.merge(*halves), options, halves=halves)
        grown, found = params, {"before": before, "after": before, "amplitude": 0.0, "evaluations": 0}
        if plan.columns and plan.gain * options.amplitude >= options.gain * 2.0 * before:
            searched = growth.search(
                lambda amplitude: teacher.loss(growth.apply(plan, amplitude), part), before, 0.5 * plan.slope, options
            )
            found |= growth.facts_of(searched)
            grown = growth.apply(plan, searched.amplitude) if searched.amplitude else params
        return grown, _facts(found, [plan.facts]) | {"widths": [growth.width(grown)]}


@dataclass(frozen=True)
class Written:
    """The next byte of the text, with a small model."""

    context: int = 64
    width: int = 32
    heads: int = 2
    layers: int = 2
    scored: int = 1 << 20
    every: int = 16

    def learner(self, plan: Plan, seed: int) -> Learner:
        """Return the task for a seed."""
        return _Written(self, plan, seed)


@dataclass(frozen=True)
class _Written:
    model: Written
    plan: Plan
    seed: int

    @property
    def text(self) -> Text:
        return Text(self.model.context, self.model.scored, self.model.every)

    def fresh(self, width: int) -> Any:
        own, plan = self.model, self.plan
        whole = training.Plan(
            width=own.width,
            heads=own.heads,
            layers=own.layers,
            mlp=True,
            embedding=0.02,
            steps=plan.steps,
            batch=plan.batch,
            learning_rate=plan.learning_rate,
            warmup=plan.warmup,
            weight_decay=plan.weight_decay,
        )
        options = {"head_width": width, "value_width": own.width // own.heads}
        return training.fresh("growing", options, self.text, whole, self.seed)

    def loss_and_gradients(self, params: Any, step: int) -> tuple[float, Any]:
        return training.loss_and_gradients(params, self.text.batch(self.plan.batch, seed=self.seed, step=step))

    def score(self, params: Any) -> float:
        return training.score(params, self.text)["bits"]

    def forward(self, params: Any) -> int:
        return flops.network(params, self.model.context)

    def grow(self, params: Any, moments: Any, way: str, step: int) -> tuple[Any, Any, Facts]:
        # A batch that no step trains on.
        batch = self.text.batch(self.plan.sequences, seed=self.seed, step=10**6 + step)
        ability: Any = mechanism("growing").grow
        if way == "random":
            columns = self.plan.columns
            layers = [
                replace(layer, block=random_columns(layer.block, columns, self.seed, step, n))
                for n, layer in enumerate(params.layers)
            ]
            grown = replace(params, layers=tuple(layers))
            moments = growing.widened(moments, grown)
            losses = [growing.mean_loss(p, batch.inputs, batch.targets) for p in (params, grown)]
            facts = dict(zip(("before", "after"), losses, strict=True))
        else:
            options = ability.Options(**(WAYS[way] or {}), most=self.plan.columns, seed=self.seed)
            schedule = growing.Schedule(steps=(step,), moments="reset" if way == "report" else "keep")
            schedule = AUTO if way == "auto" else schedule
            grown, moments, found = growing.grow(params, moments, batch.inputs, batch.targets, schedule, options)
            facts = _facts(found, list(found["layers"].values()))
            facts |= {"widths": found["widths"]} if way == "auto" else {}
        configs = [layer.block.config for layer in params.layers]
        points = int(facts.get("evaluations", 0))
        operations = growth_operations(way, configs, self.forward(params), self.plan, self.model.context, points)
        return grown, moments, facts | {"operations": operations}


def random_columns(params: Any, columns: int, seed: int, step: int, layer: int = 0) -> Any:
    """Return a block with random columns, of unit length in the mean, in both weights."""
    wide = {}
    for name in ("w_q", "w_k"):
        w = getattr(params, name)
        shape = (*w.shape[:2], columns)
        drawn = philox.normal(shape, seed=seed, purpose=f"random.{name}", step=step, layer=layer)
        wide[name] = np.concatenate([w, (drawn / math.sqrt(w.shape[1])).astype(w.dtype)], axis=2)
    config = replace(params.config, head_width=wide["w_q"].shape[2], scale=params.config.factor)
    return replace(params, config=config, **wide)


def growth_operations(way: str, configs: list[Any], forward: int, plan: Plan, tokens: int, points: int) -> int:
    """Return the operations of a growth with so many points of its search, as far as its way needs them."""
    if way in FREE:
        return 0
    n = plan.sequences
    operations = n * (3 * forward + sum(flops.statistics(config, tokens) for config in configs))
    if way == "gradmax":
        return operations + sum(flops.algebra(config, 0) for config in configs)
    if way == "report":
        operations += n * sum(flops.per_sequence(config, tokens) for config in configs)
        return operations + sum(flops.algebra(config, 1) for config in configs)
    if way == "auto":  # the first half of the sequences has a plan of its own
        operations += sum(flops.algebra(config, 0) for config in configs)
    return operations + n * points * forward + sum(flops.algebra(config, points) for config in configs)


def _facts(found: Facts, blocks: list[Facts]) -> Facts:
    names = ("before", "after", "amplitude", "evaluations")
    facts = {name: float(f"{found[name]:.6g}") if name != "evaluations" else found[name] for name in names}
    return facts | {"psi": [round(block.get("psi", 0.0), 4) for block in blocks]}
