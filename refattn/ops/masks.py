"""Which query may attend which key.

Masks are boolean, True = may attend. A causal mask is aligned at the bottom right unless told otherwise: the last query
sees every key, whatever the two lengths are, as in decoding with a cache.

A band is a causal mask or a window: query i may attend keys i + first to i + last. Each of the two is a number, or one
for each batch element, (b, 1, 1, 1), or None where there is no such bound; a causal mask is a band with last = offset.

Letters: b batch, i query position, j key position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

from refattn.xp import Array, arange, concrete, namespace, transpose

Causal: TypeAlias = bool | Literal["top_left", "bottom_right"]


def causal_offset(causal: Causal, queries: int, keys: int) -> int | None:
    """Return the offset o for which query i may attend key j where j <= i + o; None where nothing is causal."""
    if causal is False:
        return None
    return 0 if causal == "top_left" else keys - queries


def allowed_pairs(mask: Array | None, offset: int | None, queries: int, keys: int, like: Array) -> Array | None:
    """Return which query may attend which key, broadcastable to (..., i, j), or None where every pair may attend."""
    return band_pairs(mask, None, offset, None, None, queries, keys, like)


def allowed_in_tile(
    mask: Array | None, offset: int | None, rows: tuple[int, int], columns: tuple[int, int], like: Array
) -> Array | None:
    """Return `allowed_pairs` of one tile.

    Parameters
    ----------
    mask
        Boolean, with each of its last two axes of size 1 or of the full length; True = may attend.
    offset
        What `causal_offset` returned.
    rows, columns
        First and last-plus-one position of the tile's queries and keys.
    like
        An array on the device where the result shall be.
    """
    if mask is not None:
        mask = part_of(mask, rows, columns)
    shifted = None if offset is None else offset + rows[0] - columns[0]
    return allowed_pairs(mask, shifted, rows[1] - rows[0], columns[1] - columns[0], like)


def part_of(x: Array, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
    """Return a tile of x (..., i, j); an axis of 1 is kept."""
    i = slice(*rows) if x.shape[-2] != 1 else slice(0, 1)
    j = slice(*columns) if x.shape[-1] != 1 else slice(0, 1)
    return x[..., i, j]


def band_pairs(
    mask: Array | None,
    first: int | Array | None,
    last: int | Array | None,
    q_lengths: Array | None,
    k_lengths: Array | None,
    queries: int,
    keys: int,
    like: Array,
) -> Array | None:
    """Return which query may attend which key, broadcastable to (b, h, i, j), or None where every pair may attend.

    Queries and keys from their lengths (b,) on do not exist: nothing attends them, and they attend nothing.
    """
    allowed = mask
    if last is not None and not (isinstance(last, int) and keys - 1 <= last):
        allowed = both(allowed, arange(0, keys, like) <= arange(0, queries, like)[:, None] + last)
    if first is not None and not (isinstance(first, int) and first <= 1 - queries):
        allowed = both(allowed, arange(0, keys, like) >= arange(0, queries, like)[:, None] + first)
    if q_lengths is not None:
        allowed = both(allowed, existing(q_lengths, queries, like))
    if k_lengths is not None:
        allowed = both(allowed, transpose(existing(k_lengths, keys, like)))
    return allowed


def both(mask: Array | None, other: Array) -> Array:
    """Return what both masks allow; None allows all."""
    return other if mask is None else mask & other


def existing(lengths: Array | None, size: int, like: Array) -> Array | None:
    """Return which of `size` tokens are below the lengths (b,), as (b, 1, size, 1); None where all are."""
    return None if lengths is None else arange(0, size, like)[:, None] < lengths[:, None, None, None]


class Band:
    """Which pairs the tiles of one call hold: it leaves out blocks of keys, and makes each triangle once.

    Parameters
    ----------
    first, last, q_lengths, k_lengths
        As in `band_pairs`.
    like
        An array on the device where masks shall be.

    Attributes
    ----------
    each
        Whether batch elements differ.
    """

    def __init__(
        self,
        first: int | Array | None,
        last: int | Array | None,
        q_lengths: Array | None,
        k_lengths: Array | None,
        like: Array,
    ) -> None:
        self.first, self.last = first, last
        self.lengths = q_lengths, k_lengths
        self._like = like
        self._least, self._most = _extreme(first, "min"), _extreme(last, "max")
        self._queries, self._keys = (_extreme(lengths, "max") for lengths in self.lengths)
        self.each = any(x is not None and not isinstance(x, int) for x in (first, last, *self.lengths))
        self._triangles: dict[tuple[int, int, int], Array | None] = {}

    def blocks(self, keys: int, rows: tuple[int, int], width: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks of keys that some of the rows may attend; they start at multiples of their width."""
        if self._queries is not None and rows[0] >= self._queries:
            return
        most = keys if self._keys is None else min(self._keys, keys)
        stop = most if self._most is None else min(max(rows[1] + self._most, 0), most)
        start = 0 if self._least is None else max(rows[0] + self._least, 0) // width * width
        if self.each:
            # Whole blocks: where another sequence of the batch ends does not change how this one's sums are cut.
            stop = min(-(-stop // width) * width, keys)
        for at in range(start, stop, width):
            yield at, min(at + width, stop)

    def allowed(
        self, mask: Array | None, rows: tuple[int, int], columns: tuple[int, int], batch: slice = slice(None)
    ) -> Array | None:
        """Return `band_pairs` of a tile (b, g, r, i, j), of the batch elements that are named."""
        if mask is not None:
            mask = part_of(mask, rows, columns)
        if mask is None and not self.each:
            if self.first is None and self.last is None:
                return None
            # Tiles that the diagonals cross in the same way share a mask.
            key = (rows[1] - rows[0], columns[1] - columns[0], rows[0] - columns[0])
            if key not in self._triangles:
                self._triangles[key] = self._pairs(None, rows, columns, batch)
            return self._triangles[key]
        return self._pairs(mask, rows, columns, batch)

    def _pairs(self, mask: Array | None, rows: tuple[int, int], columns: tuple[int, int], batch: slice) -> Array | None:
        at, sizes = rows[0] - columns[0], (rows[1] - rows[0], columns[1] - columns[0])
        first, last = _moved(self.first, at, batch), _moved(self.last, at, batch)
        if not self.each:
            return band_pairs(mask, first, last, None, None, *sizes, self._like)
        q_lengths, k_lengths = (
            None if x is None else x[batch] - start
            for x, start in zip(self.lengths, (rows[0], columns[0]), strict=True)
        )
        own = band_pairs(None, first, last, q_lengths, k_lengths, *sizes, self._like)
        if own is None:
            return mask
        return both(mask, own[:, :, None, ...] if len(own.shape) == 4 else own)


def _moved(bound: int | Array | None, by: int, batch: slice) -> int | Array | None:
    """Return a bound of the batch elements that are named, as a tile that starts elsewhere has it."""
    if bound is None:
        return None
    return bound + by if isinstance(bound, int) else bound[batch, ...] + by


def _extreme(x: int | Array | None, which: str) -> int | None:
    """Return the smallest or largest of some whole numbers; None where there are none, or they are not known yet."""
    if x is None or isinstance(x, int):
        return x
    if 0 in x.shape:
        return 0
    found = getattr(namespace(x), which)(x)
    return None if concrete(found == found) is None else int(found)


def own_pairs(n: int, like: Array) -> Array:
    """Tell of n tokens where i = j, (n, n)."""
    at = arange(0, n, like)
    return at[:, None] == at[None, :]


def earlier_pairs(n: int, like: Array) -> Array:
    """Tell of n tokens where j < i, (n, n)."""
    at = arange(0, n, like)
    return at[None, :] < at[:, None]


def where_allowed(allowed: Array | None, x: Array, otherwise: float) -> Array:
    """Return x, another number where it is not allowed; None allows all."""
    return x if allowed is None else namespace(x).where(allowed, x, otherwise)


def largest_of_rows(x: Array, allowed: Array | None) -> Array:
    """Return 1 where x (b, h, i, j) is the largest of its row with j in A(i), the first of several, else 0."""
    xp = namespace(x)
    known = where_allowed(allowed, x, -math.inf)  # (b, h, i, j)
    best = xp.argmax(known, axis=-1, keepdims=True) if x.shape[-1] else 0  # (b, h, i, 1)
    chosen = arange(0, x.shape[-1], x) == best  # (b, h, i, j)
    return xp.astype(chosen if allowed is None else chosen & allowed, x.dtype)
