"""Runs that are killed without warning: each goes on, and the last one leaves what a run leaves that nobody kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import python
from tests.train.runs import ENVIRONMENT, arguments, remains, write_text


@pytest.mark.parametrize(("what", "deaths"), [("checkpoints", 80), pytest.param("runs", 25, marks=pytest.mark.slow)])
def test_nothing_is_lost_by_a_death_at_any_call_that_changes_the_disk(tmp_path: Path, what: str, deaths: int) -> None:
    """tests/fuzz/kills.py kills at random moments."""
    assert int(python("-m", "tests.train.killed", what, tmp_path, REFATTN_WORKERS="1")) >= deaths


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("twice", [False, True])
def test_a_process_that_is_interrupted_saves_and_goes_on(tmp_path: Path, number: signal.Signals, twice: bool) -> None:
    """Also if the signal comes twice at once, as `timeout` sends it to a process and to its group."""
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
    for _ in range(2 if twice else 1):  # without a pause, in which a busy machine lets the process come to its end
        process.send_signal(number)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + number, "")
    *_, interrupted, stopped = errors.splitlines()
    assert interrupted == "interrupted: the step is finished and saved; once more stops at once"
    step = int(stopped.split()[3])
    assert stopped == f"stopped after step {step} of 1000000; go on with --resume --out {tmp_path / 'run'}"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*.json")] == [f"step-{step:08d}.json"]
    assert len(remains(tmp_path / "run")["metrics.jsonl"]) == step


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """In the middle of a step that takes ever so long; what was saved before is there."""
    text = write_text(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nfrom refattn.train import data\nbatch = data.batch\n"
        "def slow(*args, step, **how):\n    if step == 6:\n        print('slow', file=sys.stderr, flush=True)\n"
        "        time.sleep(300.0)\n    return batch(*args, step=step, **how)\ndata.batch = slow\n"
    )
    words = arguments(text, tmp_path / "run", steps=100, checkpoint_every=4)
    env = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    command = [sys.executable, "-m", "refattn", *words]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) != "slow\n":
            assert line
        process.send_signal(number)
        assert process.stderr.readline() == "interrupted: the step is finished and saved; once more stops at once\n"
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(10.0) == 128 + number
        assert process.stderr.read() == f"refattn: {'interrupted' if number == signal.SIGINT else 'terminated'}\n"
    assert (tmp_path / "run" / "checkpoints" / "step-00000004.json").exists()
