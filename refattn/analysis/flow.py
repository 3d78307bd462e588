"""Attention with momentum beside attention without, as flows of the same particles: which energy is reached when.

Two energies with a least value, in two dimensions. Linear attention with a negative definite V: the particles gather at
0, where the kernel vanishes, so that without momentum the energy falls like 1/t. Softmax attention with a potential
that holds the particles against its attraction, steep in one direction and flat in the other.

A flow without momentum has no time scale of its own: its time may be read at another speed. That the times below can be
compared at all is that both flows have the same kernel, and that a step of either asks for attention once; the calls of
explicit steps of one size are therefore counted beside them.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its comparison of both flows; energies and numbers are chosen here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from refattn import philox
from refattn.analysis.flow_steps import steps
from refattn.analysis.particles import (
    Damping,
    Exponential,
    Linear,
    Matrix,
    System,
    accelerate,
    attention,
    descend,
)
from refattn.args import check_choice

SHARES = (0.5, 0.1, 0.03, 0.01)
"""Shares of the first energy above the least one, that are waited for."""

SYSTEMS: dict[str, System] = {
    "linear": Linear(np.diag([1.0, 0.6]), np.diag([-1.0, -0.15])),
    "exponential": Exponential(np.diag([0.3, 0.05]), np.eye(2), np.diag([1.0, 0.15])),
}

POINTS = 401
"""Times at which the flows are looked at."""

EARLIEST, LATEST = 1e-6, 1e6
"""Between which times a flow may end."""

MOST_STEPS = 100_000
"""Explicit steps that are counted at most."""

MOST_DAMPED = 1e5
"""The integral of either damping up to the end, at most: the solver takes a step for each few of it."""

SHOWN = (0, 20, 60, 150)
"""Which of them are drawn with their particles, out of `POINTS`."""


@dataclass(frozen=True)
class Course:
    """One flow.

    Attributes
    ----------
    x
        The particles (times, N, 2).
    energy
        The potential energy of a particle above the least one, at every time.
    total
        The same with the kinetic energy.
    reached
        By share of the first energy: the time when it is reached first, or None.
    calls
        The same for explicit steps of one size: the calls of the oracle.
    turned
        How far the inner products of whitened particles are from those at first, as a share of these, at the third of
        the times that are drawn: 0 where an elliptical law stays one.
    """

    x: Matrix
    energy: Matrix
    total: Matrix
    reached: dict[float, float | None]
    calls: dict[float, int | None]
    turned: float

    def ellipses(self) -> tuple[Matrix, Matrix]:
        """Return the mean (times, 2) and the covariance (times, 2, 2) of the particles."""
        centred = self.x - self.x.mean(axis=1, keepdims=True)
        return self.x.mean(axis=1), np.swapaxes(centred, 1, 2) @ centred / self.x.shape[1]


@dataclass(frozen=True)
class Flow:
    """Both flows of one system, and what they were made with."""

    system: str
    particles: int
    damping: Damping
    seed: int
    step: float
    times: Matrix
    courses: dict[str, Course]

    def to_json(self) -> dict[str, Any]:
        """Return all but the particles."""
        facts = {name: getattr(self, name) for name in ("system", "particles", "seed", "step")}
        facts |= {"damping": asdict(self.damping), "times": self.times.tolist()}
        for name, course in self.courses.items():
            mean, covariance = course.ellipses()
            facts[name] = {
                "energy": course.energy.tolist(),
                "total": course.total.tolist(),
                "mean": mean.tolist(),
                "covariance": covariance.tolist(),
                "reached": {f"{share:g}": time for share, time in course.reached.items()},
                "calls": {f"{share:g}": calls for share, calls in course.calls.items()},
                "turned": course.turned,
            }
        return facts

    def text(self) -> str:
        """Return what is printed."""
        rows = [f"{'share of the energy':20}" + "".join(f"{f'{share:g}':>10}" for share in SHARES)]
        for what, values in (("time", "reached"), ("calls", "calls")):
            for name, course in self.courses.items():
                found = getattr(course, values).values()
                cells = ("not yet" if value is None else f"{value:.4g}" for value in found)
                rows.append(f"{f'{name}, {what}':20}" + "".join(f"{cell:>10}" for cell in cells))
        turned = ", ".join(f"{name} {course.turned:.1e}" for name, course in self.courses.items())
        return "\n".join([*rows, f"change of the whitened particles: {turned}"])


def study(
    system: str = "linear",
    *,
    particles: int = 120,
    damping: Damping = Damping(),  # noqa: B008, a frozen dataclass
    end: float = 40.0,
    step: float = 0.1,
    seed: int = 0,
) -> Flow:
    """Return both flows of the same particles, from rest, from time 0 to `end`.

    Parameters
    ----------
    system
        "linear" or "exponential".
    particles
        How many, drawn from a Gaussian law around (1, 0.5).
    damping
        Of the accelerated one; its clock begins at 1.
    end, step
        The last time; the size of explicit steps whose calls are counted.
    seed
        Of the draw.

    Raises
    ------
    ValueError
        Where a number is none, or the flows would take too long to follow.
    """
    check_choice("system", system, SYSTEMS)
    for name, value in (("particles", particles), ("end", end), ("step", step)):
        if not value > (2 if name == "particles" else 0):
            raise ValueError(f"{name}: got {value!r}, needs {'more than 2' if name == 'particles' else 'more than 0'}")
        if not math.isfinite(value):
            raise ValueError(f"{name}: got {value!r}, needs a finite number")
    if not EARLIEST <= end <= LATEST:
        raise ValueError(f"end: got {end!r}, needs a time from {EARLIEST:g} to {LATEST:g}")
    if end / step > MOST_STEPS:
        raise ValueError(f"step: got {step!r}, needs at least {end / MOST_STEPS:g}: at most {MOST_STEPS} up to the end")
    for name, only in (("c_log", Damping(1.0, 0.0)), ("c_lin", Damping(0.0, 1.0))):
        most, got = MOST_DAMPED / only.between(1.0, 1.0 + end), getattr(damping, name)
        if got > most:
            raise ValueError(f"{name}: got {got!r}, needs at most {most:.6g} where the end is {end:g}")
    own, times = SYSTEMS[system], np.linspace(0.0, end, POINTS)
    stretch = np.asarray([[0.5, 0.0], [0.25, 0.45]])
    x = np.asarray([1.0, 0.5]) + philox.normal((particles, 2), seed=seed, purpose="analysis.flow") @ stretch.T
    rest, number = np.zeros_like(x), int(end / step)
    slow = descend(own, x, times)
    fast, momenta = accelerate(own, x, rest, times + 1.0, damping)
    still = np.zeros_like(fast)
    marched = steps(own, x, rest, integrator="presymplectic_euler", damping=damping, h=step, number=number)
    courses = {
        "classical": _course(own, times, slow, still, _walk(own, x, step, number)),
        "accelerated": _course(own, times, fast, momenta, (state.x for state in marched)),
    }
    return Flow(system, particles, damping, seed, step, times, courses)


def _walk(system: System, x: Matrix, h: float, number: int) -> Any:
    """Yield the particles before and after each explicit step without momentum."""
    yield x
    for _ in range(number):
        x = x + h * attention(system, x)
        yield x


def _course(system: System, times: Matrix, x: Matrix, y: Matrix, walked: Any) -> Course:
    def above(at: Matrix) -> float:
        return (system.potential(at) - system.potential(np.zeros_like(at))) / len(at)

    energy = np.asarray([above(each) for each in x])
    kinetic = np.asarray([system.kinetic(*each) / len(each[0]) for each in zip(x, y, strict=True)])
    walk, first = np.asarray([above(each) for each in walked]), _whitened(x[0])
    reached = {share: _first(energy, share * energy[0]) for share in SHARES}
    calls = {share: _first(walk, share * energy[0]) for share in SHARES}
    return Course(
        x,
        energy,
        energy + kinetic,
        {
            share: None if at is None else float(np.interp(at, range(len(times)), times))
            for share, at in reached.items()
        },
        {share: None if at is None else int(np.ceil(at)) for share, at in calls.items()},
        float(np.linalg.norm(_whitened(x[SHOWN[2]]) - first) / np.linalg.norm(first)),
    )


def _first(energy: Matrix, level: float) -> float | None:
    """Return where on its way, counted in entries, an energy reaches a level first; None: nowhere."""
    below = np.flatnonzero(~(energy > level))
    if not len(below) or not np.isfinite(energy[below[0]]):
        return None
    at = int(below[0])
    return at - (level - energy[at]) / (energy[at - 1] - energy[at]) if at else 0.0


def _whitened(x: Matrix) -> Matrix:
    centred = x - x.mean(axis=0)
    return centred @ np.linalg.solve(centred.T @ centred / len(x), centred.T)
