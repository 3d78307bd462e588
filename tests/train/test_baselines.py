"""The baselines: against counts in plain loops, as distributions, and on texts whose bits are known."""

from __future__ import annotations

import gzip
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refattn import philox
from refattn.train.baselines import bigram_bits, gzip_bits

texts = st.binary(min_size=2, max_size=60) | st.text("ab \n", min_size=2, max_size=60).map(str.encode)


def array(text: bytes) -> Any:
    return np.frombuffer(text, dtype=np.uint8)


def unigram(train: bytes, y: int) -> float:
    return (train.count(y) + 1) / (len(train) + 256)


def bigram(train: bytes, x: int, y: int) -> float:
    """The formula of the page, by looking at every pair."""
    after = [b for a, b in zip(train, train[1:], strict=False) if a == x]
    if not after:
        return unigram(train, y)
    kinds = len(set(after))
    return (after.count(y) + kinds * unigram(train, y)) / (len(after) + kinds)


@given(train=texts, heldout=texts)
def test_bits_are_those_of_plain_loops(train: bytes, heldout: bytes) -> None:
    pairs = list(zip(heldout, heldout[1:], strict=False))
    expected = -sum(math.log2(bigram(train, x, y)) for x, y in pairs) / len(pairs)
    assert bigram_bits(array(train), array(heldout)) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=10)
@given(train=texts, x=st.integers(0, 255))
def test_it_is_a_distribution(train: bytes, x: int) -> None:
    """Two bytes are one prediction, so 2 ** -bits is its probability."""
    total = sum(2.0 ** -bigram_bits(array(train), array(bytes([x, y]))) for y in range(256))
    assert total == pytest.approx(1.0, rel=1e-12)


def test_known_texts() -> None:
    coins = philox.integers(100_000, 0, 2, seed=0, purpose="coins").astype(np.uint8)
    turns = np.resize(array(b"ab"), 100_000)
    assert bigram_bits(coins, coins[:50_000]) == pytest.approx(1.0, abs=0.01)
    assert bigram_bits(turns, turns) == pytest.approx(0.0, abs=0.001)


def test_gzip() -> None:
    text = b"attention is a dynamical system\n" * 40
    assert gzip_bits(array(text)) == 8.0 * len(gzip.compress(text, compresslevel=9)) / len(text)
    assert gzip_bits(array(text)) < 1.0


def test_too_short_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="^heldout: got 1 bytes, needs at least 2"):
        bigram_bits(array(b"abc"), array(b"a"))
    with pytest.raises(ValueError, match="^heldout: got 0 bytes, needs at least 1"):
        gzip_bits(array(b""))
