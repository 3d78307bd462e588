"""What a fault is, and how it is run on a case."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from refattn.golden.storage import round_to
from refattn.verify.museum.emulator import Array, Flash

MECHANISM = "softmax"
"""The mechanism whose kernels are flash kernels."""

FLASH = ("online", "scores", "masks", "memory", "splits", "options", "gradients")
"""The modules that hold the faults of these."""

ROOMS = {MECHANISM: FLASH, "growing": FLASH, "delta": ("states",), "higher_order": ("sums",)}
"""The modules that hold faults, by mechanism; where the core of one is that of another the faults are the same."""

SIZES = (16, 32, 64, 128, 8)
"""Sizes of tiles that are tried, those of kernels first."""

CHUNKS = (64, 32, 16, 128, 8)
"""The same for tokens of a chunk."""

UNEQUAL = ((64, 32), (128, 64), (128, 32), (64, 128), (32, 64), (16, 32), (32, 16))
"""Unequal tiles that are tried where both sizes matter."""

RECOMPUTED = {
    "given", "head_of", "scale_of", "offset_of", "place_of", "window_of", "lengths_of", "mask_of", "bias_of", "keep_of",
    "starts", "tile", "keys", "values", "inside", "visible", "near", "exist", "allowed", "masked", "product", "scaled",
    "capped", "biased", "hidden", "scores", "exp", "dropped"
}  # fmt: skip
"""Steps of the forward that the backward goes through again."""

_FOUND: list[Fault] = []


class Kernel(Protocol):
    """An emulator of a mechanism's kernels: made with two sizes, and a rounding to the storage type."""

    def __init__(self, rows: int = 64, columns: int = 64, store: Callable[[Array], Array] = ..., /) -> None: ...

    def run(
        self, inputs: Mapping[str, Array], options: Mapping[str, Any], d_out: Array | None, working: Any = ..., /
    ) -> dict[str, Array]: ...


Kind = TypeVar("Kind", bound=type[Kernel])


@dataclass(frozen=True)
class Fault:
    """A wrong kernel.

    Attributes
    ----------
    name
        Of its class.
    wrong
        What is wrong, in words.
    link
        The report that it is modelled on; "" where none is known.
    of
        What it is an error of: ids of equations, and names of conventions or wrong gradients that do the same.
    tiles
        The sizes of tiles that matter: "", "rows", "columns" or "both"; or "chunk".
    kernel
        The emulator that has it.
    """

    name: str
    wrong: str
    link: str
    of: tuple[str, ...]
    tiles: str
    kernel: type[Any]

    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return the tile sizes, of queries and of keys, that give different results."""
        return {
            "": ((64, 64),),
            "rows": tuple((size, 64) for size in SIZES),
            "columns": tuple((64, size) for size in SIZES),
            "chunk": tuple((size, 64) for size in CHUNKS),
            "both": (*((size, size) for size in SIZES), *UNEQUAL),
        }[self.tiles]

    def told(self, sizes: tuple[int, int]) -> str:
        """Return what is wrong in words, with the tile size where it matters."""
        rows, columns = sizes
        tiles = {
            "": "",
            "rows": f" (tiles of {rows} queries)",
            "columns": f" (tiles of {columns} keys)",
            "both": f" (tiles of {rows} x {columns})",
            "chunk": f" (chunks of {rows} tokens)",
        }[self.tiles]
        return self.wrong + tiles

    @property
    def backward(self) -> bool:
        """Whether outputs are right, and gradients alone are wrong."""
        return self.of[0].startswith("d")

    @property
    def recomputed(self) -> bool:
        """Whether it may as well be a fault of the backward alone, which computes the weights again."""
        own = {name for kind in self.kernel.__mro__ if kind not in (Flash, object) for name in vars(kind)}
        return issubclass(self.kernel, Flash) and not self.backward and bool(own & RECOMPUTED) and "run" not in own

    def gradients(
        self,
        inputs: Mapping[str, Array],
        options: Mapping[str, Any],
        d_out: Array,
        sizes: tuple[int, int],
        outputs: tuple[Array, Array],
    ) -> dict[str, Array]:
        """Return what a kernel gives whose forward is right, and gave these (out, lse): the backward alone is wrong."""
        return backward_of(self.kernel(*sizes), inputs, options, d_out, outputs)

    def results(
        self,
        inputs: Mapping[str, Array],
        options: Mapping[str, Any],
        d_out: Array | None,
        sizes: tuple[int, int],
        dtype: str = "float64",
    ) -> dict[str, Array]:
        """Return what the wrong kernel computes; in a short dtype as kernels for it do, before it is stored."""
        low = dtype in ("float16", "bfloat16")

        def store(x: Array) -> Array:
            return round_to(x.astype(np.float64), dtype).astype(x.dtype)

        kernel = self.kernel(*sizes, store) if low else self.kernel(*sizes)
        return kernel.run(inputs, options, d_out, np.float64 if dtype == "float64" else np.float32)


def backward_of(
    kernel: Flash,
    inputs: Mapping[str, Array],
    options: Mapping[str, Any],
    d_out: Array,
    outputs: tuple[Array, Array],
) -> dict[str, Array]:
    """Return what a kernel gives whose backward begins with these (out, lse), whatever its forward is."""
    out, lse = outputs
    kernel.forward = lambda: (out, lse[..., None])  # type: ignore[method-assign]
    kernel.written = lambda out, lse: (out, lse)  # type: ignore[method-assign]
    return kernel.run(inputs, options, d_out)


def fault(*of: str, link: str, tiles: str = "") -> Callable[[Kind], Kind]:
    """Register a kernel as a fault; the first sentence of its docstring says what is wrong."""

    def register(kernel: Kind) -> Kind:
        wrong = " ".join((kernel.__doc__ or "").split()).rstrip(".")
        _FOUND.append(Fault(kernel.__name__, wrong[:1].lower() + wrong[1:], link, of, tiles, kernel))
        return kernel

    return register


@functools.cache
def faults(mechanism: str = MECHANISM) -> tuple[Fault, ...]:
    """Return the faults of a mechanism's kernels; () where there are none."""
    rooms = [importlib.import_module(f"refattn.verify.museum.{room}") for room in ROOMS.get(mechanism, ())]
    return tuple(one for room in rooms for one in _FOUND if one.kernel.__module__ == room.__name__)


def flash(mechanism: str) -> bool:
    """Tell whether a mechanism's kernels are flash kernels, whose backward reads outputs and computes weights again."""
    return ROOMS.get(mechanism) == FLASH
