"""Run the same source on arrays that carry a derivative: what a call computes, and how that moves with its arguments.

A dual array is an array of NumPy and its tangent, of the same shape: the derivative of each element along one direction
in the space of the arguments. Every operation takes both along, by the rules of `refattn.instruments.rules`.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from numbers import Number
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from refattn import tree
from refattn.args import Function, check, spelled
from refattn.instruments import rules_linalg  # noqa: F401 (it registers its rules)
from refattn.instruments.rules import CONSTANT, RULES
from refattn.instruments.wrapper import Instrument, Wrapped, plain
from refattn.xp import is_array


class Dual(Wrapped):
    """An array and its tangent; that of whole numbers and truth values is None."""

    def __init__(self, value: Any, instrument: Instrument, tangent: Any = None) -> None:
        super().__init__(value, instrument)
        known = tangent is not None or value.dtype.kind not in "fc"
        self.tangent = tangent if known else np.zeros(value.shape, value.dtype)


class Tangents(Instrument):
    """Takes the tangents of all `Dual` arrays along, in a `with tangents()` block."""

    name: ClassVar[str] = "tangents"
    arrays: ClassVar[type[Wrapped]] = Dual

    def array(self, x: Any, tangent: Any = None) -> Dual:
        """Return an input; without a tangent it is a constant."""
        value = np.asarray(x)
        return Dual(value, self, None if tangent is None else np.array(tangent, dtype=value.dtype))

    def call(self, name: str, function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Do an operation, and on the tangents what its rule says."""
        self.check_active()
        values, named = tuple(map(plain, given)), {key: plain(value) for key, value in options.items()}
        _refuse_others(name, (*given, *options.values()))
        with np.errstate(all="ignore"):
            result = function(*values, **named)
            if name in CONSTANT or not _differentiable(result) or not any(map(_carries, given)):
                return self.wrap(result)
            if any(map(_moves, options.values())) or name not in RULES:
                if not any(map(_moves, (*given, *options.values()))):
                    return self.wrap(result)  # of constants
                how = "has no rule for a tangent" if name not in RULES else "has a rule for tangents by position alone"
                raise NotImplementedError(f"{name}: {how}")
            return self._dual(result, RULES[name](result, values, named, list(map(_tangent, given))))

    def change(self, name: str, function: Callable[..., Any], target: Wrapped, given: tuple[Any, ...]) -> None:
        """Do an operation that writes to an array, and write to its tangent."""
        if not _carries(target):
            super().change(name, function, target, given)
            return
        assert isinstance(target, Dual)
        if name == "setitem":
            self.check_active()
            _refuse_others(name, given)
            target.value[plain(given[0])] = plain(given[1])
            target.tangent[plain(given[0])] = _tangent(given[1])
            return
        made = self.call(name, _OUT_OF_PLACE[name], (target, *given), {})
        target.value[...], target.tangent[...] = made.value, made.tangent

    def lose(self, x: Wrapped) -> None:
        """Say that a tangent is dropped."""
        if _moves(x):
            warnings.warn("asarray: drops the tangent of an array, which is a constant from here on", stacklevel=3)

    def _dual(self, result: Any, tangent: Any) -> Any:
        if isinstance(result, tuple | list):
            parts = [self._dual(x, t) for x, t in zip(result, tangent, strict=True)]
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        value = np.asarray(result)
        if value.dtype.kind not in "fc":
            return Dual(value, self)
        tangent = np.asarray(tangent, dtype=value.dtype)
        return Dual(
            value, self, tangent if tangent.shape == value.shape else np.broadcast_to(tangent, value.shape).copy()
        )


_OUT_OF_PLACE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "floordiv": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
}


@contextmanager
def tangents() -> Iterator[Tangents]:
    """Take the tangents along of all arrays that come from `Tangents.array`, with one worker."""
    with Tangents().active() as found:
        yield found


