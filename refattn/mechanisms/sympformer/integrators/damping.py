"""The kinds of damping alpha(t) of a momentum, and how much of one a step takes.

Equations (a number that a kind does not have is 0)::

    [SYMP.friction]  alpha = c_log / t + c_lin
    [SYMP.15]  a = clip(c_log log(1 + h_y / t) + c_lin h_y, -clip, clip)    the integral of alpha from t to t + h_y

With c_log = 3 the damping is Nesterov's 3/t. Some methods ask for the a of another length than h_y.

Adjoints. A factor of the momentum is exp(-a), or has -alpha in it, so that what comes are gradients of -a and -alpha::

    [dSYMP.15]  as in the definition                    where p' = exp(-a) p*
    [dSYMP.c_log]  as in the definition                 if a is clipped: 0, and so are the next two
    [dSYMP.c_lin]  as in the definition
    [dSYMP.t]  as in the definition
    [dSYMP.friction]  dalpha = -h_y sum dp' p           where p' = (1 - h_y alpha) p + ...

and a's part of dSYMP.h_y is da (c_log / (t + h_y) + c_lin); of alpha dc_log = dalpha / t, dc_lin = dalpha, dt = -dalpha
c_log / t^2.

Axes: numbers are arrays of one element.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535).
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.args import check, check_number
from refattn.mechanisms.sympformer.params import Add, Layer
from refattn.xp import Array, clip, namespace


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
        check("learned", self.learned, bool)
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


def friction(layer: Layer, t: Array) -> Array:
    """Return alpha(t)."""
    c_log, c_lin = numbers(layer, t)  # (1), (1)
    alpha = c_log / t + c_lin  # (1) [SYMP.friction]
    return alpha


def friction_backward(layer: Layer, t: Array, d_minus_alpha: Array, add: Add) -> Array:
    """Return the gradient of t, and add those of c_log and c_lin."""
    d_alpha = -d_minus_alpha  # (1) [dSYMP.friction]
    # forward: alpha = c_log / t + c_lin
    add("c_log", d_alpha / t)
    add("c_lin", d_alpha)
    return -d_alpha * numbers(layer, t)[0] / (t * t)


def damping(layer: Layer, t: Array, h: Array) -> Array:
    """Return a, the integral of the damping from t to t + h."""
    bound = layer.params.config.damping.clip
    a = clip(_integral(layer, t, h), -bound, bound)  # (1) [SYMP.15]
    return a


def damping_backward(layer: Layer, t: Array, h: Array, d_minus_a: Array, add: Add) -> tuple[Array, Array]:
    """Return the gradients of t and h, and add those of c_log and c_lin."""
    xp, clip = namespace(t), layer.params.config.damping.clip
    c_log, c_lin = numbers(layer, t)  # (1), (1)
    d_a = -d_minus_a  # (1) [dSYMP.15]
    # forward: a = clip(c_log * log(1 + h / t) + c_lin * h, -clip, clip)
    d_free = xp.where(xp.abs(_integral(layer, t, h)) < clip, d_a, 0.0)  # (1): 0 where it is clipped
    d_c_log = d_free * xp.log1p(h / t)  # (1) [dSYMP.c_log]
    d_c_lin = d_free * h  # (1) [dSYMP.c_lin]
    d_t = -d_free * c_log * h / (t * (t + h))  # (1) [dSYMP.t]
    d_h = d_free * (c_log / (t + h) + c_lin)  # (1): part of dSYMP.h_y
    add("c_log", d_c_log)
    add("c_lin", d_c_lin)
    return d_t, d_h


def numbers(layer: Layer, t: Array) -> tuple[Array, Array]:
    """Return c_log and c_lin."""
    return layer.numbers.get("c_log", 0.0 * t), layer.numbers.get("c_lin", 0.0 * t)


def _integral(layer: Layer, t: Array, h: Array) -> Array:
    """Return a before it is clipped."""
    c_log, c_lin = numbers(layer, t)  # (1), (1)
    return c_log * namespace(t).log1p(h / t) + c_lin * h
