"""What the models of the experiments learn: that it can be learnt, and that nothing of the answers is told before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.experiments.tasks import Overwriting, Parity, Recall, Text, standard_library


@given(pairs=st.integers(1, 6), keys=st.integers(6, 9), values=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_key_is_asked_for_once_and_its_value_is_the_answer(pairs: int, keys: int, values: int, seed: int) -> None:
    task = Recall(pairs=pairs, keys=keys, values=values)
    batch = task.batch(5, seed=seed, step=3)
    assert batch.inputs.shape == batch.targets.shape == batch.weights.shape == (5, task.context)
    for inputs, targets, weights in zip(*batch, strict=True):
        told, asked = inputs[: 2 * pairs], inputs[2 * pairs :]
        belongs = dict(zip(told[::2], told[1::2], strict=True))
        assert len(belongs) == pairs and sorted(belongs) == sorted(asked)
        assert set(belongs) <= set(range(keys)) and set(belongs.values()) <= set(range(keys, task.vocabulary))
        assert [belongs[key] for key in asked] == list(targets[2 * pairs :])
        assert list(weights) == [0.0] * (2 * pairs) + [1.0] * pairs


@given(pairs=st.integers(1, 4), rounds=st.integers(1, 3), seed=st.integers(0, 99))
def test_what_is_asked_for_is_the_value_that_a_key_was_given_last(pairs: int, rounds: int, seed: int) -> None:
    task = Overwriting(pairs=pairs, rounds=rounds, keys=6, values=5)
    batch = task.batch(4, seed=seed, step=3)
    assert batch.inputs.shape == (4, task.context)
    for inputs, targets, weights in zip(*batch, strict=True):
        told, asked = inputs[: 2 * rounds * pairs], inputs[2 * rounds * pairs :]
        keys, values = told[::2].tolist(), told[1::2].tolist()
        assert sorted(set(keys)) == sorted(asked) and all(keys.count(key) == rounds for key in asked)
        assert set(values) <= set(range(6, 11))
        assert [dict(zip(keys, values, strict=True))[key] for key in asked] == list(targets[len(told) :])
        assert list(weights) == [0.0] * len(told) + [1.0] * pairs
    with pytest.raises(ValueError, match="pairs: got 7, needs 1 to the number of keys, 6"):
        Overwriting(pairs=7, keys=6)


def test_parity_is_of_the_bits_so_far() -> None:
    batch = Parity(context=9).batch(5, seed=1, step=2)
    assert np.array_equal(batch.targets, [[sum(bits[: n + 1]) % 2 for n in range(9)] for bits in batch.inputs])
    (judged,) = Parity(context=8, judged=3).held_out()
    assert np.array_equal(judged.weights, [[0, 0, 0, 0, 1, 1, 1, 1]] * 3) and 0.3 < np.mean(judged.inputs) < 0.7


@pytest.mark.parametrize("task", [Recall(), Overwriting(), Parity(), Text(context=16)])
def test_a_batch_is_a_function_of_seed_and_step(task: Any) -> None:
    first = task.batch(4, seed=1, step=2)
    assert all(np.array_equal(a, b) for a, b in zip(first, task.batch(4, seed=1, step=2), strict=True))
    assert not np.array_equal(first.inputs, task.batch(4, seed=1, step=3).inputs)
    assert not np.array_equal(first.inputs, task.batch(4, seed=2, step=2).inputs)
    assert first.inputs.shape == (4, task.context) and first.inputs.max() < task.vocabulary


def test_what_is_held_out_of_the_text_is_not_learnt_from() -> None:
    task = Text(context=16, scored=1600, every=4)
    (batch,) = task.held_out()
    held_out = standard_library().heldout
    assert batch.inputs.shape == (25, 16)
    assert np.array_equal(batch.inputs[1], held_out[64:80]) and np.array_equal(batch.targets[1], held_out[65:81])
    assert np.all(batch.weights == 1.0)
