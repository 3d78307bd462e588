"""Options that are one of several kinds, each with numbers of its own: an integrator, a threshold, a kernel.

A kind is a frozen dataclass: its fields have the defaults, its docstring says what they mean, and its ``__post_init__``
checks them, so that each of these stands once. A core takes the object, the name of its kind, or both as text, which is
how cases, settings and command lines write it::

    forward(q, k, v, threshold=Soft(tau=0.1))
    forward(q, k, v, threshold="soft")
    forward(q, k, v, threshold="soft(tau=0.1)")

Text names the library's own kinds and nothing else: it may come from a file, and nothing that a file says is imported.
A function of the user's own is passed as an object, from Python.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Mapping
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
    if isinstance(value, str):
        return _of_text(option, value, tuple(kinds.items()))
    if any(isinstance(value, kind) for kind in kinds.values()):
        found: T = value
        return found
    homes = " or ".join(dict.fromkeys(kind.__name__ for kind in kinds.values()))
    raise TypeError(f"{option}: got {type(value).__name__}, needs one of {', '.join(kinds)}, or a {homes}")


@functools.lru_cache(maxsize=256)
def _of_text(option: str, value: str, known_kinds: tuple[tuple[str, type[T]], ...]) -> T:
    """Return the object that a text means; the same text is read once."""
    kinds = dict(known_kinds)
    name, numbers = (value, {}) if value in kinds else read(option, value)
    if name not in kinds:
        raise ValueError(f"{option}: got {value!r}, needs one of {', '.join(kinds)}")
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


def numbers_of(options: Mapping[str, Any], families: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return what is given by its own name: options, and in place of those that are families their numbers.

    `families` has for such an option what makes its object; None means that a number is not given.
    """
    found: dict[str, Any] = {}
    for option, value in options.items():
        made = families[option](value) if option in families and value is not None else value
        if dataclasses.is_dataclass(made):
            found |= {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
        else:
            found[option] = value
    return {name: value for name, value in found.items() if value is not None}


def with_numbers(
    options: Mapping[str, Any], families: Mapping[str, Callable[[Any], Any]], numbers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return options with other numbers, given by their own names; one that no family has becomes an option."""
    found, left = dict(options), dict(numbers)
    for option, make in families.items():
        made = make(options[option]) if options.get(option) is not None else None
        if dataclasses.is_dataclass(made) and not isinstance(made, type):
            own = {field.name: left.pop(field.name) for field in dataclasses.fields(made) if field.name in left}
            found[option] = dataclasses.replace(made, **own) if own else options[option]
    return found | left


def read(option: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the numbers of text such as ``soft(tau=0.1)``."""
    if len(text) > 1000:
        raise ValueError(f"{option}: got text of {len(text)} characters, needs a name, or a name and numbers")
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name) or call.args or any(each.arg is None for each in call.keywords):
            raise ValueError
        return call.func.id, {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        needs = "a name such as soft, or a name and numbers: soft(tau=0.1)"
        raise ValueError(f"{option}: got {text!r}, needs {needs}") from None


Forbidden = tuple[tuple[Callable[[Any], Any], str], ...]
"""What does not go together: when it is asked for, and the message; {c} stands for what was asked."""


def refuse(forbidden: Forbidden, c: Any) -> None:
    """Raise ValueError with the message of the first row that forbids what is asked for."""
    for forbids, message in forbidden:
        if forbids(c):
            raise ValueError(message.format(c=c))
