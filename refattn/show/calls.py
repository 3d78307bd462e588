"""What a core hands on to its definition: looked at while it does so, and written down as expressions."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np

from refattn.mechanisms.record import Mechanism
from refattn.show.link import Ref

USUAL: Mapping[str, Callable[[Any], Any]] = {
    "1.0 / math.sqrt(q.shape[3])": lambda q: 1.0 / math.sqrt(q.shape[3]),
    "math.sqrt(q.shape[3])": lambda q: math.sqrt(q.shape[3]),
    "np.asarray(math.sqrt(q.shape[3]), dtype=q.dtype)": lambda q: np.asarray(math.sqrt(q.shape[3]), dtype=q.dtype),
    "np.zeros((*q.shape[:3], 1), dtype=q.dtype)": lambda q: np.zeros((*q.shape[:3], 1), dtype=q.dtype),
}
"""Defaults that are no constants: they depend on the sizes of q."""


@dataclass(frozen=True)
class Call:
    """A call of the core as the definition saw it: arguments by name, and what it returned."""

    forward: dict[str, Any]
    result: Any
    backward: dict[str, Any]
    gradients: Any


def watch(
    record: Mechanism,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    d_out: Any = None,
    *,
    outputs: bool = False,
) -> Call:
    """Call a core's forward and backward in the form of the definition, and return what went on there.

    The gradient of `out` that goes in is `d_out`; None means ones. With `outputs` a gradient comes in for each
    further output, too.
    """
    core, dense = record.core, definition(record)
    with _Watch(dense.forward.__code__) as forward:
        out, saved = core.forward(**{**arrays, **options, "form": record.forms[0]})  # type: ignore[union-attr]
    more = {f"d_{name}": np.ones_like(getattr(saved, name)) for name in record.pulled if outputs}
    with _Watch(dense.backward.__code__) as backward:
        core.backward(saved, np.ones_like(out) if d_out is None else d_out, **more)  # type: ignore[union-attr]
    return Call(forward.given, forward.returned, backward.given, backward.returned)


def definition(record: Mechanism) -> ModuleType:
    """Return the module that defines a mechanism; raise where it has no pair of functions."""
    module = record.tagged[0]
    if record.core is None or not hasattr(module, "forward") or not hasattr(module, "backward"):
        raise ValueError(f"mechanism: got {record.name!r}, which has no core, needs one that maps q, k and v")
    return module


class Elsewhere(ValueError):  # noqa: N818 (it is no error where a call may be passed over)
    """Raised where a core does not call its definition: a solver takes the steps, say."""


class _Watch:
    """A context that keeps the arguments and the result of the first call of a function."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.given: dict[str, Any] = {}
        self.returned: Any = None
        self._frame: FrameType | None = None

    def __enter__(self) -> _Watch:
        self._before = sys.getprofile()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)
        if not self.given:
            raise Elsewhere(f"{self.code.co_filename}: {self.code.co_name} was not called by the core")

    def _look(self, frame: FrameType, event: str, value: Any) -> None:
        if frame.f_code is not self.code:
            return
        if event == "call" and not self.given:
            names = self.code.co_varnames[: self.code.co_argcount + self.code.co_kwonlyargcount]
            self.given, self._frame = {name: frame.f_locals[name] for name in names}, frame
        elif event == "return" and frame is self._frame:
            self.returned = dict(value) if isinstance(value, dict) else value  # the core may add to it


def expression(values: Sequence[Any], queries: Sequence[Any], name: Callable[[Ref], str]) -> str:
    """Return Python text for a value that is seen in several calls, with queries q of different sizes.

    `name` gives the text for an item of a module: a function, or the class of an object.

    Raises
    ------
    ValueError
        Where the values differ in a way that nothing in `USUAL` has, or are of no class that can be written.
    """
    first = values[0]
    for text, usual in USUAL.items() if len(queries) > 1 else ():
        if all(_same(value, usual(q)) for value, q in zip(values, queries, strict=True)):
            return text
    if all(value is first for value in values) and (named := _constant(first, name)) is not None:
        return named
    if all(type(value) is type(first) for value in values):
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            fields = [field for field in dataclasses.fields(first) if field.init]
            parts = {field: [getattr(value, field.name) for value in values] for field in fields}
            changed = {field: part for field, part in parts.items() if not all(_same(x, field.default) for x in part)}
            inner = [f"{field.name}={expression(part, queries, name)}" for field, part in changed.items()]
            return f"{name(Ref(type(first).__module__, type(first).__qualname__))}({', '.join(inner)})"
        if isinstance(first, tuple | list) and len({len(value) for value in values}) == 1:
            inner = [expression(part, queries, name) for part in zip(*values, strict=True)]
            return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})" if type(first) is tuple else _listed(inner)
        if isinstance(first, dict) and len({tuple(value) for value in values}) == 1:
            pairs = {key: expression([value[key] for value in values], queries, name) for key in first}
            return f"{{{', '.join(f'{_quoted(key)}: {text}' for key, text in pairs.items())}}}"
        written = _literal(first, name) if all(_same(value, first) for value in values) else None
        if written is not None:
            return written
    raise ValueError(f"got {first!r}, needs a value that can be written, or is one of {', '.join(USUAL)}")


