"""Run the same source on arrays that count: what a call computes, writes and holds, whatever the machine.

What is counted
- `products`: 2 k for each element of a matrix product over k terms, and what LAPACK's factorisations take.
- `others`: 1 for each floating-point element that an element-wise function returns or a reduction reads, exp and a sum
  alike. Comparisons, selections and copies are no arithmetic.
- `written`: bytes of all new arrays; views are none. `peak`: the most of them that exist at once, inputs aside.
- `shapes`: the shapes of all new arrays.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from refattn.instruments.wrapper import Instrument, Wrapped

ELEMENTWISE = frozenset(
    "abs add atan atan2 ceil clip cos cosh divide erf exp expm1 floor hypot log log1p log2 logaddexp maximum minimum "
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


class Counted(Wrapped):
    """An array whose operations are counted."""


class Count(Instrument):
    """Tallies the work of all `Counted` arrays in a `with counting()` block."""

    name, arrays = "counting", Counted

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

    def made(self, value: Any) -> Wrapped:
        """Count the memory of a result, unless it is a view of what is known."""
        owner = _owner(value)
        if id(owner) not in self._alive:
            self._keep(owner, owner.nbytes)
            self.held += owner.nbytes
            self.tally.written += owner.nbytes
            self.tally.peak = max(self.tally.peak, self.held - self._base)
            self.tally.shapes.add(value.shape)
        return Counted(value, self)

    def _keep(self, owner: Any, size: int) -> None:
        number = id(owner)

        def gone(_: Any) -> None:
            del self._alive[number]
            self.held -= size

        self._alive[number] = (weakref.ref(owner, gone), size)

    def see(self, name: str, given: tuple[Any, ...], result: Any) -> None:
        """Count the arithmetic of an operation."""
        if name == "matmul":
            self.tally.products += 2 * given[0].shape[-1] * result.size
        elif name == "sparse_product":
            _, _, data, x = given
            self.tally.products += 2 * data.size * x.shape[-1]
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


@contextmanager
def counting() -> Iterator[Count]:
    """Count the work of all arrays that come from `Count.array`, with one worker."""
    with Count().active() as count:
        yield count
