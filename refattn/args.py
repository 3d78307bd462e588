"""The one way to check arguments: a vocabulary of what is needed, and messages "NAME: got ..., needs ...".

What an argument has to be is said once, above the function, and read before it runs::

    @checked(x="... m", w="m o", count=Whole(1))
    def f(x, w, count): ...

or for the fields of an object, ``check_all(self, steps=Whole(1), rate=Real(0.0))``, or for one value,
``check("steps", steps, Whole(1))``.

A text means an array of numbers with these axes; a letter that stands twice is one size, ``...`` any leading axes,
``""`` none at all, and ``"*"`` says nothing of them. What else there is: a class, a list of one schema, a tuple of
schemas one of which fits, a mapping from the names that an object has at least to their schemas, None for anything, and
the kinds below. JSON is read by the same words (`check_json`). What the cores share stands at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

from refattn import backends, tree
from refattn.messages import meant
from refattn.xp import (
    FLOATING,
    LOW_PRECISION,
    Array,
    ByClass,
    Namespace,
    concrete,
    device,
    dtype_name,
    has_one_device,
    is_array,
    is_bool,
    is_floating,
    namespace,
    raised,
)

F = TypeVar("F", bound=Callable[..., Any])

# --- the vocabulary


@dataclass(frozen=True)
class Whole:
    """A whole number, Python's or NumPy's, from `low` to `high`."""

    low: int = 0
    high: int = 2**63 - 1


@dataclass(frozen=True)
class Real:
    """A number from `low`, or `above` it, to `high`, or `below` it; a finite one, unless it may be `infinite`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    infinite: bool = False


@dataclass(frozen=True)
class Matching:
    """A text that a pattern describes, and `what` in words."""

    pattern: str
    what: str


