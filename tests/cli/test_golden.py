"""``refattn golden``: sets are written, checked and shown, and what is no whole set has its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from refattn import equations
from refattn.cli import cli
from tests.verify.test_freeze import written


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("golden") / "set").folder


def test_a_set_agrees_or_its_worst_case_is_told(folder: Path) -> None:
    found = run("golden", "check", str(folder), "--json", "-")
    assert found.exit_code == 0 and json.loads(found.stdout)["failed"] == []
    assert "golden vectors: 3 cases: all agree" in found.stderr
    with equations.apply(lambda id, name, value: value * 1.001 if id == "SM.1" else value):
        found = run("golden", "check", str(folder))
    assert found.exit_code == 1 and "3 disagree" in found.stdout and "softmax/tiny" in found.stdout


def test_cases_and_arrays_are_shown(folder: Path) -> None:
    found = run("golden", "show", str(folder))
    assert found.exit_code == 0 and "softmax/mask-full" in found.stdout and "sha256" in found.stdout
    found = run("golden", "show", str(folder), "--case", "softmax/mask-full")
    assert found.exit_code == 0 and "bool/mask" in found.stdout and "equations/SM.1" in found.stdout
    found = run("golden", "show", str(folder), "--case", "softmax/none")
    assert found.exit_code == 2 and "needs one of softmax/tiny, softmax/mask-full" in found.stderr


@pytest.mark.parametrize("command", ["check", "show"])
def test_exit_codes_of_what_is_no_set(command: str, folder: Path, tmp_path: Path) -> None:
    assert run("golden", command, str(tmp_path / "none")).exit_code == 3
    assert run("golden", command, str(tmp_path)).exit_code == 3
    (tmp_path / "manifest.json").write_text("{")
    found = run("golden", command, str(tmp_path))
    assert found.exit_code == 2 and "refattn: error:" in found.stderr


def test_a_folder_is_not_written_over(folder: Path, tmp_path: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    for args in ([str(folder)], [str(folder), "softmax", "--size", "big"], [str(folder), "hardmax"]):
        assert run("golden", "write", *args).exit_code == 2
    (tmp_path / "letter.txt").write_text("mine")
    assert run("golden", "write", str(tmp_path), "softmax", "--replace").exit_code == 2
    assert (folder / "manifest.json").read_bytes() == before and (tmp_path / "letter.txt").exists()
