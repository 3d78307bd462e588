"""Growth on the way: when a model's blocks get wider, by how much, and what becomes of the optimiser's state.

What grows and how is the mechanism's: the record's `grow` observes a block's backward, plans a step and applies it.
Here is what is the same for all: the rule that says when, the statistics of a batch, one search along the paths of all
blocks at once, and the optimiser's state, to which new columns come with zeros and a count of their own.

Growth is a pure function of the state and the settings, as a step is, so that a run goes on to the bit across one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from refattn import model, tree
from refattn.args import Maybe, One, Real, Whole, check, check_all
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.ops.losses import cross_entropy_forward
from refattn.train.step import parts_of, there_and_back
from refattn.xp import Array, backend, device, namespace, sum_wide

Facts = dict[str, Any]

TOKENS = 8
"""Tokens of a statistic for each entry of a kernel: from fewer the directions are mostly noise, which halves of them
find out, so that nothing grows."""


@dataclass(frozen=True)
class Schedule:
    """When a model grows.

    Attributes
    ----------
    steps
        The steps after which it grows, come what may; empty: where it is worth while.
    every
        Steps from one look to the next.
    window, plateau
        Look closer where the mean loss of the second half of so many steps is less than this part below that of the
        first half.
    cooldown
        The least number of steps between two growths.
    sequences
        How many sequences the statistics and the search are made on; None: as many as hold `TOKENS` tokens for each
        entry of a kernel, and at least 128.
    moments
        "keep" or "reset" the optimiser's state of weights that grew.
    """

    steps: tuple[int, ...] = ()
    every: int = 100
    window: int = 200
    plateau: float = 0.01
    cooldown: int = 200
    sequences: int | None = None
    moments: str = "keep"

    def __post_init__(self) -> None:
        for step in self.steps:
            check("grow", step, Whole(1))
        if len(set(self.steps)) < len(self.steps):
            raise ValueError(f"grow: got {list(self.steps)}, needs each step once")
        check_all(self, every=Whole(1), window=Whole(2), cooldown=Whole(), sequences=Maybe(Whole(2)))
        check_all(self, plateau=Real(0.0), moments=One(("keep", "reset")))

    def size(self, width: int, context: int) -> int:
        """Return how many sequences of a context there are, for tokens of a width."""
        return self.sequences or max(128, -(-TOKENS * width * width // context))


@dataclass(frozen=True)
class History:
    """What the rule looks at: the last losses, and the step of the last growth, 0 before the first."""

    losses: tuple[float, ...] = ()
    grown: int = 0

    def after(self, loss: float, window: int) -> History:
        """Return the history with one more loss."""
        return replace(self, losses=(*self.losses, loss)[-window:])


def parts(mechanism: Mechanism, grow: Any, given: Mapping[str, Any]) -> tuple[Schedule, Any] | None:
    """Return the schedule and the mechanism's options, or None where nothing grows.

    Parameters
    ----------
    mechanism
        Its record.
    grow
        None, "auto" or steps.
    given
        Fields of the schedule and of the mechanism's options by name.

    Raises
    ------
    TypeError, ValueError
        Where the mechanism does not grow, or a name or a value is none.
    """
    ability = mechanism.grow
    if grow is None:
        if given:
            raise ValueError(f"growth: got {', '.join(given)}, needs grow as well")
        return None
    if not isinstance(grow, list | tuple) and not (isinstance(grow, str) and grow == "auto"):
        raise ValueError(f'grow: got {grow!r}, needs null, "auto" or a list of steps')
    if ability is None:
        raise ValueError(
            f"grow: got {grow!r}, but {mechanism.name} does not grow; needs one of {registry.able('grow')}"
        )
    own = [field.name for field in fields(Schedule) if field.name != "steps"]
    known = [*own, *(field.name for field in fields(ability.Options))]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"growth: got {', '.join(map(repr, unknown))}, needs some of {', '.join(known)}")
    steps = () if grow == "auto" else tuple(grow)
    try:
        schedule = Schedule(steps, **{name: x for name, x in given.items() if name in own})
        return schedule, ability.Options(**{name: x for name, x in given.items() if name not in own})
    except (TypeError, ValueError) as error:
        name = str(error).partition(":")[0]
        raise type(error)(f"growth.{error}" if name in given else str(error)) from error


def due(schedule: Schedule, history: History, step: int) -> bool:
    """Tell whether it is time to look at what growth would gain, after a step."""
    if schedule.steps:
        return step in schedule.steps
    losses, half = history.losses, schedule.window // 2
    if step % schedule.every or len(losses) < schedule.window:
        return False
    if history.grown and step - history.grown < schedule.cooldown:
        return False
    first, second = sum(losses[-2 * half : -half]) / half, sum(losses[-half:]) / half
    return second > (1.0 - schedule.plateau) * first


def grow(
    params: model.Params, moments: Any, inputs: Array, targets: Array, schedule: Schedule, options: Any
) -> tuple[model.Params, Any, Facts]:
    """Return the parameters and the optimiser's state after a growth, and what there is to write down of it.

    With a schedule of steps every block gets `options.most` columns; otherwise as many as two halves of the sequences
    agree on, where these gain enough. Where the search finds no amplitude the blocks of the latter stay as they are,
    and those of the former get columns that change nothing.
    """
    ability: Any = params.config.record.grow
    cuts = (0, inputs.shape[0] // 2, inputs.shape[0])
    found = [observe(params, inputs, targets, cuts[n], cuts[n + 1], options.keeps) for n in range(2)]
    before = sum(loss for loss, _ in found)
    plans: dict[int, Any] = {}
    layers: Facts = {}
    for index, layer in enumerate(params.layers):
        halves = tuple(statistics[index] for _, statistics in found)
        columns = options.most if schedule.steps else None
        plan = ability.plan(layer.block, ability.merge(*halves), options, columns=columns, halves=halves)
        layers[str(index)] = plan.facts
        if plan.columns and (schedule.steps or plan.gain * options.amplitude >= options.gain * before):
            plans[index] = plan

    def at(amplitude: float) -> model.Params:
        blocks = {index: ability.apply(plan, amplitude) for index, plan in plans.items()}
        changed = (replace(layer, block=blocks.get(n, layer.block)) for n, layer in enumerate(params.layers))
        return replace(params, layers=tuple(changed))

    searched = ability.search(
        lambda amplitude: mean_loss(at(amplitude), inputs, targets),
        before,
        sum(plan.slope for plan in plans.values()),
        options,
    )
    facts = ability.facts_of(searched)
    grown = params
    if plans and (searched.amplitude or schedule.steps or not options.searches):
        grown = at(searched.amplitude)
        moments = widened(moments, grown, reset=schedule.moments == "reset")
        if not searched.amplitude:
            facts["after"] = mean_loss(grown, inputs, targets)
    return grown, moments, {"grown": grown is not params, **facts, "widths": widths(grown), "layers": layers}


def widths(params: model.Params) -> list[int]:
    """Return the width of every layer that growth is about."""
    ability: Any = params.config.record.grow
    return [ability.width(layer.block) for layer in params.layers]


def observe(
    params: model.Params, inputs: Array, targets: Array, first: int, stop: int, keep: bool
) -> tuple[float, list[Any]]:
    """Return the part of some sequences in the mean loss of all, and the statistics of every layer for it."""
    weight = 1.0 / math.prod(inputs.shape)
    ability: Any = params.config.record.grow

    def part(shards: list[slice]) -> tuple[float, list[Any]]:
        found = [_shard(params, inputs[rows, :], targets[rows, :], weight, keep) for rows in shards]
        return functools.reduce(add, found)

    def add(a: tuple[float, list[Any]], b: tuple[float, list[Any]]) -> tuple[float, list[Any]]:
        return a[0] + b[0], [ability.merge(*pair) for pair in zip(a[1], b[1], strict=True)]

    cuts = parts_of(params, first, stop, inputs.shape[1])
    loss, statistics = functools.reduce(add, backend(params.token_embedding).map(part, cuts))
    return loss * weight, statistics


def _shard(params: model.Params, inputs: Array, targets: Array, weight: float, keep: bool) -> tuple[float, list[Any]]:
    ability: Any = params.config.record.grow
    statistics: dict[int, Any] = {}

    def watch(index: int, block: Any, saved: Any, d_state: Any) -> None:
        found, layer = ability.observe(block, saved, d_state, keep=keep), index % len(params.layers)
        statistics[layer] = ability.merge(statistics[layer], found) if layer in statistics else found

    loss, _ = there_and_back(params, inputs, targets, weight, watch)
    return float(loss), [statistics[index] for index in range(len(params.layers))]


def mean_loss(params: model.Params, inputs: Array, targets: Array) -> float:
    """Return the mean loss of the targets in nats."""

    def part(shards: list[slice]) -> float:
        return sum(shard(rows) for rows in shards)

    def shard(rows: slice) -> float:
        logits, _ = model.forward(params, inputs[rows, :], training=True)
        return float(sum_wide(cross_entropy_forward(logits, targets[rows, :])[0]))

    cuts = parts_of(params, 0, inputs.shape[0], inputs.shape[1])
    return sum(backend(params.token_embedding).map(part, cuts)) / math.prod(inputs.shape)


def widened(moments: Any, params: Any, *, reset: bool = False) -> Any:
    """Return the state of AdamW for parameters of which some leaves grew at the end of their axes.

    What is new starts from zero: its moments, and its count of steps, which the bias correction goes by. With `reset`
    all of a leaf that grew does.
    """
    old = tree.flatten(moments.first)
    shapes = {name: (tuple(old[name].shape), tuple(leaf.shape)) for name, leaf in tree.flatten(params).items()}

    def wide(part: Any, *, counts: bool = False) -> Any:
        leaves = tree.flatten(part)
        return tree.unflatten(params, {name: _wide(x, *shapes[name], reset, counts) for name, x in leaves.items()})

    first, second = wide(moments.first), wide(moments.second)
    return replace(moments, first=first, second=second, count=wide(moments.count, counts=True))


def _wide(leaf: Array, old: tuple[int, ...], new: tuple[int, ...], reset: bool, counts: bool) -> Array:
    """Return a moment, or the counts, of a leaf that went from one shape to another."""
    if old == new:
        return leaf
    xp = namespace(leaf)
    if counts:
        # A count for each entry of the axes that grew; of the others one is enough.
        old, new = (tuple(n if a != b else 1 for n, a, b in zip(x, old, new, strict=True)) for x in (old, new))
        leaf = xp.broadcast_to(leaf, old)
    leaf = 0.0 * leaf if reset else leaf
    for axis, (n, m) in enumerate(zip(old, new, strict=True)):
        if m > n:
            shape = (*leaf.shape[:axis], m - n, *leaf.shape[axis + 1 :])
            leaf = xp.concat([leaf, xp.zeros(shape, dtype=leaf.dtype, device=device(leaf))], axis=axis)
    return leaf
