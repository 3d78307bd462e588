"""CuPy: NVIDIA (and AMD) GPUs. Arrays live on the device that was current when they were made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from refattn.backends.base import Array, Backend, widened


class CupyBackend(Backend):
    """CuPy on all GPUs that it sees."""

    name = "cupy"
    package = "cupy"
    array_type = "ndarray"
    install = 'pip install "refattn[cupy]", or the cupy wheel for your version of CUDA'
    tile_bytes = 64 << 20  # a GPU is only filled by large products

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
