"""An array library whose every operation passes through an instrument: NumPy's arrays in a class of their own.

refattn finds the namespace of an array by its class, so a mechanism that is given such arrays runs unchanged, in the
tiles that NumPy would get, and every operation that it asks the array API for is a call of `Instrument.call`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import numpy as np

from refattn import backends
from refattn.backends.numpy import NumpyBackend


class Wrapped:
    """An array of the array API whose operations pass through an instrument, those of NumPy's functions too."""

    def __init__(self, value: Any, instrument: Instrument) -> None:
        self.value, self.instrument = value, instrument

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    device = property(lambda self: "cpu")
    mT = property(lambda self: self.instrument.call("matrix_transpose", np.matrix_transpose, (self,), {}))
    T = property(lambda self: self.instrument.call("permute_dims", np.permute_dims, (self, range(self.ndim)[::-1]), {}))

    def __array_namespace__(self, api_version: str | None = None) -> Functions:
        return FUNCTIONS

    def __array_function__(self, function: Any, types: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self.instrument.call(_standard(function), function, given, options)

    def __array_ufunc__(self, function: Any, method: str, *given: Any, **options: Any) -> Any:
        if method != "__call__" or "out" in options:
            raise TypeError(f"{function.__name__}: got {type(self).__name__}, which has neither {method} nor out")
        return self.instrument.call(_standard(function), function, given, options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self.instrument.lose(self)
        return np.array(self.value, dtype=dtype)

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, key: Any) -> Any:
        return self.instrument.call("getitem", operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, x: Any) -> None:
        self.instrument.change("setitem", operator.setitem, self, (key, x))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __float__(self) -> float:
        return float(self.value)


class Instrument:
    """What becomes of each operation; an instrument overrides what it measures.

    Attributes
    ----------
    name
        Of the `with` block that its arrays are used in, and of the backend that owns them.
    arrays
        The class of its arrays.
    """

    name: ClassVar[str]
    arrays: ClassVar[type[Wrapped]]

    def array(self, x: Any) -> Any:
        """Return an input."""
        return self.arrays(np.asarray(x), self)

    def call(self, name: str, function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Do an operation of the array API, `function` of NumPy; return its result, wrapped."""
        self.check_active()
        plain_given = tuple(map(plain, given))
        result = function(*plain_given, **{key: plain(value) for key, value in options.items()})
        self.see(name, plain_given, result)
        return self.wrap(result)

    def check_active(self) -> None:
        """Raise RuntimeError outside of the `with` block."""
        if self not in _active:
            raise RuntimeError(f"arrays: are used in a `with {self.name}()` block")

    def change(self, name: str, function: Callable[..., Any], target: Wrapped, given: tuple[Any, ...]) -> None:
        """Do an operation that writes to an array."""
        plain_given = tuple(map(plain, given))
        function(target.value, *plain_given)
        self.see(name, (target.value, *plain_given), target.value)

    def lose(self, x: Wrapped) -> None:
        """Take notice of an array whose value is read as a plain array."""

    def see(self, name: str, given: tuple[Any, ...], result: Any) -> None:
        """Take notice of an operation on NumPy's arrays, and its result."""

    def made(self, value: Any) -> Wrapped:
        """Return an array around a result of NumPy."""
        return self.arrays(value, self)

    def wrap(self, x: Any) -> Any:
        """Return what NumPy has returned, its arrays wrapped."""
        if isinstance(x, np.ndarray | np.generic):
            return self.made(np.asarray(x))
        if isinstance(x, tuple):
            parts = [self.wrap(part) for part in x]
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        return [self.wrap(part) for part in x] if isinstance(x, list) else x

    @contextmanager
    def active(self) -> Iterator[Self]:
        """Let the arrays of this instrument be used, by one worker."""
        _active.append(self)
        backends._owners[self.arrays] = WrappedBackend(self)
        try:
            with backends.use_workers(1):
                yield self
        finally:
            _active.pop()
            del backends._owners[self.arrays]


_active: list[Instrument] = []


def plain(x: Any) -> Any:
    """Return NumPy's array in place of a wrapped one, in tuples and lists too."""
    if isinstance(x, Wrapped):
        return x.value
    if isinstance(x, tuple | list):
        return type(x)(map(plain, x))
    return x


class Functions:
    """NumPy's functions through the instrument in use; its dtypes and constants as they are."""

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
        return lambda *given, **options: _active[-1].call(name, found, given, options)


FUNCTIONS = Functions(np)

_NUMPY = NumpyBackend()


class WrappedBackend(NumpyBackend):
    """NumPy's tiles and its pool, for wrapped arrays."""

    def __init__(self, instrument: Instrument) -> None:
        super().__init__()
        self.instrument, self.name = instrument, instrument.name

    def owns(self, x: object) -> bool:
        return isinstance(x, self.instrument.arrays)

    def from_numpy(self, x: Any, device: Any = None) -> Any:
        return self.instrument.array(super().from_numpy(x, device))

    def to_numpy(self, x: Any) -> Any:
        return plain(x)

    def concrete(self, value: Any) -> bool | None:
        return bool(plain(value))

    def erf(self, x: Any) -> Any:
        return self.instrument.call("erf", _NUMPY.erf, (x,), {})

    def product(self, a: Any, b: Any) -> Any:
        return a @ b

    def together(self, pairs: Any) -> Any:
        return [self.product(a, b) for a, b in pairs]

    def sparse_product(self, indptr: Any, indices: Any, data: Any, x: Any) -> Any:
        return self.instrument.call("sparse_product", _NUMPY.sparse_product, (indptr, indices, data, x), {})

    def sparse_rows(self, indptr: Any, edges: int) -> Any:
        return self.instrument.call("sparse_rows", _NUMPY.sparse_rows, (indptr, edges), {})


# --- the operators and NumPy's functions, under the names of the standard

NAMES = {"sub": "subtract", "mul": "multiply", "truediv": "divide", "mod": "remainder", "neg": "negative"}
OF_NUMPY = {
    "absolute": "abs",
    "concatenate": "concat",
    "conjugate": "conj",
    "power": "pow",
    "transpose": "permute_dims",
}
OF_NUMPY |= {f"arc{name}": f"a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")}


def _standard(function: Any) -> str:
    name: str = function.__name__
    return OF_NUMPY.get(name, name)


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Any, *other: Any) -> Any:
        return self.instrument.call(NAMES.get(name, name), function, (*other, self) if swapped else (self, *other), {})

    return method


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    function = getattr(operator, f"i{name}")

    def method(self: Any, other: Any) -> Any:
        self.instrument.change(NAMES.get(name, name), function, self, (other,))
        return self

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    _method = _name.rstrip("_")
    setattr(Wrapped, f"__{_method}__", _operator(_name))
    setattr(Wrapped, f"__r{_method}__", _operator(_name, swapped=True))
    setattr(Wrapped, f"__i{_method}__", _in_place(_method))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(Wrapped, f"__{_name}__", _operator(_name))
