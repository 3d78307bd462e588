"""An array library that counts: NumPy's arrays in a class of their own, whose operations are tallied.

refattn finds the namespace of an array by its class, so a mechanism that is given these arrays runs unchanged, in the
tiles that NumPy would get, and every operation that it asks the array API for passes through here.

What is counted
- `products`: 2 k for each element of a matrix product over k terms, and what LAPACK's factorisations take.
- `others`: 1 for each floating-point element that an element-wise function returns or a reduction reads, exp and a sum
  alike. Comparisons, selections and copies are no arithmetic.
- `written`: bytes of all new arrays; views are none. `peak`: the most of them that exist at once, inputs aside.
- `shapes`: the shapes of all new arrays.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from refattn import backends
from refattn.backends.numpy import NumpyBackend

ELEMENTWISE = frozenset(
    "abs add atan atan2 ceil clip cos cosh divide exp expm1 floor hypot log log1p log2 logaddexp maximum minimum "
    "multiply negative positive pow reciprocal remainder round sign sin sinh sqrt square subtract tan tanh".split()
)
REDUCTIONS = frozenset("cumulative_sum max mean min prod std sum var argmax argmin".split())

CUBIC = {"cholesky": 1, "eigh": 27, "eigvalsh": 4, "inv": 6, "pinv": 66, "qr": 8, "slogdet": 2}
CUBIC |= {"solve": 2, "svd": 66, "svdvals": 8}
"""Operations of a factorisation in thirds of n^3, as Golub and Van Loan count them; the right-hand sides are extra."""


@dataclass
class Tally:
    """What was counted since `Count.start`."""

    products: Fraction = Fraction(0)
    others: int = 0
    written: int = 0
    peak: int = 0
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def flops(self) -> Fraction:
        """All operations."""
        return self.products + self.others

    def largest(self) -> int:
        """Elements of the largest array."""
        return max(map(math.prod, self.shapes), default=0)


class Count:
    """Tallies the work of all `Counted` arrays in a `with counting()` block."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.held = 0
        self._base = 0
        self._alive: dict[int, tuple[Any, int]] = {}

    def start(self) -> Tally:
        """Count from here on in a new tally, in which memory that is held now is 0."""
        self.tally, self._base = Tally(), self.held
        return self.tally

    def array(self, x: Any) -> Any:
        """Return an input: its memory is not counted."""
        value = np.asarray(x)
        self._keep(_owner(value), 0)
        return Counted(value, self)

    def note(self, value: Any) -> None:
        """Count the memory of a result, unless it is a view of what is known."""
        owner = _owner(value)
        if id(owner) in self._alive:
            return
        self._keep(owner, owner.nbytes)
        self.held += owner.nbytes
        self.tally.written += owner.nbytes
        self.tally.peak = max(self.tally.peak, self.held - self._base)
        self.tally.shapes.add(value.shape)

    def _keep(self, owner: Any, size: int) -> None:
        number = id(owner)

        def gone(_: Any) -> None:
            del self._alive[number]
            self.held -= size

        self._alive[number] = (weakref.ref(owner, gone), size)

    def arithmetic(self, name: str, given: tuple[Any, ...], result: Any) -> None:
        """Count the operations of a call of NumPy."""
        if name == "matmul":
            self.tally.products += 2 * given[0].shape[-1] * result.size
        elif name in CUBIC:
            (rows, columns), batch = given[0].shape[-2:], math.prod(given[0].shape[:-2])
            self.tally.products += Fraction(batch * CUBIC[name] * rows * columns**2, 3)
            if name == "solve":
                self.tally.products += 2 * columns * given[0].shape[-1] * math.prod(result.shape) // columns
        elif name in REDUCTIONS and given[0].dtype.kind == "f":
            self.tally.others += given[0].size
        elif name in ELEMENTWISE and result.dtype.kind == "f":
            self.tally.others += result.size


def _owner(x: Any) -> Any:
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


