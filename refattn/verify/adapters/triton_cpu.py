"""Triton's interpreter with what it lacks, for kernels on the CPU.

With TRITON_INTERPRET=1 Triton runs `@triton.jit` on tensors of the CPU, operation by operation in NumPy. `start` mends:

- bfloat16. The interpreter holds it as integers and computes with these, and cuts off bits in place of rounding. Here
  arrays are of the type bfloat16 of ml_dtypes, which NumPy computes with. Conversions round to the nearest.
- float8. Conversions to it are those of ml_dtypes, and saturate as those of a GPU do.
- `fma` rounds once.
- `@triton.autotune` has no GPU to measure on: one configuration is taken, and the report says which.
- Modules that ask Triton for a device get a GPU, whose arrays lie on the CPU: `like_gpu`.
- The numbers of a loop, tensors once compiled, are Python's: they learn `.to`.
- libdevice is empty without a backend: its functions of one argument that NumPy has are NumPy's.
- A load, store or atomic operation outside of all tensors that a kernel was given raises, where memory of the process
  would be read or written over.
- The interpreter has one state for all threads, such as the number of the program that runs. So kernels that several
  threads launch run one after the other.
- The language is patched once for a kernel and not again for each function that it calls, a third of all time.

Afterwards each operation runs in each type, and is compared with PyTorch's: a type in which one fails is declined.
"""

from __future__ import annotations

import builtins
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from refattn.verify.adapters import like_gpu
from refattn.verify.adapters.interpreter import Interpreter, NoInterpreterError

TESTED = ((3, 5), (3, 9))
"""The first and the last version that the tests ran with."""

UNSEEN = "races, layouts, shared memory, tf32 in tl.dot, which computes in float32"

UNARY = "ceil cos cosh exp exp2 expm1 floor log log10 log1p log2 rint sin sinh sqrt tan tanh".split()
"""Functions of libdevice that NumPy has by the same name."""

PURE = ("fma_fp32", "fma_fp64")
"""Functions of Triton's compiled interpreter that compute on arrays and follow no pointer."""

_one_launch = threading.RLock()
"""Held while a kernel runs; its hooks may launch another one."""


def start(config: str) -> Interpreter:
    """Start it, taking a configuration of `@triton.autotune` by its number, or "all" for the next one at each call."""
    late = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
    if late:
        raise NoInterpreterError(
            "interpret: got triton, which is imported already and compiles, needs TRITON_INTERPRET=1 before, or a "
            "process of its own (refattn verify without --in-process)"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    import ml_dtypes  # noqa: F401
    import torch  # noqa: F401
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < (3, 5):
        raise NoInterpreterError(f"interpret: got triton {triton.__version__}, needs 3.5 or newer")
    known = "" if TESTED[0] <= version <= TESTED[1] else ", a version that refattn was not tested with"
    found = Interpreter(f"Triton {triton.__version__}{known}, interpreted on the CPU", UNSEEN)
    found.homes = (str(Path(triton.__file__).parent), __file__)
    found.lacks = lambda error, raised_in: (
        isinstance(error, NotImplementedError | AttributeError) or "static_assert" in raised_in
    )
    _set_driver(triton)
    _take_configurations(triton, config, found)
    bounds = Bounds()
    _mend_types(interpreter, tl, bounds)
    _watch(interpreter, bounds)
    interpreter.range = Indices
    _patch_once(interpreter, tl)
    _fill_libdevice(interpreter, tl)
    found.failing = self_test()
    return found


def _set_driver(triton: Any) -> None:
    import torch
    from triton.backends.compiler import GPUTarget

    major, minor = like_gpu.CAPABILITY

    class Driver:
        """A driver that answers what modules and wrappers ask."""

        utils = SimpleNamespace(get_device_properties=lambda _: like_gpu.DRIVER_PROPERTIES)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * major + minor, 32)

        def get_active_torch_device(self) -> Any:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, *_: Any) -> Any:
            raise NotImplementedError("only @triton.jit is interpreted: Gluon and compiled kernels need a GPU")

        def get_benchmarker(self) -> Callable[..., list[float]]:
            return lambda call, quantiles=None, **_: (call(), [0.0, 0.0, 0.0])[1]

    triton.runtime.driver.set_active(Driver())


