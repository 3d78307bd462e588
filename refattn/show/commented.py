"""Source as a syntax tree whose statements keep their comments, and, where nothing was changed, their text.

`read` makes the tree, `text_of` writes it. A statement carries in `kept` what the tree has no place for.
"""

from __future__ import annotations

import ast
import copy
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from refattn.show.layout import WIDTH, broken, call
from refattn.show.nodes import walk

BODIES = ("body", "orelse", "finalbody")


@dataclass
class Kept:
    """What belongs to a statement, or to the head of one with a body, beside its tree."""

    above: list[str]  # comments on the lines before it
    beside: str  # the comment behind it
    gap: bool  # whether an empty line stands before it
    lines: list[str]  # its text
    column: int
    tree: str  # what it was when it was read


def read(text: str) -> ast.Module:
    """Return the tree of a file, with `kept` at each statement."""
    tree, lines = ast.parse(text), text.splitlines()
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in statements(tree):
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]) - 1
        last = _head_end(node, lines)
        at = first
        while at > 0 and lines[at - 1].lstrip().startswith("#"):
            at -= 1
        above = [line.strip() for line in lines[at:first]]
        gap = at > 0 and not lines[at - 1].strip()
        of_it = lines[first:last]
        set_kept(node, Kept(above, comments.get(last, ""), gap, of_it, node.col_offset, _head(node)))
    return tree


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements of a tree."""
    return (node for node in walk(tree) if isinstance(node, ast.stmt))


def kept_of(node: ast.stmt) -> Kept:
    """Return what a statement keeps, nothing where it is new."""
    found = getattr(node, "kept", None)
    return found if found is not None else Kept([], "", False, [], 0, "")


def set_kept(node: ast.stmt, kept: Kept) -> None:
    cast(Any, node).kept = kept


def like(new: ast.stmt, old: ast.stmt) -> ast.stmt:
    """Return a statement with the comments of another, which it stands for."""
    known = kept_of(old)
    set_kept(new, Kept(known.above, known.beside, known.gap, [], 0, ""))
    return ast.copy_location(new, old)


def text_of(tree: ast.Module) -> str:
    """Return the text of a file."""
    return "\n".join(_block(tree.body, 0)) + "\n" if tree.body else ""


def _head_end(node: ast.stmt, lines: Sequence[str]) -> int:
    """Return the number of the last line of a statement, or of the head of one with a body."""
    body = getattr(node, "body", None)
    if not body:
        return int(node.end_lineno or 0)
    inner = min([body[0].lineno, *(each.lineno for each in getattr(body[0], "decorator_list", []))]) - 1
    while inner > node.lineno and (not lines[inner - 1].strip() or lines[inner - 1].lstrip().startswith("#")):
        inner -= 1
    return inner


def _head(node: ast.stmt) -> str:
    """Return what a statement is, without the statements in it."""
    return "|".join(
        ast.dump(value) if isinstance(value, ast.AST) else repr(_dumped(value))
        for name, value in ast.iter_fields(node)
        if name not in (*BODIES, "handlers")
    )


def _dumped(value: Any) -> Any:
    return (
        [ast.dump(each) if isinstance(each, ast.AST) else each for each in value] if isinstance(value, list) else value
    )


def _block(body: Sequence[ast.stmt], column: int) -> Iterator[str]:
    for at, node in enumerate(body):
        kept = kept_of(node)
        if kept.gap and at:
            yield ""
        yield from _statement(node, column)


def _statement(node: ast.stmt, column: int, word: str = "") -> Iterator[str]:
    kept, indent = kept_of(node), " " * column
    yield from (indent + line for line in kept.above)
    same = bool(kept.lines) and kept.tree == _head(node) and not word
    if same and (len(kept.lines) == 1 or kept.column == column or isinstance(node, ast.Expr)):
        shift = column - kept.column
        yield from (_shifted(line, shift) for line in kept.lines)
    else:
        yield from _lines(node, column, word)
    if getattr(node, "body", None) is None:
        return
    known = cast(Any, node)
    yield from _block(known.body, column + 4)
    for handler in getattr(node, "handlers", []):
        yield f"{indent}{ast.unparse(handler).partition(chr(10))[0]}"
        yield from _block(handler.body, column + 4)
    orelse = getattr(node, "orelse", [])
    if isinstance(node, ast.If) and len(orelse) == 1 and isinstance(orelse[0], ast.If) and not kept_of(orelse[0]).above:
        yield from _statement(orelse[0], column, "elif")
    elif orelse:
        yield f"{indent}else:"
        yield from _block(orelse, column + 4)


def _lines(node: ast.stmt, column: int, word: str) -> Iterator[str]:
    """Yield a statement, or its head, as it is laid out now."""
    kept, indent = kept_of(node), " " * column
    beside = f"  {kept.beside}" if kept.beside else ""
    if isinstance(node, ast.FunctionDef):
        yield from (f"{indent}@{written(each)}" for each in node.decorator_list)
        returns = f" -> {written(node.returns)}:" if node.returns else ":"
        yield from call(f"{indent}def {node.name}", _arguments(node.args), indent, f"{returns}{beside}").split("\n")
        return
    code = _code(node, word)
    value = getattr(node, "value", None)
    if len(indent + code + beside) > WIDTH and isinstance(value, ast.IfExp | ast.BinOp | ast.BoolOp | ast.Compare):
        head = code[: len(code) - len(bare(value))]
        yield from (f"{indent}{head}(", f"{indent}    {bare(value)}", f"{indent}){beside}")
    else:
        yield from broken(code, column, beside)


def _arguments(arguments: ast.arguments) -> list[str]:
    """Return the arguments of a function as they are written in its head."""
    usual = [None] * (len(arguments.args) - len(arguments.defaults)) + [*arguments.defaults]
    found = [_argument(each, value) for each, value in zip(arguments.args, usual, strict=True)]
    if arguments.vararg is not None:
        found.append(f"*{_argument(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [_argument(each, x) for each, x in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return found + ([f"**{_argument(arguments.kwarg, None)}"] if arguments.kwarg is not None else [])


def _argument(argument: ast.arg, usual: ast.expr | None) -> str:
    text = argument.arg if argument.annotation is None else f"{argument.arg}: {written(argument.annotation)}"
    equals = " = " if argument.annotation is not None else "="
    return text if usual is None else f"{text}{equals}{written(usual)}"


def _shifted(line: str, shift: int) -> str:
    return line if not line.strip() else " " * shift + line if shift >= 0 else line[-shift:]


def _code(node: ast.stmt, word: str = "") -> str:
    """Return a statement, or the head of one with a body, on one line."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.Name | ast.expr):
        return " = ".join(map(bare, [*node.targets, node.value]))
    if isinstance(node, ast.Return) and node.value is not None:
        return f"return {bare(node.value)}"
    if isinstance(node, ast.For):
        return f"for {bare(node.target)} in {bare(node.iter)}:"
    if isinstance(node, ast.If):
        return f"{word or 'if'} {written(node.test)}:"
    if not hasattr(node, "body"):
        return written(node)
    head = copy.copy(node)
    for name in (*BODIES, "handlers"):
        if hasattr(head, name):
            setattr(head, name, [ast.Pass()] if name == "body" else [])
    return written(head).rpartition("\n")[0]


def bare(node: ast.expr) -> str:
    """Return an expression, a tuple without its parentheses."""
    if isinstance(node, ast.Tuple) and len(node.elts) > 1:
        return ", ".join(map(written, node.elts))
    return written(node)


def written(node: ast.AST) -> str:
    """Return a tree as text, with the quotes and the spaces of the house."""
    text = re.sub(r"(?<![\w.)\]])([A-Za-z_][\w.]*|\d+) \*\* (\w+)(?![\w.(\[])", r"\1**\2", ast.unparse(node))
    if "'" not in text:
        return text
    lines = text.splitlines(keepends=True)
    for token in reversed([*tokenize.generate_tokens(io.StringIO(text).readline)]):
        row, start, stop = token.start[0] - 1, token.start[1], token.end[1]
        if token.type == tokenize.STRING and token.string.startswith("'") and not {*token.string} & {'"', "\\"}:
            lines[row] = f'{lines[row][:start]}"{token.string[1:-1]}"{lines[row][stop:]}'
    return "".join(lines)
