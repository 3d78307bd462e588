"""What a file imports, read from its text: nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import resolve_name


@dataclass(frozen=True)
class Import:
    """An import of a module.

    Attributes
    ----------
    inside
        Whether it is in a function, so that it waits for a call.
    typing
        Whether it is under ``if TYPE_CHECKING``, so that it never happens.
    """

    line: int
    module: str
    inside: bool
    typing: bool


def imports(tree: ast.Module, modules: Container[str], package: str | None = None) -> Iterator[Import]:
    """Yield all imports of a file; ``from package import module`` counts as the module where there is one.

    Parameters
    ----------
    modules
        The names of the modules that there are.
    package
        The package of the file, from which relative imports count.
    """
    for node, inside, typing in _statements(tree.body, False, False):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), package)
            within = [f"{home}.{alias.name}" for alias in node.names]
            names = [name if name in modules else home for name in within]
        else:
            continue
        for name in names:
            yield Import(node.lineno, name, inside, typing)


def _statements(body: Iterable[ast.AST], inside: bool, typing: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Yield all statements, whether each is in a function, and whether it is for type checkers alone."""
    for node in body:
        if isinstance(node, ast.expr):  # which has no statements, and most nodes
            continue
        yield node, inside, typing
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _statements(node.body, within, True)
            yield from _statements(node.orelse, within, typing)
        else:
            yield from _statements(ast.iter_child_nodes(node), within, typing)
