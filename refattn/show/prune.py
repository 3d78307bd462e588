"""The usual case of a definition: what its code would do for other choices than those of the library is left out.

A choice is text, a class, None or a truth value that an option holds; numbers, arrays and their sizes are none. The
items run with calls that have the usual choices, and any numbers, masks and sizes. A test that depends on choices
alone, and came out the same in all of them, is replaced by what it leads to; then go values that nobody reads,
arguments that nobody gives, and functions that nobody calls.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any, TypeAlias

from refattn.show.layout import call, signed

NOTHING = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])

Test: TypeAlias = ast.If | ast.IfExp


@dataclasses.dataclass(frozen=True)
class Sample:
    """A call of `forward`, and one of `backward` with its results `out` and `saved`, as the text of their arguments."""

    forward: str
    backward: str
    arrays: Mapping[str, Any]


def prune(texts: Sequence[str], main: str, imports: str, samples: Iterable[Sample], roots: Sequence[str]) -> list[str]:
    """Return the texts of the items and of the program, shorter, and "" for items that `roots` and it do not need."""
    came_out = _observed(texts, imports, samples, roots)
    found = [*map(_without_tests, texts, came_out), main]
    while True:
        shorter = _without_fields([_without_values(text) for text in found])
        shorter = without_functions(_without_arguments(shorter), roots)
        if shorter == found:
            return [re.sub(r"\n\n\n+", "\n\n", text).rstrip("\n") + "\n" if text else "" for text in found]
        found = shorter


def _tests(tree: ast.AST) -> list[Test]:
    """Return the tests in the order of the text."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset, -(node.end_lineno or 0)))


def _observed(
    texts: Sequence[str], imports: str, samples: Iterable[Sample], roots: Sequence[str]
) -> list[list[bool | None]]:
    """Return for each test of each item how it came out, None where not always so, or not by choices alone."""
    seen: dict[tuple[int, int], set[bool | None]] = {}

    def look(item: int, test: int, value: Any, by_choice: Callable[[], Any]) -> Any:
        seen.setdefault((item, test), set()).add(bool(value) if by_choice() else None)
        return value

    module = ModuleType("refattn_show_sample")
    names = module.__dict__
    names |= {"_look": look, "_choice": _is_choice}
    sys.modules[module.__name__] = module  # where dataclasses look for their annotations
    try:
        exec(imports, names)
        counts = []
        for at, text in enumerate(texts):
            tree = ast.parse(text)
            tests = _tests(tree)
            counts.append(len(tests))
            results = _results(tree)
            for number, node in enumerate(tests):
                decided = ast.Lambda(NOTHING, _by_choice(node.test, results.get(id(node), set())))
                given = [ast.Constant(at), ast.Constant(number), node.test, decided]
                node.test = ast.Call(ast.Name("_look", ast.Load()), given, [])
            exec(compile(ast.fix_missing_locations(tree), "<sample>", "exec", flags=annotations.compiler_flag), names)
        for sample in samples:
            inside = {**names, **sample.arrays}
            out, *_, saved = eval(f"{roots[0]}({sample.forward})", inside)
            eval(f"{roots[1]}({sample.backward})", {**inside, "out": out, "saved": saved})
    finally:
        del sys.modules[module.__name__]
    found = [[seen.get((at, number), {None}) for number in range(count)] for at, count in enumerate(counts)]
    return [[next(iter(values)) if len(values) == 1 else None for values in item] for item in found]


def _results(tree: ast.AST) -> dict[int, set[str]]:
    """Return for each test, by its id, the names that stand for what calls returned, or for one of several things."""
    found: dict[int, set[str]] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = set()
            for node in ast.walk(function):
                value = node.value if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else None
                if isinstance(node, ast.For) or (value and any(isinstance(each, ast.Call) for each in ast.walk(value))):
                    stored = [each for each in ast.walk(node) if isinstance(each, ast.Name) and _is_stored(each)]
                    names |= {each.id for each in stored}
            for test in _tests(function):
                found.setdefault(id(test), set()).update(names)
    return found


def _by_choice(test: ast.expr, results: Set[str]) -> ast.expr:
    """Return an expression for whether a test came out as it did because of choices.

    Names and attributes are looked at; a call is no choice, nor is its result, nor the truth of a name. One part of an
    ``or`` that is true by choice is enough, as is one of an ``and`` that is false.
    """
    if isinstance(test, ast.BoolOp):
        parts = [_by_choice(part, results) for part in test.values]
        wrong = isinstance(test.op, ast.And)
        values = [ast.UnaryOp(ast.Not(), part) if wrong else part for part in test.values]
        decided = [ast.BoolOp(ast.And(), [part, value]) for part, value in zip(parts, values, strict=True)]
        return ast.BoolOp(ast.Or(), [ast.BoolOp(ast.And(), parts), *decided])
    if isinstance(test, ast.Name) and test.id in results:
        return ast.Constant(False)
    if isinstance(test, ast.Name | ast.Attribute):
        name = ast.Constant(isinstance(test, ast.Name))
        return ast.Call(ast.Name("_choice", ast.Load()), [ast.Lambda(NOTHING, test), name], [])
    if isinstance(test, ast.Call) and not (isinstance(test.func, ast.Name) and test.func.id == "isinstance"):
        return ast.Constant(False)
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
        # Whether there is something at all, even an array, is a choice; unless a call has found it out.
        known = isinstance(test.left, ast.Attribute) or (
            isinstance(test.left, ast.Name) and test.left.id not in results
        )
        return ast.Constant(known)
    parts = [_by_choice(child, results) for child in ast.iter_child_nodes(test) if isinstance(child, ast.expr)]
    return ast.BoolOp(ast.And(), [ast.Constant(True), ast.Constant(True), *parts])


