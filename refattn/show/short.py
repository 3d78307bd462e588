"""What makes a page shorter where one choice is left: names that tell nothing, and classes that only hold values."""

from __future__ import annotations

import ast
import copy
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

from refattn.show.commented import kept_of, like, read, text_of
from refattn.show.fold import Named
from refattn.show.layout import WIDTH
from refattn.show.nodes import walk

FEWEST, LONG = 12, 250
"""Classes with fewer fields stay as they are, on a page of so many lines: a line for each tells more than it costs."""

IMPORTS: dict[str, tuple[str, str | None]] = {"namedtuple": ("collections", "namedtuple")}


def shorten(tree: ast.Module) -> None:
    """Leave out what a page of one choice has no need of."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            _choose(node)
            _name_at_once(node)
            _spread(node)
            _write_on(node)
    _give_numbers(tree)
    name_fields(tree)


def _give_numbers(tree: ast.Module) -> None:
    """Read a number itself in place of a field that always is this number."""
    kinds = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and _fields(node)}
    for function in tree.body:
        for call in walk(function):
            kind = kinds.get(ast.unparse(call.func)) if isinstance(call, ast.Call) else None
            if isinstance(call, ast.Call) and kind is not None and _is_made_once(tree, kind, len(_fields(kind))):
                fields = _fields(kind)
                for name, value in zip(fields, [*call.args], strict=False):
                    number = _number(function, value)
                    others = [each for each in kinds.values() if each is not kind and name in _fields(each)]
                    if number is not None and not others:
                        call.args.remove(value)
                        kind.body = [each for each in kind.body if _field(each) != name]
                        _Numbered(name, number).visit(tree)


def _number(function: ast.stmt, value: ast.expr) -> ast.Constant | None:
    """Return the number that a name is given, where that is all that it is given."""
    if not isinstance(value, ast.Name):
        return None
    given = [node for node in walk(function) if isinstance(node, ast.Assign)]
    found = [node for node in given if value.id in {each.id for each in walk(node) if _is_stored(each)}]
    number = found[0].value if len(found) == 1 else None
    return number if isinstance(number, ast.Constant) and isinstance(number.value, float) else None


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _field(node: ast.stmt) -> str:
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else ""


class _Numbered(ast.NodeTransformer):
    def __init__(self, field: str, number: ast.Constant) -> None:
        self.field, self.number = field, number

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        read = node.attr == self.field and ast.unparse(node.value) == "saved"
        return copy.deepcopy(self.number) if read else node


def _counts(function: ast.FunctionDef) -> Counter[tuple[str, bool]]:
    """Return how often names are given (True) and read (False)."""
    names = [each for each in walk(function) if isinstance(each, ast.Name)]
    return Counter((each.id, isinstance(each.ctx, ast.Store)) for each in names)


def _once(node: ast.stmt, counts: Counter[tuple[str, bool]]) -> str:
    """Return the name that a statement gives, which nothing else gives and one place reads, or nothing."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1 or not isinstance(node.targets[0], ast.Name):
        return ""
    name = node.targets[0].id
    return name if counts[name, True] == 1 == counts[name, False] else ""


def _choose(function: ast.FunctionDef) -> None:
    """Write one of two values that a name gets as one expression, where a line has room for it."""
    for node in [*walk(function)]:
        body: list[ast.stmt] = getattr(node, "body", None) or []
        for at, each in enumerate(body if isinstance(body, list) else []):
            if isinstance(each, ast.If) and len(each.body) == 1 == len(each.orelse) and not kept_of(each).above:
                one, other = each.body[0], each.orelse[0]
                if not (isinstance(one, ast.Assign) and isinstance(other, ast.Assign) and _is_name(one)):
                    continue
                told = [kept_of(part).beside for part in (one, other)]
                if ast.unparse(one.targets[0]) != ast.unparse(other.targets[0]) or all("[" in part for part in told):
                    continue
                if kept_of(one).above or kept_of(other).above or isinstance(one.value, ast.IfExp):
                    continue
                new = like(ast.Assign(one.targets, ast.IfExp(each.test, one.value, other.value)), each)
                kept_of(new).beside = told["[" in told[1]]
                lines = text_of(ast.Module([new], [])).splitlines()
                if len(lines) == 1 and len(lines[0]) <= WIDTH - 4:
                    body[at] = new


