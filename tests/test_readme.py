"""README.md: its code and its commands print what they show, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_it_is_one_screen() -> None:
    assert len(README.splitlines()) <= 60


def test_the_first_lines_print_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    lines = [line.partition("  # torch")[0] for line in (ROOT / "docs/index.md").read_text("utf-8").splitlines()]
    assert code in "\n".join(lines), "the front page begins with the same lines"
    exec(code, {})
    printed = capsys.readouterr().out
    values = [float(x) for x in re.findall(r"\d\.\d*", printed.partition("]")[0])]
    said = re.findall(r"# \[(.*?)\]", code)[0].split()
    assert [f"{x:.2g}" for x in values] == [f"{float(x):.2g}" for x in said]
    assert re.findall(r'# "(.*)"', code)[0] in printed


def test_links_and_pictures_are_there() -> None:
    found = re.findall(r"\]\(([^)#]*)\)|(?:src|srcset)=\"([^\"]*)\"", README)
    assert len(found) >= 6
    for link, picture in found:
        assert link.startswith("https://") or (ROOT / (link or picture)).exists(), link or picture


def test_the_oldest_python_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for page in ("README.md", "CONTRIBUTING.md", "docs/index.md"):
        told = re.findall(r"Python (\S+) or later", (ROOT / page).read_text(encoding="utf-8"))
        assert {f">={version}" for version in told} == {project["requires-python"]}, page


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^make (\w+)", "".join(blocks("sh")), re.MULTILINE)
    assert commands == ["check", "test"]
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)


@pytest.mark.slow
def test_commands_print_what_is_shown(tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
        pytest.skip("needs triton and torch")
    (tmp_path / "refattn").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m refattn "$@"\n')
    (tmp_path / "refattn").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for block in blocks("text"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            ran = subprocess.run(
                command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
            )
            assert ran.returncode in (0, 1), ran.stderr
            told = iter(ran.stdout.splitlines())
            for line in shown.splitlines():  # in this order; dots stand for any number of lines
                assert line == "..." or line in told, (command, line, ran.stdout)


@pytest.mark.slow
def test_the_page_of_the_picture_is_made(tmp_path: Path) -> None:
    found = re.search(r"`refattn (trace \w+ --html) tour.html`", README)
    assert found is not None
    command = [sys.executable, "-m", "refattn", *found[1].split(), str(tmp_path / "tour.html")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert "Graph energy attention" in (tmp_path / "tour.html").read_text(encoding="utf-8")
