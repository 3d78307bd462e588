"""The presymplectic integrator of second order: two copies, and momenta that carry their damping.

The system depends on time through its damping. In P = exp(a_s) p, a_s the damping of the time s since the step began,
nothing is lost, and `copies` moves (X, P) and (Y, Q) by the maps of that system.

It is Hamiltonian, by exp(a_s) H, where velocity and force are derivatives of one H: without causality, and with B and
w_v w_o = scale w_q w_k^T symmetric (softmax attention), with A and V symmetric (linear attention), or with B symmetric
(the oracle "hamiltonian"); and then in the normalised tokens, whose norm is left out of H. A causal layer, or one with
free matrices, is no Hamiltonian system: there the step is of second order, and no more is said of it.

Equations (a is SYMP.15; P that of `copies`, which begins with P = p, and with 0 at rest)::

    [SYMP.unscaled_momentum]  p' = exp(-a) P

Adjoints, for a given dp': dP = exp(-a) dp', and da = -sum dp' p' beside that of the maps; the rest is in `copies`.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), its presymplectic integrator, after Tao 2016 (arXiv:1609.02212);
derived again here.

How the authors' code differs: its momenta are scaled by all damping since the time 1, and not since the step began, so
that the rotation turns other pairs the later a layer is; and the damping of a step is that of h_x, not of h_y.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.sympformer.integrators import copies, damping
from refattn.mechanisms.sympformer.params import Add, Layer, at_rest, inner
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Presymplectic(copies.Doubled):
    """The presymplectic integrator: this file, with `copies`."""


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    t: Array
    a: Array
    momentum: Array
    copies: copies.Saved


def forward(layer: Layer, x: Array, p: Array | None, t: Array) -> tuple[Array, Array, Saved]:
    """Return the next tokens and momenta, and what `backward` reads."""
    clock, h_y = equations.active(damping), layer.numbers["h_y"]  # -, (1)
    times = tuple(clock.damping(layer, t, share * h_y) for share in (0.5, 1.0))
    own = equations.active(copies)
    result, scaled, inside = own.forward(layer, x, at_rest(p, x), times)  # (b, i, m), (b, i, m)
    momentum = namespace(x).exp(-times[1]) * scaled  # (b, i, m) [SYMP.unscaled_momentum]
    return result, momentum, Saved(t, times[1], momentum, inside)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, add: Add
) -> tuple[Array, Array, Array]:
    """Return the gradients of x, p and t, and add those of the parameters and the numbers."""
    d_later = namespace(d_result).zeros_like(d_result) if d_momentum is None else d_momentum  # (b, i, m)
    # forward: momentum = exp(-a) * scaled
    d_scaled = namespace(d_result).exp(-saved.a) * d_later  # (b, i, m)
    d_end = inner(d_later, saved.momentum)  # (1): of -a
    # forward: result, scaled = copies(x, p)
    own = equations.active(copies)
    turned = own.backward(layer, saved.copies, d_result, d_scaled, add)
    d_x, d_p, d_half, d_whole = turned  # (b, i, m), (b, i, m), (1), (1)
    d_t, clock = 0.0 * saved.t, equations.active(damping)  # (1), -
    for share, d_minus_a in ((0.5, -d_half), (1.0, d_end - d_whole)):
        h = share * layer.numbers["h_y"]  # (1)
        d_now, d_h = clock.damping_backward(layer, saved.t, h, d_minus_a, add)  # (1), (1)
        d_t = d_t + d_now  # (1)
        add("h_y", share * d_h)
    return d_x, d_p, d_t
