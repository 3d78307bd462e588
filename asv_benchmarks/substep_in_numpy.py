"""An attention substep of SympFormer in NumPy's functions and nothing else: what refattn could at best take.

The equations are those of the comparison's *plain* side, presymplectic Euler with the prefix oracle, and their adjoints
for gradients of one. A sequence is a task, results overwrite what is not read again, sums over rows are products with
ones, and no argument is looked at.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Arrays = dict[str, Any]

_H_X, _H_Y, _C_LOG, _C_LIN = 0.3, 0.3, 3.0, 1e-4


def substep(w: Arrays, x: Any, p: Any, heads: int) -> tuple[Any, ...]:
    """Return the next x and p (n, m) of one sequence, and the gradients of x, p, the weights and the numbers."""
    (tokens, width), gains = x.shape, np.ones(x.shape[1], x.dtype)
    n, scale = np.arange(1.0, tokens + 1.0, dtype=x.dtype)[:, None], 1.0 / math.sqrt(heads * width)
    damp = math.exp(-(_C_LOG * math.log1p(_H_Y) + _C_LIN * _H_Y))
    u, u_normalised, u_inverse = _normed(x, gains)
    q, k, v, moved = u @ w["q"], u @ w["k"], u @ w["v"], p @ w["b"]
    growth = q @ k.T
    growth *= scale
    np.clip(growth, -60.0, 60.0, out=growth)
    np.exp(growth, out=growth)
    growth *= np.tri(tokens, dtype=x.dtype)
    z = np.maximum(growth.sum(axis=-1, keepdims=True) / n, 1e-8)
    energy = np.vecdot(moved, p)[:, None]
    over = 1.0 / (z * z + 1e-8)
    s = energy * over
    factor = s + (s.T + 2.0)
    pairs = growth * factor
    attended = pairs @ v
    attended /= 2.0 * n
    force = attended @ w["o"]
    raw = _H_Y * force
    raw += p
    raw *= damp
    speed = raw @ w["b"]
    speed /= z
    momentum, m_normalised, m_inverse = _normed(raw, gains)
    result = _H_X * speed
    result += x
    d_result, d_momentum = np.ones_like(result), np.ones_like(momentum)
    d_raw, d_gain_p = _normed_backward(m_normalised, m_inverse, gains, d_momentum)
    d_h_x = np.vdot(d_result, speed)
    d_speed = _H_X * d_result
    d_z = -np.vecdot(d_speed, speed)[:, None] / z
    d_speed /= z
    d_raw += d_speed @ w["b"].T
    d_w_b = raw.T @ d_speed
    d_damp = np.vdot(d_raw, raw)
    d_p = damp * d_raw
    d_force = _H_Y * d_p
    d_h_y = np.vdot(d_p, force)
    d_w_o = attended.T @ d_force
    d_attended = d_force @ w["o"].T
    d_attended /= 2.0 * n
    d_v = pairs.T @ d_attended
    d_pairs = d_attended @ v.T
    d_factor = d_pairs * growth
    d_s = d_factor.sum(axis=1, keepdims=True) + d_factor.sum(axis=0)[:, None]
    d_energy = d_s * over
    d_z -= d_s * energy * (2.0 * z * over * over)
    d_pairs *= factor
    d_pairs += d_z / n
    d_pairs *= growth
    d_pairs *= scale
    d_moved = d_energy * p
    d_p += d_energy * moved
    d_p += d_moved @ w["b"].T
    d_w_b += p.T @ d_moved
    d_q, d_k = d_pairs @ k, d_pairs.T @ q
    d_u = d_q @ w["q"].T
    d_u += d_k @ w["k"].T
    d_u += d_v @ w["v"].T
    d_x, d_gain = _normed_backward(u_normalised, u_inverse, gains, d_u)
    d_x += d_result
    d_weights = u.T @ d_q, u.T @ d_k, u.T @ d_v, d_w_o, d_w_b
    return result, momentum, d_x, d_p, *d_weights, d_gain, d_gain_p, d_h_x, d_h_y, d_damp


def _normed(x: Any, by: Any) -> tuple[Any, Any, Any]:
    normalised = x - x @ np.full((x.shape[1], 1), 1.0 / x.shape[1], "f")
    inverse = 1.0 / np.sqrt(np.vecdot(normalised, normalised)[:, None] / x.shape[1] + 1e-5)
    normalised *= inverse
    return normalised * by, normalised, inverse


def _normed_backward(normalised: Any, inverse: Any, by: Any, d_y: Any) -> tuple[Any, Any]:
    d, width = d_y * by, d_y.shape[1]
    along_x = np.vecdot(d, normalised)[:, None] / width
    d -= d @ np.full((width, 1), 1.0 / width, "f")
    d -= normalised * along_x
    d *= inverse
    return d, np.ones(len(d), d.dtype) @ (d_y * normalised)
