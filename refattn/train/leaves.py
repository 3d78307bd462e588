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
    leaves: Mapping[str, Array], function: Callable[[tuple[str, Any]], Any], join: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Return for each leaf ``function((name, part))``, or where there are several parts what `join` makes of all.

    A part is what a leaf is indexed with: all of it, or on a pool of threads a block of rows of a large leaf. Parts are
    the tasks of the backend.
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
    done = iter(owner.map(function, [(name, part) for name, found in parts.items() for part in found]))
    results = {name: [next(done) for _ in found] for name, found in parts.items()}
    cut = [name for name, found in results.items() if len(found) > 1]
    whole = dict(zip(cut, owner.map(lambda name: join(results[name]), cut), strict=True))
    return {name: whole[name] if name in whole else found[0] for name, found in results.items()}


def joined(parts: Sequence[Array]) -> Array:
    """Return the blocks of rows of one leaf as one array."""
    return namespace(*parts).concat(list(parts), axis=0)


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
            if leaf.dtype is not params[name].dtype and dtype_name(leaf) != dtype_name(params[name]):
                dtypes = f"got {name!r} of dtype {dtype_name(leaf)}, needs {dtype_name(params[name])} as in params"
                raise TypeError(f"{argument}: {dtypes}")
