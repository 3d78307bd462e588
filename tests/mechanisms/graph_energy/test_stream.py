"""Decoding: every state and integrator gives token by token what the block gives at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, tree
from tests.mechanisms.graph_energy.calls import STATES, draw, kept

RECORD = ra.mechanism("graph_energy")
CONFIGS: dict[str, dict[str, Any]] = {
    **{state: {"state": state} for state in STATES if state not in ("prefix", "query")},
    **{state: {"state": state, "step": 0.1} for state in ("prefix", "query")},
    "prefix, levels": {"state": "prefix", "step": 0.1, "levels": 2, "stride": 2, "window": None, "classes": 2},
    "heun": {"integrator": "heun", "steps": 3, "kv_heads": 1, "bias": True, "residual": False},
    "rk4, feature": {"integrator": "rk4", "steps": 2, "state": "feature", "coupling": "arctan", "value_width": 3},
    "no anchor": {"intrinsic": "none", "threshold": "soft(tau=0.1)", "step": 0.2},
    "emptied": {"threshold": "hard(tau=0.7, empty='dense')"},
    "proximal": {"threshold": "proximal(tau=0.3)", "learn_tau": True, "learn_step": True, "steps": 4},
    "levels": {"levels": 3, "stride": 2, "window": 2, "threshold": "soft(tau=0.1)", "integrator": "heun", "steps": 2},
    "levels, all": {"levels": 2, "stride": 3, "window": None, "kv_heads": 1, "classes": 2, "step": 0.1, "bias": True},
    "classes": {"classes": 3, "coupling": "polynomial(coefficients=(1.0, 0.0, 0.0))", "step": 0.1},
}


def decode(config: dict[str, Any], cuts: list[int], mask: Any = None) -> tuple[Any, Any, Any]:
    x = draw("tokens", 2, 9, 8)
    stream, block = RECORD.stream, RECORD.block
    assert stream is not None
    params = block.init(block.Config(width=8, heads=2, **config), like=x, seed=5)
    if "classes" in config:
        params = tree.map_leaves(lambda w: w + 0.5 * draw("params", *w.shape), params)
    classes = np.arange(9) ** 2 % config["classes"] if "classes" in config else None
    cache, parts = stream.start(params, 2), []
    for first, last in zip([0, *cuts], [*cuts, 9], strict=True):
        padding = None if mask is None else mask[:, :last]
        context = Context(causal=True, key_mask=padding, positions=None if classes is None else classes[:last])
        advance = stream.step if last - first == 1 else stream.prefill
        state, cache = advance(params, cache, block.start(params, x[:, first:last], context), context)
        parts.append(state.x)
    context = Context(causal=True, key_mask=mask, positions=classes)
    expected, _ = block.forward(params, block.start(params, x, context), context)
    return np.concatenate(parts, axis=1), expected.x, cache


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6, 7, 8], [6, 7], [3, 7]], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_12_tokens_in_turn_are_tokens_at_once(name: str, cuts: list[int]) -> None:
    found, expected, _ = decode(CONFIGS[name], cuts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("state", [*STATES, "levels"])
def test_padding_is_hidden(state: str) -> None:
    mask = kept("padding", 2, 9)
    mask[:, 0] = True
    found, expected, _ = decode(CONFIGS[state], [4, 5, 6, 8], mask)
    np.testing.assert_allclose(found[mask], expected[mask], rtol=0, atol=1e-12)


def test_memory_of_a_token() -> None:
    """Keys and values, and a number for each stage of the flow; no queries."""
    leaves = tree.flatten(decode({"integrator": "heun", "steps": 3}, [5])[2])
    assert {name: x.shape for name, x in leaves.items()} == {
        "k": (2, 2, 9, 4),
        "v": (2, 2, 9, 4),
        "points": (2, 2, 9, 2 * 3 + 1, 1),
    }


def test_a_mask_of_pairs_is_refused() -> None:
    x, stream, block = draw("tokens", 2, 1, 8), RECORD.stream, RECORD.block
    assert stream is not None
    params = block.init(block.Config(width=8, heads=2), like=x)
    context = Context(causal=True, mask=np.ones((1, 1), bool))
    state = block.start(params, x, context)
    with pytest.raises(ValueError, match="context.mask was given to a stream"):
        stream.step(params, stream.start(params, 2), state, context)
    with pytest.raises(ValueError, match="state.x: got a batch of 2, the cache is of 3"):
        stream.step(params, stream.start(params, 3), state, Context(causal=True))
