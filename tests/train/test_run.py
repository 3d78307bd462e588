"""Whole runs: what is in their folder, and what they may not depend on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import backends, tree
from refattn.train import baselines, checkpoint, data, loop, metrics, step
from refattn.train.folder import RunError
from tests.train.checkpoints import fail
from tests.train.runs import ENVIRONMENT, Listener, arguments, remains, small, train, write_text


def test_what_a_run_leaves(tmp_path: Path) -> None:
    chosen = small(write_text(tmp_path))
    text = data.load(chosen.data)
    result = train(chosen, tmp_path / "run", picture=True)
    assert result.finished and result.step == 12 and result.folder == tmp_path / "run"
    assert sorted(remains(result.folder)) == [
        *(f"checkpoints/step-000000{n:02d}.{kind}" for n in (8, 12) for kind in ("json", "safetensors")),
        *("config.json", "loss.png", "metrics.jsonl", "result.json", "sample.txt"),
    ]
    config = json.loads((result.folder / "config.json").read_text())
    assert config["settings"] == chosen.to_json() and config["settings"]["seed"] == 0
    assert config["text"]["fingerprint"] == text.fingerprint
    assert config["text"]["train_bytes"] + config["text"]["heldout_bytes"] == len(Path(chosen.data).read_bytes())
    assert config["versions"]["numpy"] == np.__version__
    rows = metrics.read(result.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["tokens"] for row in rows] == [64 * n for n in range(1, 13)]
    assert [row["step"] for row in rows if "heldout_bits" in row] == [5, 10, 12]
    assert all(math.isfinite(row["loss"]) and row["norm"] > 0.0 for row in rows)
    assert [row["rate"] for row in rows] == [chosen.schedule(n) for n in range(1, 13)]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds) and seconds[0] > 0.0
    assert (result.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((result.folder / "result.json").read_text()) == result.facts
    heldout = text.heldout[:301]
    assert result.facts["heldout_bytes"] == 300 and result.facts["tokens"] == 768
    assert result.facts["bigram_bits"] == baselines.bigram_bits(text.train, heldout)
    assert result.facts["gzip_bits"] == baselines.gzip_bits(heldout)
    assert (result.folder / "sample.txt").read_bytes() == result.sample
    assert len(result.sample) == 5 + 30 and result.sample.startswith(heldout[:5].tobytes())


def test_equal_runs_leave_equal_bytes(tmp_path: Path) -> None:
    chosen = small(write_text(tmp_path), steps=4)
    kept = [remains(train(chosen, tmp_path / name, picture=True).folder) for name in ("one", "two")]
    assert kept[0] == kept[1]
    other = remains(train(small(chosen.data, steps=4, seed=1), tmp_path / "three").folder)
    assert other["metrics.jsonl"] != kept[0]["metrics.jsonl"] and other["sample.txt"] != kept[0]["sample.txt"]


def test_a_step_is_a_pure_function_of_the_state_before_it(tmp_path: Path) -> None:
    chosen = small(write_text(tmp_path), layers=2)
    text = data.load(chosen.data)
    state = loop.fresh(chosen)
    before = {name: x.tobytes() for name, x in tree.flatten(state.params).items()}
    (one, row), (two, again) = (loop.step(state, chosen, text) for _ in range(2))
    assert row == again and one.step == two.step == 1
    assert {name: x.tobytes() for name, x in tree.flatten(state.params).items()} == before
    for a, b in ((one.params, two.params), (one.moments, two.moments)):
        assert all(np.array_equal(x, tree.flatten(b)[name]) for name, x in tree.flatten(a).items())
    moved = [name for name, x in tree.flatten(one.params).items() if x.tobytes() != before[name]]
    assert moved == list(before)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_leaves_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(step, "SHARD_TOKENS", 16)
    chosen = small(write_text(tmp_path), batch=12, layers=2)
    monkeypatch.setenv("REFATTN_WORKERS", "1")
    alone = remains(train(chosen, tmp_path / "alone").folder)
    monkeypatch.setenv("REFATTN_WORKERS", str(workers))
    assert backends.workers() == workers
    assert remains(train(chosen, tmp_path / "together").folder) == alone


@pytest.mark.parametrize("library", ["strict", "torch", pytest.param("jax", marks=pytest.mark.slow(sampled=False))])
def test_every_library_trains_alike(tmp_path: Path, library: str) -> None:
    if reason := backends.get(library).why_unavailable():
        pytest.skip(reason)
    path = write_text(tmp_path)
    kept = []
    for name in ("numpy", library):
        result = train(small(path, steps=6, layers=2, dtype="float64", backend=name), tmp_path / name)
        rows = metrics.read(result.folder / "metrics.jsonl")
        kept.append([[row["loss"] for row in rows], [row["heldout_bits"] for row in rows if "heldout_bits" in row]])
        assert checkpoint.newest(result.folder / "checkpoints", fail) is not None
    for one, other in zip(*kept, strict=True):
        np.testing.assert_allclose(other, one, rtol=0.0, atol=1e-9)


def test_where_matplotlib_is_broken_a_run_has_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = Listener()
    result = train(small(write_text(tmp_path)), tmp_path / "run", report, picture=True)
    assert result.finished and not (result.folder / "loss.png").exists()
    assert report.lines[-1].startswith('loss.png is not drawn: needs matplotlib: pip install "refattn[plots]" (')


# --- folders


def test_a_folder_with_a_run_is_left_alone(tmp_path: Path) -> None:
    chosen = small(write_text(tmp_path))
    before = remains(train(chosen, tmp_path / "run").folder)
    with pytest.raises(RunError, match="run holds a run already; --resume goes on with it, or give another folder"):
        train(chosen, tmp_path / "run")
    assert remains(tmp_path / "run") == before


def test_what_cannot_begin_leaves_no_folder(tmp_path: Path) -> None:
    path = write_text(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"device": "abacus"}, "device: got abacus, numpy has cpu"),
        ({"context": 10**5}, "data: got 2.* bytes in the train part .* needs at least 100001 for a context of 100000"),
        ({"context": 400}, "data: got 3.. bytes in the heldout part"),
        ({"backend": "abacus"}, "backend: got 'abacus', needs one of"),
        ({"data": str(tmp_path / "nothing")}, "data: got .*nothing': No such file or directory; needs 'stdlib'"),
    ]
    for changes, problem in cases:
        with pytest.raises((ValueError, OSError), match=problem):
            train(small(**{"data": path, **changes}), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    words = arguments(write_text(tmp_path), tmp_path / "run", steps=10**6, checkpoint_every=10)
    first = subprocess.Popen(
        [sys.executable, "-m", "refattn", *words], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert first.stderr is not None and first.stderr.readline().startswith(b"step 1 of 1000000")
        chosen = small(write_text(tmp_path), steps=10**6, checkpoint_every=10)
        for resume in (False, True):
            with pytest.raises(RunError, match="out: another process works in .*run; wait for it, or give another"):
                train(chosen, tmp_path / "run", resume=resume)
    finally:
        first.kill()
        first.communicate()
    with pytest.raises(RunError, match="holds a run already"):  # the death of a process lets go of its folder
        train(chosen, tmp_path / "run")
