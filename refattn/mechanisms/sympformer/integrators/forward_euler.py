"""Forward Euler: the momentum of presymplectic Euler, and a drift with the old one.

Equations (a is SYMP.15, g the force at (x, p), and x' SYMP.drifted)::

    [SYMP.forward_kicked]  p* = p + h_y g
    [SYMP.forward_momentum]  p' = exp(-a) p*

Adjoints, for given dp'; those of x' and g are in `drift`, those of a with SYMP.15::

    [dSYMP.forward_kicked]  dp* = exp(-a) dp'

and da = -sum dp' p', dg = h_y dp*, dp = dp*, and dh_y = sum dp* g beside that of a.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535).
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.sympformer import presymplectic_euler
from refattn.mechanisms.sympformer.integrators import drift
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.mechanisms.sympformer.presymplectic_euler import Integrator
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class ForwardEuler(Integrator):
    """Forward Euler: this file."""


@dataclass(frozen=True)
class Saved:
    """What the backward reads; what follows `drifted` is None where nobody reads the momentum."""

    p: Array | None
    t: Array
    drifted: drift.Saved
    a: Array | None = None
    momentum: Array | None = None


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array | None, Saved]:
    """Return the next tokens and momenta (None where nobody reads them), and what `backward` reads."""
    result, drifted = equations.active(drift).forward(layer, x, p)  # (b, i, m): SYMP.drifted
    if drifted.force is None:
        return result, None, Saved(p, t, drifted)
    kicked = drift.at_rest(p, x) + layer.numbers["h_y"] * drifted.force  # (b, i, m) [SYMP.forward_kicked]
    a = equations.active(presymplectic_euler).damping(layer, t, layer.numbers["h_y"])  # (1): SYMP.15
    momentum = namespace(x).exp(-a) * kicked  # (b, i, m) [SYMP.forward_momentum]
    return result, momentum, Saved(p, t, drifted, a, momentum)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, add: Add
) -> tuple[Array, Array | None, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    d_force, d_before, d_t = None, None, 0.0 * saved.t  # -, -, (1)
    if d_momentum is not None and saved.a is not None:
        # forward: momentum = exp(-a) * kicked
        d_kicked = namespace(d_result).exp(-saved.a) * d_momentum  # (b, i, m) [dSYMP.forward_kicked]
        d_a = -inner(d_momentum, saved.momentum)  # (1): dSYMP.15
        own = equations.active(presymplectic_euler)
        d_t, d_h = own.damping_backward(layer, saved.t, layer.numbers["h_y"], d_a, add)  # (1), (1)
        # forward: kicked = p + h_y * force
        d_before, d_force = d_kicked, layer.numbers["h_y"] * d_kicked  # (b, i, m), (b, i, m)
        add("h_y", inner(d_kicked, saved.drifted.force) + d_h)
    turned = equations.active(drift).backward(layer, saved.drifted, d_result, d_force, add)
    return turned[0], drift.plus(turned[1], d_before), d_t
