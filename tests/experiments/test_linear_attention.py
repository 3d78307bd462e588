"""The linear attentions that experiments compare with: their definitions, their laws, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.experiments import baselines, linear_attention
from refattn import model, tree
from refattn.ops.losses import cross_entropy_backward, cross_entropy_forward

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
