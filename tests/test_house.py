"""What a room looks like. docs/design.md has the rules; tests/test_definitions.py holds those of definitions.

R3  an option stands in one place     R5  the general code imports little     R7  an equation has a right-hand side
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
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism

ROOMS = Path(str(ra.__file__)).parent / "mechanisms"

OPTIONS = 16
"""The most options that a core may have."""

BORROWS = {"growing": "softmax"}
"""A room whose core is that of another one."""


@cache
def room_files(name: str) -> dict[str, ast.Module]:
    """The files of a room by their path in it."""
    room = ROOMS / name
    return {path.relative_to(room).as_posix(): ast.parse(path.read_text()) for path in sorted(room.rglob("*.py"))}


# --- the rules, each a function of a mechanism that returns what is wrong


def has_a_map(mechanism: Mechanism) -> Iterator[str]:
    files = room_files(mechanism.name)
    if "What to read" not in (ast.get_docstring(files["__init__.py"]) or ""):
        yield "__init__.py has no map: what to read, in which order"
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
        if default is None or option == "implementation":
            continue
        places = [path for path, tree in room_files(mechanism.name).items() for _ in _defaults(tree, option)]
        own = [path for path in places if not path.startswith("testing/") and path not in ("definition.py", "loops.py")]
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
    core = [m for m in mechanism.equation_modules if m not in (mechanism.block.module, *mechanism.block_modules)]
    expected = f"refattn.mechanisms.{owner}.dense"
    if [module.__name__ for module in core] != [expected]:
        yield f"the equations of the core stand in {', '.join(module.__name__ for module in core)}, not in {expected}"
    if owner != name:
        return
    if "dense.py" not in files:
        yield "there is no dense.py"
        return
    tree = files["dense.py"]
    for node in ast.walk(tree):
        modules = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            root = module.partition(".")[0]
            inside = module.startswith(("refattn.ops", "refattn.xp", f"refattn.mechanisms.{name}"))
            if root not in sys.stdlib_module_names and not inside and module != "refattn.mechanisms.record":
                yield f"dense.py imports {module}"


def has_right_hand_sides(mechanism: Mechanism) -> Iterator[str]:
    for id, text in mechanism.equations.items():
        formula = text.split("   ")[0]
        left, equals, right = formula.partition(" = ")
        if not (left and equals and right.strip()):
            yield f"{id} has no right-hand side: {text}"
        elif words := re.search(r"\b(through|every|likewise|the same way|and so on)\b", right):
            yield f"{id} is told in words ({words.group()}): {text}"


RULES = {
    "map": has_a_map,
    "R3": options_stand_once,
    "R5": defines,
    "R7": has_right_hand_sides,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_a_room_keeps_the_rules(name: str, rule: str) -> None:
    assert list(RULES[rule](ra.mechanism(name))) == []


def test_rooms_are_found() -> None:
    assert {name for name in ra.list_mechanisms() if registry.room(name)} == set(ra.list_mechanisms())
