"""Every equation has one id in all places, and the comments of a file tell the truth about its arrays.

For all mechanisms: the ids of the docstrings are those of the tags and those of the trace, each computed on one line
or on one of each exclusive branch. Every array that a tagged file assigns has its axes in a comment, and they hold for
the arrays that the code really makes.

What it needs of a mechanism is `tests/mechanisms/NAME/exercise.py`: calls that reach every line with a tag.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import io
import math
import pkgutil
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import refattn as ra
from refattn import backends, equations
from refattn.mechanisms import registry
from refattn.xp import is_array

Run = tuple[Mapping[str, int], Callable[[], object]]

NOTATION = Path(__file__).parents[1] / "docs" / "notation.md"

# No two sizes are the same, neither are two products such as h*d and g*e; h is g*r.
SIZES = {
    "b": 5,
    "h": 6,
    "g": 3,
    "r": 2,
    "i": 7,
    "j": 11,
    "d": 4,
    "e": 10,
    "p": 14,
    "m": 9,
    "n": 13,
    "t": 17,
    "l": 8,
    "o": 19,
    "c": 23,
    "f": 21,
    "s": 16,
    "u": 25,
}


def letters() -> dict[str, str]:
    """The table of docs/notation.md."""
    return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", NOTATION.read_text(), re.MULTILINE))


# --- what can be read from the text of modules


def id_problems(modules: Sequence[ModuleType], traced: Iterable[str]) -> list[str]:
    """Say where docstrings, tags and the trace have different ids, and which ids are not computed on one line."""
    declared = Counter(id for module in modules for id in equations.declared(module))
    tags = [tag for module in modules for tag in equations.tags(module)]
    claimed = Counter(tag.id for tag in tags if tag.claims)
    named = {id for tag in tags for id in (tag.id, tag.last) if id}
    own = {equations.family(id) for id in declared}
    ran = {id for id in traced if equations.family(id) in own}  # those of another core are its own
    found = [f"{id} is declared {times} times" for id, times in declared.items() if times > 1]
    found += [f"{id} is declared and computed on 0 lines" for id in declared if not claimed[id]]
    found += [f"{id} is declared and computed on {claimed[id]} lines" for id in declared if not _once(modules, id)]
    found += [f"{id} is tagged and not declared" for id in sorted(named - set(declared))]
    found += [f"{id} is declared and not in the trace" for id in declared if id not in ran]
    found += [f"{id} is in the trace and not declared" for id in sorted(ran - set(declared))]
    return found


def _once(modules: Sequence[ModuleType], id: str) -> bool:
    """Whether no call computes an equation on two lines: it stands once, or in exclusive branches."""
    lines = [(module, tag) for module in modules for tag in equations.tags(module) if tag.claims and tag.id == id]
    return all(m is n and a.excludes(b) for k, (m, a) in enumerate(lines) for n, b in lines[:k])


# --- what running a module tells


class Observer(ast.NodeTransformer):
    """Rewrites every ``target = value`` as ``target = __see__(line, kind, value)``."""

    def _see(self, line: int, kind: str, value: ast.expr) -> ast.expr:
        call = ast.Call(ast.Name("__see__", ast.Load()), [ast.Constant(line), ast.Constant(kind), value], [])
        return ast.fix_missing_locations(ast.copy_location(call, value))

    def _kind(self, target: ast.expr, value: ast.expr) -> str:
        if isinstance(target, ast.Name):
            return "name"
        # Taking apart what has a name already makes no array.
        parts = (ast.Name, ast.Attribute, ast.Tuple, ast.Starred, ast.Constant, ast.expr_context)
        return "taken apart" if all(isinstance(node, parts) for node in ast.walk(value)) else "several"

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = self._see(node.lineno, self._kind(node.targets[0], node.value), node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            node.value = self._see(node.lineno, self._kind(node.target, node.value), node.value)
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        self.generic_visit(node)
        node.value = self._see(node.lineno, "name", node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        after = ast.Expr(self._see(node.lineno, "name", ast.copy_location(read, node)))
        return [node, ast.fix_missing_locations(ast.copy_location(after, node))]


@functools.cache
def watched(module: ModuleType) -> CodeType:
    """The functions of a module, as `Observer` rewrites them."""
    tree = Observer().visit(ast.parse(inspect.getsource(module)))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return compile(tree, str(module.__file__), "exec", 0x1000000, dont_inherit=True)


class Watch:
    """The arrays that each line of some modules assigned while it was in force."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self.copies: dict[ModuleType, SimpleNamespace] = {}
        self.arrays: dict[tuple[str, int, int | None], list[Any]] = {}
        self.new: dict[tuple[str, int], list[Any]] = {}
        for module in modules:
            scope = {**vars(module), "__see__": self._seer(module.__name__)}
            exec(watched(module), scope)
            self.copies[module] = SimpleNamespace(**scope)

    def _seer(self, module: str) -> Callable[[int, str, Any], Any]:
        def see(line: int, kind: str, value: Any) -> Any:
            arrays = [x for x in (value if isinstance(value, tuple) else (value,)) if is_array(x)]
            for n, x in enumerate(value) if isinstance(value, tuple) else ((None, value),):
                if is_array(x):
                    self.arrays.setdefault((module, line, n), []).append(x)
            if arrays and kind != "taken apart" and (kind == "several" or not isinstance(value, tuple)):
                self.new.setdefault((module, line), []).extend(arrays)
            return value

        return see

    @contextmanager
    def in_force(self) -> Iterator[None]:
        with mock.patch.object(equations, "active", lambda module: self.copies.get(module, module)):
            yield


