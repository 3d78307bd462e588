"""How the flow is followed: what a step is (GE.8), and its adjoint.

An explicit method takes the rate (GE.7) at points on the way; h is the length of the step::

    [GE.euler]  x' = x + h rate(x)
    [GE.stages]  y_n = x + h sum_l alpha_nl rate(y_l),  x' = x + h sum_n beta_n rate(y_n)

Backwards, from the last stage to the first, where dy_l is what the rate at y_l passes back::

    [dGE.euler]  drate = h dx',  dx = dx' + dy
    [dGE.stages]  drate_n = h (beta_n dx' + sum_{l>n} alpha_ln dy_l),  dx = dx' + sum_n dy_n

Each is a row of a Butcher tableau: "euler", "heun" and "rk4" are of order 1, 2 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.args import check_choice, check_number, check_whole
from refattn.mechanisms.graph_energy.forces import Number
from refattn.ops.sums import moved_by
from refattn.xp import Array

STOPS = ("stop_force", "stop_plateau", "stop_level")

Stage = tuple[Any, ...]
"""What the backward of a rate reads: the point y, the pull c and the rate, (b, h, j, c) each, and what is kept."""

Rate = Callable[[Array, Number, Sequence[float], Sequence[Array]], Stage]
"""Returns the stage at x + h sum_l alpha_l rate_l, for x, h, alpha and the rates of stages before."""

RateBackward = Callable[[Stage, Array], Array]
"""Returns the gradient of the point of a stage for drate / h."""


@dataclass(frozen=True)
class Step:
    """What the backward of a step reads."""

    stages: tuple[Stage, ...]
    after: Array | None = None  # (b, h, j, c): x'
    factor: Number = 1.0  # of the length of the step


class Sums(dict[str, Any]):
    """Gradients that are sums over steps, by name."""

    def add(self, name: str, terms: Array) -> None:
        """Add the terms of a step."""
        self[name] = self[name] + terms


@dataclass(frozen=True)
class Integrator:
    """How the flow is followed: a Butcher tableau, with a row of alpha and a beta for each stage of a step.

    Attributes
    ----------
    adjoint
        "unroll": the gradient of the steps that were taken; "implicit": that of the equilibrium, which they have
        to have reached, see `refattn.mechanisms.graph_energy.equilibrium`.
    checkpoint
        Every how many steps a state is kept for the backward, which takes the steps between again, to the same bits;
        None: all of every step is kept. The square root of `steps` needs the least memory.
    stop_force, stop_plateau, stop_level
        A channel stops where no rate is larger, where its energy has changed by no more in three steps (relative to 1
        plus its size), or where its energy is no larger. None: it takes all steps.
    """

    adjoint: str = "unroll"
    checkpoint: int | None = None
    stop_force: float | None = None
    stop_plateau: float | None = None
    stop_level: float | None = None

    alphas: ClassVar[tuple[tuple[float, ...], ...]]
    beta: ClassVar[tuple[float, ...]]

    def __post_init__(self) -> None:
        check_choice("adjoint", self.adjoint, ("unroll", "implicit"))
        if self.checkpoint is not None:
            check_whole("checkpoint", self.checkpoint, 1)
        for name in STOPS:
            value = getattr(self, name)
            if value is not None:
                check_number(name, value)
                if name != "stop_level" and value < 0.0:
                    raise ValueError(f"{name}: got {value}, needs a number at least 0")

    def forward(self, rate: Rate, x: Array, h: Number) -> tuple[Array, tuple[Stage, ...]]:
        """Return x' and the stages."""
        stages: tuple[Stage, ...] = ()
        for alpha in self.alphas:
            stages = (*stages, rate(x, h, alpha, [stage[2] for stage in stages]))
        return moved_by(x, h, self.beta, [stage[2] for stage in stages]), stages

    def backward(self, rate_backward: RateBackward, step: Step, h: Number, d_after: Array, sums: Sums) -> Array:
        """Return the gradient of x for that of x'."""
        d_x, d_points = d_after, list[Array]()  # of later stages, the last one first
        for n in reversed(range(len(self.beta))):
            later = [self.alphas[l][n] for l in reversed(range(n + 1, len(self.beta)))]
            inner = moved_by(self.beta[n] * d_after, 1.0, later, d_points)  # drate / h
            d_points.append(rate_backward(step.stages[n], inner))
            d_x = d_x + d_points[-1]
        return d_x

    @property
    def name(self) -> str:
        """What the option `integrator` calls it."""
        return next(name for name, kind in INTEGRATORS.items() if type(self) is kind)

    @property
    def stops(self) -> str | None:
        """The first condition by which channels stop, or None."""
        return next((name for name in STOPS if getattr(self, name) is not None), None)

    @property
    def reads_energy(self) -> bool:
        """Whether a graph without an energy will not do."""
        return self.stop_plateau is not None or self.stop_level is not None


class Euler(Integrator):
    """x' = x + h v(x): the simplest, and with steps up to 2/L the energy falls."""

    alphas, beta = ((),), (1.0,)


class Heun(Integrator):
    """The mean of the rates at x and at where Euler's step ends: of order 2."""

    alphas, beta = ((), (1.0,)), (0.5, 0.5)


class RK4(Integrator):
    """The classical method of Runge and Kutta: of order 4."""

    alphas = ((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0))
    beta = (1.0 / 6.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 6.0)


INTEGRATORS: dict[str, type[Integrator]] = {"euler": Euler, "heun": Heun, "rk4": RK4}
