"""Growing attention at work.

A head of width 2 learns to attend like a head of width 4, until its loss no longer falls. Then it grows.

- Upper left: singular values of the gradient of the kernel, in units of what a change costs, and of the part of it that
  the two columns cannot follow: what new columns are worth.
- Upper right: the weights before and after; old columns stay, new ones stand behind them.
- Lower left: the loss by the amplitude of the step, for 0 to 2 new columns, its slope at 0, and what the search finds.
- Lower right: the loss while the head learns, with the growth and without.

All of it is computed by `refattn.mechanisms.growing.definition`; nothing is drawn from a formula of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from refattn import philox
from refattn.mechanisms.growing import definition as growing
from refattn.ops.plain import softmax, softmax_backward
from refattn.xp import transpose
from tools.draw.common import BLUE, GREY, ORANGE, RED, TEXT, finished

BATCH, TOKENS, WIDTH, VALUES = 32, 12, 8, 8
NARROW, WIDE, NEW = 2, 4, 2
SCALE = 0.5
STEPS, RATE = 1500, 0.3


def _draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=3, purpose=f"figure.growing.{name}")


class Task:
    """Attention with a kernel of rank 4, for a narrower head to learn: half the mean square of what it is off."""

    def __init__(self) -> None:
        self.y = _draw("y", BATCH, TOKENS, WIDTH)
        self.v = _draw("v", BATCH, 1, TOKENS, VALUES)
        teacher = (1.2 * _draw(name, 1, WIDTH, WIDE) for name in ("teacher.q", "teacher.k"))
        self.wanted = self._weights(*teacher) @ self.v

    def _weights(self, w_q: Any, w_k: Any) -> Any:
        tokens = self.y[:, None, :, :]
        return softmax(SCALE * (tokens @ w_q) @ transpose(tokens @ w_k))

    def loss(self, w_q: Any, w_k: Any) -> float:
        """Return the loss of a head."""
        return 0.5 * float(np.mean((self._weights(w_q, w_k) @ self.v - self.wanted) ** 2))

    def statistics(self, w_q: Any, w_k: Any) -> growing.Statistics:
        """Return what growth reads of the backward."""
        weights = self._weights(w_q, w_k)
        off = (weights @ self.v - self.wanted) / self.wanted.size
        return growing.observe(self.y, softmax_backward(weights, off @ transpose(self.v)))

    def train(self, w_q: Any, w_k: Any, steps: int) -> tuple[Any, Any, list[float]]:
        """Return the weights after some steps of steepest descent, and the loss before each."""
        losses = []
        for _ in range(steps):
            losses.append(self.loss(w_q, w_k))
            n = self.statistics(w_q, w_k).gradient
            w_q, w_k = w_q - RATE * SCALE * n @ w_k, w_k - RATE * SCALE * transpose(n) @ w_q
        return w_q, w_k, losses


def figures() -> Iterator[tuple[str, Figure]]:
    """Yield the figure with its name."""
    figure = Figure(figsize=(11.0, 8.4), dpi=100, facecolor="white", layout="constrained")
    (values, weights), (steps, losses) = figure.subplots(2, 2)
    task = Task()
    w_q, w_k, before = task.train(_draw("w_q", 1, WIDTH, NARROW), _draw("w_k", 1, WIDTH, NARROW), STEPS)
    heads = growing.heads_of(w_q, w_k, scale=SCALE)
    planned = growing.plan(heads, task.statistics(w_q, w_k))
    _singular_values(values, planned)

    def grown(columns: int, amplitude: float) -> tuple[Any, Any]:
        return growing.grow(heads, planned, columns=columns, amplitude=amplitude)

    def loss_at(columns: int, amplitude: float) -> float:
        return task.loss(*grown(columns, amplitude))

    amplitude, ways = 0.0, np.linspace(0.0, 2.6, 60)
    for columns, colour, label in (
        (0, GREY, "no new column"),
        (1, ORANGE, "1 new column"),
        (NEW, RED, "2 new columns"),
    ):
        steps.plot(ways, [loss_at(columns, a) for a in ways], color=colour, label=label)
        if columns:
            slope = float(growing.slope_of(planned, columns))
            steps.plot(ways[:20], before[-1] + slope * ways[:20], color=colour, linewidth=1, linestyle=(0, (3, 3)))
            amplitude = growing.search(partial(loss_at, columns), slope)
            steps.plot(amplitude, loss_at(columns, amplitude), "o", color=colour)
    steps.set(xlabel="amplitude", ylabel="loss", title="How far: the loss by the amplitude", ylim=(0.0, None))
    steps.legend(frameon=False)

    new_q, new_k = grown(NEW, amplitude)
    _columns(weights, (w_q, new_q, w_k, new_k))
    *_, narrow = task.train(w_q, w_k, STEPS)
    *_, wide = task.train(new_q, new_k, STEPS)
    losses.semilogy(before + narrow, color=GREY, label=f"width {NARROW}")
    losses.semilogy(range(STEPS, 2 * STEPS), wide, color=RED, label=f"grown to width {NARROW + NEW}")
    losses.plot([STEPS, STEPS], [before[-1], wide[0]], color=RED, linestyle=":")
    losses.plot([STEPS, STEPS], [before[-1], wide[0]], "o", color=RED)
    losses.set(xlabel="step of training", ylabel="loss", title="What it brings: the loss while the head learns")
    losses.legend(frameon=False)
    yield "growing_idea", finished(figure)


def _singular_values(axes: Axes, planned: growing.Plan) -> None:
    places = np.arange(1, WIDTH + 1)
    axes.bar(places - 0.2, np.linalg.svdvals(planned.whole[0]), 0.4, color=BLUE, label="of the gradient")
    colours = [RED if n < NEW else "#f3b6b7" for n in range(WIDTH)]
    axes.bar(places + 0.2, planned.worth[0], 0.4, color=colours, label=f"of what {NARROW} columns cannot follow")
    axes.set(xlabel="singular value", title="What the gradient asks for", xticks=places)
    axes.legend(frameon=False)


def _columns(axes: Axes, weights: tuple[Any, ...]) -> None:
    """Show the columns of the weights side by side, the rows are the tokens' entries."""
    largest = max(float(np.max(np.abs(w))) for w in weights)
    at, ticks = 0, []
    for name, w in zip(("w_q before", "w_q after", "w_k before", "w_k after"), weights, strict=True):
        width = w.shape[2]
        extent = (at, at + width, WIDTH, 0)
        shown = axes.imshow(w[0], cmap="RdBu_r", vmin=-largest, vmax=largest, extent=extent, aspect="auto")
        if width > NARROW:
            axes.plot([at + NARROW] * 2, [0, WIDTH], color=TEXT, linewidth=2)
            axes.text(at + 0.5 * (NARROW + width), WIDTH + 0.2, "new", ha="center", va="top", color=RED)
        ticks.append((at + 0.5 * width, name))
        at += width + 1
    axes.set(xlim=(-0.3, at - 0.7), ylim=(WIDTH + 0.9, -0.1), title="Columns that are added", yticks=[])
    axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.figure.colorbar(shown, ax=axes, shrink=0.8)
