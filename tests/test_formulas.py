"""Formulas of the definitions' docstrings, evaluated as they are written, are the values of their lines.

Those of koopman (of one query in one update), graph_energy (of one step) and growing (of matrices with decompositions)
have tests of their own in their folders.
"""

from __future__ import annotations

import math
import re
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import equations
from tests.formulas import value
from tests.typeset import read_back

TOKENS, WIDTH, VALUES = 4, 3, 2


ORDER = 2
"""The default of higher-order attention, its p."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape)


def arrays_of(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the arguments of a definition for one sequence and head, its upstream gradients, and further names."""
    if name == "sympformer":
        x, p = normal(1, TOKENS, WIDTH), 0.5 * normal(1, TOKENS, WIDTH, seed=1)
        matrices = {f"w_{n}": normal(WIDTH, WIDTH, seed=m) for m, n in enumerate("qkvob")}
        numbers = {"t": 1.3, "h_x": 0.3, "h_y": 0.2, "c_log": 3.0, "c_lin": 0.1}
        given = {"x": x, "p": p, **matrices, "gain": normal(WIDTH), "gain_p": normal(WIDTH, seed=1)}
        given |= {n: np.asarray([number]) for n, number in numbers.items()}
        upstream = {"d_x": normal(1, TOKENS, WIDTH, seed=2), "d_p": normal(1, TOKENS, WIDTH, seed=3)}

        def norm(y: Any) -> Any:
            return (y - np.mean(y)) / np.sqrt(np.var(y) + 1e-5)

        def back(x: Any, g: Any) -> Any:
            n, r = norm(x), 1.0 / np.sqrt(np.var(x) + 1e-5)
            return r * (g - np.mean(g) - n * np.mean(n * g))

        further = {"m": WIDTH, "n": np.arange(1.0, TOKENS + 1.0), "norm": norm, "back": back}
        return given, upstream, further | {"dx'": upstream["d_x"][0], "dP": upstream["d_p"][0]}
    shapes = {"q": WIDTH, "k": WIDTH, "v": VALUES}
    given = {each: normal(1, 1, TOKENS, width, seed=n) for n, (each, width) in enumerate(shapes.items())}
    further = {"d": float(WIDTH)}
    if name == "delta":
        given |= {"beta": np.abs(normal(1, 1, TOKENS)), "log_decay": -np.abs(normal(1, 1, TOKENS, seed=1))}
    if name == "higher_order":
        further |= {
            "alpha": 3.0,
            "eps": 1e-5,
            "T_p": lambda s: taylor(s, ORDER),
            "T_(p-1)": lambda s: taylor(s, ORDER - 1),
        }
    d_out = normal(1, 1, TOKENS, VALUES, seed=9)
    return given, {"d_out": d_out}, further | {"do": d_out[0, 0]}


def taylor(s: float, order: int) -> float:
    """T_p(s) as the docstring displays it, 1 + s + s^2 / 2! + ... + s^p / p!."""
    return math.fsum(s**r / math.factorial(r) for r in range(order + 1))


def left_of(formula: str, inputs: set[str]) -> tuple[str, str]:
    """Return the name that a formula is of, and its subscripts."""
    left = formula.partition(" = ")[0].replace("log z", "log_z")
    whole = [each for each in inputs | {f"d{each}" for each in inputs} if left == each or left.startswith(f"{each}_")]
    whole += [each for each in ("log_z", "dlog_z") if left.startswith(each)]
    name = max(whole, key=len, default=left.partition("_")[0])
    return name, left[len(name) + 1 :]


