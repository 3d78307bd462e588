"""What refattn asks of an array library: the protocol `Backend`, and in `BaseBackend` what most of them share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = Any
Task = TypeVar("Task")
Result = TypeVar("Result")


@runtime_checkable
class Backend(Protocol):
    """An array library as refattn uses it. Making one imports nothing: the library is imported when it is needed.

    A third-party package adds one through an entry point in the group ``refattn.backends`` that names such an object.
    """

    name: str
    pools: bool
    """Whether `map` runs tasks at the same time, so that many small ones are better than a few large ones."""
    tile_bytes: int
    """The size of the largest temporary that a tiled implementation should make."""

    def why_unavailable(self) -> str | None:
        """Return None where the library can be used, otherwise why not and what to do about it."""

    def namespace(self) -> ModuleType:
        """Return the module that implements the array API standard."""

    def version(self) -> str:
        """Return the version of the library."""

    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices that `from_numpy` takes; the first one is the default."""

    def float64(self) -> bool:
        """Tell whether the library, as it is set now, computes in float64."""

    def enable_float64(self) -> None:
        """Make `float64` true where a setting of the library decides it."""

    def with_float64(self) -> AbstractContextManager[None]:
        """Compute in float64 in the ``with`` block, and afterwards as before."""

    def precision_lost(self, x: Array) -> str | None:
        """Return why products of arrays like `x` lose digits as the library is set now, None where they do not."""

    def full_precision(self) -> AbstractContextManager[None]:
        """Compute with all digits of the arrays in the ``with`` block, however the library is set."""

    def from_numpy(self, x: NDArray[Any], device: Any = None) -> Array:
        """Return a copy of `x` as an array of this library (NumPy: `x` itself)."""

    def to_numpy(self, x: Array) -> NDArray[Any]:
        """Return `x` on the host, without its gradient, bfloat16 as float32. The memory may be shared: do not write."""

    def owns(self, x: object) -> bool:
        """Tell whether `x` is an array of this library."""

    def concrete(self, value: Any) -> bool | None:
        """Return the truth of a condition, or None while the library traces and values are not known."""

    def erf(self, x: Array) -> Array:
        """Return the error function, which the standard lacks, of each element."""

    def product(self, a: Array, b: Array) -> Array:
        """Return a @ b for arrays of at least two axes. Its bits do not depend on how many threads compute it."""

    def together(self, pairs: Sequence[tuple[Array, Array]]) -> list[Array]:
        """Return the `product` of each pair; what handing out their work costs is paid once."""

    def products(self) -> AbstractContextManager[None]:
        """Prepare once, for the ``with`` block, what each `product` in it would prepare for itself."""

    def sparse_product(self, indptr: Array, indices: Array, data: Array, x: Array) -> Array:
        """Return W x (rows, k) for a sparse W by rows, and x (columns, k).

        Row i of W has the columns ``indices[indptr[i]:indptr[i + 1]]``, with the values `data` there.
        """

    def sparse_rows(self, indptr: Array, edges: int) -> Array:
        """Return the row of each of the `edges` entries of a sparse matrix."""

    def keep_memory(self) -> None:
        """Let the process keep the memory of freed arrays, where that saves time; for programs, not for libraries."""

    def synchronize(self) -> None:
        """Wait until all work that was started is done."""

    def peak_memory(self) -> int | None:
        """Return the most bytes held on its devices since `reset_peak_memory`; None where the library does not tell."""

    def reset_peak_memory(self) -> None:
        """Start `peak_memory` again from what is held now."""

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
        """Return ``[function(task) for task in tasks]``; the calls must not depend on each other.

        Where several fail, the error is that of the first one in order. Results never depend on how many run at once.
        """

    def note(self) -> str:
        """Return a remark or advice for the table of backends, or ""."""


class BaseBackend:
    """The answers that most libraries share; a backend sets the first four attributes and overrides what differs."""

    name: str
    package: str
    """The module to import."""
    array_type: str
    """The name of the array class in it."""
    install: str
    """The command that installs it."""
    pools: bool = False
    tile_bytes: int = 16 << 20

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
        try:
            self.namespace()
        except ImportError as error:
            return " ".join(str(error).split())  # some libraries explain themselves on a whole page
        return None

    def namespace(self) -> ModuleType:
        return self.library()

    def version(self) -> str:
        return str(self.library().__version__)

    def devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def float64(self) -> bool:
        return True

    def enable_float64(self) -> None:
        pass

    @contextmanager
    def with_float64(self) -> Iterator[None]:
        """Compute in float64 in the ``with`` block, and afterwards as before."""
        yield

    def precision_lost(self, x: Array) -> str | None:
        """Return why products of arrays like `x` lose digits as the library is set now, None where they do not."""
        return None

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Compute with all digits of the arrays in the ``with`` block, however the library is set."""
        yield

    def owns(self, x: object) -> bool:
        # A library that was never imported has no arrays; while it is being imported, it may lack the class.
        kind = getattr(sys.modules.get(self.package), self.array_type, None)
        return kind is not None and isinstance(x, kind)

    def concrete(self, value: Any) -> bool | None:
        return bool(value)

    def erf(self, x: Array) -> Array:
        from scipy.special import erf

        host: Any = self  # a subclass has what the protocol asks for
        return host.from_numpy(np.asarray(erf(host.to_numpy(x))), device=x.device)

    def product(self, a: Array, b: Array) -> Array:
        return a @ b

    def together(self, pairs: Sequence[tuple[Array, Array]]) -> list[Array]:
        return [self.product(a, b) for a, b in pairs]

    def products(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sparse_product(self, indptr: Array, indices: Array, data: Array, x: Array) -> Array:
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
        # The standard's repeat is not there while a library traces: the size of its result depends on values.
        xp = self.namespace()
        at = xp.arange(edges, dtype=indptr.dtype, device=indptr.device)
        return xp.searchsorted(indptr, at, side="right") - 1

    def keep_memory(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def peak_memory(self) -> int | None:
        return None

    def reset_peak_memory(self) -> None:
        pass

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
        return [function(task) for task in tasks]

    def note(self) -> str:
        return ""

    def check_device(self, device: Any) -> None:
        """Raise ValueError unless `device` is None or one of `devices`."""
        if device is not None and str(device) not in self.devices():
            raise ValueError(f"device: got {device}, {self.name} has {', '.join(self.devices())}")


def widened(x: NDArray[Any]) -> NDArray[Any]:
    """Return `x`, as float32 where it is bfloat16, which NumPy itself does not know."""
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x
