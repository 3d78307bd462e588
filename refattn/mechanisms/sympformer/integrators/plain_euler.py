"""Plain Euler: of a momentum a learned share is kept, whatever the time and the steps, and the drift is the old one.

Equations (g is the force at (x, p), and x' SYMP.drifted)::

    [SYMP.plain_momentum]  p' = retention p + h_y g     at rest: h_y g

Adjoints, for given dp'; those of x' and g are in `drift`::

    [dSYMP.retention]  dretention = sum dp' p           not at rest

and dg = h_y dp', dp = retention dp', dh_y = sum dp' g.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535): momentum as in heavy-ball methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.mechanisms.sympformer.integrators import drift
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.mechanisms.sympformer.presymplectic_euler import Integrator
from refattn.xp import Array


@dataclass(frozen=True)
class PlainEuler(Integrator):
    """Plain Euler: this file.

    Attributes
    ----------
    retention
        Where the share of the momentum that is kept starts.
    """

    retention: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.retention < 1.0:
            raise ValueError(f"retention: got {self.retention!r}, needs a number between 0 and 1")

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """There is no damping."""
        return False

    def numbers(self, config: Any) -> dict[str, tuple[str, float]]:
        """Return the retention, where there is a momentum to keep."""
        return {} if config.rests or not config.keeps else {"retention": ("unit", self.retention)}


@dataclass(frozen=True)
class Saved:
    """What the backward reads; what follows `drifted` is None where nobody reads the momentum."""

    p: Array | None
    t: Array
    drifted: drift.Saved


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array | None, Saved]:
    """Return the next tokens and momenta (None where nobody reads them), and what `backward` reads."""
    result, drifted = equations.active(drift).forward(layer, x, p)  # (b, i, m): SYMP.drifted
    if drifted.force is None:
        return result, None, Saved(p, t, drifted)
    momentum = layer.numbers["h_y"] * drifted.force  # (b, i, m): SYMP.plain_momentum at rest
    if p is not None:
        momentum = layer.numbers["retention"] * p + momentum  # (b, i, m) [SYMP.plain_momentum]
    return result, momentum, Saved(p, t, drifted)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, add: Add
) -> tuple[Array, Array | None, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    d_force, d_before, d_t = None, None, 0.0 * saved.t  # -, -, (1)
    if d_momentum is not None and saved.drifted.force is not None:
        # forward: momentum = retention * p + h_y * force
        d_force = layer.numbers["h_y"] * d_momentum  # (b, i, m)
        add("h_y", inner(d_momentum, saved.drifted.force))
        if saved.p is not None:
            d_before = layer.numbers["retention"] * d_momentum  # (b, i, m)
            d_retention = inner(d_momentum, saved.p)  # (1) [dSYMP.retention]
            add("retention", d_retention)
    turned = equations.active(drift).backward(layer, saved.drifted, d_result, d_force, add)
    return turned[0], drift.plus(turned[1], d_before), d_t
