"""The picture of `flow`: particles with their ellipses, energies, and the axes of the ellipses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from refattn.analysis.figure import new_figure, save
from refattn.analysis.flow import SHOWN, Course, Flow
from refattn.analysis.particles import Matrix

COLOURS = {"classical": "#555555", "accelerated": "#d7191c"}
TINY = 1e-24
"""The least square of a deviation that is drawn: what rounding leaves of smaller ones means nothing."""

CIRCLE = np.stack([np.cos(np.linspace(0.0, 2.0 * np.pi, 181)), np.sin(np.linspace(0.0, 2.0 * np.pi, 181))])


def draw(flow: Flow, path: Path) -> None:
    """Draw both flows side by side, and below them their energies and the axes of their ellipses."""
    figure = new_figure(11.0, 8.6)
    upper, lower = figure.subplots(2, 2)
    for axes, (name, course) in zip(upper, flow.courses.items(), strict=True):
        _particles(axes, flow.times, course)
        axes.set(title=f"{name}: particles, and ellipses of two deviations", aspect="equal")
    ranges = np.asarray([(axes.get_xlim(), axes.get_ylim()) for axes in upper])
    for axes in upper:
        axes.set(xlim=(ranges[:, 0].min(), ranges[:, 0].max()), ylim=(ranges[:, 1].min(), ranges[:, 1].max()))
    for name, course in flow.courses.items():
        lower[0].plot(flow.times, course.energy, color=COLOURS[name], label=name)
        spread = np.sqrt(np.maximum(np.linalg.eigvalsh(course.ellipses()[1]), TINY))
        lower[1].plot(flow.times, spread[:, 1], color=COLOURS[name], label=f"{name}, longer")
        lower[1].plot(flow.times, spread[:, 0], color=COLOURS[name], linestyle="--", label=f"{name}, shorter")
    total = flow.courses["accelerated"].total
    lower[0].plot(flow.times, total, color=COLOURS["accelerated"], linestyle=":", label="accelerated, with kinetic")
    lower[0].set(yscale="log", xlabel="time", title="energy of a particle above the least one")
    lower[1].set(yscale="log", xlabel="time", title="deviations along the axes of the ellipse")
    for axes in lower:
        axes.legend(frameon=False, fontsize=9)
    for axes in (*upper, *lower):
        axes.spines[["top", "right"]].set_visible(False)
    c = flow.damping
    name = "linear attention" if flow.system == "linear" else "softmax attention"
    figure.suptitle(f"{name}, {flow.particles} particles, damping {c.c_log:g}/t + {c.c_lin:g}")
    save(figure, path)


def _particles(axes: Any, times: Matrix, course: Course) -> None:
    mean, covariance = course.ellipses()
    last = SHOWN[-1]
    for particle in range(min(course.x.shape[1], 40)):
        axes.plot(*course.x[: last + 1, particle].T, color="#c8c8c8", linewidth=0.5, zorder=0)
    for index, shade in zip(SHOWN, (0.15, 0.4, 0.65, 0.9), strict=True):
        colour = (0.05 + 0.15 * shade, 0.75 - 0.65 * shade, 0.55 + 0.1 * shade)
        axes.scatter(*course.x[index].T, s=7, color=colour, alpha=0.6, linewidths=0)
        spread, turn = np.linalg.eigh(covariance[index])
        outline = mean[index][:, None] + 2.0 * (turn * np.sqrt(np.maximum(spread, 0.0))) @ CIRCLE
        axes.plot(*outline, color=colour, linewidth=1.6, label=f"t = {times[index]:g}")
    axes.legend(frameon=False, fontsize=9)
