"""A definition and all that it uses, read from the source: which functions, classes and constants, in which order.

Nothing is run or imported here. A module is read with `ast`; the names that an item uses are followed into
`refattn.ops` and the rooms, and from `refattn.xp` to `refattn.show.plain`. What else an item uses is noted as missing.
Items are cut out of the source with their comments, and edited where they stand: a name that two modules have
gets a longer one, ``xp`` becomes ``np``, a docstring of a helper its first line. Methods that nobody calls, and the
checks of ``__post_init__``, are left out.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from refattn.show.defined import pairs_of
from refattn.show.nodes import walk

ROOT = Path(__file__).parents[1]

XP, PLAIN = "refattn.xp", "refattn.show.plain"

STOOD_FOR = (XP, "refattn.ops.tiles")
"""Modules in whose place `PLAIN` stands."""

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Ref(NamedTuple):
    """A name at the top of a module."""

    module: str
    name: str


@dataclass(frozen=True)
class Use:
    """A place where an item stands for something: `node` is what is written there."""

    node: ast.expr
    ref: Ref
    local: frozenset[str]  # names that mean something else there
    now: bool  # whether it is looked at while the file is read, and not only when a function is called
    called: bool  # whether it is called there


@dataclass
class Item:
    """A function, class or constant at the top of a module, and what was found in it."""

    ref: Ref
    nodes: tuple[ast.stmt, ...]  # a constant may have a docstring after it
    uses: list[Use] = field(default_factory=list)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)  # names that mean nothing in the file, and why
    edits: list[tuple[int, int, str]] = field(default_factory=list)


class Source:
    """The text of a module, its items and its imports."""

    def __init__(self, module: str) -> None:
        self.module = module
        path = path_of(module)
        if path is None:
            raise ValueError(f"{module}: got no file of this name under {ROOT}, needs one")
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.items: dict[str, tuple[ast.stmt, ...]] = {}
        self.imported: dict[str, tuple[str, str | None]] = {}
        tree = ast.parse(self.text)
        self.docstring = ast.get_docstring(tree, clean=False) or ""
        self._read(tree.body)

    def _read(self, body: list[ast.stmt]) -> None:
        for at, node in enumerate(body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (alias.name, None)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (str(node.module), alias.name)
            elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                self._read(node.body)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.items[node.name] = (node,)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                after = body[at + 1 : at + 2]
                nodes = (node, *(text for text in after if _is_text(text)))
                for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                    for name in walk(target):
                        if isinstance(name, ast.Name):
                            self.items[name.id] = nodes

    def at(self, line: int, column: int) -> int:
        """Return the offset of a place as `ast` gives it: `column` counts bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets of a node."""
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def first_line(self, node: ast.stmt) -> int:
        """Return the number of the first line, decorators and the comments above them included."""
        decorators = [each for each in getattr(node, "decorator_list", []) if not _is_check(each)]
        line = min([node.lineno, *(each.lineno for each in decorators)])
        while line > 1 and self.lines[line - 2].lstrip().startswith("#"):
            line -= 1
        return line


def _is_check(node: ast.expr) -> bool:
    """Tell whether a decorator reads arguments, or names them in errors: the core has done so."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("checked", "naming")


@functools.cache
def source(module: str) -> Source:
    """Return a module, read once."""
    return Source(module)


def path_of(module: str) -> Path | None:
    """Return the file of a module of refattn, or None."""
    path = ROOT.joinpath(*module.split(".")[1:])
    found = (path.with_suffix(".py"), path / "__init__.py") if module.partition(".")[0] == "refattn" else ()
    return next((each for each in found if each.is_file()), None)


def resolve(module: str, name: str) -> Ref | str | None:
    """Return what a name at the top of a module is: an item, a module of refattn, or None for all other names."""
    if module in STOOD_FOR:
        module = PLAIN
    if path_of(module) is None:
        return None
    known = source(module)
    if name in known.items:
        return Ref(module, name)
    if name not in known.imported:
        return None
    home, inner = known.imported[name]
    if home.partition(".")[0] != "refattn":
        return None
    if inner is None:
        return home
    if path_of(f"{home}.{inner}") is not None:
        return f"{home}.{inner}"
    if home == XP and inner == "namespace":
        return Ref(XP, "namespace")
    return resolve(home, inner)


