"""Exponential Euler: exact for a force that stays the same in the step, and a drift with the old momentum.

Equations (a is SYMP.15, phi that of `exponential_presymplectic`, g the force at (x, p), and x' SYMP.drifted)::

    [SYMP.exponential_weight]  w = h_y phi(a)
    [SYMP.exponential_momentum]  p' = exp(-a) p + w g

Adjoints, for given dp'; those of x' and g are in `drift`, those of a with SYMP.15::

    [dSYMP.exponential_weight]  dw = sum dp' g

and dg = w dp', dp = exp(-a) dp', da = h_y phi'(a) dw - exp(-a) sum dp' p, and dh_y = phi(a) dw beside that of a.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535).
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.sympformer import presymplectic_euler
from refattn.mechanisms.sympformer.integrators import drift
from refattn.mechanisms.sympformer.integrators.exponential_presymplectic import phi
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.mechanisms.sympformer.presymplectic_euler import Integrator
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class ExponentialEuler(Integrator):
    """Exponential Euler: this file."""


@dataclass(frozen=True)
class Saved:
    """What the backward reads; what follows `drifted` is None where nobody reads the momentum."""

    p: Array | None
    t: Array
    drifted: drift.Saved
    a: Array | None = None
    weight: Array | None = None


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array | None, Saved]:
    """Return the next tokens and momenta (None where nobody reads them), and what `backward` reads."""
    result, drifted = equations.active(drift).forward(layer, x, p)  # (b, i, m): SYMP.drifted
    if drifted.force is None:
        return result, None, Saved(p, t, drifted)
    a = equations.active(presymplectic_euler).damping(layer, t, layer.numbers["h_y"])  # (1): SYMP.15
    weight = layer.numbers["h_y"] * phi(a)[0]  # (1) [SYMP.exponential_weight]
    left = namespace(x).exp(-a) * drift.at_rest(p, x)  # (b, i, m): of the momentum before
    momentum = left + weight * drifted.force  # (b, i, m) [SYMP.exponential_momentum]
    return result, momentum, Saved(p, t, drifted, a, weight)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, add: Add
) -> tuple[Array, Array | None, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    d_force, d_before, d_t = None, None, 0.0 * saved.t  # -, -, (1)
    if d_momentum is not None and saved.a is not None:
        # forward: momentum = exp(-a) * p + weight * force
        decayed, before = namespace(d_result).exp(-saved.a), drift.at_rest(saved.p, d_result)  # (1), (b, i, m)
        d_weight = inner(d_momentum, saved.drifted.force)  # (1) [dSYMP.exponential_weight]
        d_before, d_force = decayed * d_momentum, saved.weight * d_momentum  # (b, i, m), (b, i, m)
        # forward: weight = h_y * phi(a)
        value, slope = phi(saved.a)  # (1), (1)
        d_a = layer.numbers["h_y"] * slope * d_weight - decayed * inner(d_momentum, before)  # (1): dSYMP.15
        own = equations.active(presymplectic_euler)
        d_t, d_h = own.damping_backward(layer, saved.t, layer.numbers["h_y"], d_a, add)  # (1), (1)
        add("h_y", value * d_weight + d_h)
    turned = equations.active(drift).backward(layer, saved.drifted, d_result, d_force, add)
    return turned[0], drift.plus(turned[1], d_before), d_t
