"""Two versions side by side: what is checked out, what runs where, and a planted loss of accuracy that is found."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asv_benchmarks import __main__ as command
from asv_benchmarks import compare as versions
from asv_benchmarks import counts, touched
from asv_benchmarks.compare import WORKING_TREE, VersionError, check_out, compare, known, listed, measure
from asv_benchmarks.judge import Verdict
from asv_benchmarks.machine import git
from asv_benchmarks.sides import ROOT
from asv_benchmarks.suite import Benchmark, benchmarks
from refattn.interrupts import Interrupted

SHARES = r"accuracy.*track_mean\('softmax\.\w+', 'outputs', 'float32', 'numpy'\)"
EXPONENTIAL = "exponentials = xp.exp(masked"
ROUNDED = "exponentials = xp.astype(xp.exp(xp.astype(masked, xp.float16)), masked.dtype); xp.exp(masked"

needs_git = pytest.mark.skipif(not git("rev-parse", "HEAD"), reason="no git repository")


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> versions.Homes:
    """The files as they are, and the same with the exponentials of the tiled implementation in float16."""
    folder = tmp_path_factory.mktemp("versions")
    base, head = check_out(WORKING_TREE, folder / "base"), check_out(WORKING_TREE, folder / "head")
    tiled = head / "refattn" / "mechanisms" / "softmax" / "implementations" / "tiled.py"
    text = tiled.read_text()
    assert EXPONENTIAL in text
    tiled.write_text(text.replace(EXPONENTIAL, ROUNDED))
    return base, head


@pytest.mark.slow
def test_a_loss_of_accuracy_is_found_where_it_is(homes: versions.Homes) -> None:
    seen: list[Benchmark] = []

    def progress(benchmarks: list[Benchmark]) -> Iterator[Benchmark]:
        seen.extend(benchmarks)
        yield from benchmarks

    asked = {one: word for one, word in known(homes).items() if re.search(SHARES, str(one))}
    verdicts = {verdict.benchmark.params[0]: verdict for verdict in compare(homes, asked, progress)}
    assert len(seen) == 2
    assert {implementation: verdict.word for implementation, verdict in verdicts.items()} == {
        "softmax.dense": "",
        "softmax.tiled": "less exact",
    }
    tiled = verdicts["softmax.tiled"]
    assert tiled.ratio and tiled.ratio[1] > 100.0


@pytest.mark.slow
def test_what_does_not_exist_in_both_is_told(homes: versions.Homes, tmp_path: Path) -> None:
    newer = check_out(WORKING_TREE, tmp_path / "newer")
    core = newer / "refattn" / "mechanisms" / "softmax" / "core.py"
    core.write_text(
        core.read_text().replace(
            'IMPLEMENTATIONS = {"dense": dense, ', 'IMPLEMENTATIONS = {"dense": dense, "third": dense, '
        )
    )
    for pair, word in (((homes[0], newer), "new"), ((newer, homes[0]), "gone")):
        asked = {one: told for one, told in known(pair).items() if one.params[0] == "softmax.third"}
        assert asked and set(asked.values()) == {word}
        assert [verdict.word for verdict in compare(pair, asked, iter)] == [word] * len(asked)


@pytest.mark.slow
def test_what_fails_is_told_with_its_error(homes: versions.Homes, tmp_path: Path) -> None:
    broken = check_out(WORKING_TREE, tmp_path / "broken")
    core = broken / "refattn" / "mechanisms" / "softmax" / "core.py"
    core.write_text(core.read_text() + "\n\ndef backward(saved, d_out, d_lse=None):\n    raise OSError('no more')\n")
    both = Benchmark("core.Core.time_both", ("softmax.dense", 64, 16, "float32", "numpy"), "time")
    found = [measure(both, pair, 1) for pair in ((homes[0], broken), (broken, homes[0]), (broken, broken))]
    assert [verdict.word for verdict in found] == ["fails", "works", "fails"]
    assert found[0].detail == "head: OSError: no more"


@pytest.mark.slow
def test_times_and_memory_are_measured(homes: versions.Homes) -> None:
    small = Benchmark("core.Core.time_forward", ("softmax.dense", 64, 16, "float32", "numpy"), "time")
    verdict = measure(small, (homes[0], homes[0]), 1)
    assert verdict.base and verdict.head and verdict.ratio
    memory = Benchmark("memory.Core.peakmem_forward", ("softmax.dense", 512, "float32", "numpy"), "memory")
    verdict = measure(memory, (homes[0], homes[0]), 1)
    if verdict.word != "n/a":  # a system that does not tell
        scores = 2 * 512 * 512 * 4
        assert verdict.base and scores < verdict.base < 8 * scores and verdict.word == ""


@needs_git
def test_a_commit_is_checked_out_with_the_benchmarks_of_now(tmp_path: Path) -> None:
    home = check_out("HEAD", tmp_path / "head")
    shown = subprocess.run(["git", "show", "HEAD:refattn/xp.py"], cwd=ROOT, capture_output=True, check=True).stdout
    assert (home / "refattn" / "xp.py").read_bytes() == shown
    assert (home / "backends" / "numpy.py").is_file()
    assert (home / "refattn" / "backends").resolve() == (home / "backends").resolve()
    now = {path.name: path.read_bytes() for path in (ROOT / "asv_benchmarks" / "benchmarks").glob("*.py")}
    assert {p.name: p.read_bytes() for p in (home / "asv_benchmarks" / "benchmarks").glob("*.py")} == now
    assert not (home / "asv_benchmarks" / "results").exists() and not (home / "version.tar").exists()
    assert len(listed(home, SHARES)) == 2


def test_a_version_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(VersionError, match=r"version: got 'no-such-thing', needs a commit, or \. for the files"):
        check_out("no-such-thing", tmp_path / "x")


# --- the command

TIME = Benchmark("core.Core.time_both", ("softmax.dense", 64), "time")


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "why_not", lambda: "instructions are not counted: there is no tool")
    monkeypatch.setattr(versions, "check_out", lambda version, folder: folder)
    monkeypatch.setattr(versions, "known", lambda homes: dict.fromkeys(benchmarks(), ""))


def measuring(monkeypatch: pytest.MonkeyPatch, *verdicts: Verdict | type[BaseException]) -> list[Any]:
    """Let comparisons have these verdicts, or end with this error; return what is asked of them."""
    asked: list[Any] = []

    def fake(homes: versions.Homes, chosen: dict[Benchmark, str], progress: Any) -> Iterator[Verdict]:
        asked.append((homes[0].name, homes[1].name, list(chosen)))
        for one in verdicts:
            if not isinstance(one, Verdict):
                raise one
            yield one

    monkeypatch.setattr(versions, "compare", fake)
    return asked


@pytest.mark.parametrize(("word", "code"), [("slower", 1), ("less exact", 1), ("faster", 0), ("", 0), ("fails", 1)])
def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, word: str, code: int) -> None:
    asked = measuring(monkeypatch, Verdict(TIME, word, 1e-3, 2e-3, (1.9, 2.0, 2.1)))
    done = CliRunner().invoke(command.cli, ["compare", ".", ".", "--all", "--bench", "Core"])
    assert done.exit_code == code, done.output
    assert asked == [("base", "head", benchmarks("Core"))]
    if word:
        assert word in done.output and "2 [1.9, 2.1]" in done.output and "2 ms" in done.output
    else:
        assert "no difference" in done.output


def test_options_of_what_runs_are_all_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measuring(monkeypatch)
    name = "core.Core.time_both('softmax.dense', 64, 64, 'float32', 'numpy')"
    for words in (["--quick", "--bench", "softmax"], ["--bench", name], ["--profile", "full", "--bench", "Train"]):
        done = CliRunner().invoke(command.cli, ["compare", ".", ".", "--all", *words])
        assert done.exit_code == 0, done.output
    quick, one, full = (chosen for _, _, chosen in asked)
    assert quick and set(quick) == set(benchmarks(versions.QUICK)) & set(benchmarks("softmax"))
    assert [str(benchmark) for benchmark in one] == [name]
    assert set(full) == set(benchmarks("Train"))
    done = CliRunner().invoke(command.cli, ["compare", ".", ".", "--all", "--quick", "--bench", "Decode"])
    assert done.exit_code == 2 and "no benchmark matches together" in done.output


def test_what_imports_nothing_that_differs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measuring(monkeypatch)
    monkeypatch.setattr(touched, "touched", lambda homes, chosen: {})
    done = CliRunner().invoke(command.cli, ["compare", ".", "."])
    assert done.exit_code == 0 and "nothing is measured" in done.output and asked[0][2] == []
    monkeypatch.setattr(touched, "touched", lambda homes, chosen: {benchmarks("koopman")[0]: {"refattn.x"}})
    done = CliRunner().invoke(command.cli, ["compare", ".", ".", "--profile", "full"])
    assert asked[1][2] == benchmarks("koopman")[:1] and "measured: koopman" in done.output


COUNT = Benchmark("core.Core.time_forward", ("koopman.shared", 64), "instructions", 1.005)
HELD = Benchmark("work.Work.track_held", ("koopman.shared", 64), "work")
SHARE = Benchmark("accuracy.Share.track_largest", ("delta.chunked", "outputs"), "share")
FOUND = (
    Verdict(TIME, "faster", 2e-3, 1e-3, (0.5,) * 3),
    Verdict(COUNT, "more instructions", 1e6, 1.0123e6, (1.0123,) * 3),
    Verdict(HELD, "", 100.0, 100.0, (1.0,) * 3),
    Verdict(SHARE, "", 0.5, 0.5, (1.0,) * 3),
)


def test_what_a_change_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the terminal, in Markdown and as numbers: the mechanisms in which something differs, the others in a line."""
    measuring(monkeypatch, *FOUND)
    words = ["--markdown", str(tmp_path / "t.md"), "--json", str(tmp_path / "t.json")]
    done = CliRunner().invoke(command.cli, ["compare", ".", ".", "--all", *words])
    assert done.exit_code == 1, done.output
    rows = [line.split() for line in done.output.splitlines()]
    assert ["koopman", "+1.2", "%", "="] in rows and ["softmax", "-50", "%"] in rows
    assert "unchanged: delta" in done.output.splitlines()
    lines = (tmp_path / "t.md").read_text().splitlines()
    assert lines[:6] == [
        "**. -> .**",
        "",
        "|  | forward | bytes held | share of the error | clock |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| softmax |  |  |  | -50 % |",
        "| koopman | **+1.2 %** | = |  |  |",
    ]
    named = "`core.Core.time_both('softmax.dense', 64)`"
    assert f"| faster | {named} | 2 ms | 1 ms | 0.500 |" in lines
    assert lines[-1] == "4 benchmarks: 1 faster, 1 more instructions, 2 without a difference"
    numbers = json.loads((tmp_path / "t.json").read_text())["benchmarks"]
    assert [(one["word"], one["head"]) for one in numbers] == [(one.word, one.head) for one in FOUND]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt, 130, "interrupted"), (Interrupted(signal.SIGTERM), 143, "terminated")],
)
def test_what_was_found_before_an_interrupt_is_told(
    error: Any, code: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measuring(monkeypatch, *FOUND[:2], error)
    done = CliRunner().invoke(command.cli, ["compare", ".", ".", "--all", "--markdown", str(tmp_path / "t.md")])
    assert done.exit_code == code and said in done.output
    assert "2 benchmarks: 1 faster, 1 more instructions" in done.output
    assert (tmp_path / "t.md").read_text().startswith("**. -> ., not to its end**\n")


def test_without_a_terminal_each_benchmark_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(command._lines(["a", "b"])) == ["a", "b"]
    assert capsys.readouterr().err == "1 of 2, 0.0 min left: a\n2 of 2, 0.0 min left: b\n"


def test_a_rate_is_asked_of_both_in_turn(monkeypatch: pytest.MonkeyPatch, homes: versions.Homes) -> None:
    asked: list[str] = []

    class Fake:
        def __init__(self, env: Any, home: Path) -> None:
            self.home = home

        def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
            if do == "make":
                return {"clock": "cpu", "refattn": str(self.home / "refattn")}
            asked.append(self.home.name)
            return {"value": 100.0 if self.home == homes[0] else 85.0}

        def close(self) -> None:
            pass

    monkeypatch.setattr(versions, "Worker", Fake)
    rate = Benchmark("language.Train.track_tokens", ("softmax", "numpy"), "rate")
    assert measure(rate, homes, 1).word == "lower rate"
    assert asked == ["base", "head", "head", "base"] * 2


def test_what_looks_like_an_option_is_no_version(tmp_path: Path) -> None:
    with pytest.raises(VersionError, match="got '--output=.*', needs a commit"):
        check_out(f"--output={tmp_path / 'file'}", tmp_path / "folder")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--bench", "("], "Invalid value for '--bench': got '(', needs a regular expression"),
        (["--bench", "nonesuch"], "got 'nonesuch', needs to match a benchmark"),
        (["--markdown", "/nowhere/table.md"], "got '/nowhere/table.md', needs a file that can be written"),
        (["--json", "/"], "got '/', needs a file that can be written"),
    ],
)
def test_what_the_command_cannot_use_is_told_before_it_measures(words: list[str], text: str) -> None:
    done = CliRunner().invoke(command.cli, ["compare", "HEAD", *words])
    assert done.exit_code == 2 and text in done.output, done.output
    if example := done.output.partition("as '")[2].partition("' does")[0]:
        assert str(benchmarks(example)[0]) == str(benchmarks()[0]), "the example works"
