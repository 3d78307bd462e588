"""The table of what sources claim: no cell is empty, tests that are named exist, calls run and commands are read."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import refattn as ra
from refattn.cli import cli
from refattn.mechanisms.record import Claim
from refattn.train import settings
from tests import broken
from tests.cli.command import run
from tools import broken_lines

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = {name: ra.mechanism(name).claims for name in ra.list_mechanisms()}
COMMANDS = ("refattn ", "python -m ")


@functools.cache
def names_in(path: Path) -> set[str]:
    """The functions of a file."""
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def problems(claim: Claim) -> list[str]:
    """What is wrong with the cells of a row."""
    cells = {"source": claim.source, "claim": claim.claim, "holds": claim.holds, "shown": claim.shown}
    found = [f"{name}: {text!r}" for name, text in cells.items() if not text.strip() or "\n" in text or "|" in text]
    for test in claim.tests:
        path, _, name = test.partition("[")[0].partition("::")  # one of several cases of a test may be named
        if not (ROOT / path).is_file() or not name.startswith("test_") or name not in names_in(ROOT / path):
            found.append(f"no test {test}")
    return found if claim.tests else [*found, "no test"]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_row_is_whole_and_its_tests_exist(name: str) -> None:
    assert CLAIMS[name]
    assert [f"{claim.claim}: {each}" for claim in CLAIMS[name] for each in problems(claim)] == []
    assert len({claim.claim for claim in CLAIMS[name]}) == len(CLAIMS[name])


def test_every_row_has_a_place_in_its_source_and_quotes_little() -> None:
    """Beside the author a section, an equation or a topic; and of its words at most twelve."""
    for _, claim in broken.rows():
        if claim.source.startswith(("Burgund", "Mercat 2020", "Preetham 2023", "Stein, Li, Steidl 2026", "Tie 2024")):
            assert re.match(r"(?:Stein, Li, Steidl|\w+)(?: 20\d\d)?(?: \(arXiv:[\d.]+\))?, \w", claim.source), (
                claim.source
            )
        for quote in re.findall(r": '(.*)'$", claim.source):
            assert len(quote.split()) <= 12, quote


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_calls_run(name: str) -> None:
    for claim in CLAIMS[name]:
        if not claim.shown.startswith(COMMANDS):
            q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 8, 4))
            try:
                exec(claim.shown, {"np": np, "ra": ra, "q": q, "k": k, "v": v})
            except Exception as error:
                raise AssertionError(f"{claim.shown}: {error!r}") from error


ROWS = list(enumerate(broken.rows(), 1))


def test_every_row_names_the_line_that_it_is_about() -> None:
    assert [f"{n}: {claim.claim}" for n, (_, claim) in ROWS if not claim.broken] == []
    for _, (name, claim) in ROWS:
        for file, text in broken.broken_files(ra.mechanism(name), claim.broken).items():
            assert text != (ROOT / file).read_text(encoding="utf-8")
            if file.endswith(".py"):
                compile(text, file, "exec")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, to be broken."""
    folder = tmp_path_factory.mktemp("checkout")
    broken_lines.copy(ROOT, folder)
    return folder


@pytest.mark.slow(sampled=False)
@pytest.mark.parametrize(("name", "claim"), [pytest.param(name, claim, id=str(n)) for n, (name, claim) in ROWS])
def test_a_test_of_the_row_is_red_where_its_line_is_broken(name: str, claim: Claim, checkout: Path) -> None:
    assert broken_lines.red(checkout, claim.tests) is None
    assert broken.red_test(name, claim, checkout) is not None


def resolved(line: str) -> click.Context:
    """Return what a command reads of the words of a line."""
    words = shlex.split(line)
    command: Any = cli if words[0] == "refattn" else importlib.import_module(words[2]).main
    rest = words[1:] if words[0] == "refattn" else words[3:]
    while isinstance(command, click.Group):
        command, rest = command.commands[rest[0]], rest[1:]
    return command.make_context(line, list(rest))  # takes the words that it reads out of the list


LINES = [*dict.fromkeys(c.shown for many in CLAIMS.values() for c in many if c.shown.startswith(COMMANDS))]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a text."""
    (tmp_path / "text.txt").write_text("to be read, and to be learned\n" * 400)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands_are_read(here: Path) -> None:
    (here / "FOLDER").mkdir()
    for line in LINES:
        given = resolved(line).params
        for mechanism in (given.get("mechanism"), *given.get("mechanisms", ())):
            assert mechanism is None or mechanism in ra.list_mechanisms(), line
        if line.startswith("refattn train"):
            growing = {} if given["grow"] is None else {"grow": "auto"}
            settings.build(given["mechanism"], settings.merge({}, settings.parse(given["assignments"]) | growing))


RUN = [line for line in LINES if not line.startswith(("python", "refattn verify"))]


# So few sequences leave growth's exact metric nearly singular: its solve ends with a residual, and says so.
@pytest.mark.filterwarnings("ignore:residual:refattn.mechanisms.precision.PrecisionWarning")
@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=pytest.mark.slow(sampled=n % 8 == 0)) for n, line in enumerate(RUN)]
)
def test_commands_run(line: str, here: Path) -> None:
    """But for verifications, which take a reader's kernel, and experiments, which take minutes or hours."""
    words = shlex.split(line.replace("--grow 100", "--grow 1"))[1:]
    if words[0] == "train":
        sizes = "width=16 heads=2 layers=2 context=8 batch=2 accumulate=1 score_bytes=100 sample_bytes=8".split()
        sizes += ["growth.sequences=16"] if "--grow" in words else []
        small = [word for size in sizes for word in ("--set", size)]
        words = [*words[:2], *small, *words[2:], "--data", "text.txt", "--steps", "2"]
    result = run(*words)
    assert result.exit_code == 0, result.output
