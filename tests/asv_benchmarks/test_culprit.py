"""Bisecting: in a history with a merge and a commit that cannot be measured, planted differences are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from asv_benchmarks import __main__ as command
from asv_benchmarks import culprit
from asv_benchmarks.compare import VersionError
from asv_benchmarks.judge import Verdict, paired
from asv_benchmarks.machine import git
from asv_benchmarks.suite import Benchmark

TIME = Benchmark("core.Core.time_both", ("softmax.dense", 64, "numpy"), "time")
OTHER = Benchmark("core.Core.time_both", ("softmax.dense", 64, "torch"), "time")

Planted = Callable[[dict[str, float | None]], None]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Commits 0 to 7, where 3 and 4 are a branch that 5 merges."""
    folder = tmp_path_factory.mktemp("repository")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asv_benchmarks.machine.ROOT", folder)
        git("init", "--quiet", "--initial-branch=main")
        for name, value in (("user.name", "n"), ("user.email", "e"), ("commit.gpgsign", "false")):
            git("config", name, value)
        (folder / "refattn").mkdir()
        for n in range(8):
            if n == 3:
                git("checkout", "--quiet", "-b", "side", "1")
            if n == 5:
                git("checkout", "--quiet", "main")
                git("merge", "--quiet", "--no-ff", "side", "-m", "5")
            else:
                (folder / "refattn" / f"{n}").write_text(f"{n}")
                git("add", "refattn")
                git("commit", "--quiet", "-m", f"{n}")
            git("tag", f"{n}")
        yield folder


@pytest.fixture
def planted(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """Gives each of the commits a time."""

    def plant(times: dict[str, float | None]) -> None:
        def check_out(version: str, folder: Path) -> Path:
            return Path(git("rev-parse", f"{version}^{{commit}}"))

        def measure(benchmark: Benchmark, homes: tuple[Path, Path], starts: int) -> Verdict:
            base, head = (times[git("log", "-1", "--format=%s", str(home))] for home in homes)
            if head is None or base is None:
                return Verdict(benchmark, "fails", detail="head: no")
            return paired(benchmark, [([base] * 4, [head] * 4)])

        monkeypatch.setattr(culprit, "check_out", check_out)
        monkeypatch.setattr(culprit, "measure", measure)
        monkeypatch.setattr(culprit, "listed", lambda home, pattern: [TIME, OTHER])

    return plant


def subjects(commits: list[str]) -> list[str]:
    return [git("log", "-1", "--format=%s", commit) for commit in commits]


@pytest.mark.parametrize("guilty", ["2", "4", "6", "7"])
def test_the_commit_is_found(planted: Planted, tmp_path: Path, guilty: str) -> None:
    after = {"2": "2567", "4": "4567", "6": "67", "7": "7"}[guilty]
    planted({str(n): 1.2e-3 if str(n) in after else 1e-3 for n in range(8)})
    told: list[str] = []
    found = culprit.search("0", "7", "Core", tmp_path, told.append)
    assert subjects(found.commits) == [guilty]
    assert found.step and found.step.word == "slower" and len(told) <= 5, told


def test_what_cannot_be_measured_stays_in_doubt(planted: Planted, tmp_path: Path) -> None:
    planted({**{str(n): 1e-3 for n in range(6)}, "6": None, "7": 0.5e-3})
    found = culprit.search("0", "7", str(TIME), tmp_path, lambda line: None)
    assert subjects(found.commits) == ["7", "6"] and found.step is None
    assert "skipped" in {word for _, word in found.looks}


def test_a_small_exact_difference_is_enough_and_noise_is_not(planted: Planted, tmp_path: Path) -> None:
    planted({str(n): 1e-3 + 1e-6 * (n == 7) for n in range(8)})
    with pytest.raises(VersionError, match=r"no difference between 0 and 7 \(1.001"):
        culprit.search("0", "7", "Core", tmp_path, lambda line: None)
    share = Benchmark("accuracy.Share.track_mean", ("a.dense",), "share")
    assert culprit._differs(paired(share, [([0.3], [0.3001])]))


def test_the_command(planted: Planted) -> None:
    planted({str(n): 2e-3 if n == 7 else 1e-3 for n in range(8)})
    done = CliRunner().invoke(command.cli, ["bisect", "0", "7", "Core"])
    assert done.exit_code == 0, done.output
    assert "first with the difference" in done.output and done.output.count("slower") >= 1
    assert CliRunner().invoke(command.cli, ["bisect", "0", "7", "nothing"]).exit_code == 2
