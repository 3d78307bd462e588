"""Whatever goes wrong in a run is told in one line, and nothing that was saved is lost."""

from __future__ import annotations

import errno
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn import equations, model
from refattn.mechanisms.record import Unsupported
from refattn.train import checkpoint, data, metrics, optimiser
from refattn.train.checkpoint import CheckpointError, newest
from refattn.train.diagnose import DivergedError, first_not_finite
from refattn.train.settings import Settings
from refattn.train.step import loss_and_gradients
from tests.train.checkpoints import fail
from tests.train.disk import watch
from tests.train.runs import ENVIRONMENT, Listener, Stopping, arguments, remains, small, train, write_text


@pytest.fixture
def chosen(tmp_path: Path) -> Settings:
    return small(write_text(tmp_path))


# --- a disk that is full


class FullDisk:
    """Fails from one of the calls that need room on."""

    def __init__(self, patches: pytest.MonkeyPatch, point: int, number: int) -> None:
        self.calls, self.point, self.number = 0, point, number
        watch(patches, self.need_room)

    def need_room(self, name: str, *arguments: Any) -> None:
        if name in ("write", "os.replace"):
            self.calls += 1
            if self.calls > self.point:
                raise OSError(self.number, os.strerror(self.number), *map(str, arguments[1:]))


@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_a_run_whose_disk_is_full_goes_on_when_it_is_not(tmp_path: Path, chosen: Settings, number: int) -> None:
    whole = remains(train(chosen, tmp_path / "whole").folder)
    for point in itertools.count(0, 7):
        out = tmp_path / f"run-{point}"
        with pytest.MonkeyPatch.context() as patches:
            disk = FullDisk(patches, point, number)
            try:
                train(chosen, out)
            except OSError as error:
                told = str(error)
            else:
                break
        assert disk.calls == point + 1  # nothing is tried after the first failure
        assert str(out) in told and os.strerror(number) in told
        rows = metrics.read(out / "metrics.jsonl") if (out / "metrics.jsonl").exists() else []
        found = newest(out / "checkpoints", fail)
        assert len(rows) >= (found.step if found else 0) >= len(rows) - 4
        train(chosen, out, resume=True)
        assert remains(out) == whole, point
    assert point > 20


