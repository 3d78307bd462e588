"""The multi-head block: one step of a dynamical system, its gradients, its masks, and its fresh parameters."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import counter, tree

BLOCK = ra.mechanism("softmax").block
Config = BLOCK.Config

CONFIGS = {
    "plain": Config(width=6, heads=2),
    "bare": Config(width=6, heads=3, residual=False),
    "full": Config(width=6, heads=4, kv_heads=2, head_width=3, value_width=5, bias=True, scale=-0.6, softcap=2.0),
    "one": Config(width=1, heads=1, bias=True),
}


def draw(name: str, *shape: int) -> Any:
    return counter.normal(shape, seed=5, purpose=name)


def fresh(config: Any, like: Any | None = None) -> Any:
    """Parameters with biases that are not 0."""
    params = BLOCK.init(config, seed=3, like=np.zeros(1) if like is None else like)
    biases = {name: draw(name, *getattr(params, name).shape) for name in ("b_q", "b_k", "b_v", "b_o") if config.bias}
    return replace(params, **biases)


CONTEXTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "masks": {"mask": (5, 5), "key_mask": (2, 5), "causal": "top_left"},
    "memory": {"memory": (2, 4), "memory_mask": (2, 4), "mask": (2, 1, 5, 4)},
    "decoding": {"memory": (2, 4), "causal": True},
}


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
    mask = np.broadcast_to(True if given.mask is None else given.mask, (b, h, i, j))
    out = np.zeros((b, i, h * e))
    for batch, head, row in np.ndindex(b, h, i):
        group = head // (h // g)
        limit = {False: j, True: row + j - i + 1, "bottom_right": row + j - i + 1, "top_left": row + 1}[given.causal]
        seen = [
            c for c in range(j) if c < limit and mask[batch, head, row, c] and (padding is None or padding[batch, c])
        ]
        if not seen:
            continue
        scores = k[batch, seen, group * d : (group + 1) * d] @ q[batch, row, head * d : (head + 1) * d]
        scores = scores * (d**-0.5 if config.scale is None else config.scale)
        scores = scores if config.softcap is None else config.softcap * np.tanh(scores / config.softcap)
        weights = np.exp(scores - scores.max())
        out[batch, row, head * e : (head + 1) * e] = (
            weights @ v[batch, seen, group * e : (group + 1) * e] / weights.sum()
        )
    out = out @ params.w_o + (params.b_o if config.bias else 0.0)
    return x + out if config.residual else out


@pytest.mark.parametrize("case", CONTEXTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_block_is_what_it_says(name: str, case: str) -> None:
    params = fresh(CONFIGS[name])
    x, given = draw("x", 2, 5, CONFIGS[name].width), context(case, CONFIGS[name].width)
    np.testing.assert_allclose(step(params, x, given)[0], naive(params, x, given), rtol=1e-12, atol=1e-13)


# --- gradients


def gradients(params: Any, x: Any, given: ra.Context, d_y: Any) -> dict[str, Any]:
    """Of <read(forward(start(x))), d_y>, by name."""
    start = BLOCK.start(params, x, given)
    state, saved = BLOCK.forward(params, start, given)
    d_state, d_read = BLOCK.read_backward(params, state, d_y)
    d_state, d_params, d_context = BLOCK.backward(params, saved, d_state)
    d_x, d_start = BLOCK.start_backward(params, d_state)
    assert d_read is None and d_start is None
    assert d_params.config == params.config
    return {"x": d_x, **tree.flatten(d_params), **d_context}


def test_every_library_gives_the_same(backend: Any) -> None:
    config = CONFIGS["full"]
    params, x, given, d_y = fresh(config), draw("x", 2, 5, 6), context("memory", 6), draw("d_y", 2, 5, 6)
    expected = {"y": step(params, x, given)[0], **gradients(params, x, given, d_y)}
    sent = tree.map_leaves(backend.array, params)
    where = replace(given, **{n: backend.array(getattr(given, n)) for n in ("mask", "memory", "memory_mask")})
    found = {
        "y": step(sent, backend.array(x), where)[0],
        **gradients(sent, backend.array(x), where, backend.array(d_y)),
    }
    for name, value in found.items():
        assert backend.owner.owns(value)
        np.testing.assert_allclose(backend.host(value), expected[name], rtol=1e-11, atol=1e-13, err_msg=name)


# --- what a context means


def test_the_context_means_one_mask() -> None:
    params, x = fresh(CONFIGS["plain"]), draw("x", 2, 5, 6)
    key_mask = np.asarray([[True, True, False, True, False], [True, False, True, True, True]])
    mask = np.asarray([[True, False, True, True, True]] * 5)
    both = step(params, x, ra.Context(mask=mask, key_mask=key_mask))[0]
    one = step(params, x, ra.Context(mask=mask & key_mask[:, None, None, :]))[0]
    np.testing.assert_array_equal(both, one)


def test_the_tokens_as_their_own_memory() -> None:
    params, x, d_y = fresh(CONFIGS["full"]), draw("x", 2, 5, 6), draw("d_y", 2, 5, 6)
    alone, given = ra.Context(causal=True), ra.Context(causal=True, memory=x)
    np.testing.assert_array_equal(step(params, x, alone)[0], step(params, x, given)[0])
    whole, parts = gradients(params, x, alone, d_y), gradients(params, x, given, d_y)
    np.testing.assert_allclose(whole["x"], parts["x"] + parts["memory"], rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(whole["w_k"], parts["w_k"])


def test_layer_and_training_are_no_fields_to_be_read() -> None:
    params, x = fresh(CONFIGS["plain"]), draw("x", 2, 5, 6)
    told = ra.Context(layer=3, training=True)
    np.testing.assert_array_equal(step(params, x, told)[0], step(params, x, ra.Context())[0])


@pytest.mark.parametrize("sizes", [(0, 3), (2, 0), (1, 1)])
def test_no_batch_and_no_token(sizes: tuple[int, int]) -> None:
    params, x = fresh(CONFIGS["full"]), draw("x", *sizes, 6)
    found = gradients(params, x, ra.Context(causal=True), np.ones(x.shape))
    assert found["x"].shape == x.shape and found["w_q"].shape == params.w_q.shape
    assert math.prod(sizes) or not any(np.any(a) for n, a in found.items() if n != "x")


# --- fresh parameters


def test_shapes_follow_from_the_configuration() -> None:
    shapes = {name: a.shape for name, a in tree.flatten(fresh(CONFIGS["full"])).items()}
    assert shapes == {
        "w_q": (6, 12), "w_k": (6, 6), "w_v": (6, 10), "w_o": (20, 6),
        "b_q": (12,), "b_k": (6,), "b_v": (10,), "b_o": (6,),
    }  # fmt: skip
    assert list(tree.flatten(fresh(CONFIGS["plain"]))) == ["w_q", "w_k", "w_v", "w_o"]
    assert CONFIGS["full"].sizes == (4, 2, 3, 5) and CONFIGS["plain"].sizes == (2, 2, 3, 3)


def bits(params: Any) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(a).tobytes() for name, a in tree.flatten(params).items()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_init_is_the_same_on_every_library(dtype: str, backend: Any) -> None:
    if not backend.has(dtype):
        pytest.skip(f"no {dtype} here")
    params = BLOCK.init(CONFIGS["full"], seed=4, like=backend.array([0.0], dtype))
    if dtype == "bfloat16":
        from refattn.golden.storage import round_to

        truth = tree.map_leaves(
            lambda w: round_to(w, "bfloat16").astype("float32"), BLOCK.init(CONFIGS["full"], seed=4, like=np.zeros(1))
        )
    else:
        truth = BLOCK.init(CONFIGS["full"], seed=4, like=np.zeros(1, dtype))
    for w in tree.flatten(params).values():
        assert w.dtype == backend.array(0.0, dtype).dtype and backend.owner.owns(w)
    assert bits(tree.map_leaves(backend.host, params)) == bits(truth)


def test_these_numbers_are_fixed_for_good() -> None:
    """Whoever trained from a seed gets the same start from every later version."""
    params = BLOCK.init(Config(width=4, heads=2), seed=7, like=np.zeros(1), layer=2)
    w = params.w_k
    draws = counter.uniform((4, 4), seed=7, purpose="softmax.w_k", layer=2)
    np.testing.assert_array_equal(w, (2.0 * draws - 1.0) * math.sqrt(3.0 / 4.0))
    digest = zlib.crc32(b"".join(bits(tree.map_leaves(lambda a: a.astype("float32"), params)).values()))
    assert digest == 784039400