class Linked:
    """All items that some roots need, with the names that they have in one file."""

    def __init__(self, roots: Iterable[Ref], taken: Iterable[str] = ()) -> None:
        self.roots = tuple(roots)
        self.items: dict[Ref, Item] = {}
        attributes: set[str] = set()
        while True:
            self.items = {}
            todo = [*self.roots]
            while todo:
                ref = todo.pop(0)
                if ref not in self.items:
                    self.items[ref] = _read_item(ref, attributes)
                    todo += [use.ref for use in self.items[ref].uses]
            found = set().union(*(item.attributes for item in self.items.values()))
            if found <= attributes:
                break
            attributes |= found  # a method that is called may call others
        self.imports = {name: home for item in self.items.values() for name, home in item.imports.items()}
        self.names = self._named({*taken, *self.imports, *dir(builtins), "np"})

    def _named(self, taken: set[str]) -> dict[Ref, str]:
        uses = [use for item in self.items.values() for use in item.uses]
        names: dict[Ref, str] = {}
        for ref in self.items:
            mine = [use for use in uses if use.ref == ref]
            local = set().union(*(use.local for use in mine))
            written = [use.node.id for use in mine if isinstance(use.node, ast.Name)]
            longer = _longer(ref)
            choices = [ref.name] if ref in self.roots else [*written[:1], ref.name]
            free = (name for name in (*choices, longer, f"{longer}_") if name not in taken and name not in local)
            names[ref] = next(free)
            taken.add(names[ref])
        return names

    def ordered(self, first: str) -> Iterator[Item]:
        """Yield the items: those of the module `first` first, then the others, each after what it needs to be read."""
        order = list(dict.fromkeys(ref.module for ref in self.items if ref.module != first))
        order.sort(key=lambda module: (module == PLAIN, module.startswith("refattn.ops."), module))
        done: set[Ref] = set()
        written: set[int] = set()

        def emit(ref: Ref, all_of_it: bool) -> Iterator[Item]:
            if (ref, all_of_it) in seen:
                return
            seen.add((ref, all_of_it))
            item = self.items[ref]
            for use in item.uses:
                if (use.now or all_of_it) and use.ref != ref:
                    yield from emit(use.ref, use.called)
            done.add(ref)
            if id(item.nodes[0]) not in written:
                written.add(id(item.nodes[0]))
                yield item

        seen: set[tuple[Ref, bool]] = set()
        for module in (first, *order):
            mine = [ref for ref in self.items if ref.module == module]
            for ref in sorted(mine, key=lambda ref: self.items[ref].nodes[0].lineno):
                yield from emit(ref, False)

    def text(self, item: Item, whole: bool) -> str:
        """Return an item as it stands in the file; `whole` keeps docstrings."""
        known = source(item.ref.module)
        edits = list(item.edits)
        if not whole:
            edits += _short_docstrings(known, item.nodes)
        for use in item.uses:
            edits.append((*known.span(use.node), self.names[use.ref]))
        for node in item.nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and self.names[item.ref] != node.name:
                word = "class " if isinstance(node, ast.ClassDef) else "def "
                start = known.span(node)[0] + len(word)
                edits.append((start, start + len(node.name), self.names[item.ref]))
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                    for name in walk(target):
                        if isinstance(name, ast.Name):
                            new = self.names.get(Ref(item.ref.module, name.id), name.id)
                            edits.append((*known.span(name), new))
        start = known.starts[known.first_line(item.nodes[0]) - 1]
        stop = known.starts[int(item.nodes[-1].end_lineno or 0)]
        return _edited(known.text, start, stop, edits)


