"""What is wrong with the words of a command is one line, and nothing has run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refattn.cli import cli
from tests.cli.command import KERNELS, SMALL, process, refused, run, verify


def test_unknown_names() -> None:
    names = ", ".join(cli.commands)
    assert refused("verfy") == f"command: got 'verfy' (did you mean verify?), needs one of {names}; see refattn --help"
    assert "'relu'" in (line := refused("verify", "relu", "--impl", "a:b")) and "softmax" in line
    line = refused("verify", "softmax", "--impl", "a:b", "--dtype", "float8")
    assert "'float8'" in line and "bfloat16" in line
    for option in ("--outputs", "--seed"):
        assert option in refused("verify", "softmax", "--impl", "a:b", option, "x")
    assert "see refattn --help" in refused("--quiet", "list")
    assert "extra" in refused("list", "extra")


def test_a_module_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    result = process("verify", "softmax", "--impl", "my_kernels:attend", *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("softmax: agrees: 1 case")


@pytest.mark.parametrize("place", ["missing/found.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, place: str) -> None:
    (tmp_path / "telling.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()\n{KERNELS}")
    line = refused("verify", "softmax", "--impl", f"{tmp_path / 'telling.py'}:attend", "--json", tmp_path / place)
    assert line.startswith("--json: got ") and str(tmp_path / place) in line
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "words",
    [
        "show softmax --out",
        "check --json",
        "trace softmax --html",
        "trace softmax --safetensors",
        "train softmax --out",
        "analyse flow --out",
        "analyse lyapunov softmax --run",
        "verify softmax --outputs",
        "golden check",
        "golden write",
    ],
)
def test_an_empty_path_is_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no name of the working directory: a variable that is not set gives it."""
    monkeypatch.chdir(tmp_path)
    option = words.split()[-1] if "--" in words else "DIR"
    assert refused(*words.split(), "") == f"{option}: got an empty text, needs a path"
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_too_long_is_no_place(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 300)
    assert refused("golden", "write", place, "growing").endswith(f"cannot be written: File name too long ({place})")
    assert "File name too long" in refused("golden", "check", place)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text("def deep():\n    raise RuntimeError('no GPU')\n\n\ndeep()\n")
    arguments = ("verify", "softmax", "--impl", f"{tmp_path / 'raising.py'}:attend")
    assert "RuntimeError" in refused(*arguments)
    result = run("--debug", *arguments)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and "in deep" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("refattn: error: --impl")


def test_an_unforeseen_error_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("refattn.verify.selfcheck.check.check", fail)
    assert refused("check", "--jobs", "1") == "ZeroDivisionError: division by zero (refattn --debug shows where)"
    assert "Traceback" in run("--debug", "check", "--jobs", "1").stderr


def test_an_interrupt_is_one_line(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = verify(kernels("interrupted"))
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "refattn: interrupted\n")


def test_an_interrupted_verification_leaves_the_report_of_what_ran(tmp_path: Path) -> None:
    kernel, report = tmp_path / "kernel.py", tmp_path / "report.json"
    kernel.write_text(
        "import refattn\n\ncalls = []\n\n\ndef attend(q, k, v, **options):\n    calls.append(0)\n"
        "    if len(calls) == 4:\n        raise KeyboardInterrupt\n"
        "    return refattn.softmax.forward(q, k, v, **options)[0] * 1.5\n"
    )
    result = verify(f"{kernel}:attend", "--json", report)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, "refattn: interrupted")
    found = json.loads(report.read_text())
    assert found["counts"]["all"]["failed"] == 3 and "it was interrupted" in found["not_run"][0]
    assert found["suspects"] is None
