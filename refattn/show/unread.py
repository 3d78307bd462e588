"""Values that nobody reads, and names that only stand for others, dropped from a function of a page."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from refattn.show.commented import BODIES, kept_of, like, statements
from refattn.show.defined import pairs_of
from refattn.show.fold import Named
from refattn.show.nodes import walk


def drop_stores(function: ast.FunctionDef) -> None:
    """Drop values that are given to a name before the next value is, and not read between."""
    for block in _blocks(function):
        for at, node in enumerate(block):
            lost = {name for name in _targets(node) or () if _is_lost(name, block[at + 1 :])}
            if lost:
                block[at] = _Dropped((_targets(node) or set()) - lost).visit(node)
        _swept(block)


def _is_lost(name: str, later: Sequence[ast.stmt]) -> bool:
    for node in later:
        if any(
            isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Load) for each in walk(node)
        ):
            return False
        if name in (_targets(node) or ()):
            return True
        if any(isinstance(each, ast.Return | ast.Break | ast.Continue | ast.FunctionDef) for each in walk(node)):
            return False
    return False


def drop_aliases(function: ast.FunctionDef) -> None:
    """Read a name in place of another that is given to it, where no equation has the name."""
    stores: dict[str, int] = {}
    for each in walk(function):
        name = each.id if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) else None
        name = each.arg if isinstance(each, ast.arg) else name
        if name is not None:
            stores[name] = stores.get(name, 0) + 1
    for block in _blocks(function):
        for at, node in enumerate(block):
            for target, value in _aliases(node):
                inside = [each for later in block[at + 1 :] for each in walk(later) if isinstance(each, ast.Name)]
                whole = [each for each in walk(function) if isinstance(each, ast.Name)]
                reads = [each for each in inside if each.id == target and isinstance(each.ctx, ast.Load)]
                everywhere = [each for each in whole if each.id == target and isinstance(each.ctx, ast.Load)]
                moved = any(each.id == value and isinstance(each.ctx, ast.Store) for each in inside)
                if stores.get(target) == 1 and len(reads) == len(everywhere) and not moved:
                    for each in reads:
                        each.id = value
    _drop_places(function, stores)


def _drop_places(function: ast.FunctionDef, stores: Mapping[str, int]) -> None:
    """Read a field where it is read once under another name, and under one name where it has two."""
    arguments = {each.arg for each in walk(function.args) if isinstance(each, ast.arg)}
    first: dict[str, str] = {}
    given: dict[str, ast.expr] = {}
    for node in function.body:
        for target, value in pairs_of(node) if isinstance(node, ast.Assign) else ():
            place = isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name)
            if not place or not isinstance(target, ast.Name) or stores.get(target.id) != 1:
                continue
            root = cast(ast.Name, cast(ast.Attribute, value).value).id
            if root not in arguments or stores.get(root) != 1 or "[" in kept_of(node).beside:
                continue
            reads = [each.id for each in walk(function) if isinstance(each, ast.Name)].count(target.id) - 1
            twin = first.setdefault(ast.unparse(value), target.id)
            if twin != target.id:
                given[target.id] = ast.Name(twin, ast.Load())
            elif reads == 1 and not isinstance(cast(ast.Assign, node).targets[0], ast.Tuple):
                given[target.id] = value
    Named(given).visit(function)


def _aliases(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the names that a statement gives to names, but not those of equations."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs = [*zip(target.elts, value.elts, strict=True)]
        if "[" not in kept_of(node).beside:
            for left, right in pairs:
                if isinstance(left, ast.Name) and isinstance(right, ast.Name):
                    yield left.id, right.id


def _blocks(function: ast.FunctionDef) -> list[list[ast.stmt]]:
    """Return the lists of statements of a function, those of functions in it excepted."""
    found = [function.body]
    for node in function.body:
        todo = [node]
        while todo:
            each = todo.pop()
            if not isinstance(each, ast.FunctionDef | ast.ClassDef):
                parts = [part for name in BODIES if (part := getattr(each, name, None))]
                found += parts
                todo += [inner for part in parts for inner in part]
    return found


def drop_values(function: ast.FunctionDef) -> None:
    """Drop the assignments to names that are read for nothing, or for such names alone."""
    needed: set[str] = set()
    while True:
        found = set(needed)
        for node in statements(function):
            targets = _targets(node)
            if node is function or (targets is not None and not targets & found):
                continue
            inside = [node] if targets is not None else _heads(node)
            nodes = [each for part in inside for each in walk(part)]
            found |= {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
        if found == needed:
            break
        needed = found
    _Dropped(needed).visit(function)
    for block in _blocks(function):
        _swept(block)


class _Gone(ast.Pass):
    """What is left of a statement that was dropped, until what stands above it has moved on."""


def _gone(node: ast.stmt) -> ast.stmt:
    return like(_Gone(), node)


def _swept(block: list[ast.stmt]) -> None:
    """Take out what is gone; what is said above it of the forward is said above what follows."""
    told: list[str] = []
    found: list[ast.stmt] = []
    for node in block:
        above = kept_of(node).above
        if isinstance(node, _Gone):
            told += [line for line in above if line.startswith("# forward:")]
        else:
            if told:
                above[:0] = [line for line in told if line not in above]
            told = []
            found.append(node)
    block[:] = found or [ast.Pass()]


def _targets(node: ast.stmt) -> set[str] | None:
    """Return the names that a statement does nothing but give values to; None where it does more."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if not isinstance(node, ast.Assign):
        return None
    names: set[str] = set()
    for target in node.targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(part, ast.Name) for part in parts):
            return None
        names |= {part.id for part in parts if isinstance(part, ast.Name)}
    return names


