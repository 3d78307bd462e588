"""A test double of CuPy: arrays of NumPy that refuse what CuPy refuses, and count what a GPU is asked for.

It has the functions that the array API needs, with CuPy's signatures; `python -m tools.cupy_double` compares it with an
installed CuPy. Its answers where CuPy differs from NumPy were seen on a device: a singular `solve` gives NaN, and
`take` wraps around. It knows nothing of a GPU's last bits, of its speed, nor of streams. Stricter than CuPy: a list is
no index (CuPy would upload it), and devices do not see each other's memory.
"""

from __future__ import annotations

import builtins
import inspect
from typing import Any

import numpy as np

from . import _double
from ._double import note, tally

__version__ = "14.2.0+double"

newaxis, nan, inf, pi, e = None, np.nan, np.inf, np.pi, np.e
bool_ = bool = np.bool_
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64
float16, float32, float64, complex64, complex128 = np.float16, np.float32, np.float64, np.complex64, np.complex128
dtype, intp, finfo, iinfo = np.dtype, np.intp, np.finfo, np.iinfo
generic, number, integer, signedinteger, unsignedinteger, inexact, floating, complexfloating = (
    getattr(np, name)
    for name in "generic number integer signedinteger unsignedinteger inexact floating complexfloating".split()
)

UFUNCS = {
    "c": "abs absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh conj copysign cos cosh equal exp expm1 "
    "greater greater_equal hypot isfinite isinf isnan less less_equal log log10 log1p log2 maximum minimum multiply "
    "negative nextafter not_equal positive power reciprocal sign sin sinh sqrt square subtract tan tanh true_divide",
    "f": "ceil floor floor_divide logaddexp logical_and logical_not logical_or logical_xor remainder signbit trunc",
    "i": "bitwise_and bitwise_or bitwise_xor invert left_shift right_shift",
}
"""Functions of each element, by the widest kind of number that CuPy has a kernel for: complex, float or integer."""

FUNCTIONS = """
all(a, axis=None, out=None, keepdims=False)
any(a, axis=None, out=None, keepdims=False)
argmax(a, axis=None, dtype=None, out=None, keepdims=False)
argmin(a, axis=None, dtype=None, out=None, keepdims=False)
argsort(a, axis=-1, kind=None)
broadcast_to(array, shape)
concatenate(tup, axis=0, out=None, *, dtype=None, casting='same_kind')
count_nonzero(a, axis=None)
cross(a, b, axisa=-1, axisb=-1, axisc=-1, axis=None)
cumprod(a, axis=None, dtype=None, out=None)
cumsum(a, axis=None, dtype=None, out=None)
diagonal(a, offset=0, axis1=0, axis2=1)
diff(a, n=1, axis=-1, prepend=None, append=None)
expand_dims(a, axis)
flip(a, axis=None)
isin(element, test_elements, assume_unique=False, invert=False)
matrix_transpose(x, /)
max(a, axis=None, out=None, keepdims=False)
mean(a, axis=None, dtype=None, out=None, keepdims=False)
min(a, axis=None, out=None, keepdims=False)
moveaxis(a, source, destination)
nonzero(a)
outer(a, b, out=None)
prod(a, axis=None, dtype=None, out=None, keepdims=False)
ravel(a, order='C')
repeat(a, repeats, axis=None)
roll(a, shift, axis=None)
round(a, decimals=0, out=None)
searchsorted(a, v, side='left', sorter=None)
sort(a, axis=-1, kind=None)
squeeze(a, axis=None)
stack(tup, axis=0, out=None, *, dtype=None, casting='same_kind')
std(a, axis=None, dtype=None, out=None, ddof=0, keepdims=False)
sum(a, axis=None, dtype=None, out=None, keepdims=False)
swapaxes(a, axis1, axis2)
take_along_axis(a, indices, axis)
tensordot(a, b, axes=2)
tile(A, reps)
trace(a, offset=0, axis1=0, axis2=1, dtype=None, out=None)
transpose(a, axes=None)
tril(m, k=0)
triu(m, k=0)
unique(ar, return_index=False, return_inverse=False, return_counts=False, axis=None, *, equal_nan=True)
var(a, axis=None, dtype=None, out=None, ddof=0, keepdims=False)
"""
"""Functions that do what NumPy's do, as CuPy declares them."""

