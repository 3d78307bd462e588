"""The linear attentions that experiments compare with: their definitions, their laws, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.experiments import baselines, linear_attention, linear_attention_block
from refattn import model, tree
from refattn.mechanisms.context import Context
from refattn.ops.losses import cross_entropy_backward, cross_entropy_forward
from tests.conftest import Arrays

KIND = pytest.mark.parametrize("kind", linear_attention.KINDS)


def drawn(n: int, d: int, e: int, seed: int = 0, size: float = 1.0) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(seed)
    q, k, v = (size * random.normal(size=(2, 3, n, width)) for width in (d, d, e))
    return q, k, v


def phi(x: float) -> float:
    return x + 1.0 if x > 0.0 else math.exp(x)


def attended(q: Any, k: Any, v: Any, kind: str) -> list[float]:
    """What one query makes of some keys and values, all of which it may see: the papers' formulas, number by number."""
    keys, d = range(len(k)), range(len(q))
    if kind == "elu":
        weights = [sum(phi(q[a]) * phi(k[j][a]) for a in d) for j in keys]
        weights = [w / sum(weights) for w in weights]
    else:
        query = [math.exp(x) / sum(math.exp(y) for y in q) for x in q]
        sums = [sum(math.exp(k[j][a]) for j in keys) for a in d]
        weights = [sum(query[a] * math.exp(k[j][a]) / sums[a] for a in d) for j in keys]
    return [sum(weights[j] * v[j][c] for j in keys) for c in range(len(v[0]))]


@KIND
def test_a_query_attends_the_keys_up_to_it_by_the_formula(kind: str) -> None:
    q, k, v = drawn(6, 4, 5, size=1.5)
    out, _ = linear_attention.forward(q, k, v, kind=kind)
    for b, h, i in np.ndindex(q.shape[:3]):
        expected = attended(q[b, h, i], k[b, h, : i + 1], v[b, h, : i + 1], kind)
        np.testing.assert_allclose(out[b, h, i], expected, rtol=1e-13, atol=1e-14)


@KIND
@given(n=st.integers(1, 9), d=st.integers(1, 5), cut=st.integers(1, 9), seed=st.integers(0, 999))
def test_nothing_leaks_from_the_future(kind: str, n: int, d: int, cut: int, seed: int) -> None:
    q, k, v = drawn(n, d, 3, seed)
    cut = min(cut, n)
    out, _ = linear_attention.forward(q, k, v, kind=kind)
    changed = [
        np.concatenate([x[:, :, :cut], y[:, :, cut:]], axis=2)
        for x, y in zip((q, k, v), drawn(n, d, 3, seed + 1), strict=True)
    ]
    moved, _ = linear_attention.forward(*changed, kind=kind)
    assert np.array_equal(out[:, :, :cut], moved[:, :, :cut])
    short, _ = linear_attention.forward(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], kind=kind)
    np.testing.assert_allclose(short, out[:, :, :cut], rtol=1e-12, atol=1e-13)


@KIND
def test_the_weights_of_a_query_are_above_0_and_sum_to_1(kind: str) -> None:
    q, k, v = drawn(8, 4, 3, size=2.0)
    out, saved = linear_attention.forward(q, k, np.ones_like(v), kind=kind)
    np.testing.assert_allclose(out, 1.0, rtol=1e-13)
    assert np.all(saved.weights[..., np.tril_indices(8)[0], np.tril_indices(8)[1]] > 0.0)


def test_the_two_normalisations_differ() -> None:
    """Where all keys are the same in a feature, and in no other case, one sum for all features is as good."""
    q, k, v = drawn(6, 4, 3)
    out, saved = linear_attention.forward(q, k, v, kind="separate")
    joint = np.tril(saved.queries @ np.swapaxes(saved.keys, -1, -2))
    joint = joint / joint.sum(axis=-1, keepdims=True) @ v
    assert np.max(np.abs(joint - out)) > 1e-2


