"""Decoding in a state of constant size; what holds for every stream is tested for all mechanisms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, philox, tree
from refattn.mechanisms.higher_order.layer import stream

RECORD = ra.mechanism("higher_order")


def fresh() -> Any:
    return RECORD.block.init(RECORD.block.Config(width=12, heads=2), seed=3, like=np.zeros(1))


def tokens(n: int) -> Any:
    return philox.normal((2, n, 12), seed=8, purpose="stream")


def at_once(params: Any, x: Any, **fields: Any) -> Any:
    context = Context(causal=True, **fields)
    return RECORD.block.forward(params, RECORD.block.start(params, x, context), context)[0].x


def in_parts(params: Any, x: Any, cuts: list[int], key_mask: Any = None, cache: Any = None) -> tuple[Any, Any]:
    assert RECORD.stream is not None
    cache, found = cache or RECORD.stream.start(params, x.shape[0]), []
    for first, stop in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        context = Context(causal=True, key_mask=None if key_mask is None else key_mask[:, :stop])
        state = RECORD.block.start(params, x[:, first:stop], context)
        advance = RECORD.stream.step if stop - first == 1 else RECORD.stream.prefill
        state, cache = advance(params, cache, state, context)
        found.append(state.x)
    return np.concatenate(found, axis=1), cache


def test_a_cache_stays_small() -> None:
    params = fresh()
    _, cache = in_parts(params, tokens(3), [1, 2])
    sizes = {n: leaf.shape for n, leaf in tree.flatten(cache).items() if n.startswith("state")}
    x, largest = tokens(200), 0
    for n in range(200):
        _, cache = in_parts(params, x[:, n : n + 1], [], cache=cache)
        largest = max(largest, cache.keys.shape[2])
    assert {n: leaf.shape for n, leaf in tree.flatten(cache).items() if n.startswith("state")} == sizes
    assert largest == stream.BUFFER - 1
    np.testing.assert_array_equal(cache.state.values[..., -1] + cache.values[..., -1].sum(axis=2, keepdims=True), 203.0)


def test_a_cache_of_another_configuration_is_refused() -> None:
    params, x = fresh(), tokens(4)
    _, cache = in_parts(params, x, [2])
    other = RECORD.block.init(replace(params.config, alpha=2.0), seed=3, like=np.zeros(1))
    for cuts in ([2], [1, 2, 3]):
        with pytest.raises(ValueError, match=r"state: got one of order 2, alpha 3, .*, needs one of order 2, alpha 2,"):
            in_parts(other, x, cuts, cache=cache)


def test_what_a_stream_does_not_take() -> None:
    params, x = fresh(), tokens(3)
    stream_of: Any = RECORD.stream
    cache, state = stream_of.start(params, 2), RECORD.block.start(params, x, Context())
    with pytest.raises(ValueError, match=r"context.memory was given to a stream, whose tokens attend themselves"):
        stream_of.prefill(params, cache, state, Context(causal=True, memory=x))
    with pytest.raises(ValueError, match=r"context.key_mask: got shape \(2, 2\), needs \(2, past and new tokens\)"):
        stream_of.prefill(params, cache, state, Context(causal=True, key_mask=np.ones((2, 2), bool)))
    config = replace(params.config, normaliser="exact(delta=1.0)")
    with pytest.raises(ValueError, match=r"normaliser: got 'exact' with delta=1 and causal=True"):
        stream_of.start(RECORD.block.init(config, like=np.zeros(1)), 2)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_storage_types(dtype: str) -> None:
    config = RECORD.block.Config(width=12, heads=2)
    params = RECORD.block.init(config, seed=3, like=np.zeros(1, dtype))
    x = tokens(9).astype(dtype)
    found, cache = in_parts(params, x, [4, 5, 6])
    assert found.dtype == x.dtype and cache.state.products.dtype == np.float32
    wide = at_once(tree.map_leaves(lambda w: w.astype("float64"), params), x.astype("float64"))
    np.testing.assert_allclose(found, wide, rtol=0.0, atol=2e-2 if dtype == "float16" else 1e-5)
