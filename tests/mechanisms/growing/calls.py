"""Calls of the growing core and block for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

import refattn as ra
from refattn import philox, tree
from refattn.mechanisms.growing.implementations import tiled
from refattn.mechanisms.softmax.implementations import tiled as softmax_tiled
from refattn.ops.tiles import Plan, Tile

BLOCK = ra.mechanism("growing").block

# (b, n, e, d_k, d_v, h, bias, mask) of the specification: e is the width, d_k and d_v those of all heads together.
SIZES = {
    "one head": (2, 5, 7, 4, 6, 1, False, None),
    "two heads": (3, 6, 8, 4, 8, 2, True, None),
    "causal": (2, 9, 5, 6, 3, 3, True, "causal"),
    "wide": (1, 4, 10, 8, 4, 4, False, "causal"),
    "one token": (2, 1, 3, 2, 2, 1, True, None),
    "padded": (3, 7, 6, 4, 4, 2, True, "padded"),
}


def draw(name: str, *shape: int, seed: int = 0) -> Any:
    return philox.normal(shape, seed=seed, purpose=f"growing.{name}")


def uniform(name: str, *shape: int, seed: int = 0) -> Any:
    return philox.uniform(shape, seed=seed, purpose=f"growing.{name}")


def context_of(name: str) -> ra.Context:
    b, n, *_, kind = SIZES[name]
    if kind == "padded":
        return ra.Context(mask=uniform("mask", b, 1, n, n) < 0.7, key_mask=uniform("padding", b, n) < 0.8)
    return ra.Context(causal=kind == "causal")


def block_of(name: str, **changes: Any) -> tuple[Any, Any, ra.Context]:
    """Parameters with biases that are not 0, tokens and a context."""
    b, n, e, d_k, d_v, h, bias, _ = SIZES[name]
    given = {"width": e, "heads": h, "head_width": d_k // h, "value_width": d_v // h, "bias": bias, **changes}
    config = BLOCK.Config(**given)
    params = BLOCK.init(config, seed=1, like=np.zeros(1))
    moved = {n: w + 0.3 * draw(n, *w.shape) for n, w in tree.flatten(params).items()}
    return tree.unflatten(params, moved), draw("x", b, n, e), context_of(name)


def step(params: Any, x: Any, context: ra.Context) -> tuple[Any, Any]:
    state, saved = BLOCK.forward(params, BLOCK.start(params, x, context), context)
    return state.x, saved


@contextmanager
def cut(rows: int, columns: int) -> Iterator[None]:
    """Make the tiled implementation cut the plane of queries and keys in tiles of this size, each of one head."""

    def plan(q: Any, k: Any, most: int = 0) -> Plan:
        whole = tuple(
            Tile(slice(b, b + 1), slice(g, g + 1), (0, q.shape[2]))
            for b in range(q.shape[0])
            for g in range(k.shape[1])
        )
        blocks = tuple(
            Tile(tile.batch, tile.heads, (start, min(start + rows, q.shape[2])))
            for tile in whole
            for start in range(0, q.shape[2], rows)
        )
        return Plan(whole, blocks, columns)

    with mock.patch.object(tiled, "plan", plan), mock.patch.object(softmax_tiled, "plan", plan):
        yield
