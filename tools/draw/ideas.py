"""What two mechanisms are about: softmax attention and linear recurrences.

- softmax_idea.png: the weights of one query at three scales, and where its output lies as the scale grows.
- delta_idea.png: what the state holds for one key, after it was written, while others are written, and after it was
  written again, by four of the six rules.

Both show what the mechanisms compute; nothing is drawn from a formula of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

import refattn as ra
from refattn import philox
from tools.draw.common import BLUE, ORANGE, RED, VIOLET

COLOURS = (BLUE, ORANGE, RED, VIOLET)
SIZE = (10.0, 4.0)
TOKENS, AGAIN, WIDTH = 40, 20, 16


def softmax() -> Figure:
    """Return the figure of softmax attention."""
    keys = philox.normal((8, 2), seed=5, purpose="idea.keys")
    query = np.asarray([1.0, 0.3])
    figure = Figure(figsize=SIZE, dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)

    def attend(scale: float) -> tuple[np.ndarray, np.ndarray]:
        with ra.trace() as t:
            out, _ = ra.softmax.forward(query[None, None, None], keys[None, None], keys[None, None], scale=scale)
        return t["SM.4"][0, 0, 0], out[0, 0, 0]

    for n, scale in enumerate((0.3, 1.0, 4.0)):
        left.bar(np.arange(8) + 0.27 * (n - 1), attend(scale)[0], 0.27, color=COLOURS[n], label=f"scale {scale:g}")
    way = np.stack([attend(scale)[1] for scale in np.geomspace(1e-3, 100.0, 200)])
    right.scatter(*keys.T, color="0.6", label="values, which are the keys here")
    right.annotate("", query, (0.0, 0.0), arrowprops={"arrowstyle": "->", "color": COLOURS[3]})
    right.text(*(query + 0.05), "query", color=COLOURS[3])
    right.plot(*way.T, color=COLOURS[0], label="the output as the scale grows")
    right.plot(*way[0], "o", color=COLOURS[0])
    left.set(title="Weights of one query", xlabel="key", ylabel="weight")
    right.set(title="Where its output lies", aspect="equal")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
    return figure


def delta() -> Figure:
    """Return the figure of linear recurrences."""
    keys = philox.normal((TOKENS, WIDTH), seed=1, purpose="idea.keys")
    values = philox.normal((TOKENS, WIDTH), seed=2, purpose="idea.values")
    keys[AGAIN] = keys[0]
    old, new = values[0].copy(), values[AGAIN] - values[0] * (values[AGAIN] @ values[0]) / (values[0] @ values[0])
    values[AGAIN] = new
    one, decay = np.ones((1, 1, TOKENS)), np.full((1, 1, TOKENS), np.log(0.95))
    rules = {
        "linear": {},
        "gated": {"log_decay": decay},
        "delta": {"beta": one},
        "gated delta": {"beta": one, "log_decay": decay},
    }
    figure = Figure(figsize=SIZE, dpi=110, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    asked = np.broadcast_to(keys[0], keys.shape)[None, None]
    for n, (name, options) in enumerate(rules.items()):
        out, _ = ra.delta.forward(asked, keys[None, None], values[None, None], scale=1.0, qk_norm=True, **options)
        for part, value in zip(axes, (old, new), strict=True):
            part.plot(1 + np.arange(TOKENS), out[0, 0] @ value / (value @ value), color=COLOURS[n], label=name)
    for part, title in zip(axes, ("its first value", "its second value"), strict=True):
        part.axvline(AGAIN + 1, color="0.6", linestyle=":")
        part.set(title=f"How much of {title} the state holds", xlabel="token")
    axes[0].set(ylabel="part of it")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def figures() -> Iterator[tuple[str, Figure]]:
    """Yield both by name."""
    yield "softmax_idea", softmax()
    yield "delta_idea", delta()