def _is_choice(part: Callable[[], Any], name: bool) -> bool:
    try:
        value = part()
    except Exception:  # of what was not looked at, because the test was decided before
        return False
    if isinstance(value, bool):
        return not name
    return value is None or isinstance(value, str) or callable(value) or dataclasses.is_dataclass(value)


def _without_tests(text: str, outcomes: Sequence[bool | None]) -> str:
    """Return an item with each test of a known outcome replaced by what follows from it."""
    known = list(outcomes)
    while any(outcome is not None for outcome in known):
        number = next(n for n, outcome in enumerate(known) if outcome is not None)
        tests, outcome = _tests(ast.parse(text)), known[number]
        node = tests[number]
        if isinstance(node, ast.IfExp):
            side = node.body if outcome else node.orelse
            text, kept = _chosen(text, node, side), [*ast.walk(side)]
        else:
            branch = node.body if outcome else node.orelse
            text, kept = _replaced(text, node, branch), [each for part in branch for each in ast.walk(part)]
        lost = {id(each) for each in ast.walk(node)} - {id(each) for each in kept}
        known = [value for value, each in zip(known, tests, strict=True) if id(each) not in lost]
        known = known if len(known) == len(_tests(ast.parse(text))) else []  # tests were lost after a return
    return text


def _chosen(text: str, node: ast.IfExp, kept: ast.expr) -> str:
    """Return the text with one side of ``a if test else b``."""
    start, stop = _at(text, node.lineno, node.col_offset), _at(text, node.end_lineno, node.end_col_offset)
    return text[:start] + (ast.get_source_segment(text, kept) or "") + text[stop:]


