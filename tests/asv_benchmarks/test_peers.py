"""Comparisons: what is timed, told and written; sides that raise, die or differ. No test depends on real time."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from asv_benchmarks import comparison as declarations
from asv_benchmarks import peers, report
from asv_benchmarks.comparison import Comparison, Side
from asv_benchmarks.measured import Result, ratio
from asv_benchmarks.sides import ROOT, THREADS, Plan, SideError, Worker, alternate, closing, held_to
from refattn import backends

ENV = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
PLAN = Plan(rounds=4, round_seconds=0.012, warm_seconds=0.004)


def side(label: str, function: str, ours: bool = False, **extra: Any) -> Side:
    return Side(label, f"fakes:{function}", ours=ours, env=ENV, **extra)


def comparing(*sides: Side, **extra: Any) -> Comparison:
    settings = {"grid": ({},), "threads": (1,), "plan": PLAN, **extra}
    return Comparison("fake", "Fakes", "Two fakes.", sides, **settings)


@pytest.fixture
def worker() -> Any:
    with closing(workers := {"": Worker(ENV)}):
        yield workers[""]


# --- a side


def test_a_round_is_timed_by_both_clocks(worker: Worker) -> None:
    worker.ask("make", target="fakes:clocked", params={"milliseconds": 3.0})
    assert worker.ask("warm", seconds=0.02)["wall"] == pytest.approx(3e-3)
    assert worker.ask("round", calls=5) == {"wall": pytest.approx(3e-3), "cpu": pytest.approx(3e-3, abs=1e-4)}


@pytest.mark.parametrize(
    ("function", "message", "missing"),
    [
        ("raises", r"^ValueError: no such attention$", False),
        ("absent", r"^fast_attention is not installed$", True),
        ("dies", r"^the process ended \(exit code 7\): a last word$", False),
        ("unknown", r"^AttributeError: module 'fakes' has no attribute 'unknown'$", False),
    ],
)
def test_a_side_that_cannot_be_made_says_why(worker: Worker, function: str, message: str, missing: bool) -> None:
    with pytest.raises(SideError, match=message) as caught:
        worker.ask("make", target=f"fakes:{function}", params={})
    assert caught.value.missing is missing


def test_a_side_that_does_not_answer_is_ended() -> None:
    with closing(workers := {"": Worker(ENV, timeout=0.5)}), pytest.raises(SideError, match="no answer to 'make'"):
        workers[""].ask("make", target="fakes:hangs", params={})


def test_threads_are_held(worker: Worker) -> None:
    with closing(workers := {"": Worker({**held_to(3), **ENV})}):
        workers[""].ask("make", target="fakes:threads", params={})
        assert workers[""].ask("value") == {"value": 6.0}
    assert held_to(None) == {} and set(held_to(2)) == set(THREADS)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell the peak of memory")
def test_the_peak_is_that_of_a_call_and_not_of_what_came_before(worker: Worker) -> None:
    worker.ask("make", target="fakes:allocates", params={"mebibytes": 96})
    found = [worker.ask("memory")["bytes"] / 2**20 for _ in range(3)]
    assert all(90 < peak < 110 for peak in found), found


# --- alternation


def test_rounds_alternate_and_turns_change(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with closing(workers := {str(n): Worker(ENV) for n in (1, 2, 3)}):
        for name, one in workers.items():
            one.ask("make", target="fakes:clocked", params={"milliseconds": float(name), "log": str(log)})
        log.write_text("")
        rounds, errors = alternate(workers, Plan(rounds=6, round_seconds=0.006, warm_seconds=0.0))
    assert errors == {}
    for name, found in rounds.items():
        assert found.wall == [pytest.approx(1e-3 * int(name))] * 6
    calls = log.read_text().split()[6:]  # without the warming up: two calls each
    turns = []
    while calls:
        turns.append(calls[0])
        del calls[: {"1": 6, "2": 3, "3": 2}[calls[0]]]  # a round is 6 calls of 1 ms, 3 of 2 ms or 2 of 3 ms
    assert sorted(zip(turns[::3], turns[1::3], turns[2::3], strict=True)) == list(itertools.permutations("123"))


# --- a comparison


@pytest.fixture(scope="module")
def result() -> Result:
    sides = (
        side("ours", "clocked", ours=True),
        side("ours, slow", "clocked", ours=True, why_not=lambda: "this CPU is too young"),
        side("peer", "slower"),
        side("gone", "absent"),
        side("broken", "raises"),
    )
    grid = ({"milliseconds": 1.0}, {"milliseconds": 2.0})
    made = comparing(*sides, grid=grid, work=lambda point: 100.0, unit="tokens", agree=1e-6)
    return peers.run(made, command="python -m asv_benchmarks.peers fake")


def test_the_ratio_is_ours_by_the_peers(result: Result) -> None:
    for row in result.rows:
        assert ratio(row, "ours", "peer", "wall") == pytest.approx((0.25, 0.25, 0.25))
        assert ratio(row, "ours", "gone", "wall") is None
        assert row.sides["peer"].differs == 0.0
        ours, peer = row.sides["ours"].rounds, row.sides["peer"].rounds
        assert ours and peer and len(ours.wall) == len(peer.wall) == PLAN.rounds


def test_what_is_not_available_is_told_and_is_no_failure(result: Result) -> None:
    row = result.rows[0]
    assert row.sides["gone"].error == "fast_attention is not installed" and row.sides["gone"].missing
    assert row.sides["ours, slow"].error == "this CPU is too young" and row.sides["ours, slow"].missing
    assert result.failed == [
        f"milliseconds={n}, 1 thread: broken: ValueError: no such attention" for n in ("1.0", "2.0")
    ]


def test_the_report(result: Result, tmp_path: Path) -> None:
    files = report.write(result, tmp_path / "new")
    assert [file.name for file in files] == ["fake.md", "fake.json", "fake.svg"]
    page = files[0].read_text()
    for text in (
        "# Fakes",
        "![",
        "python -m asv_benchmarks.peers fake",
        "| milliseconds=1.0, 1 thread | ours / peer | 0.25 [0.25, 0.25] | 0.25 [0.25, 0.25] |",
        "|  | ours / gone | n/a | n/a |",
        "| milliseconds=2.0, 1 thread | ours | 2 | 2 to 2 | 2 | 2 |",
        "| 5e+04 |",  # tokens a second
        "n/a: this CPU is too young",
        "failed: ValueError: no such attention",
        "- milliseconds=1.0, 1 thread: broken: ValueError: no such attention",
        "numpy ",
        "load average",
    ):
        assert text in page, text
    assert str(ROOT) not in page + files[1].read_text()
    data = json.loads(files[1].read_text())
    assert data["rows"][0]["ratios"]["ours / peer"]["cpu"]["median"] == pytest.approx(0.25, abs=0.01)
    assert data["rows"][1]["sides"]["ours"]["rounds"]["wall"] == [pytest.approx(2e-3)] * PLAN.rounds
    assert ElementTree.parse(files[2]).getroot().tag.endswith("svg")
    again = report.write(result, tmp_path / "again")
    assert again[2].read_bytes() == files[2].read_bytes()


@pytest.mark.parametrize(
    ("threads", "others", "disturbed"), [(None, 9.0, True), (None, 0.0, False), (1, 9.0, False), (None, None, False)]
)
def test_a_row_that_others_disturbed_is_marked(
    result: Result, threads: int | None, others: float | None, disturbed: bool, tmp_path: Path
) -> None:
    row = dataclasses.replace(result.rows[0], threads=threads, others=others)
    assert row.disturbed is disturbed
    page = report.markdown(dataclasses.replace(result, rows=[row]), None)
    assert ("| milliseconds=1.0, all threads (disturbed: others took 9.0 CPUs) |" in page) is disturbed
    report.draw(dataclasses.replace(result, rows=[row]), tmp_path / "x.svg")


def test_sides_that_compute_different_things_are_found() -> None:
    part = side("part", "other", bound=True)  # which has no result to compare
    sides = (side("ours", "scaled", ours=True), side("peer", "scaled"), side("other", "other"), part)
    found = peers.run(comparing(*sides, grid=({"by": 1.0},), agree=1e-3))
    assert found.failed == ["by=1.0, 1 thread: other does not compute what the first side does: 1.0e-02"]


# --- the comparisons that there are, and the command


@pytest.mark.parametrize("name", declarations.names())
def test_the_comparisons_lead_somewhere(name: str) -> None:
    comparison = declarations.load(name)
    assert comparison.name == name and comparison.grid and any(map(comparison.quick, comparison.grid))
    for one in comparison.sides:
        module, _, function = one.target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    labels = [declarations.describe(point) for point in comparison.grid]
    assert len(set(labels)) == len(labels)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(peers.main, list(arguments))


def test_the_command_runs_writes_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", ["peers", "tiny", "--rounds", "1", "--only", "forward"])
    done = call("tiny", "--rounds", "1", "--only", "forward", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "refattn / SDPA" in done.output and "Times of a call" in done.output
    assert {file.name for file in tmp_path.iterdir()} >= {"tiny.md", "tiny.json"}
    assert "python -m asv_benchmarks.peers tiny --rounds 1 --only forward\n" in (tmp_path / "tiny.md").read_text()


def test_where_there_is_nothing_to_compare_with_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sides = (side("ours", "clocked", ours=True), side("gone", "absent"), side("lost", "needs_a_library"))
    monkeypatch.setattr(peers, "load", lambda name: comparing(*sides, grid=({"milliseconds": 1.0},)))
    done = call("tiny", "--out", str(tmp_path))
    assert done.exit_code == 3, done.output
    assert (
        "nothing to compare with: gone: fast_attention is not installed; lost: faster is not installed" in done.output
    )
    assert "Ratios" not in done.output and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rule", ["gated delta", "KDA"])
@pytest.mark.parametrize("function", ["recurrent", "chunked"])
def test_sides_of_the_delta_rule_compute_the_same(function: str, rule: str) -> None:
    pytest.importorskip("torch")
    delta = importlib.import_module("asv_benchmarks.comparisons.delta")
    out, gradients = getattr(delta, function)(n=2 * delta.CHUNK, run="both", rule=rule)()
    expected, known = delta.ours(n=2 * delta.CHUNK, run="both", rule=rule)()
    assert np.max(np.abs(out.detach().numpy() - expected)) < 1e-5 * np.max(np.abs(expected))
    for name, found in gradients.items():
        assert np.max(np.abs(found.numpy() - known[name])) < 1e-5 * np.max(np.abs(known[name])), name


@pytest.mark.parametrize("function", ["compiled", "jitted"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_sides_compute_the_same(function: str) -> None:
    pytest.importorskip("torch" if function == "compiled" else "jax")
    softmax = importlib.import_module("asv_benchmarks.comparisons.softmax")
    point = {"n": 16, "dtype": "float32", "run": "both", "causal": True, "heads": 1, "width": 8}
    # A side sets JAX's type for its whole process, which is this one here.
    with backends.get("jax").with_float64() if function == "jitted" else contextlib.nullcontext():
        out, gradients = getattr(softmax, function)(**point)()
    expected, known = softmax.ours(**point)()
    assert np.allclose(np.asarray(out.detach() if hasattr(out, "detach") else out), expected, atol=1e-6)
    for x, name in zip(gradients, ("q", "k", "v"), strict=True):
        assert np.allclose(np.asarray(x), known[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fastest"], "comparison: got 'fastest', needs one of"),
        (["tiny", "--only", "backward"], "--only: got 'backward', which no point of tiny has"),
        (["tiny", "--threads", "0"], "--threads: got '0', needs a whole number from 1, or all"),
    ],
)
def test_the_command_refuses(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2 and message in done.output
