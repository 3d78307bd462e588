"""A long call cut into parts that the definition can afford: some queries with all keys, or some keys with all queries.

What a query gives depends on no other one, so that some of them are a call of their own. Some keys become one when a
last key stands for all the others: its bias gives it the weight that these have together, and one more column of the
values, and of the upstream gradient, carries what they bring to the output. Weights, the inner products of the backward
and the gradients of these keys are those of the whole call. NaN and infinities stay out of it.

Letters: b batch, h query head of one group, i query, j key, s chosen queries, t chosen keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refattn.ops.masks import where_allowed
from refattn.xp import Array, arange, namespace, zeros

LEAST = 1e-12
"""Where all other keys have less weight together, there are none."""


@dataclass(frozen=True)
class Part:
    """A call of its own.

    Attributes
    ----------
    inputs, options, upstream
        Its arguments, and the gradients of its outputs by the names of the backward's arguments.
    grown
        By equation, how many times larger its rounding error is in the whole call, whose sums are longer.
    """

    inputs: dict[str, Array]
    options: dict[str, Any]
    upstream: dict[str, Array]
    grown: dict[str, float]


def of_queries(
    inputs: Mapping[str, Array],
    options: Mapping[str, Any],
    upstream: Mapping[str, Array],
    batch: int,
    group: int,
    at: Array,
) -> Part:
    """Return the call of the queries `at` (s,), in order, of the heads that share a key/value head."""
    one, heads = slice(batch, batch + 1), _heads(inputs, group)
    found = {"q": _rows(inputs["q"][one, heads], at), "k": _own(inputs, "k", batch, group)}
    found["v"] = _own(inputs, "v", batch, group)
    columns = arange(0, found["k"].shape[2], at)
    found["mask"] = _allowed(inputs, options, batch, group, at, columns)
    if "q_lengths" in inputs:
        found["q_lengths"] = namespace(at).sum(at < inputs["q_lengths"][batch], keepdims=True)
    for name in ("bias", "keep"):
        if name in inputs:
            found[name] = _pairs(inputs[name], batch, heads, at, columns)
    if "sink" in inputs:
        found["sink"] = inputs["sink"][heads, ...]
    pulled = {name: _rows(x[one, heads], at) for name, x in upstream.items()}
    return Part(found, _numbers(options), pulled, {})


def of_keys(
    inputs: Mapping[str, Array],
    options: Mapping[str, Any],
    upstream: Mapping[str, Array],
    outputs: Mapping[str, Array],
    batch: int,
    group: int,
    at: Array,
) -> Part:
    """Return the call of the keys `at` (t,) of a key/value head; `outputs` are `out` and `lse` of the whole one.

    In its gradients of k and v the last key, and the last column of v, are those that stand for the others.
    """
    one, heads = slice(batch, batch + 1), _heads(inputs, group)
    q, k, v = inputs["q"][one, heads], _rows(_own(inputs, "k", batch, group), at), _own(inputs, "v", batch, group)
    xp = namespace(q)
    lengths = inputs.get("q_lengths")
    rows = arange(0, q.shape[2], at)
    exists = None if lengths is None else (rows < lengths[batch])[:, None]  # (i, 1)
    q = where_allowed(exists, q, 0.0)
    v = _rows(v, at)
    pulled = {name: x[one, heads] for name, x in upstream.items()}
    d_out = where_allowed(exists, pulled["d_out"], 0.0)
    allowed = _allowed(inputs, options, batch, group, rows, at)
    bias = _pairs(inputs["bias"], batch, heads, rows, at) if "bias" in inputs else zeros((1, 1, 1, 1), q)
    keep = _pairs(inputs["keep"], batch, heads, rows, at) if "keep" in inputs else None
    scale, softcap = options.get("scale"), options.get("softcap")
    scores = q @ xp.matrix_transpose(k) * (1.0 / math.sqrt(q.shape[3]) if scale is None else scale)  # (b, h, i, t)
    scores = scores if softcap is None else softcap * xp.tanh(scores / softcap)
    lse, out = outputs["lse"][one, heads][..., None], outputs["out"][one, heads]
    alive = lse != -math.inf
    weights = xp.exp(xp.where(allowed & alive, scores + bias - xp.where(alive, lse, 0.0), -math.inf))
    others = xp.where(alive, 1.0 - xp.sum(weights, axis=-1, keepdims=True), 0.0)  # (b, h, i, 1)
    some = others > LEAST
    share = xp.where(some, others, 1.0)
    brought = out - (weights if keep is None else keep * weights) @ v  # (b, h, i, e): what the others bring
    pull = xp.where(some, xp.sum(d_out * brought, axis=-1, keepdims=True) / share, 0.0)  # (b, h, i, 1)
    of_others = xp.where(some, xp.log(share) + xp.where(alive, lse, 0.0), -math.inf)
    plane = (1, q.shape[1], q.shape[2])
    pairs = xp.broadcast_to(xp.where(allowed, bias, -math.inf), (*plane, k.shape[2]))
    found = {
        "q": q,
        "k": xp.concat([k, zeros((1, 1, 1, k.shape[3]), k)], axis=2),
        "v": xp.concat([_column(v, 0.0), _column(zeros((1, 1, 1, v.shape[3]), v), 1.0)], axis=2),
        "bias": xp.concat([pairs, of_others], axis=3),
    }
    if keep is not None:
        kept = xp.astype(xp.broadcast_to(keep, (*plane, k.shape[2])), q.dtype)
        found["keep"] = xp.concat([kept, zeros((*plane, 1), q) + 1.0], axis=3)
    more = math.sqrt(max(1.0, inputs["k"].shape[2] / (k.shape[2] + 1)))
    grown = dict.fromkeys(("SM.total", "SM.5", "dSM.total"), more)
    pulled["d_out"] = xp.concat([d_out, pull], axis=3)
    return Part(found, _numbers(options), pulled, grown)


def _column(x: Array, value: float) -> Array:
    """Return x with one more column of a number."""
    return namespace(x).concat([x, zeros((*x.shape[:-1], 1), x) + value], axis=-1)


def _numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are neither masks nor places."""
    return {name: x for name, x in options.items() if name in ("scale", "softcap")}


