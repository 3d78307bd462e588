"""Every formula of the definition's docstring, evaluated as it is written, is the value of its line.

Two runs of some steps: in one all tokens but one are kept, in the other all are dropped.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from refattn import equations
from refattn.mechanisms.graph_energy import definition
from tests.formulas import value

TOKENS, WIDTH, VALUES, STEPS = 5, 3, 2, 3
NUMBERS = {"mu": 0.8, "kappa": 1.3, "step": 0.25}
TAU = {"kept": 0.35, "dropped": 2.0}

FORMULAS = {id: text.partition("  ")[0] for id, text in equations.declared(definition).items()}


def shown(name: str) -> str:
    """Return the right side of a formula that is displayed without an id."""
    found = re.findall(rf"^ +{re.escape(name)} = (.*?)(?:  .*)?$", equations.docstring(definition), re.MULTILINE)
    assert len(found) == 1, name
    return str(found[0])


class Run:
    """A run of the definition, and what the names of its docstring stand for."""

    def __init__(self, tau: float) -> None:
        random = np.random.default_rng(7)
        q, k = 1.5 * random.standard_normal((2, 1, 1, TOKENS, WIDTH))
        v, d_out = random.standard_normal((2, 1, 1, TOKENS, VALUES))
        traced = equations.Trace()
        hooked = equations.hooked(definition, traced.record)
        _, saved = hooked.forward(q, k, v, **NUMBERS, steps=STEPS, tau=tau)
        hooked.backward(saved, d_out)
        self.passes: dict[str, list[Any]] = {}
        for id in FORMULAS:
            found = [np.reshape(x, [n for n in np.shape(x) if n > 1]) for x in traced.passes(id)]
            self.passes[id] = found[::-1] if id.startswith("d") else found
        one = {self.left(id): found[0] for id, found in self.passes.items() if len(found) == 1}
        self.one: dict[str, Any] = {**NUMBERS, "tau": tau, "d": float(WIDTH), "I": np.eye(TOKENS), **one}
        self.one |= {"q": q[0, 0], "k": k[0, 0], "v": v[0, 0], "do": d_out[0, 0]}
        moved = self.passes["GE.8"]
        steps = {name: self.passes[id] for id, name in (("GE.6", "c"), ("GE.7", "rate"), ("GE.8", "x'"))}
        steps |= {name: self.passes[id] for id, name in (("dGE.6", "dc"), ("dGE.7", "drate"), ("dGE.8", "dx'"))}
        self.steps: dict[str, list[Any]] = {**steps, "x": [self.one["b"], *moved[:-1]], "dx": self.passes["dGE.before"]}
        self.kept = moved[-1] >= tau
        product = self.one["a"] * moved[-1]
        self.one["best"] = (product == np.max(product, axis=1, keepdims=True)) * 1.0
        self.known = {*self.one, *self.steps, "w", "dw", "f", "pi", "next"}
        self.one["w"] = self.matrix(shown("w_ij").replace("sum over kept l of", "sum_l"))
        self.one["dw"] = self.matrix(shown("dw_ij"))

    @staticmethod
    def left(id: str) -> str:
        return FORMULAS[id].partition(" = ")[0].partition("_")[0]

    def names(self, id: str, which: str, index: tuple[Any, ...], scope: Any) -> Any:
        """Return what a name of the formula of an id stands for."""
        t = scope.get("t")
        if which == "f":
            return value(shown("f_ij"), self.known, lambda *each: self.names(id, *each), {}, self.pair(scope, index))
        if id == "GE.9" and which == "x":
            found = self.passes["GE.8"][-1]  # of the last x
        elif (id, which) == ("dGE.5", "dx"):
            found = self.passes["dGE.before"][0]  # dx of the first step
        elif which == "next":  # dx of the step that follows
            found = self.passes["dGE.before"][t + 1] if t + 1 < STEPS else self.passes["dGE.9"][0]
        elif which in self.steps:
            found = self.steps[which][t]
        else:
            found = self.one[which]
        return found[index] if index else found

    @staticmethod
    def pair(scope: Any, index: tuple[Any, ...]) -> dict[str, Any]:
        return {**scope, "i": index[0], "j": index[1]} if index else dict(scope)

    def right(self, id: str, text: str, scope: Any) -> Any:
        """Evaluate a right side, which may have two cases."""
        text, has_cases, rest = text.partition(" if ")
        condition, _, other = rest.partition(", else ")
        if has_cases and not self.holds(id, condition, scope):
            text = other
        only_kept = id == "" and text.count("sum_l")  # the sum in w
        sizes = {**dict.fromkeys("ijl", TOKENS), "t": STEPS}
        sizes |= {"l": lambda _: np.flatnonzero(self.kept)} if only_kept else {}  # type: ignore[dict-item]
        return value(text, self.known, lambda *each: self.names(id, *each), sizes, scope)

    def holds(self, id: str, condition: str, scope: Any) -> bool:
        if condition == "any token is kept":
            return bool(np.any(self.kept))
        if condition == "j is kept":
            return bool(self.kept[scope["j"]])
        left, at_least, right = condition.partition(" >= ")
        assert at_least, condition
        return bool(self.right(id, left, scope) >= self.right(id, right, scope))

    def matrix(self, text: str) -> Any:
        places = np.ndindex(TOKENS, TOKENS)
        return np.reshape([self.right("", text, dict(zip("ij", at, strict=True))) for at in places], (TOKENS, TOKENS))

    def far(self, id: str, right: str) -> float:
        """Return by how much a right side and the values of its line differ, in units of the largest or 1."""
        letters = FORMULAS[id].partition(" = ")[0].partition("_")[2]
        passes = self.passes[id]
        errors, size = [0.0], max(1.0, max(float(np.max(np.abs(x))) for x in passes))
        for t, wanted in enumerate(passes):
            scope = {"t": t} if len(passes) > 1 else {}
            found = [
                self.right(id, right, {**scope, **dict(zip(letters, at, strict=True))})
                for at in np.ndindex(*[TOKENS] * len(letters))
            ]
            errors.append(float(np.max(np.abs(np.reshape(found, np.shape(wanted)) - wanted))))
        return max(errors) / size


@cache
def run(which: str) -> Run:
    return Run(TAU[which])


@pytest.mark.parametrize("id", FORMULAS)
@pytest.mark.parametrize("which", TAU)
def test_a_formula_is_the_value_of_its_line(which: str, id: str) -> None:
    assert run(which).far(id, FORMULAS[id].partition(" = ")[2]) < 1e-12


def test_some_tokens_are_kept_in_one_run_and_none_in_the_other() -> None:
    assert 1 < np.sum(run("kept").kept) < TOKENS and not np.any(run("dropped").kept)


ZERO = "w_ij (dw_ij - sum_l"
"""A sum that is 0, as stretching a row of w changes no weight: its sign is not noticed."""


@pytest.mark.parametrize("id", FORMULAS)
def test_a_wrong_sign_is_noticed(id: str) -> None:
    right, has_cases, rest = FORMULAS[id].partition(" = ")[2].partition(" if ")
    signs = [at for at in re.finditer(r" ([-+]) ", right) if not right[: at.end()].endswith(ZERO[: -len("sum_l")])]
    for wrong in [f"0 - ({right})"] + [
        f"{right[: at.start()]} {'-' if at[1] == '+' else '+'} {right[at.end() :]}" for at in signs
    ]:
        assert run("kept").far(id, wrong + has_cases + rest) > 1e-6, wrong


def test_the_energy_has_the_slope_that_the_docstring_says() -> None:
    """dE/dx_i by differences of E, and detailed balance."""
    found = run("kept")
    stated = re.search(r"with pi_i = (.*)$", equations.docstring(definition), re.MULTILINE)
    assert stated is not None
    sizes, t = dict.fromkeys("ijl", TOKENS), 1
    x, rate = found.steps["x"][t], found.steps["rate"][t]
    arrays = {**found.one, "x": x, "rate": rate}

    def names(which: str, index: tuple[Any, ...], scope: Any) -> Any:
        return arrays[which][index] if index else arrays[which]

    def evaluated(text: str, **scope: int) -> Any:
        return value(text, found.known, names, sizes, scope)

    arrays["pi"] = np.asarray([evaluated(stated[1], i=i) for i in range(TOKENS)])
    for i, j in np.ndindex(TOKENS, TOKENS):
        assert evaluated("pi_i n_ij", i=i, j=j) == pytest.approx(evaluated(shown("pi_i n_ij"), i=i, j=j), rel=1e-13)
    for i, along in enumerate(1e-5 * np.eye(TOKENS)):
        energies = []
        for sign in (1.0, -1.0):
            arrays["x"] = x + sign * along
            energies.append(evaluated(shown("E")))
        slope = evaluated(shown("dE/dx_i"), i=i)
        assert (energies[0] - energies[1]) / 2e-5 == pytest.approx(slope, rel=1e-7, abs=1e-8)