MAKERS = """
arange(start, stop=None, step=1, dtype=None)
empty(shape, dtype=float, order='C')
empty_like(prototype, dtype=None, order='K', subok=None, shape=None)
eye(N, M=None, k=0, dtype=float, order='C')
full(shape, fill_value, dtype=None, order='C')
full_like(a, fill_value, dtype=None, order='K', subok=None, shape=None)
linspace(start, stop, num=50, endpoint=True, retstep=False, dtype=None, axis=0)
ones(shape, dtype=float, order='C')
ones_like(a, dtype=None, order='K', subok=None, shape=None)
zeros(shape, dtype=float, order='C')
zeros_like(a, dtype=None, order='K', subok=None, shape=None)
"""

KINDS = "buifc"
"""Kinds of dtypes, each of which is cast to the next one where there is no kernel for it."""

WAITING = ("nonzero", "unique")
"""The shape of their result depends on values."""


class ndarray:  # noqa: N801 (CuPy's name)
    """An array on a device."""

    __slots__ = ("__weakref__", "_device", "_owner", "_x")
    _x: Any
    _owner: Any
    _device: int
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("the double makes arrays by functions alone")

    def __del__(self, held: Any = _double.held) -> None:  # at the end modules are gone
        if getattr(self, "_owner", 0) is None:
            held["now"] -= self._x.nbytes

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        known = globals().get(ufunc.__name__)
        return known(*given, **options) if method == "__call__" and known else NotImplemented

    def __array_function__(self, function: Any, kinds: Any, given: Any, options: Any) -> Any:
        place = vars(linalg) if function.__module__ == "numpy.linalg" else globals()
        known = place.get(function.__name__)
        return known(*given, **options) if known else NotImplemented

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("an array on a device is not shared with the CPU")

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: builtins.bool = True) -> Any:
        self._read("get")
        note("downloads", "get")
        return self._x.copy()

    def _read(self, name: str) -> Any:
        note("waits", name)
        return self._x

    def item(self, *place: int) -> Any:
        return self._read("item").item(*place)

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def __bool__(self) -> builtins.bool:
        return builtins.bool(self._read("bool"))

    def __float__(self) -> float:
        return float(self._read("float"))

    def __int__(self) -> int:
        return int(self._read("int"))

    def __complex__(self) -> complex:
        return complex(self._read("complex"))

    def __repr__(self) -> str:
        return repr(self._read("repr"))

    def __format__(self, spec: str) -> str:
        return format(self._read("format").item() if not self.ndim else self._x, spec)

    def __reduce__(self) -> Any:
        return array, (self.get(),)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    shape = property(lambda self: self._x.shape)
    dtype = property(lambda self: self._x.dtype)
    ndim = property(lambda self: self._x.ndim)
    size = property(lambda self: self._x.size)
    nbytes = property(lambda self: self._x.nbytes)
    itemsize = property(lambda self: self._x.itemsize)
    strides = property(lambda self: self._x.strides)
    flags = property(lambda self: self._x.flags)
    device = property(lambda self: cuda.Device(self._device))
    T = property(lambda self: _array(self._x.T, self))
    mT = property(lambda self: _array(self._x.mT, self))  # noqa: N815
    real = property(lambda self: _array(self._x.real, self))
    imag = property(lambda self: _array(self._x.imag, self))

    def __len__(self) -> int:
        return len(self._x)

    def __iter__(self) -> Any:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[n] for n in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        found = self._x[_index(key)]
        if not isinstance(found, np.ndarray):  # one element: CuPy gives a view of it
            found = self._x[(*(key if isinstance(key, tuple) else (key,)), ...)]
        return _array(found, self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, list | tuple | np.ndarray) and np.ndim(value):
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        tally["launches"] += 1
        self._x[_index(key)] = _numpy(value)

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: builtins.bool = True
    ) -> Any:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        with np.errstate(all="ignore"):
            return _array(_numpy(self).astype(dtype))

    def copy(self, order: str = "C") -> Any:
        return _array(self._x.copy())

    def view(self, dtype: Any = None) -> Any:
        return _array(self._x.view(dtype or self.dtype), self)

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        return reshape(self, shape[0] if len(shape) == 1 else shape, order)

    def transpose(self, *axes: Any) -> Any:
        return permute_dims(self, axes or None)


