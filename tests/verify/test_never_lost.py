"""A report is never lost: whatever a kernel or a program prints, raises or returns, every kind of report comes out."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

import refattn as ra
from refattn import messages
from refattn.cli import cli
from refattn.verify.outcome import Departure, Line, Outcome, Precision, Report, Suspect, Suspects, Verdict
from refattn.verify.report import page, tables
from refattn.verify.report.junit import junit

COMMAND: Any = importlib.import_module("refattn.cli.verify")
RECORD = ra.mechanism("softmax")
ODD = "red \x1b[31m, half a pair \ud800, nothing \0, back \r\x08, a line\nand more, <b>&amp; ]]>"
SHARES = (-math.inf, math.inf, math.nan, -1.0)

KERNELS = r"""
import sys, refattn as ra

ODD = "red \x1b[31m, half a pair \ud800, nothing \0, back \r\x08, a line\nand more, <b>&amp; ]]>"

class Odd(Exception):
    def __str__(self):
        raise ValueError

class Named:
    shape, ndim = ODD, ODD
    dtype = ODD

def raises(*args, **options):
    raise ValueError(ODD)

def speechless(*args, **options):
    raise Odd

def prints(q, k, v, **options):
    print(ODD.encode("utf-8", "surrogatepass").decode("latin-1"), file=sys.stderr)
    sys.stdout.buffer.write(ODD.encode("utf-8", "surrogatepass"))
    return q[..., :1]

def odd(*args, **options):
    return Named()

def names(q, k, v, **options):
    return {"out": q, ODD: q}

def declines(*args, **options):
    return ra.Decline(ODD * 20_000)

def declines_with_bytes(*args, **options):
    return ra.Decline(b"\xff" * 1_000_000)

def loud(*args, **options):
    raise type(ODD.replace("\0", "").encode("utf-8", "replace").decode(), (Exception,), {})(ODD * 100_000)

def vast(q, k, v, **options):
    return q * 0.0 + 1e300
"""


def all_reports(report: Report) -> None:
    text = json.dumps(report.to_json(), allow_nan=False)
    json.loads(text)
    for found in (tables.verified(report, RECORD), page.page(report, RECORD, "0"), junit(report)):
        assert "\x1b" not in found and "\0" not in found
        found.encode()
    ElementTree.fromstring(junit(report))


@pytest.mark.parametrize("share", SHARES)
def test_whatever_stands_in_it_a_report_is_written(share: float) -> None:
    line = Line("SM.1", ODD, ODD, ODD)
    suspect = Suspect((line,), ODD, share, share, share, link=ODD)
    verdict = Verdict("out", share, "row", (0,), ODD, ODD)
    departure = Departure(ODD, (ODD,), verdict, (ODD,))
    suspects = Suspects("float32", (ODD,), (ODD,), (ODD,), 1, (ODD,), (ODD,), (suspect,), departure, (line,), (), ODD)
    outcomes = [
        Outcome(ODD, ODD, "float32", "disagrees", ODD, (verdict,), note=ODD),
        Outcome("tiny", "plain", ODD, "raises", ODD),
        Outcome("tiny", "plain", "float32", "declined", ODD * 20_000),
    ]
    report = Report("softmax", ODD, False, tuple(outcomes), suspects, (ODD,), conventions={}, left_out=ODD)
    all_reports(replace(report, precision=(Precision("float32", {"products": ODD}, 1, 1),)))
    assert len(report.outcomes[2].detail) <= messages.MOST


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["verify", "softmax", "--shape", "n=3,d=2", *map(str, arguments)])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "name",
    ["raises", "speechless", "prints", "odd", "names", "declines", "declines_with_bytes", "loud", "vast"],
)
def test_of_any_kernel(name: str, inside: bool, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(KERNELS)
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    how = [x for kind, file in files.items() for x in (f"--{kind}", file)] + (["--in-process"] if inside else [])
    result = verify("--impl", f"{tmp_path / 'kernels.py'}:{name}", "--dtype", "float32", *how)
    assert result.exit_code == (3 if "declines" in name else 1), result.output
    assert len(result.stdout) < 20_000 and "\x1b" not in result.stdout
    json.loads(files["json"].read_text())
    ElementTree.fromstring(files["junit"].read_text())
    assert "\x1b" not in files["html"].read_text() and "</html>" in files["html"].read_text()


@pytest.mark.parametrize("code", [0, 1, 77])
def test_of_any_program(code: int, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        f"import sys\nodd = {ODD!r}.encode('utf-8', 'surrogatepass').replace(b'\\n', b' ') * 1000\n"
        f"sys.stdout.buffer.write(odd)\nsys.stderr.buffer.write(odd)\nsys.exit({code})\n"
    )
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "junit", "html")}
    how = [x for kind, place in files.items() for x in (f"--{kind}", place)]
    result = verify("--exec", f"{sys.executable} {file}", "--dtype", "float32", *how)
    assert result.exit_code == (3 if code == 77 else 1), result.output
    assert "\x1b" not in result.output and (code == 0 or r"\x1b[31m" in result.output)
    json.loads(files["json"].read_text())
    ElementTree.fromstring(files["junit"].read_text())


@pytest.mark.parametrize("what", [KeyboardInterrupt, ZeroDivisionError])
def test_what_was_found_is_told_when_the_search_for_the_cause_ends(
    what: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*given: Any) -> Any:
        raise what

    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.setattr(COMMAND, "_explained", ended)
    found = tmp_path / "found.json"
    result = verify("--impl", f"{tmp_path / 'kernels.py'}:vast", "--in-process", "--json", found)
    assert result.exit_code == (130 if what is KeyboardInterrupt else 2)
    assert "disagrees: " in result.stdout and json.loads(found.read_text())["exit_code"] == 1


def test_one_that_cannot_be_written_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise COMMAND.Problem("--html: no space")

    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.setattr(COMMAND, "_write_page", full)
    found = {kind: tmp_path / f"found.{kind}" for kind in ("json", "junit")}
    how = [x for kind, file in found.items() for x in (f"--{kind}", file)]
    result = verify("--impl", f"{tmp_path / 'kernels.py'}:vast", "--in-process", *how)
    assert result.exit_code == 2 and "no space" in result.stderr and "disagrees: " in result.stdout
    assert all(file.exists() for file in found.values())
