"""Formulas of docstrings, evaluated: what the notation of docs/notation.md says of arrays of one head, in NumPy alone.

A name is an array whose first axes its subscripts count: `s_ij` is an element, `q_i` a row, `gram` a matrix. What
stands side by side is multiplied: numbers with anything, matrices as matrices, two rows element by element, or to a
matrix if one of them is transposed. A product before ``/`` is the numerator, the one factor after it the denominator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ENDS = {"", "+", "-", ")", "]", ",", ">", "=", "|"}
"""What ends a product and what it is divided by."""

FUNCTIONS = ("exp", "sqrt", "log", "sin", "cos")

STATISTICS: dict[str, Callable[[Any], Any]] = {"mean": np.mean, "var": np.var}

Scope = Mapping[str, Any]
"""What letters stand for: positions, or things that functions take."""

Names = Callable[[str, tuple[Any, ...], Scope], Any]
"""The value of a name with its subscripts; KeyError where there is none."""

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([A-Za-z][A-Za-z0-9]*(?:_[a-z]{2,})*'*)|(\S))")
_SUMS = re.compile(r"(sum|max)_([a-z]+)")


class FormulaError(ValueError):
    """A text that is no formula of this notation."""


@dataclass(frozen=True)
class Transposed:
    """A row that stands upright."""

    row: np.ndarray


def times(a: Any, b: Any) -> Any:
    """Return the product of what stands side by side."""
    if isinstance(a, Transposed) or isinstance(b, Transposed):
        left, right = (x.row if isinstance(x, Transposed) else x for x in (a, b))
        if np.ndim(left) == np.ndim(right) == 1:
            return np.outer(left, right)
        return Transposed(left * right) if 0 in (np.ndim(left), np.ndim(right)) else left @ right
    if 0 in (np.ndim(a), np.ndim(b)) or np.ndim(a) == np.ndim(b) == 1:
        return a * b
    return a @ b


class Reader:
    """Reads a formula and computes it, from left to right."""

    def __init__(self, text: str, known: set[str], names: Names, sizes: Mapping[str, Any]) -> None:
        self.known, self.names, self.sizes = known, names, sizes
        self.tokens, self.at = self._split(text), 0

    def _split(self, text: str) -> list[str]:
        """Return the tokens; a name is the longest that is known, and its subscripts are tokens of their own."""
        found, rest = [], text.strip()
        while rest:
            if match := _SUMS.match(rest):
                found.append(match.group())
                rest = rest[match.end() :].lstrip()
                continue
            names = [name for name in self.known if rest.startswith(name)]
            names = [name for name in names if not re.match(r"[A-Za-z0-9']", rest[len(name) :])]
            if names and re.match(r"[A-Za-z]", rest):
                token = max(names, key=len)
            else:
                match = _TOKEN.match(rest)
                assert match is not None
                token = match.group().strip()
                if re.fullmatch(r"[A-Za-z]\w*'*", token) and token not in (*FUNCTIONS, "T", *STATISTICS):
                    raise FormulaError(f"{text}: what is {token}?")
            found.append(token)
            rest = rest[len(token) :]
            if script := re.match(r"_([a-z]+)(?![a-z])", rest):
                found.append(script.group())
                rest = rest[script.end() :]
            rest = rest.lstrip()
        return found

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.peek()
        if not token or (wanted and token != wanted):
            raise FormulaError(f"{' '.join(self.tokens)}: got {token or 'the end'}, needs {wanted or 'more'}")
        self.at += 1
        return token

    def total(self, scope: Scope) -> Any:
        """Read terms with + and - between them."""
        value: Any = None
        while True:
            sign = self.take() if self.peek() in ("+", "-") else "+"
            term = self.term(scope)
            term = term if sign == "+" else times(-1.0, term)
            value = term if value is None else value + term
            if self.peek() not in ("+", "-"):
                return value

    def term(self, scope: Scope) -> Any:
        """Read a product, or the inner product of two, over what it is divided by."""
        value = self.product(scope)
        if self.peek() == ".":
            self.take()
            value = np.sum(value * self.product(scope))
        while self.peek() == "/":
            self.take()
            value = value / self.factor(scope)
            if self.peek() not in ENDS | {"/"}:  # 1/2 x
                value = times(value, self.product(scope))
        return value

    def product(self, scope: Scope) -> Any:
        value = self.factor(scope)
        while self.peek() not in ENDS | {"/", "."}:
            value = times(value, self.factor(scope))
        return value

    def factor(self, scope: Scope) -> Any:
        """Read one factor with its subscripts and powers."""
        token = self.take()
        if match := _SUMS.fullmatch(token):
            return self.large(match[1], match[2], scope)
        if token == "(":
            value = self.total(scope)
            self.take(")")
        elif token == "<":
            left = self.total(scope)
            self.take(",")
            value = np.sum(left * self.total(scope))
            self.take(">")
        elif token == "|":
            value = np.sqrt(np.sum(np.square(self.total(scope))))
            self.take("|")
        elif token[0].isdigit():
            value = float(token)
        elif token in STATISTICS:
            value = STATISTICS[token](self.factor(scope))
        elif token in FUNCTIONS:
            self.take("(")
            value = getattr(np, token)(self.total(scope))
            self.take(")")
        elif token in self.known:
            value = self.named(token, scope)
        else:
            raise FormulaError(f"{' '.join(self.tokens)}: got {token!r}")
        if self.peek().startswith("_") and token == "(":
            value = value[tuple(scope[letter] for letter in self.take()[1:])]
        return self.raised(value, scope)

    def named(self, name: str, scope: Scope) -> Any:
        index: tuple[Any, ...] = ()
        if self.peek().startswith("_") and len(self.peek()) > 1:
            index = tuple(scope[letter] for letter in self.take()[1:])
        elif self.peek() == "_":
            self.take()
            self.take("(")
            index = (int(self.shifted(scope)),)
            self.take(")")
        value = self.names(name, () if callable(self.names(name, (), scope)) else index, scope)
        if not callable(value):
            return value
        self.take("(")
        arguments = [self.total(scope)]
        while self.peek() == ",":
            self.take()
            arguments.append(self.total(scope))
        self.take(")")
        value = value(*arguments)
        return value[index] if index else value

    def shifted(self, scope: Scope) -> int:
        """Read a position such as l+1."""
        letter, sign, number = self.take(), self.take(), self.take()
        return int(scope[letter]) + (1 if sign == "+" else -1) * int(number)

    def raised(self, value: Any, scope: Scope) -> Any:
        while self.peek() == "^":
            self.take()
            power = self.take()
            if power == "T":
                value = Transposed(value) if np.ndim(value) == 1 else value.T
                continue
            if power == "-":
                power += self.take()
            if np.ndim(value) == 2:
                if power != "-1":
                    raise FormulaError(f"a matrix to the power {power}")
                value = np.linalg.inv(value)
            else:
                value = value ** float(power)
        return value

    def large(self, what: str, letters: str, scope: Scope) -> Any:
        """Read what a sum runs over, once for each of its positions."""
        start, values = self.at, []
        for places in self._places(letters, scope):
            self.at = start
            values.append(self.term({**scope, **places}))
        return max(values) if what == "max" else sum(values[1:], values[0])

    def _places(self, letters: str, scope: Scope) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{}]
        for letter in letters:
            size = self.sizes[letter]
            found = [
                {**each, letter: n}
                for each in found
                for n in (size({**scope, **each}) if callable(size) else range(size))
            ]
        return found


def value(text: str, known: set[str], names: Names, sizes: Mapping[str, Any], scope: Scope) -> Any:
    """Return the value of a formula; FormulaError if it is none."""
    reader = Reader(text, known, names, sizes)
    found = reader.total(scope)
    if reader.peek():
        raise FormulaError(f"{text}: {reader.peek()!r} is left")
    return found.row if isinstance(found, Transposed) else found
