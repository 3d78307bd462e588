"""The figures of higher-order attention.

- higher_order_weights.png: exp(s) and its Taylor polynomials over the scores that layer normalisation allows at
  alpha = 3, for widths 16 and 64, and the weights that are left of order 2 where delta is subtracted.
- higher_order_error.png: how far the output is from softmax attention of the same scores, by order and alpha, with the
  bound that holds for any values.

Both show what `refattn.mechanisms.higher_order` computes; nothing is drawn from a formula of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import refattn as ra
from refattn import philox
from tools.draw.common import BLUE, GREEN, GREY, ORANGE, RED, TEXT, VIOLET, finished, panels

COLOURS = (RED, ORANGE, BLUE, VIOLET, GREEN)


def weights(s: Any, **options: Any) -> Any:
    """Return the weights of keys with scores s: one query, and keys in its direction, without layer normalisation."""
    query, keys = np.ones((1, 1, 1, 1)), s.reshape(1, 1, -1, 1)
    with ra.trace() as t:
        ra.higher_order.forward(query, keys, keys, alpha=1.0, layer_norm=False, **options)
    return t["HOL.4"].reshape(-1)


def draw_weights() -> Figure:
    """Draw the weight of a key as a function of its score."""
    figure, (left, right) = panels()
    s = np.linspace(-8 / 3, 8 / 3, 401)
    left.plot(s, np.exp(s), color=TEXT, linewidth=2.5, label="exp(s)")
    for order, colour in zip((1, 2, 3, 4), COLOURS, strict=False):
        left.plot(s, weights(s, order=order, normaliser="signed"), color=colour, linewidth=1.8, label=f"order {order}")
    for width in (16, 64):
        for sign in (-1, 1):
            left.axvline(sign * math.sqrt(width) / 3, color="#bbbbbb", linewidth=1, linestyle=(0, (4, 4)), zorder=0)
        left.text(math.sqrt(width) / 3 - 0.05, -1.2, f"d = {width}", ha="right", color=GREY, fontsize=10)
    left.set(xlim=(-2.9, 2.9), ylim=(-1.6, 9.0), xlabel="score s", title="The polynomial in place of the exponential")
    left.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.05, 1.0))
    for delta, colour in zip((0.0, 0.5, 1.0), COLOURS[1:], strict=False):
        found = weights(s, normaliser=f"signed(delta={delta})")
        right.plot(s, found, color=colour, linewidth=1.8, label=f"delta = {delta:g}")
    right.set(xlim=(-2.9, 2.9), ylim=(-1.0, 4.0), xlabel="score s", title="Order 2 with delta subtracted")
    right.legend(frameon=False, loc="upper left")
    for axes in (left, right):
        axes.axhline(0.0, color="#bbbbbb", linewidth=1, zorder=0)
        axes.set_ylabel("weight before it is divided")
    return finished(figure)


def distances(alpha: float, orders: range) -> tuple[list[float], list[float]]:
    """Return by order the largest distance of an output from softmax attention, and its bound."""
    q, k, v = (philox.normal((1, 4, 64, 16), seed=0, purpose=f"figure.{name}") for name in "qkv")
    found, bound = [], []
    for order in orders:
        with ra.trace() as t:
            out, _ = ra.higher_order.forward(q, k, v, order=order, alpha=alpha, normaliser="signed(eps=1e-3)")
        exact = np.exp(t["HOL.3"])
        exact = exact @ v / exact.sum(axis=-1, keepdims=True)
        b = float(np.abs(t["HOL.3"]).max())
        rho = b ** (order + 1) * math.exp(b) / math.factorial(order + 1)
        found.append(float(np.abs(out - exact).max()))
        bound.append(2.0 * rho / (1.0 - rho) * float(np.abs(v).max()) if rho < 1.0 else math.nan)
    return found, bound


def draw_error() -> Figure:
    """Draw the distance to softmax attention by order, and by alpha for order 2."""
    figure, (left, right) = panels()
    orders = range(21)
    for alpha, colour in zip((1.0, 2.0, 3.0), COLOURS, strict=False):
        found, bound = distances(alpha, orders)
        left.semilogy(orders, found, color=colour, marker="o", markersize=4, linewidth=1.5, label=f"alpha = {alpha:g}")
        left.semilogy(orders, bound, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
    left.plot([], [], color=GREY, linewidth=1.2, linestyle=(0, (4, 3)), label="bound")
    left.set(xlabel="order", ylim=(1e-17, 1e3), xticks=range(0, 21, 4), title="Distance to softmax attention, width 16")
    left.set_ylabel("largest difference of an output")
    left.legend(frameon=False)
    alphas = np.linspace(1.0, 6.0, 26)
    for width, colour in zip((16, 64), COLOURS[2:], strict=False):
        q, k, v = (philox.normal((1, 4, 256, width), seed=0, purpose=f"figure.{name}") for name in "qkv")
        errors, means = [], []
        for alpha in alphas:
            with ra.trace() as t:
                out, _ = ra.higher_order.forward(q, k, v, alpha=float(alpha))
            exact = np.exp(t["HOL.3"])
            exact = exact @ v / exact.sum(axis=-1, keepdims=True)
            mean = np.mean(v, axis=2, keepdims=True)
            errors.append(np.linalg.norm(out - exact) / np.linalg.norm(exact))
            means.append(np.linalg.norm(mean - exact) / np.linalg.norm(exact))
        right.semilogy(alphas, errors, color=colour, linewidth=1.8, label=f"order 2, width {width}")
        right.semilogy(
            alphas, means, color=colour, linewidth=1.2, linestyle=(0, (1, 2)), label=f"the mean, width {width}"
        )
    right.set(xlabel="alpha", title="What alpha buys, and what is left to tell keys apart")
    right.set_ylabel("relative error of the output")
    right.legend(frameon=False)
    return finished(figure)


def figures() -> Iterator[tuple[str, Figure]]:
    """Yield the figures by name."""
    yield "higher_order_weights", draw_weights()
    yield "higher_order_error", draw_error()
