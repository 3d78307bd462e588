"""NumPy: the backend that is always there, and the one that is fast through threads (see `refattn.backends.pool`)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.backends import blas, pool, products
from refattn.backends.base import Backend, Result, Task, widened

M_TRIM_THRESHOLD = -1
"""The parameter of mallopt, as malloc.h of glibc has it, for how many freed bytes are kept."""

KEPT = 1 << 30


class NumpyBackend(Backend):
    """NumPy on the CPU."""

    name = "numpy"
    package = "numpy"
    array_type = "ndarray"
    install = "pip install numpy"
    pools = True
    tile_bytes = 512 << 10  # it stays in the cache of a core, and is given back to be used again without a page fault

    def namespace(self) -> ModuleType:
        # NumPy 2 implements the standard itself; array_api_compat.numpy takes as long to import as NumPy does.
        return np

    def from_numpy(self, x: NDArray[Any], device: Any = None) -> NDArray[Any]:
        self.check_device(device)
        return np.asarray(x)

    def to_numpy(self, x: NDArray[Any]) -> NDArray[Any]:
        return widened(np.asarray(x))

    def owns(self, x: object) -> bool:
        # NumPy returns scalars of its own where the standard has arrays without axes.
        return isinstance(x, np.ndarray | np.generic)

    def product(self, a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        return products.together([(a, b)])[0]

    def together(self, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> list[NDArray[Any]]:
        return products.together(pairs)

    def products(self) -> AbstractContextManager[None]:
        return blas.one_thread()

    def sparse_product(
        self, indptr: NDArray[Any], indices: NDArray[Any], data: NDArray[Any], x: NDArray[Any]
    ) -> NDArray[Any]:
        from scipy.sparse import csr_array

        return np.asarray(csr_array((data, indices, indptr), shape=(len(indptr) - 1, len(x))) @ x)

    def sparse_rows(self, indptr: NDArray[Any], edges: int) -> NDArray[Any]:
        return np.repeat(np.arange(len(indptr) - 1, dtype=indptr.dtype), np.diff(indptr))

    def keep_memory(self) -> None:
        # glibc gives large blocks back to the system at once, and each new page then costs a fault. Freeing one such
        # block makes it keep blocks up to that size, and twice as much in all.
        np.empty(30 << 20, dtype=np.uint8)
        # Where more is freed at the end of every call, it has to be told.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
        if mallopt is not None:
            mallopt(M_TRIM_THRESHOLD, KEPT)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
        return pool.run(function, tasks)

    def note(self) -> str:
        """Say which BLAS does the matrix products, and how to get a faster one of the same library."""
        from threadpoolctl import threadpool_info

        config: Any = np.show_config(mode="dicts")
        features = config.get("SIMD Extensions", {})
        found = {*features.get("baseline", ()), *features.get("found", ())}
        return kernel_note([lib for lib in threadpool_info() if lib["user_api"] == "blas"], found)


def kernel_note(libraries: Iterable[dict[str, Any]], features: set[str]) -> str:
    """Describe the BLAS `libraries` that threadpoolctl reports, on a CPU with the `features` that NumPy reports.

    OpenBLAS runs kernels without AVX-512 on CPUs that are newer than its build. It reads the variable that corrects it
    while it is being loaded, so only the user can set it.
    """
    kernels = {(lib["internal_api"], lib["version"], lib.get("architecture", "unknown kernels")) for lib in libraries}
    note = ", ".join(f"{name} {version} ({kernel})" for name, version, kernel in sorted(kernels, key=str))
    # SkylakeX kernels need the features that NumPy calls X86_V4 (AVX512_SKX before 2.4); AVX512F alone is not enough.
    slow = any(name == "openblas" and kernel in ("Haswell", "Zen") for name, _, kernel in kernels)
    if slow and features & {"X86_V4", "AVX512_SKX"}:
        note += (
            ": this CPU has AVX-512, which these kernels do not use; matrix products can be up to twice as fast "
            "with OPENBLAS_CORETYPE=SkylakeX set before Python starts"
        )
    return note


backend = NumpyBackend()