@spelled
def tangent(f: Callable[..., Any], x: Mapping[str, Any], t: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return f(**x) and its derivative along t, by arrays that carry a tangent.

    Parameters
    ----------
    f
        Any function of arrays, in the array API or NumPy's functions, such as a core's forward or backward, or one of a
        block or a model. It is run once.
    x
        Its arguments by name: NumPy's arrays and trees of them (tuples, lists, dicts, and objects such as dataclasses),
        whatever their dtype; everything else is given as it is.
    t
        Tangents of some of these, by name: for an array an array of its shape, for a tree one of the same names, of
        which some may be missing. What has none is a constant. A float may have one, too, but not one in an object.

    Returns
    -------
    y, dy : tree
        What f returned, as plain arrays, and its derivative in a tree like it: J t, where J is the Jacobian of f at x.
        The derivative of whole numbers and truth values is 0. Where f returns plain arrays or numbers alone the tangent
        was dropped on the way, the derivative is 0, and a warning says so, as where ``np.asarray`` drops one.

    Raises
    ------
    TypeError
        Where f is no function, x or t no mapping, or an array is not NumPy's.
    ValueError
        Where t has a name that x has not, or a tangent of another shape, or of what has none, such as whole numbers.
    NotImplementedError
        Where f uses an operation that has no rule; its name is in the error.

    Notes
    -----
    At a tie or kink (max, abs, clip, a threshold) it is the derivative of the branch that was taken. Numbers that f
    reads out of an array, such as ``float(x)``, and decisions on values are constants. Eigenvectors and singular
    vectors of equal values are those that have a derivative; a RuntimeWarning says where values are so near each other
    that digits are lost. Singular vectors of the value 0 count as constants.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(2)[None, None]
    >>> y, dy = ra.tangent(lambda q: ra.softmax.forward(q, q, q)[0], {"q": q}, {"q": np.ones_like(q)})
    >>> y.shape == dy.shape
    True
    """
    check("f", f, Function)
    for name, given in (("x", x), ("t", t)):
        if not isinstance(given, Mapping):
            raise TypeError(f"{name}: got {type(given).__name__}, needs a mapping from names of arguments")
    if unknown := [name for name in t if name not in x]:
        raise ValueError(f"t: got {', '.join(map(repr, unknown))}, needs names of x: {', '.join(x) or 'it has none'}")
    with tangents() as instrument:
        lifted = {name: _lift(instrument, name, value, t.get(name)) for name, value in x.items()}
        y = f(**lifted)
    kinds: list[type] = []
    mapped(lambda _, leaf: kinds.append(type(leaf)), y)
    if not kinds and not _is_tree(y):
        raise TypeError(f"f: returned {_kind(y)}, needs arrays or a tree of arrays")
    if kinds and Dual not in kinds:
        warnings.warn("f: returned plain arrays, so that their tangent is 0", stacklevel=2)
    return mapped(lambda _, leaf: plain(leaf), y), mapped(lambda _, leaf: _derivative(leaf), y)


def mapped(change: Callable[[str, Any], Any], tree: Any) -> Any:
    """Return a tree with change(path, leaf) in place of each array, and of each number that no object holds.

    Objects of any class are trees of what they hold; those without arrays stay, as does everything else.
    """
    above: list[int] = []

    def walk(node: Any, path: str, numbers: bool) -> Any:
        if is_array(node):
            return change(path, node)
        if isinstance(node, Number):
            return change(path, node) if numbers else node
        if isinstance(node, dict):
            old = node
        elif isinstance(node, tuple | list):
            old = dict(zip(getattr(node, "_fields", range(len(node))), node, strict=True))
        elif isinstance(node, type | ModuleType) or callable(node) and not is_dataclass(node) or id(node) in above:
            return node
        else:
            old, numbers = getattr(node, "__dict__", {}), False
        above.append(id(node))
        new = {name: walk(x, f"{path}.{name}" if path else str(name), numbers) for name, x in old.items()}
        above.pop()
        if all(new[name] is x for name, x in old.items()):
            return node
        if isinstance(node, dict):
            return new
        if isinstance(node, tuple | list):
            return type(node)(*new.values()) if hasattr(node, "_fields") else type(node)(new.values())
        made = copy.copy(node)
        vars(made).update(new)  # without its constructor, for a derivative need not be what that asks for
        return made

    return walk(tree, "", True)


def _derivative(leaf: Any) -> Any:
    if not is_array(leaf):
        return type(leaf)(0)
    found = leaf.tangent if isinstance(leaf, Dual) else None
    return np.zeros_like(plain(leaf)) if found is None else found


def _lift(instrument: Tangents, name: str, value: Any, given: Any) -> Any:
    """Return an argument with dual arrays in place of NumPy's, and of a number that has a tangent."""
    own, known = _flat(name, given), set()

    def lifted(path: str, x: Any) -> Any:
        t, place = own.get(path), _place(name, path)
        known.add(path)
        if not is_array(x):
            if t is None:
                return x
            if not isinstance(x, float | complex):
                raise ValueError(f"t: {place} is {x!r} in x, which has no tangent; needs a floating-point number")
            x = np.asarray(x)
        if not isinstance(x, np.ndarray | np.generic):
            raise TypeError(f"x: {place} is {_kind(x)}, needs NumPy's arrays")
        if t is not None:
            _check_tangent(place, x, t)
        return instrument.array(x, t)

    found = mapped(lifted, value)
    if unknown := [path for path in own if path not in known]:
        raise ValueError(f"t: got {_place(name, unknown[0])!r}, which x has no array for")
    return found


def _flat(name: str, given: Any) -> dict[str, Any]:
    """Return the tangents of an argument by their paths in it."""
    found: dict[str, Any] = {}
    mapped(lambda path, t: found.update({path: t if is_array(t) else np.asarray(t)}), given)
    if not found and not _is_tree(given):
        raise TypeError(f"t: {name} is {_kind(given)}, needs an array or a tree of arrays")
    return found


def _check_tangent(place: str, x: Any, t: Any) -> None:
    if not isinstance(t, np.ndarray | np.generic):
        raise TypeError(f"t: {place} is {_kind(t)}, needs NumPy's arrays")
    if x.dtype.kind not in "fc":
        raise ValueError(f"t: {place} is of {x.dtype} in x, which has no tangent; needs floating-point numbers")
    if t.shape != x.shape:
        raise ValueError(f"t: {place} has the shape {t.shape}, needs {x.shape} as in x")
    if t.dtype.kind not in "biuf" + "c" * (x.dtype.kind == "c"):
        raise TypeError(f"t: {place} is of {t.dtype}, needs numbers as in x, of {x.dtype}")


def _place(name: str, path: str) -> str:
    return f"{name}.{path}" if path else name


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _is_tree(y: Any) -> bool:
    try:
        tree.flatten(y)
    except TypeError:
        return False
    return True


def _differentiable(result: Any) -> bool:
    if isinstance(result, tuple | list):
        return any(map(_differentiable, result))
    return isinstance(result, np.ndarray | np.generic) and result.dtype.kind in "fc"


def _tangent(x: Any) -> Any:
    if isinstance(x, Dual):
        return 0.0 if x.tangent is None else x.tangent
    return list(map(_tangent, x)) if isinstance(x, tuple | list) else 0.0


def _carries(x: Any) -> bool:
    """Tell whether there is a tangent in an argument."""
    if isinstance(x, Dual):
        return x.tangent is not None
    return isinstance(x, tuple | list) and any(map(_carries, x))


def _moves(x: Any) -> bool:
    """Tell whether there is a tangent in it that is not 0."""
    if isinstance(x, Dual):
        return x.tangent is not None and bool(np.any(x.tangent))
    return isinstance(x, tuple | list) and any(map(_moves, x))


def _refuse_others(name: str, given: tuple[Any, ...]) -> None:
    """Raise where an array of another library, or a plain one, meets dual arrays; asarray makes one a constant."""
    if name == "asarray" and isinstance(given[0], np.ndarray):
        return
    for x in given:
        if isinstance(x, tuple | list):
            _refuse_others(name, tuple(x))
        elif not isinstance(x, Dual) and not isinstance(x, np.generic) and not isinstance(x, type) and is_array(x):
            raise TypeError(
                f"{name}: got {_kind(x)} beside an array that carries a tangent, needs arrays of one library: "
                "those that are arguments of f, or that asarray has made"
            )
