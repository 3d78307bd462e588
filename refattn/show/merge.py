"""Functions that are called once written into their callers, and objects that only hold values taken apart.

What a reader of all choices has to jump to is read in one go where there is one choice: the page gets two functions.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from refattn.show.commented import Kept, kept_of, like, set_kept, statements
from refattn.show.fold import Named, local_names
from refattn.show.known import Reader
from refattn.show.link import XP
from refattn.show.values import Made

LONGEST = 90
"""Statements of a function into which another is written, at most."""


def merge(tree: ast.Module, roots: Sequence[str]) -> bool:
    """Write one function that is called once, at the top of another, into that; tell whether there was one."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    loads = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    for caller in functions.values():
        for at, node in enumerate(caller.body):
            value = node.value if isinstance(node, ast.Assign | ast.Return) else None
            if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
                continue
            callee = functions.get(value.func.id)
            if callee is None or callee is caller or callee.name in roots or loads.count(callee.name) > 1:
                continue
            if getattr(callee, "home", "") == XP:
                continue
            if len([*statements(caller)]) + len([*statements(callee)]) > LONGEST:
                continue
            new = _merged(caller, at, callee, value)
            if new is not None:
                caller.body[at : at + 1] = new
                tree.body.remove(callee)
                return True
    return False


def _merged(caller: ast.FunctionDef, at: int, callee: ast.FunctionDef, call: ast.Call) -> list[ast.stmt] | None:
    """Return the statements of a function for one call of it; None where it returns in its middle, or names clash."""
    node = caller.body[at]
    returns = [each for each in statements(callee) if isinstance(each, ast.Return)]
    functions = [each for each in statements(callee) if isinstance(each, ast.FunctionDef)]
    if len(returns) != 1 or callee.body[-1] is not returns[0] or returns[0].value is None or len(functions) > 1:
        return None
    given = _given(callee, call)
    if given is None:
        return None
    body, result = (
        copy.deepcopy(callee.body[1 if ast.get_docstring(callee) else 0 : -1]),
        copy.deepcopy(returns[0].value),
    )
    whole = ast.Module([*body, ast.Expr(result)], [])
    stored = {each.id for each in ast.walk(whole) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    simple = {name: x for name, x in given.items() if name not in stored and _is_place(x)}
    first = [ast.Assign([ast.Name(name, ast.Store())], x) for name, x in given.items() if name not in simple]
    own = stored | {*given} - {*simple}
    new = dict[str, str]()
    others = {each.id for x in given.values() for each in ast.walk(x) if isinstance(each, ast.Name)}
    later = _read_later(caller, at) | _outer(caller)
    mine = {each.arg for each in ast.walk(caller.args) if isinstance(each, ast.arg)}
    targets = _parts(node.targets[0]) if isinstance(node, ast.Assign) else []
    several = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    results = _parts(result) if several else [result]
    if several and (len(results) != len(targets) or not isinstance(result, ast.Tuple)):
        return None
    for target, part in zip(targets, results, strict=False):
        if isinstance(target, ast.Name) and isinstance(part, ast.Name) and part.id in own and part.id not in new:
            if (target.id == part.id or target.id not in own) and target.id not in others:
                new[part.id] = target.id
    taken = local_names(caller) | own
    others_of = [each.id for x in given.values() for each in ast.walk(x) if isinstance(each, ast.Name)]
    for begun in [*first]:
        name, value = cast(ast.Name, begun.targets[0]).id, begun.value
        if isinstance(value, ast.Name) and value.id not in later | mine and others_of.count(value.id) == 1:
            if value.id == name or value.id not in own:  # nobody reads it any more: it may change
                new[name] = value.id
                first.remove(begun)
    places = _places(body) & local_names(caller)
    for name in sorted(own - {*new}):
        if name in later | mine | others | places:
            longer = f"{name}_of_{callee.name}" if f"{name}_" in taken else f"{name}_"
            new[name] = longer
    if {new[name] for name in new if not isinstance(given.get(name), ast.Name)} & others:
        return None
    for each in ast.walk(whole):
        if isinstance(each, ast.Name):
            if each.id in simple and isinstance(each.ctx, ast.Load):
                continue
            each.id = new.get(each.id, each.id)
    for each in first:
        cast(ast.Name, each.targets[0]).id = new.get(
            cast(ast.Name, each.targets[0]).id, cast(ast.Name, each.targets[0]).id
        )
        set_kept(each, Kept([], "", False, [], 0, ""))
    Named(simple).visit(whole)
    *inside, last = whole.body
    known = kept_of(node)
    if isinstance(node, ast.Return):
        end: list[ast.stmt] = [like(ast.Return(cast(ast.Expr, last).value), returns[0])]
    else:
        end = []
        values = _parts(cast(ast.Expr, last).value) if several else [cast(ast.Expr, last).value]
        for target, part in zip(targets, values, strict=True):
            if ast.unparse(target) != ast.unparse(part):
                end.append(ast.Assign([target], part))
                set_kept(end[-1], Kept([], "", False, [], 0, ""))
        if len(targets) == 1 and end:
            end = [like(ast.Assign([targets[0]], cast(ast.Assign, end[0]).value), node)]
            kept_of(end[0]).above = []
    found = [*first, *inside, *end]
    if found:
        head = kept_of(found[0])
        set_kept(found[0], head)
        told = _told(callee) if getattr(callee, "home", "") == getattr(caller, "home", "") else ""
        head.above[:0] = [*known.above, *([f"# {told}"] if told else [])]
        head.gap = False
    for each in found:
        ast.fix_missing_locations(each)
    return found


def _places(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements give to a field of something, and so are likely to have elsewhere, too."""
    return {name for node in body for name, value in _assigned(node) if isinstance(value, ast.Attribute)}


def _outer(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function reads and does not give."""
    names = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    return names - local_names(function)


def _told(node: ast.FunctionDef) -> str:
    """Return the first line of what a function says of itself, as a comment above what it does."""
    text = (ast.get_docstring(node) or "").partition("\n")[0].removeprefix("Return ")
    return text[:1].upper() + text[1:]


def _given(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr] | None:
    """Return the arguments of a call by name, defaults included; None where they cannot be said."""
    arguments = function.args
    if arguments.vararg or arguments.kwarg or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    if any(keyword.arg is None for keyword in call.keywords):
        return None
    names = [each.arg for each in arguments.args]
    usual = dict(zip(names[::-1], arguments.defaults[::-1], strict=False))
    usual |= {each.arg: x for each, x in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if x is not None}
    given = usual | dict(zip(names, call.args, strict=False)) | {str(each.arg): each.value for each in call.keywords}
    order = [*names, *(each.arg for each in arguments.kwonlyargs)]
    return {name: given[name] for name in order} if {*order} <= {*given} else None


def _is_place(node: ast.expr) -> bool:
    """Tell whether an expression is a name, or a field of one, or a constant."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name | ast.Constant)


def _parts(node: ast.expr) -> list[ast.expr]:
    return [*node.elts] if isinstance(node, ast.Tuple) else [node]


def _read_later(function: ast.FunctionDef, at: int) -> set[str]:
    """Return the names that are read after a statement, as they were before it or in it."""
    found, given = set[str](), set[str]()
    for node in function.body[at + 1 :]:
        found |= {
            each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        } - given
        if isinstance(node, ast.Assign):
            given |= {each.id for part in node.targets for each in _parts(part) if isinstance(each, ast.Name)}
    return found


# Objects


def flatten(tree: ast.Module, reader: Reader) -> bool:
    """Put the fields of an object that is a field of another in its place; tell whether there was one."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for call in ast.walk(tree):
        outer = classes.get(ast.unparse(call.func)) if isinstance(call, ast.Call) else None
        if outer is None or not isinstance(call, ast.Call) or not _is_plain(outer):
            continue
        for name, part in _values(reader, outer, call).items():
            value = reader.fact(part)
            if isinstance(value, Made) and _is_plain(value.kind) and isinstance(part, ast.Name):
                if _flattened(tree, reader, outer, name, value.kind):
                    return True
    return False


def _values(reader: Reader, kind: ast.ClassDef, call: ast.Call) -> dict[str, ast.expr]:
    """Return what an object is made of by a call, by the names of the fields."""
    fields = [*reader.fields_of(kind)]
    return dict(zip(fields, call.args, strict=False)) | {str(each.arg): each.value for each in call.keywords}


def unwrap(tree: ast.Module, reader: Reader) -> None:
    """Let the one field of a class stand for its objects, where no other class has a field of the name."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names = [name for kind in classes for name in reader.fields_of(kind)]
    for kind in classes:
        fields = [*reader.fields_of(kind)]
        alone = len(fields) == 1 and names.count(fields[0]) == 1 and _is_plain(kind)
        if alone and not any(hasattr(other, fields[0]) for other in (np.ndarray, tuple, list, dict, str, float)):
            declared = next(node for node in kind.body if isinstance(node, ast.AnnAssign))
            _Unwrapped(kind.name, fields[0], declared.annotation).visit(tree)


class _Unwrapped(ast.NodeTransformer):
    def __init__(self, kind: str, field: str, annotation: ast.expr) -> None:
        self.kind, self.field, self.annotation = kind, field, annotation

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id != self.kind:
            return node
        return node.args[0] if node.args else node.keywords[0].value

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        return node.value if node.attr == self.field else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        node.annotation = Named({self.kind: self.annotation}).visit(node.annotation)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node if node.name == self.kind else self.generic_visit(node)


def drop_twins(tree: ast.Module, reader: Reader) -> bool:
    """Drop a field that always has the value of another; tell whether there was one."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and _is_plain(node)}
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) in classes]
    for call in calls:
        kind = classes[ast.unparse(call.func)]
        if len([each for each in calls if _is_name(each.func, kind.name)]) > 1:
            continue
        values = _values(reader, kind, call)
        first: dict[str, str] = {}
        for name, value in values.items():
            twin = first.setdefault(ast.unparse(value), name) if isinstance(value, ast.Name) else name
            uses = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and each.attr == name]
            facts = [reader.fact(each.value) for each in uses]
            if twin == name or not all(isinstance(fact, Made) for fact in facts):
                continue
            mine = [use for use, fact in zip(uses, facts, strict=True) if isinstance(fact, Made) and fact.kind is kind]
            if mine:
                for use in mine:
                    use.attr = twin
                return True
    return False


