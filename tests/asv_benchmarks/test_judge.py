"""What counts as a difference: planted ones in numbers made here are found, and noise is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asv_benchmarks.judge import LIMITS, WORDS, WORSE, number, paired
from asv_benchmarks.suite import Benchmark

TIME = Benchmark("core.Core.time_both", ("a.dense", 64), "time")
SHARE = Benchmark("accuracy.Share.track_largest", ("a.dense",), "share")
RATE = Benchmark("language.Train.track_tokens", ("a",), "rate")
MEMORY = Benchmark("memory.Core.peakmem_both", ("a.dense",), "memory")

Starts = list[tuple[list[float], list[float]]]


def busy(factor: float, seed: int, starts: int = 3, rounds: int = 8, noise: float = 0.03) -> Starts:
    """Rounds on a busy machine: its speed drifts by as much as half, both sides alike, and now and then one is hit."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(starts):
        drift = 1e-3 * np.exp(np.cumsum(draw.normal(0.0, 0.15, rounds)))
        sides = drift * np.exp(draw.normal(0.0, noise, (2, rounds)))
        sides[draw.integers(2), draw.integers(rounds)] *= 3.0
        found.append(((sides[0]).tolist(), (factor * sides[1]).tolist()))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_difference_is_found_in_drift_and_noise(seed: int) -> None:
    slower, faster, same = (paired(TIME, busy(factor, seed)) for factor in (1.2, 1 / 1.2, 1.0))
    assert (slower.word, faster.word, same.word) == ("slower", "faster", "")
    assert slower.ratio and slower.ratio[0] <= slower.ratio[1] <= slower.ratio[2]
    assert slower.ratio[1] == pytest.approx(1.2, rel=0.05)


@given(st.floats(0.5, 2.0), st.lists(st.floats(1e-4, 1.0), min_size=4, max_size=8))
def test_the_word_follows_the_ratio(factor: float, base: list[float]) -> None:
    verdict = paired(TIME, [(base, [factor * x for x in base])] * 2)
    size = math.log(LIMITS["time"].factor)
    if abs(math.log(factor)) > 1.01 * size:
        assert verdict.word == WORDS["time"][factor < 1.0]
    elif abs(math.log(factor)) < 0.99 * size:
        assert verdict.word == ""


def test_a_difference_too_small_to_matter_is_none() -> None:
    assert paired(TIME, [([2e-6] * 4, [2.9e-6] * 4)]).word == ""
    assert paired(MEMORY, [([1 << 20], [2 << 20])]).word == ""
    assert paired(MEMORY, [([64 << 20], [80 << 20])]).word == "more memory"
    assert paired(SHARE, [([0.01], [0.02])]).word == ""


def test_accuracy() -> None:
    assert paired(SHARE, [([0.3], [0.31])]).word == ""
    assert paired(SHARE, [([0.3], [300.0])]).word == "less exact"
    assert paired(SHARE, [([0.3], [0.1])]).word == "more exact"
    assert paired(SHARE, [([0.0], [0.0])]).word == ""
    assert paired(SHARE, [([0.0], [0.5])]).word == "less exact"
    assert "less exact" in WORSE and "more exact" not in WORSE


def test_a_rate_is_worse_where_it_is_less() -> None:
    assert paired(RATE, [([1000.0], [700.0])]).word == "lower rate"
    assert paired(RATE, [([1000.0], [1400.0])]).word == "higher rate"
    assert "lower rate" in WORSE and "higher rate" not in WORSE
    assert number("rate", 15854.2) == "1.59e+04" and number("rate", 0.53) == "0.53"


def test_numbers_have_units() -> None:
    assert [number("time", x) for x in (2.5, 0.0123, 4.5e-5, 3e-9, None)] == [
        "2.5 s",
        "12.3 ms",
        "45 us",
        "0.003 us",
        "",
    ]
    assert [number("memory", x) for x in (3 << 30, 5 << 20, 1 << 19)] == ["3 GiB", "5 MiB", "0.5 MiB"]
    assert number("share", 0.1234) == "0.123"
    assert number("work", 7538331.0) == number("instructions", 7538331) == "7,538,331"