@dataclass(frozen=True)
class One:
    """One of some words."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Each:
    """A mapping whose values are all of one schema, whatever their names."""

    schema: Any


@dataclass(frozen=True)
class Maybe:
    """None, or what the schema says; a field that may be missing."""

    schema: Any


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


SHA256 = Matching(r"[0-9a-f]{64}", "64 hexadecimal digits")

ROUNDS = 1_000_000
"""How often an option may ask for a loop to run, so that a slip is an error and not days of work."""

_KINDS: dict[Any, str] = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}

_DTYPES = {
    "floating": (("float", "bfloat"), "a floating"),
    "whole": (("int", "uint"), "an integer"),
    "bool": (("bool",), "the boolean"),
    "any": (("float", "bfloat", "int", "uint", "bool"), "a numeric"),
}

Sizes = dict[str, tuple[str, Any]]
"""By the letter of an axis: the argument that it was first seen in, and its size."""


def check(name: str, value: Any, need: Any, sizes: Sizes | None = None) -> None:
    """Raise TypeError or ValueError, which names the argument, where a value is not what is needed."""
    if need is None or isinstance(need, Maybe) and value is None:
        return
    if isinstance(need, Maybe):
        check(name, value, need.schema, sizes)
    elif isinstance(need, str | Axes):
        _read_array(name, value, Axes(need) if isinstance(need, str) else need, {} if sizes is None else sizes)
    elif isinstance(need, Whole):
        _read_whole(name, value, need)
    elif isinstance(need, Real):
        _read_real(name, value, need)
    elif isinstance(need, Multiple | Divisor):
        _read_whole(name, value, Whole())
        first, size = (sizes or {})[need.of]
        whole, part = (size, value) if isinstance(need, Divisor) else (value, size)
        if whole != part and (not part or whole % part):
            raise refused(name, value, f"a {type(need).__name__.lower()} of the {size} of {first}", ValueError)
    elif isinstance(need, tuple):
        _read_either(name, value, need)
    elif isinstance(need, list):
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise refused(name, value, "a list")
        for n, each in enumerate(value):
            check(f"{name}[{n}]", each, need[0], sizes)
    elif isinstance(need, Each):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise refused(name, value, "a mapping whose keys are texts")
        for key, each in value.items():
            check(f"{name}.{key[:80]}" if name else key[:80], each, need.schema, sizes)
    elif isinstance(need, Mapping):
        if not isinstance(value, Mapping):
            raise refused(name, value, "an object")
        for key, own in need.items():
            at = f"{name}.{key}" if name else key
            if key not in value and not isinstance(own, Maybe):
                raise ValueError(f"{at}: is missing")
            check(at, value.get(key), own, sizes)
    elif isinstance(need, One):
        if not isinstance(value, str) or value not in need.words:
            raise refused(name, value, f"one of {', '.join(need.words)}{meant(value, need.words)}", ValueError)
    elif isinstance(need, Matching):
        if not isinstance(value, str) or not re.fullmatch(need.pattern, value):
            raise refused(name, value, need.what, ValueError)
    elif isinstance(need, Having):
        if isinstance(value, type) or not all(hasattr(value, each) for each in need.names):
            raise refused(name, value, need.what)
    elif need is Tree:
        _read_tree(name, value)
    elif need is Function:
        if not callable(value):
            raise refused(name, value, "a function")
    elif need is Named:
        if not isinstance(value, str | os.PathLike) or "\0" in os.fspath(value):
            raise refused(name, value, "a path")
    else:
        if not isinstance(value, need):
            home = "" if need.__module__ == "builtins" else f" of {need.__module__}"
            raise refused(name, value, _KINDS.get(need, f"a {need.__qualname__}{home}"))
        tree.check_fields(name, value)


def check_all(owner: Any, **needs: Any) -> None:
    """Raise where fields of an object are not what they have to be."""
    for name, need in needs.items():
        check(name, getattr(owner, name), need)


def check_json(value: Any, schema: Any, at: str = "") -> None:
    """Raise ValueError, which names the field, where a value of JSON is not what a schema says."""
    try:
        check(at, value, schema)
    except TypeError as error:
        raise ValueError(str(error)) from error


def refused(name: str, value: Any, needs: str, kind: type[Exception] = TypeError) -> Exception:
    """Return the error that says what was got and what is needed."""
    if isinstance(value, float):  # NumPy's is one, with a text of its own
        value = float(value)
    if isinstance(value, int) and value.bit_length() > 128:
        got = f"a whole number of {value.bit_length()} bits"
    else:
        got = repr(value)[:80] if isinstance(value, str | int | float | None) else _class_of(value)
    return kind(f"{name or 'the file'}: got {got}, needs {needs}")


def described(value: Any) -> str:
    """Return a value of any kind in one short line: of an array its type, shape and dtype, else how it is written."""
    if is_array(value) and value.shape != ():
        return f"{type(value).__name__} of shape {tuple(value.shape)} and dtype {dtype_name(value)}"
    return " ".join(repr(value).split())[:80]


def _class_of(value: Any) -> str:
    """Return the name of its class, of a dataclass with the module: there are many called Saved, Params and Config."""
    kind = type(value)
    return f"{kind.__name__} of {kind.__module__}" if is_dataclass(kind) else kind.__name__


def _read_either(name: str, value: Any, needs: tuple[Any, ...]) -> None:
    for n, need in enumerate(needs, 1):
        try:
            return check(name, value, need)
        except (TypeError, ValueError):
            if n == len(needs):
                raise


def _read_whole(name: str, value: Any, need: Whole) -> None:
    needs = f"a whole number of at least {need.low}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise refused(name, value, needs)
    if not need.low <= (number := int(value)) <= need.high:
        raise refused(name, number, needs if number < need.low else f"at most {need.high}", ValueError)


def _read_real(name: str, value: Any, need: Real) -> None:
    needs = "a number" if need.infinite else "a finite number"
    bounded = need.low > -math.inf
    if bounded:
        needs += f" {'above' if need.above else 'from'} {need.low:g}"
    if need.high < math.inf:
        most = "below " if need.below else "" if bounded else "of at most "
        needs += f"{' to' if bounded else ''} {most}{need.high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refused(name, value, needs)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    inside = number > need.low if need.above else number >= need.low  # which NaN is not
    inside &= number < need.high if need.below else number <= need.high
    if not inside or not need.infinite and math.isinf(number):
        raise refused(name, value, needs, ValueError)


def _read_array(name: str, value: Any, need: Axes, sizes: Sizes) -> None:
    if not is_array(value):
        raise refused(name, value, "a plain array" if hasattr(value, "dtype") else "an array")
    _check_dense(name, value)
    begins, kind = _DTYPES[need.kind]
    if not dtype_name(value).startswith(begins):
        raise TypeError(f"{name}: got dtype {dtype_name(value)}, needs {kind} type")
    if need.axes == "*":
        return
    letters, shape = need.axes.split(), tuple(value.shape)
    listed = f"({need.axes.replace(' ', ', ')})"
    leading = letters[:1] == ["..."]
    letters = letters[1:] if leading else letters
    extra = len(shape) - len(letters)
    if extra < 0 or extra > 0 and not leading:
        raise ValueError(f"{name}: got shape {shape}, needs {listed}")
    first, library = sizes.setdefault("library", (name, backends.of(value)))
    if library is not backends.of(value):
        raise TypeError(f"{name}: got {type(value).__module__}, needs an array of the library of {first}")
    for letter, size in zip(letters, shape[extra:], strict=True):
        first, known = sizes.setdefault(letter, (name, size))
        if size != known:
            raise ValueError(f"{name}: got shape {shape}, needs {listed} with {letter} = {known}, as in {first}")
    if leading:
        first, known = sizes.setdefault("...", (name, shape[:extra]))
        if shape[:extra] != known:
            raise ValueError(f"{name}: got shape {shape}, needs the leading axes {known} of {first}")


def _check_dense(name: str, value: Any) -> None:
    if any(getattr(value, kind, False) for kind in ("is_sparse", "is_sparse_csr", "is_nested")):
        raise TypeError(f"{name}: got a sparse or nested tensor, needs a dense one")


def _read_tree(name: str, value: Any) -> None:
    try:
        leaves = tree.flatten(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    fit: set[Any] = set()  # dtypes of arrays that differ in nothing else
    for leaf, x in leaves.items():
        like = (type(x), x.dtype) if type(x) in _ALIKE.lasting else None
        if like not in fit:
            check(f"{name}.{leaf}" if leaf else name, x, "*")
        if like is not None:
            fit.add(like)


# --- the entry of public functions

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
            sizes: Sizes = {}
            for name, need in needs.items():
                if name in found:
                    check(name, found[name], need, sizes)
            if kind is not None:
                known = fits.setdefault(kind, set())
                if len(known) >= _KNOWN:
                    known.clear()
                known.add(like)
            return run(*args, **given)

        return cast(F, entry)

    return around


def spelled(function: F) -> F:
    """Have a call with an argument that a function does not have say which one may have been meant."""

    @functools.wraps(function)
    def entry(*args: Any, **given: Any) -> Any:
        try:
            return function(*args, **given)
        except TypeError as error:
            raise_misspelled(function, error, args, given)
            raise

    return cast(F, entry)


def raise_misspelled(function: Any, error: TypeError, args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Raise a TypeError that names the argument if `error` is Python's, of a call that fits no parameters."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return  # it comes from inside of the function
    parameters = inspect.signature(function).parameters
    name = ".".join([*function.__module__.split(".")[2:-1][:1], function.__name__])
    places = [each.name for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    for other in given:
        if other not in parameters:
            listed = ", ".join(parameters)
            said = f"{other}: is no argument of {name}{meant(other, parameters)}; it has {listed}"
            raise TypeError(said) from None
    if len(args) > len(places):
        said = f"{name}: got {len(args)} arguments by place, needs {', '.join(places)}; the others by name"
        raise TypeError(said) from None


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
                if isinstance(error, TypeError):
                    raise_misspelled(function, error, args, given)
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
        read_by_a_piece |= code is check.__code__
    return type(error).__module__ in _PLAIN and (read_by_a_piece or not _NAMED.match(str(error)))


def _holds_arrays(need: Any) -> bool:
    if isinstance(need, Maybe):
        return _holds_arrays(need.schema)
    return need is Tree or isinstance(need, str | Axes) or isinstance(need, type) and is_dataclass(need)


@functools.cache
def _hands_on_what_was_read(module: str) -> bool:
    """Tell whether a module is a definition or an implementation, whose core has read the arguments."""
    parts = module.split(".")
    return parts[:2] == ["refattn", "mechanisms"] and (parts[-1] in ("dense", "general") or "implementations" in parts)


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


# --- single values


def check_whole(name: str, value: Any, low: int = 0, high: int = 2**63 - 1) -> int:
    """Return a whole number from `low` to `high` as an int; raise where it is none."""
    _read_whole(name, value, Whole(low, high))
    return int(value)


def check_number(name: str, value: Any, *, positive: bool = False) -> float | Array:
    """Return a finite real number as a float, a floating 0-d array of one as it is; raise where it is neither."""
    if not is_array(value) or isinstance(value, numbers.Real):
        _read_real(name, value, Real(0.0 if positive else -math.inf, above=positive))
        return float(value)  # NumPy's numbers would widen float32
    needs = "a finite number above 0" if positive else "a finite number"
    if tuple(value.shape) != ():
        raise ValueError(f"{name}: got an array of shape {tuple(value.shape)}, needs {needs} or a 0-d float array")
    if not is_floating(value):
        raise TypeError(f"{name}: got an array of dtype {dtype_name(value)}, needs {needs} or a 0-d float array")
    outside = ~namespace(value).isfinite(value)
    if concrete(outside | (value <= 0.0) if positive else outside):
        raise ValueError(f"{name}: got {value}, needs {needs}")
    return value


def check_choice(name: str, value: Any, choices: Iterable[str]) -> Any:
    """Return a word that is one of the choices; raise ValueError if it is none."""
    check(name, value, One(tuple(choices)))
    return value


def check_causal(causal: Any) -> bool | Literal["top_left", "bottom_right"]:
    """Return `causal`; raise where it is none of its four values."""
    if type(causal) in (bool, str) and causal in (True, False, "top_left", "bottom_right"):
        value: bool | Literal["top_left", "bottom_right"] = causal
        return value
    raise ValueError(f'causal: got {described(causal)}, needs True, False, "top_left" or "bottom_right"')


def check_plain(config: Any) -> None:
    """Make NumPy's numbers in a frozen configuration Python's, which no walk over its parameters takes for arrays."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_array(value) and tuple(value.shape) == () and isinstance(value, numbers.Number):
            object.__setattr__(config, field.name, value.item())  # type: ignore[attr-defined]


