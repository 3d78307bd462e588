"""Every formula of the definition's docstring, evaluated as it is written, is the value of its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from refattn import equations
from refattn.mechanisms.koopman import definition
from tests.formulas import value
from tests.mechanisms.koopman.calls import drawn
from tests.typeset import read_back

QUERIES, KEYS, WIDTH, UPDATES = 2, 5, 3, 3
NUMBERS = {"ridge": 0.2, "epsilon": 0.15, "jitter": 1e-3}


class Point(np.ndarray):
    """A point of which there is a list: its numbers, and where it stands.

    `place` is the query and the update, then "x" with its number, "attended" or "following".
    """

    place: tuple[Any, ...]


def point(numbers: Any, *place: Any) -> Point:
    found = np.asarray(numbers).view(Point)
    found.place = place
    return found


def shown(text: str) -> dict[str, str]:
    """Return what the docstring displays without an id, by its left side: the kernel, slope, J, d_g, key and parts."""
    pieces = [each for line in text.splitlines() if line.startswith("    ") for each in re.split(r",? {6,}", line)]
    found = {}
    for piece in pieces:
        left, equals, right = piece.strip().partition(" = ")
        if equals and re.fullmatch(r"J|key_j|parts|(kernel|slope|g_j|d_g)\(.*\)", left):
            found[left] = right
    return found


class Run:
    """One run of the definition, and the names of its docstring; formulas are of query i in update m."""

    def __init__(self, text: str) -> None:
        self.formulas = {id: each.partition("  ")[0] for id, each in declared(text).items()}
        self.shown = shown(text)
        normal = drawn(11)
        q, d_out = normal("q", 1, 1, QUERIES, WIDTH), normal("d_out", 1, 1, QUERIES, WIDTH)
        k, v = normal("k", 1, 1, KEYS, WIDTH), normal("v", 1, 1, KEYS, WIDTH)
        traced = equations.Trace()
        hooked = equations.hooked(definition, traced.record)
        _, saved = hooked.forward(q, k, v, updates=UPDATES, **NUMBERS)
        hooked.backward(saved, d_out)
        path = [np.asarray(x)[0, 0] for x in saved[-2]]
        self.of_head: dict[str, Any] = {"k": k[0, 0], "v": v[0, 0], "d": float(WIDTH), **NUMBERS}
        self.x, self.of_query = np.stack(path), dict[str, dict[int, Any]]()
        self.values: dict[str, list[Any]] = {}
        for id in self.formulas:
            passes, name = traced.passes(id), traced.variables[id]
            first = UPDATES - len(passes)
            backward = id.startswith("d")
            self.values[id] = list(passes)
            if len(passes) == 1 and id.partition(".")[2] in ("1", "q", "k", "v", "ridge", "epsilon"):
                self.of_head[name] = np.asarray(passes[0])[0, 0] if np.ndim(passes[0]) else float(passes[0])
            else:
                ordered = passes[::-1] if backward else passes
                self.of_query[name] = {first + n: np.asarray(x)[0, 0] for n, x in enumerate(ordered)}
        # The point that is followed, in update 0, is attended; the line has no id there.
        self.of_query["following"][0] = self.of_query["attended"][0]
        self.functions: dict[str, Callable[..., Any]] = {}
        self.known = {*self.of_head, *self.of_query, "x", "q", "y", "g", "d_x", "d_g"}
        self.known |= {"kernel", "slope", "key", "parts", "J", "I"}

    def names(self, name: str, index: tuple[Any, ...], scope: Any) -> Any:
        if name in scope:
            return scope[name]
        if name in ("kernel", "slope"):
            return lambda x, y: self.eval(self.shown[f"{name}(x, y)"], {"x": x, "y": y})
        if name == "g":
            return lambda x: np.array([self.eval(self.shown["g_j(x)"], {"x": x, "j": j}) for j in range(KEYS)])
        if name == "d_g":
            return self.list_gradient
        if name == "key":
            return self.eval(self.shown["key_j"], {"j": index[0]}) if index else np.zeros(WIDTH)
        if name in ("J", "parts"):
            return self.eval(self.shown[name], scope)
        i, m = scope.get("i"), scope.get("m")
        if isinstance(m, tuple):  # of a sum over updates and queries
            (i, m), index = m, tuple(m[1] if at is m else at for at in index)
        if name == "d_x":
            return self.dx(i, *index) if index else np.zeros(WIDTH)
        if name == "x":
            return point(self.x[index[0], i], i, m, "x", index[0]) if index else np.zeros(WIDTH)
        if name in ("attended", "following"):
            return point(self.of_query[name][m][i], i, m, name)
        if name == "I":
            return np.eye(KEYS)[index] if index else np.eye(WIDTH)
        if name in self.of_head:
            return self.of_head[name][index] if index else self.of_head[name]
        if name == "d_scores" and len(index) == 2:  # the update is a subscript there
            m, index = index[0], index[1:]
        rows = self.of_query[name]
        found = rows[m][i] if m in rows else np.zeros_like(rows[1][i])  # update 0 has no fit
        if index and not -1 < index[0] < len(found):  # of moves that exist
            return np.zeros_like(found[0])
        return found[tuple(index)]

    def list_gradient(self, x: Point) -> Any:
        """The gradient of the list of a point, by the docstring."""
        i, m, kind, *number = x.place
        if m == 0 or number > [m]:
            return np.zeros(KEYS)
        scope = {"i": i, "m": m, "l": number[0]} if number else {"i": i, "m": m}
        return self.eval(self.shown[f"d_g({'x_l' if number else kind})"], scope)

    def points(self, scope: Any) -> list[Point]:
        """All points of a query that have a list in an update."""
        i, m = scope["m"]
        path = [point(self.x[l, i], i, m, "x", l) for l in range(m + 1)]
        return [*path, *(point(self.of_query[name][m][i], i, m, name) for name in ("attended", "following"))]

    def dx(self, i: int, l: int) -> Any:
        if l == UPDATES:
            return self.of_query["d_following"][UPDATES - 1][i]
        return self.eval(self.formulas["dKOOP.q"].partition(" = ")[2], {"i": i, "l": l})

    def eval(self, text: str, scope: Any) -> Any:
        later = range(scope.get("l", 0), UPDATES)
        updates = later if "i" in scope else list(product(range(QUERIES), later))
        sizes = {"j": KEYS, "o": KEYS, "m": lambda _: updates, "x": self.points}
        try:
            return value(text, self.known | set(scope), self.names, sizes, scope)
        except (KeyError, TypeError, ValueError) as error:
            raise AssertionError(f"{text}: {error}") from error


def declared(text: str) -> dict[str, str]:
    return dict(re.findall(r"^    \[(d?KOOP\.\w+)\]  (.*)$", text, re.MULTILINE))


@cache
def run(text: str) -> Run:
    return Run(text)


def differs(text: str, id: str) -> float:
    """Return by how much the formula of an id and the value of its line differ, at most, in all updates."""
    of = run(text)
    left, _, right = of.formulas[id].partition(" = ")
    name, _, condition = left.partition(": ")
    letters = re.sub(r".*_", "", name) if re.search(r"_[jol]+$", name) else ""
    worst = 0.0

    def compare(found: Any, wanted: Any) -> None:
        nonlocal worst
        worst = max(worst, float(np.max(np.abs(found - wanted))) / max(1.0, float(np.max(np.abs(wanted)))))

    number = id.partition(".")[2]
    if number in ("1", "k", "v", "ridge", "epsilon", "q"):
        wanted = of.values[id][0]
        wanted = np.asarray(wanted)[0, 0] if np.ndim(wanted) else float(wanted)
        if id == "dKOOP.q":
            found = [of.dx(i, 0) for i in range(QUERIES)]
        else:
            places = np.ndindex(*(KEYS for _ in letters))
            found = [of.eval(right, dict(zip(letters, place, strict=True))) for place in places]
        compare(np.reshape(np.asarray(found), np.shape(wanted)), wanted)
        return worst
    variable = name.partition("_(")[0].removesuffix(f"_{letters}") if letters else name
    for m, rows in of.of_query[variable].items():
        for i in range(QUERIES):
            if variable == "following" and m == 0:
                continue
            scope = {"i": i, "m": m}
            if condition:
                compare(of.eval(condition, scope), of.eval(right, scope))
            elif id == "dKOOP.4" and m == 0:
                compare(of.of_query["d_following"][0][i], rows[i])
            elif letters:
                size = m if letters == "l" else KEYS
                compare(np.stack([of.eval(right, {**scope, letters: n}) for n in range(size)]), rows[i])
            else:
                compare(of.eval(right, scope), rows[i])
    return worst


TEXT = definition.__doc__ or ""
IDS = list(declared(TEXT))


def test_all_equations_and_adjoints_are_stated() -> None:
    assert set(IDS) == {tag.id for tag in equations.tags(definition) if tag.claims}


@pytest.mark.parametrize("id", IDS)
def test_a_formula_is_the_value_of_its_line(id: str) -> None:
    assert differs(TEXT, id) < 1e-11


@pytest.mark.parametrize("id", IDS)
def test_a_typeset_formula_is_the_value_of_its_line(id: str) -> None:
    formula = declared(TEXT)[id].partition("  ")[0]
    line = next(line for line in TEXT.splitlines() if f"[{id}]  " in line)
    left, _, right = formula.rpartition(" = ")
    shown = read_back(right, run(TEXT).known)
    assert differs(TEXT.replace(line, line.replace(formula, f"{left} = {shown}")), id) < 1e-11


def with_a_sign_turned(right: str) -> list[str]:
    """Return a right side with all of it negative, and with each of its signs turned."""
    signs = [match for match in re.finditer(r" ([-+]) ", right)]
    turned = [f"{right[: s.start()]} {'-' if s[1] == '+' else '+'} {right[s.end() :]}" for s in signs]
    return [f"0 - ({right})", *turned]


@pytest.mark.parametrize("id", IDS)
def test_a_wrong_sign_is_noticed(id: str) -> None:
    line = next(line for line in TEXT.splitlines() if f"[{id}]  " in line)
    formula = declared(TEXT)[id].partition("  ")[0]
    left, _, right = formula.partition(" = ")
    for wrong in with_a_sign_turned(right):
        assert differs(TEXT.replace(line, line.replace(formula, f"{left} = {wrong}")), id) > 1e-4, wrong


@pytest.mark.parametrize("left", list(shown(TEXT)))
def test_a_wrong_sign_of_what_formulas_use_is_noticed(left: str) -> None:
    right = shown(TEXT)[left]
    used = {"J": "dKOOP.14", "kernel(x, y)": "KOOP.1", "g_j(x)": "KOOP.5", "parts": "dKOOP.1"}.get(left, "dKOOP.k")
    for wrong in with_a_sign_turned(right):
        assert differs(TEXT.replace(f"{left} = {right}", f"{left} = {wrong}"), used) > 1e-4, wrong