def _name_at_once(function: ast.FunctionDef) -> None:
    """Give a value that an equation only renames the name of the equation."""
    counts = _counts(function)
    made = {name: node for node in function.body if (name := _once(node, counts)) and "[" not in kept_of(node).beside}
    for node in [*function.body]:
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.Name) and value.id in made and isinstance(node, ast.Assign) and _is_name(node):
            first = cast(ast.Assign, made.pop(value.id))
            first.targets = node.targets
            kept_of(first).beside = kept_of(node).beside
            function.body.remove(node)
    for node in [*function.body]:
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(value, ast.Name) and isinstance(node, ast.Assign) and _is_name(node):
            _rename(function, function.body.index(node), value.id, cast(ast.Name, node.targets[0]).id)


def _rename(function: ast.FunctionDef, at: int, old: str, new: str) -> None:
    """Give what was added up the name that an equation gives it at the end, from the start."""
    before = [each for node in function.body[:at] for each in walk(node)]
    after = {each.id for node in function.body[at + 1 :] for each in walk(node) if isinstance(each, ast.Name)}
    names = [each for each in before if isinstance(each, ast.Name) and each.id == old]
    stores = [each for each in before if isinstance(each, ast.Assign) and old in {*map(ast.unparse, each.targets)}]
    taken = new in {each.id for each in before if isinstance(each, ast.Name)} or old in after
    if len(stores) > 1 and not taken and not any("[" in kept_of(each).beside for each in stores):
        for each in names:
            each.id = new
        kept_of(stores[-1]).beside = kept_of(function.body[at]).beside
        del function.body[at]


def _is_name(node: ast.Assign) -> bool:
    return len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)


def _write_on(function: ast.FunctionDef) -> None:
    """Write a value of which nothing is said where it is read, if that is once, soon after."""
    counts = _counts(function)
    for block in [each.body for each in walk(function) if isinstance(each, ast.FunctionDef | ast.For)]:
        for node in reversed([*block]):
            name, known = _once(node, counts), kept_of(node)
            after = _reader(block[block.index(node) + 1 :], name, cast(ast.Assign, node)) if name else None
            if after is not None and not known.beside and not known.above and not kept_of(after).gap:
                new = Folded({name: cast(ast.Assign, node).value}).visit(copy.deepcopy(after))
                lines = text_of(ast.Module([new], [])).splitlines()
                if len(lines) == 1 and len(lines[0]) <= WIDTH - 8:
                    block[block.index(after)] = new
                    block.remove(node)


def _reader(after: Sequence[ast.stmt], name: str, made: ast.Assign) -> ast.stmt | None:
    """Return the statement of a block that reads a name, where all that it was made of is still the same."""
    parts = {each.id for each in walk(made.value) if isinstance(each, ast.Name)}
    for node in after:
        names = [each for each in walk(node) if isinstance(each, ast.Name)]
        if not isinstance(node, ast.Assign | ast.Return):
            return None
        if any(each.id == name for each in names):
            return node
        if parts & {each.id for each in names if isinstance(each.ctx, ast.Store)}:
            return None
    return None


