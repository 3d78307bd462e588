"""The kinds of damping alpha(t) of a momentum; what a step loses by it is SYMP.15."""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.arguments import check_is, check_number


@dataclass(frozen=True)
class Damping:
    """What every kind has.

    Attributes
    ----------
    learned
        Whether c_log and c_lin are parameters.
    clip
        Bound of a, the damping of one step. Where it bites its gradient is 0.
    """

    learned: bool = True
    clip: float = 50.0

    def __post_init__(self) -> None:
        check_is("learned", self.learned, bool)
        for name in ("clip", "c_log", "c_lin"):
            if hasattr(self, name):
                check_number(name, getattr(self, name), positive=True)


@dataclass(frozen=True)
class Log(Damping):
    """alpha(t) = c_log / t; 3 is Nesterov's."""

    c_log: float = 3.0


@dataclass(frozen=True)
class Linear(Damping):
    """alpha(t) = c_lin, that of a heavy ball."""

    c_lin: float = 0.1


@dataclass(frozen=True)
class LogLin(Damping):
    """alpha(t) = c_log / t + c_lin."""

    c_log: float = 3.0
    c_lin: float = 1e-4


KINDS: dict[str, type[Damping]] = {"log": Log, "linear": Linear, "loglin": LogLin}