def _array(x: Any, like: ndarray | None = None) -> Any:
    """Return what NumPy gave as an array: a view of `like`, or new memory that a kernel filled."""
    if isinstance(x, tuple | list):
        return type(x)(_array(one) for one in x) if type(x) in (tuple, list) else [_array(one) for one in x]
    made, x = ndarray.__new__(ndarray), np.asarray(x)
    made._x, made._owner = x, like if like is not None and np.may_share_memory(x, like._x) else None
    made._device = _double.current[-1] if made._owner is None else made._owner._device
    if made._owner is None:
        tally["launches"] += 1
        tally["bytes"] += x.nbytes
        _double.held["now"] += x.nbytes
        _double.held["most"] = builtins.max(_double.held["most"], _double.held["now"])
    return made


def _numpy(x: Any) -> Any:
    """Return what NumPy is given for an argument; refuse arrays of the host, and of another device than the current."""
    if isinstance(x, ndarray):
        if x._device != _double.current[-1]:
            raise ValueError(
                f"The device where the array resides ({x._device}) is different from the current device "
                f"({_double.current[-1]}). Peer access is unavailable between these devices."
            )
        return x._x
    if isinstance(x, list | tuple):
        return type(x)(map(_numpy, x))
    if isinstance(x, np.ndarray) or x is None:
        raise TypeError(f"Unsupported type {type(x)}")
    return x


def _index(key: Any) -> Any:
    parts = []
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, list | np.ndarray):
            raise IndexError(f"the double takes no {type(part).__name__} as an index: it would be uploaded")
        if isinstance(part, ndarray) and part.dtype == np.bool_:
            note("waits", "a mask as an index")
        parts.append(_numpy(part) if isinstance(part, ndarray) else part)
    return tuple(parts) if isinstance(key, tuple) else parts[0]


