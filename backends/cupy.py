"""CuPy: NVIDIA (and AMD) GPUs. Arrays live on the device that was current when they were made."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from refattn.backends.base import Array, Backend, widened

CONSTANTS = 256
"""How many arrays of constant numbers are kept on the devices."""


class CupyBackend(Backend):
    """CuPy on all GPUs that it sees."""

    name = "cupy"
    package = "cupy"
    array_type = "ndarray"
    install = 'pip install "refattn[cupy]", or the cupy wheel for your version of CUDA'
    waits = True

    def __init__(self) -> None:
        self._constants: dict[Hashable, Array] = {}

    @cached_property
    def tile_bytes(self) -> int:  # type: ignore[override]
        """A share of the memory of the device: a call launches as few kernels as it can, and holds some ten tiles.

        Of the memory that is free tiles would depend on the moment, and with them the last bits of results.
        """
        runtime = self.library().cuda.runtime
        return max(64 << 20, int(runtime.getDeviceProperties(runtime.getDevice())["totalGlobalMem"]) // 64)

    def why_unavailable(self) -> str | None:
        reason = super().why_unavailable()
        if reason is not None:
            return reason
        try:
            count = self._count()
        except Exception as error:  # no driver, one that is too old, or no device: CuPy has an error class for each
            return f"cupy finds no CUDA device: {error}"
        return None if count else "cupy finds no CUDA device"

    def namespace(self) -> ModuleType:
        self.library()
        import array_api_compat.cupy

        return array_api_compat.cupy

    def devices(self) -> tuple[str, ...]:
        return tuple(f"cuda:{i}" for i in range(self._count()))

    def from_numpy(self, x: NDArray[Any], device: Any = None) -> Array:
        cupy = self.library()
        with cupy.cuda.Device(self._index(device)):
            return cupy.array(x, copy=True)

    def on(self, device: Any) -> AbstractContextManager[None]:
        return self.library().cuda.Device(self._index(device))

    def misplaced(self, x: Array) -> str | None:
        current, own = self.library().cuda.runtime.getDevice(), x.device.id
        if own == current:
            return None
        where = f"needs one on cuda:{current}, the current device, or a call in `with cupy.cuda.Device({own}):`"
        return f"got an array on cuda:{own}, {where}"

    def precision_lost(self, x: Array) -> str | None:
        kinds = self._products()
        if x.dtype.char not in "efF" or kinds.get_compute_type("float32") != kinds.COMPUTE_TYPE_TF32:
            return None
        return "CuPy's products of float32 are set to TF32 (CUPY_TF32)"

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        kinds = self._products()
        before = kinds.get_compute_type("float32")
        kinds.set_compute_type("float32", kinds.COMPUTE_TYPE_DEFAULT)
        try:
            yield
        finally:
            kinds.set_compute_type("float32", before)

    def _products(self) -> Any:
        self.library()
        from cupy._core import _routines_linalg  # the environment variable is read once, and this is where it is kept

        return _routines_linalg

    def to_numpy(self, x: Array) -> NDArray[Any]:
        # The copy must be queued on the device of x, behind the work that computes it.
        with x.device:
            return widened(self.library().asnumpy(x))

    def matmul(self, a: Array, b: Array) -> Array:
        # A product of batches copies operands that are not in C order: of a b and (b^T a^T)^T the one that copies less.
        copied = sum(x.nbytes for x in (a, b) if not x.flags.c_contiguous)
        if a.ndim == 2 or copied <= sum(x.nbytes for x in (a, b) if not x.mT.flags.c_contiguous):
            return a @ b
        return (b.mT @ a.mT).mT

    def product(self, a: Array, b: Array) -> Array:
        return self.matmul(a, b)

    def constants(self, numbers: Sequence[float], dtype: Any, make: Callable[[], Array]) -> Array:
        held = bytes(memoryview(numbers)) if isinstance(numbers, array) else tuple(numbers)
        key = (held, str(dtype), self.library().cuda.runtime.getDevice())
        if key not in self._constants:
            if len(self._constants) >= CONSTANTS:
                self._constants.clear()
            self._constants[key] = make()
        return self._constants[key]

    def erf(self, x: Array) -> Array:
        from cupyx.scipy.special import erf

        return erf(x)

    def sparse_product(self, indptr: Array, indices: Array, data: Array, x: Array) -> Array:
        from cupyx.scipy.sparse import csr_matrix

        return csr_matrix((data, indices, indptr), shape=(len(indptr) - 1, len(x))) @ x

    def synchronize(self) -> None:
        cupy = self.library()
        for i in range(self._count()):
            with cupy.cuda.Device(i):
                cupy.cuda.get_current_stream().synchronize()

    def peak_memory(self) -> int | None:
        """Return the bytes that the pool has taken from the devices.

        The pool keeps what it has taken until `reset_peak_memory`, so this is the highest need since then, rounded up
        to the pool's blocks.
        """
        cupy = self.library()
        total = 0
        for i in range(self._count()):
            with cupy.cuda.Device(i):
                total += int(cupy.get_default_memory_pool().total_bytes())
        return total

    def reset_peak_memory(self) -> None:
        cupy = self.library()
        self.synchronize()
        for i in range(self._count()):
            with cupy.cuda.Device(i):
                cupy.get_default_memory_pool().free_all_blocks()

    def _count(self) -> int:
        return int(self.library().cuda.runtime.getDeviceCount())

    def _index(self, device: Any) -> int | None:
        """Return the number of a device given as None (the current one), ``cuda:1``, 1 or ``cupy.cuda.Device(1)``."""
        if device is None:
            return None
        number = getattr(device, "id", device)
        name = f"cuda:{number}" if str(number).isdecimal() else str(number)
        self.check_device(name)
        return int(name.removeprefix("cuda:"))


backend = CupyBackend()
