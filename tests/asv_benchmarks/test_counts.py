"""Counted instructions: what is a difference, what is told where nothing can be counted, and a planted one, counted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asv_benchmarks import __main__ as command
from asv_benchmarks import compare as versions
from asv_benchmarks import counts
from asv_benchmarks.compare import WORKING_TREE, check_out
from asv_benchmarks.suite import Benchmark, benchmarks
from refattn.mechanisms.registry import list_mechanisms

CALL = Benchmark("core.Core.time_forward", ("softmax.dense", 64, 16, "float32", "numpy"), "time")

PLANTED = """

def _planted(call):
    import functools

    @functools.wraps(call)
    def longer(*given, **options):
        for _ in range(2000):
            pass
        return call(*given, **options)

    return longer


forward = _planted(forward)
"""


@pytest.mark.parametrize(
    ("head", "word"),
    [(1e6, ""), (1.0049e6, ""), (1.0051e6, "more instructions"), (0.99e6, "fewer instructions"), (None, "gone")],
)
def test_what_differs_by_more_than_half_a_per_cent_is_a_difference(head: float | None, word: str) -> None:
    assert counts.judged(CALL, (1e6, head)).word == word


def test_an_error_is_a_verdict() -> None:
    assert counts.judged(CALL, (1e6, "OSError: no more")).word == "fails"
    assert counts.judged(CALL, ("OSError: no more", 1e6)).word == "works"
    assert counts.judged(CALL, (None, 1e6)).word == "new"
    assert counts.judged(CALL, (None, None)).word == "n/a"


def test_everything_is_counted() -> None:
    """Each implementation, block and training step that NumPy has, and nothing twice."""
    chosen = benchmarks(counts.SMALL)
    assert len(set(chosen)) == len(chosen)
    for name in ("core.Core.time_forward", "core.Core.time_backward", "block.Block.time_backward"):
        every = {one.params[0] for one in benchmarks() if one.name == name}
        assert {one.params[0] for one in chosen if one.name == name} == every
    assert any(one.name == "language.Step.time_step" for one in chosen)


def test_a_small_difference_is_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """At other addresses: it has to be there, too. A large one needs no second look."""
    chosen = [Benchmark(CALL.name, (f"softmax.{n}",), "time") for n in range(4)]
    first = {0: (1e6, 1.006e6), 1: (1e6, 1.006e6), 2: (1e6, 1.02e6), 3: (1e6, 1e6)}
    second = {0: (1e6, 1.007e6), 1: (1e6, 1.001e6)}
    asked: list[Any] = []

    def counted(homes: versions.Homes, some: list[Benchmark], moved: int = 0) -> Any:
        asked.append((some, moved))
        return iter([(second if moved else first)[chosen.index(one)] for one in some])

    monkeypatch.setattr(counts, "counted", counted)
    found = {v.benchmark.params: v.word for v in counts.compared((Path("a"), Path("b")), chosen, iter)}
    assert asked == [(chosen, 0), (chosen[:2], counts.MOVED)]
    assert [found[one.params] for one in chosen] == ["more instructions", "", "more instructions", ""]


@pytest.fixture
def nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "check_out", lambda version, folder: folder)
    monkeypatch.setattr(versions, "known", lambda homes: dict.fromkeys(benchmarks(), ""))
    monkeypatch.setattr(versions, "compare", lambda homes, asked, progress: [])


def test_without_valgrind_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, nothing_is_timed: None) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    done = CliRunner().invoke(command.cli, ["compare", ".", ".", "--all", "--bench", "Core"])
    assert done.exit_code == 0 and "apt-get install valgrind" in done.output


def test_more_instructions_are_worse(monkeypatch: pytest.MonkeyPatch, nothing_is_timed: None) -> None:
    asked: list[Any] = []

    def fake(homes: versions.Homes, chosen: list[Benchmark], progress: Any) -> Any:
        asked.extend(chosen)
        return [counts.judged(CALL, (1e6, 1.01e6))]

    monkeypatch.setattr(counts, "why_not", lambda: "")
    monkeypatch.setattr(counts, "compared", fake)
    done = CliRunner().invoke(command.cli, ["compare", ".", ".", "--all", "--bench", r"Core.*forward.*softmax\.dense"])
    assert done.exit_code == 1 and "more instructions" in done.output and "1.010" in done.output
    assert [one.params[0] for one in asked] == ["softmax.dense"]


def test_a_quick_look_counts_each_mechanism() -> None:
    quick = {str(one) for one in benchmarks(counts.SMALL) if re.search(counts.QUICK, str(one))}
    assert not any(".dense'" in one or "stream" in one for one in quick)
    for name in list_mechanisms():
        mine = {one.partition("(")[0] for one in quick if f"('{name}" in one}
        assert {"core.Core.time_forward", "core.Core.time_backward", "block.Block.time_forward"} < mine
        assert "language.Step.time_step" in mine


@pytest.mark.slow
@pytest.mark.skipif(bool(counts.why_not()), reason="nothing can be counted here")
def test_a_planted_loop_is_counted(tmp_path: Path) -> None:
    base, head = (check_out(WORKING_TREE, tmp_path / name) for name in ("base", "head"))
    core = head / "refattn" / "mechanisms" / "softmax" / "core.py"
    core.write_text(core.read_text() + PLANTED)
    chosen = [CALL, Benchmark("core.Core.time_forward", ("delta.chunked", *CALL.params[1:]), "time")]
    more, same = counts.compared((base, head), chosen, iter)
    assert (more.word, same.word, more.detail) == ("more instructions", "", "")
    assert more.base and more.head and 2000 * 5 < more.head - more.base < 2000 * 300
