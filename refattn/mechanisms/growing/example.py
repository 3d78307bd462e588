"""A small growth step, for `refattn trace growing`: two heads of width 1, which is too narrow, get a column each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Example, Input
from refattn.ops.plain import softmax, softmax_backward
from refattn.xp import Array, namespace, transpose

SCALE, AMPLITUDE = 1.0, 0.5

INPUTS = {
    "y": Input((3, 4, 3)),  # (b, i, m)
    "w_q": Input((2, 3, 1)),  # (h, m, d)
    "w_k": Input((2, 3, 1)),
    "v": Input((3, 2, 4, 2)),  # (b, h, j, e)
    "wanted": Input((3, 2, 4, 2)),
}


def run(definition: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the grown weights and the loss before and after: half the square of what attention is off."""
    y, w_q, w_k, v, wanted = (inputs[name] for name in INPUTS)
    tokens = y[:, None, :, :]

    def attend(w_q: Array, w_k: Array) -> tuple[Array, Array]:
        weights = softmax(SCALE * (tokens @ w_q) @ transpose(tokens @ w_k))
        return weights, weights @ v - wanted

    def loss(off: Array) -> Array:
        return 0.5 * namespace(off).sum(off * off)

    weights, off = attend(w_q, w_k)
    d_scores = softmax_backward(weights, off @ transpose(v))
    heads, statistics = definition.heads_of(w_q, w_k, scale=SCALE), definition.observe(y, d_scores)
    planned = definition.plan(heads, statistics)
    columns = definition.columns_of(planned, most=1)
    grown_q, grown_k = definition.grow(heads, planned, columns=columns, amplitude=AMPLITUDE)
    slope = definition.slope_of(planned, columns)
    after = loss(attend(grown_q, grown_k)[1])
    return {"w_q": grown_q, "w_k": grown_k, "slope": slope, "before": loss(off), "after": after}


EXAMPLE = Example(INPUTS, run)