@KIND
@settings(deadline=None, max_examples=25)
@given(n=st.integers(1, 5), d=st.integers(1, 3), seed=st.integers(0, 999))
def test_the_gradients_are_those_of_the_output(kind: str, n: int, d: int, seed: int) -> None:
    inputs = drawn(n, d, 2, seed)
    upstream = np.random.default_rng(seed + 1).normal(size=(2, 3, n, 2))
    _, saved = linear_attention.forward(*inputs, kind=kind)
    found = linear_attention.backward(saved, upstream)
    h = 1e-4
    for place, name in enumerate("qkv"):
        x = inputs[place]
        # differences of fourth order do not hold where elu has its kink in the second derivative
        far = np.abs(x) > 4 * h if kind == "elu" and name != "v" else np.ones(x.shape, bool)
        for index in np.argwhere(far):

            def loss(step: float, place: int = place, index: Any = tuple(index)) -> float:
                moved = [array.copy() for array in inputs]
                moved[place][index] += step
                return float(np.sum(linear_attention.forward(*moved, kind=kind)[0] * upstream))

            slope = (8.0 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12.0 * h)
            assert found[name][tuple(index)] == pytest.approx(slope, rel=1e-8, abs=1e-9)


@KIND
def test_all_array_libraries_agree(kind: str, backend: Arrays) -> None:
    inputs = drawn(5, 4, 3)
    upstream = np.random.default_rng(1).normal(size=(2, 3, 5, 3))
    expected, saved = linear_attention.forward(*inputs, kind=kind)
    gradients = linear_attention.backward(saved, upstream)
    out, saved = linear_attention.forward(*map(backend.array, inputs), kind=kind)
    np.testing.assert_allclose(backend.host(out), expected, rtol=1e-12, atol=1e-13)
    for name, value in linear_attention.backward(saved, backend.array(upstream)).items():
        np.testing.assert_allclose(backend.host(value), gradients[name], rtol=1e-11, atol=1e-12)


@KIND
def test_the_gradients_of_a_model_are_those_of_its_loss(kind: str) -> None:
    place = "docs.experiments.baselines:LINEAR_ATTENTION"
    config = model.Config(place, vocabulary=7, context=6, width=8, heads=2, layers=2, options={"kind": kind})
    assert config.record is baselines.LINEAR_ATTENTION
    start = model.init(config, seed=3, like=np.zeros(1))
    random = np.random.default_rng(0)
    params = tree.map_leaves(lambda leaf: leaf + 0.3 * random.normal(size=leaf.shape), start)
    tokens, targets = random.integers(0, 7, (2, 3, 6))

    def loss(given: Any) -> tuple[Any, Any, Any]:
        logits, saved = model.forward(given, tokens)
        losses, loss_saved = cross_entropy_forward(logits, targets)
        return np.sum(losses), saved, loss_saved

    _, saved, loss_saved = loss(params)
    gradients = tree.flatten(model.backward(params, saved, cross_entropy_backward(loss_saved, np.ones(targets.shape))))
    leaves = tree.flatten(params)
    h = 1e-5
    for name, leaf in leaves.items():
        direction = random.normal(size=leaf.shape)

        def along(step: float, name: str = name, direction: Any = direction) -> float:
            return float(loss(tree.unflatten(params, leaves | {name: leaves[name] + step * direction}))[0])

        slope = (8.0 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12.0 * h)
        assert float(np.sum(gradients[name] * direction)) == pytest.approx(slope, rel=1e-8, abs=1e-8), name


def test_what_cannot_be_computed_is_refused() -> None:
    q, k, v = drawn(3, 4, 4)
    with pytest.raises(ValueError, match="kind: got 'relu', needs one of elu, separate"):
        linear_attention.forward(q, k, v, kind="relu")
    with pytest.raises(ValueError, match="heads: got 3, needs a divisor of the width 8"):
        linear_attention_block.Config(width=8, heads=3, kind="elu")
    block = baselines.LINEAR_ATTENTION.block
    params = block.init(block.Config(width=4, heads=2, kind="elu"), like=np.zeros(1))
    state = block.start(params, np.ones((1, 3, 4)), Context(causal=True))
    with pytest.raises(ValueError, match="context.causal: got False, needs True"):
        block.forward(params, state, Context())
