"""Tiles of a pairwise form: how the queries x keys plane is cut, run and put together again.

The cut depends on the shapes and the backend, never on the number of workers, so that any number of workers gives the
same bits. Query heads stand as two axes: g key/value head, r query head within its group.

Letters: b batch, g key/value head, r query head of a group, i query, j key.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from refattn import equations
from refattn.backends import use_workers
from refattn.xp import Array, backend, device, namespace

Task = TypeVar("Task")
Result = TypeVar("Result")

ROWS = 256  # with 512 columns of float32 a tile of one head fills half a megabyte, and stays in a core's cache


@dataclass(frozen=True)
class Tile:
    """A block of rows of some heads: the unit of work that runs on one worker."""

    batch: slice
    heads: slice
    rows: tuple[int, int]

    def of(self, x: Array) -> Array:
        """Return this tile's batch and heads of x (b, g, ...); an axis of size 1 is kept whole."""
        batch = self.batch if x.shape[0] != 1 else slice(0, 1)
        heads = self.heads if x.shape[1] != 1 else slice(0, 1)
        return x[batch, heads, ...]

    def of_rows(self, x: Array) -> Array:
        """Return this tile's batch, heads and rows of x (b, g, r, i, ...)."""
        return self.of(x)[:, :, :, slice(*self.rows), ...]


@dataclass(frozen=True)
class Plan:
    """The cut of one call.

    Attributes
    ----------
    heads
        Tiles that hold all rows of their heads.
    rows
        The same heads, cut further into blocks of rows; head by head.
    columns
        How many keys a tile holds.
    """

    heads: tuple[Tile, ...]
    rows: tuple[Tile, ...]
    columns: int

    def rows_of(self, tile: Tile) -> list[Tile]:
        """Return the blocks of rows of a tile of `heads`."""
        return [part for part in self.rows if (part.batch, part.heads) == (tile.batch, tile.heads)]

    def from_heads(self, task: Callable[[Tile], Sequence[Array]], like: Array) -> list[Array]:
        """Return the arrays (b, g, ...) that a task gives for each of `heads`, those of all heads in one.

        On a pool each goes to its place as soon as it is there, and leaves its memory to the next task.
        """
        if len(self.heads) == 1 or not backend(like).pools:
            return [self.join_heads(list(same)) for same in zip(*run(like, task, self.heads), strict=True)]
        return _placed(task, like, self.heads, self._sizes, lambda tile: (tile.batch, tile.heads, ...))

    def from_rows(self, task: Callable[[Tile], Sequence[Array]], like: Array) -> list[Array]:
        """Return the arrays (b, g, r, i, ...) that a task gives for each of `rows`, all in one, as `from_heads`."""
        if len(self.rows) == 1 or not backend(like).pools:
            return [self.join_rows(list(same)) for same in zip(*run(like, task, self.rows), strict=True)]

        def place(tile: Tile) -> tuple[Any, ...]:
            return tile.batch, tile.heads, slice(None), slice(*tile.rows), ...

        return _placed(task, like, self.rows, (*self._sizes, None, self.heads[0].rows[1]), place)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.heads[-1].batch.stop, self.heads[-1].heads.stop

    def join_rows(self, parts: Sequence[Array]) -> Array:
        """Put the results for `rows`, each (b, g, r, i, ...), together to one array of all rows and heads."""
        per_head = len(self.rows) // len(self.heads)
        whole = [concat(parts[n : n + per_head], axis=3) for n in range(0, len(parts), per_head)]
        return self.join_heads(whole)

    def join_heads(self, parts: Sequence[Array]) -> Array:
        """Put the results for `heads`, each (b, g, ...), together to one array of all heads."""
        per_batch = len({(tile.heads.start, tile.heads.stop) for tile in self.heads})
        batches = [concat(parts[n : n + per_batch], axis=1) for n in range(0, len(parts), per_batch)]
        return concat(batches, axis=0)

    def join_sums(self, parts: Sequence[Array], like: Array) -> Array:
        """Put the sums for `heads` together to an array like one of pairs (b, g, r, i, j), some axes of which are 1."""
        batches: dict[int, list[Array]] = {}
        for tile, part in zip(self.heads, parts, strict=True):
            batches.setdefault(tile.batch.start, []).append(part)
        rows = [_sum(same) if like.shape[1] == 1 else concat(same, axis=1) for same in batches.values()]
        return namespace(like).astype(_sum(rows) if like.shape[0] == 1 else concat(rows, axis=0), like.dtype)


