"""Decoding: what the cache holds, and what a stream does not take."""

from __future__ import annotations

import numpy as np
import pytest

import refattn as ra
from refattn import Context, tree
from tests.mechanisms.graph_energy.calls import draw

RECORD = ra.mechanism("graph_energy")


def test_memory_of_a_token() -> None:
    """Keys and values, and a number for each stage of the flow; no queries."""
    x, stream, block = draw("tokens", 2, 9, 8), RECORD.stream, RECORD.block
    assert stream is not None
    params = block.init(block.Config(width=8, heads=2, integrator="heun", steps=3), like=x)
    context = Context(causal=True)
    _, cache = stream.prefill(params, stream.start(params, 2), block.start(params, x, context), context)
    leaves = tree.flatten(cache)
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
