"""Packed monomials: every product of p of the numbers x_1, ..., x_D once, and the adjoint.

Two maps of a vector, one for queries and one for keys, whose inner product is a power::

    phi(x)_m = x^m,   psi(y)_m = y^m / m!,   phi(x) . psi(y) = (x . y)^p / p!

over all multi-indices m of degree p (x^m is the product of the x_a^m_a, m! that of the m_a!). The weights stand on one
side only; y^r / r! is known as a divided power. There are C(D + p - 1, p) of them, where the products in all orders are
D^p: 2080 in place of 4096 for p = 2 and D = 64.

A monomial is one of a degree less times its last number, so that all of a degree are two selections of rows and a
product of whole arrays. The adjoint needs no list of what each number is part of, for divided powers are their own
derivatives::

    d psi_m / d y_a = psi_(m - e_a),    dy_a = sum over n of degree p - 1 of psi_n dpsi_(n + e_a)

and phi_m = m! psi_m.

Letters: x (..., D, c) has a column for each token, f is a number of monomials.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

from refattn.xp import Array, constants, namespace

ROWS = 1024
"""Rows of the highest degree that are made at once, and rows that the adjoint selects at once: they are used up while
they are still in the cache, and no array is so large that its memory goes back to the system."""


def count(width: int, lowest: int, degree: int) -> int:
    """Return how many monomials of `width` numbers have a degree from `lowest` to `degree`."""
    return sum(math.comb(width + r - 1, r) for r in range(lowest, degree + 1))


def pieces(width: int, lowest: int, degree: int) -> Iterator[slice]:
    """Yield where each piece of `monomials` is among all of them."""
    start = 0
    for r in range(lowest, degree + 1):
        stop = start + count(width, r, r)
        step = ROWS if r == degree else stop - start
        yield from (slice(first, min(first + step, stop)) for first in range(start, stop, step))
        start = stop


def monomials(x: Array, lowest: int, degree: int, *, divided: bool) -> Iterator[Array]:
    """Yield the monomials of the columns of x (..., D, c) with degrees from `lowest` to `degree`, in that order.

    `divided` divides each by its m!. What is yielded are `pieces` (..., f, c), one below the other.
    """
    powers = _powers(x, degree - 1, divided)
    yield from powers[lowest:]
    if degree < 2:
        yield x if degree else namespace(x).ones_like(x[..., :1, :])
        return
    table, shares = _table(x.shape[-2], degree), _shares(x, degree, divided)
    for first in range(0, len(table.parent), ROWS):
        yield _product(powers[-1], shares, table, slice(first, first + ROWS), divided)


def monomials_backward(x: Array, lowest: int, degree: int, d_monomials: Array, *, divided: bool) -> Array:
    """Return the gradient of x for that of `monomials`, (..., f, c)."""
    xp, width = namespace(x), x.shape[-2]
    powers = _powers(x, degree - 1, divided=True)
    d_x, stop = xp.zeros_like(x), d_monomials.shape[-2]
    for r in range(degree, max(lowest, 1) - 1, -1):
        start = stop - count(width, r, r)
        d_power, stop = d_monomials[..., start:stop, :], start
        if r > 1:
            table = _table(width, r)
            if not divided:
                factorial = constants(table.factorial, xp.float32, x)
                d_power = d_power * xp.astype(factorial, x.dtype)[:, None]
            # forward: power = all x^m / m! of degree r
            d_power = _pull(powers[r - 1], d_power, table)
        d_x = d_x + d_power
    return d_x


@dataclass(frozen=True)
class _Table:
    """Where the monomials of one degree come from; those of a degree are in lexicographic order.

    They are arrays of Python's own, whose memory every library reads as it is, 32 bits a number.

    Attributes
    ----------
    parent, last
        Of each: it is the monomial of a degree less in the row `parent`, times the number `last`, its largest.
    share
        `last` for divided powers, in x / 1, x / 2, ... below each other.
    above
        For each number the rows of its products with all monomials of a degree less, one number after the other.
    factorial
        Of each: m!.
    """

    parent: array[int]
    last: array[int]
    share: array[int]
    above: array[int]
    factorial: array[float]


@cache
def _table(width: int, degree: int) -> _Table:
    """Return the table of a degree of at least 2."""
    own, less = (list(combinations_with_replacement(range(width), r)) for r in (degree, degree - 1))
    row_of, row_of_less = ({numbers: row for row, numbers in enumerate(all_of)} for all_of in (own, less))
    above = (row_of[tuple(sorted((*numbers, a)))] for a in range(width) for numbers in less)
    return _Table(
        parent=array("i", [row_of_less[numbers[:-1]] for numbers in own]),
        last=array("i", [numbers[-1] for numbers in own]),
        share=array("i", [numbers[-1] + width * (numbers.count(numbers[-1]) - 1) for numbers in own]),
        above=array("i", above),
        factorial=array("f", [math.prod(map(math.factorial, Counter(numbers).values())) for numbers in own]),
    )


def _powers(x: Array, degree: int, divided: bool) -> list[Array]:
    """Return all monomials of each degree from 0 to `degree`."""
    powers = [namespace(x).ones_like(x[..., :1, :]), x][: degree + 1]
    shares = _shares(x, degree, divided)
    for r in range(2, degree + 1):
        powers.append(_product(powers[-1], shares, _table(x.shape[-2], r), slice(None), divided))
    return powers


def _shares(x: Array, degree: int, divided: bool) -> Array:
    """Return x / 1, x / 2, ... below each other: what a divided power of a degree less is multiplied by; or x alone."""
    return namespace(x).concat([x / n for n in range(1, degree + 1)], axis=-2) if divided and degree > 1 else x


def _product(lower: Array, shares: Array, table: _Table, rows: slice, divided: bool) -> Array:
    """Return some rows of the monomials of a degree; `lower` are all of a degree less."""
    power = _select(lower, table.parent[rows])
    power *= _select(shares, (table.share if divided else table.last)[rows])
    return power


def _pull(lower: Array, d_power: Array, table: _Table) -> Array:
    """Return the gradient of x for that of its divided powers of one degree; `lower` are those of a degree less."""
    xp = namespace(lower)
    lead, (below, tokens) = lower.shape[:-2], lower.shape[-2:]
    step, parts = max(1, ROWS // below) * below, []
    for first in range(0, len(table.above), step):
        d_above = _select(d_power, table.above[first : first + step])
        d_above = xp.reshape(d_above, (*lead, d_above.shape[-2] // below, below, tokens))
        d_above *= lower[..., None, :, :]
        parts.append(xp.sum(d_above, axis=-2))
    return parts[0] if len(parts) == 1 else xp.concat(parts, axis=-2)


def _select(x: Array, rows: array[int]) -> Array:
    """Return rows of x (..., f, c) in a given order."""
    xp = namespace(x)
    return xp.take(x, constants(rows, xp.int32, x), axis=-2)
