"""What is known at each place of a page when its functions are called with some arguments, found without running it.

`Reader.call` follows a call through the page: a test that is decided takes one branch, any other both; a loop goes
round until nothing new is known. `Reader.fact` tells what was seen of an expression in all calls and all rounds.
Nothing is assumed of what is not followed: a function that is handed on to NumPy or put into a list may be called with
anything.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refattn.show.defined import Page, entries, is_none, jumps, pairs_of
from refattn.show.nodes import walk
from refattn.show.values import (
    ANY,
    ROUNDS,
    SOME,
    Class,
    Constant,
    Entries,
    Function,
    Made,
    Row,
    Value,
    annotated,
    builtin,
    is_something,
    joined,
    truth,
)

Names = dict[str, Value]

COMPARED: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
COUNTED: Mapping[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub}


class Reader(Page):
    """What is known of a page."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self._facts: dict[int, tuple[ast.expr, Value]] = {}  # with the node, so that no other gets its id
        self._known: Names = {}
        self._forgotten: set[int] = set()
        self._running: list[int] = []
        self._left: list[list[Names]] = []  # of each loop around: what is known where it is left

    # Functions and classes

    def call(
        self, function: Function, given: Sequence[Value], named: Mapping[str, Value], *, more: bool = False
    ) -> Value:
        """Return what is known of a result; with `more` there may be arguments that are not known."""
        arguments, node = function.node.args, function.node
        if self._running.count(id(node)) > 1:
            self.forget(Function(node, function.around))
            return ANY
        names = dict(function.around)
        places = [*arguments.posonlyargs, *arguments.args]
        values = [function.bound, *given] if function.bound is not None else [*given]
        missing = [None] * (len(places) - len(arguments.defaults))
        for at, (each, usual) in enumerate(zip(places, [*missing, *arguments.defaults], strict=True)):
            if at < len(values):
                names[each.arg] = values[at]
            else:
                names[each.arg] = self._argument(each.arg, named, usual, more)
        for each, usual in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            names[each.arg] = self._argument(each.arg, named, usual, more)
        if arguments.vararg is not None:
            names[arguments.vararg.arg] = SOME if more else Row(tuple(values[len(places) :]))
        if arguments.kwarg is not None:
            own = {each.arg for each in (*places, *arguments.kwonlyargs)}
            rest = {name: value for name, value in named.items() if name not in own}
            names[arguments.kwarg.arg] = SOME if more else Entries(rest)
        self._running.append(id(node))
        if isinstance(node, ast.Lambda):
            result = self.look(node.body, names)
        else:
            results: list[Value] = []
            loops, self._left = self._left, []
            if self._block(node.body, names, results):
                results.append(Constant(None))
            self._left = loops
            result = self._any_of(results) if results else ANY
            result = annotated(result, node.returns)
        self._running.pop()
        return result

    def _argument(self, name: str, named: Mapping[str, Value], usual: ast.expr | None, more: bool) -> Value:
        if name in named:
            return named[name]
        return ANY if more or usual is None else self.look(usual, {})

    def forget(self, value: Value) -> None:
        """Note that a value is not followed: the functions in it may be called with anything."""
        if isinstance(value, Function) and id(value.node) not in self._forgotten:
            self._forgotten.add(id(value.node))
            loose = Function(value.node, dict.fromkeys(value.around, ANY))
            running, self._running = self._running, []
            self.call(loose, (), {}, more=True)
            self._running = running
        for part in value.parts if isinstance(value, Row) else ():
            self.forget(part)
        for part in value.fields.values() if isinstance(value, Made) else ():
            self.forget(part)
        for part in value.parts.values() if isinstance(value, Entries) else ():
            self.forget(part)

    def _made(self, kind: ast.ClassDef, given: Sequence[Value], named: Mapping[str, Value], more: bool) -> Value:
        if any(isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in kind.body):
            for value in (*given, *named.values()):
                self.forget(value)
            return Made(kind, {})
        fields = self.fields_of(kind)
        values = dict(zip(fields, given, strict=False)) | dict(named)
        if more:
            values = dict.fromkeys(fields, ANY) | values
        return Made(kind, {name: self._argument(name, values, fields[name], False) for name in fields})

    def _attribute(self, value: Value, name: str) -> Value:
        if isinstance(value, Made | Class):
            kind = value.kind if isinstance(value, Made) else value.node
            if isinstance(value, Made) and name in value.fields:
                return value.fields[name]
            for each in self.line_of(kind):
                for node in each.body:
                    if isinstance(node, ast.FunctionDef) and node.name == name:
                        if isinstance(value, Class):
                            break
                        method = Function(node, {}, value)
                        is_property = any(ast.unparse(word) == "property" for word in node.decorator_list)
                        return self.call(method, (), {}) if is_property else method
                    if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
                        return self.look(node.value, {})
                    if isinstance(node, ast.Assign):
                        for target, part in pairs_of(node):
                            if ast.unparse(target) == name:
                                return self.look(part, {})
        for method_node in self.methods.get(name, ()):
            self.forget(Function(method_node, {}))
        return ANY

    # Statements

    def _block(self, body: Sequence[ast.stmt], names: Names, results: list[Value]) -> bool:
        """Follow statements; return whether what stands after them is reached."""
        return all(self._statement(node, names, results) for node in body)

    def _statement(self, node: ast.stmt, names: Names, results: list[Value]) -> bool:
        if isinstance(node, ast.Assign):
            value = self.look(node.value, names)
            for target in node.targets:
                self._bind(target, value, names)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._bind(node.target, annotated(self.look(node.value, names), None), names)
        elif isinstance(node, ast.AugAssign):
            self.look(node.value, names)
            self._bind(node.target, SOME, names)
        elif isinstance(node, ast.Return):
            results.append(Constant(None) if node.value is None else self.look(node.value, names))
            return False
        elif isinstance(node, ast.If):
            return self._if(node, names, results)
        elif isinstance(node, ast.For | ast.While):
            self._loop(node, names, results)
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = Function(node, names)
        elif isinstance(node, ast.Expr):
            self.look(node.value, names)
        elif isinstance(node, ast.Raise):
            for part in filter(None, (node.exc, node.cause)):
                self.look(part, names)
            return False
        elif isinstance(node, ast.Break | ast.Continue):
            self._left[-1].append(dict(names))
            return False
        elif not isinstance(node, ast.Pass):
            self._anything(node, names, results)
        return True

    def _if(self, node: ast.If, names: Names, results: list[Value]) -> bool:
        known = truth(self.look(node.test, names))
        ends = []
        for side, body in ((True, node.body), (False, node.orelse)):
            if known is not (not side):
                inside = dict(names)
                self._narrow(node.test, side, inside)
                if self._block(body, inside, results):
                    ends.append(inside)
        names.clear()
        names.update(self._both(ends))
        return bool(ends)

    def _loop(self, node: ast.For | ast.While, names: Names, results: list[Value]) -> None:
        row = self.look(node.iter, names) if isinstance(node, ast.For) else None
        if isinstance(row, Row) and len(row.parts) == 1 and not node.orelse and not jumps(node):
            self._bind(node.target, row.parts[0], names)  # type: ignore[union-attr]
            self._block(node.body, names, results)
            return
        for _ in range(ROUNDS):
            inside = dict(names)
            if isinstance(node, ast.For):
                known = [*row.parts] if isinstance(row, Row) else [ANY]
                self._bind(node.target, self._any_of(known) if known else ANY, inside)
            else:
                self.look(node.test, inside)
            self._left.append([])
            ends = [dict(inside)] if self._block(node.body, inside, results) else []
            ends = [inside] if ends else []
            after = self._both([dict(names), *ends, *self._left.pop()])
            if after == names:
                break
            names.clear()
            names.update(after)
        else:
            names.update(dict.fromkeys(names, ANY))
        self._block(node.orelse, names, results)

    def _anything(self, node: ast.stmt, names: Names, results: list[Value]) -> None:
        """Follow a statement of another kind, of which any part may run, or none."""
        for stored in walk(node):
            if isinstance(stored, ast.Name) and isinstance(stored.ctx, ast.Store):
                names[stored.id] = ANY
        for _, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.ExceptHandler):
                    names |= {part.name: ANY} if part.name else {}
                    self._some(part.body, names, results)
                elif isinstance(part, ast.withitem):
                    self.look(part.context_expr, names)
                elif isinstance(part, ast.stmt):
                    self._some([part], names, results)
                elif isinstance(part, ast.expr):
                    self.look(part, names)

    def _some(self, body: Sequence[ast.stmt], names: Names, results: list[Value]) -> None:
        inside = dict(names)
        self._block(body, inside, results)
        names.update(self._both([dict(names), inside]))

    def _bind(self, target: ast.expr, value: Value, names: Names) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.parts if isinstance(value, Row) else ()
            exact = len(parts) == len(target.elts) and not any(isinstance(part, ast.Starred) for part in target.elts)
            for at, part in enumerate(target.elts):
                self._bind(part, parts[at] if exact else ANY, names)
            if not exact:
                self.forget(value)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, SOME, names)
        else:
            self.forget(value)
            for child in ast.iter_child_nodes(target):
                if isinstance(child, ast.expr):
                    self.look(child, names)

    def _narrow(self, test: ast.expr, side: bool, names: Names) -> None:
        """Note what follows for names from how a test came out."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is side:
            for part in test.values:
                self._narrow(part, side, names)
        if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and is_none(test.comparators[0]):
            if isinstance(test.ops[0], ast.Is | ast.IsNot) and names.get(test.left.id) == ANY:
                names[test.left.id] = Constant(None) if isinstance(test.ops[0], ast.Is) is side else SOME

    def _any_of(self, values: Sequence[Value]) -> Value:
        result = values[0]
        for value in values[1:]:
            result = joined(result, value, self.forget)
        return result

    def _both(self, ends: Sequence[Names]) -> Names:
        names = dict.fromkeys(name for end in ends for name in end)
        return {name: self._any_of([end[name] for end in ends if name in end]) for name in names}

    # Expressions

    def look(self, node: ast.expr, names: Names) -> Value:
        """Return what is known of an expression, and note it."""
        value = self._look(node, names)
        seen = self._facts.get(id(node))
        self._facts[id(node)] = node, value if seen is None else joined(seen[1], value, self.forget)
        return value

    def fact(self, node: ast.AST) -> Value | None:
        """Return what is known of an expression wherever it was seen, None where it was not."""
        return self._facts[id(node)][1] if id(node) in self._facts else None

    def _look(self, node: ast.expr, names: Names) -> Value:
        if isinstance(node, ast.Constant):
            return Constant(node.value)
        if isinstance(node, ast.Name):
            return names[node.id] if node.id in names else self._named(node.id)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in ("np", "math") and node.value.id not in names:
                return Constant(math.inf) if ast.unparse(node) == "math.inf" else SOME
            return self._attribute(self.look(node.value, names), node.attr)
        if isinstance(node, ast.Tuple):
            return self._row(node, names)
        if isinstance(node, ast.Call):
            return self._called(node, names)
        if isinstance(node, ast.IfExp):
            known = truth(self.look(node.test, names))
            values = []
            for side, part in ((True, node.body), (False, node.orelse)):
                if known is not (not side):
                    inside = dict(names)
                    self._narrow(node.test, side, inside)
                    values.append(self.look(part, inside))
            return self._any_of(values)
        if isinstance(node, ast.BoolOp):
            return self._junction(node, names)
        if isinstance(node, ast.UnaryOp):
            value = self.look(node.operand, names)
            known = truth(value)
            if isinstance(node.op, ast.Not):
                return SOME if known is None else Constant(not known)
            return SOME
        if isinstance(node, ast.Compare):
            return self._compared(node, names)
        if isinstance(node, ast.BinOp):
            left, right = self.look(node.left, names), self.look(node.right, names)
            if isinstance(left, Row) and isinstance(right, Row) and isinstance(node.op, ast.Add):
                return Row(left.parts + right.parts)
            if type(node.op) in COUNTED and all(type(getattr(x, "value", None)) is int for x in (left, right)):
                return Constant(COUNTED[type(node.op)](left.value, right.value))  # type: ignore[union-attr]
            return SOME
        if isinstance(node, ast.Subscript):
            return self._part(node, names)
        if isinstance(node, ast.Lambda):
            return Function(node, names)
        if isinstance(node, ast.NamedExpr):
            value = self.look(node.value, names)
            self._bind(node.target, value, names)
            return value
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehension(node, names)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.forget(self.look(child, names))
        return SOME

    def _row(self, node: ast.Tuple, names: Names) -> Value:
        parts, whole = self._each(node.elts, names)
        if whole and len(parts) <= ROUNDS:
            return Row(tuple(parts))
        for value in parts:
            self.forget(value)
        return SOME

    def _each(self, nodes: Sequence[ast.expr], names: Names) -> tuple[list[Value], bool]:
        """Return what is known of expressions in a row, and whether these are all: ``*x`` may be any number of them."""
        parts: list[Value] = []
        whole = True
        for node in nodes:
            value = self.look(node.value if isinstance(node, ast.Starred) else node, names)
            if not isinstance(node, ast.Starred):
                parts.append(value)
            elif isinstance(value, Row):
                parts += value.parts
            else:
                self.forget(value)
                whole = False
        return parts, whole

    def _named(self, name: str) -> Value:
        node = self.top.get(name)
        if node is None:
            return SOME if name in vars(builtins) or name in ("np", "math") else ANY
        if name not in self._known:
            self._known[name] = ANY
            if isinstance(node, ast.FunctionDef):
                self._known[name] = Function(node, {})
            elif isinstance(node, ast.ClassDef):
                self._known[name] = Class(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                table = {part: self.look(x, {}) for part, x in entries(node.value)}
                whole = len(table) == len(node.value.keys)
                self._known[name] = Entries(table) if whole else self.look(node.value, {})
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                self._known[name] = self.look(node.value, {})
        return self._known[name]

    def _called(self, node: ast.Call, names: Names) -> Value:
        function = self.look(node.func, names)
        given, whole = self._each(node.args, names)
        more = not whole
        named: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.look(keyword.value, names)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, Entries):
                named |= {key: part for key, part in value.parts.items() if isinstance(key, str)}
            else:
                self.forget(value)
                more = True
        if more:
            for value in given:
                self.forget(value)
            given = []
        if isinstance(function, Function):
            return self.call(function, given, named, more=more)
        if isinstance(function, Class):
            return self._made(function.node, given, named, more)
        if isinstance(node.func, ast.Name) and node.func.id not in names and node.func.id not in self.top:
            found = builtin(node.func.id, given, self)
            if found is not None:
                return found
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and given:
            table = self.look(node.func.value, names)
            if isinstance(table, Entries) and isinstance(given[0], Constant):
                return table.parts.get(given[0].value, given[1] if len(given) > 1 else Constant(None))
        for value in (*given, *named.values()):
            self.forget(value)
        return SOME if function == SOME else ANY

    def _junction(self, node: ast.BoolOp, names: Names) -> Value:
        last, values, inside = isinstance(node.op, ast.Or), list[Value](), dict(names)
        for part in node.values:
            values.append(self.look(part, inside))
            known = truth(values[-1])
            if known is last:
                break
            if known is not None and part is not node.values[-1]:
                values.pop()  # it is not the result
            self._narrow(part, not last, inside)
        return values[0] if len(values) == 1 else self._any_of(values)

    def _compared(self, node: ast.Compare, names: Names) -> Value:
        left, *more = (self.look(each, names) for each in (node.left, *node.comparators))
        if len(more) != 1:
            return SOME
        right, op = more[0], node.ops[0]
        if isinstance(op, ast.Is | ast.IsNot):
            same = isinstance(op, ast.Is)
            if isinstance(right, Constant) and right.value is None:
                if isinstance(left, Constant) and left.value is None:
                    return Constant(same)
                return Constant(not same) if is_something(left) else SOME
            if isinstance(left, Class | Function) and isinstance(right, Class | Function):
                return Constant((left == right) is same)
            return SOME
        if isinstance(left, Constant):
            if isinstance(op, ast.In | ast.NotIn) and isinstance(right, Row):
                if all(isinstance(part, Constant) for part in right.parts):
                    return Constant((left in right.parts) is isinstance(op, ast.In))
            if (
                isinstance(right, Constant)
                and type(op) in COMPARED
                and type(left.value) in (str, int, type(right.value))
            ):
                if type(left.value) is type(right.value) or isinstance(op, ast.Eq | ast.NotEq):
                    return Constant(COMPARED[type(op)](left.value, right.value))
        return SOME

    def _part(self, node: ast.Subscript, names: Names) -> Value:
        value, at = self.look(node.value, names), self.look(node.slice, names)
        if isinstance(at, Constant) and isinstance(value, Row) and type(at.value) is int:
            return value.parts[at.value] if -len(value.parts) <= at.value < len(value.parts) else ANY
        if isinstance(at, Constant) and isinstance(value, Entries):
            return value.parts.get(at.value, ANY)
        self.forget(value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        of_array = any(
            isinstance(part, ast.Slice) or (isinstance(part, ast.Constant) and part.value is ...) for part in parts
        )
        return SOME if of_array else ANY

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, names: Names) -> Value:
        inside = dict(names)
        for each in node.generators:
            row = self.look(each.iter, inside)
            self._bind(each.target, self._any_of(row.parts) if isinstance(row, Row) and row.parts else ANY, inside)
            for test in each.ifs:
                self.look(test, inside)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.forget(self.look(part, inside))
        return SOME
