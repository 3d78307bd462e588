"""Options that are one of several kinds, each with numbers of its own: an integrator, a threshold, a kernel.

A kind is a frozen dataclass: its fields have the defaults, its docstring says what they mean, and its ``__post_init__``
checks them, so that each of these stands once. A core takes the object, the name of its kind, or both as text, which is
how cases, settings and command lines write it::

    forward(q, k, v, threshold=Soft(tau=0.1))
    forward(q, k, v, threshold="soft")
    forward(q, k, v, threshold="soft(tau=0.1)")
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from refattn.xp import is_array

T = TypeVar("T")


def choose(option: str, value: Any, kinds: Mapping[str, type[T]]) -> T:
    """Return the kind that is meant: an object of one of them as it is, or one made from a name or from text.

    Raises
    ------
    TypeError, ValueError
        Where it is none of them, or one of its numbers does not fit; the message begins with the option.
    """
    if any(isinstance(value, kind) for kind in kinds.values()):
        found: T = value
        return found
    needs = f"one of {', '.join(kinds)}"
    if not isinstance(value, str):
        homes = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds.values()))
        raise TypeError(f"{option}: got {type(value).__name__}, needs {needs}, or a {homes}")
    name, numbers = (value, {}) if value in kinds else _read(option, value)
    if name not in kinds:
        raise ValueError(f"{option}: got {value!r}, needs {needs}")
    known = [field.name for field in dataclasses.fields(kinds[name]) if field.init]  # type: ignore[arg-type]
    for number in numbers:
        if number not in known:
            has = f"{name} has {', '.join(known)}" if known else f"{name} has no numbers"
            raise ValueError(f"{option}: got {number!r} in {value!r}, but {has}")
    try:
        return kinds[name](**numbers)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{option}: got {value!r}; {error}") from None


def text_of(value: Any, kinds: Mapping[str, type[Any]]) -> str:
    """Return the text of an object, which `choose` reads; numbers that are the defaults are left out."""
    name = next(name for name, kind in kinds.items() if type(value) is kind)
    given = []
    for field in dataclasses.fields(value):
        number = getattr(value, field.name)
        if is_array(number):
            raise TypeError(f"{field.name}: got an array, which has no text")
        if field.init and number != field.default:
            given.append(f"{field.name}={number!r}")
    return f"{name}({', '.join(given)})" if given else name


def _read(option: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the numbers of text such as ``soft(tau=0.1)``."""
    wrong = ValueError(f"{option}: got {text!r}, needs a name such as soft, or a name and numbers: soft(tau=0.1)")
    if len(text) > 1000:
        raise ValueError(f"{option}: got text of {len(text)} characters, needs a name, or a name and numbers")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise wrong from None
    if isinstance(node, ast.Name):
        return node.id, {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise wrong
    try:
        numbers = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    except ValueError:
        raise wrong from None
    if None in numbers:
        raise wrong
    return node.func.id, {str(name): number for name, number in numbers.items()}
