"""Objects that only hold values taken apart: what is read of them stands in their place."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from refattn.show.commented import kept_of, statements
from refattn.show.fold import Named
from refattn.show.known import Reader
from refattn.show.merge import assigned, is_name, is_place
from refattn.show.nodes import walk
from refattn.show.values import Made


def flatten(tree: ast.Module, reader: Reader) -> bool:
    """Put the fields of an object that is a field of another in its place; tell whether there was one."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for call in walk(tree):
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
    """Let the one field of a class stand for its objects, where it is sure which fields of the name it has."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names = [name for kind in classes for name in reader.fields_of(kind)]
    for kind in classes:
        (field, *others), plain = reader.fields_of(kind), _is_plain(kind)
        uses = [each for each in walk(tree) if isinstance(each, ast.Attribute) and each.attr == field]
        facts = {id(each): reader.fact(each.value) for each in uses}
        alone = names.count(field) == 1 and not any(hasattr(each, field) for each in (np.ndarray, tuple, dict, str))
        if plain and not others and (alone or all(isinstance(fact, Made) for fact in facts.values())):
            declared = next(node for node in kind.body if isinstance(node, ast.AnnAssign))
            mine = {at for at, fact in facts.items() if not isinstance(fact, Made) or fact.kind is kind}
            _Unwrapped(kind.name, mine, declared.annotation).visit(tree)


def join_bases(tree: ast.Module, _: Reader) -> bool:
    """Put a class into the one that is made from it, where that is all that it is for; tell whether there was one."""
    kinds = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for base in kinds.values():
        heirs = [kind for kind in kinds.values() if base.name in map(ast.unparse, kind.bases)]
        made = any(isinstance(each, ast.Call) and is_name(each.func, base.name) for each in walk(tree))
        if len(heirs) != 1 or made or base.bases or len(heirs[0].bases) != 1:
            continue
        (heir,) = heirs
        own = {_named(node) for node in heir.body}
        heir.body += [node for node in base.body if _named(node) not in own | {""}]
        heir.bases = []
        tree.body.remove(base)
        for each in walk(tree):
            if isinstance(each, ast.Name) and each.id == base.name:
                each.id = heir.name
        return True
    return False


def _named(node: ast.stmt) -> str:
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else getattr(node, "name", "")


class _Unwrapped(ast.NodeTransformer):
    def __init__(self, kind: str, mine: set[int], annotation: ast.expr) -> None:
        self.kind, self.mine, self.annotation = kind, mine, annotation

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id != self.kind:
            return node
        return node.args[0] if node.args else node.keywords[0].value

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        return node.value if id(node) in self.mine else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        node.annotation = Named({self.kind: self.annotation}).visit(node.annotation)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node if node.name == self.kind else self.generic_visit(node)


def drop_twins(tree: ast.Module, reader: Reader) -> bool:
    """Drop a field that always has the value of another; tell whether there was one."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and _is_plain(node)}
    calls = [each for each in walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) in classes]
    for call in calls:
        kind = classes[ast.unparse(call.func)]
        if len([each for each in calls if is_name(each.func, kind.name)]) > 1:
            continue
        values = _values(reader, kind, call)
        first: dict[str, str] = {}
        for name, value in values.items():
            twin = first.setdefault(ast.unparse(value), name) if isinstance(value, ast.Name) else name
            uses = [each for each in walk(tree) if isinstance(each, ast.Attribute) and each.attr == name]
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
    calls = [each for each in walk(tree) if isinstance(each, ast.Call) and is_name(each.func, outer.name)]
    uses = [each for each in walk(tree) if isinstance(each, ast.Attribute) and each.attr == name]
    around = {id(each.value): each for each in walk(tree) if isinstance(each, ast.Attribute)}
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


def take_apart(function: ast.FunctionDef, reader: Reader) -> None:
    """Read what an object was made of in place of its fields, and an object of two names by its first."""
    stored: dict[str, list[ast.stmt]] = {}
    for node in statements(function):
        for part in walk(node) if node is not function and not getattr(node, "body", None) else _targets_of(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                stored.setdefault(part.id, []).append(node)
    arguments = {each.arg for each in walk(function.args) if isinstance(each, ast.arg)}
    places = {id(each): at for at, top in enumerate(function.body) for each in walk(top)}

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
        for target, value in assigned(node):
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
            elif is_place(value) and isinstance(reader.fact(value), Made) and settled(value, node):
                alias[target] = value
    _Apart(known, alias).visit(function)


def _targets_of(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, ast.For):
        yield from walk(node.target)


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


def drop_fields(tree: ast.Module, reader: Reader) -> None:
    """Drop fields that nobody reads, and methods that nobody calls, of the classes of the page."""
    reads: dict[str | None, set[str]] = {}  # by class; None: of what is not known
    for each in walk(tree):
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
    calls = [node for node in walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
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
        return any(each.id in read for part in node.targets for each in walk(part) if isinstance(each, ast.Name))
    return True
