"""Multi-head blocks: what they say, row by row, what a context means, and their fresh parameters.

That all gradients agree with differences and autograd, and that laws hold, is for the check.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox, tree
from tests.mechanisms.test_bad_input import small

SOFTMAX, HIGHER_ORDER = (ra.mechanism(name).block.Config for name in ("softmax", "higher_order"))
SIZES: dict[str, Any] = {"width": 6, "heads": 4, "kv_heads": 2, "head_width": 5, "value_width": 3, "bias": True}

CONFIGS = {
    "plain": SOFTMAX(width=6, heads=2),
    "bare": SOFTMAX(width=6, heads=3, residual=False),
    "full": SOFTMAX(**SIZES, scale=-0.6, softcap=2.0),
    "one": SOFTMAX(width=1, heads=1, bias=True),
    "polynomial": HIGHER_ORDER(width=8, heads=2),
    "polynomial full": HIGHER_ORDER(**SIZES, normaliser="exact(delta=0.5)", alpha=4.0),
    "polynomial bare": HIGHER_ORDER(
        width=8, heads=2, residual=False, order=4, layer_norm=False, normaliser="add(eps=0.1)"
    ),
}
EACH = pytest.mark.parametrize("name", ["full", "polynomial full"])


def block_of(config: Any) -> Any:
    return ra.mechanism("softmax" if isinstance(config, SOFTMAX) else "higher_order").block


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=5, purpose=name)


def fresh(config: Any, like: Any | None = None) -> Any:
    """Parameters with biases that are not 0."""
    params = block_of(config).init(config, seed=3, like=np.zeros(1) if like is None else like)
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
            fields[field] = philox.uniform(value, seed=2, purpose=field) < 0.7
    return ra.Context(**fields)


def step(params: Any, x: Any, given: ra.Context) -> tuple[Any, Any]:
    block = block_of(params.config)
    state, saved = block.forward(params, block.start(params, x, given), given)
    return block.read(params, state), saved


def weigh(config: Any, q: Any, k: Any) -> Any:
    """What a query q (d,) takes of the values of some keys k (j, d)."""
    if hasattr(config, "softcap"):
        scores = k @ q * (len(q) ** -0.5 if config.scale is None else config.scale)
        scores = scores if config.softcap is None else config.softcap * np.tanh(scores / config.softcap)
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()
    if config.layer_norm:
        q, k = ((z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + config.norm_eps) for z in (q, k))
    scores = k @ q / (config.alpha * math.sqrt(len(q)))
    weights = sum(scores**r / math.factorial(r) for r in range(config.order + 1)) - config.normaliser.delta
    return weights / (weights.sum() + getattr(config.normaliser, "eps", 0.0))


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
        own, keys = q[batch, row, head * d : (head + 1) * d], k[batch, seen, group * d : (group + 1) * d]
        values = v[batch, seen, group * e : (group + 1) * e]
        out[batch, row, head * e : (head + 1) * e] = weigh(config, own, keys) @ values
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
    block = block_of(params.config)
    state, saved = block.forward(params, block.start(params, x, given), given)
    d_state, d_read = block.read_backward(params, state, d_y)
    d_state, d_params, d_context = block.backward(params, saved, d_state)
    d_x, d_start = block.start_backward(params, d_state)
    assert d_read is None and d_start is None and d_params.config == params.config
    return {"x": d_x, **tree.flatten(d_params), **d_context}


@EACH
def test_every_library_gives_the_same(name: str, backend: Any) -> None:
    config = CONFIGS[name]
    params, x, given, d_y = fresh(config), draw("x", 2, 5, 6), context("memory", 6), draw("d_y", 2, 5, 6)
    expected = {"y": step(params, x, given)[0], **gradients(params, x, given, d_y)}
    sent = tree.map_leaves(backend.array, params)
    where = replace(given, **{n: backend.array(getattr(given, n)) for n in ("mask", "memory", "memory_mask")})
    found = {
        "y": step(sent, backend.array(x), where)[0],
        **gradients(sent, backend.array(x), where, backend.array(d_y)),
    }
    for leaf, value in found.items():
        assert backend.owner.owns(value)
        np.testing.assert_allclose(backend.host(value), expected[leaf], rtol=1e-10, atol=1e-12, err_msg=leaf)


# --- what a context means


@EACH
def test_the_context_means_one_mask(name: str) -> None:
    params, x = fresh(CONFIGS[name]), draw("x", 2, 5, 6)
    key_mask = np.asarray([[True, True, False, True, False], [True, False, True, True, True]])
    mask = np.asarray([[True, False, True, True, True]] * 5)
    both = step(params, x, ra.Context(mask=mask, key_mask=key_mask))[0]
    one = step(params, x, ra.Context(mask=mask & key_mask[:, None, None, :]))[0]
    np.testing.assert_array_equal(both, one)


@EACH
def test_the_tokens_as_their_own_memory(name: str) -> None:
    params, x, d_y = fresh(CONFIGS[name]), draw("x", 2, 5, 6), draw("d_y", 2, 5, 6)
    alone, given = ra.Context(causal=True), ra.Context(causal=True, memory=x)
    np.testing.assert_array_equal(step(params, x, alone)[0], step(params, x, given)[0])
    whole, parts = gradients(params, x, alone, d_y), gradients(params, x, given, d_y)
    np.testing.assert_allclose(whole["x"], parts["x"] + parts["memory"], rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(whole["w_k"], parts["w_k"])


@EACH
@pytest.mark.parametrize("sizes", [(0, 3), (2, 0), (1, 1)])
def test_no_batch_and_no_token(sizes: tuple[int, int], name: str) -> None:
    params, x = fresh(CONFIGS[name]), draw("x", *sizes, 6)
    found = gradients(params, x, ra.Context(causal=True), np.ones(x.shape))
    assert found["x"].shape == x.shape and found["w_q"].shape == params.w_q.shape
    assert math.prod(sizes) or not any(np.any(a) for n, a in found.items() if n != "x")


def test_the_loss_is_flat_along_the_size_of_a_head() -> None:
    """Layer normalisation stands between the projections and the scores."""
    params = fresh(HIGHER_ORDER(width=8, heads=2, norm_eps=0.0))
    x, d_y, given = draw("x", 2, 5, 8), draw("d_y", 2, 5, 8), ra.Context()
    larger = replace(params, w_q=params.w_q * np.repeat([3.0, 0.1], 4))
    np.testing.assert_allclose(step(larger, x, given)[0], step(params, x, given)[0], rtol=1e-12, atol=1e-13)
    d = gradients(params, x, given, d_y)["w_q"]
    assert np.abs(np.sum((d * params.w_q).reshape(8, 2, 4), axis=(0, 2))).max() < 1e-13 * np.abs(d).max()


# --- fresh parameters


def test_shapes_follow_from_the_configuration() -> None:
    shapes = {name: a.shape for name, a in tree.flatten(fresh(CONFIGS["full"])).items()}
    assert shapes == {
        "w_q": (6, 20), "w_k": (6, 10), "w_v": (6, 6), "w_o": (12, 6),
        "b_q": (20,), "b_k": (10,), "b_v": (6,), "b_o": (6,),
    }  # fmt: skip
    assert list(tree.flatten(fresh(CONFIGS["plain"]))) == ["w_q", "w_k", "w_v", "w_o"]
    assert CONFIGS["full"].sizes == (4, 2, 5, 3) and CONFIGS["plain"].sizes == (2, 2, 3, 3)


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_init_depends_on_seed_and_layer_alone(name: str) -> None:
    block, config, like = ra.mechanism(name).block, small(name), np.zeros(1)
    first = block.init(config, like=like)
    same = tree.flatten(block.init(config, seed=0, like=np.ones((3, 3)), layer=0))
    assert all(x.tobytes() == same[leaf].tobytes() for leaf, x in tree.flatten(first).items())
    others = [block.init(config, seed=1, like=like), block.init(config, like=like, layer=1)]
    weights = [x for params in (first, *others) for n, x in vars(params).items() if n in ("w_q", "w_k", "w_v", "w_o")]
    assert len({w.ravel()[:12].tobytes() for w in weights}) == len(weights)
    assert not any(np.any(x) for n, x in vars(first).items() if n in ("b_q", "b_k", "b_v", "b_o"))


@pytest.mark.parametrize("name", ["softmax", "higher_order", "koopman", "delta"])
def test_weights_are_uniform_draws_of_the_counter(name: str) -> None:
    """Of variance 1 / inputs; whoever trained from a seed gets the same start from every later version."""
    params = ra.mechanism(name).block.init(small(name), seed=7, like=np.zeros(1), layer=2)
    draws = philox.uniform((6, 6), seed=7, purpose=f"{name}.w_k", layer=2)
    np.testing.assert_array_equal(params.w_k, (2.0 * draws - 1.0) * math.sqrt(3.0 / 6.0))


def bits(params: Any) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(a).tobytes() for name, a in tree.flatten(params).items()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_init_is_the_same_on_every_library(dtype: str, backend: Any) -> None:
    if not backend.has(dtype):
        pytest.skip(f"no {dtype} here")
    init = partial(ra.mechanism("softmax").block.init, CONFIGS["full"], seed=4)
    params = init(like=backend.array([0.0], dtype))
    if dtype == "bfloat16":
        from refattn.golden.storage_types import round_to

        truth = tree.map_leaves(lambda w: round_to(w, "bfloat16").astype("float32"), init(like=np.zeros(1)))
    else:
        truth = init(like=np.zeros(1, dtype))
    for w in tree.flatten(params).values():
        assert w.dtype == backend.array(0.0, dtype).dtype and backend.owner.owns(w)
    assert bits(tree.map_leaves(backend.host, params)) == bits(truth)


def test_these_numbers_are_fixed_for_good() -> None:
    """Whoever trained from a seed gets the same start from every later version."""
    params = ra.mechanism("softmax").block.init(SOFTMAX(width=4, heads=2), seed=7, like=np.zeros(1), layer=2)
    digest = zlib.crc32(b"".join(bits(tree.map_leaves(lambda a: a.astype("float32"), params)).values()))
    assert digest == 784039400
