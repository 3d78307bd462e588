"""Results over time: asv runs and stores, the last results are found and compared, pages are made."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import refattn as ra
from asv_benchmarks import __main__ as command
from asv_benchmarks import history
from asv_benchmarks.compare import VersionError
from asv_benchmarks.history import Found, RunError, judged, moved
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


def test_a_machine_that_changed_is_told() -> None:
    slower = Verdict(MACHINE, "slower", 1e-3, 1.5e-3, (1.5, 1.5, 1.5))
    assert moved([slower, Verdict(TIME, "slower", 1e-3, 2e-3, (2.0, 2.0, 2.0))]) == (
        "the machine itself took another time than before (exp 1.50)"
    )
    assert moved([Verdict(MACHINE, "", 1e-3, 1e-3, (1.0, 1.0, 1.0))]) == ""


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
    monkeypatch.setattr(history, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(history, "RECORDED", tmp_path / "recorded")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_run_is_stored_and_compared_with_the_last_one(elsewhere: Path) -> None:
    chosen = r"Machine|track_mean\('softmax\.tiled', 'outputs', 'float32', 'numpy'\)|track_peak.*softmax.*'numpy'"
    told: list[str] = []
    first = history.run(chosen, told.append)
    assert first.before is None and {verdict.word for verdict in first.verdicts} == {"new", "n/a"}
    assert any("track_mean" in line and line.endswith("ok") for line in told) and not any(
        "===" in line for line in told
    )
    (stored,) = history.files()
    assert stored.parent.parent == elsewhere / "results"
    # asv stores nothing but what ran; a benchmark that ran and is not available here is n/a
    values = history.samples(stored)
    assert {name.partition("(")[0] for name in values} == {"start.Machine.time_numpy", "accuracy.Share.track_mean"}
    assert all(len(many) > 1 for name, many in values.items() if "Machine" in name)
    second = history.run(chosen, told.append)
    assert (second.before, len(second.verdicts)) == (first.after, len(benchmarks(chosen)))
    assert {v.word for v in second.verdicts if v.benchmark.kind == "share"} == {""}
    # What did not run now still counts as the last that is known of it; another interpreter's results do not.
    history.run("Machine.*exp", told.append)
    third = history.run(chosen, told.append)
    assert {v.word for v in third.verdicts if v.benchmark.kind == "share"} == {""}
    assert {environment[0] for environment in history.last()} == {stored.parent.name}
    page = history.publish(told.append)
    assert page == ROOT / "docs" / "_build" / "benchmarks" / "index.html"
    assert (elsewhere / "html" / "index.html").is_file()


def test_a_failure_of_asv_is_told(elsewhere: Path) -> None:
    with pytest.raises(RunError, match="asv failed:\n(.*\n)*.*No benchmarks selected"):
        history.run("no such benchmark", lambda line: None)
    with pytest.raises(RunError, match="there are no results yet: make bench"):
        history.publish(lambda line: None)


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
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "-m", "m")
    head = git("rev-parse", "HEAD")
    assert head and history.version() == head
    (tmp_path / "file").write_text("2")
    changed = history.version()
    assert changed != head and git("show", f"{changed}:file") == "2"
    assert (tmp_path / "file").read_text() == "2" and git("stash", "list") == ""


@pytest.mark.parametrize(
    ("found", "text", "code"),
    [
        (Found(None, "abc"), "stored as abc; there were no earlier results", 0),
        (Found("abc", "def", [Verdict(SHARE, "less exact", 0.2, 9.0, (45.0,) * 3)]), "less exact", 0),
        (Found("abc", "def", [Verdict(TIME, "fails", detail="why")], moved="the machine"), "the machine", 1),
    ],
)
def test_the_command(monkeypatch: pytest.MonkeyPatch, found: Found, text: str, code: int) -> None:
    monkeypatch.setattr(history, "run", lambda pattern, tell: found)
    done = CliRunner().invoke(command.cli, ["run"])
    assert done.exit_code == code and text in done.output, done.output


# --- what comes with the repository

RECORDED = sorted(history.RECORDED.glob("*/*-*.json"))


def test_results_of_several_commits_come_with_the_repository() -> None:
    pytest.importorskip("asv")
    assert len(RECORDED) >= 5 and len({file.parent for file in RECORDED}) == 1
    assert json.loads((RECORDED[0].parent / "machine.json").read_text())["machine"] == RECORDED[0].parent.name
    found = [history.samples(file) for file in RECORDED]
    common = set.intersection(*map(set, found))
    assert {name.partition(".")[0] for name in common} >= {"accuracy", "core", "language", "memory", "peak", "stream"}
    assert all(values and min(values) > 0.0 for one in found for name, values in one.items() if "accuracy" not in name)
    newest = max(RECORDED, key=lambda file: json.loads(file.read_text())["date"])
    commit = json.loads(newest.read_text())["commit_hash"]
    for name in ra.list_mechanisms():
        if git(
            "cat-file", "-t", f"{commit}:refattn/mechanisms/{name}"
        ):  # otherwise it is younger than what is recorded
            assert any(f"'{name}'" in key for key in history.samples(newest)), name
    assert any("'softmax'" in key for key in history.samples(newest))


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name)
def test_recorded_results_tell_of_no_folder_and_belong_to_a_commit(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    stored = json.loads(text)
    assert not re.search(r'"/|home|_tmp_', text)
    assert file.name == f"{stored['commit_hash'][:8]}-{stored['env_name']}.json"
    assert stored["params"]["machine"] == file.parent.name
    if git("rev-parse", "HEAD") and not git("rev-parse", "--is-shallow-repository") == "true":
        assert git("cat-file", "-t", stored["commit_hash"]) == "commit"


@pytest.mark.slow
def test_recorded_results_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("asv")
    if not git("rev-parse", "HEAD"):
        pytest.skip("no git repository")
    conf = history._conf

    def elsewhere(place: Path, results: Path, suite: Path) -> Path:
        file = conf(place, results, suite)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"html_dir": str(tmp_path / "html")}))
        return file

    monkeypatch.setattr(history, "_conf", elsewhere)
    monkeypatch.setattr(history, "RESULTS", tmp_path / "none")
    history.publish(lambda line: None)
    graphs = list((tmp_path / "html" / "graphs").rglob("core.Core.time_forward.json"))
    points = [len(json.loads(graph.read_text())) for graph in graphs]
    assert max(points) >= 5, "a curve over the commits"


@pytest.mark.slow
def test_a_commit_is_recorded_twice_and_keeps_both(elsewhere: Path) -> None:
    for chosen in ("Machine.*exp", "Machine.*product"):
        file = history.record("HEAD", chosen, "a-machine", lambda line: None)
    assert file.parent == elsewhere / "recorded" / "a-machine"
    assert {name.partition("(")[2] for name in history.samples(file)} == {"'exp')", "'product')"}
    assert str(elsewhere) not in file.read_text()
    with pytest.raises(VersionError, match="got 'nothing', needs a commit"):
        history.record("nothing", "Machine", "a-machine", lambda line: None)
