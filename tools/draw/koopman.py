"""The figures of Koopman attention.

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
from matplotlib.figure import Figure

import refattn as ra
from refattn.analysis import figure as pictures
from refattn.analysis import prediction
from refattn.analysis.known_systems import SYSTEMS
from refattn.analysis.spectrum import COLOURS, designed, draw_eigenvalues, draw_unit_circle, draw_way, spectrum
from refattn.mechanisms.koopman import Stein
from tools.draw.common import finished, panels

UPDATES = 6


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
        ("updates", draw_updates),
        ("spectrum", draw_spectrum),
        ("prediction", draw_prediction),
    ):
        yield f"koopman_{name}", draw()
