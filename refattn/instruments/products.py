"""Arrays whose matrix products are of other numbers than they were given: those that a matrix unit rounds them to.

A function says what becomes of what is multiplied; everything else is NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from refattn.instruments.wrapper import Instrument, Wrapped, plain


class Factor(Wrapped):
    """An array that is rounded before it is multiplied."""


class Products(Instrument):
    """Changes both sides of every matrix product by a function of NumPy's arrays."""

    name: ClassVar[str] = "products"
    arrays: ClassVar[type[Wrapped]] = Factor

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.of = change

    def call(self, name: str, function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name == "matmul":
            given = tuple(self.of(plain(x)) for x in given)
        return super().call(name, function, given, options)


@contextmanager
def products(change: Callable[[Any], Any]) -> Iterator[Products]:
    """Let matrix products of the arrays that come from `Products.array` be those of changed ones.

    >>> import numpy as np, refattn as ra
    >>> from refattn.golden.storage_types import round_to
    >>> from refattn.instruments.products import products
    >>> x = np.full((1, 1, 2, 4), 1.0 + 2.0**-12)
    >>> with products(lambda x: round_to(x, "tf32")) as unit:
    ...     out, _ = ra.softmax.forward(*map(unit.array, (x, x, x)))
    >>> float(out.value[0, 0, 0, 0])
    1.0
    """
    with Products(change).active() as found:
        yield found