def _take_configurations(triton: Any, choice: str, found: Interpreter) -> None:
    from triton.runtime.autotuner import Autotuner

    tune, calls = Autotuner.run, count()

    def run(self: Any, *given: Any, **named: Any) -> Any:
        with _one_launch:  # the configurations of the kernel are replaced for the call
            return taken(self, *given, **named)

    def taken(self: Any, *given: Any, **named: Any) -> Any:
        every = self.configs
        self.nargs = dict(zip(self.arg_names, given, strict=False))
        usable = self.prune_configs(named)
        number = (next(calls) if choice == "all" else int(choice)) % len(usable)
        kernel = getattr(self.base_fn, "__name__", "a kernel")
        chosen = f"configuration {number} of {len(usable)} ({usable[number]})"
        found.ran[kernel] = f"each of {len(usable)} configurations in turn" if choice == "all" else chosen
        self.configs = [usable[number]]
        try:
            return tune(self, *given, **named)
        except Exception as error:
            error.add_note(f"{kernel} with {chosen}")
            raise
        finally:
            self.configs = every

    Autotuner.run = run


class Bounds:
    """Where the tensors lie that a kernel was given."""

    def __init__(self) -> None:
        self.kernel = ""
        self.ranges: list[tuple[int, int]] = []
        self.known = False

    def enter(self, kernel: str, given: Iterable[Any]) -> None:
        """Take the tensors of a call; where one has no storage of PyTorch's nothing is checked."""
        self.kernel, self.ranges, self.known = kernel, [], True
        for x in given:
            self._add(x)

    def _add(self, x: Any) -> None:
        x = getattr(x, "base", x)  # of a descriptor, and of a tensor that is read as another type
        if isinstance(x, tuple):
            for one in x:
                self._add(one)
        elif hasattr(x, "untyped_storage"):
            storage = x.untyped_storage()
            self.ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        elif hasattr(x, "data_ptr"):
            self.known = False

    def check(self, verb: str, pointers: Any, mask: Any, size: int) -> None:
        """Raise IndexError where a pointer that is not masked is in none of them."""
        at = pointers[mask]
        if not self.known or not at.size:
            return
        low, high = int(at.min()), int(at.max()) + size
        if any(start <= low and high <= end for start, end in self.ranges):
            return
        inside = np.zeros(at.shape, bool)
        for start, end in self.ranges:
            if end - start >= size:  # not at + size <= end: an address near 2^64 would wrap around
                inside |= (at >= start) & (at <= end - size)
        if not inside.all():
            missing = f"{np.count_nonzero(~inside)} of {at.size} elements that lie in none of its tensors"
            raise IndexError(f"{self.kernel} {verb} {missing}: out of bounds")


def _watch(interpreter: Any, bounds: Bounds) -> None:
    """Let bounds know of each call, one at a time; a kernel that makes pointers of integers is not checked any more."""
    execute, convert = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder.create_int_to_ptr

    def watched(self: Any, *given: Any, **named: Any) -> Any:
        with _one_launch:
            outer = vars(bounds).copy()  # of a kernel whose hook launches this one
            bounds.enter(self.fn.__name__, (*given, *named.values()))
            try:
                return execute(self, *given, **named)
            finally:
                vars(bounds).update(outer)

    def pointer(self: Any, *given: Any) -> Any:
        bounds.known = False
        return convert(self, *given)

    interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder.create_int_to_ptr = watched, pointer


