"""Results over time: asv runs and stores, the last results are found and compared, pages are made."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import refattn as ra
from asv_benchmarks import __main__ as command
from asv_benchmarks import archive, history
from asv_benchmarks.changes import Change, Series
from asv_benchmarks.compare import VersionError
from asv_benchmarks.history import Found, RunError, judged
from asv_benchmarks.judge import Verdict
from asv_benchmarks.machine import git
from asv_benchmarks.sides import ROOT
from asv_benchmarks.suite import Benchmark, benchmarks

TIME = Benchmark("core.Core.time_both", ("a.dense", 64), "time")
SHARE = Benchmark("accuracy.Share.track_mean", ("a.dense",), "share")
MACHINE = Benchmark("start.Machine.time_numpy", ("exp",), "time")


def test_what_is_told_about_two_runs() -> None:
    before = {str(TIME): [1e-3, 1.1e-3], str(SHARE): [0.2]}
    words = {
        "slower": {str(TIME): [2e-3, 2.1e-3], str(SHARE): [0.2]},
        "fails": {str(TIME): [], str(SHARE): [0.2]},
        "gone": {str(SHARE): [0.2]},
        "": {**before},
    }
    for word, now in words.items():
        assert [verdict.word for verdict in judged(before, now, [TIME, SHARE])] == [word, ""]
    assert [v.word for v in judged({}, before, [TIME, SHARE, MACHINE])] == ["new", "new", "n/a"]
    assert [v.word for v in judged({str(TIME): []}, before, [TIME])] == ["works"]
    assert [v.word for v in judged(before, {**before, str(SHARE): [40.0]}, [SHARE])] == ["less exact"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """asv with its results, its pages and its file about the machine in a folder of this test."""
    pytest.importorskip("asv")
    if not git("rev-parse", "HEAD"):
        pytest.skip("no git repository")
    settings = json.loads((history.FOLDER / "asv.conf.json").read_text())
    places = {
        "repo": str(ROOT),
        "benchmark_dir": str(history.FOLDER / "benchmarks"),
        "html_dir": str(tmp_path / "html"),
    }
    (tmp_path / "asv.conf.json").write_text(json.dumps({**settings, **places}))
    monkeypatch.setattr(history, "FOLDER", tmp_path)
    monkeypatch.setattr(archive, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(archive, "RECORDED", tmp_path / "recorded")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_run_is_stored_and_compared_with_the_last_one(elsewhere: Path) -> None:
    chosen = r"Machine|track_mean\('softmax\.tiled', 'outputs', 'float32', 'numpy'\)|Causal.*delta.chunked.*'numpy'"
    told: list[str] = []
    first = history.run(chosen, told.append)
    assert first.before is None and {verdict.word for verdict in first.verdicts} == {"new", "n/a"}
    assert told[0].startswith(f"{len(benchmarks(chosen))} benchmarks; about 1 min")
    assert "  0 %  accuracy.Share.track_mean: 1" in told
    named = r"accuracy\.Share\.track_mean\(softmax\.tiled, outputs, float32, numpy\)"
    assert any(re.fullmatch(rf" *{named}  0\.\d+", line) for line in told), told
    assert any(re.search(r"Machine\.time_numpy\(exp\)  [\d.]+\S*s$", line) for line in told)
    (stored,) = archive.files()
    assert stored.parent.parent == elsewhere / "results"
    # asv stores nothing but what ran; a benchmark that ran and is not available here is n/a
    values = archive.samples(archive.results(stored))
    assert {name.partition("(")[0] for name in values} == {"start.Machine.time_numpy", "accuracy.Share.track_mean"}
    assert all(len(many) > 1 for name, many in values.items() if "Machine" in name)
    second = history.run(chosen, told.append)
    assert (second.before, len(second.verdicts)) == (first.after, len(benchmarks(chosen)))
    assert {v.word for v in second.verdicts if v.benchmark.kind == "share"} == {""}
    # What did not run now still counts as the last that is known of it; another interpreter's results do not.
    history.run("Machine.*exp", told.append)
    third = history.run(chosen, told.append)
    assert {v.word for v in third.verdicts if v.benchmark.kind == "share"} == {""}
    assert {environment[0] for environment in archive.last()} == {stored.parent.name}
    newest, every = history.publish(told.append)
    assert every == elsewhere / "html" / "index.html" and every.is_file()
    assert "Machine" not in newest.read_text() and "accuracy.Share.track_mean" in newest.read_text()


def test_files_that_are_not_committed_have_a_commit_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git")
    monkeypatch.setattr("asv_benchmarks.machine.ROOT", tmp_path)
    with pytest.raises(RunError, match="there is no git repository"):
        history.version()
    git("init", "--quiet")
    for name, value in (("user.name", "n"), ("user.email", "e")):
        git("config", name, value)
    for part in history.MEASURED:
        (tmp_path / part).mkdir()
        (tmp_path / part / "file").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "-m", "m")
    head = git("rev-parse", "HEAD")
    (tmp_path / "page.md").write_text("what no benchmark depends on")
    assert head and history.version() == head
    (tmp_path / "refattn" / "file").write_text("2")
    (tmp_path / "backends" / "new").write_text("3")
    changed = history.version()
    assert git("show", f"{changed}:refattn/file") == "2" and git("show", f"{changed}:backends/new") == "3"
    assert git("rev-parse", f"{changed}^") == head == git("rev-parse", "HEAD")
    assert "?? backends/new" in git("status", "--porcelain").splitlines(), "git's own index stays as it is"


@pytest.mark.slow
def test_an_interrupted_run_keeps_and_tells_what_came_before(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, run = "Machine|Share.*track_mean.*softmax.tiled.*outputs.*float32.*numpy", history.asv
    monkeypatch.setattr(history, "version", lambda: git("rev-parse", "HEAD"))
    history.run(chosen, lambda line: None, quick=True)

    def stopped(arguments: list[str], *rest: Any, **how: Any) -> None:
        if "(?=start" in arguments[-1]:
            raise KeyboardInterrupt
        run(arguments, *rest, **how)

    monkeypatch.setattr(history, "asv", stopped)
    monkeypatch.setattr(history, "steps", lambda pattern: {})
    done = CliRunner().invoke(command.cli, ["run", "--bench", chosen])
    assert done.exit_code == 130 and "interrupted" in done.output, done.output
    assert "1 benchmarks: 1 without a difference" in done.output
    with pytest.raises(KeyboardInterrupt):
        history.run("Machine", lambda line: None)


@pytest.mark.parametrize(
    ("found", "text", "code"),
    [
        (Found(None, "abc"), "stored as abc; there were no earlier results", 0),
        (Found("abc", "def", [Verdict(SHARE, "less exact", 0.2, 9.0, (45.0,) * 3)]), "less exact", 0),
        (Found("abc", "def", [Verdict(TIME, "fails", detail="why")], moved="the machine"), "the machine", 1),
    ],
)
def test_the_command(monkeypatch: pytest.MonkeyPatch, found: Found, text: str, code: int) -> None:
    series = {last: Series(TIME, ("012", last), (1.0, 2.0)) for last in ("345", "def012")}
    stored = {series[last]: [Change(TIME, "012", last, 2.0)] for last in series}
    monkeypatch.setattr(history, "steps", lambda pattern: {("m", "p.json"): stored})
    monkeypatch.setattr(history, "run", lambda pattern, tell, quick: found)
    done = CliRunner().invoke(command.cli, ["run"])
    assert done.exit_code == code and text in done.output, done.output
    marked = "since earlier runs, m, p: 1 steps in 1 series" in done.output and "▁|█" in done.output
    assert marked == (found.after == "def"), "only series that the run is the end of"


# --- what comes with the repository

RECORDED = sorted(archive.RECORDED.glob("*/*-*.json"))


def test_results_of_several_commits_come_with_the_repository() -> None:
    pytest.importorskip("asv")
    assert len(RECORDED) >= 5 and len({file.parent for file in RECORDED}) == 1
    assert json.loads((RECORDED[0].parent / "machine.json").read_text())["machine"] == RECORDED[0].parent.name
    found = [archive.samples(archive.results(file)) for file in RECORDED]
    common = set.intersection(*map(set, found))
    assert {name.partition(".")[0] for name in common} >= {"accuracy", "core", "language", "memory", "peak", "stream"}
    assert all(values and min(values) > 0.0 for one in found for name, values in one.items() if "accuracy" not in name)
    newest = max(RECORDED, key=lambda file: json.loads(file.read_text())["date"])
    commit = json.loads(newest.read_text())["commit_hash"]
    for name in ra.list_mechanisms():
        if git(
            "cat-file", "-t", f"{commit}:refattn/mechanisms/{name}"
        ):  # otherwise it is younger than what is recorded
            assert any(f"'{name}'" in key for key in archive.samples(archive.results(newest))), name
    assert any("'softmax'" in key for key in archive.samples(archive.results(newest)))


@pytest.mark.slow
def test_a_commit_is_recorded_twice_and_keeps_both(elsewhere: Path) -> None:
    for chosen in ("Machine.*exp", "Machine.*product"):
        (file,) = history.record(["HEAD"], chosen, "a-machine", lambda line: None, rounds=2)
    assert file.parent == elsewhere / "recorded" / "a-machine"
    assert {name.partition("(")[2] for name in archive.samples(archive.results(file))} == {"'exp')", "'product')"}
    assert str(elsewhere) not in file.read_text()
    with pytest.raises(VersionError, match="got 'nothing', needs a commit"):
        history.record(["nothing"], "Machine", "a-machine", lambda line: None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["compare", "--markdown", "/nowhere/table.md"], "got '/nowhere/table.md', needs a file that can be written"),
        (["compare", "--markdown", "/"], "got '/', needs a file that can be written"),
        (["changes", "--least", "nan"], "got nan, needs a finite number"),
    ],
)
def test_what_a_command_cannot_use_is_told_before_it_measures(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(command.cli, arguments)
    assert done.exit_code == 2 and text in done.output, done.output


def test_a_machine_that_is_slower_makes_nothing_slower() -> None:
    before = {str(TIME): [1e-3], str(MACHINE): [1e-3]}
    now = {str(TIME): [1.5e-3], str(MACHINE): [1.5e-3]}
    assert [verdict.word for verdict in judged(before, now, [TIME, MACHINE])] == ["", "slower"]
    assert [verdict.word for verdict in judged(before, {**now, str(MACHINE): [1e-3]}, [TIME])] == ["slower"]


def test_tables_of_asv_become_lines_of_numbers() -> None:
    told: list[str] = []
    rows = history.Rows("start.Machine.time_numpy", told.append)
    for line in """\