class Counted:
    """An array of the array API whose operations are counted."""

    def __init__(self, value: Any, count: Count) -> None:
        self.value, self.count = value, count

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    device = property(lambda self: "cpu")
    mT = property(lambda self: Counted(self.value.mT, self.count))

    def __array_namespace__(self, api_version: str | None = None) -> Functions:
        return FUNCTIONS

    def __getitem__(self, key: Any) -> Counted:
        return _wrapped(self.value[_plain(key)], self.count)

    def __setitem__(self, key: Any, x: Any) -> None:
        self.value[_plain(key)] = _plain(x)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __float__(self) -> float:
        return float(self.value)


def _plain(x: Any) -> Any:
    if isinstance(x, Counted):
        return x.value
    if isinstance(x, tuple | list):
        return type(x)(map(_plain, x))
    return x


def _wrapped(x: Any, count: Count) -> Any:
    if isinstance(x, np.ndarray | np.generic):
        value = np.asarray(x)
        count.note(value)
        return Counted(value, count)
    if isinstance(x, tuple):
        parts = [_wrapped(part, count) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return [_wrapped(part, count) for part in x] if isinstance(x, list) else x


def _call(name: Any, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    assert _current, "counted arrays are used in a `with counting()` block"
    count = _current[-1]
    plain = tuple(map(_plain, given))
    result = function(*plain, **{key: _plain(value) for key, value in options.items()})
    count.arithmetic(name, plain, result)
    return _wrapped(result, count)


def _binary(name: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        return _call(NAMES.get(name, name), function, *((other, self) if swapped else (self, other)))

    return method


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, f"i{name}")

    def method(self: Any, other: Any) -> Any:
        count, plain = self.count, _plain(other)
        function(self.value, plain)
        count.arithmetic(NAMES.get(name, name), (self.value, plain), self.value)
        return self

    return method


NAMES = {"sub": "subtract", "mul": "multiply", "truediv": "divide", "mod": "remainder", "neg": "negative"}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    _method = _name.rstrip("_")
    setattr(Counted, f"__{_method}__", _binary(_name))
    setattr(Counted, f"__r{_method}__", _binary(_name, swapped=True))
    setattr(Counted, f"__i{_method}__", _in_place(_method))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Counted, f"__{_name}__", _binary(_name))
for _name in ("neg", "abs", "invert"):
    setattr(
        Counted,
        f"__{_name}__",
        lambda self, name=_name: _call(NAMES.get(name, name), getattr(operator, name), self),
    )


class Functions:
    """NumPy's functions, counted; its dtypes and constants as they are."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def linalg(self) -> Functions:
        """The extension."""
        return Functions(np.linalg)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, type) or not callable(found) or name in ("isdtype", "result_type", "can_cast"):
            return found
        return lambda *given, **options: _call(name, found, *given, **options)


FUNCTIONS = Functions(np)
_current: list[Count] = []


class CountingBackend(NumpyBackend):
    """NumPy's tiles and its pool, for counted arrays."""

    name = "counting"

    def owns(self, x: object) -> bool:
        return isinstance(x, Counted)

    def to_numpy(self, x: Any) -> Any:
        return _plain(x)

    def concrete(self, value: Any) -> bool | None:
        return bool(_plain(value))

    def erf(self, x: Any) -> Any:
        return _call("exp", super().erf, x)

    def product(self, a: Any, b: Any) -> Any:
        return a @ b

    def sparse_product(self, indptr: Any, indices: Any, data: Any, x: Any) -> Any:
        self_count = _current[-1]
        self_count.tally.products += 2 * data.size * x.shape[-1]
        return _wrapped(super().sparse_product(*map(_plain, (indptr, indices, data, x))), self_count)


@contextmanager
def counting() -> Iterator[Count]:
    """Count the work of all arrays that come from `Count.array`, with one worker."""
    count = Count()
    _current.append(count)
    backends._owners[Counted] = CountingBackend()
    try:
        with backends.use_workers(1):
            yield count
    finally:
        _current.pop()
        del backends._owners[Counted]
