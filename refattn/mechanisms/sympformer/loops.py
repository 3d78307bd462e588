"""The force of a prefix a second time: scalar loops from the Hamiltonian, independent of other implementations.

With E_ij = e^(s_ij) as it stands, without the largest score taken out, S_i = sum_j E_ij, z_i = S_i / n_i and
u_i = e_i / z_i^2 the force is

    o_i = 1/n_i sum_j E_ij (1 + (u_i + u_j) / 2) v_j

Adjoints are taken with respect to E_ij, which the
output of row i has as a factor and z_i as a summand. Values come back by the ids of the dense implementation's
docstring. Slow on purpose; for small sizes, and scores below some 700.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), the kinetic and potential terms of its Hamiltonian for softmax
attention, summed over the prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]


def forward(q: Any, k: Any, v: Any, kinetic: Any = None, **options: Any) -> Values:
    """Return the value of every equation of the forward, by id; options are those of the core."""
    return _by_head(_forward, {"q": q, "k": k, "v": v, "kinetic": kinetic}, options)


def backward(q: Any, k: Any, v: Any, kinetic: Any = None, *, d_out: Any, d_log_z: Any = None, **options: Any) -> Values:
    """Return the value of every equation of the backward, by id; options are those of the core."""
    arrays = {"q": q, "k": k, "v": v, "kinetic": kinetic, "d_out": d_out, "d_log_z": d_log_z}
    found = _by_head(_backward, arrays, options)
    for id in ("dSYMP.k", "dSYMP.v"):  # the query heads of a key head ask together
        found[id] = found[id].reshape(len(q), k.shape[1], -1, *found[id].shape[2:]).sum(axis=2)
    return found


def _by_head(run: Callable[..., Values], arrays: dict[str, Any], options: dict[str, Any]) -> Values:
    """Return what `run` says of every batch element and query head, with what this has of the arrays, (b, h, ...)."""
    batch, heads = arrays["q"].shape[:2]

    def of(b: int, h: int) -> Values:
        own = {name: None if x is None else x[b, h * x.shape[1] // heads] for name, x in arrays.items()}
        return run(**own, **options)

    found = [[of(b, h) for h in range(heads)] for b in range(batch)]
    return {id: np.array([[one[id] for one in row] for row in found]) for id in found[0][0]}


def _seen(causal: Any, i: int, n: int) -> range:
    return range(i + 1) if causal else range(n)


def _forward(q: Any, k: Any, v: Any, kinetic: Any, causal: Any = False, scale: float | None = None) -> Values:
    """Return the values of one head, for q and k (n, d), v (n, e) and kinetic (n, 1)."""
    (n, d), e = q.shape, v.shape[1]
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    value = {f"SYMP.{name}": np.zeros((n, n)) for name in ("unmasked", "exponentials", 6, 11)}
    value |= {f"SYMP.{name}": np.zeros((n, 1)) for name in ("largest", "total", 7, 10)}
    value |= {"SYMP.5": np.full((n, n), -math.inf), "SYMP.12": np.zeros((n, e))}
    scores = [[factor * sum(float(q[i, c]) * k[j, c] for c in range(d)) for j in range(n)] for i in range(n)]
    value["SYMP.unmasked"][:] = scores
    for i in range(n):
        seen = _seen(causal, i, n)
        top = max(scores[i][j] for j in seen)
        for j in seen:
            value["SYMP.5"][i, j] = scores[i][j]
            value["SYMP.exponentials"][i, j] = math.exp(scores[i][j] - top)
        value["SYMP.largest"][i, 0], value["SYMP.total"][i, 0] = top, math.fsum(value["SYMP.exponentials"][i])
        log_z = math.log(_total(value, i, seen) / len(seen))
        value["SYMP.7"][i, 0] = log_z
        value["SYMP.10"][i, 0] = 0.0 if kinetic is None else float(kinetic[i, 0]) / math.exp(log_z) ** 2
    push = value["SYMP.10"][:, 0]
    for i in range(n):
        seen = _seen(causal, i, n)
        total, share = _total(value, i, seen), 1.0 / len(seen)
        for j in seen:
            growth = math.exp(scores[i][j])
            value["SYMP.6"][i, j] = growth / total
            value["SYMP.11"][i, j] = growth / total * (1.0 + (push[i] + push[j]) / 2.0)
            for c in range(e):
                value["SYMP.12"][i, c] += share * growth * (push[i] + push[j] + 2.0) / 2.0 * float(v[j, c])
    if not causal or n == 1:
        del value["SYMP.5"]  # nothing is hidden
    return value


def _total(value: Values, i: int, seen: range) -> float:
    return math.fsum(math.exp(value["SYMP.unmasked"][i, j]) for j in seen)


def _backward(
    q: Any, k: Any, v: Any, kinetic: Any, d_out: Any, d_log_z: Any, causal: Any = False, scale: float | None = None
) -> Values:
    """Return the gradients of one head."""
    (n, d), e = q.shape, v.shape[1]
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    value = _forward(q, k, v, kinetic, causal, scale)
    grad: Values = {"dSYMP.q": np.zeros(q.shape), "dSYMP.k": np.zeros(k.shape), "dSYMP.v": np.zeros(v.shape)}
    grad |= {f"dSYMP.{name}": np.zeros((n, n)) for name in (11, 6, "exponentials", 5)}
    grad |= {f"dSYMP.{name}": np.zeros((n, 1)) for name in (10, 7, "total", "kinetic")}
    push, weights = value["SYMP.10"][:, 0], value["SYMP.6"]
    z = [math.exp(value["SYMP.7"][i, 0]) for i in range(n)]
    for i in range(n):
        for j in range(n):
            asked = z[i] * sum(float(d_out[i, c]) * float(v[j, c]) for c in range(e))
            grad["dSYMP.11"][i, j], grad["dSYMP.6"][i, j] = asked, asked * (1.0 + (push[i] + push[j]) / 2.0)
        for j in _seen(causal, i, n):
            asked = grad["dSYMP.11"][i, j] * weights[i, j] / 2.0
            grad["dSYMP.10"][i, 0] += asked
            grad["dSYMP.10"][j, 0] += asked
            for c in range(e):
                grad["dSYMP.v"][j, c] += z[i] * value["SYMP.11"][i, j] * d_out[i, c]
    for i in range(n):
        seen, by_weight = _seen(causal, i, n), grad["dSYMP.6"][i]
        grad["dSYMP.kinetic"][i, 0] = grad["dSYMP.10"][i, 0] / z[i] ** 2
        own = 0.0 if kinetic is None else float(kinetic[i, 0])
        # z_i as it stands in u_i, and where the loss knows log z; then as a factor of the output
        d_z = -2.0 * own * grad["dSYMP.10"][i, 0] / z[i] ** 3 + (0.0 if d_log_z is None else float(d_log_z[i]) / z[i])
        factor_of = sum(float(d_out[i, c]) * value["SYMP.12"][i, c] / z[i] for c in range(e))
        grad["dSYMP.7"][i, 0] = z[i] * (d_z + factor_of)
        r = value["SYMP.total"][i, 0]
        spread = sum(by_weight[j] * value["SYMP.exponentials"][i, j] for j in range(n))
        d_total = grad["dSYMP.7"][i, 0] / r - spread / r**2
        grad["dSYMP.total"][i, 0] = d_total
        for j in range(n):
            grad["dSYMP.exponentials"][i, j] = by_weight[j] / r + d_total
        for j in seen:
            d_growth = (by_weight[j] / z[i] + d_z) / len(seen)
            d_score = math.exp(value["SYMP.unmasked"][i, j]) * d_growth
            grad["dSYMP.5"][i, j] = d_score
            for c in range(d):
                grad["dSYMP.q"][i, c] += factor * d_score * k[j, c]
                grad["dSYMP.k"][j, c] += factor * d_score * q[i, c]
    return grad
