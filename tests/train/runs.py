"""Small runs for the tests of training: a text, settings of a model that trains in milliseconds, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from refattn.train import loop, settings

ROOT = Path(__file__).resolve().parents[2]

SMALL: dict[str, Any] = {
    "context": 16,
    "width": 16,
    "heads": 2,
    "layers": 1,
    "batch": 4,
    "steps": 12,
    "warmup": 3,
    "checkpoint_every": 4,
    "score_every": 5,
    "score_bytes": 300,
    "sample_bytes": 30,
}

ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "REFATTN_WORKERS": "1",
}


def write_text(folder: Path, words: int = 800, seed: int = 0) -> str:
    """Write a text of words into a file beside the runs, and return its path."""
    draw = random.Random(seed)
    path = folder / "text.txt"
    path.write_text(" ".join(draw.choice("the cat sat on a mat and saw two dogs run".split()) for _ in range(words)))
    return str(path)


def small(data: str, **changes: Any) -> settings.Settings:
    """The settings of a small run."""
    return settings.build("softmax", SMALL | {"data": data} | changes)


def arguments(data: str, out: Path, *more: str, **changes: Any) -> list[str]:
    """The same settings for the command line."""
    values = {name: json.dumps(value) for name, value in (SMALL | changes).items()}
    return [
        "train",
        "softmax",
        "--data",
        data,
        "--out",
        str(out),
        *sum([["--set", f"{n}={v}"] for n, v in values.items()], []),
        *more,
    ]


class Listener:
    """A report that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.rows: list[Mapping[str, Any]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def step(self, row: Mapping[str, Any], steps: int) -> None:
        self.rows.append(row)


class Stopping(Listener):
    """Stops a run when a step is told: by a signal to this process, or by an error."""

    def __init__(self, at: int, how: signal.Signals | type[Exception] = signal.SIGINT) -> None:
        super().__init__()
        self.at, self.how = at, how

    def step(self, row: Mapping[str, Any], steps: int) -> None:
        super().step(row, steps)
        if row["step"] == self.at:
            if isinstance(self.how, type):
                raise self.how
            signal.raise_signal(self.how)


def train(
    chosen: settings.Settings,
    out: Path,
    report: Listener | None = None,
    *,
    resume: bool = False,
    picture: bool = False,
) -> loop.Result:
    """Run here; without the picture, which would take half of the time."""
    with contextlib.nullcontext() if picture else mock.patch.object(loop, "plot"):
        return loop.run(chosen, out, report or Listener(), resume=resume)


class Trained:
    """A run that is trained once; tests take copies of its folder."""

    def __init__(self, home: Path, **changes: Any) -> None:
        self.settings = small(write_text(home), **changes)
        self.folder = train(self.settings, home / "whole").folder

    def copy(self, out: Path) -> Path:
        return shutil.copytree(self.folder, out)


def remains(out: Path) -> dict[str, Any]:
    """What a run has left, file by file, but for the times, which no two runs have in common."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        if path.is_file():
            found[path.relative_to(out).as_posix()] = path.read_bytes()
    found["metrics.jsonl"] = [_without(json.loads(line), "seconds") for line in found["metrics.jsonl"].splitlines()]
    if "result.json" in found:
        found["result.json"] = _without(json.loads(found["result.json"]), "seconds", "tokens_per_second")
    return found


def _without(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    assert all(name in facts for name in names)
    return {name: value for name, value in facts.items() if name not in names}
