"""Stand-ins that are one expression, written out where they are called: what is left is plain NumPy."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from refattn.show.layout import WIDTH
from refattn.show.nodes import walk

SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.Tuple)


def written_out(text: str, functions: Mapping[str, str]) -> str:
    """Return an item with the calls of `functions`, texts by name, written out where a line has room for it."""
    known = {name: ast.parse(each).body[0] for name, each in functions.items()}
    short = {name: each for name, each in known.items() if isinstance(each, ast.FunctionDef) and len(each.body) == 2}
    passed: set[tuple[int, int]] = set()
    while True:
        tree, lines = ast.parse(text), text.splitlines()
        whole = {id(node.value) for node in walk(tree) if isinstance(node, ast.Assign | ast.Return | ast.keyword)}
        own = {node.id for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.name for node in walk(tree) if isinstance(node, ast.FunctionDef)}
        own = {node.id for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {node.name for node in walk(tree) if isinstance(node, ast.FunctionDef)}
        whole |= {id(each) for node in walk(tree) if isinstance(node, ast.Call) for each in node.args}
        for node in walk(tree):
            if (
                not isinstance(node, ast.Call)
                or not isinstance(node.func, ast.Name)
                or node.func.id not in short.keys() - own
            ):
                continue
            place = (node.lineno, len(lines[node.lineno - 1].encode()) - node.col_offset)
            if place in passed or node.lineno != node.end_lineno or node.keywords:
                continue
            passed.add(place)
            new = _expression(short[node.func.id], functions[node.func.id], node, text)
            line = lines[node.lineno - 1].encode()
            if new is not None:
                new = new if new.endswith((")", "]")) or id(node) in whole else f"({new})"
                longer = (line[: node.col_offset] + new.encode() + line[node.end_col_offset :]).decode()
                if len(longer) <= WIDTH:
                    lines[node.lineno - 1] = longer
                    text = "\n".join([*lines, ""])
                    break
        else:
            return text


def _expression(function: ast.FunctionDef, own: str, call: ast.Call, text: str) -> str | None:
    """Return what a function returns, with what is given in place of its arguments; None where it cannot be said."""
    result = function.body[1]
    if not isinstance(result, ast.Return) or result.value is None or result.lineno != result.end_lineno:
        return None
    if len(call.args) != len(function.args.args) or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    if len(call.args) != len(function.args.args) or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    given = dict(zip([each.arg for each in function.args.args], call.args, strict=True))
    names = [node for node in walk(result.value) if isinstance(node, ast.Name) and node.id in given]
    for name, value in given.items():
        if not isinstance(value, ast.Name | ast.Attribute) and sum(node.id == name for node in names) > 1:
            return None
    calls = [node for node in walk(result.value) if isinstance(node, ast.Call)]
    alone = {id(each) for node in calls for each in (*node.args, *(keyword.value for keyword in node.keywords))}
    line, start = own.splitlines()[result.lineno - 1], result.value.col_offset
    for node in sorted(names, key=lambda node: -node.col_offset):
        value = given[node.id]
        inner = ast.get_source_segment(text, value) or ""
        inner = inner if isinstance(value, SIMPLE) or id(node) in alone else f"({inner})"
        line = line[: node.col_offset] + inner + line[node.end_col_offset :]
    return line[start:]
