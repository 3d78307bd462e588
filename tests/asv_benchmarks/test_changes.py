"""Steps in histories that are made here: planted ones are found, small ones are not told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from asv_benchmarks import __main__ as command
from asv_benchmarks import archive, history
from asv_benchmarks import changes as steps
from asv_benchmarks.changes import Change, Series, calibrated, changes, jumps
from asv_benchmarks.suite import Benchmark

TIME = Benchmark("core.Core.time_both", ("a.dense", 64), "time")
SHARE = Benchmark("accuracy.Share.track_largest", ("a.dense",), "share")
WORK = Benchmark("work.Work.track_held", ("a.dense",), "work")
RATE = Benchmark("language.Train.track_tokens", ("a",), "rate")
MACHINE = Benchmark("start.Machine.time_numpy", ("exp",), "time")


def series(benchmark: Benchmark, values: list[float]) -> Series:
    return Series(benchmark, tuple(f"{n:08x}" for n in range(len(values))), tuple(values))


def noisy(levels: list[tuple[float, int]], seed: int = 0, noise: float = 0.02) -> list[float]:
    """Levels with so many values each, disturbed."""
    draw = np.random.default_rng(seed)
    whole = np.concatenate([np.full(count, level) for level, count in levels])
    return (1e-3 * whole * np.exp(draw.normal(0.0, noise, len(whole)))).tolist()


@pytest.mark.parametrize("factor", [1.2, 1 / 1.2])
def test_a_planted_step_is_found(factor: float) -> None:
    pytest.importorskip("asv")
    values = noisy([(1.0, 8), (factor, 6)])
    assert jumps(values) == [8]
    (found,) = changes(series(TIME, values))
    assert (found.before, found.commit) == ("00000007", "00000008")
    assert found.factor == pytest.approx(factor, rel=0.03)
    assert found.word == ("slower" if factor > 1.0 else "faster") and found.worse == (factor > 1.0)


def test_two_steps_are_found_and_none_where_nothing_moves() -> None:
    pytest.importorskip("asv")
    found = changes(series(TIME, noisy([(1.0, 8), (1.3, 8), (2.0, 8)])))
    assert [int(step.commit, 16) for step in found] == [8, 16]
    assert jumps([1.0] * 14) == []


def test_a_step_that_is_too_small_joins_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1.0, 1.0, 1.04, 1.04, 1.3, 1.3]
    monkeypatch.setattr(steps, "jumps", lambda values: [2, 4])
    (found,) = changes(series(TIME, values))
    assert found.commit == "00000004" and found.factor == pytest.approx(1.3 / 1.02)
    assert [step.commit for step in changes(series(TIME, values), least=1.01)] == ["00000002", "00000004"]


def test_what_has_no_noise_is_told_at_any_change() -> None:
    for benchmark, word in ((SHARE, "less exact"), (WORK, "more work")):
        (found,) = changes(series(benchmark, [0.3, 0.3, 0.3001, 0.3001]))
        assert (found.commit, found.word) == ("00000002", word)


def test_the_machine_is_divided_out() -> None:
    """NumPy alone took a half more from the fourth commit on: times did, too, and rates fell."""
    machine = [1.0, 1.0, 1.0, 1.5, 1.5, 1.5, 1.5]
    made = [series(MACHINE, machine), series(TIME, machine), series(RATE, [1.0 / x for x in machine])]
    found = {one.benchmark: one.values for one in calibrated(made)}
    assert found[MACHINE] == tuple(machine)
    assert np.ptp(found[TIME]) == np.ptp(found[RATE]) == pytest.approx(0.0)
    # what measuring the machine's pace adds of noise stays out
    still = [series(MACHINE, [1.0, 1.04, 1.0]), series(TIME, [1.0, 1.0, 1.0])]
    assert calibrated(still)[1].values == (1.0, 1.0, 1.0)


def test_the_recorded_history_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the order of the commits' dates, not of their names; only what a file has."""
    pytest.importorskip("asv")
    monkeypatch.setattr(archive, "RESULTS", tmp_path)
    monkeypatch.setattr(
        history, "benchmarks", lambda pattern="": [Benchmark("start.Machine.time_numpy", ("exp",), "time")]
    )
    (place,) = history.steps()
    ((one, _),) = history.steps()[place].items()
    dates = {}
    for file in archive.RECORDED.glob("*/*-*.json"):
        stored = json.loads(file.read_text())
        dates[stored["commit_hash"]] = stored["date"]
    assert place[0] == file.parent.name and list(one.commits) == sorted(dates, key=lambda commit: dates[commit])


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = series(TIME, noisy([(1.0, 4), (1.3, 4)]))
    found = {slow: [Change(TIME, "00000003", "00000004", 1.3)]}
    monkeypatch.setattr(history, "steps", lambda pattern, least: {("m", "python3.11.json"): found})
    done = CliRunner().invoke(command.cli, ["changes"])
    assert done.exit_code == 1, done.output
    assert "m, python3.11: 1 steps in 1 series of up to 8 commits" in done.output
    assert all(text in done.output for text in ("slower", "00000003..00000004", "1.300", "|"))
    monkeypatch.setattr(history, "steps", lambda pattern, least: {("m", "python3.11.json"): {slow: []}})
    assert CliRunner().invoke(command.cli, ["changes"]).exit_code == 0
