"""Dual arrays whose every operation errs as rounding does: what honest arithmetic may do to a derivative.

Each result and each tangent gets a random error of the size of its rounding: the unit roundoff times the sum of the
sizes of the terms that it is a sum of. Factorisations err as if their arguments did (a small backward error). A maximum
is a constant, whose tangent is 0: where it is taken off so that exp cannot overflow that makes no difference but in the
rounding, for an implementation that leaves it out has a difference of large numbers there. So errors are those beside a
run with a unit of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np

from refattn import philox
from refattn.instruments.dual import Dual, Tangents
from refattn.instruments.wrapper import Wrapped

SIGMA = 3**-0.5
"""Root mean square of a rounding error in units of the unit roundoff."""

EXACT = frozenset(
    "abs asarray astype broadcast_arrays broadcast_to clip concat copysign diagonal expand_dims flip full_like getitem "
    "imag matrix_transpose max maximum min minimum moveaxis neg negative permute_dims positive real repeat reshape "
    "roll sort squeeze stack take take_along_axis tile tril triu unstack where".split()
)
"""What chooses and moves numbers, and rounds none."""

FACTORISATIONS = frozenset("cholesky det eigh eigvalsh inv pinv qr slogdet solve svd svdvals matrix_norm".split())

SUMS = frozenset("sum mean cumulative_sum trace vector_norm".split())

PLACES = 4096

PRODUCTS = frozenset("matmul vecdot tensordot outer multiply divide sparse_product".split())


class Rounded(Tangents):
    """Takes tangents along, and lets every operation err."""

    name: ClassVar[str] = "rounded"
    arrays: ClassVar[type[Wrapped]] = Dual

    def __init__(self, unit: float, seed: int, draw: int) -> None:
        self.unit, self.seed, self.draw, self.count = unit, seed, draw, 0

    def call(self, name: str, function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name in FACTORISATIONS:
            return super().call(name, function, tuple(map(self._err, given)), options)
        made = super().call(name, function, given, options)
        if name == "max" and _is(made):
            return Dual(made.value, self)
        if name in EXACT or not isinstance(made, Dual) or made.tangent is None:
            return made
        if name in (*SUMS, *PRODUCTS):
            # The same of the sizes; the tangent of a quotient is a difference of two terms, and that of sizes a sum.
            signs = (1.0, -1.0 if name == "divide" else 1.0, *(1.0 for _ in given))
            sizes = tuple(map(self._sizes, given, signs))
            size = super().call(name, function, sizes, options)
            return self._err(made, size.value, size.tangent)
        return self._err(made)

    def _err(self, x: Any, value: Any = None, tangent: Any = None) -> Any:
        if not _is(x):
            return x
        sizes = (np.abs(x.value) if value is None else value, np.abs(x.tangent) if tangent is None else tangent)
        near, moved = self._near(x.value, sizes[0]), self._near(x.tangent, sizes[1])
        # A constant, such as a scale, is rounded once for all elements.
        self.count += 1
        shared = 1.0 + self.unit * _signs()[int(_places(self.seed, self.draw)[self.count % PLACES]) % len(_signs())]
        return Dual(near * shared, self, moved * shared)

    def _sizes(self, x: Any, sign: float) -> Any:
        if _is(x):
            return Dual(np.abs(x.value), self, sign * np.abs(x.tangent))
        return abs(x) if isinstance(x, int | float) and not isinstance(x, bool) else x

    def _near(self, x: Any, size: Any) -> Any:
        self.count += 1
        known, places = _signs(), _places(self.seed, self.draw)
        start = int(places[self.count % PLACES]) % max(1, len(known) - x.size)
        signs = np.reshape(np.resize(known[start : start + x.size], x.size), x.shape)
        with np.errstate(all="ignore"):
            return np.where(np.isfinite(x), x + self.unit * signs * np.where(np.isfinite(size), size, 0.0), x)


@cache
def _signs() -> Any:
    """Return many random signs; operations begin at random places in them, for drawing takes longer than computing."""
    bits = np.unpackbits(philox.words(1 << 15, seed=0, purpose="rounded.signs").astype("<u4").view(np.uint8))
    return np.where(bits == 0, SIGMA, -SIGMA)


@lru_cache(maxsize=64)
def _places(seed: int, draw: int) -> Any:
    return philox.words(PLACES, seed=seed, purpose="rounded.places", step=draw)


def _is(x: Any) -> bool:
    return isinstance(x, Dual) and x.tangent is not None


@contextmanager
def rounded(unit: float, seed: int, draw: int) -> Iterator[Rounded]:
    """Let all operations err on the arrays that come from `Rounded.array`, by one draw of random errors."""
    with Rounded(unit, seed, draw).active() as found:
        yield found
