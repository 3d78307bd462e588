"""How large a rounding error the equations of the graph make: the part of `magnitudes` from q and k to the links."""

from __future__ import annotations

import math
from typing import Any

from refattn.mechanisms.graph_energy.options.links import Kernel
from refattn.mechanisms.graph_energy.testing.given import graph_of, is_over_keys, start_of
from refattn.mechanisms.graph_energy.testing.sizes import (
    Given,
    absolute,
    heads_of,
    scale_of,
    size_of_sum,
    squares,
    transposed,
)
from refattn.mechanisms.record import Magnitude
from refattn.ops.heads import sum_heads
from refattn.ops.sums import summed_to
from refattn.xp import Array, namespace


def _scores(inputs: Given, values: Given) -> Array:
    of_squares = squares(inputs["q"], heads_of(inputs, "k")) * scale_of(inputs) ** 2
    bias = 0.0 if inputs.get("bias") is None else absolute(inputs["bias"])
    return size_of_sum(inputs["q"].shape[-1], values["GE.1"], of_squares) + bias


def _softmax(id: str, scores: str) -> Magnitude:
    def size(inputs: Given, values: Given) -> Array:
        xp, weights = namespace(inputs["q"]), values[id]
        masked = values.get(scores, values["GE.1"])
        exponent = xp.where(xp.isfinite(masked), xp.abs(masked), 0.0)
        largest = xp.max(exponent, axis=-1, keepdims=True) if exponent.shape[-1] else exponent
        # What is rounded is an exponent, of the size of a score, and a sum over the row.
        return weights * (2.0 + exponent + largest + math.sqrt(max(weights.shape[-1], 1)))

    return size


def _d_softmax(weights_id: str, given_id: str) -> Magnitude:
    def size(inputs: Given, values: Given) -> Array:
        xp, weights, given = namespace(inputs["q"]), values[weights_id], values[given_id]
        terms = weights * given
        inner = xp.sum(terms, axis=-1, keepdims=True)
        of_squares = xp.sum(terms * terms, axis=-1, keepdims=True)
        return weights * (xp.abs(given) + size_of_sum(weights.shape[-1], inner, of_squares))

    return size


def _mutual(inputs: Given, values: Given) -> Array:
    xp, mutual = namespace(inputs["q"]), values["GE.3"]
    finite = xp.where(xp.isfinite(mutual), mutual, 0.0)
    if not is_over_keys(inputs):
        return absolute(finite)
    keys = heads_of(inputs, "k")
    return size_of_sum(keys.shape[-1], finite, squares(keys, keys) * scale_of(inputs) ** 2)


def _start(inputs: Given, values: Given) -> Array:
    # A sigmoid, as 1/2 plus something, has the rounding of 1/2; other starts are copies.
    xp = namespace(inputs["q"])
    token = inputs.get("state", "token") == "token"
    return xp.ones_like(values["GE.5"]) if token else xp.zeros_like(values["GE.5"])


def _d_links(inputs: Given, values: Given) -> Array:
    # A sum of two links of a graph that is made from the kernel; else a copy.
    d = absolute(values["dGE.4"])
    both = absolute(values["dGE.links"]) + absolute(transposed(values["dGE.links"]))
    return d + both if is_over_keys(inputs) else 0.0 * d


def _d_attention(inputs: Given, values: Given) -> Array:
    if isinstance(graph_of(inputs), Kernel) or is_over_keys(inputs):
        return absolute(values["dGE.2"])
    return absolute(values["dGE.2"]) + absolute(values["dGE.links"]) + absolute(transposed(values["dGE.links"]))


def _d_scores(inputs: Given, values: Given) -> Array:
    own = "dGE.3" in values and not is_over_keys(inputs)
    more = absolute(values["dGE.3"]) + absolute(transposed(values["dGE.3"])) if own else 0.0
    return absolute(values["dGE.1"]) + absolute(values["dGE.masked"]) + more


def _d_q(inputs: Given, values: Given) -> Array:
    of_squares = squares(values["dGE.1"], transposed(heads_of(inputs, "k"))) * scale_of(inputs) ** 2
    return size_of_sum(inputs["k"].shape[2], values["dGE.q"], of_squares)


def per_key(inputs: Given, value: Array, pairs: Array, rows: Array, factor: Any) -> Array:
    """Return the size for a sum over the queries of all heads that share a key/value head."""
    of_squares = sum_heads(squares(transposed(pairs), transposed(rows)), inputs["k"].shape[1])
    return size_of_sum(rows.shape[2] * rows.shape[1] // max(inputs["k"].shape[1], 1), value, of_squares * factor**2)


def _d_k(inputs: Given, values: Given) -> Array:
    size = per_key(inputs, values["dGE.k"], values["dGE.1"], inputs["q"], scale_of(inputs))
    if not is_over_keys(inputs) or "dGE.3" not in values:
        return size
    both = absolute(values["dGE.3"]) + absolute(transposed(values["dGE.3"]))
    return size + per_key(inputs, values["dGE.k"], both, heads_of(inputs, "k"), scale_of(inputs))


def _d_scale(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    pairs = [("dGE.1", "GE.1"), *([("dGE.3", "GE.3")] if is_over_keys(inputs) and "dGE.3" in values else [])]
    terms = [values[d] * xp.where(xp.isfinite(values[s]), values[s], 0.0) / scale_of(inputs) for d, s in pairs]
    of_squares = sum(xp.sum(term * term) for term in terms)
    return size_of_sum(sum(math.prod(term.shape) for term in terms), values["dGE.scale"], of_squares)


def _d_bias(inputs: Given, values: Given) -> Array:
    shape, d = inputs["bias"].shape, values["dGE.1"]
    return size_of_sum(math.prod(d.shape) // max(math.prod(shape), 1), values["dGE.bias"], summed_to(d * d, shape))


def _d_begin(inputs: Given, values: Given) -> Array:
    shape, d = start_of(inputs).at.shape, values["dGE.5"][..., 0]
    return size_of_sum(math.prod(d.shape) // max(math.prod(shape), 1), values["dGE.start"], summed_to(d * d, shape))


GRAPH: dict[str, Magnitude] = {
    "GE.1": _scores,
    "GE.2": _softmax("GE.2", "GE.masked"),
    "GE.3": _mutual,
    "GE.4": _softmax("GE.4", "GE.3"),
    "GE.5": _start,
    "dGE.4": _d_links,
    "dGE.3": _d_softmax("GE.4", "dGE.4"),
    "dGE.2": _d_attention,
    "dGE.masked": _d_softmax("GE.2", "dGE.2"),
    "dGE.1": _d_scores,
    "dGE.q": _d_q,
    "dGE.k": _d_k,
    "dGE.scale": _d_scale,
    "dGE.bias": _d_bias,
    "dGE.start": _d_begin,
}
