"""The page itself: the definition, what it uses, a call with the defaults of the library, and a small run."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from refattn.golden.inputs import make
from refattn.mechanisms.record import Mechanism
from refattn.show.calls import Call, Elsewhere, Parts, choices, definition, expression, part, parts_of, watch, written
from refattn.show.commented import read, text_of
from refattn.show.inline import written_out
from refattn.show.layout import WIDTH, call, signed
from refattn.show.link import PLAIN, XP, Linked, Ref, resolve, source
from refattn.show.merge import drop_items
from refattn.show.nodes import walk
from refattn.show.prune import Sample, Split, prune
from refattn.show.short import IMPORTS, untyped
from refattn.show.told import told

RESERVED = ("gradients", "out", "saved", "q", "k", "v")
"""Names of the page itself."""

ARRAY = Ref(PLAIN, "Array")

SCORES = 64 * 64
"""Cases with more scores a head are no samples."""

TOLD = (
    "Printed by `refattn show {name}` {version}: {file} and what it uses, for NumPy and without checks, with the "
    "library's defaults"
)

USUAL = "; numbers and masks may be any, `--all` prints all choices"

LONG = 250
"""A page that would have more lines has no types in the heads of its functions."""


def page(record: Mechanism, version: str, *, everything: bool = False) -> str:
    """Return the definition of a mechanism as one file that runs on NumPy alone; it names the version of refattn.

    Of what may be chosen it has what the library chooses by default, with any numbers and masks, or `everything`.

    Raises
    ------
    ValueError
        Where the mechanism has no core, or its definition uses what is neither of `refattn.ops` nor of its room.
    """
    with np.errstate(all="ignore"):
        return Shown(record, everything=everything).page(version)


class Shown:
    """What is known of a mechanism: its linked items, and how its core calls the definition.

    Attributes
    ----------
    linked
        What `forward` and `backward` use.
    name
        A function that gives the name on the page for a name of a module.
    """

    def __init__(self, record: Mechanism, *, everything: bool = False) -> None:
        self.record, self.everything, module = record, everything, definition(record).__name__
        self.tiny = make(record.name, record.case("tiny"), "float64")
        self.options = record.case("tiny").options
        b, h, n, d = self.tiny["q"].shape
        plain = {name: self.tiny[name] for name in ("q", "k", "v")}
        wider = {name: _made((b + 1, h, n + 1, d + 1)) for name in plain}
        self.calls = [watch(record, arrays, {}, outputs=True) for arrays in (plain, wider)]
        self.call = watch(record, self.tiny, self.options)
        found: list[Ref] = []

        def look(ref: Ref) -> str:
            found.append(ref)
            return ref.name

        self.name: Callable[[Ref], str] = look
        self.usual()
        self.given()
        for each in self.other_calls() if everything else ():
            with contextlib.suppress(ValueError):  # of what has no text, such as a solver
                written(each.forward, self.name)
        self.roots = [ref for name in ("forward", "backward") if isinstance(ref := resolve(module, name), Ref)]
        self.linked = Linked(dict.fromkeys((*self.roots, *found)), RESERVED)
        self.name = self.linked.names.__getitem__

    def page(self, version: str) -> str:
        """Return the file."""
        module = definition(self.record).__name__
        items = [item for item in self.linked.ordered(module) if item.ref != ARRAY]
        texts = [self.linked.text(item, whole=item.ref.module == module) for item in items]
        at = [next(n for n, item in enumerate(items) if item.ref == root) for root in self.roots]
        texts[at[1]] = self.with_defaults(texts[at[1]], 1)
        if self.everything:
            texts[at[0]] = self.with_defaults(texts[at[0]], 0)
        stand_ins = {
            self.name(item.ref): text for item, text in zip(items, texts, strict=True) if item.ref.module == PLAIN
        }
        texts = [written_out(text, stand_ins) for text in texts]
        homes = [XP if item.ref.module == PLAIN else item.ref.module for item in items]
        main, roots = self.main(), [*map(self.name, self.roots)]
        if self.everything:
            tree = ast.Module(
                [node for text, home in zip(texts, homes, strict=True) for node in _homed(text, home)], []
            )
            drop_items(tree, [*map(self.name, self.linked.roots)])
        else:
            tree = prune([*zip(homes, texts, strict=True)], self.samples(), roots, self.splits())
        missing = {name: why for item in items for name, why in item.missing.items()}
        defined = {each.id for each in walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        for node in walk(tree):
            if isinstance(node, ast.Name) and node.id in missing.keys() - defined:
                raise ValueError(missing[node.id])
        found = self.whole(tree, main, version)
        return found if self.everything or found.count("\n") <= LONG else self.whole(tree, main, version, types=False)

    def whole(self, tree: ast.Module, main: str, version: str, *, types: bool = True) -> str:
        """Return the file with these items, and with this run."""
        module, pieces = definition(self.record).__name__, list[str]()
        home, before = module, None
        for top in tree.body:
            text = text_of(ast.Module([top if types else untyped(copy.deepcopy(top))], []))
            if not self.everything and getattr(top, "name", "") == self.name(self.roots[0]):
                text = signed(text, self.usual(), types=types)
            here = cast(Any, top).home
            head = f"# From {_file(here)}\n" if here != home else ""
            pieces += [_gap(before, top), head, text]
            home, before = here, top
        body = "".join([*pieces, "\n\n", main])
        printed = (TOLD if self.everything else TOLD + USUAL).format(
            name=self.record.name, version=version, file=_file(module)
        )
        whole = source(module).docstring.rstrip()
        known = whole if self.everything else told(whole, body, self.chosen())
        docstring = f'"""{known}\n\n{textwrap.fill(f"{printed}.", WIDTH)}\n"""'
        imports = IMPORTS | self.linked.imports
        future = "from __future__ import annotations\n\n" if types and "\nclass " in body or self.everything else ""
        return f"{docstring}\n\n{future}{_imports(imports, body)}{body}"

    def chosen(self) -> set[str]:
        """Return the texts that are chosen by default, in options and in what the core makes of them."""
        found = {value for value in self.record.defaults.values() if isinstance(value, str)}
        todo: list[Any] = [choices(self.calls[0].forward)]
        while todo:
            value = todo.pop()
            found |= {value} if isinstance(value, str) else set()
            todo += value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
        return found

    def samples(self) -> list[Sample]:
        """Return calls with the choices of the library, and various numbers, masks and sizes."""
        found = []
        for each in self.known_calls():
            forward, _ = written(each.forward, self.name)
            backward, _ = written(each.backward, self.name)
            found.append(Sample(forward, backward))
        return found

    @functools.cache  # noqa: B019 (it lives as long as a page is made)
    def known_calls(self) -> list[Call]:
        """Return the calls with the choices of the library; of a case "tiny" with further arrays that call, too."""
        further = [self.call] if set(self.tiny) - set("qkv") else []
        return [*self.calls, *self.masked(), *self.other_calls(), *further]

    def parts(self) -> dict[str, Parts]:
        """Return what the objects are made of that `forward` takes, by the name of the argument."""
        if self.everything:
            return {}
        calls = self.known_calls()
        found = {
            name: parts_of([each.forward[name] for each in calls], self.name, calls[0].forward)
            for name in calls[0].forward
        }
        return {name: parts for name, parts in found.items() if parts is not None}

    def splits(self) -> list[Split]:
        """Return what stands in place of the objects that `forward` takes."""
        return [Split(name, parts.text, tuple(parts.places)) for name, parts in self.parts().items()]

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call as the `forward` of the page takes them."""
        found = dict(given)
        for name, parts in self.parts().items():
            value = found.pop(name)
            found |= {inner: part(value, at) for inner, at in parts.places.items()}
        return found

    def masked(self) -> Iterator[Call]:
        """Yield calls of the defaults with every kind of mask that the core takes, alone and with others."""
        q, k, v = (self.tiny[name] for name in ("q", "k", "v"))
        masks = {
            "mask": np.eye(q.shape[2], k.shape[2]) == 0.0,
            "key_mask": np.arange(k.shape[2]) != np.zeros((len(k), 1)),
        }
        masks |= {"causal": True}
        known = inspect.signature(self.record.core.forward).parameters  # type: ignore[union-attr]
        names = [name for name in masks if name in known]
        for chosen in itertools.product((False, True), repeat=len(names)):
            options = {name: masks[name] for name, given in zip(names, chosen, strict=True) if given}
            with contextlib.suppress(ValueError):  # that some exclude each other
                each = watch(self.record, {"q": q, "k": k, "v": v}, options)
                if choices(each.forward) == choices(self.calls[0].forward):
                    yield each

    def other_calls(self) -> Iterator[Call]:
        """Yield the calls of designed cases, those alone whose choices are those of the library, or of all."""
        usual = choices(self.calls[0].forward)
        for case in self.record.cases:
            queries, keys = case.inputs["q"].shape, case.inputs["k"].shape
            if 0 not in (*queries, *keys) and queries[2] * keys[2] <= SCORES:
                try:
                    each = watch(self.record, make(self.record.name, case, "float64"), case.options)
                except Elsewhere:
                    continue
                if self.everything or choices(each.forward) == usual:
                    yield each

    def usual(self) -> dict[str, str]:
        """Return the arguments that `forward` has no default for, or another, with what the core gives by default."""
        parameters = inspect.signature(definition(self.record).forward).parameters
        queries = [call.forward["q"] for call in self.calls]
        given = [self.arguments(call.forward) for call in self.calls]
        texts = {
            name: expression([each[name] for each in given], queries, self.name)
            for name in given[0]
            if name not in ("q", "k", "v")
        }
        usual = {name: repr(known.default) for name, known in parameters.items()}
        return {name: text for name, text in texts.items() if text != usual.get(name)}

    def given(self) -> dict[str, str]:
        """Return what the case "tiny" gives to `forward` beside q, k and v, where that is not the default."""
        given: dict[str, str] = {}
        usual = self.arguments(self.calls[0].forward)
        for name, value in (self.arguments(self.call.forward) if self.is_usual else self.call.forward).items():
            if name in self.tiny:
                given |= {name: name} if name not in ("q", "k", "v") else {}
            elif self.is_usual:
                text = expression([value], [None], self.name)
                given |= {} if text == expression([usual[name]], [None], self.name) else {name: text}
        return given

    @property
    def is_usual(self) -> bool:
        """Whether the case "tiny" has the choices that the library makes by default."""
        return bool(choices(self.call.forward) == choices(self.calls[0].forward))

    def with_defaults(self, text: str, which: int) -> str:
        """Return the text of `forward` (0) or `backward` (1) with the defaults that the core has."""
        if which == 0:
            return signed(text, self.usual())
        given = list(self.call.backward.items())[2:]
        return signed(text, {name: expression([value], [None], self.name) for name, value in given})

    def main(self) -> str:
        """Return the run of the case "tiny"."""
        given = [f"{name}={text}" for name, text in self.given().items()]
        forward, backward = map(self.name, self.roots)
        about = f'The case "tiny", as `refattn trace {self.record.name}` has it.'
        about = about if self.is_usual else 'The arrays of the case "tiny", and the defaults.'
        lines = ['if __name__ == "__main__":', f"    # {about}"]
        lines += _arrays(self.tiny)
        lines.append(call(f"    out, *_, saved = {forward}", ["q", "k", "v", *given], "    ", ""))
        lines.append(f"    gradients = {backward}(saved, np.ones_like(out))  # of the sum of out")
        lines.append('    print({"out": out, **{f"d_{name}": gradient for name, gradient in gradients.items()}})')
        return "\n".join(lines) + "\n"


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
        numbers = [f"{x:.0f}" for name in names for x in np.ldexp(arrays[name], power).ravel()]
        yield from (
            '    numbers = """',
            *textwrap.wrap(" ".join(numbers), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8),
            '    """',
        )
        each = (len(names), *shape) if len(names) > 1 else shape
        yield f"    {', '.join(names)} = np.array(numbers.split(), dtype=float).reshape{each} / {2**power}"


