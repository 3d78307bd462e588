"""The force of the prefix oracle a second time: scalar loops from the Hamiltonian, independent of other
implementations.

With E_ij = e^(s_ij) as it stands, without the largest score taken out, S_i = sum_j E_ij, z_i = S_i / n_i and
u_i = e_i / z_i^2 the force is

    o_i = 1/n_i sum_j E_ij (1 + (u_i + u_j) / 2) v_j

and where log z_i would leave its bounds, z_i / S_i stands for 1/n_i. Adjoints are taken with respect to E_ij, which the
output of row i has as a factor and z_i as a summand. Values come back by the ids of the dense implementation's
docstring. Slow on purpose; for small sizes, and scores below some 700.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), the kinetic and potential terms of its Hamiltonian for softmax
attention, summed over the prefix.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]


def _seen(causal: Any, i: int, n: int) -> range:
    return range(i + 1) if causal else range(n)


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    kinetic: np.ndarray | None = None,
    *,
    causal: Any = False,
    scale: float | None = None,
) -> Values:
    """Return the value of every equation of the forward, by id."""
    batch, heads, n, d = q.shape
    groups, e = v.shape[1], v.shape[3]
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    value = {f"SYMP.{name}": np.zeros((batch, heads, n, n)) for name in ("unmasked", "exponentials", 6, 11)}
    value |= {f"SYMP.{name}": np.zeros((batch, heads, n, 1)) for name in ("largest", "total", 7, 10)}
    value["SYMP.5"] = np.full((batch, heads, n, n), -math.inf)
    value["SYMP.12"] = np.zeros((batch, heads, n, e))
    for b in range(batch):
        for h in range(heads):
            g = h * groups // heads
            for i in range(n):
                for j in range(n):
                    value["SYMP.unmasked"][b, h, i, j] = factor * sum(
                        float(q[b, h, i, c]) * k[b, g, j, c] for c in range(d)
                    )
                top = max(value["SYMP.unmasked"][b, h, i, j] for j in _seen(causal, i, n))
                value["SYMP.largest"][b, h, i, 0] = top
                for j in _seen(causal, i, n):
                    value["SYMP.5"][b, h, i, j] = value["SYMP.unmasked"][b, h, i, j]
                    value["SYMP.exponentials"][b, h, i, j] = math.exp(value["SYMP.unmasked"][b, h, i, j] - top)
                total, count = _total(value, b, h, i, n, causal), len(_seen(causal, i, n))
                value["SYMP.total"][b, h, i, 0] = math.fsum(value["SYMP.exponentials"][b, h, i])
                value["SYMP.7"][b, h, i, 0] = min(max(math.log(total / count), -20.0), 20.0)
                z = math.exp(value["SYMP.7"][b, h, i, 0])
                value["SYMP.10"][b, h, i, 0] = 0.0 if kinetic is None else float(kinetic[b, h, i, 0]) / z**2
            for i in range(n):
                total, count = _total(value, b, h, i, n, causal), len(_seen(causal, i, n))
                push = value["SYMP.10"][b, h, :, 0]
                share = 1.0 / count
                if abs(value["SYMP.7"][b, h, i, 0]) == 20.0:
                    share = math.exp(value["SYMP.7"][b, h, i, 0]) / total
                for j in _seen(causal, i, n):
                    growth = math.exp(value["SYMP.unmasked"][b, h, i, j])
                    value["SYMP.6"][b, h, i, j] = growth / total
                    value["SYMP.11"][b, h, i, j] = growth / total * (1.0 + (push[i] + push[j]) / 2.0)
                    for c in range(e):
                        value["SYMP.12"][b, h, i, c] += (
                            share * growth * (push[i] + push[j] + 2.0) / 2.0 * float(v[b, g, j, c])
                        )
    if not causal or n == 1:
        del value["SYMP.5"]  # nothing is hidden
    return value


def _total(value: Values, b: int, h: int, i: int, n: int, causal: Any) -> float:
    return math.fsum(math.exp(value["SYMP.unmasked"][b, h, i, j]) for j in _seen(causal, i, n))


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    kinetic: np.ndarray | None = None,
    *,
    d_out: np.ndarray,
    d_log_z: np.ndarray | None = None,
    causal: Any = False,
    scale: float | None = None,
) -> Values:
    """Return the value of every equation of the backward, by id."""
    batch, heads, n, d = q.shape
    groups, e = v.shape[1], v.shape[3]
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    value = forward(q, k, v, kinetic, causal=causal, scale=scale)
    grad: Values = {"dSYMP.q": np.zeros(q.shape), "dSYMP.k": np.zeros(k.shape), "dSYMP.v": np.zeros(v.shape)}
    grad |= {f"dSYMP.{name}": np.zeros((batch, heads, n, n)) for name in (11, 6, "exponentials", 5)}
    grad |= {f"dSYMP.{name}": np.zeros((batch, heads, n, 1)) for name in (10, 7, "total", "kinetic")}
    for b in range(batch):
        for h in range(heads):
            g = h * groups // heads
            push = value["SYMP.10"][b, h, :, 0]
            z = [math.exp(value["SYMP.7"][b, h, i, 0]) for i in range(n)]
            for i in range(n):
                for j in range(n):
                    along = sum(float(d_out[b, h, i, c]) * float(v[b, g, j, c]) for c in range(e))
                    grad["dSYMP.11"][b, h, i, j] = z[i] * along
                    grad["dSYMP.6"][b, h, i, j] = z[i] * along * (1.0 + (push[i] + push[j]) / 2.0)
            for i in range(n):
                for j in _seen(causal, i, n):
                    asked = grad["dSYMP.11"][b, h, i, j] * value["SYMP.6"][b, h, i, j] / 2.0
                    grad["dSYMP.10"][b, h, i, 0] += asked
                    grad["dSYMP.10"][b, h, j, 0] += asked
                    for c in range(e):
                        grad["dSYMP.v"][b, g, j, c] += z[i] * value["SYMP.11"][b, h, i, j] * d_out[b, h, i, c]
            for i in range(n):
                grad["dSYMP.kinetic"][b, h, i, 0] = grad["dSYMP.10"][b, h, i, 0] / z[i] ** 2
                own = 0.0 if kinetic is None else float(kinetic[b, h, i, 0])
                # z_i as it stands in u_i, and where the loss knows log z; then as a factor of the output
                d_z = -2.0 * own * grad["dSYMP.10"][b, h, i, 0] / z[i] ** 3
                d_z += 0.0 if d_log_z is None else float(d_log_z[b, h, i]) / z[i]
                factor_of = sum(float(d_out[b, h, i, c]) * value["SYMP.12"][b, h, i, c] / z[i] for c in range(e))
                grad["dSYMP.7"][b, h, i, 0] = z[i] * (d_z + factor_of)
                total, count = _total(value, b, h, i, n, causal), len(_seen(causal, i, n))
                bound = abs(value["SYMP.7"][b, h, i, 0]) == 20.0
                spread = sum(grad["dSYMP.6"][b, h, i, j] * value["SYMP.exponentials"][b, h, i, j] for j in range(n))
                r = value["SYMP.total"][b, h, i, 0]
                grad["dSYMP.total"][b, h, i, 0] = (0.0 if bound else grad["dSYMP.7"][b, h, i, 0]) / r - spread / r**2
                d_total = grad["dSYMP.total"][b, h, i, 0]
                for j in range(n):
                    grad["dSYMP.exponentials"][b, h, i, j] = grad["dSYMP.6"][b, h, i, j] / r + d_total
                for j in _seen(causal, i, n):
                    growth = math.exp(value["SYMP.unmasked"][b, h, i, j])
                    if bound:  # z_i does not move; o_i is z_i times a mean with the weights E_ij / S_i
                        mean = sum(grad["dSYMP.6"][b, h, i, m] * value["SYMP.6"][b, h, i, m] for m in range(n))
                        d_growth = (grad["dSYMP.6"][b, h, i, j] - mean) / total
                    else:
                        d_growth = (grad["dSYMP.6"][b, h, i, j] / z[i] + d_z) / count
                    d_score = growth * d_growth
                    grad["dSYMP.5"][b, h, i, j] = d_score
                    for c in range(d):
                        grad["dSYMP.q"][b, h, i, c] += factor * d_score * k[b, g, j, c]
                        grad["dSYMP.k"][b, g, j, c] += factor * d_score * q[b, h, i, c]
    return grad