def size_of(axis: str, sizes: Mapping[str, int]) -> int:
    """The size of one axis of a comment: a letter, a number or a product of such."""
    return math.prod(int(factor) if factor.isdigit() else sizes[factor] for factor in axis.split("*"))


def line_problems(modules: Sequence[ModuleType], runs: Iterable[Run], *, only_axes: bool = False) -> list[str]:
    """Say which arrays no comment describes, which axes are not as said, and which tags were not reached."""
    tags = {(module.__name__, tag.line, tag.position): tag for module in modules for tag in equations.tags(module)}
    commented = {(module.__name__, line) for module in modules for line in _commented(module)}
    found, reached = set(), set()
    for sizes, run in runs:
        watch = Watch(modules)
        with watch.in_force():
            run()
        reached |= set(watch.arrays)
        for place, values in watch.arrays.items():
            tag = tags.get(place)
            if tag is None or tag.axes is None:
                continue
            if unknown := [a for a in re.findall(r"[a-z]+", " ".join(tag.axes)) if a not in letters()]:
                found.add(f"{place[0]}:{place[1]}: {', '.join(unknown)} is not in docs/notation.md")
                continue
            needs = tuple(size_of(axis, sizes) for axis in tag.axes)
            for value in values:
                if tuple(value.shape) != needs:
                    said = ", ".join(tag.axes)
                    found.add(f"{place[0]}:{place[1]}: {tag.name} has shape {tuple(value.shape)}, ({said}) is {needs}")
        if not only_axes:
            found |= {f"{module}:{line}: an array without its axes" for module, line in set(watch.new) - commented}
    missed = {place for place, tag in tags.items() if tag.id} - reached
    found |= {f"{module}:{line}: the tag was not reached" for module, line, _ in missed}
    return sorted(found)


def _commented(module: ModuleType) -> Iterator[int]:
    """The lines on which assignments begin that end with a comment: axes, or words where a shape varies."""
    source = inspect.getsource(module)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    ends = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.NamedExpr) and node.end_lineno in ends:
            yield node.lineno


# --- all mechanisms


def exercise(name: str, implementation: str, make: Callable[[Any], Any] = np.asarray) -> list[Run]:
    runs: list[Run] = importlib.import_module(f"tests.mechanisms.{name}.exercise").runs(SIZES, make, implementation)
    return runs


def trace_of(runs: Iterable[Run]) -> equations.Trace:
    with equations.trace() as traced:
        for _, run in runs:
            run()
    return traced


def other_tagged(mechanism: str) -> list[ModuleType]:
    """The modules of a room with tags that are not the definition: its other implementations."""
    room = registry.room(mechanism)
    found = pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    record = ra.mechanism(mechanism)
    defining = (record.definition, *record.equation_modules, *record.extra_modules)
    return [m for m in modules if any(tag.id for tag in equations.tags(m)) and m not in defining]


