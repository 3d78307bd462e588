"""The only page on array namespaces: everything else in refattn speaks the array API standard and asks here.

A function of refattn starts with ``xp = namespace(q, k, v)`` and then uses `xp` as the standard (2024.12 or later)
describes it. NumPy 2 implements the standard itself; the other libraries are reached through array-api-compat.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import array_api_compat

from refattn import backends

Array: TypeAlias = Any
"""An array of any supported library; the standard defines no common base class."""

Namespace: TypeAlias = Any
"""A module that implements the array API standard."""

LIBRARIES = frozenset(("builtins", "refattn", "numpy", "cupy", "torch", "jax", "jaxlib"))
"""Where classes are from that live as long as the process."""


class ByClass:
    """What is known of classes: held weakly, but for those of libraries, which are found three times as fast."""

    def __init__(self) -> None:
        self.lasting: dict[type, Any] = {}
        self.others: WeakKeyDictionary[type, Any] = WeakKeyDictionary()

    def get(self, kind: type) -> Any:
        """Return what is known of a class that is held weakly, or None; for the lasting ones ask `lasting`, first."""
        return self.others.get(kind)

    def set(self, kind: type, value: Any) -> Any:
        """Keep what is known of a class, and return it."""
        # A class that is made on the way may say that it is from anywhere.
        own = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
        lasts = own and kind.__module__.partition(".")[0] in LIBRARIES
        (self.lasting if lasts else self.others)[kind] = value
        return value


_KNOWN = ByClass()
"""Namespaces by the class of an array: array-api-compat takes as long to find one as a small product takes."""

_ARRAYS = ByClass()
"""Whether objects of a class are arrays."""

_DTYPE_NAMES = ByClass()
"""Names of dtypes, by the class of an array too: dtypes of several libraries need not compare."""

LOW_PRECISION = ("float16", "bfloat16")
"""Storage types: cast to float32 at entry, and back at the end."""

FLOATING = frozenset(("float64", "float32", *LOW_PRECISION))
"""All dtypes that refattn takes for numbers."""


def namespace(*arrays: Array | None) -> Namespace:
    """Return the array API namespace that all `arrays` share; None counts for nothing.

    Raises
    ------
    TypeError
        Where there is no array, one is of an unsupported type, or they are of different libraries.
    """
    first = type(arrays[0]) if arrays else type(None)
    found = _KNOWN.lasting.get(first)
    if found is not None:
        for x in arrays:  # a generator takes three times as long
            if type(x) is not first and x is not None:
                break
        else:
            return found
    given = [a for a in arrays if a is not None]
    kinds = {type(a) for a in given}
    for other in kinds:
        if backends.changes_meaning(other):
            raise TypeError(f"got {other.__name__}, needs a plain array: this class computes with another meaning")
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is not None and (found := _KNOWN.get(kind)) is not None:
        return found
    numpy = given and all(array_api_compat.is_numpy_array(a) for a in given)
    found = array_api_compat.array_namespace(*given, use_compat=False if numpy else None)
    # A gradient that is zero has a dtype of JAX's own, in an array of NumPy's class: it says nothing about that class.
    if kind is not None and is_floating(given[0]):
        _KNOWN.set(kind, found)
    return found


def is_array(value: object) -> bool:
    """Tell whether `value` is an array of a supported library; NumPy's scalars, which its reductions return, are.

    Arrays whose class gives them another meaning, such as masked ones and matrices, are none.
    """
    kind = type(value)
    known = _ARRAYS.lasting.get(kind)
    if known is None and (known := _ARRAYS.get(kind)) is None:
        # A class has the methods of its objects.
        like = not issubclass(kind, type) and array_api_compat.is_array_api_obj(value)
        known = _ARRAYS.set(kind, bool(like) and not backends.changes_meaning(kind))
    return bool(known)


def device(x: Array) -> Any:
    """Return the device of `x`, to be given to every creation function."""
    return array_api_compat.device(x)


def has_one_device(xp: Namespace) -> bool:
    """Tell whether all arrays of a namespace are on one device: those of NumPy are."""
    return array_api_compat.is_numpy_namespace(xp)


def backend(x: Array) -> backends.Backend:
    """Return the backend that owns `x`."""
    return backends.of(x)


def concrete(condition: Array | bool) -> bool | None:
    """Return the truth of a condition on values, or None where it is not known yet.

    Under ``jax.jit`` values do not exist while the code runs; callers take the path that is safe for all values.
    """
    if isinstance(condition, bool):
        return condition
    return backends.of(condition).concrete(condition)


def known(condition: Array | bool) -> bool:
    """Tell whether the truth of a condition is known, without a look at it where that would mean to wait."""
    return isinstance(condition, bool) or backends.of(condition).known(condition)


def dtype_name(x: Array) -> str:
    """Return the name of the dtype of `x` without its library: ``"float32"``, ``"bfloat16"``, ``"bool"``."""
    dtype, kind = x.dtype, type(x)
    known = _DTYPE_NAMES.lasting.get(kind)
    if known is None and (known := _DTYPE_NAMES.get(kind)) is None:
        known = _DTYPE_NAMES.set(kind, {})
    name: str | None = known.get(dtype)
    if name is None:
        name = known[dtype] = str(dtype).rpartition(".")[2]
    return name


def is_bool(x: Array) -> bool:
    """Tell whether `x` holds booleans."""
    return dtype_name(x) == "bool"


def is_floating(x: Array) -> bool:
    """Tell whether `x` holds real floating-point numbers of a width that refattn takes."""
    return dtype_name(x) in FLOATING


def raised(x: Array) -> Array:
    """Return `x` in the dtype that refattn computes in: float32 for a storage type, else its own."""
    if dtype_name(x) in LOW_PRECISION:
        xp = namespace(x)
        return xp.astype(x, xp.float32)
    return x


def widest(x: Array) -> Array:
    """Return `x` in float64 where the library, as it is set now, has it, or else in float32: for systems to solve."""
    xp = namespace(x)
    return xp.astype(x, xp.float64 if backends.of(x).float64() else xp.float32, copy=False)


def product(a: Array, b: Array) -> Array:
    """Return a @ b for arrays of at least two axes; where the library pools, a large one is the work of many."""
    return backends.of(a).product(a, b)


def products(*pairs: tuple[Array, Array]) -> list[Array]:
    """Return the `product` of each pair, whose work is handed out at once."""
    return backends.of(pairs[0][0]).together(pairs)


def matmul(a: Array, b: Array) -> Array:
    """Return a @ b in one piece, where one of them is the transpose of a large array, which a library might copy."""
    return backends.of(a).matmul(a, b)


def constants(numbers: Sequence[float], dtype: Any, like: Array) -> Array:
    """Return numbers that are the same in every call as an array on the device of `like`, where it may be kept."""
    xp = namespace(like)
    return backends.of(like).constants(numbers, dtype, lambda: xp.asarray(numbers, dtype=dtype, device=device(like)))


def clip(x: Array, low: float, high: float) -> Array:
    """Return x, at least `low` and at most `high`; NaN stays. The libraries' own may wait to look at the bounds."""
    xp = namespace(x)
    return xp.minimum(xp.maximum(x, low), high)