def _mend_types(interpreter: Any, tl: Any, bounds: Bounds) -> None:
    """Let arrays of bfloat16 be of that type, and let conversions round."""
    import ml_dtypes

    numpy_type, convert, plain = interpreter._get_np_dtype, interpreter._convert_float, interpreter._interpreter
    toward_zero = interpreter._ir.ROUNDING_MODE.RTZ
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    eight = {tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}
    wide = {tl.bfloat16: bfloat16, tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}

    def type_of(dtype: Any) -> Any:
        return bfloat16 if dtype.scalar == tl.bfloat16 else numpy_type(dtype)

    def to_nearest(data: Any, source: Any, target: Any, mode: Any) -> Any:
        of, to = (wide.get(x) or eight.get(x) for x in (source, target))
        if mode == toward_zero or of is None or to is None:
            return convert(data, source, target, mode)
        data = np.ascontiguousarray(data).view(of)
        if target in eight:  # as cvt.satfinite of PTX
            largest = float(ml_dtypes.finfo(to).max)
            return np.clip(data.astype(np.float32), -largest, largest).astype(to).view(np.uint8)
        return data.astype(to)

    class Memory:
        """Triton's loads and stores, which know NumPy's own types alone, within bounds."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(plain, name)
            if callable(found) and not isinstance(found, type) and name not in PURE:
                raise NotImplementedError(f"no {name}, whose pointers are not checked here")
            return found

        def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
            bounds.check("loads", pointers, mask, np.dtype(dtype).itemsize)
            if dtype != bfloat16:
                return plain.load(pointers, mask, other, dtype)
            return plain.load(pointers, mask, other.view(np.uint16), np.dtype(np.uint16)).view(bfloat16)

        def store(self, pointers: Any, value: Any, mask: Any) -> Any:
            bounds.check("stores", pointers, mask, value.dtype.itemsize)
            return plain.store(pointers, value.view(np.uint16) if value.dtype == bfloat16 else value, mask)

        def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
            if value.dtype == bfloat16:
                raise NotImplementedError("no atomic operations on bfloat16")
            bounds.check("stores", pointers, mask, value.dtype.itemsize)
            return plain.atomic_rmw(operation, pointers, value, mask, order)

        def atomic_cas(self, pointers: Any, expected: Any, value: Any, order: Any) -> Any:
            if value.dtype == bfloat16:
                raise NotImplementedError("no atomic operations on bfloat16")
            # Triton's own goes through all three by one index and one size of elements.
            if len({(x.size, x.dtype.itemsize) for x in (expected, value)} | {(pointers.size, value.itemsize)}) > 1:
                got = ", ".join(f"{x.dtype} {x.shape}" for x in (expected, value))
                raise ValueError(f"atomic_cas: got {got}, needs two of one type and of the shape {pointers.shape}")
            bounds.check("compares and swaps", pointers, np.ones_like(pointers, bool), value.itemsize)
            return plain.atomic_cas(pointers, expected, value, order)

    def fma(_: Any, x: Any, y: Any, z: Any) -> Any:
        found = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(found.astype(type_of(z.dtype)), z.dtype.scalar)

    def constant(_: Any, value: Any) -> Any:
        return interpreter.TensorHandle(np.array([value], bfloat16), tl.bfloat16)

    interpreter.InterpreterBuilder.create_fma, interpreter.InterpreterBuilder.get_bf16 = fma, constant
    interpreter._get_np_dtype, interpreter._convert_float, interpreter._interpreter = type_of, to_nearest, Memory()


class Index(int):
    """The number of a loop."""

    def to(self, *_: Any, **__: Any) -> Index:
        """Return it: Python's numbers have one type."""
        return self


def _closed(name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(int, name)

    def method(self: Index, other: Any) -> Any:
        found = plain(self, other)
        return found if found is NotImplemented else Index(found)

    return method


for _name in (f"__{side}{operation}__" for operation in ("add", "sub", "mul", "floordiv", "mod") for side in ("", "r")):
    setattr(Index, _name, _closed(_name))


class Indices(Sequence[int]):
    """`range`, in the modules of kernels."""

    def __init__(self, *bounds: int) -> None:
        self.numbers = builtins.range(*bounds)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: Any) -> Any:
        return list(map(Index, self.numbers[i])) if isinstance(i, slice) else Index(self.numbers[i])


def _patch_once(interpreter: Any, tl: Any) -> None:
    patch, live = interpreter._patch_lang, set[int]()

    class Nothing:
        """The scope of what is patched already."""

        def restore(self) -> None:
            """Leave all as it is."""

    def patched(fn: Any) -> Any:
        names = fn.__globals__
        names.setdefault("range", Indices)
        languages = {id(x) for x in names.values() if x is tl or x is tl.core}
        if languages <= live:
            return Nothing()
        live.update(languages)
        scope = patch(fn)
        # Triton before 3.7 asks NumPy for the number of an array of one element, which NumPy 2.4 refuses.
        tl.tensor.__index__ = lambda self: int(self.handle.data.item())
        return scope

    execute = interpreter.GridExecutor.__call__

    def quiet(self: Any, *given: Any, **named: Any) -> Any:
        with np.errstate(all="ignore"):  # a GPU does not warn
            return execute(self, *given, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patched, quiet
    if hasattr(interpreter, "_LangPatchScope"):  # triton 3.5 leaves it patched
        restore = interpreter._LangPatchScope.restore

        def restored(scope: Any) -> None:
            live.clear()
            restore(scope)

        interpreter._LangPatchScope.restore = restored


def _fill_libdevice(interpreter: Any, tl: Any) -> None:
    from triton.language.extra import libdevice

    def function(name: str) -> Callable[..., Any]:
        def run(x: Any, *_: Any, **__: Any) -> Any:
            if name not in UNARY:
                raise NotImplementedError(f"no libdevice.{name}")
            data = x.handle.data
            value = getattr(np, name)(data).astype(data.dtype)
            return tl.tensor(interpreter.TensorHandle(value, x.handle.dtype), x.type)

        return run

    for name, member in [*vars(libdevice).items()]:
        if callable(member) and not name.startswith("_"):
            setattr(libdevice, name, function(name))


# --- the self-test

SIZE = 64

TYPES = ("float64", "float32", "float16", "bfloat16")
EIGHT = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}