def test_sizes_can_be_told_apart() -> None:
    products = [x * y for a, x in SIZES.items() for b, y in SIZES.items() if (a, b) in {("h", "d"), ("h", "e")}]
    products += [SIZES["g"] * SIZES[x] for x in "de"]
    sizes = [1, *SIZES.values(), *products]
    assert len(set(sizes)) == len(sizes)
    assert set(SIZES) | {"in", "out"} == set(letters())


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_ids_are_the_same_everywhere(name: str) -> None:
    record = ra.mechanism(name)
    traced = trace_of(exercise(name, record.implementations[0]))
    assert id_problems((*record.equation_modules, *record.extra_modules), traced.variables) == []
    assert list(record.equations) == [id for module in record.equation_modules for id in equations.declared(module)]


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_every_array_has_its_axes_and_they_hold(name: str) -> None:
    record = ra.mechanism(name)
    assert line_problems(record.equation_modules, exercise(name, record.implementations[0])) == []
    assert line_problems(record.extra_modules, exercise(name, record.implementations[0]), only_axes=True) == []


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_other_forms_use_declared_ids_and_their_axes_hold(name: str) -> None:
    record = ra.mechanism(name)
    modules = other_tagged(name)
    named = {id for module in modules for tag in equations.tags(module) for id in (tag.id, tag.last) if id}
    assert named <= {
        *record.equations,
        *(id for module in ra.mechanism(name).extra_modules for id in equations.declared(module)),
    }
    # A library without a pool of threads has all heads in one tile.
    make = backends.get("strict").from_numpy
    problems = [
        line_problems(modules, exercise(name, implementation, make), only_axes=True)
        for implementation in record.implementations[1:]
    ]
    missed = [{p for p in found if p.endswith("not reached")} for found in problems]
    assert [p for found in problems for p in found if not p.endswith("not reached")] == []
    assert not missed or set.intersection(*missed) == set()


@pytest.mark.parametrize("name", ra.list_mechanisms())
def test_the_trace_holds_what_ran(name: str) -> None:
    record = ra.mechanism(name)
    for implementation in record.implementations:
        traced = trace_of(exercise(name, implementation)[:1])
        assert set(traced.variables) <= set(record.equations)
        for id in traced.variables:
            assert all(is_array(value) for value in traced.passes(id))


# --- the checks themselves must be able to fail


def module_of(folder: Path, text: str) -> ModuleType:
    path = folder / "small.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOOD = '''"""Small.

    [T.1]  y = 2 x
    [T.2]  z = y + 1
