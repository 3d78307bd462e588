"""Runs that are killed without warning: each goes on, and the last one leaves what a run leaves that nobody kills."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import ENVIRONMENT, ROOT, arguments, command, remains, write_text

# The picture needs as much time as all else together, and is no part of what a run computes.
WITHOUT_A_PICTURE = "import sys; sys.modules['matplotlib.figure'] = None; import refattn.cli; refattn.cli.main()"


def life(words: list[str], seconds: float | None = None) -> bool:
    """Run the command line, and kill it after some time; return whether it had ended before."""
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_A_PICTURE, *words],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    _, errors = process.communicate()
    if process.returncode == -signal.SIGKILL:
        return False
    assert process.returncode == 0, errors
    return True


@pytest.mark.parametrize(
    "kills", [pytest.param(3, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow(sampled=False))]
)
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bytes(tmp_path: Path, kills: int) -> None:
    """Over the whole life of the process: its start, steps, checkpoints, and the scores at the end."""
    draw = random.Random(kills)
    text = write_text(tmp_path)
    # So many steps that some of the kills come between them: with few, starting takes most of a life.
    settings = {"steps": 60, "checkpoint_every": 1, "sample_bytes": 60, "score_bytes": 2000}
    began = time.monotonic()
    assert life(arguments(text, tmp_path / "whole", **settings))
    duration = time.monotonic() - began
    whole = remains(tmp_path / "whole")
    killed = runs = 0
    seen: set[int] = set()
    while killed < kills:
        out = tmp_path / f"run-{runs}"
        words = arguments(text, out, "--resume", **settings)
        ended = False
        # From time to time a run is let go on without its whole past, so that the beginning is met as well.
        for _ in range(4):
            ended = life(words, draw.uniform(0.05, 1.0) * duration)
            killed += not ended
            seen |= {int(path.stem[5:]) for path in out.glob("checkpoints/step-*.json")}
            if ended:
                break
        if not ended:
            assert life(words)
        assert remains(out) == whole, (runs, killed)
        runs += 1
    assert len(seen) >= 3 and max(seen) == 60  # deaths, or ends, between many different steps


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_call_that_changes_the_disk_ends_with_the_same_bytes(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.train.killed_run", str(tmp_path), write_text(tmp_path)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) >= 25


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
    assert (process.returncode, out) == (130, "")
    *_, interrupted, stopped = errors.splitlines()
    assert interrupted == "interrupted: the step is finished and saved; once more stops at once"
    step = int(stopped.split()[3])
    assert stopped == f"stopped after step {step} of 1000000; go on with --resume --out {tmp_path / 'run'}"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*.json")] == [f"step-{step:08d}.json"]
    assert len(remains(tmp_path / "run")["metrics.jsonl"]) == step


def test_a_process_that_is_interrupted_while_it_begins_says_so(tmp_path: Path) -> None:
    """Before the steps there is nothing to save, and nothing to wait for."""
    code = """
import signal
from refattn.cli import main
from refattn.train import data
data.load = lambda source: signal.raise_signal(signal.SIGINT)
main()
"""
    words = arguments(write_text(tmp_path), tmp_path / "run")
    result = subprocess.run(
        [sys.executable, "-c", code, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "refattn: interrupted\n")
    assert not (tmp_path / "run").exists()
    assert command(*words).returncode == 0
