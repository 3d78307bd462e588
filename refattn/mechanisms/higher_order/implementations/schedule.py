"""Who does what in the implementations with a state: heads that a task owns, and chunks of tokens that it takes at
once.

Both depend on the sizes and the backend alone, never on the number of workers, so any number gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.ops.tiles import Plan, Tile
from refattn.xp import Array, backend, namespace, zeros

Chunk = tuple[int, int]
"""First and last-plus-one position of some tokens."""

SHORTEST, LONGEST, FEWER = 16, 256, 1024
"""Tokens of a chunk: the most on a pool, and of one that takes all heads at once; fewer where their features would fill
memory."""

LARGEST = 4 << 20
"""Bytes of features of one head that a task of a pool makes at once."""

HEADS, TOGETHER = 4, 4 << 20
"""Heads of such a task, and bytes of features that they may make at once: small arrays would not be worth a call."""


def plan(kernel: Kernel, q: Array, k: Array) -> tuple[Plan, int]:
    """Return the heads of each task, as a plan without rows, and the length of a chunk."""
    owner = backend(q)
    (b, _, queries, _), groups = q.shape, k.shape[1]
    size = (4 if "32" in str(q.dtype) else 8) * kernel.features
    if owner.pools:
        chunk = max(SHORTEST, min(LONGEST, LARGEST // size))
        batch, heads = 1, max(1, min(HEADS, TOGETHER // (size * chunk)))
    else:
        batch, heads = b, groups
        chunk = max(SHORTEST, min(FEWER, owner.tile_bytes // (size * b * q.shape[1])))
    tiles = tuple(
        Tile(slice(n, min(n + batch, b)), slice(g, min(g + heads, groups)), (0, queries))
        for n in range(0, b, batch)
        for g in range(0, groups, heads)
    )
    return Plan(tiles, tiles, chunk), chunk


def chunks(length: int, size: int) -> Iterator[Chunk]:
    """Yield the chunks of some tokens."""
    for start in range(0, length, size):
        yield start, min(start + size, length)


@dataclass(frozen=True)
class Schedule:
    """The chunks of a causal call.

    Attributes
    ----------
    before
        Chunks of keys that every query may attend, other than those below.
    chunks
        Pairs of a chunk of queries and one of keys. The first query may attend the first key, the second one the second
        key too, and so on, and all of them the keys of all chunks before. Queries that may attend none have no keys.
    seen
        How many keys some query may attend.
    by_token
        Whether chunks are of one token, whose key is folded in before its query reads, so that there are no pairs.
    """

    before: list[Chunk]
    chunks: list[tuple[Chunk, Chunk]]
    seen: int
    by_token: bool = False


def causal_schedule(queries: int, keys: int, offset: int, size: int, by_token: bool = False) -> Schedule:
    """Return the chunks where query i may attend key j for j <= i + offset."""

    def place(query: int) -> int:
        return min(max(query + offset, 0), keys)

    first = place(0)
    lonely = min(max(-offset, 0), queries)
    pairs: list[tuple[Chunk, Chunk]] = [(rows, (0, 0)) for rows in chunks(lonely, size)]
    for a, b in chunks(queries - lonely, size):
        rows = (lonely + a, lonely + b)
        pairs.append((rows, (place(rows[0]), place(rows[1]))))
    return Schedule(list(chunks(first, size)), pairs, place(queries), by_token)


def past(size: int, like: Array) -> Array:
    """Return (size, size): 1 on and below the diagonal, 0 above, as numbers, because products with them are quick."""
    return namespace(like).tril(zeros((size, size), like) + 1.0)