def _longer(ref: Ref) -> str:
    """Return the name of an item with that of its module, or of its room, before it."""
    stem = next(part for part in reversed(ref.module.split(".")) if part != "dense")
    if ref.name.isupper():
        return f"{stem.upper()}_{ref.name}"
    if ref.name[:1].isupper():
        return f"{stem.title().replace('_', '')}{ref.name}"
    return f"{stem}_{ref.name}"


def _edited(text: str, start: int, stop: int, edits: list[tuple[int, int, str]]) -> str:
    """Return text[start:stop] with the edits; one inside another is dropped."""
    pieces, at = [], start
    for first, last, new in sorted(set(edits), key=lambda edit: (edit[0], -edit[1])):
        if first >= at:
            pieces += [text[at:first], new]
            at = last
    return "".join((*pieces, text[at:stop])).rstrip() + "\n"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _short_docstrings(known: Source, nodes: tuple[ast.stmt, ...]) -> Iterator[tuple[int, int, str]]:
    for top in nodes:
        for node in walk(top):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and _is_text(node.body[0]):
                first, *more = ast.get_docstring(node, clean=False).splitlines()  # type: ignore[union-attr]
                if more:
                    yield (*known.span(node.body[0]), f'"""{first}"""')


def _read_item(ref: Ref, attributes: set[str]) -> Item:
    known = source(ref.module)
    item = Item(ref, known.items[ref.name])
    for node in item.nodes:
        _Reader(known, item, attributes).visit(node)
    return item