def transpose(x: Array) -> Array:
    """Return `x` with its last two axes exchanged; not every library has the attribute ``mT``."""
    return namespace(x).matrix_transpose(x)


def sum_wide(x: Array) -> Array:
    """Return the sum of all elements as a 0-d array of the dtype of `x`, accumulated in float64 where there is one."""
    xp = namespace(x)
    if not backends.of(x).float64():
        return xp.sum(x)
    return xp.astype(xp.sum(x, dtype=xp.float64), x.dtype)


def sum_wide_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Return the sum of x over those of its axes that are 1 in `shape`, accumulated in float64 where there is one."""
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1)
    if not axes:
        return x
    xp = namespace(x)
    if not backends.of(x).float64():
        return xp.sum(x, axis=axes, keepdims=True)
    return xp.astype(xp.sum(x, axis=axes, keepdims=True, dtype=xp.float64), x.dtype)


def sum_last(x: Array) -> Array:
    """Return the sum over the last axis, kept as size 1."""
    xp = namespace(x)
    if not backends.of(x).pools:
        return xp.sum(x, axis=-1, keepdims=True)
    # NumPy's own sums of short rows take several times as long as inner products with ones.
    return xp.vecdot(x, zeros(x.shape[-1:], x) + 1.0)[..., None]


def zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Return zeros with the dtype and on the device of `like`."""
    return namespace(like).zeros(shape, dtype=like.dtype, device=device(like))


def eye_like(size: int, like: Array) -> Array:
    """Return the identity (size, size) with the dtype and on the device of `like`."""
    return namespace(like).eye(size, dtype=like.dtype, device=device(like))


def arange(start: int, stop: int, like: Array) -> Array:
    """Return ``start, ..., stop - 1`` in the library's own integer type on the device of `like`."""
    return namespace(like).arange(start, stop, device=device(like))


def all_finite(*arrays: Array) -> bool | None:
    """Tell whether every element of arrays of one library is finite; None where values are not known yet."""
    xp = namespace(*arrays)
    return concrete(functools.reduce(operator.and_, [xp.all(xp.isfinite(x)) for x in arrays]))


def any_outside(x: Array, count: int) -> bool | None:
    """Tell whether an element of whole numbers `x` is outside of 0 to `count` - 1; None where values are not known."""
    xp = namespace(x)
    outside = x < 0
    if xp.iinfo(x.dtype).max >= count:  # or else the library could not compare
        outside = outside | (x >= count)
    return concrete(xp.any(outside))


def max_last(x: Array) -> Array:
    """Return the maximum over the last axis, kept as size 1; -inf where the axis has no element."""
    xp = namespace(x)
    if x.shape[-1] == 0:
        return zeros((*x.shape[:-1], 1), x) - math.inf
    return xp.max(x, axis=-1, keepdims=True)
