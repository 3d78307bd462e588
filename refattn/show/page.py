"""The page itself: the definition, what it uses, a call with the defaults of the library, and a small run."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.inputs import make
from refattn.mechanisms.record import Mechanism
from refattn.show.calls import definition, expression, watch
from refattn.show.link import PLAIN, XP, Linked, Ref, resolve, source

WIDTH = 120

RESERVED = ("gradients", "out", "saved", "q", "k", "v")
"""Names of the page itself."""

ARRAY = Ref(PLAIN, "Array")

TOLD = """\
Printed by `refattn show {name}`, version {version}, on NumPy alone and without checks of arguments, from
{file} and what it uses; with defaults as in refattn.{name}.forward.
"""


def page(record: Mechanism, version: str) -> str:
    """Return the definition of a mechanism as one file that runs on NumPy alone; it names the version of refattn.

    Raises
    ------
    ValueError
        Where the mechanism has no core, or its definition uses what is neither of `refattn.ops` nor of its room.
    """
    module, shown = definition(record), Shown(record)
    linked = shown.linked
    pieces: list[str] = []
    home, before = module.__name__, None
    for item in linked.ordered(module.__name__):
        if item.ref == ARRAY:
            continue
        text = linked.text(item, whole=item.ref.module == module.__name__)
        if item.ref in shown.roots:
            text = shown.with_defaults(text, shown.roots.index(item.ref))
        if item.ref.module != home:
            home = item.ref.module
            text = f"# From {_file(XP if home == PLAIN else home)}\n{text}"
        pieces += [_gap(before, item.nodes[0]), text]
        before = item.nodes[0]
    pieces += ["\n\n", shown.main()]
    body = "".join(pieces)
    told = TOLD.format(name=record.name, version=version, file=_file(module.__name__))
    docstring = f'"""{source(module.__name__).docstring.rstrip()}\n\n{told}"""'
    top = f"{_imports(linked.imports, body)}\nArray = np.ndarray\n"
    return f"{docstring}\n\nfrom __future__ import annotations\n\n{top}{body}"


class Shown:
    """What is known of a mechanism: its linked items, and how its core calls the definition.

    Attributes
    ----------
    linked
        What `forward` and `backward` use.
    name
        A function that gives the name on the page for a name of a module.
    """

    def __init__(self, record: Mechanism) -> None:
        self.record, module = record, definition(record).__name__
        self.tiny = make(record.name, record.case("tiny"), "float64")
        self.options = record.case("tiny").options
        b, h, n, d = self.tiny["q"].shape
        plain = {name: self.tiny[name] for name in ("q", "k", "v")}
        wider = {name: _made((b + 1, h, n + 1, d + 1)) for name in plain}
        self.calls = [watch(record, arrays, {}) for arrays in (plain, wider)]
        self.call = watch(record, self.tiny, self.options)
        found: list[Ref] = []

        def look(ref: Ref) -> str:
            found.append(ref)
            return ref.name

        self.name: Callable[[Ref], str] = look
        self.usual()
        self.given()
        self.roots = [ref for name in ("forward", "backward") if isinstance(ref := resolve(module, name), Ref)]
        self.linked = Linked(dict.fromkeys((*self.roots, *found)), RESERVED)
        self.name = self.linked.names.__getitem__

    def usual(self) -> dict[str, str]:
        """Return the arguments that `forward` has no default for, or another, with what the core gives by default."""
        parameters = inspect.signature(definition(self.record).forward).parameters
        queries = [call.forward["q"] for call in self.calls]
        texts = {
            name: expression([call.forward[name] for call in self.calls], queries, self.name)
            for name in self.calls[0].forward
            if name not in ("q", "k", "v")
        }
        return {name: text for name, text in texts.items() if text != repr(parameters[name].default)}

    def given(self) -> dict[str, str]:
        """Return what the case "tiny" gives to `forward` beside q, k and v, where that is not the default."""
        usual, given = self.usual(), {}
        for name, value in self.call.forward.items():
            if name in self.tiny and name not in ("q", "k", "v"):
                given[name] = name
            elif name in usual and "q.shape" not in usual[name]:
                text = expression([value], [self.call.forward["q"]], self.name)
                given |= {} if text == usual[name] else {name: text}
        return given

    def with_defaults(self, text: str, which: int) -> str:
        """Return the text of `forward` (0) or `backward` (1) with the defaults that the core has."""
        if which == 0:
            return _with_defaults(text, self.usual())
        given = list(self.call.backward.items())[2:]
        return _with_defaults(text, {name: expression([value], [None], self.name) for name, value in given})

    def main(self) -> str:
        """Return the run of the case "tiny"."""
        given = [f"{name}={text}" for name, text in self.given().items()]
        forward, backward = map(self.name, self.roots)
        lines = ['if __name__ == "__main__":', f'    # The case "tiny", as `refattn trace {self.record.name}` has it.']
        lines += ["    # fmt: off", *_arrays(self.tiny), "    # fmt: on"]
        lines.append(_call(f"    out, *_, saved = {forward}", ["q", "k", "v", *given], "    ", ""))
        lines.append(f"    gradients = {backward}(saved, np.ones_like(out))  # of the sum of out")
        lines.append('    print({"out": out, **{f"d_{name}": gradient for name, gradient in gradients.items()}})')
        return "\n".join(lines) + "\n"


def _with_defaults(text: str, usual: Mapping[str, str]) -> str:
    """Return a function with defaults; those that are no constants are found in its body."""
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    arguments, lines = function.args, text.splitlines()
    values = dict(zip([each.arg for each in arguments.args][::-1], arguments.defaults[::-1], strict=False))
    values |= {
        each.arg: value for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value
    }
    head, found = [], []
    for each in (*arguments.args, *arguments.kwonlyargs):
        if arguments.kwonlyargs and each is arguments.kwonlyargs[0]:
            head.append("*")
        kind = ast.unparse(each.annotation) if each.annotation else "Array"
        default = usual.get(each.arg, ast.unparse(values[each.arg]) if each.arg in values else None)
        if default is not None and "(" in default:
            found += [f"    if {each.arg} is None:", _laid_out(f"{each.arg} = ", default, " " * 8)]
            kind, default = kind if "None" in kind else f"{kind} | None", "None"
        head.append(f"{each.arg}: {kind}" + ("" if default is None else f" = {default}"))
    first = function.body[0].lineno - 1
    returns = f" -> {ast.unparse(function.returns)}:" if function.returns else ":"
    above = lines[: function.lineno - 1]
    docstring = lines[first : function.body[0].end_lineno]
    rest = lines[function.body[0].end_lineno or 0 :]
    return "\n".join([*above, _call(f"def {function.name}", head, "", returns), *docstring, *found, *rest, ""])


def _made(shape: tuple[int, ...]) -> NDArray[Any]:
    """Return numbers of any kind."""
    return np.cos(np.arange(math.prod(shape), dtype=np.float64)).reshape(shape)


def _arrays(arrays: Mapping[str, NDArray[Any]]) -> Iterable[str]:
    """Yield lines that make the arrays, those of one shape together; designed numbers are whole over a power of two."""
    power = next(
        p for p in range(60) if all(np.all(np.ldexp(x, p) == np.rint(np.ldexp(x, p))) for x in arrays.values())
    )
    for shape in dict.fromkeys(x.shape for x in arrays.values()):
        names = [name for name, x in arrays.items() if x.shape == shape]
        yield f"    {', '.join(names)} = np.array(["
        for name in names:
            line = " " * 8
            for number in np.ldexp(arrays[name], power).astype(np.int64).ravel().tolist():
                if len(line) + len(f"{number}, ") > WIDTH:
                    yield line.rstrip()
                    line = " " * 8
                line += f"{number}, "
            yield line.rstrip()
        yield f"    ]).reshape{(len(names), *shape) if len(names) > 1 else shape} / {2**power}"


def _gap(before: ast.stmt | None, node: ast.stmt) -> str:
    """Return the empty lines between two items."""
    large = isinstance(before, ast.FunctionDef | ast.ClassDef) or isinstance(node, ast.FunctionDef | ast.ClassDef)
    return "\n\n" if large else "\n"


def _file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _imports(imports: Mapping[str, tuple[str, str | None]], body: str) -> str:
    """Return the lines that import what the file uses, in the order of isort."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    whole = {home for home, inner in imports.values() if inner is None and home in used} | ({"math"} & used)
    parts: dict[str, set[str]] = {}
    for name, (home, inner) in imports.items():
        if inner is not None and name in used:
            parts.setdefault(home, set()).add(inner if name == inner else f"{inner} as {name}")
    lines = [f"import {home}" for home in sorted(whole)]
    lines += [f"from {home} import {', '.join(sorted(names))}" for home, names in sorted(parts.items())]
    return "\n".join([*lines, "", "import numpy as np", ""])


def _call(head: str, arguments: Iterable[str], indent: str, tail: str) -> str:
    """Return a call on one line, or with a line for each argument."""
    parts = list(arguments)
    line = f"{head}({', '.join(parts)}){tail}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{head}(", *(_laid_out("", part, indent + " " * 4, ",") for part in parts), f"{indent}){tail}"])


def _laid_out(head: str, text: str, indent: str, tail: str = "") -> str:
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
    return _call(f"{indent}{head}{function}", arguments, indent, tail)
