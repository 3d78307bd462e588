"""The force of reduced linear attention: momenta are symmetric matrices P, for P times a token is its momentum.

Where all momenta are p_i = P x_i for one matrix, linear attention keeps them so, and P alone has to move. Behind a
causal mask each token has a matrix of its own, of the tokens up to itself: m times the memory of momenta.

Equations (n_i is the number of tokens that i attends, A = (w_a + w_a^T) / 2, V = (w_v + w_v^T) / 2)::

    [SYMP.reduced_normed]  y = gain norm(x) + shift     without biases shift = 0
    [SYMP.moments]  S_i = 1/n_i sum_j y_j y_j^T
    [SYMP.reduced_force]  g_i = V - A S_i P_i^2 - (A S_i P_i^2)^T    the force on P; at rest: V
    [SYMP.reduced_velocity]  f_i = P_i S_i A y_i        the velocity, for the old matrix or another one

Adjoints, for given dg and df, with c = A y, e = S c and N = P^2::

    [dSYMP.reduced_velocity]  de = P df                 dP = df e^T, beside what g asks
    [dSYMP.reduced_force]  dN = -S A (dg + dg^T)        dP = dN P + P dN
    [dSYMP.moments]  dS = -A (dg + dg^T) N + de c^T
    [dSYMP.reduced_normed]  dy_j = A S de_j + (U_j + U_j^T) y_j    U_j = sum_{i>=j} dS_i / n_i

and dA = -sum (dg + dg^T) N S + sum y (S de)^T, dw_a = (dA + dA^T) / 2, dw_v = (dV + dV^T) / 2 with dV = sum dg.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), the closure of its linear attention in matrices, and the program of
the authors' second version, whose blocks are not the exact closure either: norms and masks stand between.

How the authors' code differs: it divides by the number of all tokens, and makes every new P symmetric again, which it
is. One step stands for h_x and h_y there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.sympformer.forces.linear import Bilinear, counted
from refattn.mechanisms.sympformer.forces.softmax import Answer
from refattn.mechanisms.sympformer.params import Add, Layer, normed, normed_backward
from refattn.xp import Array, namespace


class Reduced(Bilinear):
    """Linear attention whose momenta are matrices, for the integrators "exponential_midpoint" and "ab2": this file."""


@dataclass(frozen=True)
class Moments:
    """What the velocity needs beside the matrices P."""

    turned: Array  # (b, i, m): A y
    s: Array  # (b, i, m, m)


def symmetric(w: Array) -> Array:
    """Return the symmetric part of a matrix, or of a gradient."""
    return 0.5 * (w + namespace(w).matrix_transpose(w))


def forward(layer: Layer, x: Array, p: Array | None) -> tuple[Answer, tuple[Any, ...]]:
    """Return the answer for tokens x (b, i, m) with matrices p (b, i, m, m), or at rest, and what `backward` reads."""
    xp, params = namespace(x), layer.params
    n, past = counted(layer, x)  # (i, 1), -
    force = None
    if params.w_v is not None:
        force = symmetric(params.w_v) + 0.0 * x[..., None]  # (b, i, m, m): SYMP.reduced_force at rest
    if params.w_a is None or params.gain is None:
        if past is not None:
            past.add_up("moments", 0.0 * (x[:, None, :, :, None] * x[:, None, :, None, :]))
        return Answer(force, p, None), (p, x, None)
    y, norm = normed(params, x)  # (b, i, m) [SYMP.reduced_normed]
    pairs = y[..., :, None] * y[..., None, :]  # (b, i, m, m)
    if past is not None:
        sums = past.add_up("moments", pairs[:, None, ...])[:, 0, ...]  # (b, i, m, m): with the past
    elif layer.causal:
        sums = xp.cumulative_sum(pairs, axis=1)  # (b, i, m, m)
    else:
        sums = xp.sum(pairs, axis=1, keepdims=True) + 0.0 * pairs  # (b, i, m, m)
    s = sums / n[..., None]  # (b, i, m, m) [SYMP.moments]
    a, square = symmetric(params.w_a), None  # (m, m)
    if force is not None and p is not None:
        square = p @ p  # (b, i, m, m)
        pushed = a @ s @ square  # (b, i, m, m)
        force = force - pushed - xp.matrix_transpose(pushed)  # (b, i, m, m) [SYMP.reduced_force]
    moments = Moments(y @ a, s)
    return Answer(force, p, moments), (p, x, (y, norm, n, bool(layer.causal), a, moments, square))


def velocity(p: Array, moments: Moments) -> Array:
    """Return the velocity (b, i, m) of tokens with matrices p."""
    speed = (p @ (moments.s @ moments.turned[..., None]))[..., 0]  # (b, i, m) [SYMP.reduced_velocity]
    return speed


def velocity_backward(p: Array, speed: Array, moments: Moments, d_speed: Array) -> tuple[Array, tuple[Array, Array]]:
    """Return the gradients of p, and of A y and S."""
    xp = namespace(p)
    # forward: speed = p @ s @ turned
    seen = moments.s @ moments.turned[..., None]  # (b, i, m, 1): e
    d_p = d_speed[..., None] @ xp.matrix_transpose(seen)  # (b, i, m, m)
    d_seen = (xp.matrix_transpose(p) @ d_speed[..., None])[..., 0]  # (b, i, m) [dSYMP.reduced_velocity]
    d_s = d_seen[..., None] * moments.turned[..., None, :]  # (b, i, m, m): part of dSYMP.moments
    d_turned = (moments.s @ d_seen[..., None])[..., 0]  # (b, i, m)
    return d_p, (d_turned, d_s)


def backward(
    layer: Layer,
    saved: tuple[Any, ...],
    d_force: Array | None,
    d_moved: Array | None,
    d_moments: tuple[Array, Array] | None,
    add: Add,
) -> tuple[Array, Array | None]:
    """Return the gradients of x and p, and add those of the parameters; `d_moments` are those of A y and S."""
    p, x, moving = saved  # (b, i, m, m), (b, i, m), -
    d_p = d_moved  # (b, i, m, m): of P in the velocity
    if d_force is not None:
        # forward: force = symmetric(w_v) - ...
        add("w_v", symmetric(namespace(d_force).sum(d_force, axis=(0, 1))))
    if moving is None:  # a layer that moves nothing, whose force is V
        return namespace(x).zeros_like(x), d_p
    y, norm, n, masked, a, moments, square = moving  # as they were given to it
    s = moments.s  # (b, i, m, m)
    xp = namespace(y)
    none = xp.zeros_like(s)  # (b, i, m, m)
    d_turned, d_s = (xp.zeros_like(y), none) if d_moments is None else d_moments  # (b, i, m), (b, i, m, m)
    # forward: turned = y @ a
    d_y = d_turned @ a  # (b, i, m)
    d_a = xp.sum(y[..., None] * d_turned[..., None, :], axis=(0, 1))  # (m, m)
    if d_force is not None and p is not None and square is not None:
        # forward: force = v - a @ s @ square - (a @ s @ square)^T
        both = -(d_force + xp.matrix_transpose(d_force))  # (b, i, m, m): of a @ s @ square
        back = xp.matrix_transpose(square)  # (b, i, m, m)
        d_square = xp.matrix_transpose(s) @ a @ both  # (b, i, m, m) [dSYMP.reduced_force]
        d_s = d_s + a @ both @ back  # (b, i, m, m) [dSYMP.moments]
        d_a = d_a + xp.sum(both @ back @ xp.matrix_transpose(s), axis=(0, 1))  # (m, m)
        # forward: square = p @ p
        turned = xp.matrix_transpose(p)  # (b, i, m, m)
        asked = d_square @ turned + turned @ d_square  # (b, i, m, m)
        d_p = asked if d_p is None else d_p + asked  # (b, i, m, m)
    add("w_a", symmetric(d_a))
    # forward: s = cumulative_sum(y y^T) / n
    mean = d_s / n[..., None]  # (b, i, m, m)
    if masked:
        later = xp.flip(xp.cumulative_sum(xp.flip(mean, axis=1), axis=1), axis=1)  # (b, i, m, m): U
    else:
        later = xp.sum(mean, axis=1, keepdims=True)  # of all tokens
    d_y = d_y + ((later + xp.matrix_transpose(later)) @ y[..., None])[..., 0]  # (b, i, m) [dSYMP.reduced_normed]
    # forward: y = norm(x)
    d_x = normed_backward(layer.params, norm, d_y, add)  # (b, i, m)
    return d_x, xp.zeros_like(p) if p is not None and d_p is None else d_p
