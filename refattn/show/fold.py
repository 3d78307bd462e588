"""A page folded by what is known of it: tests that are decided, loops of one round, functions of one line, dead values.

Each function here changes a tree and keeps what it computes, to the last bit, for all arguments that the facts are true
of. Statements keep their comments.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from refattn.show.commented import kept_of, like, set_kept
from refattn.show.known import Reader
from refattn.show.layout import WIDTH
from refattn.show.nodes import walk
from refattn.show.values import ANY, Constant, Function, Row, Value, is_something, truth

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
        jumps = any(isinstance(each, ast.Break | ast.Continue) for each in walk(node))
        if value is None or jumps or node.orelse:
            return self.generic_visit(node)
        first = like(ast.Assign([node.target], value), node)
        kept_of(first).beside = ""
        return [ast.fix_missing_locations(first), *self._bodies(node.body)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.generic_visit(node)
        node.body = reached(node.body)
        return node

    def visit_Try(self, node: ast.Try) -> Any:
        """Leave out what is done after errors."""
        return self._bodies(node.body)

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
        branch = self._branch(fact.node, node) if isinstance(fact, Function) else None
        if branch is not None:
            return self.visit(branch)
        self.generic_visit(node)
        if isinstance(fact, Function) and isinstance(fact.node, ast.Lambda) and not isinstance(node.func, ast.Lambda):
            own = {each.arg for each in fact.node.args.args}
            free = {each.id for each in walk(fact.node.body) if isinstance(each, ast.Name)} - own
            if not free & {*fact.around}:
                return applied(fact.node, node) or node
        elif isinstance(fact, Function) and isinstance(fact.node, ast.FunctionDef) and fact.bound is None:
            if isinstance(node.func, ast.Attribute) and self.top.get(fact.node.name) is fact.node:
                node.func = ast.copy_location(ast.Name(fact.node.name, ast.Load()), node.func)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        new = self._replaced(node, (bool,))
        return self.generic_visit(node) if new is node else new

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        """Leave out what adds nothing: ``*()``."""
        rows = [self.fact(each.value) if isinstance(each, ast.Starred) else None for each in node.elts]
        node.elts = [x for x, row in zip(node.elts, rows, strict=True) if not (isinstance(row, Row) and not row.parts)]
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return node

    def _branch(self, function: ast.FunctionDef | ast.Lambda, call: ast.Call) -> ast.expr | None:
        """Return what a function gives that asks which of its arguments are None, where that is known at a call."""
        if not isinstance(function, ast.FunctionDef) or not is_one(function) or call.keywords:
            return None
        body = cast(ast.Return, function.body[-1]).value
        given = dict(zip([each.arg for each in function.args.args], call.args, strict=False))
        found = body
        while isinstance(found, ast.IfExp):
            test = found.test
            if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name) or test.left.id not in given:
                break
            value, is_none = self.fact(given[test.left.id]), isinstance(test.ops[0], ast.Is)
            if ast.unparse(test.comparators[0]) != "None" or value is None or value == ANY:
                break
            found = found.body if is_something(value) is not is_none else found.orelse
        if found is body or found is None:
            return None
        free = {each.id for each in walk(found) if isinstance(each, ast.Name)} - {*given, "np", "math"}
        return None if free else applied(ast.Lambda(function.args, found), call)

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
    if arguments.kwarg or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    if arguments.vararg is not None:
        return _with_more(arguments, body, call)
    names = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
    usual = dict(zip([each.arg for each in arguments.args][::-1], arguments.defaults[::-1], strict=False))
    given = usual | dict(zip(names, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if any(keyword.arg is None for keyword in call.keywords) or not {*names} <= {*given} or body is None:
        return None
    read = [node.id for node in walk(body) if isinstance(node, ast.Name)]
    inner = {node.arg for node in walk(body) if isinstance(node, ast.arg)}
    if inner or any(isinstance(node, ast.comprehension | ast.NamedExpr) for node in walk(body)):
        return None
    if any(read.count(name) > 1 and not _is_cheap(given[name]) for name in names):
        return None
    return ast.copy_location(Named(given).visit(copy.deepcopy(body)), call)


def _is_cheap(node: ast.expr) -> bool:
    """Tell whether an expression may stand in several places: a name, a constant, a size."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return isinstance(node, SIMPLE)


def _with_more(arguments: ast.arguments, body: ast.expr | None, call: ast.Call) -> ast.expr | None:
    """Return what a function of ``*arguments`` gives that does no more than to hand these on."""
    if not isinstance(body, ast.Call) or call.keywords or body.keywords or arguments.vararg is None:
        return None
    places = [each.arg for each in arguments.args]
    whole = [each.value.id for each in body.args if isinstance(each, ast.Starred) and isinstance(each.value, ast.Name)]
    if whole != [arguments.vararg.arg] or len(body.args) != 1 or not all(isinstance(x, SIMPLE) for x in call.args):
        return None
    given = dict(zip(places, call.args, strict=False))
    function = Named(given).visit(copy.deepcopy(body.func))
    return ast.copy_location(ast.Call(function, call.args[len(places) :], []), call)


class Named(ast.NodeTransformer):
    """Writes expressions in place of names."""

    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self.given = given

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.given[node.id]) if node.id in self.given and isinstance(node.ctx, ast.Load) else node


# Functions of one expression


def write_out(tree: ast.Module, roots: Sequence[str]) -> None:
    """Write functions that return one expression where they are called, if that is short or there is one such place."""
    loads = [node.id for node in walk(tree) if isinstance(node, ast.Name)]
    known: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in roots and is_one(node):
            short = len(ast.unparse(cast(ast.Return, node.body[-1]))) <= SHORT
            own = {each.id for each in walk(node) if isinstance(each, ast.Name)}
            if (short or loads.count(node.name) == 1) and node.name not in own:
                known[node.name] = node
    for top in tree.body:
        if getattr(top, "name", "") not in known:
            _Written(known).visit(top)


def is_one(node: ast.FunctionDef) -> bool:
    """Tell whether a function is one expression, below what it says of itself."""
    whole = len(node.body) == 1 + (ast.get_docstring(node) is not None)
    return whole and isinstance(node.body[-1], ast.Return) and node.body[-1].value is not None


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
        own = {each.arg for each in walk(function) if isinstance(each, ast.arg)}
        free = {each.id for each in walk(function.body[-1]) if isinstance(each, ast.Name)} - own
        return node if free & self.local else applied(function, node) or node


def local_names(node: ast.FunctionDef) -> set[str]:
    """Return the names that a function, or one in it, gives to something."""
    stored = {each.id for each in walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return stored | {each.arg for each in walk(node) if isinstance(each, ast.arg)}
