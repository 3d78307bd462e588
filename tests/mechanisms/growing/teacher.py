"""The teacher task: a block that shall give what a wider one gives, on inputs of a given condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import refattn as ra
from refattn import counter
from refattn.train.optimiser import AdamW, Group

BLOCK = ra.mechanism("growing").block
GROWTH: Any = ra.mechanism("growing").grow
State = BLOCK.module.State
WIDTH, TOKENS = 16, 16


@dataclass(frozen=True)
class Task:
    """Inputs (b, n, m) and what the teacher makes of them."""

    x: Any
    wanted: Any

    def part(self, rows: Any) -> Task:
        return Task(self.x[rows], self.wanted[rows])


def draw(name: str, *shape: int, seed: int, step: int = 0) -> Any:
    return counter.normal(shape, seed=seed, purpose=f"teacher.{name}", step=step)


def task(seed: int, condition: float = 10.0, sequences: int = 512) -> Task:
    """The teacher has one head of width 8, and queries and keys 2.5 times as large as fresh ones."""
    u, _, v = np.linalg.svd(draw("inputs", WIDTH, WIDTH, seed=seed))
    root = u * np.geomspace(1.0, condition, WIDTH) @ v
    root *= np.sqrt(WIDTH) / np.linalg.norm(root)
    x = draw("x", sequences, TOKENS, WIDTH, seed=seed) @ root
    teacher = fresh(8, seed=seed + 1000)
    wide = BLOCK.module.Params(teacher.config, 2.5 * teacher.w_q, 2.5 * teacher.w_k, teacher.w_v, teacher.w_o)
    return Task(x, run(wide, x)[0])


def fresh(head_width: int, seed: int) -> Any:
    config = BLOCK.Config(width=WIDTH, heads=1, head_width=head_width, value_width=WIDTH)
    return BLOCK.init(config, seed=seed, like=np.zeros(1))


def run(params: Any, x: Any) -> tuple[Any, Any]:
    state, saved = BLOCK.forward(params, State(x), ra.Context())
    return state.x, saved


def loss(params: Any, given: Task) -> float:
    return float(np.mean((run(params, given.x)[0] - given.wanted) ** 2))


def gradient(params: Any, given: Task) -> tuple[Any, Any]:
    """What the block saved, and the gradient of the loss with respect to its output."""
    y, saved = run(params, given.x)
    return saved, State(2.0 * (y - given.wanted) / y.size)


def observe(params: Any, given: Task, keep: bool = False) -> Any:
    return GROWTH.observe(params, *gradient(params, given), keep=keep)


def train(params: Any, given: Task, steps: int, seed: int, rate: float = 3e-3, batch: int = 64) -> Any:
    """Adam on batches of the task."""
    adam = AdamW(rate, 0.9, 0.999, 1e-8, (Group("*"),))
    state = adam.start(params)
    for step in range(steps):
        rows = counter.integers((batch,), 0, len(given.x), seed=seed, purpose="teacher.batch", step=step)
        _, found, _ = BLOCK.backward(params, *gradient(params, given.part(rows)))
        params, state = adam.update(state, params, found)
    return params
