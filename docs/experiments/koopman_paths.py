"""How long a query is after an update of Koopman attention, and how much of it the operator has seen.

An update attends, which gives q', and then applies the operator that was fitted to the path. Two numbers, medians over
queries, say what becomes of q':

- the length of the next point, in units of that of q';
- how much of q' the operator has seen: the length of the part of kernel(q', .) that is a sum of the kappa_l, of which
  there is one for each transition, in units of the length of kernel(q', .).

What it has not seen goes to 0, or with tau = 1 stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import refattn as ra
from docs.experiments.runs import Run
from docs.experiments.training import trained
from refattn import equations, model, philox

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Path:
    """One update of random queries, keys and values, of `HEADS` heads.

    Attributes
    ----------
    transitions
        How many moves the operator is fitted to.
    ridge, fit, tau, kernel
        Options of the core.
    keys, width
        Queries, keys and values, as many of each; coordinates of each.
    path
        "own": every update but the first has an operator. "attention": the last one alone, so that its operator is
        fitted to what attention does, again and again.
    """

    transitions: int
    ridge: float = 0.1
    fit: str = "separable"
    tau: int = 0
    kernel: str = "rbf"
    keys: int = 32
    width: int = 16
    path: str = "own"

    text = False

    def to_json(self) -> dict[str, Any]:
        """Return all that it depends on."""
        return {"path of": asdict(self)}

    def result(self) -> dict[str, Any]:
        """Measure."""
        q, k, v = (philox.normal((1, HEADS, self.keys, self.width), seed=0, purpose=name) for name in "qkv")
        attended, replaced = q, []
        for _ in range(self.transitions + 1 if self.path == "attention" else 0):
            attended, _ = ra.softmax.forward(attended, k, v)
            replaced.append(attended)
        points = iter(replaced[1:-1])  # x_1 has no operator in any case, the last point keeps its own
        with ra.trace() as values, equations.mutate("KOOP.15", lambda point: next(points, point)):
            ra.koopman.forward(
                *(q, k, v),
                updates=self.transitions + 1,
                kernel=self.kernel,
                fit=f"{self.fit}(ridge={self.ridge}, tau={self.tau})",
                implementation="dense",
            )
        point, place, inner = (values.passes(f"KOOP.{id}")[-1] for id in READ)
        return measured(values.passes("KOOP.4")[-1], point, place, inner, 0.0 if self.kernel == "linear" else 1.0)

    def told(self, result: Mapping[str, Any]) -> str:
        """Return what came of it in a few words."""
        return f"{self}: {result['length']} of the length, {result['seen']} seen"


HEADS = 8

READ = ("15", "section", "8")
"""Equations of the general code that are read: the next point, kappa(q'), and kappa at the starts of moves."""


@dataclass(frozen=True)
class TrainedPath:
    """The same of each layer of a model that was trained, on the first sequences of what its task holds out."""

    run: Run

    text = True

    def to_json(self) -> dict[str, Any]:
        """Return the run."""
        return {"path of": self.run.to_json()}

    def result(self) -> dict[str, Any]:
        """Train, and measure."""
        params, found = trained(self.run.mechanism, self.run.options, self.run.task, self.run.plan, self.run.seed)
        with ra.trace() as values:
            model.forward(params, next(iter(self.run.task.held_out())).inputs[:SEQUENCES])
        layers = []
        for n in range(self.run.plan.layers):
            weight = float(np.exp(params.at(n).block.log_weight[0]))
            point, place, inner = (values.passes(f"KOOP.{id}")[n] for id in READ)
            layers.append(measured(values.passes("KOOP.4")[2 * n + 1], point, place, inner, weight))
        return {"bits": found["bits"], "layers": layers, "seconds": found["seconds"]}

    def told(self, result: Mapping[str, Any]) -> str:
        """Return what came of it in a few words."""
        return f"{self.run.told({**result, 'diverged': None, 'accuracy': 0.0})}: {result['layers']}"


SEQUENCES = 8


def measured(attended: Floats, point: Floats, place: Floats, inner: Floats, weight: float) -> dict[str, float]:
    """Return the medians, for q', the next point, kappa(q') and Z, and the kernel's weight."""
    longest = np.linalg.norm(attended, axis=-1)
    values, vectors = np.linalg.eigh(inner)
    along = (np.swapaxes(vectors, -1, -2) @ place[..., None])[..., 0]
    known = values > 1e-10 * values[..., -1:]
    squares = np.sum(np.where(known, along**2 / np.where(known, values, 1.0), 0.0), axis=-1)
    seen = np.sqrt(squares / (longest**2 + weight))  # |kernel(q', .)|^2 = kernel(q', q')
    return {
        "length": round(float(np.median(np.linalg.norm(point, axis=-1) / longest)), 4),
        "seen": round(float(np.median(seen)), 4),
    }
