"""The loss and gradients of a batch, however it is cut, and the score of a text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refattn import backends, model, tree
from refattn.ops.losses import cross_entropy_forward
from refattn.train import step
from refattn.train.step import loss_and_gradients, score, to_tokens
from tests.conftest import Arrays

CONFIG = model.Config("softmax", context=8, width=16, heads=2, layers=2)


def made(dtype: str = "float64", config: model.Config = CONFIG) -> model.Params:
    return model.init(config, seed=0, like=np.zeros(1, dtype))


def drawn(size: int, tokens: int = 8, seed: int = 0) -> tuple[Any, Any]:
    text = np.random.default_rng(seed).integers(0, 256, (size, tokens + 1))
    return text[:, :-1], text[:, 1:]


def whole(params: model.Params, inputs: Any, targets: Any) -> float:
    """The mean loss, all sequences at once."""
    losses, _ = cross_entropy_forward(model.forward(params, inputs)[0], targets)
    return float(np.mean(losses))


def test_the_loss_is_the_mean_over_all_targets() -> None:
    params = made()
    inputs, targets = drawn(5)
    loss, _ = loss_and_gradients(params, inputs, targets)
    assert loss == pytest.approx(whole(params, inputs, targets), rel=1e-13)
    assert loss == pytest.approx(math.log(256.0), abs=0.3)  # a fresh model knows nothing


def test_the_gradients_are_those_of_the_loss() -> None:
    """The derivative along random directions, by differences of fourth order."""
    params = made()
    inputs, targets = drawn(3)
    _, gradients = loss_and_gradients(params, inputs, targets)
    random = np.random.default_rng(0)
    for name, leaf in tree.flatten(params).items():
        direction = random.normal(size=leaf.shape)
        expected = float(np.sum(tree.flatten(gradients)[name] * direction))

        def moved(h: float, name: str = name, direction: Any = direction) -> float:
            leaves = tree.flatten(params)
            return whole(tree.unflatten(params, leaves | {name: leaves[name] + h * direction}), inputs, targets)

        h = 1e-5
        slope = (8.0 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12.0 * h)
        assert slope == pytest.approx(expected, rel=1e-7, abs=1e-9), name


@settings(max_examples=40)
@given(
    size=st.sampled_from([1, 2, 3, 4, 6, 12]),
    shard=st.integers(1, 120),
    parts=st.integers(1, 20),
    portions=st.integers(1, 12),
)
def test_however_a_batch_is_cut_the_result_is_the_same(size: int, shard: int, parts: int, portions: int) -> None:
    """Shards, parts and portions cover each sequence once."""
    portions = math.gcd(size, portions)
    params = made(config=replace(CONFIG, width=4, layers=1))
    inputs, targets = drawn(size)
    expected, gradients = loss_and_gradients(params, inputs, targets)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(step, "SHARD_TOKENS", shard)
        patches.setattr(step, "PARTS", parts)
        cut = step.parts_of(params, 0, size, 8)
        assert [n for part in cut for rows in part for n in range(size)[rows]] == list(range(size))
        assert len(cut) <= parts and all(rows.stop - rows.start <= max(1, shard // 8) for part in cut for rows in part)
        loss, found = loss_and_gradients(params, inputs, targets, portions)
    assert loss == pytest.approx(expected, rel=1e-13)
    for name, leaf in tree.flatten(gradients).items():
        # Rounding of sums of a few terms, each at most as large as the largest gradient.
        np.testing.assert_allclose(tree.flatten(found)[name], leaf, rtol=0.0, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(step, "SHARD_TOKENS", 8)
    params = made("float32")
    inputs, targets = drawn(20)
    with backends.use_workers(1):
        loss, gradients = loss_and_gradients(params, inputs, targets)
        bits = score(params, inputs.astype(np.uint8).reshape(-1))
    with backends.use_workers(workers):
        again, found = loss_and_gradients(params, inputs, targets)
        assert score(params, inputs.astype(np.uint8).reshape(-1)) == bits
    assert again == loss
    leaves = tree.flatten(found)
    assert all(np.array_equal(leaves[name], x) for name, x in tree.flatten(gradients).items())


def test_on_other_libraries(backend: Arrays) -> None:
    """The same loss and gradients, up to rounding."""
    params = made()
    inputs, targets = drawn(4)
    loss, gradients = loss_and_gradients(params, inputs, targets)
    theirs = tree.map_leaves(backend.array, params)
    found, d_theirs = loss_and_gradients(theirs, to_tokens(theirs, inputs), to_tokens(theirs, targets), 2)
    assert found == pytest.approx(loss, rel=1e-12)
    for name, leaf in tree.flatten(d_theirs).items():
        np.testing.assert_allclose(backend.host(leaf), tree.flatten(gradients)[name], rtol=0.0, atol=1e-13)


@pytest.mark.parametrize(
    ("accumulate", "error", "problem"),
    [
        (3, ValueError, "accumulate: got 3, needs a divisor of the 4 sequences"),
        (0, ValueError, "accumulate: got 0, needs a whole number of at least 1"),
        (1.0, TypeError, "accumulate: got 1.0"),
    ],
)
def test_portions_that_do_not_fit(accumulate: Any, error: type[Exception], problem: str) -> None:
    with pytest.raises(error) as caught:
        loss_and_gradients(made(), *drawn(4), accumulate)
    assert str(caught.value).startswith(problem)


# --- scores


def test_a_score_is_the_mean_over_every_byte_but_the_first() -> None:
    params = made()
    part = np.random.default_rng(1).integers(0, 256, 45, dtype=np.uint8)
    total, start = 0.0, 0
    while start < len(part) - 1:  # 8, 8, 8, 8, 8, 4
        window = part[start : start + 9].astype(np.int64)
        total += whole(params, window[None, :-1], window[None, 1:]) * (len(window) - 1)
        start += 8
    assert score(params, part) == pytest.approx(total / 44 / math.log(2.0), rel=1e-13)


@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape")
def test_an_estimate_is_of_some_windows_and_the_same_ones_for_every_library(backend: Arrays) -> None:
    params = made()
    part = np.random.default_rng(3).integers(0, 256, 8 * 100 + 3, dtype=np.uint8)
    expected = sum(score(params, part[start : start + 9]) for start in range(0, 800, 128)) / 7
    assert score(params, part, 16) == pytest.approx(expected, rel=1e-13)
    assert score(tree.map_leaves(backend.array, params), part, 16) == pytest.approx(expected, rel=1e-12)
    assert score(params, part, 10**6) == score(params, part[:9])