def written(given: Mapping[str, Any], name: Callable[[Ref], str]) -> tuple[str, dict[str, Any]]:
    """Return the arguments of a call as text, and the arrays that are named in it."""
    arrays = {key: x for key, x in given.items() if isinstance(x, np.ndarray)}
    known = {*arrays, "saved"}
    texts = {key: key if key in known else expression([x], [None], name) for key, x in given.items()}
    return ", ".join(f"{key}={text}" for key, text in texts.items()), arrays


@dataclass(frozen=True)
class Parts:
    """What an object that is handed to the definition is made of.

    Attributes
    ----------
    text
        How it is made, with names for what is no choice.
    places
        Where these stand in it, by name.
    """

    text: str
    places: dict[str, tuple[str, ...]]


def parts_of(values: Sequence[Any], name: Callable[[Ref], str], taken: Iterable[str]) -> Parts | None:
    """Return what objects that are handed on in several calls are made of; None where they are no such objects."""
    if not all(dataclasses.is_dataclass(value) and type(value) is type(values[0]) for value in values):
        return None
    places: dict[str, tuple[str, ...]] = {}
    known = {*taken}

    def made(values: Sequence[Any], at: tuple[str, ...]) -> str:
        first = values[0]
        named = _constant(first, name) if all(value is first for value in values) else None
        if named is not None:
            return named
        if dataclasses.is_dataclass(first) and all(type(value) is type(first) for value in values):
            fields = [field.name for field in dataclasses.fields(first) if field.init]
            inner = [f"{field}={made([getattr(x, field) for x in values], (*at, field))}" for field in fields]
            return f"{name(Ref(type(first).__module__, type(first).__qualname__))}({', '.join(inner)})"
        if all(_same(value, first) for value in values) and _is_choice(first):
            return expression([first], [None], name)
        short = next(text for n in range(1, len(at) + 1) if (text := "_".join(at[-n:])) not in known)
        known.add(short)
        places[short] = at
        return short

    return Parts(made(values, ()), places)


def part(value: Any, at: Sequence[str]) -> Any:
    """Return what stands at a place of an object."""
    for name in at:
        value = getattr(value, name)
    return value


def _is_choice(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_choice, value))
    return value is None or isinstance(value, bool | str | type) or callable(value)


def choices(value: Any) -> Any:
    """Return what is chosen in a value: its text, classes and truth values; all numbers, arrays and None are one."""
    if isinstance(value, bool | str | type):
        return value
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return type(value), {field.name: choices(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple | list):
        return tuple(map(choices, value))
    if isinstance(value, dict):
        return {key: choices(part) for key, part in value.items()}
    return value if callable(value) else None


def _constant(value: Any, name: Callable[[Ref], str]) -> str | None:
    """Return the text for an object that stands at the top of the module of its class, or in a dict there."""
    home = getattr(type(value), "__module__", "")
    if not home.startswith("refattn."):
        return None
    for key, known in vars(sys.modules[home]).items():
        if known is value:
            return name(Ref(home, key))
        if isinstance(known, dict):
            for inner, each in known.items():
                if each is value and isinstance(inner, str):
                    return f"{name(Ref(home, key))}[{_quoted(inner)}]"
    return None


def _literal(value: Any, name: Callable[[Ref], str]) -> str | None:
    if value is None or isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"{'-' if value < 0 else ''}math.{str(abs(value))}"
    if isinstance(value, np.ndarray | np.generic):
        numbers = f"np.array({value.tolist()!r})"
        return numbers if value.dtype in (np.float64, np.bool_) else f"{numbers}.astype(np.{value.dtype})"
    if isinstance(value, type) or callable(value):
        known = getattr(value, "__qualname__", "<").isidentifier()  # not a function in a function
        return name(Ref(value.__module__, value.__qualname__)) if known else None
    return None


def _same(a: Any, b: Any) -> bool:
    """Tell whether two values are of one class and equal, arrays bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
    return a is b or bool(a == b)


def _quoted(text: Any) -> str:
    return f'"{text}"' if isinstance(text, str) and repr(text) == f"'{text}'" and '"' not in text else repr(text)


def _listed(inner: Sequence[str]) -> str:
    return f"[{', '.join(inner)}]"
