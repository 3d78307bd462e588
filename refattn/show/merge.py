"""Functions that are called once written into their callers.

What a reader of all choices has to jump to is read in one go where there is one choice: the page gets two functions.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from typing import cast

from refattn.show.commented import Kept, kept_of, like, set_kept, statements
from refattn.show.fold import Named, local_names
from refattn.show.link import XP
from refattn.show.nodes import walk

LONGEST, INNER = 90, 16
"""Statements of a function into which another is written, at most; and of one that is written into a loop or branch."""


def merge(tree: ast.Module, roots: Sequence[str]) -> bool:
    """Write one function that is called once, by a statement of another, into that; tell whether there was one."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    loads = [node.id for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    places = [(caller, node) for caller in functions.values() for node in walk(caller)]
    blocks = [(caller, node) for caller, node in places if isinstance(node, ast.FunctionDef | ast.For | ast.If)]
    for caller, block in blocks:
        for at, node in enumerate(block.body):
            value = node.value if isinstance(node, ast.Assign | ast.Return) else None
            if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
                continue
            callee = functions.get(value.func.id)
            if callee is None or callee is caller or callee.name in roots or loads.count(callee.name) > 1:
                continue
            if getattr(callee, "home", "") == XP:
                continue
            size = len([*statements(callee)])
            if len([*statements(caller)]) + size > LONGEST or (block is not caller and size > INNER):
                continue
            new = _merged(caller, block, at, callee, value)
            if new is not None:
                block.body[at : at + 1] = new
                tree.body.remove(callee)
                for each in statements(tree):  # no backward quotes a call that is gone
                    kept = kept_of(each)
                    kept.above = [line for line in kept.above if f" = {callee.name}(" not in line]
                return True
    return False


def _merged(
    caller: ast.FunctionDef, block: ast.FunctionDef | ast.For | ast.If, at: int, callee: ast.FunctionDef, call: ast.Call
) -> list[ast.stmt] | None:
    """Return the statements of a function for one call of it; None where it returns in its middle, or names clash."""
    node = block.body[at]
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
    stored = {each.id for each in walk(whole) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    simple = {name: x for name, x in given.items() if name not in stored and is_place(x)}
    first = [ast.Assign([ast.Name(name, ast.Store())], x) for name, x in given.items() if name not in simple]
    own = stored | {*given} - {*simple}
    new = dict[str, str]()
    others = {each.id for x in given.values() for each in walk(x) if isinstance(each, ast.Name)}
    around = {each.id for each in walk(caller) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
    later = _read_later(caller, at) | _outer(caller) if block is caller else around
    mine = {each.arg for each in walk(caller.args) if isinstance(each, ast.arg)}
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
    others_of = [each.id for x in given.values() for each in walk(x) if isinstance(each, ast.Name)]
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
    for each in walk(whole):
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
        told = "" if block is not caller and (known.above or head.above) else told
        head.above[:0] = [*known.above, *([f"# {told}"] if told else [])]
        head.gap = known.gap and isinstance(block.body[at - 1], ast.FunctionDef)
    for each in found:
        ast.fix_missing_locations(each)
    return found


def _places(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements give to a field of something, and so are likely to have elsewhere, too."""
    return {name for node in body for name, value in assigned(node) if isinstance(value, ast.Attribute)}


def _outer(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function reads and does not give."""
    names = {each.id for each in walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
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


def is_place(node: ast.expr) -> bool:
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
            each.id for each in walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        } - given
        if isinstance(node, ast.Assign):
            given |= {each.id for part in node.targets for each in _parts(part) if isinstance(each, ast.Name)}
    return found


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement gives to expressions, one by one."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [*zip(target.elts, value.elts, strict=True)]
        for left, right in pairs:
            if isinstance(left, ast.Name):
                yield left.id, right


# Arguments that nobody reads, items that nobody needs


def drop_arguments(tree: ast.Module, roots: Sequence[str]) -> None:
    """Drop arguments that are not read, of functions that are only called by name."""
    loads = [node.id for node in walk(tree) if isinstance(node, ast.Name)]
    calls = [node for node in walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name in roots or node.args.vararg or node.args.kwarg:
            continue
        mine = [call for call in calls if is_name(call.func, node.name)]
        read = {each.id for each in walk(node) if isinstance(each, ast.Name)}
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


def drop_items(tree: ast.Module, roots: Sequence[str]) -> None:
    """Drop the functions, classes and constants that the roots do not need."""
    defined = [_defined(node) for node in tree.body]
    reads = [{each.id for each in walk(node) if isinstance(each, ast.Name)} for node in tree.body]
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
    return {name.id for target in targets for name in walk(target) if isinstance(name, ast.Name)}
