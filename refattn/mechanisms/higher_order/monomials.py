"""Packed monomials: every product of p of the numbers x_1, ..., x_D once, and the adjoint.

Two maps of a vector, one for queries and one for keys, whose inner product is a power::

    phi(x)_m = x^m,   psi(y)_m = y^m / m!,   phi(x) . psi(y) = (x . y)^p / p!

over all multi-indices m of degree p (x^m is the product of the x_a^m_a, m! that of the m_a!). The weights stand on one
side only; y^r / r! is known as a divided power. There are C(D + p - 1, p) of them, where the products in all orders are
D^p: 2080 in place of 4096 for p = 2 and D = 64.

They are made by halves. A product of degree p of the numbers L and R is one of degree a of L times one of degree p - a
of R::

    Sym^p(L + R) = sum over a of Sym^a(L) x Sym^(p-a)(R)

so that a rectangle of products is one multiplication of whole arrays, and the same rectangle of all blocks of equal
size is the same multiplication: D = 64 takes 7 of them for p = 2, not 64.

Large pieces of them stay as they are made: to put them into one array would take as long as to make them, and what is
done with them, products with matrices, is done as well with each piece. Small ones are put together.

Letters: x (..., D, c) has a column for each token. Inside, blocks of coordinates stand on an axis of their own:
(..., blocks, D, c). Parts are a list of arrays (..., blocks, f, c) that stand for one with all their monomials; the
blocks of a part may be several times those of x, which a reshape to those of x puts below each other.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate, pairwise

from refattn.xp import Array, namespace

Parts = list[Array]
Shapes = tuple[tuple[int, int], ...]
"""How many times the blocks of x each of some parts has, and f."""

SMALL = 256
"""Rows up to which a part is put together with its neighbours."""


def count(width: int, lowest: int, degree: int) -> int:
    """Return how many monomials of `width` numbers have a degree from `lowest` to `degree`."""
    return sum(math.comb(width + r - 1, r) for r in range(lowest, degree + 1))


@cache
def pieces(width: int, lowest: int, degree: int) -> tuple[tuple[int, int], ...]:
    """Return the first and the last-plus-one of the monomials, in their order, that each piece of `monomials` has."""
    return tuple(pairwise(accumulate((_rows(group) for group in _groups(width, lowest, degree)), initial=0)))


def monomials(x: Array, lowest: int, degree: int, *, divided: bool) -> Parts:
    """Return the monomials of the columns of x (..., D, c) with degrees from `lowest` to `degree`, in that order.

    `divided` divides each by its m!. The result is a list of pieces (..., f, c), one below the other.
    """
    xp = namespace(x)
    chosen = [] if lowest else [xp.ones_like(x[..., None, :1, :])]
    if degree:
        powers = _powers(x[..., None, :, :], degree, divided)
        chosen += [part for parts in powers[max(lowest, 1) - 1 :] for part in parts]
    found, start = [], 0
    for group in _groups(x.shape[-2], lowest, degree):
        found.append(_joined(chosen[start : start + len(group)], 1)[..., 0, :, :])
        start += len(group)
    return found


def monomials_backward(x: Array, lowest: int, degree: int, d_monomials: Parts, *, divided: bool) -> Array:
    """Return the gradient of x for that of `monomials`, in the same pieces."""
    if degree == 0:
        return namespace(x).zeros_like(x)
    width = x.shape[-2]
    d_parts: Parts = []
    for d_piece, group in zip(d_monomials, _groups(width, lowest, degree), strict=True):
        d_parts += _cut(d_piece[..., None, :, :], group)
    start = 0 if lowest else 1  # the 1 is constant
    d_powers: list[Parts] = []
    for r in range(1, degree + 1):
        stop = start + (len(_shapes(width, r)) if r >= lowest else 0)
        d_powers.append(d_parts[start:stop])
        start = stop
    return _powers_backward(x[..., None, :, :], d_powers, divided)[..., 0, :, :]


def _powers(x: Array, degree: int, divided: bool) -> list[Parts]:
    """Return the monomials of each degree from 1 on: those within the halves of x, then the products of both."""
    powers: list[Parts] = [[x]]
    if x.shape[-2] == 1:
        for r in range(2, degree + 1):
            power = powers[-1][0] * x
            powers.append([power / r if divided else power])
    elif degree > 1:
        within = _within(x, degree, divided)
        left, right = _factors(x, degree - 1, divided)
        for r in range(2, degree + 1):
            products = (left[a - 1][..., :, None, :] * right[r - a - 1][..., None, :, :] for a in range(1, r))
            powers.append(within[r - 1] + [_rectangle(product) for product in products])
    return powers


def _within(x: Array, degree: int, divided: bool) -> list[Parts]:
    """Return the monomials of each degree within the halves of x. Halves of equal size are blocks beside each other."""
    width = x.shape[-2]
    if width % 2 == 0:
        return _powers(_split(x), degree, divided)
    one, other = (_powers(half, degree, divided) for half in (x[..., : width - 1, :], x[..., width - 1 :, :]))
    return [a + b for a, b in zip(one, other, strict=True)]


def _factors(x: Array, degree: int, divided: bool) -> tuple[list[Array], list[Array]]:
    """Return the monomials of each degree of the left and of the right half of x, each as one array."""
    blocks, width = x.shape[-3:-1]
    if width % 2 == 0:
        lower = [_joined(parts, 2 * blocks) for parts in _powers(_split(x), degree, divided)] if degree > 1 else [x]
        both = [_pairs(part, blocks) for part in lower]
        return [half[..., 0, :, :] for half in both], [half[..., 1, :, :] for half in both]
    halves = (x[..., : width - 1, :], x[..., width - 1 :, :])
    one, other = ([_joined(parts, blocks) for parts in _powers(half, degree, divided)] for half in halves)
    return one, other


def _powers_backward(x: Array, d_powers: list[Parts], divided: bool) -> Array:
    """Return the gradient of x for those of its `_powers`; no parts stand for a gradient of 0."""
    xp = namespace(x)
    degree = len(d_powers)
    d_x = d_powers[0][0] if d_powers[0] else xp.zeros_like(x)
    if x.shape[-2] == 1:
        power = xp.ones_like(x)
        for r in range(2, degree + 1):
            # forward: x^r / r!, or x^r
            power = power * x / (r - 1) if divided else power * x
            if d_powers[r - 1]:
                d_x = d_x + d_powers[r - 1][0] * (power if divided else r * power)
        return d_x
    if degree == 1:
        return d_x
    left, right = _factors(x, degree - 1, divided)
    d_left: list[Array | None] = [None] * degree
    d_right: list[Array | None] = [None] * degree
    for r in range(2, degree + 1):
        for a, d_product in enumerate(d_powers[r - 1][1 - r :], start=1):
            # forward: product = left of degree a * right of degree r - a
            one, other = left[a - 1], right[r - a - 1]
            d_rectangle = xp.reshape(d_product, (*one.shape[:-1], *other.shape[-2:]))
            d_left[a - 1] = _sum(d_left[a - 1], xp.sum(d_rectangle * other[..., None, :, :], axis=-2))
            d_right[r - a - 1] = _sum(d_right[r - a - 1], xp.sum(d_rectangle * one[..., :, None, :], axis=-3))
    d_within = [[], *(parts[: 1 - r] for r, parts in enumerate(d_powers[1:], start=2))]
    return d_x + _halves_backward(x, d_within, d_left, d_right, divided)


def _halves_backward(
    x: Array, d_within: list[Parts], d_left: list[Array | None], d_right: list[Array | None], divided: bool
) -> Array:
    """Return the gradient of x for those of what is `_within` its halves, and of its `_factors`."""
    xp = namespace(x)
    width = x.shape[-2]
    if width % 2 == 0:
        both = [
            None if a is None or b is None else _rectangle(xp.stack([a, b], axis=-3), halves=True)
            for a, b in zip(d_left, d_right, strict=True)
        ]
        d_halves = _powers_backward(_split(x), _added(d_within, both, width // 2), divided)
        return xp.reshape(d_halves, x.shape)
    first = [len(_shapes(width - 1, r)) for r in range(1, len(d_within) + 1)]
    d_one = _added([parts[:n] for parts, n in zip(d_within, first, strict=True)], d_left, width - 1)
    d_other = _added([parts[n:] for parts, n in zip(d_within, first, strict=True)], d_right, 1)
    halves = (x[..., : width - 1, :], d_one), (x[..., width - 1 :, :], d_other)
    return xp.concat([_powers_backward(half, d_half, divided) for half, d_half in halves], axis=-2)


@cache
def _shapes(width: int, degree: int) -> Shapes:
    """Return the parts of one degree in `_powers`: how many times the blocks of x they have, and f."""
    if width == 1 or degree == 1:
        return ((1, width),)
    half, rest = (width // 2, width // 2) if width % 2 == 0 else (width - 1, 1)
    within = tuple((2 * times, f) for times, f in _shapes(half, degree))
    if width % 2:
        within = _shapes(half, degree) + _shapes(rest, degree)
    return within + tuple((1, count(half, a, a) * count(rest, degree - a, degree - a)) for a in range(1, degree))


@cache
def _groups(width: int, lowest: int, degree: int) -> tuple[Shapes, ...]:
    """Return the parts of all degrees by the piece in which they are."""
    groups: list[Shapes] = []
    for shape in [((1, 1),) if r == 0 else _shapes(width, r) for r in range(lowest, degree + 1)]:
        for part in shape:
            if groups and _rows((part,)) <= SMALL and _rows(groups[-1][-1:]) <= SMALL:
                groups[-1] += (part,)
            else:
                groups.append((part,))
    return tuple(groups)


def _rows(shapes: Shapes) -> int:
    return sum(times * f for times, f in shapes)


def _cut(whole: Array, shapes: Shapes) -> Parts:
    """(..., blocks, count, c) -> parts of these shapes: the adjoint of `_joined`."""
    stops = accumulate((times * f for times, f in shapes), initial=0)
    lead, blocks, tokens = whole.shape[:-3], whole.shape[-3], whole.shape[-1]
    rows = [whole[..., a:b, :] for a, b in pairwise(stops)]
    xp = namespace(whole)
    return [xp.reshape(row, (*lead, blocks * n, f, tokens)) for row, (n, f) in zip(rows, shapes, strict=True)]


def _added(parts: list[Parts], wholes: list[Array | None], width: int) -> list[Parts]:
    """Return parts by degree, plus arrays that stand for all of a degree; either may be missing."""
    result = []
    for r, (own, whole) in enumerate(zip(parts, wholes, strict=True), start=1):
        more = [] if whole is None else _cut(whole, _shapes(width, r))
        result.append([a + b for a, b in zip(own, more, strict=True)] if own and more else own or more)
    return result


def _joined(parts: Parts, blocks: int) -> Array:
    """Return the parts of one or several degrees as (..., blocks, f, c)."""
    xp = namespace(parts[0])
    lead, tokens = parts[0].shape[:-3], parts[0].shape[-1]
    rows = [
        p if p.shape[-3] == blocks else xp.reshape(p, (*lead, blocks, p.shape[-3] * p.shape[-2] // blocks, tokens))
        for p in parts
    ]
    return rows[0] if len(rows) == 1 else xp.concat(rows, axis=-2)


def _split(x: Array) -> Array:
    """(..., blocks, D, c) -> (..., 2 blocks, D / 2, c)."""
    blocks, width, tokens = x.shape[-3:]
    return namespace(x).reshape(x, (*x.shape[:-3], 2 * blocks, width // 2, tokens))


def _pairs(x: Array, blocks: int) -> Array:
    """(..., blocks, 2 f, c) or (..., 2 blocks, f, c) -> (..., blocks, 2, f, c)."""
    size = x.shape[-3] * x.shape[-2] // (2 * blocks)
    return namespace(x).reshape(x, (*x.shape[:-3], blocks, 2, size, x.shape[-1]))


def _rectangle(x: Array, *, halves: bool = False) -> Array:
    """(..., blocks, f, g, c) -> (..., blocks, f g, c); for halves (..., blocks, 2, f, c) -> (..., 2 blocks, f, c)."""
    lead, (a, b, f, tokens) = x.shape[:-4], x.shape[-4:]
    shape = (a * b, f) if halves else (a, b * f)
    return namespace(x).reshape(x, (*lead, *shape, tokens))


def _sum(a: Array | None, b: Array) -> Array:
    return b if a is None else a + b