def _heads(inputs: Mapping[str, Array], group: int) -> slice:
    shared = inputs["q"].shape[1] // inputs["k"].shape[1]
    return slice(group * shared, (group + 1) * shared)


def _own(inputs: Mapping[str, Array], name: str, batch: int, group: int) -> Array:
    """Return keys or values of one head, 0 for those that do not exist."""
    x = inputs[name][batch : batch + 1, group : group + 1]
    lengths = inputs.get("k_lengths")
    exists = None if lengths is None else (arange(0, x.shape[2], lengths) < lengths[batch])[:, None]
    return where_allowed(exists, x, 0.0)


def _rows(x: Array, at: Array) -> Array:
    """Return rows of an array (b, h, i, ...)."""
    return namespace(x).take(x, at, axis=2)


def _pairs(x: Array, batch: int, heads: slice, rows: Array, columns: Array) -> Array:
    """Return a part of what is broadcast to (b, h, i, j) from the right."""
    xp = namespace(x)
    x = xp.reshape(x, (1,) * (4 - x.ndim) + tuple(x.shape))
    x = x if x.shape[0] == 1 else x[batch : batch + 1, ...]
    x = x if x.shape[1] == 1 else x[:, heads, ...]
    x = x if x.shape[2] == 1 else xp.take(x, rows, axis=2)
    return x if x.shape[3] == 1 else xp.take(x, columns, axis=3)


def _allowed(
    inputs: Mapping[str, Array], options: Mapping[str, Any], batch: int, group: int, rows: Array, columns: Array
) -> Array:
    """Return which of these queries may attend which of these keys, (1, 1 or h, s, t)."""
    causal, (left, right) = options.get("causal", False), options.get("window") or (None, None)
    right = right if causal is False else 0
    queries = inputs["q_lengths"][batch] if "q_lengths" in inputs else inputs["q"].shape[2]
    keys = inputs["k_lengths"][batch] if "k_lengths" in inputs else inputs["k"].shape[2]
    given = inputs["offset"][batch] if "offset" in inputs else options.get("offset")
    offset = given if given is not None else 0 if causal == "top_left" else keys - queries
    i, j = rows[:, None], columns[None, :]
    found = (i < queries) & (j < keys)
    found = found if left is None else found & (j >= i + offset - left)
    found = found if right is None else found & (j <= i + offset + right)
    if "mask" in inputs:
        return _pairs(inputs["mask"], batch, _heads(inputs, group), rows, columns) & found[None, None, ...]
    return found[None, None, ...]
