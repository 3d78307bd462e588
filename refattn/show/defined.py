"""What stands at the top of a page, by name, and how its statements are put together."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from refattn.show.nodes import walk


class Page:
    """The functions, classes and constants of a page.

    Attributes
    ----------
    top
        What stands at the top, by name.
    methods
        The methods of all classes, by name.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.top: dict[str, ast.stmt] = {}
        self.methods: dict[str, list[ast.FunctionDef]] = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.top[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.top[node.targets[0].id] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.top[node.target.id] = node
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef):
                    self.methods.setdefault(method.name, []).append(method)

    def line_of(self, kind: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """Yield a class and those that it is made from."""
        yield kind
        for base in kind.bases:
            known = self.top.get(base.id) if isinstance(base, ast.Name) else None
            if isinstance(known, ast.ClassDef):
                yield from self.line_of(known)

    def fields_of(self, kind: ast.ClassDef) -> dict[str, ast.expr | None]:
        """Return the fields of a dataclass with their defaults, in order."""
        found: dict[str, ast.expr | None] = {}
        for each in reversed([*self.line_of(kind)]):
            for node in each.body:
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                    found[ast.unparse(node.target)] = node.value
        return found


def pairs_of(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets with what they get, of ``a = x`` and ``a, b = x, y``."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    elif len(node.targets) == 1:
        yield target, value


def entries(node: ast.Dict) -> Iterator[tuple[Any, ast.expr]]:
    """Yield the keys of a dict that are constants, with the values."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant):
            yield key.value, value


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def jumps(node: ast.AST) -> bool:
    """Tell whether a loop is left, or a round of it, before its end."""
    return any(isinstance(each, ast.Break | ast.Continue) for each in walk(node))
