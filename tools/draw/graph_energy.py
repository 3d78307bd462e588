"""The figure of graph energy attention.

- left: the scores of 24 tokens as they flow, drawn together by the coupling and back to where they started by the
  anchor, with the threshold below which they are dropped.
- right: the energy above that of the equilibrium, step by step, of Euler's method with steps of 1/L, 2/L and 4/L.

Both show what `refattn.mechanisms.graph_energy` computes; nothing is drawn from a formula of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import refattn as ra
from refattn import philox
from tools.draw.common import BLUE, RED, VIOLET, finished, panels

COLOURS = (BLUE, VIOLET, RED)
TOKENS, WIDTH, STEPS = 24, 16, 16


def tokens() -> list[Any]:
    """Return q, k and v of one head, (1, 1, 24, 16)."""
    return [philox.normal((1, 1, TOKENS, WIDTH), seed=3, purpose=f"figure.{name}") for name in "qkv"]


def draw_scores(axes: Axes) -> None:
    """Draw the scores of the tokens from the start to the last step."""
    _, saved = ra.graph_energy.forward(*tokens(), steps=STEPS)
    states = np.stack([x[0, 0, :, 0] for x in saved.inner.flow.states])
    for scores in states.T:
        colour = COLOURS[0] if scores[-1] >= 0.4 else "#b0b0b0"
        axes.plot(np.arange(STEPS + 1), scores, color=colour, linewidth=1.3)
    axes.axhline(0.4, color=COLOURS[2], linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(STEPS + 0.3, 0.4, "tau", ha="left", va="center", color=COLOURS[2])
    axes.set(xlabel="step", title="Scores of tokens", ylim=(0.0, 1.0))
    axes.set_ylabel("score")


def draw_energy(axes: Axes) -> None:
    """Draw the energy above its smallest value."""
    _, rest = ra.graph_energy.forward(*tokens(), step=1.0 / 9.0, steps=200, kappa=4.0)  # 1 / L
    lowest = float(ra.graph_energy.energy(rest)[0, 0, -1])
    step = rest.options.step
    for times, colour in zip((1.0, 2.0, 4.0), COLOURS, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of steps beyond 2/L, which are what is shown
            _, saved = ra.graph_energy.forward(*tokens(), step=times * step, steps=STEPS, kappa=4.0)
        above = ra.graph_energy.energy(saved)[0, 0] - lowest
        axes.semilogy(np.maximum(above, 1e-16), color=colour, linewidth=1.6, label=f"Euler, {times:g}/L")
    axes.set(xlabel="step", title="Energy above the equilibrium")
    axes.set_ylabel("energy")
    axes.legend(frameon=False)


def figures() -> Iterator[tuple[str, Figure]]:
    """Yield the figure with its name."""
    figure, (left, right) = panels()
    draw_scores(left)
    draw_energy(right)
    yield "graph_energy", finished(figure)
