"""The multi-head block: one step of a dynamical system, its gradients, its masks, and its fresh parameters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import counter, tree

BLOCK = ra.mechanism("higher_order").block
Config = BLOCK.Config

CONFIGS = {
    "plain": Config(width=8, heads=2),
    "full": Config(
        width=6, heads=4, kv_heads=2, head_width=5, value_width=3, bias=True, normaliser="exact(delta=0.5)", alpha=4.0
    ),
    "bare": Config(width=8, heads=2, residual=False, order=4, layer_norm=False, normaliser="add(eps=0.1)"),
}
CONTEXTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "masks": {"key_mask": (2, 5), "causal": "top_left"},
    "memory": {"memory": (2, 4), "memory_mask": (2, 4)},
    "decoding": {"memory": (2, 7), "causal": True},
}


def draw(name: str, *shape: int) -> Any:
    return counter.normal(shape, seed=5, purpose=f"higher_order.{name}")


def fresh(config: Any) -> Any:
    """Parameters with biases that are not 0."""
    params = BLOCK.init(config, seed=3, like=np.zeros(1))
    biases = {name: draw(name, *getattr(params, name).shape) for name in ("b_q", "b_k", "b_v", "b_o") if config.bias}
    return replace(params, **biases)


def context(name: str, width: int) -> ra.Context:
    fields: dict[str, Any] = {}
    for field, value in CONTEXTS[name].items():
        fields[field] = value
        if field == "memory":
            fields[field] = draw("memory", *value, width)
        elif isinstance(value, tuple):
            fields[field] = counter.uniform(value, seed=2, purpose=field) < 0.7
    return ra.Context(**fields)


def step(params: Any, x: Any, given: ra.Context) -> tuple[Any, Any]:
    state, saved = BLOCK.forward(params, BLOCK.start(params, x, given), given)
    return BLOCK.read(params, state), saved


def polynomial(s: Any, order: int) -> Any:
    return sum(s**r / math.factorial(r) for r in range(order + 1))


def naive(params: Any, x: Any, given: ra.Context) -> Any:
    """The block once more, head by head and row by row."""
    config = params.config
    h, g, d, e = config.sizes
    y = x if given.memory is None else given.memory
    padding = given.key_mask if given.memory is None else given.memory_mask
    b, i, j = x.shape[0], x.shape[1], y.shape[1]
    zero: Any = 0.0
    q, k, v = (
        source @ getattr(params, f"w_{n}") + (getattr(params, f"b_{n}") if config.bias else zero)
        for source, n in ((x, "q"), (y, "k"), (y, "v"))
    )

    def normal(z: Any) -> Any:
        if not config.layer_norm:
            return z
        return (z - z.mean(axis=-1, keepdims=True)) / np.sqrt(z.var(axis=-1, keepdims=True) + config.norm_eps)

    out = np.zeros((b, i, h * e))
    for batch, head, row in np.ndindex(b, h, i):
        group = head // (h // g)
        limit = {False: j, True: row + j - i + 1, "top_left": row + 1}[given.causal]
        seen = [c for c in range(j) if c < limit and (padding is None or padding[batch, c])]
        if not seen:
            continue
        keys = normal(k[batch, seen, group * d : (group + 1) * d])
        scores = keys @ normal(q[batch, row, head * d : (head + 1) * d]) / (config.alpha * math.sqrt(d))
        weights = polynomial(scores, config.order) - config.normaliser.delta
        total = weights.sum() + getattr(config.normaliser, "eps", 0.0)
        out[batch, row, head * e : (head + 1) * e] = weights @ v[batch, seen, group * e : (group + 1) * e] / total
    out = out @ params.w_o + (params.b_o if config.bias else 0.0)
    return x + out if config.residual else out


@pytest.mark.parametrize("case", CONTEXTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_block_is_what_it_says(name: str, case: str) -> None:
    params = fresh(CONFIGS[name])
    x, given = draw("x", 2, 5, CONFIGS[name].width), context(case, CONFIGS[name].width)
    np.testing.assert_allclose(step(params, x, given)[0], naive(params, x, given), rtol=1e-12, atol=1e-13)


def gradients(params: Any, x: Any, given: ra.Context, d_y: Any) -> dict[str, Any]:
    """Of <read(forward(start(x))), d_y>, by name."""
    state, saved = BLOCK.forward(params, BLOCK.start(params, x, given), given)
    d_state, _ = BLOCK.read_backward(params, state, d_y)
    d_state, d_params, d_context = BLOCK.backward(params, saved, d_state)
    d_x, _ = BLOCK.start_backward(params, d_state)
    assert d_params.config == params.config
    return {"x": d_x, **tree.flatten(d_params), **d_context}


def test_the_loss_is_flat_along_the_size_of_a_head() -> None:
    """Layer normalisation stands between the projections and the scores."""
    params = fresh(Config(width=8, heads=2, norm_eps=0.0))
    x, d_y, given = draw("x", 2, 5, 8), draw("d_y", 2, 5, 8), ra.Context()
    larger = replace(params, w_q=params.w_q * np.repeat([3.0, 0.1], 4))
    np.testing.assert_allclose(step(larger, x, given)[0], step(params, x, given)[0], rtol=1e-12, atol=1e-13)
    d = gradients(params, x, given, d_y)["w_q"]
    assert np.abs(np.sum((d * params.w_q).reshape(8, 2, 4), axis=(0, 2))).max() < 1e-13 * np.abs(d).max()