· Discovering benchmarks
[50.00%] ··· Running (start.Machine.time_numpy--).
[ 75.00%] ··· ...ne.time_numpy   1/3 failed
[ 75.00%] ··· ========= ==========
                what
             --------- ----------
              product   786±40μs
                exp       n/a
             ========= ==========
""".splitlines():
        rows.read(line)
    name = "start.Machine.time_numpy"
    assert told == [f"  {name}: 1/3 failed", f"  {name}(product)  786±40μs"]


def test_of_several_rounds_times_and_rates_are_those_of_the_best() -> None:
    known = [Benchmark("time", ("a",), "time"), Benchmark("rate", ("a",), "rate"), Benchmark("held", ("a",), "work")]
    columns = ["result", "params", "version", "stats_q_25", "samples"]
    nan = math.nan

    def results(time: Any, rate: Any, held: Any) -> dict[str, Any]:
        found = {
            "time": [time, [["a", "b", "c", "d"]], "1", [10.0 * x if x else x for x in time], [[x] for x in time]],
            "rate": [rate, [["a"]], "1"],
            "held": [held, [["a"]], "1"],
        }
        return {"result_columns": columns, "results": found}

    best = history.best_of(
        results([1.0, 4.0, nan, 5.0], [7.0], [1.0]), results([2.0, 3.0, 6.0, None], [5.0], [2.0]), known
    )["results"]
    assert best["time"][0] == [1.0, 3.0, 6.0, 5.0]
    assert best["time"][3] == [10.0, 30.0, 60.0, 50.0] and best["time"][4] == [[1.0], [3.0], [6.0], [5.0]]
    assert best["rate"][0] == [7.0]
    assert best["held"][0] == [2.0]  # what is counted is that of the last round
