"""A sample of every fuzzer: no wrong result, and errors name the file or the argument."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import files, functions, kills, options, signals

SAMPLED = "REFATTN_SLOW_SAMPLE" in os.environ


@pytest.mark.parametrize("calls", [150, pytest.param(600 if SAMPLED else 10_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_files(calls: int) -> None:
    counts, bad = files.run(calls, seed=0)
    assert not bad, "\n".join(bad)
    assert counts["refused"] > calls // 2


@pytest.mark.parametrize("calls", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_options(calls: int) -> None:
    counts, bad = options.run(calls, seed=0)
    assert not bad, "\n".join(bad)
    assert counts["refused"] > calls // 2 and counts["fine"] > calls // 20


@pytest.mark.parametrize("calls", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_functions(calls: int) -> None:
    counts, bad = functions.run_all(calls, seed=0)
    assert not (counts["wrong"] or counts["mutated"] or counts["hang"]), "\n".join(bad)
    assert len(bad) <= (0.002 if calls > 1000 else 0.004) * calls, "\n".join(bad)
    assert counts["refused"] > calls // 2 and counts["fine"] > calls // 8


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow(sampled=False))]
)
@pytest.mark.timeout(1800)
def test_kills(count: int) -> None:
    counts, bad = kills.run(count, seed=0)
    assert not bad, "\n".join(bad)
    assert counts["killed"] == count and counts["the same"]


@pytest.mark.skipif(not os.path.exists("/proc"), reason="needs /proc")
@pytest.mark.parametrize(
    "count", [pytest.param(5, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow(sampled=False))]
)
@pytest.mark.timeout(3600)
def test_signals(count: int) -> None:
    counts, bad = signals.run(count, seed=0)
    assert not bad, "\n".join(bad)
    assert counts["ended"] >= count // 5  # on a quick machine others are done before their signal
