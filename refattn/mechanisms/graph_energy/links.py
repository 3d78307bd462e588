"""From attention to the links of a graph, in four ways; the kernel of symmetric scores stands in `graph`.

Each way stands beside its adjoint.
"""

from __future__ import annotations

import math

from refattn.mechanisms.graph_energy.sparse import CSR
from refattn.ops.tiles import run
from refattn.xp import Array, arange, backend, namespace, zeros

COLUMNS = 128
"""Columns of a matrix that are transposed at once."""


def own_edges(scores: Array) -> Array:
    n = arange(0, scores.shape[-1], scores)
    return n[:, None] == n[None, :]


def earlier(scores: Array) -> Array:
    n = arange(0, scores.shape[-1], scores)
    return n[None, :] < n[:, None]


def balance_of(top: Array, total: Array) -> Array:
    """Return the sums of exp(r_il) over l, relative to the largest r of a head, from those relative to a row's."""
    xp = namespace(top)
    if top.shape[-2] == 0:
        return zeros(top.shape, top)
    largest = xp.max(top, axis=-2, keepdims=True)
    return total * xp.exp(top - xp.where(largest == -math.inf, 0.0, largest))


def both_seen(allowed: Array) -> Array:
    """Tell of two keys whether each may be attended by some query, (b, h, j, j)."""
    xp = namespace(allowed)
    seen = xp.any(allowed, axis=-2, keepdims=True)
    return seen & xp.matrix_transpose(seen)


def only_mutual(scores: Array, allowed: Array) -> Array:
    """Return scores, -inf unless i may attend j and j may attend i."""
    xp = namespace(scores)
    return xp.where(allowed & xp.matrix_transpose(allowed), scores, -math.inf)


def with_transposed(x: Array) -> Array:
    """Return x plus its transpose."""
    xp, n = namespace(x), x.shape[-1]
    if not backend(x).pools or n <= COLUMNS:
        return x + xp.matrix_transpose(x)

    def rows(at: slice) -> Array:
        # Rows of a transpose lie so far apart that a cache holds few of them; a copy of some columns does not.
        return x[..., at, :] + xp.matrix_transpose(xp.asarray(x[..., :, at], copy=True))

    parts = run(x, rows, [slice(first, min(first + COLUMNS, n)) for first in range(0, n, COLUMNS)])
    return xp.concat(parts, axis=-2)


def link_forward(attention: Array, symmetrise: str) -> Array:
    """Return w of GE.6, with an arbitrary diagonal."""
    xp = namespace(attention)
    other = xp.matrix_transpose(attention)
    if symmetrise == "none":
        return attention
    if symmetrise == "mean":
        return 0.5 * (attention + other)
    if symmetrise == "min":
        return xp.minimum(attention, other)
    return xp.where(earlier(attention), attention, other)


def link_backward(attention: Array, symmetrise: str, d_linked: Array) -> Array:
    """Return the part of da that comes from w."""
    xp = namespace(attention)
    if symmetrise == "none":
        return d_linked
    both = d_linked + xp.matrix_transpose(d_linked)
    if symmetrise == "mean":
        return 0.5 * both
    if symmetrise == "min":
        other = xp.matrix_transpose(attention)
        return xp.where(attention < other, both, xp.where(attention == other, 0.5 * both, 0.0))
    return xp.where(earlier(attention), both, 0.0)


def given_links(given: Array | CSR | None, allowed: Array | None, scores: Array) -> Array | CSR:
    """Return the links of a graph that was given, where they are allowed."""
    if isinstance(given, CSR):
        return given
    xp = namespace(scores)
    links = xp.astype(given, scores.dtype) + zeros(scores.shape, scores)
    return links if allowed is None else xp.where(allowed, links, 0.0)


def summed_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Return the sum of x over the axes to which an array of this shape was broadcast."""
    xp = namespace(x)
    missing = len(x.shape) - len(shape)
    x = xp.sum(x, axis=tuple(range(missing))) if missing else x
    ones = tuple(axis for axis, n in enumerate(shape) if n == 1 and x.shape[axis] != 1)
    return xp.sum(x, axis=ones, keepdims=True) if ones else x


def sum_of(first: Array, *others: Array) -> Array:
    """Return the sum of arrays, of which one without axes is a 0 that is left out."""
    for other in others:
        if other.shape:
            first = first + other if first.shape else other
    return first