# --- arrays of a call


_ALIKE = ByClass()
"""Namespaces of classes whose arrays differ in nothing that `check_arrays` looks at."""


def check_arrays(**arrays: Array) -> Namespace:
    """Return the namespace of the arrays; raise where they are no arrays, or of several libraries or devices.

    RuntimeError where the library is set to compute with fewer digits than they have.
    """
    first = next(iter(arrays.values()))
    kind = type(first)
    if (known := _ALIKE.lasting.get(kind)) is not None and all(type(x) is kind for x in arrays.values()):
        return known
    for name, x in arrays.items():
        if not is_array(x):
            raise TypeError(f"{name}: got {type(x).__name__}, needs an array of NumPy, CuPy, PyTorch, JAX, ...")
        _check_dense(name, x)
    try:
        xp = namespace(*arrays.values())
    except TypeError:
        libraries = {name: type(x).__module__.partition(".")[0] for name, x in arrays.items()}
        raise TypeError(f"got arrays of several libraries ({_listed(libraries)}), needs one library") from None
    backends.check_precision(first)
    if has_one_device(xp):
        _ALIKE.set(kind, xp)
        return xp
    # What JAX traces has no device yet.
    devices = {name: str(place) for name, x in arrays.items() if (place := device(x)) is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"got arrays on several devices ({_listed(devices)}), needs one device")
    if (why := backends.of(first).misplaced(first)) is not None:
        raise ValueError(f"{next(iter(arrays))}: {why}")
    return xp


