"""Plausible wrong backward passes of softmax attention: the output is right, and some gradient is not.

Each has the signature of the core without `form`, with `d_out`, and returns gradients by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from refattn.mechanisms import readings
from refattn.mechanisms.softmax import core
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import allowed_pairs, causal_offset
from refattn.xp import Array, namespace

Backward = Callable[..., dict[str, Array]]


def _right(q: Array, k: Array, v: Array, d_out: Array, options: dict[str, Any]) -> tuple[dict[str, Array], float]:
    """Return the right gradients, and the scale."""
    _, saved = core.forward(q, k, v, **options)
    scale = options.get("scale")
    return core.backward(saved, d_out), 1.0 / math.sqrt(q.shape[3]) if scale is None else scale


def no_scale(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Leave the scale out of the gradients of q and k."""
    gradients, scale = _right(q, k, v, d_out, options)
    return gradients | {name: gradients[name] / scale for name in ("q", "k")}


def scale_twice(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Take the gradient of k from a q that was scaled already, and scale it."""
    gradients, scale = _right(q, k, v, d_out, options)
    return gradients | {"k": gradients["k"] * scale}


def _by_hand(
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    options: dict[str, Any],
    inner_of: Callable[[Array, Array, Array], Array],
    slope_of: Callable[[Array, float], Array],
) -> dict[str, Array]:
    """Return the gradients, with other inner products (of weights, unmasked weights and d_weights) or another slope."""
    xp, heads, softcap = namespace(q, k, v), q.shape[1], options.get("softcap")
    queries, keys = q.shape[2], k.shape[2]
    gradients, scale = _right(q, k, v, d_out, options)
    if keys == 0:
        return gradients
    k_heads, v_heads = repeat_heads(k, heads), repeat_heads(v, heads)
    scores = q @ xp.matrix_transpose(k_heads) * scale
    slope = scores * 0.0 + 1.0 if softcap is None else slope_of(xp.tanh(scores / softcap), softcap)
    capped = scores if softcap is None else softcap * xp.tanh(scores / softcap)
    offset = causal_offset(options.get("causal", False), queries, keys)
    allowed = allowed_pairs(options.get("mask"), offset, queries, keys, q)
    powers = xp.exp(capped - xp.max(capped, axis=-1, keepdims=True))
    seen = powers if allowed is None else xp.where(allowed, powers, 0.0)
    total = xp.sum(seen, axis=-1, keepdims=True)
    weights, unmasked = (x / xp.where(total == 0.0, 1.0, total) for x in (seen, powers))
    d_weights = d_out @ xp.matrix_transpose(v_heads)
    d_scores = weights * (d_weights - inner_of(weights, unmasked, d_weights)) * slope
    d_k = xp.matrix_transpose(d_scores) @ q * scale
    return gradients | {"q": d_scores @ k_heads * scale, "k": sum_heads(d_k, k.shape[1])}


def _inner(weights: Array, unmasked: Array, d_weights: Array) -> Array:
    return namespace(weights).sum(weights * d_weights, axis=-1, keepdims=True)


def no_inner_product(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Take the softmax for a function of each score alone."""
    return _by_hand(q, k, v, d_out, options, lambda weights, _, d: 0.0 * d, lambda tanh, _: 1.0 - tanh * tanh)


def unmasked_inner_product(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Sum the inner product over masked keys, too."""
    return _by_hand(
        q, k, v, d_out, options, lambda _, unmasked, d: _inner(unmasked, unmasked, d), lambda tanh, _: 1.0 - tanh * tanh
    )


def no_softcap(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Leave the slope of the soft-cap out."""
    return _by_hand(q, k, v, d_out, options, _inner, lambda tanh, _: 0.0 * tanh + 1.0)


def softcap_of_capped(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Take the slope of the soft-cap at the score that was capped already."""
    return _by_hand(q, k, v, d_out, options, _inner, lambda tanh, _: 1.0 - namespace(tanh).tanh(tanh) ** 2)


WRONG_GRADIENTS: dict[str, Backward] = {
    **readings.of_group_gradients(core),
    "gradients without the scale": no_scale,
    "gradient of k scaled twice": scale_twice,
    "inner product left out of the backward": no_inner_product,
    "inner product over masked keys": unmasked_inner_product,
    "soft-cap left out of the backward": no_softcap,
    "slope at the capped score": softcap_of_capped,
}
