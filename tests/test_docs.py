"""What the pages say is there: links, commands, names and paths exist, and examples give what they show.

What does not exist yet may be named on a line that says "planned".
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import refattn as ra
from refattn import model
from refattn.mechanisms.graph_energy import definition

ROOT = Path(__file__).resolve().parents[1]
# Pages below those of mechanisms are written from records when the documentation is built: see tests/docs/.
WRITTEN = {f"docs/mechanisms/{name}/{page}.md" for name in ra.list_mechanisms() for page in ("calls", "judged", "code")}
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / page for page in WRITTEN})

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Found(NamedTuple):
    """A piece of a page, with the line that it stands on."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def find(page: str, text: str, pattern: str) -> Iterator[Found]:
    """Yield the first group of each match whose line does not say "planned"."""
    lines = text.splitlines()
    for match in re.finditer(pattern, text, re.MULTILINE):
        number = text.count("\n", 0, match.start(1))
        if "planned" not in lines[number].lower():
            yield Found(page, number + 1, match[1])


def on_pages(pattern: str) -> list[Found]:
    return [found for page in PAGES for found in find(name_of(page), page.read_text(encoding="utf-8"), pattern)]


# --- links and paths


def test_relative_links_lead_somewhere() -> None:
    links = [found for found in on_pages(r"\]\(([^)\s]+)\)") if not re.match(r"[a-z]+:|#", found.text)]
    assert links
    written = {ROOT / page for page in WRITTEN}
    scripts = (ROOT / "docs" / "tutorials").glob("*.py")
    written |= {ROOT / "docs" / "learn" / f"{name}.rst" for name in ("index", *(path.stem for path in scripts))}
    leads = {found: (ROOT / found.page).parent.joinpath(found.text.partition("#")[0]).resolve() for found in links}
    assert [str(found) for found, path in leads.items() if not path.exists() and path not in written] == []


