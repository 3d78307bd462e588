"""How calls and functions are laid out: on one line, or with a line for each argument."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping

WIDTH = 120


def signed(text: str, usual: Mapping[str, str], lost: Collection[str] = (), *, types: bool = True) -> str:
    """Return a function with defaults, and without some arguments; defaults that are no constants stand in its body.

    Without `types` its head has none. A function has no ``*arguments`` here, nor arguments by place alone.
    """
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    arguments, lines = function.args, text.splitlines()
    values = dict(zip([each.arg for each in arguments.args][::-1], arguments.defaults[::-1], strict=False))
    values |= {
        each.arg: value for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value
    }
    head, found = [], []
    for each in (*arguments.args, *arguments.kwonlyargs):
        if each.arg in lost:
            continue
        if each in arguments.kwonlyargs and "*" not in head:
            head.append("*")
        kind = ast.unparse(each.annotation) if each.annotation else "Array"
        default = usual.get(each.arg, ast.get_source_segment(text, values[each.arg]) if each.arg in values else None)
        if default is not None and "(" in default and not default.startswith("np.array("):
            found += [f"    if {each.arg} is None:", laid_out(f"{each.arg} = ", default, " " * 8)]
            kind, default = kind if "None" in kind else f"{kind} | None", "None"
        bare = each.arg if default is None else f"{each.arg}={default}"
        head.append((f"{each.arg}: {kind}" + ("" if default is None else f" = {default}")) if types else bare)
    if arguments.kwarg is not None:
        head.append(f"**{ast.get_source_segment(text, arguments.kwarg)}")
    first = function.body[0].lineno - 1
    returns = f" -> {ast.unparse(function.returns)}:" if function.returns and types else ":"
    above = lines[: function.lineno - 1]
    docstring = lines[first : function.body[0].end_lineno]
    rest = lines[function.body[0].end_lineno or 0 :]
    return "\n".join([*above, call(f"def {function.name}", head, "", returns), *docstring, *found, *rest, ""])


def call(head: str, arguments: Iterable[str], indent: str, tail: str) -> str:
    """Return a call on one line, on three, or with a line for each argument."""
    parts = list(arguments)
    line = f"{head}({', '.join(parts)}){tail}"
    if len(line) <= WIDTH:
        return line
    inner = f"{indent}    {', '.join(parts)}"
    if len(inner) <= WIDTH:
        return f"{head}(\n{inner}\n{indent}){tail}"
    return "\n".join([f"{head}(", *(laid_out("", part, indent + " " * 4, ",") for part in parts), f"{indent}){tail}"])


def laid_out(head: str, text: str, indent: str, tail: str = "") -> str:
    """Return an expression behind `head`, with a line for each argument of a call where one line is too long."""
    line = f"{indent}{head}{text}{tail}"
    if len(line) <= WIDTH or not text.endswith(")"):
        return line
    keyword, _, value = text.partition("=") if text.partition("=")[0].isidentifier() else ("", "", text)
    node = ast.parse(value, mode="eval").body
    if not isinstance(node, ast.Call):
        return line
    arguments = [ast.get_source_segment(value, each) or "" for each in node.args]
    arguments += [f"{each.arg}={ast.get_source_segment(value, each.value)}" for each in node.keywords]
    function = f"{keyword}=" * bool(keyword) + ast.unparse(node.func)
    return call(f"{indent}{head}{function}", arguments, indent, tail)


def broken(code: str, column: int, comment: str, width: int = WIDTH) -> list[str]:
    """Return a statement on one line, or with what stands in its last brackets on lines of their own."""
    indent = " " * column
    *above, last = code.split("\n")
    line = f"{indent}{last}"
    head = [indent + each for each in above]
    if len(line) + len(comment) <= width:
        return [*head, line + comment]
    end = max(last.rfind(")"), last.rfind("]"), last.rfind("}"))
    start = _opening(last, end)
    if start is None or end < 0:
        return [*head, line + comment]
    inner, tail = last[start + 1 : end], last[end:]
    body = f"{indent}    {inner}"
    if len(body) <= width:
        return [*head, f"{indent}{last[: start + 1]}", body, f"{indent}{tail}{comment}"]
    parts: list[str] = []
    for part in _parts(inner):
        short = len(part) + column + 5 <= width or not part.endswith((")", "]", "}"))
        parts += [f"{indent}    {part},"] if short else broken(part, column + 4, ",", width)
    if " for " in inner and len(parts) < 2:
        parts = [body]
    return [*head, f"{indent}{last[: start + 1]}", *parts, f"{indent}{tail}{comment}"]


def _opening(text: str, end: int) -> int | None:
    """Return where the bracket opens that closes at `end`."""
    depth = 0
    for at in range(end, -1, -1):
        depth += (text[at] in ")]}") - (text[at] in "([{")
        if depth == 0:
            return at
    return None


def _parts(text: str) -> list[str]:
    """Return what stands between the commas of a text that are in no brackets."""
    found, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            found.append(text[start:at].strip())
            start = at + 1
    return [*found, text[start:].strip()]
