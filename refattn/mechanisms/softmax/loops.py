"""Softmax attention a second time: scalar loops written from the papers, sharing nothing with the other
implementations.

The adjoint of the softmax is taken from its full Jacobian dw_j / ds_l = w_j (delta_jl - w_l), not from the steps of the
dense implementation; the adjoints of p and z are given beside it. Values come back by the ids of the dense
implementation's docstring. Slow on purpose; for small sizes.

Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1, and the sources that the dense implementation names.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]


def _at(x: np.ndarray | None, b: int, h: int, i: int, j: int) -> Any:
    """Return the element of an array that broadcasts to (b, h, i, j), None of none."""
    if x is None:
        return None
    full = (1,) * (4 - x.ndim) + x.shape
    return x.reshape(full)[tuple(0 if size == 1 else at for size, at in zip(full, (b, h, i, j), strict=True))]


class _Keys:
    """Which keys a query may attend, from the words of docs/conventions.md."""

    def __init__(self, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        self.queries, self.keys = shape[2:]
        self.given = options

    def lengths(self, b: int) -> tuple[int, int]:
        """Return how many queries and keys of a batch element exist."""
        own, other = self.given.get("q_lengths"), self.given.get("k_lengths")
        return self.queries if own is None else int(own[b]), self.keys if other is None else int(other[b])

    def allowed(self, b: int, h: int, i: int, j: int) -> bool:
        """Tell whether query i may attend key j, as far as the bias is not asked."""
        q_length, k_length = self.lengths(b)
        if i >= q_length or j >= k_length:
            return False
        causal, offset = self.given.get("causal", False), self.given.get("offset")
        if offset is not None:
            place = i + int(offset[b] if np.ndim(offset) else offset)
        elif causal == "top_left":
            place = i
        else:
            place = k_length - (q_length - i)  # counted from the end: the last query stands at the last key
        if causal is not False and j > place:
            return False
        left, right = self.given.get("window") or (None, None)
        if (left is not None and place - j > left) or (right is not None and j - place > right):
            return False
        mask = _at(self.given.get("mask"), b, h, i, j)
        return mask is None or bool(mask)


def _sinks(sink: np.ndarray | None, h: int) -> list[float]:
    return [] if sink is None else [float(x) for x in np.atleast_1d(sink[h])]


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Values:
    """Return the value of every equation of the forward, by id; options as those of the core."""
    batch, heads, queries, d = q.shape
    _, groups, keys, e = v.shape
    scale, softcap, sink = options.get("scale"), options.get("softcap"), options.get("sink")
    bias, keep = options.get("bias"), options.get("keep")
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    plane = (batch, heads, queries, keys)
    pairs = _Keys(plane, options)
    value = {id: np.zeros(plane) for id in ("SM.1", "SM.capped", "SM.2", "SM.3", "SM.4", "SM.biased", "SM.kept")}
    value["SM.top"], value["SM.total"] = np.zeros((*plane[:3], 1)), np.ones((*plane[:3], 1))
    value["SM.5"], value["SM.lse"] = np.zeros((*plane[:3], e)), np.full(plane[:3], -math.inf)
    value["SM.largest"] = np.full(plane[:3], -math.inf)
    value["SM.sunk"] = np.zeros((*plane[:3], len(_sinks(sink, 0)) if heads else 0))
    for b in range(batch):
        q_length, k_length = pairs.lengths(b)
        for h in range(heads):
            g = h * groups // heads
            for i in range(queries):
                row = (b, h, i)
                for j in range(keys):
                    score = 0.0
                    if i < q_length and j < k_length:
                        score = factor * sum(float(q[b, h, i, c]) * float(k[b, g, j, c]) for c in range(d))
                    capped = score if softcap is None else softcap * math.tanh(score / softcap)
                    value["SM.1"][b, h, i, j], value["SM.capped"][b, h, i, j] = score, capped
                    biased = capped if bias is None else capped + float(_at(bias, b, h, i, j))
                    value["SM.biased"][b, h, i, j] = biased
                    value["SM.2"][b, h, i, j] = biased if pairs.allowed(b, h, i, j) else -math.inf
                attended = [j for j in range(keys) if value["SM.2"][b, h, i, j] > -math.inf]
                own = _sinks(sink, h) if i < q_length else []
                value["SM.largest"][row] = max((value["SM.2"][b, h, i, j] for j in attended), default=-math.inf)
                top = max([float(value["SM.largest"][row]), *own])
                if top == -math.inf:
                    continue
                value["SM.top"][b, h, i, 0] = top
                for j in attended:
                    value["SM.3"][b, h, i, j] = math.exp(value["SM.2"][b, h, i, j] - top)
                for n, logit in enumerate(own):
                    value["SM.sunk"][b, h, i, n] = math.exp(logit - top)
                total = math.fsum([*value["SM.3"][row], *value["SM.sunk"][row]])
                value["SM.total"][b, h, i, 0] = total
                for j in attended:
                    value["SM.4"][b, h, i, j] = value["SM.3"][b, h, i, j] / total
                    kept = 1.0 if keep is None else float(_at(keep, b, h, i, j))
                    value["SM.kept"][b, h, i, j] = kept * value["SM.4"][b, h, i, j]
                for c in range(e):
                    value["SM.5"][b, h, i, c] = math.fsum(
                        value["SM.kept"][b, h, i, j] * v[b, g, j, c] for j in attended
                    )
                value["SM.lse"][b, h, i] = top + math.log(total)
    # Where an option is not given its equation is not computed; a causal mask or a window that hides nothing is none.
    given = {"SM.capped": softcap, "SM.biased": bias, "SM.sunk": sink, "SM.kept": keep}
    hidden = any(not pairs.allowed(*at) for at in np.ndindex(*plane))
    masks = any(options.get(name) is not None for name in ("mask", "q_lengths", "k_lengths"))
    bounded = options.get("causal", False) is not False or any(n is not None for n in options.get("window") or ())
    batched = bounded and isinstance(options.get("offset"), np.ndarray)
    if not (hidden or masks or batched):
        given["SM.2"] = None
    return {id: x for id, x in value.items() if id not in given or given[id] is not None}


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    d_lse: np.ndarray | None = None,
    **options: Any,
) -> Values:
    """Return the value of every equation of the backward, by id; options as those of the core."""
    batch, heads, queries, d = q.shape
    _, groups, keys, e = v.shape
    scale, softcap, sink = options.get("scale"), options.get("softcap"), options.get("sink")
    bias, keep = options.get("bias"), options.get("keep")
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    value = forward(q, k, v, **options)
    weights, pairs = value["SM.4"], _Keys(value["SM.4"].shape, options)
    grad: Values = {"dSM.q": np.zeros(q.shape), "dSM.k": np.zeros(k.shape), "dSM.v": np.zeros(v.shape)}
    grad |= {id: np.zeros(weights.shape) for id in ("dSM.4", "dSM.3", "dSM.2", "dSM.kept")}
    grad |= {id: np.zeros(weights.shape) for id in ("dSM.bias", "dSM.keep")}
    grad["dSM.sink"] = np.zeros((heads, len(_sinks(sink, 0)) if heads else 0))
    grad["dSM.total"] = np.zeros(value["SM.total"].shape)
    d_scale = d_softcap = 0.0
    for b in range(batch):
        q_length, k_length = pairs.lengths(b)
        for h in range(heads):
            g = h * groups // heads
            for i in range(queries):
                w = weights[b, h, i]
                alive = value["SM.lse"][b, h, i] > -math.inf
                pull = float(d_lse[b, h, i]) if d_lse is not None and alive else 0.0
                for j in range(keys):
                    exists = i < q_length and j < k_length
                    dot = sum(float(d_out[b, h, i, c] * v[b, g, j, c]) for c in range(e)) if exists else 0.0
                    kept = 1.0 if keep is None else float(_at(keep, b, h, i, j))
                    grad["dSM.kept"][b, h, i, j], grad["dSM.4"][b, h, i, j] = dot, kept * dot
                    grad["dSM.keep"][b, h, i, j] = dot * w[j]
                    for c in range(e) if exists else ():
                        grad["dSM.v"][b, g, j, c] += kept * w[j] * d_out[b, h, i, c]
                # z alone, then one p alone, with everything that is computed from them
                z = value["SM.total"][b, h, i, 0]
                d_total = pull / z
                for j in range(keys):
                    d_total -= grad["dSM.4"][b, h, i, j] * value["SM.3"][b, h, i, j] / z**2
                grad["dSM.total"][b, h, i, 0] = d_total
                for n, logit in enumerate(_sinks(sink, h) if alive else ()):
                    # d lse / d sink = its share of the sum, and d w_j / d sink = -w_j times that share
                    share = math.exp(logit - value["SM.lse"][b, h, i])
                    grad["dSM.sink"][h, n] += pull * share
                    for j in range(keys):
                        grad["dSM.sink"][h, n] -= grad["dSM.4"][b, h, i, j] * w[j] * share
                for j in range(keys):
                    grad["dSM.3"][b, h, i, j] = grad["dSM.4"][b, h, i, j] / z + d_total
                for m in range(keys):
                    # d lse / d s_m = w_m, and d w_j / d s_m = w_j (delta_jm - w_m)
                    d_capped = pull * w[m]
                    for j in range(keys):
                        d_capped += grad["dSM.4"][b, h, i, j] * w[j] * ((1.0 if j == m else 0.0) - w[m])
                    grad["dSM.2"][b, h, i, m] = d_capped
                    grad["dSM.bias"][b, h, i, m] = d_capped
                    if i >= q_length or m >= k_length:
                        continue
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
        grad.setdefault("dSM.1", np.zeros(weights.shape))
    for id, x in (("dSM.bias", bias), ("dSM.keep", keep)):
        grad[id] = _summed(grad[id], x)
    absent = {"dSM.bias": bias, "dSM.keep": keep, "dSM.kept": keep, "dSM.sink": sink}
    return {id: x for id, x in grad.items() if id not in absent or absent[id] is not None}


def _summed(gradient: np.ndarray, x: np.ndarray | None) -> np.ndarray:
    """Return the sum over the axes that x was broadcast along; it keeps four axes."""
    if x is None:
        return gradient
    full = (1,) * (4 - x.ndim) + x.shape
    total = np.zeros(full)
    for at in np.ndindex(*gradient.shape):
        total[tuple(0 if size == 1 else n for size, n in zip(full, at, strict=True))] += gradient[at]
    return total
