"""A run's folder is as trusted as whoever wrote it: no file outside is touched, no code is chosen by a file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import files
from refattn.cli.analyse.stack import trained as trained_parameters
from refattn.cli.arguments import Problem
from refattn.train import checkpoint, folder, loop, metrics
from refattn.train.checkpoint import newest
from refattn.train.folder import RunError
from refattn.train.settings import Settings
from tests.test_files import STRANGE
from tests.train.checkpoints import pairs
from tests.train.runs import ENVIRONMENT, Listener, Stopping, Trained, arguments, remains, small, train


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


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """All that is in a folder: bytes of files, targets of links."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def stuffed(other: Path, run: Path) -> Path:
    """Checkpoints of another run: those of a run, older ones, and a part that a killed process left."""
    shutil.copytree(run / "checkpoints", other / "checkpoints")
    for step in (0, 1):
        for kind in ("json", "safetensors"):
            (other / "checkpoints" / f"step-{step:08d}.{kind}").write_text("mine")
    (other / "checkpoints" / files.fresh_name()).write_text("mine")
    (other / "mine").write_text("mine")
    return other


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", [".", *folder.FILES])
def test_a_link_is_refused_and_what_it_leads_to_stays(
    tmp_path: Path, run: Path, chosen: Settings, name: str, resume: bool
) -> None:
    other = stuffed(tmp_path / "other", run)
    for file in folder.FILES:
        if not (other / file).exists() and (run / file).exists():
            shutil.copy(run / file, other / file)
    if name == ".":
        shutil.move(run, other / "run")
        run.symlink_to("other/run")
    else:
        if (run / name).is_dir():
            shutil.rmtree(run / name)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(f"../other/{name}")
    before = snapshot(tmp_path)
    message = rf"out: got {run}, a link to other/run; needs" if name == "." else rf"out: {run / name} is a link; needs"
    with pytest.raises(RunError, match=message):
        train(chosen, run, resume=resume)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_a_checkpoint_that_is_a_link_is_passed_over(tmp_path: Path, run: Path, chosen: Settings, kind: str) -> None:
    whole, other = remains(run), stuffed(tmp_path / "other", run)
    path = run / "checkpoints" / f"step-00000004.{kind}"
    path.unlink()
    path.symlink_to(f"../../other/checkpoints/{path.name}")
    before, report = snapshot(other), Listener()
    train(chosen, run, report, resume=True)
    assert report.lines[:2] == [f"{path}: is a link, needs the file itself", "going on after step 2 of 4"]
    assert snapshot(other) == before and remains(run) == whole and not path.is_symlink()


def test_links_that_lead_nowhere_make_nothing(tmp_path: Path, run: Path, chosen: Settings) -> None:
    for name in ("metrics.jsonl", "result.json"):
        out = Path(shutil.copytree(run, tmp_path / name.split(".")[0]))
        (out / name).unlink()
        (out / name).symlink_to("../outside")
        with pytest.raises(RunError, match=f"{name} is a link"):
            train(chosen, out, resume=True)
    assert not (tmp_path / "outside").exists()


def test_a_copy_of_hard_links_is_a_run_of_its_own(tmp_path: Path, run: Path, chosen: Settings) -> None:
    before = snapshot(run)
    shutil.copytree(run, tmp_path / "copy", copy_function=os.link)
    train(small(chosen.data, steps=6, checkpoint_every=2), tmp_path / "copy", resume=True)
    assert snapshot(run) == before and len(remains(tmp_path / "copy")["metrics.jsonl"]) == 6


class Doing(Listener):
    """Does something to the disk when a step is told."""

    def __init__(self, at: int, do: Callable[[], object]) -> None:
        super().__init__()
        self.at, self.do = at, do

    def step(self, row: Mapping[str, Any], steps: int) -> None:
        super().step(row, steps)
        if row["step"] == self.at:
            self.do()


@pytest.mark.parametrize("there", ["another run", "a link", "nothing"])
@pytest.mark.parametrize("name", [".", "checkpoints"])
def test_a_folder_that_is_moved_while_a_run_works_in_it(
    tmp_path: Path, trained: Trained, chosen: Settings, name: str, there: str
) -> None:
    """What has its name by then is not touched, the step is saved where the folder is, and a run goes on from there."""
    out, moved, other = tmp_path / "run", tmp_path / "moved", stuffed(tmp_path / "other", trained.folder)
    before = snapshot(other)

    def move() -> None:
        (out / name).rename(moved)
        if there == "another run":
            (other / name).rename(out / name)
        elif there == "a link":
            (out / name).symlink_to(other / name)

    if (name, there) == ("checkpoints", "nothing"):  # others are made: nothing is lost
        train(chosen, out, Doing(3, move))
        assert [each.name for each in sorted(moved.iterdir())] == pairs(2)
        assert remains(out).keys() == remains(trained.folder).keys() - {f"checkpoints/{each}" for each in pairs(2)}
        return
    with pytest.raises(RunError, match=f"out: {out / name} was moved or removed while the run worked in it"):
        train(chosen, out, Doing(3, move))
    if there == "another run":
        (out / name).rename(other / name)
    elif there == "a link":
        (out / name).unlink()
    assert snapshot(other) == before
    moved.rename(out / name)
    report = Listener()
    train(chosen, out, report, resume=True)
    assert report.lines[0] == "going on after step 4 of 4" and remains(out) == remains(trained.folder)


