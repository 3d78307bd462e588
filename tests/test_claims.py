"""What sources claim has its table: no cell is empty, tests that are named exist, calls run and commands are well formed."""

from __future__ import annotations

import ast
import functools
import importlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.mechanisms.claims import Claim, claims_of
from refattn.train import settings

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = {name: claims_of(name) for name in ra.list_mechanisms()}
COMMANDS = ("refattn ", "python -m ")


@functools.cache
def tests_of(path: Path) -> set[str]:
    """The tests of a file, those of its classes as Class::name."""
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def problems(claim: Claim) -> list[str]:
    """What is wrong with the cells of a row."""
    cells = {"source": claim.source, "claim": claim.claim, "holds": claim.holds, "shown": claim.shown}
    found = [f"{name}: {text!r}" for name, text in cells.items() if not text.strip() or "\n" in text or "|" in text]
    for test in claim.tests:
        path, _, name = test.partition("::")
        if not (ROOT / path).is_file() or not name.startswith("test_") or name not in tests_of(ROOT / path):
            found.append(f"no test {test}")
    return found if claim.tests else [*found, "no test"]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_row_is_whole_and_its_tests_exist(name: str) -> None:
    assert CLAIMS[name]
    assert [f"{claim.claim}: {each}" for claim in CLAIMS[name] for each in problems(claim)] == []
    assert len({claim.claim for claim in CLAIMS[name]}) == len(CLAIMS[name])


def test_a_row_that_is_not_whole_is_found() -> None:
    here = f"tests/test_claims.py::{test_a_row_that_is_not_whole_is_found.__name__}"
    assert problems(Claim("x", "y", "as said", "q", (here,))) == []
    assert problems(Claim("x", " ", "as said", "q", ())) == ["claim: ' '", "no test"]
    for test in (f"{here}_not", "tests/test_claims.py", "tests/no_file.py::test_x", "tests/test_claims.py::problems"):
        assert problems(Claim("x", "y", "as said", "q", (test,))) == [f"no test {test}"]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_calls_run(name: str) -> None:
    for claim in CLAIMS[name]:
        if not claim.shown.startswith(COMMANDS):
            q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 8, 4))
            try:
                exec(claim.shown, {"np": np, "ra": ra, "q": q, "k": k, "v": v})
            except Exception as error:
                raise AssertionError(f"{claim.shown}: {error!r}") from error


def resolved(line: str) -> tuple[list[str], click.Command, click.Context]:
    """Return the words of a command line, and its command with what it read of them."""
    words = shlex.split(line)
    if words[0] == "refattn":
        command: Any = cli
        rest = words[1:]
    else:
        module = importlib.import_module(words[2])
        command, rest = module.main, words[3:]
    context = command.make_context(words[0], list(rest))
    while isinstance(command, click.Group):
        left = [*context.protected_args, *context.args]
        _, command, left = command.resolve_command(context, left)
        assert command is not None
        context = command.make_context(command.name, left, parent=context)
    return words, command, context


def commands() -> list[Any]:
    lines = {claim.shown: None for many in CLAIMS.values() for claim in many if claim.shown.startswith(COMMANDS)}
    return list(lines)


def test_commands_are_read() -> None:
    for line in commands():
        words, command, context = resolved(line)
        for mechanism in (context.params.get("mechanism"), *context.params.get("mechanisms", ())):
            assert mechanism is None or mechanism in ra.list_mechanisms(), line
        if words[1] == "train":
            given = settings.parse(context.params["assignments"])
            settings.build(words[2], settings.merge({}, given))
