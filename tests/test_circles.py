"""No file imports itself by way of others: the imports of the whole tree have no circle."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TREES = ("refattn", "backends", "asv_benchmarks", "tests", "tools", "docs", "examples")

IMPORT = re.compile(r"^[ \t]*(from [\w.]+ import (\(([^)#]|#.*)*\)|[\w.,* ]+)|import [\w., ]+)", re.MULTILINE)


def modules() -> dict[str, Path]:
    """Return every file by the name that it is imported under; backends/ is refattn.backends."""
    found = {}
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] != ("refattn", "backends"):
                parts = ("refattn", *parts) if tree == "backends" else parts
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(text: str) -> Iterator[ast.stmt]:
    """Return the statements that import, by their words: to read all files as trees takes many times as long."""
    for found in IMPORT.finditer(text):
        yield from ast.parse(textwrap.dedent(found[0])).body


def imported(module: str, path: Path, known: Set[str]) -> set[str]:
    """Return the modules that a file imports by name, also inside functions and for types alone.

    `from package import module` is an import of the module where there is one, and of the package otherwise.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in imports(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            within = {f"{base}.{alias.name}" for alias in node.names}
            found |= within & known | ({base} if within - known else set())
    return found & known - {module}  # an example in its docstring imports it


def circles(edges: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Return the modules that reach themselves, those of one circle together."""
    reach = {name: {*near} for name, near in edges.items()}
    for middle in reach:
        for name, known in reach.items():
            if middle in known:
                reach[name] = known | reach[middle]
    inside = [name for name in reach if name in reach[name]]
    return sorted({tuple(sorted(n for n in inside if n in reach[m] and m in reach[n])) for m in inside})


def test_no_import_comes_back_to_its_file() -> None:
    known = modules()
    edges = {name: imported(name, path, known.keys()) for name, path in known.items()}
    assert len(edges) > 300 and sum(map(len, edges.values())) > 1000
    assert circles(edges) == []


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "b", "b": "a", "c": "a"}, [("a", "b")]),
        ({"a": "a"}, [("a",)]),
        ({"a": "b", "b": "c", "c": "ad", "d": "e", "e": "d"}, [("a", "b", "c"), ("d", "e")]),
    ],
)
def test_a_circle_is_found(edges: Mapping[str, str], found: list[tuple[str, ...]]) -> None:
    assert circles(edges) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import p.a", {"p.a"}),
        ("from p import a", {"p.a"}),
        ("from p import name", {"p"}),
        ("from p import a, name", {"p", "p.a"}),
        ("from p.a import name", {"p.a"}),
        ("from .a import name", {"p.a"}),
        ("from . import a", {"p.a"}),
        ("def f():\n    from p import a", {"p.a"}),
        ("if TYPE_CHECKING:\n    from p import a", {"p.a"}),
        ("import numpy", set()),
    ],
)
def test_what_a_file_imports(text: str, found: set[str], tmp_path: Path) -> None:
    file = tmp_path / "b.py"
    file.write_text(text)
    assert imported("p.b", file, {"p", "p.a", "p.b"}) == found
