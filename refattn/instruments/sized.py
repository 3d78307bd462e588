"""Arrays that carry the size of their rounding error: what a sum has lost is relative to the terms that it summed.

Beside its value each array has the square of such a size, in units of the unit roundoff, for each element. An operation
adds what it rounds itself to what its arguments bring along, as independent errors add up: squares are added, and what
a function multiplies an error by is squared. Inputs are exact.

A result that is rounded once errs relative to its value. A sum of n terms is rounded n times, each time relative to a
partial sum. Partial sums of terms t wander about as far as |sum t| + sqrt(sum t^2), and n independent errors of that
size add up to sqrt(n) times it, whatever the order of the terms::

    size = sqrt(n) (|sum t| + sqrt(sum t^2))

A solution of M x = y errs as if M had been rounded: by |M^-1| |M| |x|, element by element. A maximum is taken to be
exact: it is taken off so that exp cannot overflow, which makes no difference to the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from refattn.instruments.rounded import EXACT
from refattn.instruments.rules import CONSTANT, RULES, SLOPES, times
from refattn.instruments.wrapper import Instrument, Wrapped, plain

SUMS = frozenset("sum mean cumulative_sum trace matmul vecdot".split())


class Sized(Wrapped):
    """An array and the square of the size of its rounding error; 0.0 where it is exact."""

    def __init__(self, value: Any, instrument: Instrument, square: Any = 0.0) -> None:
        super().__init__(value, instrument)
        self.square = square


class Sizes(Instrument):
    """Takes the sizes of rounding errors along.

    Attributes
    ----------
    resting
        Whether operations are done as if they were exact, which takes less time.
    """

    name: ClassVar[str] = "sizes"
    arrays: ClassVar[type[Wrapped]] = Sized
    resting = False

    def call(self, name: str, function: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Do an operation; give its result the size of its error."""
        self.check_active()
        values, named = tuple(map(plain, given)), {key: plain(value) for key, value in options.items()}
        result = function(*values, **named)
        if self.resting or name in CONSTANT or not _is_rounded(result):
            return self.wrap(result)
        squares = list(map(_square, given))
        brought = _brought(name, result, values, named, squares) if any(map(_errs, squares)) else 0.0
        return self._sized(result, brought, 0.0 if name in EXACT else _own(name, function, result, values, named))

    def _sized(self, result: Any, brought: Any, own: Any) -> Any:
        if isinstance(result, tuple | list):
            parts = [self._sized(x, _part(brought, n), _part(own, n)) for n, x in enumerate(result)]
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        value, square = np.asarray(result), brought + own
        if isinstance(square, float) and square == 0.0:
            return Sized(value, self)
        square = np.asarray(square)
        if not math.isfinite(square.sum()):
            square = np.where(np.isfinite(square), square, 0.0)
        return Sized(value, self, square if square.shape == value.shape else np.broadcast_to(square, value.shape))


def _part(squares: Any, n: int) -> Any:
    return squares[n] if isinstance(squares, tuple | list) else squares


def _is_rounded(x: Any) -> bool:
    if isinstance(x, tuple | list):
        return any(map(_is_rounded, x))
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind == "f"


def _errs(square: Any) -> bool:
    return any(map(_errs, square)) if isinstance(square, list) else isinstance(square, np.ndarray)


def _square(x: Any) -> Any:
    """Return the squares of an argument, 0.0 if it is exact; of a list the squares of each."""
    if isinstance(x, tuple | list):
        return list(map(_square, x))
    return x.square if isinstance(x, Sized) else 0.0


def _brought(name: str, r: Any, given: tuple[Any, ...], options: dict[str, Any], t: list[Any]) -> Any:
    """Return the squares of what errors of the arguments, of squares `t`, do to a result."""
    if name in SLOPES:
        return times(SLOPES[name](given[0], r) ** 2, t[0])
    if name in BROUGHT:
        return BROUGHT[name](r, given, t)
    if isinstance(t[0], list):  # the rules of what is joined need arrays
        t = [[np.broadcast_to(square, np.shape(x)) for square, x in zip(t[0], given[0], strict=True)], *t[1:]]
    known = name in EXACT or name in ("add", "sum", "cumulative_sum", "trace")
    return RULES[name](r, given, options, t) if known else 0.0


def _scaled(factor: Any, square: Any) -> Any:
    """Return factor^2 square, 0.0 of what is exact."""
    return factor * factor * square if isinstance(square, np.ndarray) else 0.0


def _of_product(function: Callable[..., Any]) -> Callable[..., Any]:
    def brought(r: Any, given: Any, t: Any) -> Any:
        a, b = given
        left = function(t[0], b * b) if np.ndim(t[0]) else 0.0
        return left + (function(a * a, t[1]) if np.ndim(t[1]) else 0.0)

    return brought


BROUGHT: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("abs", "negative", "neg", "copysign"), lambda r, given, t: t[0]),
    "subtract": lambda r, given, t: t[0] + t[1],
    "multiply": lambda r, given, t: _scaled(given[1], t[0]) + _scaled(given[0], t[1]),
    "divide": lambda r, given, t: (t[0] + _scaled(r, t[1])) / np.square(given[1]),
    "pow": lambda r, given, t: times((given[1] * given[0] ** (given[1] - 1)) ** 2, t[0]),
    "max": lambda r, given, t: 0.0,
    "matmul": _of_product(np.matmul),
    "vecdot": _of_product(np.vecdot),
    "solve": lambda r, given, t: np.linalg.inv(given[0]) ** 2 @ (t[1] + (t[0] @ (r * r) if np.ndim(t[0]) else 0.0)),
}


def _own(name: str, function: Callable[..., Any], r: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the squares of what an operation rounds itself."""
    if name in SUMS:
        return _of_sum(name, function, r, given, options)
    if name == "solve":
        matrix = np.abs(given[0])
        return (np.abs(np.linalg.inv(given[0])) @ (matrix @ np.abs(r)) + np.abs(r)) ** 2
    if isinstance(r, tuple | list):
        return [x * x for x in r]
    return 0.0 if any(_is_exact(name, x) for x in given) else r * r


def _of_sum(name: str, function: Callable[..., Any], r: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    summed = given[0].shape[-1] if name in ("matmul", "vecdot") else given[0].size // max(r.size, 1)
    if name == "cumulative_sum":
        summed = given[0].shape[options.get("axis", 0)]
    if summed <= 1 and name not in ("matmul", "vecdot"):
        return 0.0
    squares = function(*(x * x if isinstance(x, np.ndarray) else x for x in given), **options)
    squares = squares / summed if name == "mean" else squares
    return summed * (np.abs(r) + np.sqrt(squares)) ** 2


def _is_exact(name: str, x: Any) -> bool:
    """Tell whether an operation with a number rounds nothing: 0 is added, or a power of 2 multiplied."""
    if not isinstance(x, int | float):
        return False
    return x == 0.0 if name in ("add", "subtract") else name == "multiply" and abs(math.frexp(x)[0]) in (0.0, 0.5)


@contextmanager
def sizes() -> Iterator[Sizes]:
    """Take the sizes of rounding errors along of all arrays that come from `Sizes.array`.

    >>> import numpy as np
    >>> from refattn.instruments.sized import sizes
    >>> with sizes() as unit:
    ...     x = unit.array(np.asarray([3.0, 4.0, -7.0]))
    ...     product, total = 3.0 * x, np.sum(x)
    >>> np.sqrt(product.square).tolist(), round(float(np.sqrt(total.square)), 3)
    ([9.0, 12.0, 21.0], 14.9)
    """
    with Sizes().active() as found, np.errstate(all="ignore"):
        yield found
