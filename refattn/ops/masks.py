"""Which query may attend which key.

Masks are boolean, True = may attend. A causal mask is aligned at the bottom right unless told otherwise: the last query
sees every key, whatever the two lengths are, as in decoding with a cache.

Letters: i query position, j key position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

from refattn.xp import Array, arange, namespace

Causal: TypeAlias = bool | Literal["top_left", "bottom_right"]


def causal_offset(causal: Causal, queries: int, keys: int) -> int | None:
    """Return the offset o for which query i may attend key j where j <= i + o; None where nothing is causal."""
    if causal is False:
        return None
    return 0 if causal == "top_left" else keys - queries


def allowed_pairs(mask: Array | None, offset: int | None, queries: int, keys: int, like: Array) -> Array | None:
    """Return which query may attend which key, broadcastable to (..., i, j), or None where every pair may attend."""
    if offset is None or keys - 1 <= offset:
        return mask
    past = arange(0, keys, like)[None, :] <= arange(0, queries, like)[:, None] + offset
    return past if mask is None else mask & past


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
        i = slice(*rows) if mask.shape[-2] != 1 else slice(0, 1)
        j = slice(*columns) if mask.shape[-1] != 1 else slice(0, 1)
        mask = mask[..., i, j]
    shifted = None if offset is None else offset + rows[0] - columns[0]
    return allowed_pairs(mask, shifted, rows[1] - rows[0], columns[1] - columns[0], like)


class Future:
    """What a causal mask hides from the tiles of one call: it leaves out blocks of keys, and makes each triangle once.

    Parameters
    ----------
    offset
        What `causal_offset` returned.
    like
        An array on the device where masks shall be.
    """

    def __init__(self, offset: int | None, like: Array) -> None:
        self.offset = offset
        self._like = like
        self._triangles: dict[tuple[int, int, int], Array | None] = {}

    def blocks(self, keys: int, rows: tuple[int, int], width: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks of keys that some of the rows may attend."""
        stop = keys if self.offset is None else min(max(rows[1] + self.offset, 0), keys)
        for start in range(0, stop, width):
            yield start, min(start + width, stop)

    def allowed(self, mask: Array | None, rows: tuple[int, int], columns: tuple[int, int]) -> Array | None:
        """Return `allowed_pairs` of a tile."""
        if mask is not None or self.offset is None:
            return allowed_in_tile(mask, self.offset, rows, columns, self._like)
        # Tiles that the diagonal crosses in the same way share a mask.
        key = (rows[1] - rows[0], columns[1] - columns[0], rows[0] - columns[0])
        if key not in self._triangles:
            self._triangles[key] = allowed_in_tile(None, self.offset, rows, columns, self._like)
        return self._triangles[key]


def own_pairs(n: int, like: Array) -> Array:
    """Tell of n tokens where i = j, (n, n)."""
    return arange(0, n, like)[:, None] == arange(0, n, like)[None, :]


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
