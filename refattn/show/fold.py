"""A page folded by what is known of it: tests that are decided, loops of one round, functions of one line, dead values.

Each function here changes a tree and keeps what it computes, to the last bit, for all arguments that the facts are true
of. Statements keep their comments.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from refattn.show.commented import kept_of, like, set_kept, statements
from refattn.show.known import Reader
from refattn.show.layout import WIDTH
from refattn.show.values import Constant, Function, Row, Value, truth

SIMPLE = (ast.Name, ast.Attribute, ast.Constant)
SHORT = 72
"""Characters of an expression that is written out in more than one place."""


class Folded(ast.NodeTransformer):
    """Takes the branch of each test that is decided, and writes what is always the same where it is read."""

    def __init__(self, reader: Reader) -> None:
        self.fact, self.top = reader.fact, reader.top

    def visit_If(self, node: ast.If) -> Any:
        known = self._truth(node.test)
        if known is None:
            self.generic_visit(node)
            if not node.body:
                node.body = [ast.Pass()]
            return node
        kept = self._bodies(node.body if known else node.orelse)
        if kept and kept_of(node).above:
            first = kept_of(kept[0])
            set_kept(kept[0], first)
            first.above[:0] = kept_of(node).above
        if kept:
            kept_of(kept[0]).gap |= kept_of(node).gap
        return kept

    def visit_For(self, node: ast.For) -> Any:
        row = self.fact(node.iter)
        value = literal(row.parts[0]) if isinstance(row, Row) and len(row.parts) == 1 else None
        jumps = any(isinstance(each, ast.Break | ast.Continue) for each in ast.walk(node))
        if value is None or jumps or node.orelse:
            return self.generic_visit(node)
        first = like(ast.Assign([node.target], value), node)
        kept_of(first).beside = ""
        return [ast.fix_missing_locations(first), *self._bodies(node.body)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.generic_visit(node)
        node.body = reached(node.body)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        known = self._truth(node.test)
        return self.generic_visit(node) if known is None else self.visit(node.body if known else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        last = isinstance(node.op, ast.Or)
        kept = [part for part in node.values[:-1] if self._truth(part) is not (not last)] + node.values[-1:]
        node.values = [self.visit(part) for part in kept]
        return node if len(kept) > 1 else node.values[0]

    def visit_Name(self, node: ast.Name) -> Any:
        return self._replaced(node, (bool, str, int) if node.id not in self.top else (bool, str))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        new = self._replaced(node, (bool, str))
        return self.generic_visit(node) if new is node else new

    def visit_Compare(self, node: ast.Compare) -> Any:
        new = self._replaced(node, (bool,))
        return self.generic_visit(node) if new is node else new

    def visit_Call(self, node: ast.Call) -> Any:
        fact = self.fact(node.func)
        asks = isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "len")
        if asks or (isinstance(node.func, ast.Attribute) and node.func.attr == "get"):
            new = self._replaced(node, (bool, str, int))
            if new is not node:
                return new
        self.generic_visit(node)
        if isinstance(fact, Function) and isinstance(fact.node, ast.Lambda) and not isinstance(node.func, ast.Lambda):
            own = {each.arg for each in fact.node.args.args}
            free = {each.id for each in ast.walk(fact.node.body) if isinstance(each, ast.Name)} - own
            if not free & {*fact.around}:
                return applied(fact.node, node) or node
        elif isinstance(fact, Function) and isinstance(fact.node, ast.FunctionDef) and fact.bound is None:
            if isinstance(node.func, ast.Attribute) and self.top.get(fact.node.name) is fact.node:
                node.func = ast.copy_location(ast.Name(fact.node.name, ast.Load()), node.func)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return node

    def _truth(self, node: ast.expr) -> bool | None:
        value = self.fact(node)
        return None if value is None else truth(value)

    def _replaced(self, node: ast.expr, kinds: tuple[type, ...]) -> ast.expr:
        """Return a constant for an expression that is always the same, None or of these classes."""
        value = self.fact(node)
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load) or not isinstance(value, Constant):
            return node
        if value.value is not None and type(value.value) not in kinds:
            return node
        return ast.copy_location(ast.Constant(value.value), node)

    def _bodies(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for node in body:
            new = self.visit(node)
            found += new if isinstance(new, list) else [new]
        return found


def literal(value: Value) -> ast.expr | None:
    """Return the expression for a constant, or a tuple of constants; None for other values."""
    if isinstance(value, Constant):
        return ast.Constant(value.value)
    parts = [literal(part) for part in value.parts] if isinstance(value, Row) else [None]
    return ast.Tuple([part for part in parts if part], ast.Load()) if all(parts) else None


def reached(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements up to the one that returns."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.Return | ast.Raise):
            break
    return found or [ast.Pass()]


def applied(function: ast.Lambda | ast.FunctionDef, call: ast.Call) -> ast.expr | None:
    """Return what a function of one expression gives for the arguments of a call; None where it cannot be said."""
    body = function.body if isinstance(function, ast.Lambda) else cast(ast.Return, function.body[-1]).value
    arguments = function.args
    if arguments.vararg or arguments.kwarg or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    names = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
    usual = dict(zip([each.arg for each in arguments.args][::-1], arguments.defaults[::-1], strict=False))
    given = usual | dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if any(keyword.arg is None for keyword in call.keywords) or not {*names} <= {*given} or body is None:
        return None
    read = [node.id for node in ast.walk(body) if isinstance(node, ast.Name)]
    inner = {node.arg for node in ast.walk(body) if isinstance(node, ast.arg)}
    if inner or any(isinstance(node, ast.comprehension | ast.NamedExpr) for node in ast.walk(body)):
        return None
    if any(read.count(name) > 1 and not isinstance(given[name], SIMPLE) for name in names):
        return None
    return ast.copy_location(Named(given).visit(copy.deepcopy(body)), call)


class Named(ast.NodeTransformer):
    """Writes expressions in place of names."""

    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self.given = given

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.given[node.id]) if node.id in self.given and isinstance(node.ctx, ast.Load) else node


# Functions of one expression


def write_out(tree: ast.Module, roots: Sequence[str]) -> None:
    """Write functions that return one expression where they are called, if that is short or there is one such place."""
    loads = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    known: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in roots and _is_one(node):
            short = len(ast.unparse(cast(ast.Return, node.body[-1]))) <= SHORT
            own = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            if (short or loads.count(node.name) == 1) and node.name not in own:
                known[node.name] = node
    for top in tree.body:
        if getattr(top, "name", "") not in known:
            _Written(known).visit(top)


def _is_one(node: ast.FunctionDef) -> bool:
    return len(node.body) == 2 and isinstance(node.body[-1], ast.Return) and node.body[-1].value is not None


class _Written(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, ast.FunctionDef]) -> None:
        self.known = known
        self.local: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        before = self.local
        self.local = before | local_names(node)
        self.generic_visit(node)
        self.local = before
        return node

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and not getattr(node, "body", None):
            old = copy.deepcopy(node)
            super().generic_visit(node)
            beside = kept_of(node).beside
            length = len(ast.unparse(node)) + node.col_offset + len(f"  {beside}" if beside else "")
            if length > WIDTH and ast.dump(old) != ast.dump(node):
                return old
            return node
        return super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id not in self.known or node.func.id in self.local:
            return node
        function = self.known[node.func.id]
        own = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
        free = {each.id for each in ast.walk(function.body[-1]) if isinstance(each, ast.Name)} - own
        return node if free & self.local else applied(function, node) or node


def local_names(node: ast.FunctionDef) -> set[str]:
    """Return the names that a function, or one in it, gives to something."""
    stored = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return stored | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


# What nobody reads


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
            nodes = [each for part in inside for each in ast.walk(part)]
            found |= {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
        if found == needed:
            break
        needed = found
    _Dropped(needed).visit(function)


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
        return None if isinstance(node.target, ast.Name) and node.target.id not in self.needed else node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        names = _targets(node)
        if len(node.targets) == 1 and ast.unparse(node.targets[0]) == ast.unparse(node.value):
            return None
        if names is None or names <= self.needed:
            return node
        if not names & self.needed:
            return None
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
