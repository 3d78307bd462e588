"""Text from a model: what it is a function of, that the cache changes nothing, and what is refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import model, philox
from refattn.model import decode
from refattn.train import sample
from refattn.train.sample import generate
from refattn.train.step import to_tokens

CONFIG = model.Config("softmax", context=8, width=16, heads=2, layers=2)


def made(seed: int = 0, dtype: str = "float64", spread: float = 20.0) -> model.Params:
    """A model that has not learned anything, with logits as far apart as those of one that has."""
    params = model.init(CONFIG, seed=seed, like=np.zeros(1, dtype))
    return dataclasses.replace(params, token_embedding=params.token_embedding * spread)


def without_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    record = dataclasses.replace(ra.mechanism("softmax"), stream=None)
    monkeypatch.setattr("refattn.mechanisms.softmax.record", record)


def test_equal_arguments_give_equal_text() -> None:
    params = made()
    text = generate(params, b"ab", 30, seed=1)
    assert len(text) == 30 and generate(params, b"ab", 30, seed=1) == text
    assert generate(params, b"ab", 30, seed=2) != text
    assert generate(params, b"cd", 30, seed=1) != text


def test_a_shorter_text_is_the_beginning_of_a_longer_one() -> None:
    params = made()
    assert generate(params, b"ab", 7, seed=1) == generate(params, b"ab", 30, seed=1)[:7]
    assert generate(params, b"ab", 0) == b""


@pytest.mark.parametrize("prompt", [b"a", b"abcdefg", b"abcdefgh", b"a long prompt, longer than the context"])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 40])
def test_with_and_without_a_stream_the_text_is_the_same(
    monkeypatch: pytest.MonkeyPatch, prompt: bytes, length: int
) -> None:
    params = made(3)
    expected = generate(params, prompt, length, seed=5)
    without_stream(monkeypatch)
    assert params.config.record.stream is None
    assert decode.start(params, 1).blocks is None
    assert generate(params, prompt, length, seed=5) == expected


def test_at_temperature_0_the_most_likely_byte_comes() -> None:
    params = made()
    text = b"the"
    for _ in range(5):
        logits, _ = model.forward(params, to_tokens(params, np.frombuffer(text, np.uint8)[None, :].astype(np.int64)))
        text += bytes([int(np.argmax(logits[0, -1, :]))])
    for seed in (0, 1):
        assert generate(params, b"the", 5, seed=seed, temperature=0.0) == text[3:]
    for small in (1e-4, 1e-300, 5e-324):
        assert generate(params, b"the", 5, temperature=small) == text[3:]


def test_where_the_context_is_full_its_last_half_goes_on() -> None:
    """The byte after the first that did not fit is chosen from four bytes alone, by the second random number."""
    params = made()
    text = generate(params, b"abcdefgh", 2, seed=9)
    half = np.frombuffer(b"fgh" + text[:1], np.uint8)[None, :]
    logits, _ = model.forward(params, to_tokens(params, half.astype(np.int64)))
    draw = philox.uniform((2,), seed=9, purpose="sample")[1]
    assert text[1] == sample._choose(logits[0, -1, :], float(draw), 0.8)


def test_bytes_come_as_often_as_their_probabilities_say() -> None:
    logits = np.log(np.asarray([0.5, 0.25, 0.125, 0.125]))
    draws = (np.arange(4000) + 0.5) / 4000
    found = Counter(sample._choose(logits, float(draw), 1.0) for draw in draws)
    assert found == {0: 2000, 1: 1000, 2: 500, 3: 500}
    squared = Counter(sample._choose(logits, float(draw), 0.5) for draw in draws)
    assert squared[0] == pytest.approx(4000 * 16 / 22, abs=1) and squared[3] == pytest.approx(4000 / 22, abs=1)
    assert sample._choose(logits, 0.0, 1.0) == 0 and sample._choose(logits, 1.0 - 2**-53, 1.0) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        ({"prompt": "text"}, TypeError, "prompt: got 'text', needs a bytes"),
        ({"prompt": b""}, ValueError, "prompt: got no byte, needs at least one"),
        ({"length": -1}, ValueError, "length: got -1, needs a whole number of at least 0"),
        ({"length": 1.5}, TypeError, "length: got 1.5"),
        ({"temperature": -1.0}, ValueError, "temperature: got -1.0, needs a finite number from 0"),
        ({"temperature": float("inf")}, ValueError, "temperature: got inf, needs a finite number from 0"),
        ({"seed": -1}, ValueError, "seed: got -1"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], problem: str) -> None:
    given: dict[str, Any] = {"prompt": b"a", "length": 3} | arguments
    with pytest.raises(error) as caught:
        generate(made(), **given)
    assert str(caught.value).startswith(problem)


def test_another_vocabulary_is_refused() -> None:
    params = model.init(dataclasses.replace(CONFIG, vocabulary=10), like=np.zeros(1))
    with pytest.raises(ValueError, match="params: got a vocabulary of 10, needs 256: the bytes"):
        generate(params, b"a", 1)
