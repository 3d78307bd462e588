"""Which query may attend which key.

Masks are boolean, True = may attend. A causal mask is aligned at the bottom right unless told otherwise: the last query
sees every key, whatever the two lengths are, as in decoding with a cache.

Letters: i query position, j key position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from refattn.xp import Array, arange, namespace

Causal: TypeAlias = bool | Literal["top_left", "bottom_right"]


def causal_offset(causal: Causal, queries: int, keys: int) -> int | None:
    """Return the offset o for which query i may attend key j where j <= i + o; None where nothing is causal."""
    if causal is False:
        return None
    return 0 if causal == "top_left" else keys - queries


def allowed_pairs(
    mask: Array | None, offset: int | None, rows: tuple[int, int], columns: tuple[int, int], like: Array
) -> Array | None:
    """Return the mask of one tile, or None where every pair may attend.

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

    Returns
    -------
    Array or None
        Boolean, broadcastable to ``(..., i, j)`` of the tile.
    """
    tile = None
    if mask is not None:
        i = slice(*rows) if mask.shape[-2] != 1 else slice(0, 1)
        j = slice(*columns) if mask.shape[-1] != 1 else slice(0, 1)
        tile = mask[..., i, j]
    # A tile that lies wholly in the past of its first row needs no causal mask.
    if offset is not None and columns[1] - 1 > rows[0] + offset:
        i = arange(rows[0], rows[1], like)[:, None]
        j = arange(columns[0], columns[1], like)[None, :]
        past = j <= i + offset
        tile = past if tile is None else tile & past
    return tile


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
            return allowed_pairs(mask, self.offset, rows, columns, self._like)
        # Tiles that the diagonal crosses in the same way share a mask.
        key = (rows[1] - rows[0], columns[1] - columns[0], rows[0] - columns[0])
        if key not in self._triangles:
            self._triangles[key] = allowed_pairs(None, self.offset, rows, columns, self._like)
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