def _is_plain(kind: ast.ClassDef) -> bool:
    """Tell whether a class is nothing but fields."""
    return not kind.bases and all(isinstance(node, ast.AnnAssign | ast.Expr) for node in kind.body)


def _flattened(tree: ast.Module, reader: Reader, outer: ast.ClassDef, name: str, inner: ast.ClassDef) -> bool:
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and _is_name(each.func, outer.name)]
    uses = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and each.attr == name]
    around = {id(each.value): each for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    found = [(each, reader.fact(each.value)) for each in uses]
    if len(calls) != 1 or not all(isinstance(value, Made) for _, value in found):
        return False
    uses = [each for each, value in found if isinstance(value, Made) and value.kind is outer]
    if any(id(each) not in around for each in uses):
        return False
    fields, own = [*reader.fields_of(outer)], [*reader.fields_of(inner)]
    call = calls[0]
    values = dict(zip(fields, call.args, strict=False)) | {str(each.arg): each.value for each in call.keywords}
    if {*fields} != {*values} or not isinstance(values[name], ast.Name):
        return False
    new = {each: each if each not in fields else f"{name}_{each}" for each in own}
    for each in uses:
        parent = around[id(each)]
        parent.attr, parent.value = new[parent.attr], each.value
    call.args, call.keywords = [], []
    declared: list[ast.stmt] = []
    for node in outer.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            for part in copy.deepcopy(inner.body):
                if isinstance(part, ast.AnnAssign):
                    part.target = ast.Name(new[ast.unparse(part.target)], ast.Store())
                    part.value = None
                    kept_of(part).gap = False
                    kept_of(part).beside = kept_of(part).beside if "# type:" not in kept_of(part).beside else ""
                    declared.append(part)
        else:
            declared.append(node)
    outer.body = declared
    for field in fields:
        if field == name:
            call.args += [ast.Attribute(copy.deepcopy(values[name]), each, ast.Load()) for each in own]
        else:
            call.args.append(values[field])
    ast.fix_missing_locations(tree)
    return True


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def take_apart(function: ast.FunctionDef, reader: Reader) -> None:
    """Read what an object was made of in place of its fields, and an object of two names by its first."""
    stored: dict[str, list[ast.stmt]] = {}
    for node in statements(function):
        for part in ast.walk(node) if node is not function and not getattr(node, "body", None) else _targets_of(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                stored.setdefault(part.id, []).append(node)
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    places = {id(each): at for at, top in enumerate(function.body) for each in ast.walk(top)}

    def settled(node: ast.expr, before: ast.stmt) -> bool:
        """Tell whether a name or a field means the same wherever it is read after a statement."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if isinstance(node, ast.Constant):
            return True
        if not isinstance(node, ast.Name):
            return False
        given = stored.get(node.id, [])
        if node.id in arguments:
            return not given
        return all(places[id(each)] < function.body.index(before) for each in given)

    known: dict[str, dict[str, ast.expr]] = {}
    alias: dict[str, ast.expr] = {}
    for node in function.body:
        for target, value in _assigned(node):
            if len(stored.get(target, ())) != 1 or target in arguments:
                continue
            kind = (
                reader.top.get(value.func.id)
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
                else None
            )
            if isinstance(kind, ast.ClassDef) and isinstance(value, ast.Call):
                fields = [*reader.fields_of(kind)]
                parts = dict(zip(fields, value.args, strict=False))
                parts |= {str(each.arg): each.value for each in value.keywords}
                known[target] = {name: part for name, part in parts.items() if settled(part, node)}
            elif _is_place(value) and isinstance(reader.fact(value), Made) and settled(value, node):
                alias[target] = value
    _Apart(known, alias).visit(function)


def _targets_of(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, ast.For):
        yield from ast.walk(node.target)


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement gives to expressions, one by one."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [*zip(target.elts, value.elts, strict=True)]
        for left, right in pairs:
            if isinstance(left, ast.Name):
                yield left.id, right


class _Apart(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, Mapping[str, ast.expr]], alias: Mapping[str, ast.expr]) -> None:
        self.known, self.alias = known, alias

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            part = self.known.get(node.value.id, {}).get(node.attr)
            if part is not None:
                return copy.deepcopy(part)
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.alias[node.id]) if node.id in self.alias and isinstance(node.ctx, ast.Load) else node


# Arguments and fields that nobody reads


def drop_arguments(tree: ast.Module, roots: Sequence[str]) -> None:
    """Drop arguments that are not read, of functions that are only called by name."""
    loads = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name in roots or node.args.vararg or node.args.kwarg:
            continue
        mine = [call for call in calls if _is_name(call.func, node.name)]
        read = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if len(mine) != loads.count(node.name) or any(_given(node, call) is None for call in mine):
            continue
        lost = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)} - read
        without(node.args, lost, mine)


def without(arguments: ast.arguments, lost: set[str], calls: Sequence[ast.Call]) -> None:
    names = [each.arg for each in arguments.args]
    for call in calls:
        call.args = [x for name, x in zip(names, call.args, strict=False) if name not in lost]
        call.keywords = [each for each in call.keywords if each.arg not in lost]
    first = len(arguments.args) - len(arguments.defaults)
    arguments.defaults = [x for name, x in zip(names[first:], arguments.defaults, strict=True) if name not in lost]
    arguments.args = [each for each in arguments.args if each.arg not in lost]
    pairs = [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    arguments.kwonlyargs = [each for each, _ in pairs if each.arg not in lost]
    arguments.kw_defaults = [x for each, x in pairs if each.arg not in lost]


def drop_fields(tree: ast.Module, reader: Reader) -> None:
    """Drop fields that nobody reads, and methods that nobody calls, of the classes of the page."""
    reads: dict[str | None, set[str]] = {}  # by class; None: of what is not known
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load):
            value = reader.fact(each.value)
            line = [*reader.line_of(value.kind)] if isinstance(value, Made) else []
            for name in (kind.name for kind in line) if line else (None,):
                reads.setdefault(name, set()).add(each.attr)

    def read_of(kind: ast.ClassDef) -> set[str]:
        line = {each.name for each in reader.line_of(kind)}
        family = {each.name for each in classes if line & {other.name for other in reader.line_of(each)}}
        return set[str]().union(*(reads.get(name, set()) for name in (None, *family)))

    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for call in calls:
        kind = reader.top.get(cast(ast.Name, call.func).id)
        if isinstance(kind, ast.ClassDef) and not any(isinstance(each, ast.Starred) for each in call.args):
            if not any(isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in kind.body):
                fields, read = [*reader.fields_of(kind)], read_of(kind)
                call.args = [x for name, x in zip(fields, call.args, strict=False) if name in read]
                call.keywords = [each for each in call.keywords if each.arg in read]
    starred = {cast(ast.Name, call.func).id for call in calls if any(isinstance(x, ast.Starred) for x in call.args)}
    for kind in classes:
        if any(each.name in starred for each in reader.line_of(kind)):
            continue
        kept = [node for node in kind.body if _is_read(node, read_of(kind))]
        if len(kept) < len(kind.body):
            kind.body = kept or [ast.Pass()]
            if isinstance(kind.body[0], ast.Expr) and len(kind.body) > 1:
                kept_of(kind.body[1]).gap = True


def _is_read(node: ast.stmt, read: set[str]) -> bool:
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target) in read
    if isinstance(node, ast.FunctionDef):
        return node.name.startswith("__") or node.name in read
    if isinstance(node, ast.Assign):
        return any(each.id in read for part in node.targets for each in ast.walk(part) if isinstance(each, ast.Name))
    return True


def drop_items(tree: ast.Module, roots: Sequence[str]) -> None:
    """Drop the functions, classes and constants that the roots do not need."""
    defined = [_defined(node) for node in tree.body]
    reads = [{each.id for each in ast.walk(node) if isinstance(each, ast.Name)} for node in tree.body]
    needed, todo = set[int](), {at for at, own in enumerate(defined) if own & {*roots}}
    while todo:
        needed |= todo
        wanted = set[str]().union(*(reads[at] for at in todo))
        todo = {at for at, own in enumerate(defined) if own & wanted} - needed
    body: list[ast.stmt] = []
    for at, node in enumerate(tree.body):
        if at in needed or (isinstance(node, ast.Expr) and at - 1 in needed):
            body.append(node)
    tree.body = body


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
