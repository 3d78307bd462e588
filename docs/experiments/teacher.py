"""The teacher task: a block that shall give what a wider one gives, on inputs of a given condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import refattn as ra
from refattn import philox
from refattn.train.optimiser import AdamW, Group

BLOCK = ra.mechanism("growing").block
GROWTH: Any = ra.mechanism("growing").grow
State = BLOCK.module.State
WIDTH, TOKENS, HEAD_WIDTH = 16, 16, 8


@dataclass(frozen=True)
class Data:
    """Inputs (b, n, m) and what the teacher makes of them."""

    x: Any
    wanted: Any

    def part(self, rows: Any) -> Data:
        """Return some of the sequences."""
        return Data(self.x[rows], self.wanted[rows])


def draw(name: str, *shape: int, seed: int, step: int = 0) -> Any:
    """Return normal numbers of a seed."""
    return philox.normal(shape, seed=seed, purpose=f"teacher.{name}", step=step)


def task(seed: int, condition: float = 10.0, sequences: int = 512, part: str = "x") -> Data:
    """Return sequences and the teacher's answers; those of another part are others, of the same teacher.

    The teacher has one head of width `HEAD_WIDTH`, and queries and keys 2.5 times as large as fresh ones.
    """
    u, _, v = np.linalg.svd(draw("inputs", WIDTH, WIDTH, seed=seed))
    root = u * np.geomspace(1.0, condition, WIDTH) @ v
    root *= np.sqrt(WIDTH) / np.linalg.norm(root)
    x = draw(part, sequences, TOKENS, WIDTH, seed=seed) @ root
    teacher = fresh(HEAD_WIDTH, seed=seed + 1000)
    wide = BLOCK.module.Params(teacher.config, 2.5 * teacher.w_q, 2.5 * teacher.w_k, teacher.w_v, teacher.w_o)
    return Data(x, run(wide, x)[0])


def fresh(head_width: int, seed: int) -> Any:
    """Return a fresh block of one head, float64 on NumPy."""
    config = BLOCK.Config(width=WIDTH, heads=1, head_width=head_width, value_width=WIDTH)
    return BLOCK.init(config, seed=seed, like=np.zeros(1))


def run(params: Any, x: Any) -> tuple[Any, Any]:
    """Return what the block gives, and what it saved."""
    state, saved = BLOCK.forward(params, State(x), ra.Context())
    return state.x, saved


def loss(params: Any, given: Data) -> float:
    """Return the mean of the squares of the errors."""
    return float(np.mean((run(params, given.x)[0] - given.wanted) ** 2))


def gradient(params: Any, given: Data) -> tuple[float, Any, Any]:
    """Return the loss, what the block saved, and the gradient of the loss with respect to its output."""
    y, saved = run(params, given.x)
    off = y - given.wanted
    return float(np.mean(off**2)), saved, State(2.0 * off / y.size)


def observe(params: Any, given: Data, keep: bool = False) -> Any:
    """Return the statistics of growth."""
    return GROWTH.observe(params, *gradient(params, given)[1:], keep=keep)


def batch(given: Data, size: int, seed: int, step: int) -> Data:
    """Return the sequences of a step."""
    return given.part(philox.integers((size,), 0, len(given.x), seed=seed, purpose="teacher.batch", step=step))


def train(params: Any, given: Data, steps: int, seed: int, rate: float = 3e-3, size: int = 64) -> Any:
    """Return the parameters after some steps of Adam."""
    adam = AdamW(rate, 0.9, 0.999, 1e-8, (Group("*"),))
    state = adam.start(params)
    for step in range(steps):
        _, saved, d_state = gradient(params, batch(given, size, seed, step))
        params, state = adam.update(state, params, BLOCK.backward(params, saved, d_state)[1])
    return params