@cache
def numbers_of(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arrays of a run by the names of the docstring, and the formulas by id."""
    definition = definition_of(name)
    given, upstream, known = arrays_of(name)
    traced = equations.Trace()
    hooked = equations.hooked(definition, traced.record)
    _, saved = hooked.forward(**given)
    hooked.backward(saved, *upstream.values())
    heads = 1 if name == "sympformer" else 2
    rows = {each: x[(0,) * heads] for each, x in given.items() if x.ndim > heads + (name == "sympformer")}
    numbers = {each: float(x[0]) for each, x in given.items() if x.size == 1}
    known = {**given, **numbers, **rows, **known}
    formulas = {id: text.partition("  ")[0] for id, text in equations.declared(definition).items()}
    for id, formula in formulas.items():
        each, letters = left_of(formula, set(given))
        passes = traced.passes(id)
        if len(passes) > 1:  # one for each token
            found = np.stack([np.asarray(x)[0, 0] for x in (passes[::-1] if id.startswith("d") else passes)])
        else:
            found = np.asarray(passes[0])
            found = found[(0,) * heads] if found.ndim > 1 and found.shape[:heads] == (1,) * heads else found
        found = np.reshape(found, [n for n in found.shape if n > 1])
        known.setdefault(each, found)
        known[id] = found
        assert letters in ("", "i", "j", "n", "ij"), id
    if "log_z" in known:
        known["z"] = np.exp(known["log_z"])
    return known, formulas


def definition_of(name: str) -> ModuleType:
    found = ra.mechanism(name).definition
    assert found is not None
    return found


def evaluate(name: str, id: str, right: str) -> tuple[Any, Any]:
    """Return the value of a right side, and that of the line of an id."""
    known, formulas = numbers_of(name)
    _, letters = left_of(formulas[id], set(arrays_of(name)[0]))
    right = right.partition(" if ")[0]  # all keys are seen

    def names(which: str, index: tuple[Any, ...], scope: Any) -> Any:
        found = known[which]
        if index and not -1 < index[0] < len(found):  # before the first token, behind the last
            return np.zeros_like(found[0])
        return found[index] if index else found

    sizes = dict.fromkeys("ijln", TOKENS)
    found = [
        value(right, {*known, *letters}, names, sizes, dict(zip(letters, place, strict=True)))
        for place in np.ndindex(*[TOKENS] * len(letters))
    ]
    wanted = known[id]
    return np.reshape(np.asarray(found), np.shape(wanted)), wanted


def far(name: str, id: str, right: str) -> float:
    """Return by how much a right side and the value of its line differ, in units of the largest or 1."""
    found, wanted = evaluate(name, id, right)
    seen = np.isfinite(wanted)
    size = max(1.0, float(np.max(np.abs(np.where(seen, wanted, 0.0)))))
    return float(np.max(np.abs(np.where(seen, found, 0.0) - np.where(seen, wanted, 0.0)))) / size


IDS = [
    (name, id)
    for name in ("softmax", "delta", "higher_order", "sympformer")
    for id in equations.declared(definition_of(name))
]


@pytest.mark.parametrize(("name", "id"), IDS)
def test_a_formula_is_the_value_of_its_line(name: str, id: str) -> None:
    right = numbers_of(name)[1][id].partition(" = ")[2]
    assert far(name, id, right) < 1e-12


@pytest.mark.parametrize(("name", "id"), IDS)
def test_a_typeset_formula_is_the_value_of_its_line(name: str, id: str) -> None:
    known, formulas = numbers_of(name)
    right = formulas[id].partition(" = ")[2].partition(" if ")[0]
    assert far(name, id, read_back(right, set(known))) < 1e-12


@pytest.mark.parametrize(("name", "id"), IDS)
def test_a_wrong_sign_is_noticed(name: str, id: str) -> None:
    right = numbers_of(name)[1][id].partition(" = ")[2].partition(" if ")[0]
    # eps is small, and the mean of dq' and of dk' is 0, as each is a sum of rows whose mean is 0.
    signs = [match for match in re.finditer(r" ([-+]) (?!eps|mean d[qk]'_)", right)]
    for wrong in [f"0 - ({right})"] + [
        f"{right[: sign.start()]} {'-' if sign[1] == '+' else '+'} {right[sign.end() :]}" for sign in signs
    ]:
        assert far(name, id, wrong) > 1e-6, wrong
