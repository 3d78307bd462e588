"""The figures of docs/experiments/sweeps.py, from its stored results.

- graph_energy_order.png: Kuramoto's order parameter over kappa, of his own system, and of double wells.
- higher_order_capacity.png: the share of keys whose value is found, by pairs, and the bytes that are kept.
- growing_bottleneck.png: psi over a training, whose queries and keys or whose values grow.
- koopman_trained.png: the largest eigenvalue of the operator of each query, before and after a training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from docs.experiments import sweeps
from docs.experiments.runs import found
from refattn.analysis.order import CRITICAL, kuramoto_limit
from refattn.analysis.spectrum import draw_unit_circle
from tools.draw.common import BLUE, GREEN, GREY, ORANGE, RED, TEXT, VIOLET, finished, panels

DASHED = (0, (4, 3))


def results(jobs: Any) -> dict[Any, dict[str, Any]]:
    """Return what the file says of some sweeps, by sweep."""
    return dict(zip(jobs, (line["result"] for line in found(jobs, sweeps.RESULTS)), strict=True))


def draw_order() -> Figure:
    """Draw R over kappa."""
    figure, (left, right) = panels()
    first, *wells = results(sweeps.agreements()).items()
    fine = np.linspace(0.0, max(sweeps.FREQUENCIES), 400)
    left.plot(fine, [kuramoto_limit(kappa) for kappa in fine], color=GREY, label="infinitely many nodes")
    left.plot(sweeps.FREQUENCIES, first[1]["order"], "o", color=BLUE, label=f"{sweeps.NODES} nodes")
    left.axvline(CRITICAL, color=RED, linewidth=1.2, linestyle=DASHED)
    left.text(CRITICAL + 0.05, 0.03, "2 / (pi g(0))", color=RED)
    left.set(xlabel="kappa", ylabel="R", title="Kuramoto: normal frequencies", ylim=(0.0, 1.05))
    for (job, result), colour in zip(wells, (RED, BLUE, VIOLET), strict=True):
        right.plot(
            sweeps.WELLS, result["order"], color=colour, label=f"{job.of}, all agree from {result['all agree from']}"
        )
        right.axvline(result["all agree from"], color=colour, linewidth=1.0, linestyle=DASHED)
    right.set(xlabel="kappa", ylabel="mean R at rest", title="Double wells: random starts")
    for axes in (left, right):
        axes.legend(frameon=False, loc="lower right")
    return finished(figure)


def draw_capacity() -> Figure:
    """Draw recall by the number of pairs, and how many pairs are held in how many bytes."""
    figure, (left, right) = panels()
    width, known = 32, results(sweeps.capacities())
    kinds = {(1, 1.0): GREEN, (2, 1.0): RED, (2, 3.0): ORANGE, (4, 1.0): VIOLET, (None, 1.0): BLUE}
    for (order, alpha), colour in kinds.items():
        name = "softmax" if order is None else f"order {order}, alpha = {alpha:g}"
        own = {job.width: x for job, x in known.items() if (job.order, job.alpha, job.delta) == (order, alpha, 0.0)}
        left.semilogx(sweeps.SIZES, own[width]["shares"], color=colour, label=name)
        kept = [(x["bytes"], x["pairs"]) for x in own.values() if x["pairs"]]
        right.loglog(*zip(*kept, strict=True), color=colour, marker="o", markersize=4, label=name)
    left.axhline(sweeps.RIGHT, color=TEXT, linewidth=1.0, linestyle=DASHED)
    left.set(xlabel="pairs", ylabel="share of right values", title=f"Heads of width {width}")
    title = f"Pairs with {100 * sweeps.RIGHT:g} % right, of widths 8 to 64"
    right.set(xlabel="bytes that a head keeps (float32)", ylabel="pairs", title=title)
    left.legend(frameon=False)
    return finished(figure)


def draw_bottleneck() -> Figure:
    """Draw psi over the steps, the mean of the seeds."""
    figure, both = panels()
    known = results(sweeps.widths())
    for axes, side in zip(both, sweeps.FIRST, strict=True):
        for way, colour in zip(sweeps.WAYS, (GREY, TEXT, ORANGE, BLUE), strict=True):
            curves = np.array([x["curve"] for job, x in known.items() if (job.side, job.way) == (side, way)])
            steps, psi, _ = curves.mean(axis=0).T
            axes.plot(steps, psi, color=colour, marker="o", markersize=3, label=way)
        axes.set(xlabel="step", ylabel="psi", ylim=(-0.02, 1.02), title=f"Width of {side}")
    both[1].legend(frameon=False)
    return finished(figure)


def draw_trained() -> Figure:
    """Draw the largest eigenvalues of queries before and after a training."""
    figure = Figure(figsize=(10.0, 4.6), dpi=100, facecolor="white")
    for axes, (job, result) in zip(figure.subplots(1, 2), results(sweeps.spectra()).items(), strict=True):
        draw_unit_circle(axes)
        for when, colour in (("fresh", GREY), ("trained", RED)):
            x, y = np.array([pair for layer in result[when] for pair in layer["some"]]).T
            axes.scatter(x, y, s=12, color=colour, alpha=0.6, label=when)
        axes.set(title=job.name, xlim=(-1.6, 1.6), ylim=(-1.4, 1.4))
    axes.legend(frameon=False, loc="upper left")
    return finished(figure)


def figures() -> Iterator[tuple[str, Figure]]:
    """Yield the figures by name."""
    yield "graph_energy_order", draw_order()
    yield "higher_order_capacity", draw_capacity()
    yield "growing_bottleneck", draw_bottleneck()
    yield "koopman_trained", draw_trained()
