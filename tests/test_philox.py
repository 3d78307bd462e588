"""The bits of the counter: published answers, a second implementation, frozen values, and statistics."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import philox

MASK = 0xFFFFFFFF
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
NAMES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "purpose": st.text(max_size=20),
        "step": st.integers(0, MASK),
        "layer": st.integers(0, MASK),
    }
)
NAME: dict[str, Any] = {"seed": 0x0123456789ABCDEF, "purpose": "frozen bits", "step": 3, "layer": 5}
FROZEN_WORDS = ["69415b01", "028730a9", "2f8af182", "e58f50b3", "686ac400", "a0ddd408"]
FROZEN_UNIFORM = ["0x1.a5056c0000000p-2", "0x1.4398000000000p-7", "0x1.7c57880000000p-3", "0x1.cb1ea00000000p-1"]
FROZEN_NORMAL = ["-0x1.1627000000000p+0", "-0x1.c7f0000000000p-4", "0x1.00e7000000000p+0", "-0x1.0703000000000p+0"]
FROZEN_INTEGERS = [-9, -50, -32, 39, -10, 12, -19, -37]
FROZEN_PERMUTATION = [1, 7, 2, 6, 8, 4, 0, 5, 3, 9]


def scalar_philox(c: list[int], k: list[int]) -> list[int]:
    for i in range(10):
        if i:
            k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & MASK, (p >> 32) ^ c[3] ^ k[1], p & MASK]
    return c


def scalar_crc32(text: str) -> int:
    crc = MASK
    for byte in text.encode("utf-8"):
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ MASK


def scalar_word(i: int, *, seed: int, purpose: str, step: int, layer: int) -> int:
    return scalar_philox([i // 4, scalar_crc32(purpose), step, layer], [seed & MASK, seed >> 32])[i % 4]


@pytest.mark.parametrize(
    ("block", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_published_known_answers(block: str, key: str, answer: str) -> None:
    c, k, expected = ([int(word, 16) for word in text.split()] for text in (block, key, answer))
    got = philox.philox4x32(np.asarray(c, dtype=np.uint32), np.asarray(k, dtype=np.uint32))
    assert got.dtype == np.uint32
    assert got.tolist() == scalar_philox(c, k) == expected


@given(st.integers(0, 40), NAMES)
def test_words_agree_with_the_scalar_implementation(count: int, name: dict[str, Any]) -> None:
    assert philox.words(count, **name).tolist() == [scalar_word(i, **name) for i in range(count)]


@given(SHAPES, NAMES)
def test_elements_follow_from_the_words_in_every_shape(shape: tuple[int, ...], name: dict[str, Any]) -> None:
    size = math.prod(shape)
    w = [scalar_word(i, **name) for i in range(2 * size)]
    expected = {
        "uniform": [(w[e] >> 8) / 2**24 for e in range(size)],
        "normal": [
            (2 * ((w[2 * e] & 0xFFFF) + (w[2 * e] >> 16) + (w[2 * e + 1] & 0xFFFF)) - 196605) / 2**16
            for e in range(size)
        ],
        "integers": [-7 + (w[e] * 1000 >> 32) for e in range(size)],
    }
    got = {
        "uniform": philox.uniform(shape, **name),
        "normal": philox.normal(shape, **name),
        "integers": philox.integers(shape, -7, 993, **name),
    }
    for kind, values in got.items():
        assert values.shape == shape
        assert values.dtype == (np.int64 if kind == "integers" else np.float64)
        assert values.reshape(-1).tolist() == expected[kind]
        if kind != "integers":
            np.testing.assert_array_equal(values, values.astype(np.float32))


@given(st.integers(0, 50), NAMES)
def test_permutation_sorts_the_words(n: int, name: dict[str, Any]) -> None:
    expected = sorted(range(n), key=lambda i: (scalar_word(i, **name), i))
    assert philox.permutation(n, **name).tolist() == expected


def test_frozen_bits() -> None:
    """These never change: golden vectors, initial values and data orders of all versions are made of them."""
    assert [f"{w:08x}" for w in philox.words(6, **NAME).tolist()] == FROZEN_WORDS
    assert [x.hex() for x in philox.uniform((2, 2), **NAME).reshape(-1).tolist()] == FROZEN_UNIFORM
    assert [x.hex() for x in philox.normal(4, **NAME).tolist()] == FROZEN_NORMAL
    assert philox.integers(8, -50, 50, **NAME).tolist() == FROZEN_INTEGERS
    assert philox.permutation(10, **NAME).tolist() == FROZEN_PERMUTATION


def test_every_part_of_the_name_makes_another_stream() -> None:
    name: dict[str, Any] = {"seed": 0, "purpose": "weights", "step": 0, "layer": 0}
    others: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"seed": 1 << 32},
        {"purpose": "data"},
        {"purpose": "weights "},
        {"step": 1},
        {"layer": 1},
    ]
    streams = [philox.words(64, **(name | other)).tolist() for other in others]
    assert len({word for stream in streams for word in stream}) == 64 * len(streams)


def test_moments() -> None:
    """Within five standard errors of what the definitions say."""
    n = 200_000
    u = philox.uniform(n, seed=1, purpose="moments")
    assert 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    x = philox.normal(n, seed=1, purpose="moments")
    assert np.abs(x).max() < 3
    assert abs(x.mean()) < 5 * math.sqrt(1 / n)
    assert abs(x.var() - 1) < 5 * math.sqrt(1.6 / n)  # the kurtosis of three uniform variables is 3 - 1.2 / 3 = 2.6
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 2.6) < 5 * math.sqrt(105 / n)
    assert abs((x[1:] * x[:-1]).mean()) < 5 * math.sqrt(1 / n)
    i = philox.integers(n, 0, 10, seed=1, purpose="moments")
    counts = np.bincount(i, minlength=10)
    assert ((counts - n / 10) ** 2).sum() / (n / 10) < 30  # chi squared with 9 degrees of freedom


def test_the_ends_of_the_ranges() -> None:
    one = philox.integers(5, 4, 5, seed=2**64 - 1, purpose="", step=MASK, layer=MASK)
    assert one.tolist() == [4] * 5
    top = philox.integers(3, 2**63 - 1 - 2**32, 2**63 - 1, seed=0, purpose="wide")
    assert top.tolist() == [2**63 - 1 - 2**32 + w for w in philox.words(3, seed=0, purpose="wide").tolist()]
    assert philox.words(0, seed=0, purpose="").shape == (0,)
    assert philox.uniform((), seed=0, purpose="").shape == ()
    assert philox.permutation(0, seed=0, purpose="").tolist() == []
    three: Any = np.int64(3)
    expected = [scalar_word(i, seed=3, purpose="a", step=0, layer=0) for i in range(3)]
    assert philox.words(three, seed=three, purpose="a").tolist() == expected


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"count": -1}, ValueError, "count: got -1, needs a whole number of at least 0"),
        ({"count": 2**34 + 1}, ValueError, "count: got 17179869185"),
        ({"count": 2.0}, TypeError, "count: got 2.0, needs a whole number"),
        ({"seed": -1}, ValueError, "seed: got -1"),
        ({"seed": 2**64}, ValueError, "seed: got 18446744073709551616"),
        ({"seed": True}, TypeError, "seed: got True"),
        ({"seed": None}, TypeError, "seed: got None"),
        ({"step": 2**32}, ValueError, "step: got 4294967296"),
        ({"layer": -1}, ValueError, "layer: got -1"),
        ({"purpose": b"x"}, TypeError, "purpose: got bytes, needs a text"),
        ({"shape": (2, -3)}, ValueError, "shape: got -3"),
        ({"shape": 1.5}, TypeError, "shape: got 1.5"),
        ({"shape": "23"}, TypeError, "shape: got '2'"),
        ({"low": 3, "high": 3}, ValueError, "high: got 3 with low = 3, needs low < high"),
        ({"low": 0, "high": 2**32 + 1}, ValueError, "high: got 4294967297 with low = 0"),
        ({"low": -(2**63) - 1, "high": 0}, ValueError, "low: got -9223372036854775809"),
        ({"low": 0.5}, TypeError, "low: got 0.5"),
        ({"n": -1}, ValueError, "n: got -1"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    good = {"count": 4, "shape": (2, 3), "n": 4, "low": 0, "high": 9, "seed": 0, "purpose": "x", "step": 0, "layer": 0}
    functions: tuple[Any, ...] = (philox.words, philox.uniform, philox.normal, philox.integers, philox.permutation)
    concerned = [f for f in functions if set(change) <= set(inspect.signature(f).parameters)]
    assert concerned
    for function in concerned:
        arguments = {name: (good | change)[name] for name in inspect.signature(function).parameters}
        with pytest.raises(error) as caught:
            function(**arguments)
        assert text in str(caught.value)


def test_bad_blocks_are_named() -> None:
    block, key = np.zeros(4, dtype=np.uint32), np.zeros(2, dtype=np.uint32)
    with pytest.raises(TypeError, match="counter: got int64, needs a NumPy array of dtype uint32"):
        philox.philox4x32(block.astype(np.int64), key)
    with pytest.raises(TypeError, match="key: got list, needs"):
        philox.philox4x32(block, [0, 0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"key: got the shape \(3,\), needs \(..., 2\)"):
        philox.philox4x32(block, np.zeros(3, dtype=np.uint32))
    with pytest.raises(ValueError, match=r"counter: got the shape \(\), needs \(..., 4\)"):
        philox.philox4x32(np.zeros((), dtype=np.uint32), key)


def test_words_of_several_steps_are_those_of_each() -> None:
    found = philox.words_of_steps(7, range(3, 6), seed=2**40 + 1, purpose="steps", layer=4)
    assert found.shape == (3, 7)
    for row, step in zip(found, range(3, 6), strict=True):
        assert row.tolist() == philox.words(7, seed=2**40 + 1, purpose="steps", step=step, layer=4).tolist()
    assert philox.words_of_steps(0, [1, 2], seed=0, purpose="").shape == (2, 0)
