"""A step of tokens with velocities in the geometry of their scores: accelerated softmax attention with its connection.

The force is that of attention whose values are keys: in the metric that B^-1 and z make it is a gradient, and the
connection is what a velocity turns by on a straight line there. All tokens see all others.

Equations (A and B are symmetric positive, t is the temperature; no y = norm(x) with normed=False: then y = x)::

    [SYMP.geometry_factor]  L = lower(w), with log(1 + e^w) + 1e-4 on the diagonal
    [SYMP.geometry_a]  A = t/m L L^T                    with the L of w_a
    [SYMP.geometry_b]  B = m/t L L^T                    with that of w_b
    [SYMP.geometry_normed]  y = norm(x)
    [SYMP.geometry_queries]  a = y A
    [SYMP.geometry_pushes]  c = a B
    [SYMP.geometry_weights]  P_ij = softmax_j <a_i, y_j>
    [SYMP.geometry_force]  g = P c
    [SYMP.geometry_blend]  w = beta v + gamma g
    [SYMP.geometry_squares]  s_i = <u_i, B^-1 u_i>      u = v with connection="old", w with "new"
    [SYMP.geometry_rate]  r_i = sum_j P_ij (<u_i A, y_j> + <a_i, u_j>)
    [SYMP.geometry_connection]  k_i = r_i u_i - (s_i g_i + sum_j P_ij s_j c_j) / 2    connection="none": k = 0
    [SYMP.geometry_velocity]  v' = w - k
    [SYMP.geometry_moved]  x' = x + v'                  connection="new": x + w - k/2

Adjoints, for given dx' and dv'::

    [dSYMP.geometry_velocity]  dk = -dx' - dv'          "new": -dx'/2 - dv'
    [dSYMP.geometry_connection]  dr_i = sum_m dk u
    [dSYMP.geometry_rate]  dPr_ij = dr_i (<u_i A, y_j> + <a_i, u_j>)    part of dP
    [dSYMP.geometry_squares]  ds_j = -sum_i P_ij <dk_i, c_j> / 2 - <dk_j, g_j> / 2
    [dSYMP.geometry_blend]  dw = dx' + dv'              "new": and du
    [dSYMP.geometry_force]  dg = gamma dw - s dk / 2
    [dSYMP.geometry_weights]  dS = adjoint of softmax at dP    dP = dg c^T + dPr - dk (s c)^T / 2
    [dSYMP.geometry_pushes]  dc = P^T dg - s P^T dk / 2
    [dSYMP.geometry_queries]  da = dS y + dc B + (dr P) u
    [dSYMP.geometry_normed]  dy = dS^T a + da A + (dr P)^T u A    norm: its adjoint; dx = dx' + dy
    [dSYMP.geometry_b]  dL = m/t (dB + dB^T) L          dB = sum a^T dc - sum ds b b^T, b = B^-1 u
    [dSYMP.geometry_a]  dL = t/m (dA + dA^T) L          dA = sum y^T da + sum (dr u)^T P y

and du = r dk + 2 ds b + dr (P y) A + (dr P)^T a, dv = beta dw ("old": and du), dbeta = sum dw v, dgamma = sum dw g;
on the diagonal dw = dL / (1 + e^-w).

Axes: b batch, i token, j another token, m width.

Source: the "prefix geometry" of the authors' program of October 2026, whose solvers are "gd" (velocities of 0 in every
step), "hb" (connection="none"), "cc" ("old") and "r2" ("new"). There u = v / h, beta = (t_k / (t_k + h))^r and gamma =
h^2: `coefficients`. Behind each step stands an MLP, `refattn.ops.mlp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn.args import check_choice, check_number, check_whole
from refattn.ops import layer_norm
from refattn.ops.softmax import softmax_backward, softmax_forward
from refattn.ops.solve import identity, solve
from refattn.xp import Array, arange, device, namespace

FLOOR = 1e-4
"""The least element of the diagonal of a factor."""


@dataclass(frozen=True)
class Params:
    """Parameters of a step: of the factors of A and B the lower triangles by rows, and two numbers."""

    w_a: Array  # (m (m + 1) / 2)
    w_b: Array  # (m (m + 1) / 2)
    beta: Array  # (1)
    gamma: Array  # (1)


Saved = tuple[tuple[Any, ...], ...]
"""What the backward reads, in three groups; the names there are those of the equations."""


def coefficients(layer: int, *, h: float = 0.1**0.5, r: float = 3.0, start: float = 1.0) -> tuple[float, float]:
    """Return beta and gamma of a layer, with the damping r / t.

    >>> from refattn.mechanisms.sympformer.geometry import step
    >>> step.coefficients(1, h=0.5, r=2.0)
    (0.5625, 0.25)
    """
    check_whole("layer", layer)
    for name, value in (("h", h), ("start", start)):
        check_number(name, value, positive=True)
    t = start + layer * h
    return (t / (t + h)) ** r, h * h


def fresh(width: int, like: Array, *, beta: float, gamma: float) -> Params:
    """Return parameters with A B = 1 but for the temperature: A = t/m, B = m/t."""
    xp = namespace(like)
    rows = xp.take(xp.reshape(identity(width, like), (-1,)), _places(width, like), axis=0)  # of a triangle
    packed = math.log(math.expm1(1.0 - FLOOR)) * rows  # of a triangle
    return Params(packed, packed, *(xp.full((1,), x, dtype=like.dtype, device=device(like)) for x in (beta, gamma)))


def forward(
    params: Params, x: Array, v: Array, *, connection: str = "old", normed: bool = False, temperature: float = 1.0
) -> tuple[Array, Array, Saved]:
    """Return the next tokens and velocities of tokens x and velocities v (b, i, m), and what `backward` reads."""
    check_choice("connection", connection, ("none", "old", "new"))
    check_number("temperature", temperature, positive=True)
    if tuple(v.shape) != tuple(x.shape):
        raise ValueError(f"v: got shape {tuple(v.shape)}, needs {tuple(x.shape)}")
    xp, m = namespace(x), x.shape[-1]
    of_a = factor(params.w_a, m)  # (m, m)
    of_b = factor(params.w_b, m)  # (m, m)
    A = of_a @ xp.matrix_transpose(of_a) * (temperature / m)  # (m, m) [SYMP.geometry_a]
    B = of_b @ xp.matrix_transpose(of_b) * (m / temperature)  # (m, m) [SYMP.geometry_b]
    y, norm = x, None  # (b, i, m)
    if normed:
        y, norm = layer_norm.layer_norm_forward(x)  # (b, i, m) [SYMP.geometry_normed]
    a = y @ A  # (b, i, m) [SYMP.geometry_queries]
    c = a @ B  # (b, i, m) [SYMP.geometry_pushes]
    P = softmax_forward(a @ xp.matrix_transpose(y))  # (b, i, j) [SYMP.geometry_weights]
    g = P @ c  # (b, i, m) [SYMP.geometry_force]
    w = params.beta * v + params.gamma * g  # (b, i, m) [SYMP.geometry_blend]
    known = ((connection, temperature, v, norm, of_a, of_b), (A, B, y, a, c, P, g))
    if connection == "none":
        return x + w, w, (*known, ())
    u = v if connection == "old" else w  # (b, i, m)
    b = xp.matrix_transpose(solve(B, xp.matrix_transpose(u)))  # (b, i, m): B^-1 u
    s = xp.sum(u * b, axis=-1, keepdims=True)  # (b, i, 1) [SYMP.geometry_squares]
    rates = u @ A @ xp.matrix_transpose(y) + a @ xp.matrix_transpose(u)  # (b, i, j): of the scores along u
    r = xp.sum(P * rates, axis=-1, keepdims=True)  # (b, i, 1) [SYMP.geometry_rate]
    k = r * u - 0.5 * (s * g + P @ (s * c))  # (b, i, m) [SYMP.geometry_connection]
    later = w - k  # (b, i, m) [SYMP.geometry_velocity]
    moved = x + (later if connection == "old" else w - 0.5 * k)  # (b, i, m) [SYMP.geometry_moved]
    return moved, later, (*known, (u, b, s, rates, r))


def backward(params: Params, saved: Saved, d_moved: Array, d_later: Array) -> tuple[Array, Array, Params]:
    """Return the gradients of x, v and the parameters."""
    (connection, temperature, v, norm, of_a, of_b), (A, B, y, a, c, P, g), turning = saved  # as they were given to it
    xp, m = namespace(d_moved), d_moved.shape[-1]
    turn = xp.matrix_transpose
    d_w = d_moved + d_later  # (b, i, m) [dSYMP.geometry_blend]
    d_u, d_g, d_c, d_a, d_y = (0.0 * d_w for _ in range(5))  # (b, i, m), (b, i, m), (b, i, m), (b, i, m), (b, i, m)
    d_P, d_A, d_B = 0.0 * P, 0.0 * A, 0.0 * B  # (b, i, j), (m, m), (m, m)
    if turning:
        u, b, s, rates, r = turning  # (b, i, m), (b, i, m), (b, i, 1), (b, i, j), (b, i, 1)
        # forward: moved = x + later; later = w - k
        d_k = -(d_moved if connection == "old" else 0.5 * d_moved) - d_later  # (b, i, m) [dSYMP.geometry_velocity]
        # forward: k = r u - (s g + P (s c)) / 2
        d_r = xp.sum(d_k * u, axis=-1, keepdims=True)  # (b, i, 1) [dSYMP.geometry_connection]
        back = turn(P) @ d_k  # (b, i, m): P^T dk
        d_s = -0.5 * xp.sum(back * c + d_k * g, axis=-1, keepdims=True)  # (b, i, 1) [dSYMP.geometry_squares]
        d_g = -0.5 * s * d_k  # (b, i, m): part of dSYMP.geometry_force
        d_c = -0.5 * s * back  # (b, i, m): part of dSYMP.geometry_pushes
        # forward: r = sum_j P (u A y^T + a u^T)
        d_P = d_r * rates  # (b, i, j) [dSYMP.geometry_rate]
        d_P = d_P - 0.5 * d_k @ turn(s * c)  # (b, i, j): with that of SYMP.geometry_connection
        d_rates = d_r * P  # (b, i, j)
        d_u = r * d_k + 2.0 * d_s * b + d_rates @ y @ A + turn(d_rates) @ a  # (b, i, m): du
        d_a = d_rates @ u  # (b, i, m): part of dSYMP.geometry_queries
        d_y = turn(d_rates) @ (u @ A)  # (b, i, m): part of dSYMP.geometry_normed
        d_A = xp.sum(turn(u) @ (d_rates @ y), axis=0)  # (m, m): part of dA
        # forward: s = <u, B^-1 u>
        d_B = -xp.sum(turn(d_s * b) @ b, axis=0)  # (m, m): part of dB
        if connection == "new":
            d_w = d_w + d_u  # (b, i, m): dSYMP.geometry_blend with what asks of u
    # forward: w = beta v + gamma g
    d_beta = xp.reshape(xp.sum(d_w * v), (1,))  # (1)
    d_gamma = xp.reshape(xp.sum(d_w * g), (1,))  # (1)
    d_v = params.beta * d_w + (d_u if connection == "old" else 0.0)  # (b, i, m): dv
    d_g = d_g + params.gamma * d_w  # (b, i, m) [dSYMP.geometry_force]
    # forward: g = P c
    d_P = d_P + d_g @ turn(c)  # (b, i, j): all of dP
    d_c = d_c + turn(P) @ d_g  # (b, i, m) [dSYMP.geometry_pushes]
    # forward: P = softmax(a y^T)
    d_scores = softmax_backward(P, d_P)  # (b, i, j) [dSYMP.geometry_weights]
    # forward: c = a B
    d_a = d_a + d_scores @ y + d_c @ B  # (b, i, m) [dSYMP.geometry_queries]
    d_B = d_B + xp.sum(turn(a) @ d_c, axis=0)  # (m, m): all of dB
    # forward: a = y A
    d_y = d_y + turn(d_scores) @ a + d_a @ A  # (b, i, m) [dSYMP.geometry_normed]
    d_A = d_A + xp.sum(turn(y) @ d_a, axis=0)  # (m, m): all of dA
    d_x = d_y  # (b, i, m)
    if norm is not None:
        # forward: y = norm(x)
        d_x, _, _ = layer_norm.layer_norm_backward(norm, d_y)  # (b, i, m)
    # forward: A = t/m L L^T, B = m/t L L^T
    d_of_b = (d_B + turn(d_B)) @ of_b * (m / temperature)  # (m, m) [dSYMP.geometry_b]
    d_of_a = (d_A + turn(d_A)) @ of_a * (temperature / m)  # (m, m) [dSYMP.geometry_a]
    d_params = Params(factor_backward(params.w_a, d_of_a), factor_backward(params.w_b, d_of_b), d_beta, d_gamma)
    return d_moved + d_x, d_v, d_params


def factor(w: Array, m: int) -> Array:
    """Return the lower factor (m, m) of the rows of its triangle (m (m + 1) / 2)."""
    xp, at = namespace(w), arange(0, m, w)  # -, (m)
    if tuple(w.shape) != (m * (m + 1) // 2,):
        raise ValueError(f"factor: got shape {tuple(w.shape)}, needs {(m * (m + 1) // 2,)} for tokens of width {m}")
    row, column = at[:, None], at[None, :]  # (m, 1), (1, m)
    place = xp.where(column <= row, row * (row + 1) // 2 + column, 0)  # (m, m)
    square = xp.reshape(xp.take(w, xp.reshape(place, (-1,)), axis=0), (m, m))  # (m, m)
    diagonal = xp.logaddexp(square, xp.zeros_like(square)) + FLOOR  # (m, m)
    lower = xp.where(row == column, diagonal, xp.where(column < row, square, 0.0))  # (m, m) [SYMP.geometry_factor]
    return lower


def factor_backward(w: Array, d_lower: Array) -> Array:
    """Return the gradient of the triangle's rows for that of the factor."""
    xp, m = namespace(w), d_lower.shape[0]
    places = _places(m, w)  # of a triangle
    diagonal = places % (m + 1) == 0  # of a triangle
    return xp.take(xp.reshape(d_lower, (-1,)), places, axis=0) * xp.where(diagonal, 1.0 / (1.0 + xp.exp(-w)), 1.0)


def _places(m: int, like: Array) -> Array:
    """Return where the entries of a triangle, row by row, stand among those of its square."""
    at = [row * m + column for row in range(m) for column in range(row + 1)]
    return namespace(like).asarray(at, device=device(like))
