"""The same a second time: scalar loops written from the report, sharing nothing with the other forms.

The functional gradient is taken from the full Jacobian of the softmax, da_j / ds_l = a_j (delta_jl - a_l), not from the
steps of the dense form; the adjoint of z is given beside it. Values come back by the ids of the dense form's docstring.
Slow on purpose; for small sizes.

Source: L. Burgund, Attention Growing Networks, section 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]


def _allowed(mask: np.ndarray | None, causal: Any, b: int, h: int, i: int, j: int, queries: int, keys: int) -> bool:
    if causal == "top_left" and j > i:
        return False
    if (causal is True or causal == "bottom_right") and queries - i > keys - j:
        # Counted from the end: the last query sees all keys, the last but one all but the last, ...
        return False
    if mask is None:
        return True
    full = (1,) * (4 - mask.ndim) + mask.shape
    position = tuple(0 if size == 1 else at for size, at in zip(full, (b, h, i, j), strict=True))
    return bool(mask.reshape(full)[position])


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    causal: Any = False,
    scale: float | None = None,
) -> Values:
    """Return the value of every equation of the forward, by id."""
    batch, heads, queries, d = q.shape
    _, groups, keys, e = v.shape
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    plane = (batch, heads, queries, keys)
    value = {id: np.zeros(plane) for id in ("GROW.1", "GROW.3", "GROW.5")}
    value["GROW.2"] = np.full(plane, -math.inf)
    value["GROW.4"], value["GROW.6"] = np.ones((*plane[:3], 1)), np.zeros((*plane[:3], e))
    for b in range(batch):
        for h in range(heads):
            g = h * groups // heads
            for i in range(queries):
                attended = []
                for j in range(keys):
                    score = factor * sum(float(q[b, h, i, c]) * float(k[b, g, j, c]) for c in range(d))
                    value["GROW.1"][b, h, i, j] = score
                    if _allowed(mask, causal, b, h, i, j, queries, keys):
                        value["GROW.2"][b, h, i, j] = score
                        attended.append(j)
                if not attended:
                    continue
                largest = max(value["GROW.1"][b, h, i, j] for j in attended)
                for j in attended:
                    value["GROW.3"][b, h, i, j] = math.exp(value["GROW.1"][b, h, i, j] - largest)
                total = math.fsum(value["GROW.3"][b, h, i])
                value["GROW.4"][b, h, i, 0] = total
                for j in attended:
                    value["GROW.5"][b, h, i, j] = value["GROW.3"][b, h, i, j] / total
                for c in range(e):
                    terms = (value["GROW.5"][b, h, i, j] * float(v[b, g, j, c]) for j in attended)
                    value["GROW.6"][b, h, i, c] = math.fsum(terms)
    # A mask that is not given is not computed; a causal mask that hides nothing is none.
    if mask is None and not np.any(value["GROW.2"] == -math.inf):
        del value["GROW.2"]
    return value


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    causal: Any = False,
    scale: float | None = None,
) -> Values:
    """Return the value of every equation of the backward, by id."""
    batch, heads, queries, d = q.shape
    _, groups, keys, e = v.shape
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    value = forward(q, k, v, mask=mask, causal=causal, scale=scale)
    weights = value["GROW.5"]
    grad: Values = {"dGROW.q": np.zeros(q.shape), "dGROW.k": np.zeros(k.shape), "dGROW.v": np.zeros(v.shape)}
    grad |= {id: np.zeros(weights.shape) for id in ("dGROW.5", "dGROW.1")}
    grad["dGROW.4"] = np.zeros(value["GROW.4"].shape)
    d_scale = 0.0
    for b in range(batch):
        for h in range(heads):
            g = h * groups // heads
            for i in range(queries):
                a, z = weights[b, h, i], value["GROW.4"][b, h, i, 0]
                for j in range(keys):
                    grad["dGROW.5"][b, h, i, j] = sum(float(d_out[b, h, i, c]) * float(v[b, g, j, c]) for c in range(e))
                    for c in range(e):
                        grad["dGROW.v"][b, g, j, c] += a[j] * d_out[b, h, i, c]
                # z alone: every weight is p_j / z
                for j in range(keys):
                    grad["dGROW.4"][b, h, i, 0] -= grad["dGROW.5"][b, h, i, j] * value["GROW.3"][b, h, i, j] / z**2
                for m in range(keys):
                    # the score of key m changes every weight of the row
                    pull = 0.0
                    for j in range(keys):
                        pull += grad["dGROW.5"][b, h, i, j] * a[j] * ((1.0 if j == m else 0.0) - a[m])
                    grad["dGROW.1"][b, h, i, m] = pull
                    for c in range(d):
                        d_scale += pull * float(q[b, h, i, c]) * float(k[b, g, m, c])
                        grad["dGROW.q"][b, h, i, c] += factor * pull * k[b, g, m, c]
                        grad["dGROW.k"][b, g, m, c] += factor * pull * q[b, h, i, c]
    grad["dGROW.scale"] = np.asarray(d_scale)
    return grad
