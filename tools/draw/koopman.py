"""The figures of Koopman attention.

- koopman_idea.png: one query of two coordinates at work: its path, the operator that is fitted to its moves so far as a
  field of arrows from x to (K id)(x), and the next point; beside it what attention does to every point, and the
  operator that is fitted to a longer path, of attention alone. All of it is computed by the definition.
- koopman_updates.png: where queries of two coordinates move, from what they attend first, by plain attention again and
  again and by Koopman updates of both regularisations; and what both perturbations do as epsilon goes to 0.
- koopman_spectrum.png: the eigenvalues of the operators that are fitted to trajectories of queries, and how far each
  update moves a query.
- koopman_prediction.png: known systems as fitted operators predict them, as `refattn analyse prediction` draws it.

All numbers are those of `refattn.mechanisms.koopman`; nothing is drawn from a formula of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import refattn as ra
from refattn.analysis import figure as pictures
from refattn.analysis import prediction
from refattn.analysis.known_systems import SYSTEMS
from refattn.analysis.spectrum import COLOURS, designed, draw_eigenvalues, draw_unit_circle, draw_way, spectrum
from refattn.mechanisms.koopman import Stein, definition
from refattn.ops.plain import softmax
from tools.draw.common import finished, panels

UPDATES = 6


def turning() -> tuple[Any, Any, Any]:
    """Return a query, keys on two rings, and values that are the keys turned by 30 degrees: attention leads around."""
    angles = np.concatenate([np.arange(6) / 6, (np.arange(10) + 0.5) / 10]) * 2.0 * np.pi
    radii = np.asarray([1.6] * 6 + [3.2] * 10)[:, None]
    turn = np.deg2rad(30.0)
    k = radii * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    v = k @ np.asarray([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    return np.asarray([[[[3.0, -0.8]]]]), k[None, None], v[None, None]


def draw_idea() -> Figure:
    """Draw a query at work: after 1 and 2 moves, and what 6 moves of attention would tell."""
    figure = Figure(figsize=(10.0, 10.4), dpi=100, facecolor="white", layout="constrained")
    (everywhere, one), (two, longer) = figure.subplots(2, 2)
    q, k, v = turning()

    def attend(x: Any) -> Any:
        return softmax(x @ np.swapaxes(k, -1, -2) / np.sqrt(2.0)) @ v

    gram = definition.kernel(k, k) + 2e-8 * np.eye(k.shape[2])
    across = np.linspace(-3.6, 3.6, 15)
    grid = np.stack(np.meshgrid(across, across), axis=-1).reshape(1, 1, -1, 2)
    _field(everywhere, k, grid, attend(grid), "#777777")
    everywhere.plot(*q[0, 0, 0], "o", color=COLOURS[0], markersize=8, label="the query, $x_0$")
    everywhere.set_title("What attention does: from x to q'")
    alone = [q]
    for _ in range(6):
        alone.append(attend(alone[-1]))
    ways = (
        (one, definition.forward(q, k, v, updates=1)[1][5], "K of its 1 move"),
        (two, definition.forward(q, k, v, updates=2)[1][5], "K of its 2 moves"),
        (longer, alone, "K of 6 moves of attention alone"),
    )
    for axes, points, title in ways:
        attended = attend(points[-1])
        following, kept = definition.predict(np.stack([*points, attended], axis=3), k, gram, 0.1, 0.1)
        _, _, _, _, dual, _, _, once, *_ = kept
        sections = definition.kernel(grid, k)  # g of every point of the grid
        _field(axes, k, grid, sections @ np.swapaxes(dual[:, :, 0], -1, -2) @ once[:, :, 0], COLOURS[1])
        way = np.concatenate(points, axis=2)[0, 0]
        axes.plot(*way.T, "-o", color=COLOURS[0], markersize=7, linewidth=1.8, label="path so far")
        for n, x in enumerate(way):
            axes.annotate(f"$x_{n}$", x, xytext=(6, 6), textcoords="offset points", color=COLOURS[0], fontsize=13)
        read, reached = attended[0, 0, 0], following[0, 0, 0]
        axes.annotate("", reached, read, arrowprops={"arrowstyle": "-|>", "color": COLOURS[4], "lw": 2.0})
        axes.plot(*read, "s", color=COLOURS[0], fillstyle="none", markersize=10, label="q', what it attends")
        axes.plot(*reached, "*", color=COLOURS[4], markersize=16, label=f"the next point, $x_{len(points)}$")
        axes.set_title(f"{title}: from x to (K id)(x)")
    for axes in (everywhere, one, two, longer):
        axes.set(xlim=(-4.0, 4.0), ylim=(-5.2, 4.0), aspect="equal", xticks=[-3, 0, 3], yticks=[-3, 0, 3])
        axes.legend(frameon=False, fontsize=10, loc="lower center", ncols=2)
    return finished(figure)


def _field(axes: Axes, k: Any, starts: Any, ends: Any, colour: str) -> None:
    """Draw the keys, and a third of the way from each point to where it goes."""
    x, way = starts[0, 0].T, (ends - starts)[0, 0].T
    axes.quiver(*x, *way, color=colour, angles="xy", scale_units="xy", scale=3.0, width=0.004, alpha=0.6)
    axes.plot(*k[0, 0].T, "o", color="#b0b0b0", markersize=5, label="keys")


def draw_updates() -> Figure:
    """Draw trajectories, and the limits of the perturbations."""
    figure, (left, right) = panels()
    q, k, v = designed(5, 12, 2, seed=3)
    plain = [q]
    for _ in range(UPDATES):
        plain.append(ra.koopman.forward(plain[-1], k, v, updates=1)[0])
    ways = {"attention, again and again": plain}
    for tau, name in ((0.0, "Koopman, ridge to 0"), (1.0, "Koopman, ridge to the identity")):
        given: dict[str, Any] = {"updates": UPDATES, "perturbation": "identity", "fit": Stein(tau=tau)}
        ways[name] = list(ra.koopman.forward(q, k, v, **given)[1].trajectory)
    for (name, points), colour in zip(ways.items(), COLOURS[:3], strict=True):
        for query in range(q.shape[2]):
            draw_way(left, [x[0, 0, query] for x in points[1:]], colour, name if query == 0 else None)
    left.set(
        xlabel="first coordinate",
        ylabel="second coordinate",
        title=f"{UPDATES} updates of five queries, from the first (circles)",
    )
    left.legend(frameon=False, fontsize=9)
    q, k, v = designed(64, 16, 2, seed=3)
    phi = ra.koopman.forward(q, k, v, perturbation="identity(epsilon=0.0)")[0]
    sizes = np.logspace(-4, 1, 21)
    for perturbation, colour in (("identity", COLOURS[0]), ("shift", COLOURS[4])):
        gaps = []
        for size in sizes:
            found = inverted(q, k, v, perturbation, float(size))
            gaps.append(np.median([np.linalg.norm(x - phi[0, 0, n]) for n, x in found.items()]) if found else np.nan)
        label = f"{perturbation}: psi = " + ("pi + epsilon phi" if perturbation == "identity" else "phi + epsilon pi")
        right.loglog(sizes, gaps, color=colour, marker="o", markersize=3, label=label)
    right.set(xlabel="epsilon", title="Both perturbations")
    right.set_ylabel("median distance of the next query from phi(q')")
    right.legend(frameon=False)
    return finished(figure)


def inverted(q: Any, k: Any, v: Any, perturbation: str, epsilon: float) -> dict[int, Any]:
    """Return the next queries of those whose perturbation is inverted, by their place."""
    found = {}
    for n in range(q.shape[2]):
        try:
            out = ra.koopman.forward(q[:, :, n : n + 1], k, v, perturbation=f"{perturbation}(epsilon={epsilon})")[0]
        except ra.koopman.KoopmanInverseError:
            continue
        found[n] = out[0, 0, 0]
    return found


def draw_spectrum() -> Figure:
    """Draw eigenvalues of fitted operators, and how the steps of queries shrink."""
    figure, (left, right) = panels()
    q, k, v = designed(24, 16, 4, seed=3)
    draw_unit_circle(left)
    for ridge, colour in zip((1e-1, 1e-2, 1e-4), COLOURS, strict=False):
        found = spectrum(q, k, v, fit=Stein(ridge=ridge), updates=5, perturbation="identity(epsilon=0.01)")
        draw_eigenvalues(left, found.eigenvalues[-1], colour, f"ridge {ridge:g}")
    left.set(title="Eigenvalues of the fitted operators")
    left.legend(frameon=False, loc="upper left")
    for tau, ridge, colour in ((0.0, 0.1, COLOURS[0]), (0.0, 1.0, COLOURS[1]), (1.0, 0.1, COLOURS[4])):
        given: dict[str, Any] = {"updates": 8, "perturbation": "identity", "fit": Stein(ridge=ridge, tau=tau)}
        points = ra.koopman.forward(q, k, v, **given)[1].trajectory
        steps = [np.median(np.linalg.norm(b - a, axis=-1)) for a, b in zip(points[1:-1], points[2:], strict=True)]
        label = f"ridge {ridge:g} to " + ("0" if tau == 0.0 else "the identity")
        right.semilogy(range(2, 9), steps, color=colour, marker="o", markersize=4, label=label)
    right.set(xlabel="update", ylabel="median length of a step", title="How far an update moves a query")
    right.legend(frameon=False)
    return finished(figure)


def draw_prediction() -> Figure:
    """Draw how the operator of Koopman attention, EDMD and kernel EDMD predict known systems."""
    results = [prediction.predict(name) for name in SYSTEMS]
    picture = pictures.new_figure(*prediction.size_of(results))
    picture.dpi = 120
    prediction.draw(results, picture)
    return picture


def figures() -> Iterator[tuple[str, Figure]]:
    """Yield the figures by name."""
    for name, draw in (
        ("idea", draw_idea),
        ("updates", draw_updates),
        ("spectrum", draw_spectrum),
        ("prediction", draw_prediction),
    ):
        yield f"koopman_{name}", draw()