def _ufunc(name: str, widest: str) -> Any:
    theirs = getattr(np, name)

    def call(*given: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind") -> Any:
        if bad := [type(x) for x in given if not isinstance(x, ndarray | int | float | complex | np.generic)]:
            raise TypeError(f"Unsupported type {bad[0]}")
        plain = [_numpy(x) for x in given]
        types = [type(x) if type(x) in (int, float, complex) else np.asarray(x).dtype for x in plain]
        loop = theirs.resolve_dtypes((*types, *([None] * theirs.nout)))
        if builtins.max(KINDS.index(x.kind) for x in loop[: len(plain)]) > KINDS.index(widest):
            raise TypeError(f"cupy.{name}: no kernel for {', '.join(str(x) for x in loop[: len(plain)])}")
        with np.errstate(all="ignore"):
            made = theirs(*plain, **({} if dtype is None else {"dtype": dtype}))
        return _array(made) if out is None else _filled(out, made)

    call.__name__ = name
    return call


def _filled(out: Any, made: Any) -> Any:
    out = out[0] if isinstance(out, tuple) else out
    tally["launches"] += 1
    out._x[...] = made
    return out


def declared(text: str) -> dict[str, inspect.Signature]:
    """Return signatures by name."""
    made: dict[str, inspect.Signature] = {}
    for line in text.strip().splitlines():
        name, _, parameters = line.partition("(")
        made[name] = inspect.signature(eval(f"lambda {parameters[:-1]}: 0"))  # noqa: S307
    return made


def _function(name: str, signature: inspect.Signature, makes: builtins.bool) -> Any:
    theirs = getattr(np, name)

    def call(*given: Any, **options: Any) -> Any:
        signature.bind(*given, **options)
        first = next((x for x in (*given, *options.values()) if isinstance(x, ndarray)), None)
        if first is None and not makes and not isinstance(given[0], list | tuple):
            raise TypeError(f"cupy.{name}: got {type(given[0]).__name__}, needs a cupy.ndarray")
        if name in ("concatenate", "stack") and not builtins.all(isinstance(x, ndarray) for x in given[0]):
            raise TypeError("Only cupy arrays can be concatenated")
        if name in WAITING or (name == "repeat" and not isinstance(given[1], int)):
            note("waits", name)
        out = options.pop("out", None)
        options = {key: x for key, x in options.items() if x is not None}
        with np.errstate(all="ignore"):
            made = theirs(*(x if x is None else _numpy(x) for x in given), **{k: _numpy(x) for k, x in options.items()})
        return _array(made, first) if out is None else _filled(out, made)

    call.__name__ = name
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


globals().update({name: _ufunc(name, widest) for widest, names in UFUNCS.items() for name in names.split()})
globals().update({name: _function(name, signature, False) for name, signature in declared(FUNCTIONS).items()})
globals().update({name: _function(name, signature, True) for name, signature in declared(MAKERS).items()})
can_cast, isdtype, issubdtype, promote_types = np.can_cast, np.isdtype, np.issubdtype, np.promote_types
broadcast_shapes = np.broadcast_shapes
concat, permute_dims, divide = (globals()[name] for name in ("concatenate", "transpose", "true_divide"))


def result_type(*arrays_and_dtypes: Any) -> Any:
    return np.result_type(*(x._x if isinstance(x, ndarray) else x for x in arrays_and_dtypes))


def reshape(a: Any, newshape: Any, order: Any = "C", *, copy: Any = None) -> Any:
    return _array(np.reshape(_numpy(a), newshape, order=order), a)


def array(
    obj: Any,
    dtype: Any = None,
    copy: Any = True,
    order: str = "K",
    subok: Any = False,
    ndmin: int = 0,
    *,
    blocking: Any = 0,
) -> Any:
    if isinstance(obj, ndarray):
        same = not copy and dtype in (None, obj.dtype)
        return obj if same else _array(np.array(_numpy(obj), dtype))
    if isinstance(obj, list | tuple) and builtins.any(isinstance(x, ndarray) for x in obj):
        return globals()["stack"]([array(x, dtype) for x in obj])
    made = np.array(obj, dtype)
    if made.dtype.kind not in "biufc":
        raise ValueError(f"Unsupported dtype {made.dtype}")
    note("uploads", "array")
    return _array(made)


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: Any = False) -> Any:
    return array(a, dtype, copy=builtins.bool(copy))


def ascontiguousarray(a: Any, dtype: Any = None) -> Any:
    same = isinstance(a, ndarray) and a.flags.c_contiguous and dtype in (None, a.dtype)
    return a if same else _array(np.ascontiguousarray(_numpy(a), dtype))


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: Any = True) -> Any:
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def from_dlpack(x: Any, /, *, device: Any = None, copy: Any = None) -> Any:
    if isinstance(x, ndarray):
        return x
    raise TypeError("CPU arrays cannot be directly imported to CuPy")


def broadcast_arrays(*args: Any) -> Any:
    return [_array(made, x) for made, x in zip(np.broadcast_arrays(*map(_numpy, args)), args, strict=True)]


def meshgrid(*xi: Any, **kwargs: Any) -> Any:
    return [_array(x) for x in np.meshgrid(*map(_numpy, xi), **kwargs)]


def clip(a: Any, a_min: Any, a_max: Any, out: Any = None) -> Any:
    return _array(np.clip(_numpy(a), a_min, a_max))


