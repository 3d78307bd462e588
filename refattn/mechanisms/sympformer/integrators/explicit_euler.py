"""Explicit Euler of the momentum, damping and all, and a drift with the old momentum.

Equations (g is the force at (x, p), and x' SYMP.drifted)::

    [SYMP.friction]  alpha = c_log / t + c_lin
    [SYMP.explicit_rate]  r = g - alpha p
    [SYMP.explicit_momentum]  p' = p + h_y r

Adjoints, for given dp'; those of x' and g are in `drift`::

    [dSYMP.explicit_rate]  dr = h_y dp'
    [dSYMP.friction]  dalpha = -sum dr p

and dg = dr, dp = dp' - alpha dr, dc_log = dalpha / t, dc_lin = dalpha, dt = -dalpha c_log / t^2, dh_y = sum dp' r.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535).
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.sympformer.integrators import drift
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.mechanisms.sympformer.presymplectic_euler import Integrator
from refattn.xp import Array


@dataclass(frozen=True)
class ExplicitEuler(Integrator):
    """Explicit Euler: this file."""

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """A momentum of 0 is not damped."""
        return kicks and not rests


@dataclass(frozen=True)
class Saved:
    """What the backward reads; what follows `drifted` is None where nobody reads the momentum."""

    p: Array | None
    t: Array
    drifted: drift.Saved
    alpha: Array | None = None
    rate: Array | None = None


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array | None, Saved]:
    """Return the next tokens and momenta (None where nobody reads them), and what `backward` reads."""
    result, drifted = equations.active(drift).forward(layer, x, p)  # (b, i, m): SYMP.drifted
    if drifted.force is None:
        return result, None, Saved(p, t, drifted)
    before = drift.at_rest(p, x)  # (b, i, m)
    alpha = rate_of_damping(layer, t)  # (1): SYMP.friction
    rate = drifted.force - alpha * before  # (b, i, m) [SYMP.explicit_rate]
    momentum = before + layer.numbers["h_y"] * rate  # (b, i, m) [SYMP.explicit_momentum]
    return result, momentum, Saved(p, t, drifted, alpha, rate)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, add: Add
) -> tuple[Array, Array | None, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    d_force, d_before, d_t = None, None, 0.0 * saved.t  # -, -, (1)
    if d_momentum is not None and saved.drifted.force is not None:
        # forward: momentum = p + h_y * rate
        d_rate = layer.numbers["h_y"] * d_momentum  # (b, i, m) [dSYMP.explicit_rate]
        add("h_y", inner(d_momentum, saved.rate))
        # forward: rate = force - alpha * p
        d_force, d_before = d_rate, d_momentum - saved.alpha * d_rate  # (b, i, m), (b, i, m)
        d_alpha = -inner(d_rate, drift.at_rest(saved.p, d_rate))  # (1) [dSYMP.friction]
        d_t = rate_of_damping_backward(layer, saved.t, d_alpha, add)  # (1)
    turned = equations.active(drift).backward(layer, saved.drifted, d_result, d_force, add)
    return turned[0], drift.plus(turned[1], d_before), d_t


def rate_of_damping(layer: Layer, t: Array) -> Array:
    """Return alpha(t); a number that is not there is 0."""
    c_log, c_lin = (layer.numbers.get(name, 0.0 * t) for name in ("c_log", "c_lin"))
    alpha = c_log / t + c_lin  # (1) [SYMP.friction]
    return alpha


def rate_of_damping_backward(layer: Layer, t: Array, d_alpha: Array, add: Add) -> Array:
    """Return the gradient of t, and add those of c_log and c_lin."""
    # forward: alpha = c_log / t + c_lin
    add("c_log", d_alpha / t)
    add("c_lin", d_alpha)
    return -d_alpha * layer.numbers.get("c_log", 0.0 * t) / (t * t)