def _placed(
    task: Callable[[Tile], Sequence[Array]],
    like: Array,
    tiles: Sequence[Tile],
    sizes: Sequence[int | None],
    place: Callable[[Tile], tuple[Any, ...]],
) -> list[Array]:
    """Return arrays whose first axes are `sizes`, None for those of the task's, with its results for tiles in place."""
    wholes: list[Array] = []
    lock = threading.Lock()

    def placed(tile: Tile) -> None:
        parts = task(tile)
        with lock:
            if not wholes:
                for part in parts:
                    shape = [n if size is None else size for n, size in zip(part.shape, sizes, strict=False)]
                    shape += part.shape[len(sizes) :]
                    wholes.append(namespace(part).empty(tuple(shape), dtype=part.dtype, device=device(part)))
        at = place(tile)
        for whole, part in zip(wholes, parts, strict=True):
            whole[at] = part

    run(like, placed, tiles)
    return wholes


class PlaneSum:
    """A sum of tiles (b, g, r, i, j) to an array that was broadcast to them; in float64 where the library has it.

    Parameters
    ----------
    like
        That array for the batch and heads of one task, each axis of its own size or 1.
    queries, keys, width
        The plane, and how many keys a tile has.
    """

    def __init__(self, like: Array, queries: int, keys: int, width: int) -> None:
        xp = namespace(like)
        self._like, self._keys, self._width = like, keys, width
        self._queries = queries
        self._dtype = xp.float64 if backend(like).float64() else like.dtype
        self._found: dict[tuple[int, int], Array] = {}

    def add(self, rows: tuple[int, int], columns: tuple[int, int], part: Array) -> None:
        """Add a tile."""
        xp, shape = namespace(part), self._like.shape
        axes = tuple(axis for axis, n in enumerate(shape) if n == 1)
        part = xp.sum(part, axis=axes, keepdims=True, dtype=self._dtype) if axes else xp.astype(part, self._dtype)
        missing = min(self._width, self._keys - columns[0]) - part.shape[4]
        if shape[4] != 1 and missing:
            part = _padded(part, missing)
        at = (rows[0] if shape[3] != 1 else 0, columns[0] if shape[4] != 1 else 0)
        self._found[at] = part if at not in self._found else self._found[at] + part

    def whole(self, rows: Sequence[tuple[int, int]]) -> Array:
        """Return the sum; 0 where no tile was added."""
        xp, (b, g, r, i, j) = namespace(self._like), self._like.shape

        def part(first: int, last: int, start: int) -> Array:
            size = 1 if j == 1 else min(self._width, self._keys - start)
            empty = (b, g, r, 1 if i == 1 else last - first, size)
            found = self._found.get((0 if i == 1 else first, start))
            return found if found is not None else xp.zeros(empty, dtype=self._dtype, device=device(self._like))

        starts = [0] if j == 1 else list(range(0, self._keys, self._width))
        blocks = [(0, self._queries)] if i == 1 else rows
        return concat([concat([part(*block, start) for start in starts], axis=4) for block in blocks], axis=3)


def _padded(x: Array, columns: int) -> Array:
    """Return x (..., j) with so many columns of 0 more."""
    xp = namespace(x)
    return xp.concat([x, xp.zeros((*x.shape[:-1], columns), dtype=x.dtype, device=device(x))], axis=-1)


