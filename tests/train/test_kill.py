"""Runs that are killed without warning: each goes on, and the last one leaves what a run leaves that nobody kills."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import python
from tests.train.runs import ENVIRONMENT, arguments, remains, write_text


@pytest.mark.parametrize(("what", "deaths"), [("checkpoints", 80), pytest.param("runs", 25, marks=pytest.mark.slow)])
def test_nothing_is_lost_by_a_death_at_any_call_that_changes_the_disk(tmp_path: Path, what: str, deaths: int) -> None:
    """tests/fuzz/kills.py kills at random moments."""
    assert int(python("-m", "tests.train.killed", what, tmp_path, REFATTN_WORKERS="1")) >= deaths


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_interrupted_saves_and_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    text = write_text(tmp_path)
    # So many steps that it cannot come to the end, and checkpoints so far apart that only the interrupt makes one.
    settings = {"steps": 10**6, "checkpoint_every": 10**6, "score_every": 10**6}
    words = arguments(text, tmp_path / "run", **settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "refattn", *words],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first.startswith("step 1 of 1000000: loss 8."), first
    process.send_signal(number)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + number, "")
    *_, interrupted, stopped = errors.splitlines()
    assert interrupted == "interrupted: the step is finished and saved; once more stops at once"
    step = int(stopped.split()[3])
    assert stopped == f"stopped after step {step} of 1000000; go on with --resume --out {tmp_path / 'run'}"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*.json")] == [f"step-{step:08d}.json"]
    assert len(remains(tmp_path / "run")["metrics.jsonl"]) == step
