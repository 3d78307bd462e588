"""The entry of public functions: what an argument has to be is said once, above the function, and read before it runs.

::

    @checked(x="... m", w="m o", count=Whole(1))
    def f(x, w, count): ...

A text means an array of numbers with these axes; a letter that stands twice is one size, ``...`` any leading axes,
``""`` none at all, and ``"*"`` says nothing of them. What else there is: a class, `Whole`, `Real`, `Maybe` and `Each`
of `refattn.files`, a list of one schema, a tuple of schemas one of which fits, and the kinds below. An error says
"NAME: got ..., needs ...". Cores check theirs in `refattn.mechanisms.entry`.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from refattn.files import Each as Each
from refattn.files import Maybe as Maybe
from refattn.files import Real as Real
from refattn.files import Whole as Whole

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Axes:
    """An array with axes, as texts have them, of a kind: "floating", "whole", "bool", or "any" of these."""

    axes: str
    kind: str = "floating"


@dataclass(frozen=True)
class Multiple:
    """A whole number that is a multiple of an axis' size, given by its letter in an argument before it."""

    of: str


@dataclass(frozen=True)
class Divisor:
    """A whole number that divides an axis' size, given by its letter in an argument before it."""

    of: str


@dataclass(frozen=True)
class One:
    """One of some words."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Having:
    """An object of any class that has some attributes."""

    names: tuple[str, ...]
    what: str


class Tree:
    """A tree of arrays."""


class Function:
    """What can be called."""


class Named:
    """The path of a file or a folder."""


_SLIPS = (TypeError, ValueError, AttributeError, IndexError, KeyError, ZeroDivisionError, OverflowError, AssertionError)
"""What goes wrong where something else is in an argument than its parts are read as."""

_PLAIN = ("builtins", "numpy.exceptions", "numpy._core._exceptions")
"""Where errors are from that say nothing by their class alone."""

_NAMED = re.compile(r"(?!matmul:)[\w.]+(?: or [\w.]+)*: ")

_HOOKS = str(Path(__file__).with_name("equations.py"))

_KNOWN = 256
"""How many calls that fit are remembered, of a function and a class of arrays."""


def checked(**needs: Any) -> Callable[[F], F]:
    """Have arguments of a function read before it runs; those that are not given are their defaults and not read.

    Arrays are told apart by class, shape and dtype alone, so that a call like one that did fit is not read again.
    """

    def around(function: F) -> F:
        signature = inspect.signature(function)
        held = [name for name, need in needs.items() if _holds_arrays(need)]
        run = naming(*held)(function) if any(not isinstance(needs[name], str | Axes) for name in held) else function
        fits: WeakKeyDictionary[type, set[Any]] = WeakKeyDictionary()

        @functools.wraps(function)
        def entry(*args: Any, **given: Any) -> Any:
            if _hands_on_what_was_read(sys._getframe(1).f_globals.get("__name__", "")):
                return function(*args, **given)
            kind, like = _alike(args, given)
            if kind is not None and like in fits.get(kind, ()):
                return run(*args, **given)
            found = signature.bind(*args, **given).arguments
            sizes: dict[str, tuple[str, int]] = {}
            for name, need in needs.items():
                if name in found:
                    read(name, found[name], need, sizes)
            if kind is not None:
                known = fits.setdefault(kind, set())
                if len(known) >= _KNOWN:
                    known.clear()
                known.add(like)
            return run(*args, **given)

        return cast(F, entry)

    return around


def naming(*trees: str) -> Callable[[F], F]:
    """Have errors from inside of a function name these of its arguments, where they name none.

    What a tree of arrays holds is read by the functions that it is given to in part, whose errors say what it is called
    there: "w: got shape (8,), needs (i, o)" becomes "params: w: got shape ...". Errors of classes of their own, of
    mechanisms about an option, and those of a hook, stay as they are.
    """

    def around(function: F) -> F:
        named = re.compile(rf"\b(?:{'|'.join(inspect.signature(function).parameters)})[:.\[]")

        @functools.wraps(function)
        def entry(*args: Any, **given: Any) -> Any:
            try:
                return function(*args, **given)
            except _SLIPS as error:
                if named.search(str(error)) or not _says_too_little(error) or error.__traceback__ is None:
                    raise
                words = str(error) if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {error}"
                kind = TypeError if isinstance(error, TypeError | AttributeError) else ValueError
                # With the lines below this one, so that a debugger stands where it failed.
                place = error.__traceback__.tb_next
                raise kind(f"{' or '.join(trees)}: {words}").with_traceback(place) from None

        return cast(F, entry)

    return around


def _says_too_little(error: Exception) -> bool:
    """Tell whether an error names no argument or option of the user's.

    Those that mechanisms raise do ("jitter: got ..."), and those that a hook raises are its own. What is left comes
    from a library, or from the entry of a piece, which names what it is given.
    """
    read_by_a_piece, place = False, error.__traceback__
    while place is not None:
        code, place = place.tb_frame.f_code, place.tb_next
        if code.co_filename == _HOOKS:
            return False
        read_by_a_piece |= code is read.__code__
    return type(error).__module__ in _PLAIN and (read_by_a_piece or not _NAMED.match(str(error)))


def _holds_arrays(need: Any) -> bool:
    if isinstance(need, Maybe):
        return _holds_arrays(need.schema)
    return need is Tree or isinstance(need, str | Axes) or isinstance(need, type) and is_dataclass(need)


@functools.cache
def _hands_on_what_was_read(module: str) -> bool:
    """Tell whether a module is a definition or an implementation, whose core has read the arguments."""
    parts = module.split(".")
    return parts[:2] == ["refattn", "mechanisms"] and (parts[-1] == "dense" or "implementations" in parts)


def _alike(args: tuple[Any, ...], given: dict[str, Any]) -> tuple[type | None, Any]:
    """Return the class of all arrays of a call, and what else their check depends on.

    The class is that of None where there is no array, and None itself where it is unknown.
    """
    kind: type | None = None
    like: list[Any] = [len(args), *given]
    for value in (*args, *given.values()):
        own = type(value)
        if value is None or own is bool or own is int or own is float or own is str:
            like.append((own, value))
            continue
        if getattr(value, "is_nested", False):  # its shape is none
            return None, None
        shape = getattr(value, "shape", None)
        # An array without axes may stand for a number, whose value matters.
        if not isinstance(shape, tuple) or not shape or kind not in (None, own):
            return None, None
        kind = own
        like.append((tuple(shape), getattr(value, "dtype", None), getattr(value, "layout", None)))
    key = tuple(like)
    try:
        hash(key)
    except TypeError:  # of what only looks like an array
        return None, None
    return kind or type(None), key


def read(name: str, value: Any, need: Any, sizes: dict[str, tuple[str, int]] | None = None) -> None:
    """Raise TypeError or ValueError, which names the argument, where a value is not what is needed."""
    if isinstance(need, Maybe):
        if value is not None:
            read(name, value, need.schema, sizes)
    elif isinstance(need, str):
        _read_array(name, value, Axes(need), {} if sizes is None else sizes)
    elif isinstance(need, Axes):
        _read_array(name, value, need, {} if sizes is None else sizes)
    elif isinstance(need, Whole):
        _read_whole(name, value, need)
    elif isinstance(need, Real):
        _read_real(name, value, need)
    elif isinstance(need, Multiple | Divisor):
        _read_whole(name, value, Whole(0))
        first, size = (sizes or {})[need.of]
        whole, part = (size, value) if isinstance(need, Divisor) else (value, size)
        if whole != part and (not part or whole % part):
            what = "divisor" if isinstance(need, Divisor) else "multiple"
            raise _refused(name, value, f"a {what} of the {size} of {first}", ValueError)
    elif isinstance(need, tuple):
        _read_either(name, value, need)
    elif isinstance(need, list):
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise _refused(name, value, "a sequence")
        for n, each in enumerate(value):
            read(f"{name}[{n}]", each, need[0], sizes)
    elif isinstance(need, Each):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _refused(name, value, "a mapping whose keys are texts")
        for key, each in value.items():
            read(f"{name}[{key!r}]", each, need.schema, sizes)
    elif isinstance(need, One):
        if not isinstance(value, str) or value not in need.words:
            raise _refused(name, value, f"one of {', '.join(need.words)}", ValueError)
    elif isinstance(need, Having):
        if isinstance(value, type) or not all(hasattr(value, each) for each in need.names):
            raise _refused(name, value, need.what)
    elif need is Tree:
        _read_tree(name, value)
    elif need is Function:
        if not callable(value):
            raise _refused(name, value, "a function")
    elif need is Named:
        if not isinstance(value, str | os.PathLike) or "\0" in os.fspath(value):
            raise _refused(name, value, "a path")
    elif isinstance(need, type):
        if not isinstance(value, need):
            raise _refused(name, value, f"a {need.__name__}")
        if is_dataclass(need):
            from refattn import tree  # here, and not above, as in `_read_array`

            tree.check_fields(name, value)
    elif need is not None:
        raise AssertionError(f"{name}: {need!r} says nothing")


def _read_either(name: str, value: Any, needs: tuple[Any, ...]) -> None:
    for n, need in enumerate(needs, 1):
        try:
            read(name, value, need)
            return
        except (TypeError, ValueError):
            if n == len(needs):
                raise


def _refused(name: str, value: Any, needs: str, kind: type[Exception] = TypeError) -> Exception:
    text = type(value).__name__ if not isinstance(value, str | int | float) else repr(value)[:80]
    return kind(f"{name}: got {text}, needs {needs}")


def _read_whole(name: str, value: Any, need: Whole) -> None:
    needs = f"a whole number of at least {need.low}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _refused(name, value, needs)
    number = operator.index(value)
    if not need.low <= number <= need.high:
        raise _refused(name, number, needs if number < need.low else f"at most {need.high}", ValueError)


def _read_real(name: str, value: Any, need: Real) -> None:
    needs = "a number" if need.infinite else "a finite number"
    needs += f" from {need.low:g}" if need.low > float("-inf") else ""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refused(name, value, needs)
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not number >= need.low or not need.infinite and abs(number) == float("inf"):
        raise _refused(name, value, needs, ValueError)


def _read_array(name: str, value: Any, need: Axes, sizes: dict[str, tuple[str, int]]) -> None:
    # Here, and not above: what needs no array is read without array libraries.
    from refattn import backends
    from refattn.xp import dtype_name, is_array, is_bool

    if not is_array(value):
        raise _refused(name, value, "a plain array" if hasattr(value, "dtype") else "an array")
    if any(getattr(value, kind, False) for kind in ("is_sparse", "is_sparse_csr", "is_nested")):
        raise _refused(name, value, "a dense array")
    right = is_bool(value) if need.kind == "bool" else dtype_name(value).startswith(("float", "bfloat"))
    if need.kind == "whole":
        right = dtype_name(value).startswith(("int", "uint"))
    if need.kind == "any":
        right = dtype_name(value).startswith(("float", "bfloat", "int", "uint", "bool"))
    if not right:
        kind = {"floating": "a floating", "whole": "an integer", "bool": "the boolean", "any": "a numeric"}[need.kind]
        raise TypeError(f"{name}: got dtype {dtype_name(value)}, needs {kind} type")
    if need.axes == "*":
        return
    letters, shape = need.axes.split(), tuple(value.shape)
    leading = letters[:1] == ["..."]
    letters = letters[1:] if leading else letters
    if len(shape) < len(letters) or len(shape) > len(letters) and not leading:
        raise ValueError(f"{name}: got shape {shape}, needs ({need.axes.replace(' ', ', ')})")
    if "library" not in sizes:
        sizes["library"] = (name, id(backends.of(value)))
    elif sizes["library"][1] != id(backends.of(value)):
        raise TypeError(f"{name}: got {type(value).__module__}, needs an array of the library of {sizes['library'][0]}")
    for letter, size in zip(letters, shape[len(shape) - len(letters) :], strict=True):
        first, known = sizes.setdefault(letter, (name, size))
        if size != known:
            needs = f"({need.axes.replace(' ', ', ')}) with {letter} = {known}, as in {first}"
            raise ValueError(f"{name}: got shape {shape}, needs {needs}")
    if leading:
        full = shape[: len(shape) - len(letters)]
        first, known_axes = cast(Any, sizes.setdefault("...", cast(Any, (name, full))))
        if full != known_axes:
            raise ValueError(f"{name}: got shape {shape}, needs the leading axes {known_axes} of {first}")


def _read_tree(name: str, value: Any) -> None:
    from refattn import tree

    try:
        leaves = tree.flatten(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    for leaf, x in leaves.items():
        read(f"{name}.{leaf}" if leaf else name, x, "*")