def test_a_process_that_may_write_no_more_says_one_line(tmp_path: Path) -> None:
    """A real limit of the operating system: 8000 bytes are enough for the metrics, and too few for the arrays."""
    code = """
import resource
from refattn.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
main()
"""
    out = tmp_path / "run"
    text = write_text(tmp_path)

    def life(*words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", code, *arguments(text, out, *words)]
        # Compiled modules would be cut off at the limit, too, and stay so for everybody.
        env = {**ENVIRONMENT, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(program, env=env, capture_output=True, text=True, timeout=120)

    result = life()
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == (
        f"refattn: error: {out}/checkpoints/step-00000004.safetensors: File too large; "
        "the earlier checkpoints are untouched"
    )
    whole = remains(train(small(text), tmp_path / "whole").folder)
    train(small(text), out, resume=True)
    assert remains(out) == whole
    result = life("--resume")  # nothing is left to do but what is small
    assert result.returncode == 0 or "loss.png" in result.stderr or "File too large" in result.stderr


def test_a_disk_that_is_full_when_numbers_diverge(
    tmp_path: Path, chosen: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are told."""

    def full(*arguments: object) -> None:
        raise CheckpointError("run: No space left on device; the earlier checkpoints are untouched")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(DivergedError, match="step 2: .* first: .*; run: No space left on device; the earlier"):
        train(small(chosen.data, learning_rate=1e30, warmup=0), tmp_path / "run")


# --- a folder that may not be written


# --- numbers that are not finite


def test_a_rate_that_is_far_too_large(tmp_path: Path, chosen: Settings) -> None:
    """The message names the step and the first equation, and the state before is a checkpoint."""
    wild = small(chosen.data, learning_rate=1e18, warmup=0)
    out = tmp_path / "run"
    with pytest.raises(DivergedError) as caught:
        train(wild, out)
    assert re.fullmatch(
        r"step 2: what a block is given is not finite; first: SM\.1 \(scores, dense\.py:\d+\): (NaN|infinity) in "
        r"s_ij = scale q_i \. k_j; the state after step 1 is saved",
        str(caught.value),
    )
    found = newest(out / "checkpoints", fail)
    assert found is not None and found.step == 1
    assert all(np.all(np.isfinite(x)) for x in found.arrays.values())
    assert [row["step"] for row in metrics.read(out / "metrics.jsonl")] == [1]
    again = Listener()
    with pytest.raises(DivergedError) as repeated:
        train(wild, out, again, resume=True)
    assert str(repeated.value) == str(caught.value) and again.lines[0] == "going on after step 1 of 12"


def poison(folder: Path, name: str, value: float) -> int:
    """Write a number into an array of the newest checkpoint, with all sums right."""
    found = newest(folder / "checkpoints", fail)
    assert found is not None
    arrays = {key: x.copy() for key, x in found.arrays.items()}
    arrays[name].reshape(-1)[0] = value
    checkpoint.save(folder / "checkpoints", found.step, arrays, found.facts)
    return found.step


@pytest.mark.parametrize("value", [np.nan])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("position_embedding", r"first: LM\.1 \(x, network\.py:\d+\): (NaN|infinity) in x_n = E"),
        ("layers.1.norm_2.gain", r"first: LM\.4\[1\] \(outer, network\.py:\d+\): (NaN|infinity) in w = norm_2"),
        ("layers.0.block.w_q", r"first: params\.w_q: got an element that is not finite, needs finite numbers"),
    ],
)
def test_a_poisoned_parameter_is_found(tmp_path: Path, chosen: Settings, name: str, value: float, problem: str) -> None:
    settings = small(chosen.data, layers=2, steps=6, checkpoint_every=2)
    out = tmp_path / "run"

    with pytest.raises(InterruptedError):
        train(settings, out, Stopping(4, InterruptedError))
    assert poison(out, f"params.{name}", value) == 4
    before = remains(out)
    with pytest.raises(DivergedError, match=rf"^step 5: .* is not finite; .*; {name} was not finite before this step$"):
        train(settings, out, resume=True)
    assert remains(out) == before  # what is not good is not saved anew, and the checkpoint before it is kept
    with pytest.raises(DivergedError, match=problem):
        train(settings, out, resume=True)
    for path in (out / "checkpoints").glob("step-00000004.*"):
        path.unlink()
    assert train(settings, out, resume=True).finished


def test_a_loss_of_numbers_too_large_for_their_gradients(
    tmp_path: Path, chosen: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimiser, "_squares", lambda x: x.sum() * np.inf)
    with pytest.raises(DivergedError, match="^step 1: the norm of the gradients is not finite; every equation is"):
        train(chosen, tmp_path / "run")
    found = newest(tmp_path / "run" / "checkpoints", fail)
    assert found is not None and found.step == 0


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (ArithmeticError("update 2: not inverted"), DivergedError, "step 1: update 2: not inverted; .*saved"),
        (ValueError("context.draws: got none"), ValueError, "context.draws: got none$"),
        (
            Unsupported("implementation: got 'auto', needs fewer tokens"),
            Unsupported,
            "implementation: got 'auto', needs fewer tokens$",
        ),
    ],
)
def test_what_a_block_cannot_compute_is_told_as_such(
    tmp_path: Path, chosen: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: Any, told: str
) -> None:
    """A result that is not found ends a run at its step; what a block refuses is no divergence."""

    def fails(*given: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(kind, match=f"^{told}"):
        train(chosen, tmp_path / "run")


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (
            lambda value: value * np.float32(np.nan),
            r"^first: dLM\.5\[1\] \(d_outer, network\.py:\d+\): NaN in dw = adjoint of the MLP at dx''$",
        ),
        (lambda value: value * np.float32(np.inf), r"^first: dLM\.5\[1\] \(d_outer, network\.py:\d+\): infinity in"),
    ],
)
def test_the_first_equation_is_named_with_its_pass(chosen: Settings, spoil: Callable[[Any], Any], cause: str) -> None:
    """A backward that overflows in one layer of two: the second pass of its equation."""
    params = model.init(small(chosen.data, layers=2).model, seed=0, like=np.zeros(1, np.float32))
    text = data.load(chosen.data)
    inputs, targets = data.batch(text.train, size=2, context=16, seed=0, step=1)
    passes = itertools.count()

    def hook(id: str, name: str, value: Any) -> Any:
        return spoil(np.abs(value) + np.float32(1.0)) if id == "dLM.5" and next(passes) == 1 else value

    def compute() -> object:
        with equations.apply(hook):
            return loss_and_gradients(params, inputs, targets)

    assert re.match(cause, first_not_finite(params, compute))
    assert first_not_finite(params, lambda: loss_and_gradients(params, inputs, targets)).startswith("every equation is")
