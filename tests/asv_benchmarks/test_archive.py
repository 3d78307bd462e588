"""Stored results are read as asv wrote them; one that is damaged is named, in a line, whichever command meets it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("asv")

from asv_benchmarks import __main__ as command
from asv_benchmarks import archive, history
from asv_benchmarks.archive import ArchiveError, results, samples, series
from asv_benchmarks.suite import Benchmark, benchmarks, version

NAME = "start.Machine.time_numpy"
EXP, PRODUCT = (Benchmark(NAME, (what,), "time") for what in ("exp", "product"))
HASHES = [letter * 40 for letter in "abc"]


def stored(commit: str, date: int, values: list[float | None] | None, **more: Any) -> dict[str, Any]:
    """Return results of one benchmark, as asv writes them."""
    about = {"machine": "m", "ram": "1 GiB", "python": "3.11"}
    row = [values, [["'exp'", "'product'"]], "1", 1, 2.0]
    found = {"commit_hash": commit, "env_name": "python3.11", "date": date, "params": about, "python": "3.11"}
    found |= {"requirements": {}, "env_vars": {}, "durations": {}, "version": 2}
    columns = ["result", "params", "version", "started_at", "duration"]
    return found | {"result_columns": columns, "results": {NAME: row}} | more


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history of three commits, the only one that there is."""
    monkeypatch.setattr(archive, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(archive, "RESULTS", tmp_path / "results")
    folder = tmp_path / "recorded" / "m"
    folder.mkdir(parents=True)
    (folder / "machine.json").write_text(json.dumps({"machine": "m", "ram": "1 GiB", "version": 1}))
    numbers: list[list[float | None] | None] = [[1.0, 2.0], None, [4.0, None]]
    for n, (commit, values) in enumerate(zip(HASHES, numbers, strict=True)):
        text = json.dumps(stored(commit, 9 - n, values))
        (folder / f"{commit[:8]}-python3.11.json").write_text(text)
    return folder


def test_series_are_those_of_the_commits_by_date_that_have_a_number(place: Path) -> None:
    ((where, found),) = series([EXP, PRODUCT]).items()
    assert where == ("m", "python3.11.json")
    assert [(one.commits, one.values) for one in found] == [
        ((HASHES[2], HASHES[0]), (4.0, 1.0)),
        ((HASHES[0],), (2.0,)),
    ]


def test_what_failed_is_told_from_what_is_not_available(place: Path) -> None:
    file = place / "cccccccc-python3.11.json"
    assert samples(results(file), [EXP, PRODUCT]) == {str(EXP): [4.0], str(PRODUCT): []}
    for nothing in (float("nan"), float("inf")):
        file.write_text(json.dumps(stored(HASHES[2], 1, [4.0, nothing])))
        assert samples(results(file), [EXP, PRODUCT]) == {str(EXP): [4.0]}
    assert samples(results(file), [Benchmark(NAME, ("other",), "time"), Benchmark(NAME, (), "time")]) == {}


def test_numbers_of_another_version_of_a_benchmark_are_not_compared(place: Path) -> None:
    file = place / "cccccccc-python3.11.json"
    row = [[4.0, 5.0], [["'exp'", "'product'"]], "another", 1, 2.0]
    file.write_text(json.dumps(stored(HASHES[2], 1, None, results={NAME: row})))
    assert version(NAME) != "another" and samples(results(file), [EXP]) == {}
    row[2] = version(NAME)
    file.write_text(json.dumps(stored(HASHES[2], 1, None, results={NAME: row})))
    assert samples(results(file), [EXP]) == {str(EXP): [4.0]}


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut off": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "an older format": lambda text: json.dumps(json.loads(text) | {"version": 1}),
    "rows that are no rows": lambda text: json.dumps(json.loads(text) | {"results": {NAME: 3}}),
    "text for numbers": lambda text: json.dumps(json.loads(text) | {"results": {NAME: [["a"], [["'exp'"]], "1"]}}),
    "no date of the commit": lambda text: json.dumps(json.loads(text) | {"date": None}),
    "an unknown column": lambda text: json.dumps(json.loads(text) | {"result_columns": ["what"]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_nothing_else_is_said(place: Path, damage: str) -> None:
    file = place / "bbbbbbbb-python3.11.json"
    file.write_text(DAMAGES[damage](file.read_text()))
    with pytest.raises(ArchiveError, match=r"results: got .*bbbbbbbb-python3.11.json, which is no file of results \("):
        results(file)
    for arguments in (["changes"], ["changes", "--bench", "Machine"], ["publish"]):
        done = CliRunner().invoke(command.cli, arguments)
        assert done.exit_code == 2 and isinstance(done.exception, SystemExit), (arguments, done.exception)
        assert done.output.startswith(f"Error: results: got {file}, ") and "git restore" in done.output, done.output
    with pytest.raises(ArchiveError, match="bbbbbbbb"):
        history.expected([EXP])


def test_without_asv_it_is_said_how_to_get_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asv.results", None)
    done = CliRunner().invoke(command.cli, ["changes"])
    assert done.exit_code == 2 and "which is missing" in done.output and 'pip install -e ".[bench]"' in done.output


def test_where_nothing_is_stored(place: Path) -> None:
    for emptied in (place, place.parent):
        shutil.rmtree(emptied)
        for arguments in (["changes"], ["publish"]):
            done = CliRunner().invoke(command.cli, arguments)
            assert (done.exit_code, done.output) == (2, "Error: there are no results yet: make bench\n")


@pytest.mark.parametrize(
    "arguments", [["run"], ["changes"], ["compare", "HEAD"], ["record", "HEAD", "--machine", "m"]], ids=lambda x: x[0]
)
def test_an_expression_that_is_none_or_matches_nothing_is_told_at_once(arguments: list[str]) -> None:
    done = CliRunner().invoke(command.cli, [*arguments, "--bench", "("])
    assert done.exit_code == 2 and "Invalid value for '--bench': got '(', needs a regular expression" in done.output
    done = CliRunner().invoke(command.cli, [*arguments, "--bench", "nonesuch"])
    assert done.exit_code == 2 and "got 'nonesuch', needs to match a benchmark" in done.output
    example = done.output.partition("as '")[2].partition("' does")[0]
    assert str(benchmarks(example)[0]) == str(benchmarks()[0]), "what it tells to write works"


def test_parents_stand_before_their_children_whatever_their_dates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child whose author is older than its parent's, and one that git does not know, by its date."""
    parent, child, gone = HASHES

    def git(*arguments: str) -> str:
        if arguments[0] == "rev-parse":
            return "" if gone in arguments[-1] else arguments[-1].partition("^")[0]
        assert set(arguments[3:]) <= {parent, child}
        return "\n".join(["0" * 40, parent, child])

    monkeypatch.setattr(archive, "git", git)
    assert archive.ordered({child: 1.0, parent: 5.0, gone: 9.0}) == [parent, child, gone]
    assert archive.ordered({child: 1.0, parent: 5.0, gone: 0.5}) == [gone, parent, child]
    assert archive.ordered({child: 8.0, parent: 5.0, gone: 6.0}) == [parent, gone, child]
    assert archive.ordered({gone: 6.0}) == [gone]


def test_what_fails_in_the_newest_commit_is_told(place: Path) -> None:
    file = place / f"{HASHES[0][:8]}-python3.11.json"
    file.write_text(json.dumps(stored(HASHES[0], 9, [None, 2.0])))
    ((_, found),) = series([EXP, PRODUCT]).items()
    assert [(one.values, one.fails) for one in found] == [((4.0,), HASHES[0]), ((2.0,), "")]
    done = CliRunner().invoke(command.cli, ["changes"])
    assert done.exit_code == 1 and f"fails at {HASHES[0][:8]}: {EXP}" in done.output
