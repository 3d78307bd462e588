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

RESERVED = ("attention", "gradients", "out", "saved", "q", "k", "v")
"""Names of the page itself."""

ARRAY = Ref(PLAIN, "Array")

CAUSAL = Ref("refattn.ops.masks", "causal_offset")

TOLD = """\
Printed by `refattn show {name}`, version {version}, on NumPy alone and without checks of arguments, from
{file} and what it uses. Run as a program it shows a small case.
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
        if item.ref.module != home:
            home = item.ref.module
            text = f"# From {_file(XP if home == PLAIN else home)}\n{text}"
        pieces += [_gap(before, item.nodes[0]), text]
        before = item.nodes[0]
    pieces += ["\n\n", shown.attention(), "\n\n", shown.main()]
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
        more = [CAUSAL] if "offset" in self.call.forward else []
        self.linked = Linked(dict.fromkeys((*self.roots, *more, *found)), RESERVED)
        self.name = self.linked.names.__getitem__

    def usual(self) -> dict[str, str]:
        """Return the arguments of the definition that have no default there, or another, with those of the library."""
        parameters = inspect.signature(definition(self.record).forward).parameters
        queries = [call.forward["q"] for call in self.calls]
        texts = {
            name: expression([call.forward[name] for call in self.calls], queries, self.name)
            for name in self.calls[0].forward
            if name not in ("q", "k", "v", "offset")
        }
        return {name: text for name, text in texts.items() if text != repr(parameters[name].default)}

    def given(self) -> dict[str, str]:
        """Return what the case "tiny" gives to `attention` beside q, k and v."""
        usual, given = self.usual(), {}
        for name, value in self.call.forward.items():
            if name in self.tiny and name not in ("q", "k", "v"):
                given[name] = name
            elif name == "offset" and value is not None:
                given["causal"] = repr(self.options["causal"])
            elif name in usual and not _is_usual(usual[name]):
                text = expression([value], [self.call.forward["q"]], self.name)
                given |= {} if text == usual[name] else {name: text}
        return given

    def attention(self) -> str:
        """Return the function that has the defaults of the library."""
        usual, forward = self.usual(), self.name(self.roots[0])
        kinds = inspect.signature(definition(self.record).forward).parameters
        head, arguments, lines = ["q", "k", "v"], ["q", "k", "v"], []
        for name in self.call.forward:
            text = usual.get(name)
            by_place = kinds[name].kind is not inspect.Parameter.KEYWORD_ONLY
            if not by_place and "*" not in head:
                head.append("*")
            if name == "offset":
                head.append("causal=False")
                lines.append(f"    offset = {self.name(CAUSAL)}(causal, q.shape[2], k.shape[2])")
            elif text is None:
                continue
            elif _is_usual(text):
                head.append(f"{name}=None")
                lines += [f"    if {name} is None:", _laid_out(f"{name} = ", text, " " * 8)]
            else:
                head.append(f"{name}={text}")
            arguments.append(name if by_place else f"{name}={name}")
        doc = f'    """Return what `{forward}` does, with the defaults of refattn.{self.record.name}.forward."""'
        last = _call(f"    return {forward}", arguments, "    ", "")
        return "\n".join([_call("def attention", head, "", ":"), doc, *lines, last, ""])

    def main(self) -> str:
        """Return the run of the case "tiny"."""
        given = [f"{name}={text}" for name, text in self.given().items()]
        parameters = inspect.signature(definition(self.record).backward).parameters
        _, _, *more = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
        backward = [f"{name}={expression([self.call.backward[name]], [0], self.name)}" for name in more]
        name = self.name(self.roots[1])
        lines = ['if __name__ == "__main__":', f'    # The case "tiny", as `refattn trace {self.record.name}` has it.']
        lines += [
            "    # fmt: off",
            *(line for name, x in self.tiny.items() for line in _array(name, x)),
            "    # fmt: on",
        ]
        lines.append(_call("    out, *_, saved = attention", ["q", "k", "v", *given], "    ", ""))
        lines.append(
            _call(f"    gradients = {name}", ["saved", "np.ones_like(out)", *backward], "    ", "  # of the sum of out")
        )
        lines.append('    print({"out": out, **{f"d_{name}": gradient for name, gradient in gradients.items()}})')
        return "\n".join(lines) + "\n"


def _is_usual(text: str) -> bool:
    """Tell whether a default depends on the sizes of q."""
    return "q.shape" in text


def _made(shape: tuple[int, ...]) -> NDArray[Any]:
    """Return numbers of any kind."""
    return np.cos(np.arange(math.prod(shape), dtype=np.float64)).reshape(shape)


def _array(name: str, x: NDArray[Any]) -> Iterable[str]:
    """Yield the lines of an array; designed numbers are whole ones over a power of two, which are short."""
    power = next((p for p in range(40) if np.all(np.ldexp(x, p) == np.rint(np.ldexp(x, p)))), None)
    numbers = x.ravel().tolist() if power is None else np.ldexp(x, power).astype(np.int64).ravel().tolist()
    yield f"    {name} = np.array(["
    line = " " * 8
    for number in numbers:
        if len(line) + len(f"{number!r}, ") > WIDTH:
            yield line.rstrip()
            line = " " * 8
        line += f"{number!r}, "
    yield line.rstrip()
    yield f"    ]).reshape{x.shape}{f' / {2**power}' if power else ''}"


def _gap(before: ast.stmt | None, node: ast.stmt) -> str:
    """Return the empty lines between two items."""
    large = isinstance(before, ast.FunctionDef | ast.ClassDef) or isinstance(node, ast.FunctionDef | ast.ClassDef)
    return "\n\n" if large else "\n"


def _file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _imports(imports: Mapping[str, tuple[str, str | None]], body: str) -> str:
    """Return the lines that import what the file uses, in the order of isort."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    whole = {home for name, (home, inner) in imports.items() if inner is None} | ({"math"} if "math" in used else set())
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
