"""The command line: help, tables, and the check of the library; tests/cli has the other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.golden.storage_types import FLOAT8
from refattn.verify.outcome import CheckReport, Row
from tests.cli.command import facts, run

# Help, version, tables


def test_version() -> None:
    assert run("--version").stdout == f"refattn {ra.__version__}\n"


def test_without_a_command_the_help_is_shown_and_it_is_an_error() -> None:
    result = run()
    assert result.exit_code == 2 and not result.stdout
    assert {"list", "backends", "check", "verify", "trace"} <= set(cli.commands)
    for command in cli.commands:
        assert command in result.stderr


def test_a_shell_completes_commands_and_mechanisms() -> None:
    def completed(words: str) -> list[str]:
        given = {"_REFATTN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        result = CliRunner().invoke(cli, [], prog_name="refattn", env=given)
        return [line.removeprefix("plain,") for line in result.stdout.split()]

    assert completed("refattn tra") == ["trace", "train"]
    for command in ("trace", "check", "show", "verify", "train", "golden write out", "analyse clusters"):
        assert completed(f"refattn {command} koo") == ["koopman"], command
    assert completed("refattn verify softmax --case causal-t") == ["causal-tail", "causal-top-left"]
    assert completed("refattn verify softmax --case tiny,pla") == ["tiny,plain"]
    assert completed("refattn trace delta --case ti") == ["tiny"]
    assert completed("refattn verify softmax --dtype f") == ["float64", "float32", "float16", *FLOAT8]
    assert completed("refattn trace softmax --dtype f") == ["float64", "float32", "float16"]
    for command in ("check", "train softmax", "trace softmax"):
        assert completed(f"refattn {command} --backend to") == ["torch"], command
    assert completed("refattn golden show --case softmax/ti") == ["softmax/tiny", "softmax/ties", "softmax/tiny-values"]
    assert completed("refattn verify softmax --html pa") == ["file,pa"]  # which the shell itself completes


def test_list_as_json(tmp_path: Path) -> None:
    result = run("list", "--json", "-")
    rows = facts(result.stdout)
    assert [row["name"] for row in rows] == list(ra.list_mechanisms())
    assert set(rows[0]) == {"name", "title", "implementations", "source"}
    assert result.stderr == run("list", "--json", tmp_path / "list.json").stdout == run("list").stdout
    assert facts((tmp_path / "list.json").read_text()) == rows


def test_claims_of_sources() -> None:
    result = run("list", "--claims", "koopman", "softmax", "--json", "-")
    rows = facts(result.stdout)
    assert list(dict.fromkeys(row["mechanism"] for row in rows)) == ["koopman", "softmax"]
    assert result.stderr == run("list", "koopman", "softmax", "--claims").stdout
    words = "".join(result.stderr.split())
    for row in rows:
        assert (
            "".join(row["claim"][:30].split()) in words
            and "".join(row["tests"][0].rpartition("::")[2].split()) in words
        )
    assert {row["mechanism"] for row in facts(run("list", "--claims", "--json", "-").stdout)} == {*ra.list_mechanisms()}


def test_backends() -> None:
    result = run("backends")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line[:1].strip()}
    assert {"name", "numpy", "cupy", "torch", "jax", "strict"} <= set(lines)
    assert lines["numpy"].split()[1] == "yes"


# Check


def checking(monkeypatch: pytest.MonkeyPatch, *statuses: str) -> list[Any]:
    """Make the check of every mechanism find these; return what it is called with."""
    calls = []

    def check(mechanism: Any, backend: Any, *, progress: Any, require_all: bool, **more: Any) -> CheckReport:
        calls.append((mechanism.name, backend.name))
        share = {"agrees": 0.25, "disagrees": float("inf"), "not run": None}
        rows = tuple(Row("properties", f"law {n}", status, share[status], "why") for n, status in enumerate(statuses))
        return CheckReport(mechanism.name, backend.name, require_all, tuple(progress(rows)))

    monkeypatch.setattr("refattn.verify.selfcheck.check.check", check)
    return calls


@pytest.mark.parametrize(
    ("statuses", "code", "strict_code"),
    [
        (("agrees",), 0, 0),
        (("agrees", "disagrees"), 1, 1),
        (("agrees", "not run"), 0, 3),
        (("not run",), 3, 3),
        (("disagrees", "not run"), 1, 1),
    ],
)
def test_exit_codes_of_check(
    monkeypatch: pytest.MonkeyPatch, statuses: tuple[str, ...], code: int, strict_code: int
) -> None:
    checking(monkeypatch, *statuses)
    assert run("check", "--jobs", "1").exit_code == code
    assert run("check", "--jobs", "1", "softmax", "--require-all").exit_code == strict_code


def test_check_takes_all_mechanisms_unless_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = checking(monkeypatch, "agrees")
    run("check", "--jobs", "1")
    assert calls == [(name, "numpy") for name in ra.list_mechanisms()]
    calls.clear()
    run("check", "--jobs", "1", "softmax", "softmax", "--backend", "strict")
    assert calls == [("softmax", "strict")]


def test_check_prints_its_rows_and_their_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checking(monkeypatch, "agrees", "disagrees", "not run")
    result = run("check", "--jobs", "1", "--json", tmp_path / "check.json")
    data = facts((tmp_path / "check.json").read_text())
    assert data["exit_code"] == 1
    assert [row["status"] for row in data["checks"][0]["rows"]] == ["agrees", "disagrees", "not run"]
    for row in data["checks"][0]["rows"]:
        assert any(row["name"] in line and row["status"] in line for line in result.stdout.splitlines())
    assert "1 checks agree, 1 disagree, 1 not run" in result.stdout.splitlines()[-1]
    assert "check: 3 of 3 parts" in result.stderr
