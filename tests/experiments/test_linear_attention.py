"""The linear attentions that experiments compare with: their definitions, their laws, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.experiments import linear_attention

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
