"""Draw the figure of graph energy attention: docs/figures/graph_energy.png.

    python -m tools.draw_graph_energy

- left: the scores of 24 tokens as they flow, drawn together by the coupling and back to where they started by the
  anchor, with the threshold below which they are dropped.
- right: the energy above that of the equilibrium, step by step, of Euler's method with steps of 1/L, 2/L and 4/L, and
  of the discrete gradient with steps of 4/L and 100/L.

Both show what `refattn.mechanisms.graph_energy` computes; nothing is drawn from a formula of its own.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import refattn as ra
from refattn import counter

TARGET = Path(__file__).parents[1] / "docs" / "figures"
COLOURS = ("#3a7ca5", "#5b4b8a", "#d7191c", "#2a9d55", "#e6872b")
TEXT = "#222222"
TOKENS, WIDTH, STEPS = 24, 16, 16


def tokens() -> list[Any]:
    """Return q, k and v of one head, (1, 1, 24, 16)."""
    return [counter.normal((1, 1, TOKENS, WIDTH), seed=3, purpose=f"figure.{name}") for name in "qkv"]


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
    runs = [("euler", 1.0), ("euler", 2.0), ("euler", 4.0), ("discrete_gradient", 4.0), ("discrete_gradient", 100.0)]
    for (integrator, times), colour in zip(runs, COLOURS, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of steps beyond 2/L, which are what is shown
            options: dict[str, Any] = {"integrator": integrator, "step": times * step, "steps": STEPS, "kappa": 4.0}
            _, saved = ra.graph_energy.forward(*tokens(), **options)
        above = ra.graph_energy.energy(saved)[0, 0] - lowest
        name = {"euler": "Euler", "discrete_gradient": "discrete gradient"}[integrator]
        axes.semilogy(np.maximum(above, 1e-16), color=colour, linewidth=1.6, label=f"{name}, {times:g}/L")
    axes.set(xlabel="step", title="Energy above the equilibrium")
    axes.set_ylabel("energy")
    axes.legend(frameon=False)


def main() -> None:
    """Compute and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET, help="the folder to write to (docs/figures)")
    path = parser.parse_args().out / "graph_energy.png"
    figure = Figure(figsize=(12.0, 4.8), dpi=100, facecolor="white")
    left, right = figure.subplots(1, 2)
    draw_scores(left)
    draw_energy(right)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_color(TEXT)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    print(path)


if __name__ == "__main__":
    main()
