"""Decoding token by token, for all mechanisms that can: on every library, and what it refuses.

That it gives what the block gives for all tokens at once is a law (`test_laws`).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context, philox, tree
from tests.conftest import Arrays, Library

STREAMS = [name for name in ra.list_mechanisms() if ra.mechanism(name).stream is not None]
WIDTH, HEADS = 12, 2


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=17, purpose=name)


def block_of(name: str) -> tuple[Any, Any]:
    record = ra.mechanism(name)
    known = {field.name for field in dataclasses.fields(record.block.Config)}
    given = {"width": WIDTH, "heads": HEADS, "kv_heads": 1, "bias": True}
    config = record.block.Config(**{field: value for field, value in given.items() if field in known})
    return record, record.block.init(config, seed=3, like=np.zeros(1))


def at_once(name: str, x: Any) -> Any:
    record, params = block_of(name)
    state, _ = record.block.forward(params, record.block.start(params, x, Context(causal=True)), Context(causal=True))
    return record.block.read(params, state)


def test_there_are_streams() -> None:
    assert "softmax" in STREAMS


@pytest.mark.parametrize("name", STREAMS)
def test_a_cache_is_not_written_to(name: str) -> None:
    record, params = block_of(name)
    state = record.block.start(params, draw("x", 1, 4, WIDTH), Context(causal=True))
    _, cache = record.stream.prefill(params, record.stream.start(params, 1), state, Context(causal=True))
    before = {n: leaf.copy() for n, leaf in tree.flatten(cache).items()}
    one = record.block.start(params, draw("one", 1, 1, WIDTH), Context(causal=True))
    first, _ = record.stream.step(params, cache, one, Context(causal=True))
    second, _ = record.stream.step(params, cache, one, Context(causal=True))
    assert np.array_equal(first.x, second.x)
    assert all(np.array_equal(leaf, before[n]) for n, leaf in tree.flatten(cache).items())


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape: see the slow test")
def test_on_every_library(name: str, backend: Any) -> None:
    on_library(name, backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_on_jax(name: str) -> None:
    if os.environ.get("REFATTN_SLOW_SAMPLE") and name != STREAMS[0]:
        pytest.skip("not of the sample: the first mechanism alone")
    pytest.importorskip("jax", reason='needs jax: pip install "refattn[jax]"')
    Library.JAX.backend.enable_float64()
    on_library(name, Arrays(Library.JAX))


def on_library(name: str, backend: Any) -> None:
    record, params = block_of(name)
    x = draw("x", 1, 5, WIDTH)
    given = tree.map_leaves(backend.array, params)
    cache, found = record.stream.start(given, 1), []
    for part in (x[:, :3], x[:, 3:4], x[:, 4:]):
        state = record.block.start(given, backend.array(part), Context(causal=True))
        advance = record.stream.step if part.shape[1] == 1 else record.stream.prefill
        state, cache = advance(given, cache, state, Context(causal=True))
        found.append(backend.host(state.x))
    np.testing.assert_allclose(np.concatenate(found, axis=1), at_once(name, x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", STREAMS)
def test_bad_input(name: str) -> None:
    record, params = block_of(name)
    cache, state = (
        record.stream.start(params, 1),
        record.block.start(params, draw("x", 1, 3, WIDTH), Context(causal=True)),
    )
    with pytest.raises(ValueError, match=r"context.causal: got False, needs True: a stream cannot see the future"):
        record.stream.prefill(params, cache, state, Context())
    with pytest.raises(ValueError, match=r"state.x: got 3 tokens, needs 1"):
        record.stream.step(params, cache, state, Context(causal=True))
    with pytest.raises(ValueError, match=r"batch: got 0, needs a whole number of at least 1"):
        record.stream.start(params, 0)
    with pytest.raises(TypeError, match=r"cache: got None, needs a (Cache|KeysAndValues)"):
        record.stream.prefill(params, None, state, Context(causal=True))
    with pytest.raises(ValueError, match=r"state.x: got an element that is not finite"):
        record.stream.prefill(params, cache, dataclasses.replace(state, x=state.x * np.nan), Context(causal=True))
    memory = {"memory": draw("memory", 1, 2, WIDTH), "memory_mask": np.ones((1, 2), bool)}
    for field, x in memory.items():
        with pytest.raises(ValueError, match=rf"context.{field} was given"):  # by its stream, or as a field not read
            record.stream.prefill(params, cache, state, Context(causal=True, **{field: x}))
    other = record.block.start(params, draw("x", 2, 3, WIDTH), Context(causal=True))
    with pytest.raises(ValueError, match=r"state.x: got a batch of 2, the cache is of 1"):
        record.stream.prefill(params, cache, other, Context(causal=True))


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "integers": (lambda x: x.astype(np.int64), TypeError, "got dtype int64, needs float64"),
    "float32": (lambda x: x.astype(np.float32), TypeError, "got dtype float32, needs float64"),
    "NaN": (lambda x: x * np.nan, ValueError, "got an element that is not finite"),
    "an axis more": (lambda x: x[..., None], ValueError, "got shape"),
    "wider": (lambda x: np.concatenate([x, x], axis=-1), ValueError, "got shape"),
    "nothing": (lambda x: None, TypeError, r"cache.*: got None(Type)?, needs an array"),
    "masked": (lambda x: np.ma.masked_array(x), TypeError, "got MaskedArray"),
    "torch": (lambda x: pytest.importorskip("torch").asarray(x), TypeError, "several libraries"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", STREAMS)
def test_a_cache_that_no_stream_made_is_refused(name: str, kind: str) -> None:
    change, error, message = BAD[kind]
    record, params = block_of(name)
    x = draw("x", 2, 6, WIDTH)
    context = Context(causal=True)
    state = record.block.start(params, x, context)
    _, cache = record.stream.prefill(params, record.stream.start(params, 2), state, context)
    leaves = tree.flatten(cache)
    last = record.block.start(params, x[:, :1], context)
    record.stream.step(params, tree.unflatten(cache, leaves), last, context)
    for leaf, value in leaves.items():
        if value.dtype != np.float64 or (value.size == 0 and kind == "NaN"):
            continue
        with pytest.raises(error, match=message):
            record.stream.step(params, change_leaf(cache, leaf, change), last, context)


def change_leaf(cache: Any, name: str, change: Any) -> Any:
    """A cache with one array changed, whatever array it becomes."""
    return tree.map_leaves(lambda x, chosen: change(x) if chosen else x, cache, chosen_leaf(cache, name))


def chosen_leaf(cache: Any, name: str) -> Any:
    return tree.unflatten(cache, {n: np.asarray(n == name) for n in tree.flatten(cache)})


@pytest.mark.parametrize("name", STREAMS)
def test_a_gradient_of_another_shape_is_refused(name: str) -> None:
    record, params = block_of(name)
    x = draw("x", 2, 6, WIDTH)
    state = record.block.start(params, x, Context(causal=True))
    record.block.read_backward(params, state, x)
    for d_x in (x[:1], x[:, :1], x[..., :1], x[0]):
        with pytest.raises(ValueError, match=r"^d_x: got shape \(.*\), needs \(2, 6, 12\)"):
            record.block.read_backward(params, state, d_x)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [("training", 1, TypeError), ("training", None, TypeError), ("layer", -1, ValueError), ("layer", 1.0, TypeError)],
)
def test_a_context_of_other_types_is_refused(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{field}: got"):
        Context(**{field: value})
