"""What makes scores flow, when they stop, and what becomes of small ones."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from refattn.mechanisms.graph_energy.couplings import Coupling
from refattn.mechanisms.graph_energy.intrinsic import Intrinsic, Number
from refattn.xp import Array


@dataclass(frozen=True)
class Threshold:
    """What the threshold does: `tau` is a float or broadcasts to a state; `kind` is "hard", "soft" or "proximal"."""

    tau: Number
    given: bool  # whether tau has a gradient
    kind: str
    signed: bool
    straight_through: bool
    empty: str


@dataclass(frozen=True)
class Stop:
    """When a channel of a state stops: what is None does not stop it.

    Attributes
    ----------
    force
        Where no rate is larger.
    plateau
        Where the energy has changed by no more, relative to 1 plus its size, in each of the last three steps.
    level
        Where the energy is no larger.
    balance
        The weights pi of the energy, or None where there is no energy.
    """

    force: float | None = None
    plateau: float | None = None
    level: float | None = None
    balance: Array | float | None = None


@dataclass(frozen=True)
class Law:
    """What makes scores flow. `form` is the module that sums over pairs; numbers are floats or broadcast to a state."""

    coupling: Coupling
    intrinsic: Intrinsic
    mu: Number
    kappa: Number
    step: Number
    given: bool  # whether the step has a gradient
    steps: int
    integrator: str
    form: ModuleType
    accuracy: float = 1e-6  # of "rk45"
    max_nfe: int = 10000  # of "rk45": how many rates it evaluates at most
    stop: Stop | None = None
    checkpoint: int | None = None  # every how many steps a state is kept
    threshold: Threshold | None = None  # "proximal" acts after every step; others leave the flow alone
    jitter: Array | None = None  # how far from b the scores begin, as (b, h, j, c)

    @property
    def shrinks(self) -> bool:
        """Whether the threshold acts after every step."""
        return self.threshold is not None and self.threshold.kind == "proximal"
