"""What refattn asks of an array library, with the answers that most of them share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = Any
Task = TypeVar("Task")
Result = TypeVar("Result")


class Backend:
    """An array library as refattn uses it. Making one imports nothing: the library is imported when it is needed.

    A subclass sets the first four attributes and overrides what differs. A third-party package adds one through an
    entry point in the group ``refattn.backends`` that names such an object.
    """

    name: str
    package: str
    """The module to import."""
    array_type: str
    """The name of the array class in it."""
    install: str
    """The command that installs it."""
    pools: bool = False
    """Whether `map` runs tasks at the same time, so that many small ones are better than a few large ones."""
    waits: bool = False
    """Whether the host waits for a device where it looks at a value, so that what only saves work is not looked at."""
    tile_bytes: int = 16 << 20
    """The size of the largest temporary that a tiled implementation should make."""

    def library(self) -> ModuleType:
        """Import the library; an ImportError says how to get it."""
        try:
            return importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            if error.name != self.package:
                raise ImportError(f"{self.package} cannot be imported: {error}") from error
            raise ImportError(f"{self.package} is not installed: {self.install}") from error
        except Exception as error:  # a broken installation may raise anything
            raise ImportError(f"{self.package} cannot be imported: {error}") from error

    def why_unavailable(self) -> str | None:
        """Return None if the library can be used, otherwise why not and what to do about it."""
        try:
            self.namespace()
        except ImportError as error:
            return " ".join(str(error).split())  # some libraries explain themselves on a whole page
        return None

    def namespace(self) -> ModuleType:
        """Return the module that implements the array API standard."""
        return self.library()

    def version(self) -> str:
        """Return the version of the library."""
        return str(self.library().__version__)

    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices that `from_numpy` takes; the first one is the default."""
        return ("cpu",)

    def float64(self) -> bool:
        """Tell whether the library, as it is set now, computes in float64."""
        return True

    def enable_float64(self) -> None:
        """Make `float64` true if a setting of the library decides it."""

    def with_float64(self) -> AbstractContextManager[None]:
        """Compute in float64 in the ``with`` block, and afterwards as before."""
        return nullcontext()

    def on(self, device: Any) -> AbstractContextManager[None]:
        """Make a device the current one in the ``with`` block, where the library computes on the current one alone."""
        return nullcontext()

    def misplaced(self, x: Array) -> str | None:
        """Return why an array cannot be computed with where it lies, as things are now, None if it can."""
        return None

    def precision_lost(self, x: Array) -> str | None:
        """Return why products of arrays like `x` lose digits as the library is set now, None if they do not."""
        return None

    def full_precision(self) -> AbstractContextManager[None]:
        """Compute with all digits of the arrays in the ``with`` block, however the library is set."""
        return nullcontext()

    def from_numpy(self, x: NDArray[Any], device: Any = None) -> Array:
        """Return a copy of `x` as an array of this library (NumPy: `x` itself)."""
        raise NotImplementedError

    def to_numpy(self, x: Array) -> NDArray[Any]:
        """Return `x` on the host, without its gradient, bfloat16 as float32. The memory may be shared: do not write."""
        raise NotImplementedError

    def owns(self, x: object) -> bool:
        """Tell whether `x` is an array of this library."""
        # A library that was never imported has no arrays; while it is being imported, it may lack the class.
        kind = getattr(sys.modules.get(self.package), self.array_type, None)
        return kind is not None and isinstance(x, kind)

    def concrete(self, value: Any) -> bool | None:
        """Return the truth of a condition, or None while the library traces and values are not known."""
        return bool(value)

    def known(self, value: Any) -> bool:
        """Tell whether `concrete` would return a truth; a look at the value is not worth waiting for a device."""
        return self.waits or self.concrete(value) is not None

    def erf(self, x: Array) -> Array:
        """Return the error function, which the standard lacks, of each element."""
        from scipy.special import erf

        return self.from_numpy(np.asarray(erf(self.to_numpy(x))), device=x.device)

    def product(self, a: Array, b: Array) -> Array:
        """Return a @ b for arrays of at least two axes. Its bits do not depend on how many threads compute it."""
        return a @ b

    def together(self, pairs: Sequence[tuple[Array, Array]]) -> list[Array]:
        """Return the `product` of each pair; what handing out their work costs is paid once."""
        return [self.product(a, b) for a, b in pairs]

    def products(self) -> AbstractContextManager[None]:
        """Prepare once, for the ``with`` block, what each `product` in it would prepare for itself."""
        return nullcontext()

    def matmul(self, a: Array, b: Array) -> Array:
        """Return a @ b in one piece, where one of them is the transpose of a large array."""
        return a @ b

    def constants(self, numbers: Sequence[float], dtype: Any, make: Callable[[], Array]) -> Array:
        """Return the array of these numbers, the same in every call: `make` makes it, and it may be kept."""
        return make()

    def sparse_product(self, indptr: Array, indices: Array, data: Array, x: Array) -> Array:
        """Return W x (rows, k) for a sparse W by rows, and x (columns, k).

        Row i of W has the columns ``indices[indptr[i]:indptr[i + 1]]``, with the values `data` there.
        """
        # The standard has no sums by segment: rows are filled up to the longest one.
        xp = self.namespace()
        lengths = indptr[1:] - indptr[:-1]
        widest = int(xp.max(lengths)) if lengths.shape[0] else 0
        if not widest:
            return xp.zeros((lengths.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
        at = indptr[:-1, None] + xp.arange(widest, dtype=indptr.dtype, device=indptr.device)[None, :]
        inside = at < indptr[1:, None]
        flat = xp.reshape(xp.where(inside, at, xp.zeros_like(at)), (-1,))
        values = xp.where(xp.reshape(inside, (-1,)), xp.take(data, flat), xp.zeros_like(data[:1]))
        parts = values[:, None] * xp.take(x, xp.take(indices, flat), axis=0)
        return xp.sum(xp.reshape(parts, (*at.shape, x.shape[1])), axis=1)

    def sparse_rows(self, indptr: Array, edges: int) -> Array:
        """Return the row of each of the `edges` entries of a sparse matrix."""
        # The standard's repeat is not there while a library traces: the size of its result depends on values.
        xp = self.namespace()
        at = xp.arange(edges, dtype=indptr.dtype, device=indptr.device)
        return xp.searchsorted(indptr, at, side="right") - 1

    def keep_memory(self) -> None:
        """Let the process keep the memory of freed arrays, if that saves time; for programs, not for libraries."""

    def synchronize(self) -> None:
        """Wait until all work that was started is done."""

    def peak_memory(self) -> int | None:
        """Return the most bytes held on its devices since `reset_peak_memory`; None if the library does not tell."""
        return None

    def reset_peak_memory(self) -> None:
        """Start `peak_memory` again from what is held now."""

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
        """Return ``[function(task) for task in tasks]``; the calls must not depend on each other.

        If several fail, the error is that of the first one in order. Results never depend on how many run at once.
        """
        return [function(task) for task in tasks]

    def note(self) -> str:
        """Return a remark or advice for the table of backends, or ""."""
        return ""

    def check_device(self, device: Any) -> None:
        """Raise ValueError unless `device` is None or one of `devices`."""
        if device is not None and str(device) not in self.devices():
            raise ValueError(f"device: got {device}, {self.name} has {', '.join(self.devices())}")


def widened(x: NDArray[Any]) -> NDArray[Any]:
    """Return `x`, as float32 where it is bfloat16, which NumPy itself does not know."""
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x
