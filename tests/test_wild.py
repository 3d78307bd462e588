"""Bugs of published packages: the page is of what is listed and was run, and what is installed still does it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli import command
from tools.wild import HOME, PAGE, ROOT, is_installed, listed, page, printed_by, stored

BUGS, CONVENTIONS = listed()
NAMES = [f"{number}-{bug['package'].split()[0]}" for number, bug in enumerate(BUGS, 1)]


def test_the_page_is_of_what_was_run() -> None:
    printed = stored()
    assert PAGE.read_text("utf-8") == page(BUGS, CONVENTIONS, printed)
    assert {*printed} == {bug["code"] for bug in BUGS} and len(BUGS) >= 15
    assert not any("/site-packages/" in text or "/tmp" in text for text in printed.values())


@pytest.mark.parametrize("bug", BUGS, ids=NAMES)
def test_a_reproduction_is_short_and_does_not_need_refattn(bug: dict[str, str]) -> None:
    compile(bug["code"], "reproduction", "exec")
    assert "refattn" not in bug["code"] and bug["command"].startswith("refattn verify ")
    assert ("report" in bug) == ("about" in bug)
    words = shlex.split(bug["command"])
    if "--impl" in words:
        place, _, name = words[words.index("--impl") + 1].partition(":")
        assert name in (ROOT / place).read_text("utf-8")


def test_what_is_installed_is_listed() -> None:
    lines = {line for file in _requirements() for line in file.read_text("utf-8").splitlines()}
    assert {bug["package"].replace(" ", "==") for bug in BUGS} <= lines


def _requirements() -> list[Path]:
    return [HOME / "requirements.txt", *(HOME.parent / "kernels" / "requirements").iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=NAMES)
def test_it_is_so(bug: dict[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    if not is_installed(bug):
        pytest.skip(f"needs {bug['package']}")
    assert printed_by(bug) == stored()[bug["code"]]
    monkeypatch.chdir(ROOT)
    result = command.run(*shlex.split(bug["command"])[1:])
    assert result.exit_code == 1, result.stdout