"""

def forward(x, flag=True):
    (b, h) = x.shape
    first, = (x,)
    y = 2.0 * x  # (b, h) [T.1]
    if flag:
        z = (
            y + 1.0
        )  # (b, h) [T.2]
    flat = z.reshape(-1)  # (b*h): a view
    total = z.sum(keepdims=True)  # (1, 1)
    one = z.sum()  # (): for the test
    half, whole = z / 2.0, (z, z)  # (b, h)
    pair = {"z": z}
    pair["y"] = y
    return z
'''


def problems_of(folder: Path, text: str) -> list[str]:
    module = module_of(folder, text)

    def run() -> object:
        return equations.active(module).forward(np.ones((SIZES["b"], SIZES["h"])))

    with equations.trace() as traced:
        run()
    return id_problems([module], traced.variables) + line_problems([module], [(SIZES, run)])


def test_a_good_module_has_no_problem(tmp_path: Path) -> None:
    assert problems_of(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("  # (b, h) [T.1]", "", "T.1 is declared and computed on 0 lines"),
        ("  # (b, h) [T.1]", "", r"small:10: an array without its axes"),
        ("(b*h): a view", "(b*h) [T.1]", "T.1 is declared and computed on 2 lines"),
        ("    [T.2]  z = y + 1\n", "", "T.2 is tagged and not declared"),
        ("(b, h) [T.1]", "(h, b) [T.1]", r"small:10: y has shape \(5, 6\), \(h, b\) is \(6, 5\)"),
        ("(b*h): a view", "(b*g): a view", r"small:15: flat has shape \(30,\), \(b\*g\) is \(15,\)"),
        ("(1, 1)", "(1, q)", r"small:16: q is not in docs/notation.md"),
        ("first, = (x,)", "first, = (x * 2.0,)", r"small:9: an array without its axes"),
        ('pair["y"] = y', "y += 1.0", r"small:20: an array without its axes"),
        ('pair["y"] = y', "(w := y * 1.0)", r"small:20: an array without its axes"),
        ("    if flag:", "    z = x  # (b, h): so far\n    if x is None:", "the tag was not reached"),
    ],
)
def test_a_wrong_module_is_found_out(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert GOOD.count(old) == 1
    found = problems_of(tmp_path, GOOD.replace(old, new))
    assert any(re.search(problem, each) for each in found), found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(x):\n    a, b = x, x  # -, -, (b) [T.1]\n", r"small:2: a tag belongs to a name that the line assigns"),
        ("def f(x):\n    # (b) [T.1]\n    a = x\n", r"small:2: a tag stands on a line that ends no assignment"),
        ("def f(x):\n    return x  # [T.1]\n", r"small:2: a tag stands on a line that ends no assignment"),
    ],
)
def test_a_misplaced_tag_raises(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        equations.tags(module_of(tmp_path, text))


def test_exclusive_branches_may_compute_the_same_equation(tmp_path: Path) -> None:
    text = GOOD.replace("    flat =", "    else:\n        z = y + 1.0  # (b, h) [T.2]\n    flat =")
    module = module_of(tmp_path, text)
    for flag in (True, False):
        with equations.trace() as traced:
            equations.active(module).forward(np.ones((5, 6)), flag)
        assert id_problems([module], traced.variables) == []
    both = module_of(tmp_path, text.replace("    else:\n    ", ""))
    assert "T.2 is declared and computed on 2 lines" in id_problems([both], traced.variables)
    early = "    if flag:\n        z = y  # (b, h) [T.2]\n        return z\n    z = y + 1.0  # (b, h) [T.2]\n"
    returns = module_of(tmp_path, GOOD[: GOOD.index("    if flag")] + early)
    assert id_problems([returns], traced.variables) == []


def test_tuple_targets_carry_ids(tmp_path: Path) -> None:
    text = '"""\n[T.1]  a = x\n[T.2]  b = 2 x\n"""\n'
    text += "def f(x):\n    a, n, b = x, 1, 2.0 * x  # (b) [T.1], -, (b) [T.2]\n    return a + b\n"
    module = module_of(tmp_path, text)
    with equations.mutate("T.2", lambda b: 10.0 * b), equations.trace() as traced:
        found = equations.active(module).f(np.ones(SIZES["b"]))
    assert found.tolist() == [21.0] * SIZES["b"] and list(traced) == ["T.1", "T.2"]
    assert id_problems([module], traced.variables) == []
    assert line_problems([module], [(SIZES, lambda: equations.active(module).f(np.ones(SIZES["b"])))]) == []


def test_an_id_is_declared_once(tmp_path: Path) -> None:
    module = module_of(tmp_path, '"""\n[T.1]  a = b\n[T.1]  a = c\n"""\n')
    with pytest.raises(ValueError, match=r"small: the docstring declares T.1 twice"):
        equations.declared(module)


def test_an_id_is_that_of_one_module() -> None:
    """Mechanisms share an id where they share the module that declares it: growing attention the core of softmax."""
    modules = {
        m
        for name in ra.list_mechanisms()
        for m in (*ra.mechanism(name).equation_modules, *ra.mechanism(name).extra_modules)
    }
    ids = [id for module in modules for id in equations.declared(module)]
    assert len(ids) == len(set(ids))
    shared = {m for m in modules if sum(m in ra.mechanism(name).equation_modules for name in ra.list_mechanisms()) > 1}
    assert shared == {ra.mechanism("softmax").equation_modules[0]}
    assert {name for name in ra.list_mechanisms() if shared & {*ra.mechanism(name).equation_modules}} == {
        "softmax",
        "growing",
    }
