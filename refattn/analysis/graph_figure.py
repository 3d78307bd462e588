"""The pictures of the studies of flows on graphs: equilibria, and bifurcations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from refattn.analysis.continuation import Branch
from refattn.analysis.diagram import Diagram
from refattn.analysis.equilibria import Equilibria, Equilibrium
from refattn.analysis.figure import new_figure, save
from refattn.analysis.graph_flow import GraphFlow
from refattn.analysis.graphs import Floats
from refattn.analysis.landscape import landscape_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 3
"""The most stable equilibria that are drawn on the graph."""

MARKERS = {"fold": "s", "transcritical": "X", "pitchfork": "D", "multiple": "P", "degenerate": "v", "hopf": "^"}


def draw_equilibria(found: Equilibria, path: Path) -> None:
    """Draw the energy landscape, all equilibria by energy, and up to three stable ones on the graph."""
    figure = new_figure(11.0, 7.2)
    top, bottom = _halves(figure, 1.45)
    left, right = top.subplots(1, 2)
    draw_landscape(left, found)
    _by_energy(right, found)
    for axes, one in zip(bottom.subplots(1, SHOWN), [*_apart(found), *[None] * SHOWN][:SHOWN], strict=True):
        if one is None:
            axes.set_axis_off()
            continue
        draw_graph(axes, found.flow, one.x)
        level = "" if one.energy is None else f", E = {one.energy + 0.0:.4f}"
        axes.set_title(f"{one.stability.label}{level}", fontsize=10)
    save(figure, path)


def draw_diagram(diagram: Diagram, path: Path, node: int = 0) -> None:
    """Draw the score of a node over the parameter, stable branches solid, unstable ones dashed; landscape and graph."""
    figure = new_figure(11.0, 8.0)
    top, bottom = _halves(figure, 1.5)
    axes = top.subplots()
    _lines(axes, diagram, node)
    for one in diagram.bifurcations:
        axes.plot(one.at, one.x[node], MARKERS[one.kind], color="tab:red", markersize=7, zorder=3)
    _legend(axes, diagram)
    axes.set(xlabel=diagram.parameter, ylabel=f"x of node {node}", xlim=(diagram.low, diagram.high))
    first, last, graph = bottom.subplots(1, 3)
    for panel, found in ((first, diagram.sampled[0]), (last, diagram.sampled[-1])):
        draw_landscape(panel, found)
        panel.set_title(f"energy, {diagram.parameter} = {getattr(found.flow, diagram.parameter):.3g}", fontsize=10)
    draw_graph(graph, diagram.flow, None)
    graph.set_title("graph", fontsize=10)
    save(figure, path)


def draw_landscape(axes: Axes, found: Equilibria) -> None:
    """Draw the energy around the equilibria: filled circles are stable, others have unstable directions."""
    shape = landscape_of(found)
    if shape is None:
        axes.text(0.5, 0.5, "no energy, or no isolated equilibrium", ha="center", va="center")
        axes.set_axis_off()
        return
    if len(shape.axes) == 1:
        axes.plot(shape.coordinates[0], shape.energy, color="0.5")
        axes.set(xlabel=shape.names[0], ylabel="energy")
    else:
        # Levels close to each other where the energy is low: the wells of a steep landscape would not be seen.
        marked = max((energy for _, energy, _ in shape.marks), default=float(np.max(shape.energy)))
        low = float(np.min(shape.energy))
        top = float(np.max(shape.energy))
        part = 1.6 * (marked - low) / (top - low)
        high = low + (top - low) * (min(1.0, part) if part > 1e-3 else 0.1)
        axes.contourf(*shape.coordinates, shape.energy, np.linspace(low, high, 25), cmap="viridis", extend="max")
        axes.set(xlabel=shape.names[0], ylabel=shape.names[1], aspect="equal")
    axes.set_title("energy", fontsize=10)
    for at, energy, negative in shape.marks:
        point = (at[0], energy) if len(at) == 1 else at
        axes.plot(*point, **_style(negative))


def draw_graph(axes: Axes, flow: GraphFlow, x: Floats | None) -> None:
    """Draw the graph on a circle, its nodes coloured by their scores where there are some."""
    angles = np.pi / 2.0 - 2.0 * np.pi * np.arange(flow.n) / flow.n
    spots = np.column_stack([np.cos(angles), np.sin(angles)])
    largest = float(np.max(np.abs(flow.matrix), initial=0.0))
    for i, j in np.argwhere(np.triu((flow.matrix != 0.0) | (flow.matrix.T != 0.0))):
        width = 0.5 + 1.5 * float(max(abs(flow.matrix[i, j]), abs(flow.matrix[j, i]))) / largest
        axes.plot(*spots[[i, j]].T, color="0.7", linewidth=width, zorder=1)
    bound = 0.5 * flow.period if flow.period is not None else None
    if x is None:
        axes.scatter(spots[:, 0], spots[:, 1], s=180, c="white", edgecolors="black", zorder=2)
    else:
        size = bound or max(1e-9, float(np.max(np.abs(x))))
        colours = axes.scatter(
            spots[:, 0],
            spots[:, 1],
            s=180,
            c=x,
            cmap="coolwarm" if bound is None else "twilight",
            vmin=-size,
            vmax=size,
            edgecolors="black",
            zorder=2,
        )
        axes.figure.colorbar(colours, ax=axes, shrink=0.8, label="score")
    if flow.n <= 30:
        for node, spot in enumerate(spots):
            axes.annotate(str(node), 1.25 * spot, ha="center", va="center", fontsize=8)
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal")
    axes.set_axis_off()


def _halves(figure: Figure, ratio: float) -> tuple[Any, Any]:
    """Return an upper and a lower part, `ratio` times as high, in which to draw."""
    parts: Any = figure.subfigures(2, 1, height_ratios=(ratio, 1.0))
    return parts[0], parts[1]


def _by_energy(axes: Axes, found: Equilibria) -> None:
    """Draw each isolated equilibrium by its energy and its number of unstable directions."""
    for n, one in enumerate(found.isolated):
        axes.plot(n + 1 if one.energy is None else one.energy, one.stability.negative, **_style(one.stability.negative))
    axes.locator_params(axis="y", integer=True)
    axes.set(xlabel="energy" if found.flow.balance is not None else "equilibrium", ylabel="unstable directions")
    count, stable = len(found.isolated), len(found.stable)
    axes.set_title(f"{count} isolated equilibria found, {stable} stable (filled)", fontsize=10)


def _style(negative: int) -> dict[str, Any]:
    fill = "tab:red" if negative == 0 else "none"
    return {"marker": "o", "markersize": 7, "linestyle": "none", "markerfacecolor": fill, "markeredgecolor": "tab:red"}


def _apart(found: Equilibria) -> list[Equilibrium | None]:
    """Return stable equilibria of different energies, the lowest first."""
    shown: list[Equilibrium] = []
    for one in found.stable:
        if all(abs((one.energy or 0.0) - (other.energy or 0.0)) > 1e-6 for other in shown):
            shown.append(one)
    return [*shown]


def _lines(axes: Axes, diagram: Diagram, node: int) -> None:
    """Draw all branches in pieces of one stability and one direction; what would lie on another is left out."""
    pieces: list[tuple[bool, Floats, Floats]] = []
    for branch in diagram.branches:
        for piece in _pieces(branch):
            at, x, stable = branch.at[piece], branch.x[piece, node], bool(branch.unstable[piece][0] == 0)
            order = slice(None) if at[0] <= at[-1] else slice(None, None, -1)
            pieces.append((stable, at[order], x[order]))
    pieces.sort(key=lambda piece: piece[1][0] - piece[1][-1])
    for n, (stable, at, x) in enumerate(pieces):
        # Dashes of several that lie on each other would look like a line.
        if not any(other[0] == stable and _lies_on(at, x, *other[1:]) for other in pieces[:n]):
            axes.plot(at, x, "-" if stable else "--", color="tab:blue" if stable else "0.5", linewidth=1.4)


def _pieces(branch: Branch) -> list[slice]:
    """Return the pieces of a branch; each goes on to the first point of the next."""
    changes = np.diff((branch.unstable == 0).astype(int)) != 0
    turns = np.zeros_like(changes)
    turns[1:] = np.diff(np.sign(np.diff(branch.at))) != 0.0
    ends = [0, *(np.flatnonzero(changes | turns) + 1).tolist(), len(branch.at)]
    return [slice(first, last + 1) for first, last in zip(ends[:-1], ends[1:], strict=True)]


def _lies_on(at: Floats, x: Floats, other_at: Floats, other: Floats) -> bool:
    """Tell whether a piece over a rising parameter cannot be told from a part of another."""
    longer = max(other_at[0] - at[0], at[-1] - other_at[-1])
    return bool(longer < 0.03 and np.max(np.abs(np.interp(at, other_at, other) - x)) < 0.01)


def _legend(axes: Axes, diagram: Diagram) -> None:
    axes.plot([], [], "-", color="tab:blue", label="stable")
    axes.plot([], [], "--", color="0.5", label="unstable")
    for kind in dict.fromkeys(one.kind for one in diagram.bifurcations):
        axes.plot([], [], MARKERS[kind], color="tab:red", label=kind)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=8)