class Folded(Named):
    """Names replaced by what they are, and products of numbers by numbers."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        left, right = node.left, node.right
        if isinstance(node.op, ast.Mult) and isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
            if isinstance(left.value, float) and isinstance(right.value, float):
                return ast.Constant(left.value * right.value)
        return node


def _spread(function: ast.FunctionDef) -> None:
    """Write the entries of a dictionary into the one that takes them all."""
    counts = _counts(function)
    made = {name: node for node in function.body if (name := _once(node, counts))}
    for each in walk(function):
        if isinstance(each, ast.Dict):
            pairs: list[tuple[ast.expr | None, ast.expr]] = []
            for key, value in zip(each.keys, each.values, strict=True):
                node = made.get(value.id) if key is None and isinstance(value, ast.Name) else None
                inner = node.value if isinstance(node, ast.Assign) else None
                if isinstance(inner, ast.Dict) and all(isinstance(part, ast.Name) for part in inner.values):
                    pairs += zip(inner.keys, inner.values, strict=True)
                    function.body.remove(cast(ast.stmt, node))
                else:
                    pairs.append((key, value))
            each.keys, each.values = [key for key, _ in pairs], [value for _, value in pairs]


def name_fields(tree: ast.Module) -> None:
    """Let a named tuple stand for each class of many fields, made once, of names that the maker has explained."""
    fewest = FEWEST if text_of(tree).count("\n") <= LONG else 2
    for at, node in enumerate(tree.body):
        fields = _fields(node, fewest) if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.ClassDef) and fields and _is_made_once(tree, node, len(fields)):
            told = (ast.get_docstring(node) or "").partition("\n")[0]
            new = read((f"# {told}\n" if told else "") + _written(node.name, " ".join(fields))).body[0]
            cast(Any, new).home = getattr(node, "home", None)
            tree.body[at] = new


def _written(name: str, fields: str) -> str:
    """Return a named tuple as the formatter lays it out."""
    line = f'{name} = namedtuple("{name}", "{fields}")\n'
    inner = f'    "{name}", "{fields}"\n'
    if len(line) <= WIDTH + 1:
        return line
    if len(inner) <= WIDTH + 1:
        return f"{name} = namedtuple(\n{inner})\n"
    parts = textwrap.wrap(fields, WIDTH - 8)
    lines = [*(f'    "{part} "\n' for part in parts[:-1]), f'    "{parts[-1]}",\n']
    return f'{name} = namedtuple(\n    "{name}",\n{"".join(lines)})\n'


def _fields(node: ast.ClassDef, fewest: int = FEWEST) -> list[str]:
    """Return the fields of a class that is nothing else, where they are many."""
    found = [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign) and each.value is None]
    others = len(node.body) - len(found) - (ast.get_docstring(node) is not None)
    return found if not node.bases and not others and len(found) >= fewest else []


def _is_made_once(tree: ast.Module, kind: ast.ClassDef, fields: int) -> bool:
    calls = [each for each in walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) == kind.name]
    if len(calls) != 1:
        return False
    given = [*calls[0].args, *(each.value for each in calls[0].keywords)]
    return len(given) == fields and all(isinstance(each, ast.Name | ast.Subscript) for each in given)


def spell_out(tree: ast.Module) -> None:
    """Write what an annotation stands for, such as ``float | Array``, where nothing else reads its name."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            kinds = [each for each in walk(tree) if isinstance(each, ast.arg | ast.AnnAssign) and each.annotation]
            inside = [each for kind in kinds for each in walk(cast(ast.expr, kind.annotation))]
            inside += [
                each for f in walk(tree) if isinstance(f, ast.FunctionDef) and f.returns for each in walk(f.returns)
            ]
            reads = [
                each
                for each in walk(tree)
                if isinstance(each, ast.Name) and each.id == target.id and each is not target
            ]
            if {id(each) for each in reads} <= {id(each) for each in inside}:
                given = Named({target.id: node.value})
                for kind in kinds:
                    kind.annotation = given.visit(cast(ast.expr, kind.annotation))
                for function in walk(tree):
                    if isinstance(function, ast.FunctionDef) and function.returns:
                        function.returns = given.visit(function.returns)


def untyped(tree: ast.stmt) -> ast.stmt:
    """Return a statement whose functions say nothing of types: what stands behind each value says more."""
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.fix_missing_locations(_Empty().visit(tree))


class _Empty(ast.NodeTransformer):
    """Writes ``[]`` and ``()`` in place of a list and a tuple of a type, and a tuple itself."""

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        kind = ast.unparse(node.func.value) if isinstance(node.func, ast.Subscript) else ""
        empty: dict[str, ast.expr] = {"list": ast.List([], ast.Load()), "tuple": ast.Tuple([], ast.Load())}
        return (node.args or [empty[kind]])[0] if kind in empty else node