def _homed(text: str, home: str) -> Iterator[ast.stmt]:
    """Yield the statements of an item, which say where they are from."""
    for node in read(text).body:
        cast(Any, node).home = home
        yield node


def _gap(before: ast.stmt | None, node: ast.stmt) -> str:
    """Return the empty lines between two items, of which the second may be what is said of the first."""
    if isinstance(node, ast.Expr):
        return ""
    large = isinstance(before, ast.FunctionDef | ast.ClassDef) or isinstance(node, ast.FunctionDef | ast.ClassDef)
    numbers = all(isinstance(getattr(each, "value", None), ast.Constant | ast.Dict) for each in (before, node))
    return "\n\n" if large else "" if numbers else "\n"


def _file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _imports(imports: Mapping[str, tuple[str, str | None]], body: str | None) -> str:
    """Return the lines that import what the body uses, or all, in the order of isort; and what an array is."""
    nodes = walk(ast.parse(body or ""))
    used = {node.id for node in nodes if isinstance(node, ast.Name)} if body is not None else {*imports, "math"}
    whole = {home for home, inner in imports.values() if inner is None and home in used} | ({"math"} & used)
    parts: dict[str, set[str]] = {}
    for name, (home, inner) in imports.items():
        if inner is not None and name in used:
            parts.setdefault(home, set()).add(inner if name == inner else f"{inner} as {name}")
    lines = [f"import {home}" for home in sorted(whole)]
    lines += [f"from {home} import {', '.join(sorted(names))}" for home, names in sorted(parts.items())]
    array = ["", "Array = np.ndarray"] if body is None or "Array" in used else []
    return "\n".join([*lines, "", "import numpy as np", *array, ""])
