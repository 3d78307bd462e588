"""Strang's splitting: half of the damping, two copies that are moved without any, the other half.

Equations (a is SYMP.15, P that of `copies`, which begins with SYMP.strang_entering)::

    [SYMP.strang_entering]  p_in = exp(-a/2) p          at rest: 0
    [SYMP.strang_momentum]  p' = exp(-a/2) P

Adjoints, for a given dp'::

    [dSYMP.strang_entering]  dp_in = the sum of the gradients of both copies of the momentum, which begin there

and dP = exp(-a/2) dp', dp = exp(-a/2) dp_in, da = -(sum dp' p' + sum dp_in p_in) / 2.

Axes: b batch, i token, m width.

Source: Strang 1968 (doi:10.1137/0705041) for the splitting; Stein, Li, Steidl 2026 (arXiv:2603.16535).

How the authors' code differs: both halves are damped as the first one, from t to t + h/2, so that it is of first order.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.sympformer.integrators import copies, damping
from refattn.mechanisms.sympformer.params import Add, Layer, at_rest, inner
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Strang(copies.Doubled):
    """Strang's splitting: this file, with `copies`."""

    def damps(self, rests: bool, kicks: bool, keeps: bool) -> bool:
        """At rest the second half alone damps, which the next layer reads."""
        return keeps or not rests


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    t: Array
    half: Array  # exp(-a/2)
    inner: Array  # p_in
    momentum: Array
    copies: copies.Saved


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array, Saved]:
    """Return the next tokens and momenta, and what `backward` reads."""
    a = equations.active(damping).damping(layer, t, layer.numbers["h_y"])  # (1): SYMP.15
    half = namespace(x).exp(-0.5 * a)  # (1)
    p_in = half * at_rest(p, x)  # (b, i, m) [SYMP.strang_entering]
    own = equations.active(copies)
    result, undamped, inside = own.forward(layer, x, p_in, None)  # (b, i, m), (b, i, m)
    momentum = half * undamped  # (b, i, m) [SYMP.strang_momentum]
    return result, momentum, Saved(t, half, p_in, momentum, inside)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, add: Add
) -> tuple[Array, Array, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    d_later = namespace(d_result).zeros_like(d_result) if d_momentum is None else d_momentum  # (b, i, m)
    # forward: momentum = half * undamped
    d_undamped = saved.half * d_later  # (b, i, m)
    # forward: result, undamped = copies(x, p_in)
    own = equations.active(copies)
    turned = own.backward(layer, saved.copies, d_result, d_undamped, add)
    d_x, d_in = turned[:2]  # (b, i, m), (b, i, m) [dSYMP.strang_entering]
    # forward: half = exp(-a / 2)
    d_minus_a = 0.5 * (inner(d_later, saved.momentum) + inner(d_in, saved.inner))  # (1)
    own = equations.active(damping)
    d_t, d_h = own.damping_backward(layer, saved.t, layer.numbers["h_y"], d_minus_a, add)  # (1), (1)
    add("h_y", d_h)
    return d_x, saved.half * d_in, d_t
