"""A run's folder is as trusted as whoever wrote it: no file outside is touched, no code is chosen by a file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn.train import checkpoint, folder
from refattn.train.checkpoint import newest
from refattn.train.folder import RunError
from refattn.train.settings import Settings
from tests.test_files import STRANGE
from tests.train.runs import ENVIRONMENT, Listener, Trained, arguments, remains, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), steps=4, checkpoint_every=2)


@pytest.fixture
def chosen(trained: Trained) -> Settings:
    return trained.settings


@pytest.fixture
def run(tmp_path: Path, trained: Trained) -> Path:
    return trained.copy(tmp_path / "run")


# --- nothing outside of the folder


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints/step-00000004.json"])
@pytest.mark.parametrize("kind", ["fifo", "folder"])
@pytest.mark.timeout(30)
def test_a_strange_file_is_told_at_once(run: Path, chosen: Settings, name: str, kind: str) -> None:
    (run / name).unlink()
    STRANGE[kind](run / name)
    report = Listener()
    try:
        train(chosen, run, report, resume=True)
    except (OSError, RunError) as error:
        assert name in str(error)
    else:
        assert "checkpoints" in name and name in report.lines[0]


# --- code


def test_a_file_chooses_no_code(tmp_path: Path, run: Path, chosen: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "payload.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = json.loads((run / "config.json").read_text())
    config["settings"]["mechanism"] = "payload:x"
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="mechanism 'payload:x' is none of the library's; only a user may choose it"):
        train(chosen, run, resume=True)
    assert not (tmp_path / "ran").exists() and "payload" not in sys.modules


# --- checkpoints whose sums are right


def signed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of a checkpoint and make its digest anew."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    del content["digest"]
    path.write_text(json.dumps(content | {"digest": checkpoint._digest(content)}), encoding="utf-8")


def lacks(*path: str) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        place: Any = content
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]

    return change


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no tokens": (lacks("facts", "tokens"), "facts.tokens: is missing"),
    "tokens": (lambda content: content["facts"].update(tokens=-1), "facts.tokens: got -1"),
    "a list": (lambda content: content.update(facts=[]), "facts: got list, needs an object"),
    "format": (lambda content: content.update(format=None), "format: got None"),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_checkpoint_falls_back_to_the_one_before(run: Path, chosen: Settings, how: str) -> None:
    whole = remains(run)
    change, reason = FORGED[how]
    path = run / "checkpoints" / "step-00000004.json"
    signed(path, change)
    report = Listener()
    train(chosen, run, report, resume=True)
    assert report.lines[0].startswith(f"{path}: ") and reason in report.lines[0]
    assert report.lines[1] == "going on after step 2 of 4" and remains(run) == whole


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: {**x, "params.norm.gain": np.ones((1, 16), np.float32)}, "params.norm.gain: got float32 (1, 16)"),
        (lambda x: {**x, "params.norm.gain": np.ones(16)}, "params.norm.gain: got float64 (16,), needs float32 (16,)"),
        (lambda x: {**x, "params.norm.other": np.ones(1)}, "has the unknown 'params.norm.other'"),
        (lambda x: {n: y for n, y in x.items() if n != "optimiser.first.norm.gain"}, "lacks 'optimiser.first.norm"),
    ],
)
def test_arrays_of_another_model_fall_back_too(run: Path, chosen: Settings, change: Any, reason: str) -> None:
    whole = remains(run)
    found = newest(run / "checkpoints", print)
    assert found is not None
    checkpoint.save(run / "checkpoints", 4, change(found.arrays), found.facts)
    report = Listener()
    train(chosen, run, report, resume=True)
    assert reason in report.lines[0] and remains(run) == whole


# --- where a run goes on


@pytest.mark.parametrize("name", ["processor", "BLAS", "source"])
def test_another_machine_or_other_code_is_told(
    run: Path, chosen: Settings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = folder.machine()
    assert set(now) == {"processor", "BLAS", "source"} and all(now.values())
    assert json.loads((run / "config.json").read_text())["machine"] == now
    report = Listener()
    train(chosen, run, report, resume=True)
    assert not any("last bits" in line for line in report.lines)
    monkeypatch.setattr(folder, "machine", lambda: now | {name: "another"})
    train(chosen, run, report, resume=True)
    assert f"{name} was {now[name]} and is another: from here on last bits may differ" in report.lines
    from refattn.train import loop

    with pytest.raises(RunError, match=f"^exact: {name} was .* and is another"):
        loop.run(chosen, run, report, resume=True, exact=True)
    # What a part of it was made with is not forgotten when the machine is the first one again.
    monkeypatch.setattr(folder, "machine", lambda: now)
    train(chosen, run, resume=True)
    assert json.loads((run / "config.json").read_text())["also"] == [{name: "another"}]
    with pytest.raises(RunError, match=f"^exact: a part of the run in .* was made with {name} another"):
        loop.run(chosen, run, report, resume=True, exact=True)


# --- nobody who reads


@pytest.mark.parametrize(
    "streams",
    [*(pytest.param(s, marks=pytest.mark.slow) for s in ("2>&-", "2>/dev/full", "1>&- 2>&-")), "0<&- 1>&- 2>&-"],
)
def test_a_run_does_not_depend_on_who_reads(tmp_path: Path, trained: Trained, streams: str) -> None:
    whole = remains(trained.folder)
    words = arguments(trained.settings.data, tmp_path / "run", steps=4, checkpoint_every=2)
    command = f'"$0" -m refattn "$@" {streams}'
    result = subprocess.run(["sh", "-c", command, sys.executable, *words], env=ENVIRONMENT, timeout=120)
    assert result.returncode == 0
    left = remains(tmp_path / "run")
    assert left.pop("loss.png").startswith(b"\x89PNG")
    assert left == whole