def operations(torch: Any) -> dict[str, tuple[str, Callable[..., Any], float]]:
    """Return each operation by its name: for Triton, for PyTorch, and the relative error that it may have.

    `a` and `b` are of the type that is tested, `f` is float32 and `i` counts. Those that round at most once are exact.
    """
    single, near = torch.float32, 4e-6
    return {
        "load and store": ("a", lambda a, b, f, i: a, 0),
        "masked load": ("tl.load(x + i, i < 3, 1.5)", lambda a, b, f, i: torch.where(i < 3, a, 1.5), 0),
        "add": ("a + b", lambda a, b, f, i: a + b, 0),
        "subtract": ("a - b", lambda a, b, f, i: a - b, 0),
        "multiply": ("a * b", lambda a, b, f, i: a * b, 0),
        "divide": ("a / b", lambda a, b, f, i: a / b, 0),
        "multiply by a number": ("a * 2.5", lambda a, b, f, i: a * 2.5, 0),
        "add float32": ("a + f", lambda a, b, f, i: a + f, 0),
        "negate": ("-a", lambda a, b, f, i: -a, 0),
        "abs": ("tl.abs(a)", lambda a, b, f, i: a.abs(), 0),
        "compare": ("tl.where(a < b, f, -f)", lambda a, b, f, i: torch.where(a < b, f, -f), 0),
        "equal": ("tl.where(a == b, f, -f)", lambda a, b, f, i: torch.where(a == b, f, -f), 0),
        "where": ("tl.where(a > b, a, b)", lambda a, b, f, i: torch.where(a > b, a, b), 0),
        "where with a number": ("tl.where(a > 0, a, 0.0)", lambda a, b, f, i: torch.where(a > 0, a, 0.0), 0),
        "maximum": ("tl.maximum(a, b)", lambda a, b, f, i: torch.maximum(a, b), 0),
        "minimum": ("tl.minimum(a, b)", lambda a, b, f, i: torch.minimum(a, b), 0),
        "clamp": ("tl.clamp(a, -0.5, 0.5)", lambda a, b, f, i: a.clamp(-0.5, 0.5), 0),
        "full": ("a + tl.full((N,), 1.5, a.dtype)", lambda a, b, f, i: a + 1.5, 0),
        "to float32": ("a.to(tl.float32) * 3.0", lambda a, b, f, i: a.to(single) * 3.0, 0),
        "to float16": ("a.to(tl.float16)", lambda a, b, f, i: a.half(), 0),
        "to bfloat16": ("a.to(tl.bfloat16)", lambda a, b, f, i: a.bfloat16(), 0),
        "to int32": ("(a * 8).to(tl.int32)", lambda a, b, f, i: (a * 8).to(torch.int32), 0),
        "from float32": ("f.to(a.dtype)", lambda a, b, f, i: f.to(a.dtype), 0),
        "from float32 as it is stored": ("f", lambda a, b, f, i: f.to(a.dtype), 0),
        "from int32": ("(i * 37).to(a.dtype)", lambda a, b, f, i: (i * 37).to(a.dtype), 0),
        "largest": ("tl.max(a, 0) + f * 0", lambda a, b, f, i: a.max().to(single) + f * 0, 0),
        "argmax": ("tl.argmax(a, 0) + i * 0", lambda a, b, f, i: a.argmax().int() + i * 0, 0),
        "sort": ("tl.sort(a)", lambda a, b, f, i: a.sort().values, 0),
        "exp": ("tl.exp(a.to(tl.float32))", lambda a, b, f, i: a.to(single).exp(), near),
        "exp2": ("tl.exp2(a.to(tl.float32))", lambda a, b, f, i: a.to(single).exp2(), near),
        "log": ("tl.log(tl.abs(a).to(tl.float32) + 1)", lambda a, b, f, i: (a.abs().to(single) + 1).log(), near),
        "sqrt": ("tl.sqrt(tl.abs(a).to(tl.float32))", lambda a, b, f, i: a.abs().to(single).sqrt(), near),
        "sum": ("tl.sum(a.to(tl.float32), 0) + f * 0", lambda a, b, f, i: a.to(single).sum() + f * 0, 1e-4),
        "cumsum": ("tl.cumsum(a.to(tl.float32), 0)", lambda a, b, f, i: a.to(single).cumsum(0), 1e-4),
        "fma": ("tl.fma(a, b, a)", lambda a, b, f, i: (a.double() * b.double() + a.double()).to(a.dtype), 0),
    }