def test_paths_in_code_exist() -> None:
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    paths = on_pages(rf"`((?:{'|'.join(map(re.escape, folders))})/[\w./]*)(?::\w+)?`")
    assert paths
    # What git ignores is written by a command. NAME stands for one that the reader chooses.
    written = tuple(line for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/"))
    missing = [found for found in paths if "NAME" not in found.text and not (ROOT / found.text).exists()]
    assert [str(found) for found in missing if not f"{found.text}/".startswith(written)] == []


# --- names


def exists(name: str) -> bool:
    """Tell whether a dotted name leads from refattn to a module or an attribute."""
    value: object = ra
    path = "refattn"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if hasattr(value, part):
            value = getattr(value, part)
        elif getattr(value, "__path__", None) is not None and importlib.util.find_spec(path) is not None:
            value = importlib.import_module(path)
        else:
            return False
    return True


def test_public_names_exist() -> None:
    names = on_pages(r"\b((?:ra|(?<=`)refattn)\.[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
    assert {"ra.trace", "ra.softmax.forward"} <= {found.text for found in names}
    assert [str(found) for found in names if not exists(found.text)] == []


def test_public_functions_have_their_place() -> None:
    listed = set(re.findall(r"^\.\. auto\w+:: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert all(exists(name) for name in listed)
    face = {f"{home}.{name}" for name, home in ra._HOMES.items()}
    whole = face | {f"refattn.model.{name}" for name in model.__all__ if name != "Saved"}
    assert {"refattn.mechanisms.use_definition.trace", "refattn.model.backward"} <= whole
    assert sorted(whole - listed) == []


# --- commands


def commands() -> list[Found]:
    """Every command line of refattn: in backquotes, or as a line of a block."""
    found = on_pages(r"`refattn ([a-z-][^`\n]*)`")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            above = text.count("\n", 0, block.start(2))
            lines = find(name_of(page), block[2], r"^(?:\$ )?(?:[\w./-]*/)?refattn ([a-z-][^#|\n]*)")
            found += [line._replace(line=line.line + above) for line in lines]
    return found


def command_problem(line: str) -> str | None:
    """Say what is wrong with the arguments of a command line, or None."""
    import click
    from click.testing import CliRunner

    from refattn.cli import cli

    words = line.split()
    start = next((n for n, word in enumerate(words) if not word.startswith("-")), len(words))
    command, place = (cli, start) if start == len(words) else (cli.commands.get(words[start]), start + 1)
    if isinstance(command, click.Group) and words[place:] and words[place].islower() and words[place][0] != "-":
        command, place = command.commands.get(words[place]), place + 1
    name = " ".join(words[start:place])
    if command is None:
        return f"no command {name}"
    shown = CliRunner().invoke(cli, [*words[start:place], "--help"])
    if shown.exit_code:
        return f"--help exits with {shown.exit_code}"
    asked = (("refattn", cli, words[:start]), (name, command, words[place:]))
    for name, group, part in asked:
        known = {option for parameter in group.params for option in parameter.opts} | {"--help"}
        if unknown := set(re.findall(r"--[a-z][a-z0-9-]*", " ".join(part))) - known:
            return f"{name} has no {', '.join(sorted(unknown))}"
    return None


def test_commands_exist() -> None:
    found = commands()
    assert {"check", "verify"} <= {x.text.split()[0] for x in found}
    assert [f"{x}: {problem}" for x in found if (problem := command_problem(x.text)) is not None] == []


# --- examples


def examples() -> list[doctest.DocTest]:
    """Every docstring, and every page with its blocks one after the other, that has an example, to be run on its own.

    They are read from the text: doctest's own search passes over what a decorator has wrapped.
    """
    parser = doctest.DocTestParser()
    found = []
    files = [
        path
        for top in ("refattn", "backends")
        for path in (ROOT / top).rglob("*.py")
        if "refattn/backends" not in str(path)
    ]
    for path in sorted(files):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source if ">>>" in source else "")
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text, line = ast.get_docstring(node) or "", getattr(node, "lineno", 1)
                found.append(parser.get_doctest(text, {}, f"{name_of(path)}:{line}", str(path), line))
    for page in PAGES:
        text, blocks, read = page.read_text(encoding="utf-8"), "", 0
        for match in FENCE.finditer(text):
            # What stands between the blocks is left out, but for its lines: a failure is told with the page's own.
            blocks += "\n" * text.count("\n", read, match.start(2)) + match[2]
            read = match.end(2)
        found.append(parser.get_doctest(blocks, {}, name_of(page), str(page), 0))
    return [each for each in found if each.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_examples_give_what_they_show(example: doctest.DocTest) -> None:
    told: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=told.append)
    assert result.attempted and not result.failed, "".join(told)


def test_examples_are_found() -> None:
    names = [example.name.partition(":")[0] for example in examples()]
    assert {"refattn/equations.py", "refattn/mechanisms/softmax/core.py", "docs/design.md"} <= set(names)


def test_the_comments_beside_the_call_of_graph_energy_are_what_it_gives() -> None:
    """Scores below tau are dropped: their tokens are not read, and the scores themselves stay as they are."""
    page = (ROOT / "docs/mechanisms/graph_energy.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    given: dict[str, Any] = {"np": np, "ra": ra}
    exec(code, given)
    scores = given["saved"].scores
    tau = inspect.signature(definition.forward).parameters["tau"].default
    assert f"# out: {given['out'].shape}" in code and np.all(scores > 0.0)
    below = f"{np.sum(scores < tau)} of {scores.size} are below {tau:g}, and dropped"
    assert f"# {scores.shape}: the score of each token when the flow ends; {below}" in code
    with ra.trace() as values:
        ra.graph_energy.forward(given["q"], given["k"], given["v"])
    assert np.sum(values["GE.9"] == 0.0) == np.sum(scores < tau)


def test_the_trace_is_shown_as_it_is_printed() -> None:
    from refattn.backends import get
    from refattn.verify import traced
    from refattn.verify.report import trace as traced_text

    page = (ROOT / "docs" / "trace.md").read_text(encoding="utf-8")
    (block,) = (match[2] for match in FENCE.finditer(page) if match[1] == "text")
    mechanism, backend = ra.mechanism("softmax"), get("numpy")
    printed = traced_text.text(
        traced.record(mechanism, traced.read_run(mechanism, "tiny", "float64", backend), backend)
    )
    assert block.endswith("       ...\n") and block.removesuffix("       ...\n") in printed
    assert f"whole up to {traced_text.WHOLE} elements" in page


# --- the text of all files


def test_no_file_names_a_place_on_one_machine() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    places = ("/" + "work/", "../" + "shared")
    found = []
    for path in (ROOT / name for name in listed.split("\0") if name):
        if not path.is_file() or b"\0" in (data := path.read_bytes()):
            continue
        text = data.decode("utf-8", "replace")
        found += [f"{name_of(path)}: {place}" for place in places if place in text]
    assert found == []
