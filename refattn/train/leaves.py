"""The leaves of a tree as tasks of their backend: cut into pieces, joined again, and compared with each other."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refattn import tree
from refattn.xp import Array, backend, dtype_name, namespace

PIECE = 2**20
"""Elements of the largest piece that one task takes: its temporaries are given back and used again."""


def by_pieces(
    leaves: Mapping[str, Array], function: Callable[[str, Any], Any], join: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Return ``join([function(name, part), ...])`` for the parts of each leaf, computed by the workers of the backend.

    A part is what a leaf is indexed with: all of it, or on a pool of threads a block of rows of a large leaf.
    """
    if not leaves:
        return {}
    owner = backend(next(iter(leaves.values())))
    parts: dict[str, list[Any]] = {}
    for name, leaf in leaves.items():
        parts[name] = [(...,)]
        if owner.pools and (size := math.prod(leaf.shape)) > PIECE:
            rows = leaf.shape[0]
            height = max(1, PIECE * rows // size)
            parts[name] = [(slice(n, min(n + height, rows)), ...) for n in range(0, rows, height)]
    tasks = [(name, part) for name, found in parts.items() for part in found]
    done = iter(owner.map(lambda task: function(*task), tasks))
    results = [[next(done) for _ in found] for found in parts.values()]
    return dict(zip(leaves, owner.map(join, results), strict=True))


def joined(parts: Sequence[Array]) -> Array:
    """Return the blocks of rows of one leaf as one array."""
    return parts[0] if len(parts) == 1 else namespace(*parts).concat(list(parts), axis=0)


def total(parts: Sequence[Array]) -> Array:
    """Return the sum of all arrays, from the first to the last."""
    return functools.reduce(operator.add, parts)


def check_alike(params: Mapping[str, Array], others: Mapping[str, Mapping[str, Array]]) -> None:
    """Raise where the leaves of another tree have other names, shapes or dtypes; counts have to broadcast only."""
    for argument, leaves in others.items():
        tree.compare_names(argument, params, leaves)
        for name, leaf in leaves.items():
            got, needed = tuple(leaf.shape), tuple(params[name].shape)
            counts = argument == "state.count" and (not got or len(got) == len(needed))
            if got != needed and not (counts and all(n in (1, m) for n, m in zip(got, needed, strict=False))):
                raise ValueError(f"{argument}: got {name!r} of shape {got}, needs {needed} as in params")
            if dtype_name(leaf) != dtype_name(params[name]):
                dtypes = f"got {name!r} of dtype {dtype_name(leaf)}, needs {dtype_name(params[name])} as in params"
                raise TypeError(f"{argument}: {dtypes}")
