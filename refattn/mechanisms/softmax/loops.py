"""Softmax attention a second time: one number after the other from the papers, sharing nothing with the other files.

The forward is written in scalars (`refattn.mechanisms.scalar_autodiff`), whose adjoints come from the chain rule alone,
where the dense implementation has formulas. Values come back by the ids of its docstring. Slow on purpose; for small
sizes.

Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1, and the sources that the dense implementation names.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.mechanisms.scalar_autodiff import Scalar, copy, dot, exp, scalars, slopes, sweep, total, values

Values = dict[str, np.ndarray]

OPTIONS = {"SM.capped": "softcap", "SM.biased": "bias", "SM.sunk": "sink", "SM.kept": "keep"}
"""Equations that are computed only with an option."""


class _Keys:
    """Which keys a query may attend, from the words of docs/conventions.md."""

    def __init__(self, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        self.queries, self.keys = shape[2:]
        mask = options.get("mask")
        self.given, self.mask = options, np.broadcast_to(True if mask is None else mask, shape)

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
        return bool(self.mask[b, h, i, j])


def _tanh(x: Scalar) -> Scalar:
    slope = 1.0 / math.cosh(x.value) ** 2 if abs(x.value) < 300.0 else 0.0
    return Scalar(math.tanh(x.value), ((x, slope),))


def _run(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the scalars of every equation by id, and those of the arguments that have a gradient by name."""
    (batch, heads, queries, d), (groups, keys, e) = q.shape, v.shape[1:]
    plane = (batch, heads, queries, keys)
    given = {name: x for name in ("scale", "softcap", "sink") if (x := options.get(name)) is not None}
    for name in ("bias", "keep"):
        if (x := options.get(name)) is not None:
            given[name] = np.reshape(x, (1,) * (4 - np.ndim(x)) + np.shape(x))
    leaves = {name: scalars(x) for name, x in ({"scale": 1.0 / math.sqrt(d), "q": q, "k": k, "v": v} | given).items()}
    if "sink" in leaves:
        leaves["sink"] = leaves["sink"].reshape(heads, -1)
    wide = {name: np.broadcast_to(leaves[name], plane) for name in ("bias", "keep") if name in leaves}
    scale, softcap, pairs = leaves["scale"][()], leaves.get("softcap"), _Keys(plane, options)
    sinks = leaves["sink"].shape[1] if "sink" in leaves else 0
    axes: dict[str, tuple[int, ...]] = {
        id: plane for id in ("SM.1", "SM.capped", "SM.biased", "SM.2", "SM.3", "SM.4", "SM.kept")
    }
    axes |= {"SM.largest": plane[:3], "SM.top": (*plane[:3], 1), "SM.sunk": (*plane[:3], sinks)}
    axes |= {"SM.total": (*plane[:3], 1), "SM.5": (*plane[:3], e), "SM.lse": plane[:3]}
    value: dict[str, Any] = {id: np.empty(shape, dtype=object) for id, shape in axes.items()}
    for row in np.ndindex(*plane[:3]):
        b, h, i = row
        g, (q_length, k_length) = h * groups // heads, pairs.lengths(b)
        key, content = (
            [leaves[name][b, g, j] if j < k_length else scalars(np.zeros(n)) for j in range(keys)]
            for name, n in (("k", d), ("v", e))
        )
        for j in range(keys):
            score = scale * dot(leaves["q"][row], key[j]) if i < q_length and j < k_length else Scalar(0.0)
            value["SM.1"][b, h, i, j] = score
            if softcap is not None:
                score = value["SM.capped"][b, h, i, j] = softcap[()] * _tanh(score / softcap[()])
            if "bias" in wide:
                score = value["SM.biased"][b, h, i, j] = score + wide["bias"][b, h, i, j]
            value["SM.2"][b, h, i, j] = copy(score) if pairs.allowed(b, h, i, j) else Scalar(-math.inf)
        logits = list(leaves["sink"][h]) if "sink" in leaves and i < q_length else []
        largest = max((m.value for m in value["SM.2"][row]), default=-math.inf)
        top = max([largest, *(logit.value for logit in logits)])
        alive = top > -math.inf
        value["SM.largest"][row], value["SM.top"][row] = Scalar(largest), [Scalar(top if alive else 0.0)]
        exponentials = [exp(m - top) if m.value > -math.inf else Scalar(0.0) for m in value["SM.2"][row]]
        sunk = [exp(logit - top) for logit in logits] if alive else []
        z = total([*exponentials, *sunk]) if alive else Scalar(1.0)
        weights = [u / z for u in exponentials]
        kept = [weight * wide["keep"][b, h, i, j] for j, weight in enumerate(weights)] if "keep" in wide else weights
        value["SM.3"][row], value["SM.sunk"][row] = exponentials, sunk or [Scalar(0.0)] * sinks
        value["SM.total"][row], value["SM.4"][row], value["SM.kept"][row] = [z], weights, kept
        value["SM.5"][row] = [dot(kept, [content[j][c] for j in range(keys)]) for c in range(e)]
        # The largest score is taken for a constant: neither the output nor lse changes with it.
        value["SM.lse"][row] = Scalar(top + math.log(z.value), ((z, 1.0 / z.value),)) if alive else Scalar(-math.inf)
    # A causal mask or a window that hides nothing is none.
    hidden = any(not pairs.allowed(*at) for at in np.ndindex(*plane))
    masks = any(options.get(name) is not None for name in ("mask", "q_lengths", "k_lengths"))
    bounded = options.get("causal", False) is not False or any(n is not None for n in options.get("window") or ())
    absent = {id for id, name in OPTIONS.items() if options.get(name) is None}
    if not (hidden or masks or (bounded and isinstance(options.get("offset"), np.ndarray))):
        absent.add("SM.2")
    return {id: x for id, x in value.items() if id not in absent} | {"masked": value["SM.2"]}, leaves


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Values:
    """Return the value of every equation of the forward, by id; options as those of the core."""
    return {id: values(x) for id, x in _run(q, k, v, options)[0].items() if id != "masked"}


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    d_out: np.ndarray,
    d_lse: np.ndarray | None = None,
    **options: Any,
) -> Values:
    """Return the value of every equation of the backward, by id; options as those of the core."""
    value, leaves = _run(q, k, v, options)
    lengths = options.get("q_lengths")
    exists = np.arange(q.shape[2]) < (q.shape[2] if lengths is None else np.asarray(lengths)[:, None])  # (b, i)
    exists = np.broadcast_to(exists, (len(q), q.shape[2]))[:, None, :]
    pulls = np.where(exists[..., None], d_out, 0.0), np.where(exists, 0.0 if d_lse is None else d_lse, 0.0)
    shape = value["SM.lse"].shape
    sweep(
        np.concatenate([np.ravel(value[id]) for id in ("SM.5", "SM.lse")]),
        np.concatenate([np.ravel(pulls[0]), np.ravel(np.broadcast_to(pulls[1], shape))]),
    )
    ids = {"SM.total", "SM.4", "SM.3"} | {id for id in ("SM.kept",) if id in value}
    ids |= {"SM.1"} if "softcap" in leaves else set()
    grad = {f"d{id}": slopes(value[id]) for id in ids} | {f"dSM.{name}": slopes(x) for name, x in leaves.items()}
    return grad | {"dSM.2": slopes(value["masked"])}
