"""What can be known of a value without running anything: a choice, an object made of choices, or that it is something.

Numbers that a caller gives and arrays are `SOME`. What is known of two ways to one place is `joined`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from refattn.show.defined import Page


@dataclass(frozen=True)
class Unknown:
    """A value of which nothing is known, but perhaps that it is not None."""

    is_something: bool


ANY, SOME = Unknown(False), Unknown(True)


@dataclass(frozen=True)
class Constant:
    """None, a truth value, text, or a number that stands in the source."""

    value: Any


@dataclass(frozen=True)
class Row:
    """A tuple."""

    parts: tuple[Value, ...]


@dataclass(frozen=True)
class Entries:
    """A dict that nobody changes, by its keys."""

    parts: Mapping[Any, Value]


@dataclass(frozen=True)
class Class:
    """A class of the page."""

    node: ast.ClassDef


@dataclass(frozen=True)
class Made:
    """An object of a class of the page, and what is known of its fields."""

    kind: ast.ClassDef
    fields: Mapping[str, Value]


@dataclass(frozen=True)
class Function:
    """A function of the page, with the names around it, and the object that it is a method of."""

    node: ast.FunctionDef | ast.Lambda
    around: dict[str, Value] = field(compare=False)
    bound: Made | None = None


Value: TypeAlias = Unknown | Constant | Row | Entries | Class | Made | Function


def joined(a: Value, b: Value, forget: Callable[[Value], None]) -> Value:
    """Return what is known of a value that is one of two; `forget` is told what nothing is known of any more."""
    if a == b and type(getattr(a, "value", None)) is type(getattr(b, "value", None)):
        return a
    if isinstance(a, Row) and isinstance(b, Row) and len(a.parts) == len(b.parts):
        return Row(tuple(joined(x, y, forget) for x, y in zip(a.parts, b.parts, strict=True)))
    if isinstance(a, Made) and isinstance(b, Made) and a.kind is b.kind and {*a.fields} == {*b.fields}:
        return Made(a.kind, {name: joined(x, b.fields[name], forget) for name, x in a.fields.items()})
    forget(a)
    forget(b)
    return SOME if is_something(a) and is_something(b) else ANY


def is_something(value: Value) -> bool:
    """Tell whether a value is surely not None."""
    if isinstance(value, Unknown):
        return value.is_something
    return not (isinstance(value, Constant) and value.value is None)


def truth(value: Value) -> bool | None:
    """Return the truth of a value, None where it is not known."""
    if isinstance(value, Unknown):
        return None
    if isinstance(value, Constant):
        return bool(value.value)
    return bool(value.parts) if isinstance(value, Row | Entries) else True


def annotated(value: Value, kind: ast.expr | None) -> Value:
    """Return what is known of a result by its annotation, too: what is an array, or a tuple of these, is not None."""
    if isinstance(value, Row) and isinstance(kind, ast.Subscript) and isinstance(kind.slice, ast.Tuple):
        if len(value.parts) == len(kind.slice.elts):
            pairs = zip(value.parts, kind.slice.elts, strict=True)
            return Row(tuple(annotated(part, each) for part, each in pairs))
    if value != ANY or kind is None:
        return value
    if isinstance(kind, ast.Name) and kind.id not in ("Any", "object", "None"):
        return SOME
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "tuple" and isinstance(kind.slice, ast.Tuple):
        parts = kind.slice.elts
        if not any(isinstance(part, ast.Constant) for part in parts):
            return Row(tuple(annotated(ANY, part) for part in parts))
    return value


ROUNDS = 20
"""Rounds of a loop that are followed one by one, at most."""


def builtin(name: str, given: Sequence[Value], page: Page) -> Value | None:
    """Return what is known of the result of a function of Python, None where nothing is."""
    first = given[0] if given else None
    if name == "isinstance" and len(given) == 2:
        kinds = given[1].parts if isinstance(given[1], Row) else (given[1],)
        if isinstance(first, Constant) and first.value is None:
            return Constant(False)
        if isinstance(first, Made) and all(isinstance(kind, Class) for kind in kinds):
            line = [*page.line_of(first.kind)]
            return Constant(any(kind.node in line for kind in kinds if isinstance(kind, Class)))
        return SOME
    if isinstance(first, Row) and name in ("len", "tuple", "reversed"):
        return Constant(len(first.parts)) if name == "len" else first if name == "tuple" else Row(first.parts[::-1])
    if name == "range" and all(isinstance(each, Constant) and type(each.value) is int for each in given):
        numbers = range(*(each.value for each in given if isinstance(each, Constant)))
        return Row(tuple(map(Constant, numbers))) if len(numbers) < ROUNDS else None
    return None