@pytest.mark.parametrize("name", [".", "checkpoints"])
def test_a_folder_that_is_removed_while_a_run_works_in_it(
    tmp_path: Path, trained: Trained, chosen: Settings, name: str
) -> None:
    out = tmp_path / "run"
    report = Doing(3, lambda: shutil.rmtree(out / name))
    if name == ".":
        with pytest.raises(RunError, match=f"out: {out} was moved or removed while the run worked in it"):
            train(chosen, out, report)
        assert not out.exists()
    else:
        train(chosen, out, report)
        assert remains(out).keys() == remains(trained.folder).keys() - {f"checkpoints/{each}" for each in pairs(2)}


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "sample.txt", "config.json"])
def test_a_link_that_comes_while_a_run_works_leads_nowhere(
    tmp_path: Path, trained: Trained, chosen: Settings, name: str
) -> None:
    out, outside = tmp_path / "run", tmp_path / "outside"
    outside.write_text("mine")

    def link() -> None:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to("../outside")

    try:
        train(chosen, out, Doing(3, link))
    except OSError as error:
        assert name == "metrics.jsonl" and "is a link" in str(error)  # it is read for the picture
    assert outside.read_text() == "mine"


def test_a_run_that_is_moved_goes_on_from_where_it_is(tmp_path: Path, trained: Trained, chosen: Settings) -> None:
    whole = remains(trained.folder)
    assert not train(chosen, tmp_path / "run", Stopping(3)).finished
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").rename(tmp_path / "elsewhere" / "moved")
    (tmp_path / "way").symlink_to("elsewhere")  # a link on the way is none of the run
    train(chosen, tmp_path / "way" / "moved", resume=True)
    left = remains(tmp_path / "elsewhere" / "moved")
    assert left["sample.txt"] == whole["sample.txt"] and left["metrics.jsonl"] == whole["metrics.jsonl"]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints", "checkpoints/step-00000004.json"])
def test_readers_follow_no_link_within_a_run(tmp_path: Path, run: Path, name: str) -> None:
    """The run itself may be a link there: nothing is written."""
    read: list[Callable[[Path], Any]] = [
        lambda path: loop.continued(path, b"the", 5, print),
        lambda path: trained_parameters(ra.mechanism("softmax"), str(path)),
        lambda path: metrics.read(path / "metrics.jsonl"),
    ]
    (tmp_path / "latest").symlink_to("run")
    for each in read:
        each(tmp_path / "latest")
    (tmp_path / "other").mkdir()
    (run / name).rename(tmp_path / "other" / Path(name).name)
    (run / name).symlink_to(tmp_path / "other" / Path(name).name)
    lines: list[str] = []
    if "/" in name:
        loop.continued(run, b"the", 5, lines.append)
        assert lines == [f"{run / name}: is a link, needs the file itself"]
        return
    for each in read[2:] if name == "metrics.jsonl" else read[:2]:
        with pytest.raises((OSError, Problem), match="is a link, needs the (file|folder) itself") as caught:
            each(run)
        assert str(run / name) in str(caught.value)


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
    with pytest.raises(RunError, match="config.json: .*mechanism: got 'payload:x', needs one of softmax"):
        train(chosen, run, resume=True)
    assert not (tmp_path / "ran").exists() and "payload" not in sys.modules


# --- checkpoints whose sums are right


def signed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of a checkpoint and make its digest anew."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    del content["digest"]
    path.write_text(json.dumps(content | {"digest": checkpoint._digest(content)}), encoding="utf-8")


GAIN = "params.norm.gain"
FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "facts.tokens: is missing": lambda content: content["facts"].pop("tokens"),
    "facts.tokens: got -1": lambda content: content["facts"].update(tokens=-1),
    "facts: got list, needs an object": lambda content: content.update(facts=[]),
    "format: got None": lambda content: content.update(format=None),
}
ANOTHER_MODEL: dict[str, Callable[[dict[str, Any]], object]] = {
    f"{GAIN}: got float32 (1, 16)": lambda arrays: arrays.update({GAIN: np.ones((1, 16), np.float32)}),
    f"{GAIN}: got float64 (16,), needs float32 (16,)": lambda arrays: arrays.update({GAIN: np.ones(16)}),
    "has the unknown 'params.norm.other'": lambda arrays: arrays.update({"params.norm.other": np.ones(1)}),
    "lacks 'optimiser.first.norm": lambda arrays: arrays.pop("optimiser.first.norm.gain"),
}


@pytest.mark.parametrize("reason", [*FORGED, *ANOTHER_MODEL])
def test_a_checkpoint_that_is_none_of_the_run_falls_back_to_the_one_before(
    run: Path, chosen: Settings, reason: str
) -> None:
    whole, path = remains(run), run / "checkpoints" / "step-00000004.json"
    if reason in FORGED:
        signed(path, FORGED[reason])
    else:
        found = newest(run / "checkpoints", print)
        assert found is not None
        ANOTHER_MODEL[reason](found.arrays)
        checkpoint.save(run / "checkpoints", 4, found.arrays, found.facts)
    report = Listener()
    train(chosen, run, report, resume=True)
    assert report.lines[0].startswith(f"{path}: ") and reason in report.lines[0]
    assert report.lines[1] == "going on after step 2 of 4" and remains(run) == whole


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
