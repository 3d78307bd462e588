"""Published figures: pages show what docs/facts.toml has, and tools/facts.py finds out where one has moved."""

from __future__ import annotations

import dataclasses
import datetime
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools import facts

FACT = facts.Fact(
    about="rules",
    command="refattn list",
    pattern=r"(\d+) of \d+ caught",
    value="12",
    tolerance=0.0,
    pages=(("README.md", r"(\d+) of \d+ caught"), ("page.md", r"catches (\d+)")),
    date=datetime.date(2026, 1, 1),
    machine="",
)


def test_pages_show_the_published_figures() -> None:
    found = facts.load()
    assert {"mutants", "honest-runs", "check-share"} <= set(found)
    assert list(facts.problems(found)) == []


def test_figures_are_complete() -> None:
    for id, fact in facts.load().items():
        assert re.compile(fact.pattern).groups == 1, id
        assert fact.holds(fact.value) and fact.about and fact.machine
        assert fact.command.split()[0] in ("refattn", "python")


def page(root: Path, readme: str, other: str) -> Path:
    (root / "README.md").write_text(readme)
    (root / "page.md").write_text(other)
    return root


def test_a_page_that_shows_something_else_is_found(tmp_path: Path) -> None:
    known = {"caught": FACT}
    assert list(facts.problems(known, page(tmp_path, "12 of 13 caught", "it catches 12"))) == []
    assert list(facts.problems(known, page(tmp_path, "12 of 13 caught, 11 of 13 caught", "it catches"))) == [
        "caught: README.md shows 11, docs/facts.toml has 12",
        r"caught: nothing in page.md matches catches (\d+)",
    ]


def test_a_figure_is_measured() -> None:
    assert facts.measure(FACT, "12 of 13 caught\n12 of 20 caught") == "12"
    assert facts.measure(FACT, "12 of 13 caught, 11 of 13 caught") is None
    assert facts.measure(FACT, "") is None
    assert FACT.holds("12") and not FACT.holds("13")
    assert dataclasses.replace(FACT, value="0.39", tolerance=0.1).holds("0.45")


def test_a_command_runs_with_this_refattn() -> None:
    assert facts.run("refattn --version").startswith("refattn ")
    assert facts.run("python -c 'import sys; print(1, file=sys.stderr)'") == "1\n"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one figure, whose command prints 13 now."""
    (tmp_path / "docs").mkdir()
    entry = f"""# a comment that stays
[caught]
about = "rules"
command = "refattn list"
pattern = '{FACT.pattern}'
value = "12"
tolerance = 0
pages = [{{ file = "README.md" }}, {{ file = "page.md", pattern = 'catches (\\d+)' }}]
date = 2026-01-01
machine = ""
"""
    (tmp_path / "docs" / "facts.toml").write_text(entry)
    page(tmp_path, "so 12 of 13 caught.", "it catches 12 in all")
    load, problems, update, file = facts.load, facts.problems, facts.update, tmp_path / "docs" / "facts.toml"
    monkeypatch.setattr(facts, "load", lambda: load(file))
    monkeypatch.setattr(facts, "problems", lambda found: problems(found, tmp_path))
    monkeypatch.setattr(facts, "update", lambda measured, found: update(measured, found, tmp_path))
    monkeypatch.setattr(facts, "run", lambda command: "13 of 14 caught")
    return tmp_path


def test_what_moved_is_told(small: Path) -> None:
    result = CliRunner().invoke(facts.main, [])
    assert result.exit_code == 1
    assert "caught 12 13 0 moved" in " ".join(result.stdout.split())
    assert '"12"' in (small / "docs" / "facts.toml").read_text()
    assert CliRunner().invoke(facts.main, ["nothing"]).exit_code == 2


def test_what_moved_is_written(small: Path) -> None:
    pytest.importorskip("tomlkit")
    result = CliRunner().invoke(facts.main, ["--update"])
    assert result.exit_code == 0
    (fact,) = facts.load().values()
    assert (fact.value, fact.date, fact.machine) == ("13", datetime.date.today(), facts.machine())
    assert (small / "docs" / "facts.toml").read_text().startswith("# a comment that stays\n[caught]\n")
    assert (small / "README.md").read_text() == "so 13 of 13 caught."
    assert (small / "page.md").read_text() == "it catches 13 in all"
    assert CliRunner().invoke(facts.main, []).exit_code == 0