def products(torch: Any) -> dict[str, tuple[str, Callable[..., Any], float]]:
    """Return the operations on two square matrices in the same way."""
    single = torch.float32
    return {
        "dot": ("tl.dot(a, b)", lambda a, b: a.to(single) @ b.to(single), 1e-4),
        "dot of a transpose": ("tl.dot(a, tl.trans(b))", lambda a, b: a.to(single) @ b.to(single).T, 1e-4),
        "dot of rounded": (
            "tl.dot((a * 2).to(tl.float32).to(a.dtype), b)",
            lambda a, b: (a * 2).to(single) @ b.to(single),
            1e-4,
        ),
        "sum of rows": (
            "tl.sum(a.to(tl.float32), 1)[:, None] + tl.zeros((N, N), tl.float32)",
            lambda a, b: a.to(single).sum(1, keepdim=True).expand(a.shape),
            1e-4,
        ),
    }


_VECTORS = """
@triton.jit
def kernel(x, y, z, o, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    f = tl.load(z + i)
    tl.store(o + i, {})
"""

_MATRICES = """
@triton.jit
def kernel(x, y, o, N: tl.constexpr):
    i = tl.arange(0, N)
    p = i[:, None] * N + i[None, :]
    a = tl.load(x + p)
    b = tl.load(y + p)
    tl.store(o + p, {})
"""


def self_test() -> dict[str, str]:
    """Run each operation in each type; return by types the names of those that fail."""
    import torch

    generator = torch.Generator().manual_seed(0)
    f, *vectors = (torch.randn(SIZE, generator=generator) for _ in range(3))
    matrices = [torch.randn(SIZE, SIZE, generator=generator) for _ in range(2)]
    i = torch.arange(SIZE, dtype=torch.int32)
    failing: dict[str, list[str]] = {}
    for source, table, arrays, more in (
        (_VECTORS, operations(torch), vectors, (f,)),
        (_MATRICES, products(torch), matrices, ()),
    ):
        for name, (code, function, allowed) in table.items():
            kernel = compiled(source.format(code))
            for type_ in TYPES:
                given = [*(x.to(getattr(torch, type_)) for x in arrays), *more]
                want = function(*given, *((i,) if more else ()))
                if not _right(kernel, given, want, allowed):
                    failing.setdefault(type_, []).append(name)
    for type_, code in EIGHT.items():  # numbers that the type can hold: beyond these PyTorch has NaN
        kernel = compiled(_VECTORS.format(f"f.to(tl.{code})"))
        if not _right(kernel, [f, f, f], f.to(getattr(torch, type_)), 0.0):
            failing[type_] = ["from float32"]
    return {type_: ", ".join(names) for type_, names in failing.items()}


def _right(kernel: Any, given: list[Any], want: Any, allowed: float) -> bool:
    import torch

    out = torch.zeros(want.shape, dtype=want.dtype)
    try:
        kernel[(1,)](*given, out, SIZE)
    except Exception:
        return False
    return torch.allclose(out.double(), want.double(), rtol=allowed, atol=allowed)


def compiled(source: str) -> Any:
    """Return the kernel that a text defines."""
    import triton
    import triton.language as tl

    name = f"<kernel {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # Triton reads it again
    module = ModuleType("refattn_self_test")
    module.__dict__.update(triton=triton, tl=tl)
    exec(compile(source, name, "exec"), module.__dict__)
    return module.kernel