_FIT: dict[Any, str] = {}
"""Classes, shapes and dtypes of queries, keys and values that did fit, with the name of the dtype."""

_MOST = 256
"""How many of them are remembered."""


def check_inputs(q: Array, k: Array, v: Array) -> str:
    """Return the name of the dtype of q, k, v; raise where they do not fit, as `check_arrays` and `check_qkv` say.

    Arrays of NumPy like some that did fit are not looked at again: it would take as long as four small products.
    """
    kind, like = type(q), None
    if kind in _ALIKE.lasting and type(k) is kind and type(v) is kind:
        like = kind, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype
        if (known := _FIT.get(like)) is not None:
            return known
    check_arrays(q=q, k=k, v=v)
    check_qkv(q, k, v)
    name = dtype_name(q)
    if like is not None:
        if len(_FIT) >= _MOST:
            _FIT.clear()
        _FIT[like] = name
    return name


def _listed(kinds: Mapping[str, str]) -> str:
    """Return "q: torch; k, v: numpy" for the library, device or dtype of each array."""
    names = {kind: ", ".join(name for name in kinds if kinds[name] == kind) for kind in kinds.values()}
    return "; ".join(f"{listed}: {kind}" for kind, listed in names.items())


def check_floating(**arrays: Array) -> None:
    """Raise where the arrays are not floating, or of several dtypes."""
    if len({x.dtype for x in arrays.values()}) == 1 and is_floating(next(iter(arrays.values()))):
        return
    dtypes = {name: dtype_name(x) for name, x in arrays.items()}
    for name, dtype in dtypes.items():
        if dtype not in FLOATING:
            raise TypeError(f"{name}: got dtype {dtype}, needs float64, float32, float16 or bfloat16")
    if dtypes:
        raise TypeError(f"got arrays of several dtypes ({_listed(dtypes)}), needs one dtype")