def _sum(parts: Sequence[Array]) -> Array:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def concat(parts: Sequence[Array], axis: int) -> Array:
    """Put parts together along an axis, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else namespace(parts[0]).concat(list(parts), axis=axis)


def most_rows(offset: int | None) -> int:
    """Return how many rows a tile shall have: twice as many where no causal mask leaves out tiles."""
    return ROWS if offset is not None else 2 * ROWS


def plan(q: Array, k: Array, most: int = ROWS) -> Plan:
    """Cut the plane of q (b, h, i, d) and k (b, g, j, d), all sizes at least 1, in tiles of at most so many rows.

    Products of more rows are quicker, and fewer rows let a causal mask leave out more.
    """
    owner = backend(q)
    elements = owner.tile_bytes // (4 if "32" in str(q.dtype) else 8)
    return _cut(tuple(q.shape[:3]), tuple(k.shape[1:3]), most, elements, owner.pools)


# Of short sequences the cut takes a hundredth of a call, and the backward needs it again.
@functools.lru_cache(maxsize=64)
def _cut(rows_of: tuple[int, int, int], keys_of: tuple[int, int], most: int, elements: int, pools: bool) -> Plan:
    """Return the plan of queries (b, h, i) and keys (g, j), with so many elements to a tile."""
    (b, h, queries), (groups, keys) = rows_of, keys_of
    if not pools:
        # One device wants few large products over all heads at once.
        batch_step, head_step = b, groups
        rows = max(32, math.isqrt(elements // (b * h)))
    else:
        # A pool wants many tasks that fit a cache. Where a tile of one head does not fill it, a task has several heads,
        # and fewer rows, so that a causal mask leaves out more.
        short = max(queries, keys) <= ROWS
        rows = max(32, (most // 2 if short else most) // (h // groups))
        batch_step, head_step = 1, min(groups, max(1, elements // (h // groups * rows * keys))) if short else 1
    columns = max(32, elements // (batch_step * head_step * (h // groups) * rows))
    heads = tuple(
        Tile(slice(n, min(n + batch_step, b)), slice(g, min(g + head_step, groups)), (0, queries))
        for n in range(0, b, batch_step)
        for g in range(0, groups, head_step)
    )
    blocks = tuple(
        Tile(tile.batch, tile.heads, (start, min(start + rows, queries)))
        for tile in heads
        for start in range(0, queries, rows)
    )
    return Plan(heads, blocks, columns)


def run(like: Array, task: Callable[[Task], Result], tiles: Sequence[Task]) -> list[Result]:
    """Return the results of `task` for all tiles, or parts of them, in order, on the workers of the backend of `like`.

    Under a hook of the equation engine the tiles run one after the other, so that a trace has one order; but as tasks
    of the backend all the same, which gives them the same bits.
    """
    with use_workers(1) if equations.is_active() else nullcontext():
        return list(backend(like).map(task, tiles))


def by_rows(function: Callable[..., Sequence[Array]], *arrays: Array) -> list[Array]:
    """Return the arrays that a function of each row gives, computed in blocks of rows on the workers.

    Each of `arrays` is (..., i, j), and so is each result, (..., i, k). A backend that does not pool gets all at once.
    """
    like = arrays[0]
    owner, rows = backend(like), like.shape[-2] if len(like.shape) > 1 else 1
    bits = 4 if "32" in str(like.dtype) else 8
    block = max(1, owner.tile_bytes * rows // max(1, bits * math.prod(like.shape)))
    if not owner.pools or block >= rows:
        return list(function(*arrays))
    cuts = [slice(first, min(first + block, rows)) for first in range(0, rows, block)]
    parts = run(like, lambda at: function(*(x[..., at, :] for x in arrays)), cuts)
    return [namespace(like).concat(same, axis=-2) for same in zip(*parts, strict=True)]
