"""`make bench` says whether its numbers were stored, and under which commit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"
ASV = '#!/bin/sh\necho "asv $* in $(basename "$PWD") with $ASV_PYTHONPATH"\n[ "$1" = machine ] || exit 2\n'


@pytest.mark.parametrize(
    ("arguments", "differs", "stored"),
    [
        ("--bench 'block.*softmax'", False, True),
        ("--bench core", True, False),
        ("--quick --bench core", False, False),
        ("-q", False, False),
    ],
)
def test_the_last_line_says_what_was_stored(arguments: str, differs: bool, stored: bool, tmp_path: Path) -> None:
    if shutil.which("make") is None or shutil.which("git") is None:
        pytest.skip("needs make and git")
    for name in ("refattn", "backends", "asv_benchmarks", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file.py").write_text("")
    shutil.copy(MAKEFILE, tmp_path)
    program = tmp_path / ".venv/bin/asv"
    program.write_text(ASV)
    program.chmod(0o755)
    for name in ("pyproject.toml", "setup.py", ".venv/.made", ".venv/.with-bench"):  # in the order of their times
        (tmp_path / name).write_text("")

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", "refattn", "backends", "asv_benchmarks", "Makefile")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    if differs:
        (tmp_path / "refattn/file.py").write_text("x = 1\n")
    done = subprocess.run(
        ["make", "-s", "bench", f"ARGS={arguments}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2  # what asv itself exits with
    ran, told = done.stdout.splitlines()
    words = f"--set-commit-hash {commit} " * stored + arguments.replace("'", "")
    assert ran == f"asv run --python=same {words} in asv_benchmarks with .."
    assert told.startswith(f"stored under {commit};" if stored else "not stored: ")
    assert stored or not differs or told.endswith(commit)
