"""Softmax attention a second time: scalar loops written from the papers, sharing nothing with the other forms.

The adjoint of the softmax is taken from its full Jacobian dw_j / ds_l = w_j (delta_jl - w_l), not from the steps of the
dense form; the adjoints of p and z are given beside it. Values come back by the ids of the dense form's docstring. Slow
on purpose; for small sizes.

Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1, and the sources that the dense form names.
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
    softcap: float | None = None,
) -> Values:
    """Return the value of every equation of the forward, by id."""
    batch, heads, queries, d = q.shape
    _, groups, keys, e = v.shape
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    plane = (batch, heads, queries, keys)
    value = {id: np.zeros(plane) for id in ("SM.1", "SM.2", "SM.3", "SM.5", "SM.7")}
    value["SM.4"], value["SM.6"] = np.zeros((*plane[:3], 1)), np.ones((*plane[:3], 1))
    value["SM.8"], value["SM.9"] = np.zeros((*plane[:3], e)), np.full(plane[:3], -math.inf)
    for b in range(batch):
        for h in range(heads):
            g = h * groups // heads
            for i in range(queries):
                for j in range(keys):
                    score = factor * sum(float(q[b, h, i, c]) * float(k[b, g, j, c]) for c in range(d))
                    capped = score if softcap is None else softcap * math.tanh(score / softcap)
                    value["SM.1"][b, h, i, j], value["SM.2"][b, h, i, j] = score, capped
                    value["SM.3"][b, h, i, j] = -math.inf
                    if _allowed(mask, causal, b, h, i, j, queries, keys):
                        value["SM.3"][b, h, i, j] = capped
                attended = [j for j in range(keys) if value["SM.3"][b, h, i, j] > -math.inf]
                if not attended:
                    continue
                top = max(value["SM.3"][b, h, i, j] for j in attended)
                value["SM.4"][b, h, i, 0] = top
                for j in attended:
                    value["SM.5"][b, h, i, j] = math.exp(value["SM.3"][b, h, i, j] - top)
                total = math.fsum(value["SM.5"][b, h, i])
                value["SM.6"][b, h, i, 0] = total
                for j in attended:
                    value["SM.7"][b, h, i, j] = value["SM.5"][b, h, i, j] / total
                for c in range(e):
                    value["SM.8"][b, h, i, c] = math.fsum(value["SM.7"][b, h, i, j] * v[b, g, j, c] for j in attended)
                value["SM.9"][b, h, i] = top + math.log(total)
    # Where an option is not given its equation is not computed; a causal mask that hides nothing is none.
    if softcap is None:
        del value["SM.2"]
    if mask is None and not np.any(value["SM.3"] == -math.inf):
        del value["SM.3"]
    return value


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    d_lse: np.ndarray | None = None,
    *,
    mask: np.ndarray | None = None,
    causal: Any = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> Values:
    """Return the value of every equation of the backward, by id."""
    batch, heads, queries, d = q.shape
    _, groups, keys, e = v.shape
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    value = forward(q, k, v, mask=mask, causal=causal, scale=scale, softcap=softcap)
    weights = value["SM.7"]
    grad: Values = {"dSM.q": np.zeros(q.shape), "dSM.k": np.zeros(k.shape), "dSM.v": np.zeros(v.shape)}
    grad |= {id: np.zeros(weights.shape) for id in ("dSM.7", "dSM.5", "dSM.3")}
    grad["dSM.6"] = np.zeros(value["SM.6"].shape)
    d_scale = d_softcap = 0.0
    for b in range(batch):
        for h in range(heads):
            g = h * groups // heads
            for i in range(queries):
                w = weights[b, h, i]
                for j in range(keys):
                    grad["dSM.7"][b, h, i, j] = sum(d_out[b, h, i, c] * v[b, g, j, c] for c in range(e))
                    for c in range(e):
                        grad["dSM.v"][b, g, j, c] += w[j] * d_out[b, h, i, c]
                # z alone, then one p alone, with everything that is computed from them
                z, empty = value["SM.6"][b, h, i, 0], value["SM.9"][b, h, i] == -math.inf
                d_total = 0.0 if d_lse is None or empty else float(d_lse[b, h, i]) / z
                for j in range(keys):
                    d_total -= grad["dSM.7"][b, h, i, j] * value["SM.5"][b, h, i, j] / z**2
                grad["dSM.6"][b, h, i, 0] = d_total
                for j in range(keys):
                    grad["dSM.5"][b, h, i, j] = grad["dSM.7"][b, h, i, j] / z + d_total
                for m in range(keys):
                    # d lse / d s_m = w_m, and d w_j / d s_m = w_j (delta_jm - w_m)
                    d_capped = 0.0 if d_lse is None or w[m] == 0.0 else float(d_lse[b, h, i]) * w[m]
                    for j in range(keys):
                        d_capped += grad["dSM.7"][b, h, i, j] * w[j] * ((1.0 if j == m else 0.0) - w[m])
                    grad["dSM.3"][b, h, i, m] = d_capped
                    product = sum(float(q[b, h, i, c]) * float(k[b, g, m, c]) for c in range(d))
                    d_score = d_capped
                    if softcap is not None:
                        ratio = factor * product / softcap
                        d_score = d_capped / math.cosh(ratio) ** 2 if abs(ratio) < 300.0 else 0.0
                        d_softcap += d_capped * math.tanh(ratio) - d_score * ratio
                        grad.setdefault("dSM.1", np.zeros(weights.shape))[b, h, i, m] = d_score
                    d_scale += d_score * product
                    for c in range(d):
                        grad["dSM.q"][b, h, i, c] += factor * d_score * k[b, g, m, c]
                        grad["dSM.k"][b, g, m, c] += factor * d_score * q[b, h, i, c]
    grad["dSM.scale"] = np.asarray(d_scale)
    if softcap is not None:
        grad["dSM.softcap"] = np.asarray(d_softcap)
    return grad