def check_qkv(q: Array, k: Array, v: Array, first: str = "q") -> None:
    """Raise where q (b, h, i, d), called `first`, k (b, g, j, d) and v (b, g, j, e) do not fit together."""
    check_floating(**{first: q, "k": k, "v": v})
    for name, x in ((first, q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs 4 axes (batch, heads, tokens, width)")
    b, h, _, d = q.shape
    if k.shape[0] != b or k.shape[3] != d:
        raise ValueError(f"k: got shape {tuple(k.shape)}, needs ({b}, heads, keys, {d}) to fit q {tuple(q.shape)}")
    if tuple(v.shape[:3]) != tuple(k.shape[:3]):
        raise ValueError(f"v: got shape {tuple(v.shape)}, needs {tuple(k.shape[:3])} + (width,) to fit k")
    if d == 0:
        raise ValueError(f"{first}: got width 0 in shape {tuple(q.shape)}, needs a width of at least 1")
    g = k.shape[1]
    if (h and not g) or (g and h % g):
        raise ValueError(f"k: got {g} heads, needs a number that divides the {h} heads of q")


def check_mask(mask: Array | None, shape: tuple[int, int, int, int], name: str = "mask") -> Array | None:
    """Return the mask with four axes; raise where it is not boolean or not broadcastable to `shape`."""
    if mask is None:
        return None
    if not is_bool(mask):
        raise TypeError(f"{name}: got dtype {dtype_name(mask)}, needs bool (True = may attend)")
    got = tuple(mask.shape)
    full = (1,) * (4 - len(got)) + got
    if len(got) > 4 or any(size not in (1, needed) for size, needed in zip(full, shape, strict=True)):
        needs = f"one that broadcasts to (batch, heads, queries, keys) = {shape}"
        raise ValueError(f"{name}: got shape {got}, needs {needs}")
    return namespace(mask).reshape(mask, full)


def check_gradient(name: str, gradient: Array, shape: tuple[int, ...], like: Array) -> None:
    """Raise where an upstream gradient is not of the shape given, or of another dtype than the array `like`.

    A gradient of more digits would be cut off, and one of fewer has fewer than the caller may think. Where `like` is of
    a storage type, the gradient may be float32, too: the one that is computed in, and that outputs in `saved` have.
    """
    if type(gradient) is type(like) in _ALIKE.lasting and (gradient.shape, gradient.dtype) == (shape, like.dtype):
        return
    check_arrays(**{name: gradient, "the output": like})
    check_floating(**{name: gradient})
    if tuple(gradient.shape) != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(gradient.shape)}, needs {tuple(shape)}")
    needed = (own, "float32") if (own := dtype_name(like)) in LOW_PRECISION else (own,)
    if (got := dtype_name(gradient)) not in needed:
        raise TypeError(f"{name}: got dtype {got}, needs {' or '.join(needed)}")


def check_per_head(name: str, value: Any, q: Array, nodes: int | None = None) -> Any:
    """Return a number for all heads, or one for each as (h, 1, 1), in the dtype that is computed in.

    With `nodes` there may be one for each node, too: (h, j, 1).
    """
    if value is None or type(value) is float and math.isfinite(value):
        return value
    if not is_array(value) or tuple(value.shape) == ():
        number = check_number(name, value)
        if not is_array(number):
            return number
        value = number
    elif tuple(value.shape) not in ((q.shape[1],), (q.shape[1], nodes)):
        needs = f"a number or an array ({q.shape[1]},)" + (f" or ({q.shape[1]}, {nodes})" if nodes is not None else "")
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, needs {needs}")
    if not is_floating(value):
        raise TypeError(f"{name}: got dtype {dtype_name(value)}, needs a floating one")
    xp = check_arrays(q=q, **{name: value})
    if concrete(xp.all(xp.isfinite(value))) is False:
        raise ValueError(f"{name}: got a number that is not finite, needs finite numbers")
    value = xp.astype(value, raised(q).dtype)
    return value if tuple(value.shape) == () else xp.reshape(value, (q.shape[1], 1 if len(value.shape) == 1 else -1, 1))


def check_broadcasts(name: str, value: Any, q: Array, full: tuple[int, ...]) -> Any:
    """Return an array in the dtype that is computed in; raise where it does not broadcast to a shape."""
    if value is None:
        return None
    if not is_array(value):
        raise TypeError(f"{name}: got {type(value).__name__}, needs an array")
    xp = check_arrays(q=q, **{name: value})
    check_floating(**{name: value})
    if not fits(tuple(value.shape), full):
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, needs one that broadcasts to {full}")
    return xp.astype(value, raised(q).dtype)


def fits(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Tell whether a shape broadcasts to a full one."""
    ends = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(n in (1, m) for n, m in ends)