def _replaced(text: str, node: ast.If, kept: Sequence[ast.stmt]) -> str:
    """Return the text with one branch of an ``if`` in place of all; nothing follows a branch that returns."""
    lines = text.splitlines()
    first, last = node.lineno - 1, int(node.end_lineno or 0)
    indent = " " * node.col_offset
    chained = lines[first].lstrip().startswith("elif")
    if not kept:
        branch = []
    elif isinstance(kept[0], ast.If) and lines[kept[0].lineno - 1].lstrip().startswith("elif"):
        branch = lines[kept[0].lineno - 1 : last]
        branch[0] = branch[0] if chained else branch[0].replace("elif", "if", 1)
    else:
        start = _comments_above(lines, kept[0].lineno - 1)
        body = lines[start : int(kept[-1].end_lineno or 0)]
        depth = len(lines[kept[0].lineno - 1]) - len(lines[kept[0].lineno - 1].lstrip()) - len(indent)
        branch = [f"{indent}else:", *body] if chained else [line[depth:] if line.strip() else line for line in body]
        if not chained and isinstance(kept[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
            end = last
            for at, line in enumerate(lines[last:], last):
                if line.strip() and not line.startswith(indent):
                    break
                end = at + 1 if line.strip() else end  # the empty lines after the function stay
            del lines[last:end]
    return "\n".join([*lines[:first], *branch, *lines[last:], ""])


def _without_values(text: str) -> str:
    """Return an item without the lines of functions that give a name to what nobody reads."""
    while True:
        lines = text.splitlines()
        for function in ast.walk(ast.parse(text)) if text else ():
            if isinstance(function, ast.FunctionDef):
                read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and not _is_stored(node)}
                for node in ast.walk(function):
                    if not isinstance(node, ast.Assign) or len(function.body) == 1:
                        continue
                    target = node.targets[0]
                    if isinstance(target, ast.Tuple) and (shorter := _without_parts(lines, text, node, read)):
                        text = shorter
                        break
                    if isinstance(target, ast.Name) and target.id not in read:
                        start = _comments_above(lines, node.lineno - 1)
                        text = "\n".join([*lines[:start], *lines[int(node.end_lineno or 0) :], ""])
                        break
                else:
                    continue
                break
        else:
            return text


def _without_parts(lines: list[str], text: str, node: ast.Assign, read: Set[str]) -> str | None:
    """Return the text with ``a, b = x, y`` for those names alone that are read, None where all are."""
    targets, values = (part.elts if isinstance(part, ast.Tuple) else [] for part in (node.targets[0], node.value))
    kept = [
        pair for pair in zip(targets, values, strict=False) if not isinstance(pair[0], ast.Name) or pair[0].id in read
    ]
    if len(targets) != len(values) or len(kept) in (0, len(values)) or node.lineno != node.end_lineno:
        return None
    left, right = (", ".join(ast.get_source_segment(text, pair[n]) or "" for pair in kept) for n in (0, 1))
    line = lines[node.lineno - 1].encode()
    new = f"{' ' * node.col_offset}{left} = {right}{line[node.end_col_offset :].decode()}"
    return "\n".join([*lines[: node.lineno - 1], new, *lines[node.lineno :], ""])


def _without_fields(texts: Sequence[str]) -> list[str]:
    """Return the items without fields that nobody reads, of classes that are made by keyword alone."""
    trees = [ast.parse(text) for text in texts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not _is_stored(node)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    by_place = {call.func.id for call in calls if isinstance(call.func, ast.Name) and call.args}
    classes = [top for tree in trees for top in tree.body if isinstance(top, ast.ClassDef) and top.name not in by_place]
    lost = {
        (top.name, node.target.id)
        for top in classes
        for node in top.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id not in read
    }
    return [_without_methods(_without_keywords(text, lost) if lost else text, read) for text in texts]


def _without_methods(text: str, read: Set[str]) -> str:
    """Return an item without the methods that nobody calls, one after the other."""
    lines = text.splitlines()
    for top in ast.parse(text).body:
        body = top.body if isinstance(top, ast.ClassDef) else []
        for node in reversed(body[1:]):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__") and node.name not in read:
                before = body[body.index(node) - 1]
                del lines[int(before.end_lineno or 0) : int(node.end_lineno or 0)]
    return "\n".join([*lines, ""]) if lines else ""


def _without_keywords(text: str, lost: Set[tuple[str, str]]) -> str:
    """Return an item without some fields, by class and name, where they are declared and where they are given."""
    tree, edits = ast.parse(text), list[tuple[int, int, str]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            fields = [each for each in fields if (node.name, ast.unparse(each.target)) in lost]
            for n, each in enumerate(fields):
                new = f"{' ' * each.col_offset}pass\n" if len(fields) == len(node.body) and not n else ""
                edits.append((_at(text, each.lineno, 0), _at(text, int(each.end_lineno or 0) + 1, 0), new))
        elif isinstance(node, ast.Call) and any((ast.unparse(node.func), each.arg) in lost for each in node.keywords):
            kept = [each for each in node.keywords if (ast.unparse(node.func), each.arg) not in lost]
            given = [f"{each.arg}={ast.get_source_segment(text, each.value)}" for each in kept]
            start, stop = _at(text, node.lineno, node.col_offset), _at(text, node.end_lineno, node.end_col_offset)
            line = text.splitlines()[node.lineno - 1]
            indent = " " * (len(line) - len(line.lstrip()))
            head = f"{line[: node.col_offset]}{ast.unparse(node.func)}"
            edits.append((start - node.col_offset, stop, call(head, given, indent, "")))
    for start, stop, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[stop:]
    return text


def _without_arguments(texts: Sequence[str]) -> list[str]:
    """Return the items without arguments that nobody gives, and that are not read any more."""
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    loads = [node.id for node in nodes if isinstance(node, ast.Name) and not _is_stored(node)]
    found = []
    for text in texts:
        for top in ast.parse(text).body:
            if not isinstance(top, ast.FunctionDef):
                continue
            mine = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == top.name]
            if len(mine) != loads.count(top.name):
                continue  # it is handed on, and called elsewhere
            given = {keyword.arg for call in mine for keyword in call.keywords}
            places = max((len(call.args) for call in mine), default=0)
            read = {node.id for node in ast.walk(top) if isinstance(node, ast.Name)}
            names = [each.arg for each in top.args.args[len(top.args.args) - len(top.args.defaults) :]]
            names += [each.arg for each, value in zip(top.args.kwonlyargs, top.args.kw_defaults, strict=True) if value]
            late = [each.arg for each in top.args.args[places:]] + [each.arg for each in top.args.kwonlyargs]
            lost = {name for name in names if name in late and name not in given and name not in read}
            text = signed(text, {}, lost) if lost else text
        found.append(text)
    return found


def without_functions(texts: Sequence[str], roots: Sequence[str]) -> list[str]:
    """Return the items that the roots need."""
    trees = [ast.parse(text) for text in texts]
    names = [{name for node in tree.body for name in _defined(node)} for tree in trees]
    reads = [{node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} for tree in trees]
    needed, todo = set[int](), {at for at, own in enumerate(names) if own & {*roots} or not own}
    while todo:
        needed |= todo
        wanted = set[str]().union(*(reads[at] for at in todo))
        todo = {at for at, own in enumerate(names) if own & wanted} - needed
    return [text if at in needed else "" for at, text in enumerate(texts)]


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
            yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _comments_above(lines: Sequence[str], line: int) -> int:
    """Return the number of the first of the comments that stand above a line."""
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
    return line


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _at(text: str, line: int | None, column: int | None) -> int:
    """Return the offset of a place as `ast` gives it: `column` counts bytes."""
    lines = [*text.splitlines(keepends=True), ""]
    assert line is not None
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())