class _Reader(ast.NodeVisitor):
    """Finds the names that an item uses, and what has to be edited in it."""

    def __init__(self, known: Source, item: Item, attributes: set[str]) -> None:
        self.known, self.item, self.called = known, item, attributes
        self.scopes: list[tuple[set[str], set[str]]] = []  # of each function around: its names; those of them for NumPy
        self.functions: set[int] = set()  # of calls, by the id of the node
        self.later = 0  # how many functions and annotations are around

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        end = None
        for child in node.body:
            name = getattr(child, "name", "")
            special = name.startswith("__") and name != "__post_init__"  # what that checks was checked by the core
            if isinstance(child, ast.FunctionDef) and not special and name not in self.called:
                first = self.known.starts[int(end or 0)] if end else self.known.starts[self.known.first_line(child) - 1]
                self.item.edits.append((first, self.known.starts[int(child.end_lineno or 0)], ""))
            else:
                self.visit(child)
            end = child.end_lineno
        for each in (*node.bases, *node.keywords, *node.decorator_list):
            self.visit(each)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = node.args
        decorators = [each for each in node.decorator_list if not _is_check(each)]
        for each in (*decorators, *arguments.defaults, *filter(None, arguments.kw_defaults)):
            self.visit(each)
        for argument in _arguments(arguments):
            if argument.annotation is not None:
                self._annotation(argument.annotation)
        if node.returns is not None:
            self._annotation(node.returns)
        self._scope(node, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for each in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(each)
        self._scope(node, [node.body])

    def visit_ListComp(self, node: Comprehension) -> None:
        first, *more = node.generators
        self.visit(first.iter)
        targets = [name for each in node.generators for name in walk(each.target) if isinstance(name, ast.Name)]
        self.scopes.append(({name.id for name in targets}, set()))
        values = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        inner = [part for each in node.generators for part in each.ifs]
        for part in (*values, *inner, *(each.iter for each in more)):
            self.visit(part)
        self.scopes.pop()

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotation(node.annotation)
        if self.scopes:
            self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self.scopes:
            for target in node.targets:
                self.visit(target)
            self._without_namespace(node)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if self._is_namespace(node):
            self.item.edits.append((*self.known.span(node), "np"))
        else:
            self.functions.add(id(node.func))
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        module = self._module(node.value)
        if module is None:
            self.item.attributes.add(node.attr)
            self.visit(node.value)
        elif isinstance(found := resolve(module, node.attr), Ref):
            self._use(node, found)
        else:
            self._miss(node, f"{module} has no such name")

    def visit_Name(self, node: ast.Name) -> None:
        for names, namespaces in reversed(self.scopes):
            if node.id in namespaces:
                self.item.edits.append((*self.known.span(node), "np"))
            if node.id in names:
                return
        if isinstance(node.ctx, ast.Store):
            return
        found = resolve(self.known.module, node.id)
        home, inner = self.known.imported.get(node.id, ("", None))
        if isinstance(found, Ref):
            self._use(node, found)
        elif home.partition(".")[0] in sys.stdlib_module_names:
            self.item.imports[node.id] = home, inner
        elif home and (home, inner) != ("numpy", None):
            self._miss(node, f"{home} is no part of a definition, or {PLAIN} has no such name")

    def _use(self, node: ast.expr, ref: Ref) -> None:
        if ref == Ref("refattn.mechanisms.record", "Unsupported"):
            self.item.edits.append((*self.known.span(node), "NotImplementedError"))  # which it is
            return
        room = ref.module.startswith("refattn.mechanisms.") and ref.module.count(".") > 2
        if ref.module != PLAIN and not ref.module.startswith("refattn.ops.") and not room:
            self._miss(node, f"{ref.module} is no part of a definition")
            return
        local = frozenset().union(*(names for names, _ in self.scopes))
        self.item.uses.append(Use(node, ref, local, now=not self.later, called=id(node) in self.functions))

    def _miss(self, node: ast.expr, why: str) -> None:
        text = ast.unparse(node)
        self.item.missing[text.partition(".")[0]] = f"{self.known.module}: got {text}, but {why}"

    def _annotation(self, node: ast.expr) -> None:
        """What an annotation names is not looked at while the file is read."""
        self.later += 1
        self.visit(node)
        self.later -= 1

    def _scope(self, node: Function, body: Iterable[ast.AST]) -> None:
        parts = list(body)
        names = {argument.arg for argument in _arguments(node.args)}
        namespaces: set[str] = set()
        for part in parts:
            for each in _within(part):
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    names.add(each.id)
                elif isinstance(each, ast.FunctionDef | ast.ClassDef):
                    names.add(each.name)
                elif isinstance(each, ast.Assign):
                    found = [target for target, value in pairs_of(each) if self._is_namespace(value)]
                    namespaces |= {target.id for target in found if isinstance(target, ast.Name)}
        self.scopes.append((names, namespaces))
        self.later += 1
        for part in parts:
            self.visit(part)
        self.later -= 1
        self.scopes.pop()

    def _without_namespace(self, node: ast.Assign) -> None:
        """Drop ``xp = namespace(...)``, alone or as a part of a line."""
        pairs = list(pairs_of(node))
        lost = [n for n, (_, value) in enumerate(pairs) if self._is_namespace(value)]
        if not lost:
            return
        if len(lost) == len(pairs):
            start, stop = self.known.starts[node.lineno - 1], self.known.starts[int(node.end_lineno or 0)]
            self.item.edits.append((start, stop, ""))
        for n in lost if len(lost) < len(pairs) else ():
            for side in (0, 1):
                start, stop = self.known.span(pairs[n][side])
                if n + 1 < len(pairs):
                    stop = self.known.span(pairs[n + 1][side])[0]
                else:
                    start = self.known.span(pairs[n - 1][side])[1]
                self.item.edits.append((start, stop, ""))

    def _is_namespace(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return False
        return self.known.imported.get(node.func.id) == (XP, "namespace")

    def _module(self, node: ast.expr) -> str | None:
        """Return the module of refattn that an expression is, or None."""
        if isinstance(node, ast.Attribute):
            outer = self._module(node.value)
            inner = None if outer is None else f"{outer}.{node.attr}"
            return inner if inner is not None and path_of(inner) is not None else None
        if not isinstance(node, ast.Name) or any(node.id in names for names, _ in self.scopes):
            return None
        found = resolve(self.known.module, node.id)
        return found if isinstance(found, str) else None


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, but not those of functions in it, whose names are others."""
    yield node
    if not isinstance(node, Function | Comprehension | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            yield from _within(child)


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (each for each in (arguments.vararg, arguments.kwarg) if each is not None)