def _heads(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield the parts of a statement that are no statements."""
    return (part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt))


class _Dropped(ast.NodeTransformer):
    def __init__(self, needed: set[str]) -> None:
        self.needed = needed

    def generic_visit(self, node: ast.AST) -> Any:
        super().generic_visit(node)
        if isinstance(node, ast.stmt) and getattr(node, "body", None) == []:
            cast(Any, node).body = [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        return _gone(node) if isinstance(node.target, ast.Name) and node.target.id not in self.needed else node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        names = _targets(node)
        if len(node.targets) == 1 and ast.unparse(node.targets[0]) == ast.unparse(node.value):
            return _gone(node)
        if names is None or names <= self.needed:
            return node
        if not names & self.needed:
            return _gone(node)
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple) and len(node.targets) == 1:
            pairs = [*zip(node.targets[0].elts, node.value.elts, strict=True)]
            return _fewer(node, [n for n, (part, _) in enumerate(pairs) if cast(ast.Name, part).id in self.needed])
        node.targets = [each for each in node.targets if not isinstance(each, ast.Name) or each.id in self.needed]
        return node


def _fewer(node: ast.Assign, places: Sequence[int]) -> ast.Assign:
    """Return ``a, b = x, y`` for some of the names, with what the comment says of these."""
    left, right = (cast(ast.Tuple, part).elts for part in (node.targets[0], node.value))
    kept = kept_of(node)
    told = _told(kept.beside)
    if len(told) == len(left):
        new = [told[n] for n in places]
        kept.beside = "" if all(part in ("-", "") for part in new) else f"# {', '.join(new)}"
    one = len(places) == 1
    node.targets = [left[places[0]] if one else ast.Tuple([left[n] for n in places], ast.Store())]
    node.value = right[places[0]] if one else ast.Tuple([right[n] for n in places], ast.Load())
    return node


def _told(comment: str) -> list[str]:
    """Return the parts of a comment, by its commas that are in no brackets."""
    found, depth = [""], 0
    for sign in comment.removeprefix("#").strip():
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            found.append("")
        else:
            found[-1] += sign
    return [part.strip() for part in found]
