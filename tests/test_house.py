"""The house: how far a reader has to go to an equation, and what a room looks like. docs/design.md has the rules.

R1  a call enters few files           R4  a file is one idea              R7  an equation has a right-hand side
R2  a room shows its order            R5  definitions define
R3  an option stands in one place     R6  a line is not there for the engine
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import refattn as ra
from refattn import equations
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from tools.reading import ROOMS, Reading, measure, table

ROOT = Path(__file__).parents[1]

CORE_FILES, BLOCK_FILES, TOP_FILES, OPTIONS, LINES = 4, 7, 8, 16, 500

BORROWS = {"growing": "softmax"}
"""A room whose core is that of another one."""


@cache
def reading_of(name: str) -> Reading:
    return measure(ra.mechanism(name))


@cache
def room_files(name: str) -> dict[str, ast.Module]:
    """The files of a room by their path in it."""
    room = ROOMS / name
    return {path.relative_to(room).as_posix(): ast.parse(path.read_text()) for path in sorted(room.rglob("*.py"))}


def imports_of(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports: of ``from a import b`` both a and a.b, as b may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name: str, tree: ast.Module, files: dict[str, ast.Module]) -> set[str]:
    """The files of its room that a file imports, by their path in it."""
    prefix = f"refattn.mechanisms.{name}."
    named = {module.removeprefix(prefix).replace(".", "/") + ".py" for module in imports_of(tree)}
    return named & set(files)


# --- the rules, each a function of a mechanism that returns what is wrong


def few_files(mechanism: Mechanism) -> Iterator[str]:
    found = reading_of(mechanism.name)
    for call, most in (("forward", CORE_FILES), ("backward", CORE_FILES), ("block", BLOCK_FILES)):
        files = getattr(found, call)
        if len(files) > most:
            yield f"{call} enters {len(files)} files of the room, at most {most}: {', '.join(files)}"


def shows_its_order(mechanism: Mechanism) -> Iterator[str]:
    files = room_files(mechanism.name)
    top = [path for path in files if "/" not in path]
    if len(top) > TOP_FILES:
        yield f"{len(top)} files at the top, at most {TOP_FILES}: {', '.join(top)}"
    words = ast.get_docstring(files["__init__.py"]) or ""
    if "What to read" not in words:
        yield "__init__.py has no map: what to read, in which order"
    for path in top:
        below = {found for found in own_imports(mechanism.name, files[path], files) if "/" in found}
        if below and path not in ("__init__.py", "core.py"):
            yield f"{path} imports {', '.join(sorted(below))}, and stands above"
    for path, tree in files.items():
        if path.endswith("__init__.py") and not ast.get_docstring(tree):
            yield f"{path} does not say what its folder holds"


def options_stand_once(mechanism: Mechanism) -> Iterator[str]:
    assert mechanism.core is not None
    parameters = inspect.signature(mechanism.core.forward).parameters.values()
    options = {option.name: option.default for option in parameters if option.kind is option.KEYWORD_ONLY}
    if len(options) > OPTIONS:
        yield f"the core has {len(options)} options, at most {OPTIONS}"
    if dict(mechanism.defaults) != options:
        yield "the record's defaults are not those of the core's signature"
    for option, default in options.items():
        if default is None or option == "form":
            continue
        places = [path for path, tree in room_files(mechanism.name).items() for _ in _defaults(tree, option)]
        own = [path for path in places if not path.startswith("judge/")]
        if len(own) > 1:
            yield f"{option} has a default of its own in {', '.join(own)}"


def _defaults(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    """The literal defaults, None apart, that parameters and fields of this name have."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.FunctionDef):
            positional = [*node.args.posonlyargs, *node.args.args]
            last = positional[len(positional) - len(node.args.defaults) :]
            pairs += [(a.arg, value) for a, value in zip(last, node.args.defaults, strict=True)]
            pairs += [(a.arg, value) for a, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        elif isinstance(node, ast.ClassDef):
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            pairs += [(ast.unparse(field.target), field.value) for field in fields]
        for found, value in pairs:
            if found == name and isinstance(value, ast.Constant) and value.value is not None:
                yield value


def defines(mechanism: Mechanism) -> Iterator[str]:
    name, files = mechanism.name, room_files(mechanism.name)
    owner = BORROWS.get(name, name)
    core = [m for m in mechanism.tagged if m not in (mechanism.block.module, *mechanism.around)]
    expected = f"refattn.mechanisms.{owner}.dense"
    if [module.__name__ for module in core] != [expected]:
        yield f"the equations of the core stand in {', '.join(module.__name__ for module in core)}, not in {expected}"
    if owner != name:
        return
    if "dense.py" not in files:
        yield "there is no dense.py"
        return
    tree = files["dense.py"]
    own = own_imports(name, tree, files)
    if len(own) > 2:
        yield f"dense.py imports {len(own)} files of the room, at most 2: {', '.join(sorted(own))}"
    for node in ast.walk(tree):
        modules = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            root = module.partition(".")[0]
            inside = module.startswith(("refattn.ops", "refattn.xp", f"refattn.mechanisms.{name}"))
            if root not in sys.stdlib_module_names and not inside and module != "refattn.mechanisms.record":
                yield f"dense.py imports {module}"


def lines_are_no_names(mechanism: Mechanism) -> Iterator[str]:
    for module in mechanism.tagged:
        if module.__name__.split(".")[2] != mechanism.name:
            continue
        claims = {tag.line: tag for tag in equations.tags(module) if tag.claims}
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.lineno in claims:
                tag = claims[node.lineno]
                yield f"{module.__name__}:{node.lineno}: {tag.name} is another name of {node.value.id}, for {tag.id}"
    for path in (ROOMS / mechanism.name).rglob("*.py"):
        if "untagged" in path.read_text():
            yield f"{path.name} speaks of what is untagged"


def has_right_hand_sides(mechanism: Mechanism) -> Iterator[str]:
    for id, text in mechanism.equations.items():
        formula = text.split("   ")[0]
        left, equals, right = formula.partition(" = ")
        if not (left and equals and right.strip()):
            yield f"{id} has no right-hand side: {text}"
        elif words := re.search(r"\b(through|every|likewise|the same way|and so on)\b", right):
            yield f"{id} is told in words ({words.group()}): {text}"


RULES = {
    "R1": few_files,
    "R2": shows_its_order,
    "R3": options_stand_once,
    "R5": defines,
    "R6": lines_are_no_names,
    "R7": has_right_hand_sides,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_room_keeps_the_rules(name: str, rule: str) -> None:
    assert list(RULES[rule](ra.mechanism(name))) == []


def test_a_file_is_one_idea() -> None:
    """R4: five hundred lines are the most that anybody should have to scroll."""
    found = {path: len(path.read_text().splitlines()) for top in ("refattn", "backends") for path in files_of(top)}
    assert {path.relative_to(ROOT).as_posix(): n for path, n in found.items() if n > LINES} == {}


def files_of(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


def test_the_documentation_shows_the_table() -> None:
    """Lines apart, which change from day to day."""

    def without_lines(text: str) -> list[list[str]]:
        rows = [[cell.strip() for cell in row.split("|")] for row in text.splitlines() if row.startswith("|")]
        return [[cell for n, cell in enumerate(row) if n != 4] for row in rows]

    measured = table([reading_of(name) for name in ra.list_mechanisms()])
    shown = (ROOT / "docs" / "design.md").read_text()
    start = shown.index(measured.splitlines()[0])
    assert without_lines(shown[start:].partition("\n\n")[0]) == without_lines(measured)


def test_rooms_are_found() -> None:
    assert {name for name in ra.list_mechanisms() if registry.room(name)} == set(ra.list_mechanisms())
    assert reading_of("softmax").forward == ("core.py", "options.py", "dense.py")
