"""Files that commands write for the user: whole or not at all, in their place and nowhere else."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from refattn.analysis import figure
from tests.cli.command import run

COMMANDS = {
    "list": ("list", "--json"),
    "trace": ("trace", "softmax", "--safetensors"),
    "show": ("show", "growing", "--out"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_link_is_replaced_and_not_followed(name: str, tmp_path: Path) -> None:
    theirs, file = tmp_path / "theirs", tmp_path / "file"
    theirs.write_text("theirs")
    for leads in (theirs, tmp_path / "nowhere"):
        file.unlink(missing_ok=True)
        file.symlink_to(leads)
        assert run(*COMMANDS[name], file).exit_code == 0
        assert file.is_file() and not file.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "theirs"]
    assert theirs.read_text() == "theirs"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_leaves_what_was_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("before")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = run(*COMMANDS[name], file)
    assert found.exit_code in (1, 2) and f"{str(file)!r} cannot be written: No space left on device" in found.output
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    assert run("list", "--json", pipe).exit_code == 0
    reader.join(10.0)
    assert json.loads(found[0])
    assert run("list", "--json", os.devnull).exit_code == 0


def test_a_picture_is_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "picture.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "picture.part.png").write_text("theirs")
    figure.save(figure.new_figure(1.0, 1.0), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "nowhere").exists()
    assert (tmp_path / "picture.part.png").read_text() == "theirs"


STUDIES = {
    "spectrum": ("--queries", "4", "--keys", "4", "--updates", "2"),
    "prediction": ("--system", "linear", "--steps", "2"),
    "flow": ("--particles", "4", "--end", "0.1"),
}


@pytest.mark.parametrize("study", STUDIES)
def test_without_matplotlib_a_study_has_its_numbers(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = run("analyse", study, *STUDIES[study], "--out", tmp_path)
    assert found.exit_code == 0, found.output
    assert f'{study}.png: needs matplotlib: pip install "refattn[plots]"' in found.stderr
    assert [file.name for file in tmp_path.iterdir()] == [f"{study}.json"]


def test_without_matplotlib_curves_are_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "metrics.jsonl").write_text("")
    found = run("plot", tmp_path, "--out", tmp_path / "both.png")
    assert found.exit_code == 2 and 'both.png: needs matplotlib: pip install "refattn[plots]"' in found.stderr