def take(a: Any, indices: Any, axis: Any = None, out: Any = None) -> Any:
    """Numbers outside wrap around, where NumPy raises."""
    if not isinstance(indices, ndarray | int):
        note("uploads", "take")
        indices = _array(np.asarray(indices))
    return _array(np.take(_numpy(a), _numpy(indices), axis, mode="wrap"))


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if not isinstance(condition, ndarray):
        raise AttributeError(f"'{type(condition).__name__}' object has no attribute 'astype'")
    return globals()["nonzero"](condition) if x is None else _array(np.where(*map(_numpy, (condition, x, y))))


def matmul(a: Any, b: Any, /, out: Any = None) -> Any:
    if not (isinstance(a, ndarray) and isinstance(b, ndarray)):
        raise TypeError(f"Unsupported type {type(b)}")
    x, y = _numpy(a), _numpy(b)
    if (
        builtins.max(x.ndim, y.ndim) > 2
    ):  # cuBLAS is given rows of every matrix of a batch, and pointers where they repeat
        copied = [each.nbytes for each in (x, y) if not each.flags.c_contiguous]
        tally["copies"] += builtins.sum(copied)
        tally["bytes"] += builtins.sum(copied)
        tally["launches"] += len(copied) + (3 if x.shape[:-2] != y.shape[:-2] else 0)
    elif _lowered(x) and _lowered(y):
        x, y = _tf32(x), _tf32(y)
    with np.errstate(all="ignore"):
        return _array(x @ y)


def _lowered(x: Any) -> builtins.bool:
    kinds = _core._routines_linalg
    return x.dtype == np.float32 and kinds.get_compute_type(x.dtype) == kinds.COMPUTE_TYPE_TF32


def _tf32(x: Any) -> Any:
    """Return float32 with the 10 bits of TF32."""
    fraction, power = np.frexp(x)
    return np.ldexp(np.round(fraction * 2048.0) / 2048.0, power).astype(np.float32)


def get_default_memory_pool() -> Any:
    return cuda.MemoryPool()


def _operator(name: str, reflected: builtins.bool = False) -> Any:
    def method(self: Any, other: Any) -> Any:
        if other is None or not isinstance(other, ndarray | int | float | complex | np.generic | np.ndarray):
            return NotImplemented
        return globals()[name](*((other, self) if reflected else (self, other)))

    return method


def _in_place(name: str) -> Any:
    def method(self: Any, other: Any) -> Any:
        self._x[...] = globals()[name](self, other)._x
        return self

    return method


def _method(name: str) -> Any:
    return lambda self, *given, **options: globals()[name](self, *given, **options)


_TWO = "add:add sub:subtract mul:multiply truediv:true_divide floordiv:floor_divide mod:remainder pow:power "
_TWO += "and:bitwise_and or:bitwise_or xor:bitwise_xor lshift:left_shift rshift:right_shift matmul:matmul"
for _short, _name in (pair.split(":") for pair in _TWO.split()):
    setattr(ndarray, f"__{_short}__", _operator(_name))
    setattr(ndarray, f"__r{_short}__", _operator(_name, True))
    if _short != "matmul":
        setattr(ndarray, f"__i{_short}__", _in_place(_name))
for _short, _name in (
    pair.split(":") for pair in "lt:less le:less_equal gt:greater ge:greater_equal eq:equal ne:not_equal".split()
):
    setattr(ndarray, f"__{_short}__", _operator(_name))
for _short, _name in (pair.split(":") for pair in "neg:negative abs:absolute invert:invert pos:positive".split()):
    setattr(ndarray, f"__{_short}__", _method(_name))
_METHODS = (
    "all any argmax argmin argsort clip conj cumsum diagonal max mean min nonzero prod ravel repeat round squeeze std"
)
_METHODS += " sum swapaxes take trace var"
for _name in _METHODS.split():
    setattr(ndarray, _name, _method(_name))

from . import _core, cuda, fft, linalg  # noqa: E402, F401
