"""Layouts that kernels want, and arrays (b, h, n, d): packed sequences, pages of a cache, selected keys, slopes, latent
keys and values, and numbers in float8 with their factors.

An adapter lays out what it is given, calls its kernel and brings the result back. None of this changes an equation:
each is a permutation or a copy of rows, or another way to write a mask or a bias. NumPy alone.

Letters: b batch, h head, n token, d width, i query, j key, t tokens of all sequences, c latent width, r width that
turns with the position, e width of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import largest, round_to

Rows = NDArray[Any]


def pack(x: Rows, lengths: Sequence[int] | Rows) -> tuple[Rows, Rows]:
    """Return the tokens of all sequences (t, h, d), one after the other, of x (b, h, n, d), and their starts (b + 1,).

    The starts are what kernels call cu_seqlens.
    """
    starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)
    parts = [np.moveaxis(one[:, : int(length)], 0, 1) for one, length in zip(x, lengths, strict=True)]
    return np.concatenate([np.zeros((0, x.shape[1], x.shape[3]), x.dtype), *parts]), starts


def unpack(x: Rows, starts: Rows, size: int, fill: float = 0) -> Rows:
    """Return sequences (b, h, n, d) of so many tokens, of packed ones (t, h, d); what does not exist holds `fill`."""
    found = np.full((len(starts) - 1, x.shape[1], size, *x.shape[2:]), fill, dtype=x.dtype)
    for n, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        found[n, :, : int(last - first)] = np.moveaxis(x[int(first) : int(last)], 0, 1)
    return found


def to_pages(x: Rows, lengths: Sequence[int] | Rows, page: int, seed: int = 0) -> tuple[Rows, Rows]:
    """Return a cache of pages (pages, page, h, d) and the table (b, most) of each sequence's pages, of x (b, h, n, d).

    Token t of a sequence is ``cache[table[b, t // page], t % page]``. Pages lie in random order among unused ones,
    which hold NaN, as the rest of a last page does; entries of the table that are not used are -1.
    """
    needed = [-(-int(length) // page) for length in lengths]
    total = sum(needed)
    order = np.random.default_rng(seed).permutation(total + 2)[:total]
    cache = np.full((total + 2, page, x.shape[1], x.shape[3]), np.nan, dtype=x.dtype)
    table = np.full((len(needed), max([*needed, 1])), -1, dtype=np.int64)
    at = 0
    for n, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        table[n, :count] = order[at : at + count]
        for m in range(count):
            rows = np.moveaxis(x[n, :, m * page : min((m + 1) * page, int(length))], 0, 1)
            cache[table[n, m], : len(rows)] = rows
        at += count
    return cache, table


def from_pages(cache: Rows, table: Rows, lengths: Sequence[int] | Rows, size: int) -> Rows:
    """Return x (b, h, n, d) of so many tokens, 0 beyond the lengths, of a cache of pages."""
    page = cache.shape[1]
    found = np.zeros((len(table), cache.shape[2], size, cache.shape[3]), dtype=cache.dtype)
    for n, length in enumerate(lengths):
        for token in range(int(length)):
            found[n, :, token] = cache[table[n, token // page], token % page]
    return found


def mask_of(indices: Rows, keys: int) -> NDArray[np.bool_]:
    """Return the mask (..., j) of selected keys (..., top): a set. What is below 0 or not below `keys` is none."""
    indices = np.asarray(indices)
    inside = (indices >= 0) & (indices < keys)
    found = np.zeros((*indices.shape[:-1], keys + 1), dtype=np.bool_)
    np.put_along_axis(found, np.where(inside, indices, keys), True, axis=-1)
    return found[..., :keys]


def indices_of(mask: Rows, top: int, *, seed: int | None = None, repeat: bool = False) -> NDArray[np.int64]:
    """Return the keys (..., top) that a mask (..., j) lets a query attend, -1 where there are fewer.

    With a seed they come in random order, and with `repeat` free places repeat the first: for kernels that take a set.

    Raises
    ------
    ValueError
        Where a query may attend more keys.
    """
    most = int(np.max(np.sum(mask, axis=-1), initial=0))
    if most > top:
        raise ValueError(f"mask: got a row with {most} keys, needs at most {top}")
    generator = None if seed is None else np.random.default_rng(seed)
    found = np.full((*mask.shape[:-1], top), -1, dtype=np.int64)
    for at in np.ndindex(*mask.shape[:-1]):
        chosen = np.flatnonzero(mask[at])
        if repeat and len(chosen):
            chosen = np.concatenate([chosen, np.full(top - len(chosen), chosen[0])])
        row = np.full(top, -1, dtype=np.int64)
        row[: len(chosen)] = chosen
        found[at] = row if generator is None else generator.permutation(row)
    return found


def slopes_of(bias: Rows) -> tuple[Rows, int] | None:
    """Return the slopes (b, h) and the offset of which a bias (b, h, i, j) is exactly ALiBi's; None where it is not.

    For a kernel that takes slopes and no bias: -slope |i + offset - j|, as `refattn.ops.alibi` has it.
    """
    bias = np.asarray(bias).reshape((1,) * (4 - np.ndim(bias)) + np.shape(bias))
    _, _, queries, keys = bias.shape
    if 0 in bias.shape or not np.all(np.isfinite(bias)):
        return None
    for offset in _offsets(bias):
        distance = np.abs(np.arange(queries)[:, None] + offset - np.arange(keys)).astype(bias.dtype)
        if not distance.any():
            continue
        at = np.unravel_index(int(np.argmin(np.where(distance == 0, np.inf, distance))), distance.shape)
        slopes = -bias[:, :, at[0], at[1]] / distance[at]
        if np.array_equal(-slopes[:, :, None, None] * distance, bias):
            return slopes, int(offset)
    return None


def from_latent(latent: Rows, turned: Rows, w_k: Rows, w_v: Rows) -> tuple[Rows, Rows]:
    """Return keys (b, h, j, d + r) and values (b, h, j, e) of latent ones (b, j, c) and the part that turns (b, j, r).

    The weights are w_k (h, c, d) and w_v (h, c, e), of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434,
    section 2.1), whose queries are [q, q that turns], (b, h, i, d + r).
    """
    b, h, j = latent.shape[0], w_k.shape[0], latent.shape[1]
    shared = np.broadcast_to(turned[:, None], (b, h, j, turned.shape[2]))
    return np.concatenate([latent[:, None] @ w_k, shared], axis=3), latent[:, None] @ w_v


def absorbed(q: Rows, latent: Rows, turned: Rows, w_k: Rows) -> tuple[Rows, Rows, Rows, float]:
    """Return queries (b, h, i, c + r), one head of keys (b, 1, j, c + r) and values (b, 1, j, c), and the scale.

    Attention of these, times w_v, is that of q (b, h, i, d + r) over `from_latent`, with the same lse: w_k has gone
    into the queries. The scale stays that of the width d + r.
    """
    width = w_k.shape[2]
    own = q[..., :width] @ np.swapaxes(w_k, 1, 2)
    keys = np.concatenate([latent, turned], axis=2)[:, None]
    return np.concatenate([own, q[..., width:]], axis=3), keys, latent[:, None], float(q.shape[3]) ** -0.5


def quantise(x: Rows, dtype: str, axes: Sequence[int]) -> tuple[Rows, Rows]:
    """Return numbers of float8 or int8, in float32, and the factors (float32, without these axes) that give x again.

    Of what lies along the axes the largest becomes the largest number of the type; where all is 0 the factor is 1.
    """
    axes = tuple(axes)
    size = np.max(np.abs(x), axis=axes, keepdims=True, initial=0.0) / largest(dtype)
    factor = np.where(size == 0.0, 1.0, size).astype(np.float32)
    return round_to(x / factor.astype(np.float64), dtype).astype(np.float32), np.squeeze(factor, axis=axes)


def brought_back(shape: tuple[int, ...], needed: tuple[int, ...]) -> tuple[str, Callable[[Rows], Rows]] | None:
    """Return in words how the axes of another shape than (..., h, n, e) lie, and what brings an array back.

    None where two exchanged axes, or heads that are merged into the width, do not explain it.
    """
    if len(needed) > 2 and shape == (*needed[:-3], needed[-2], needed[-3] * needed[-1]):
        apart = (*needed[:-3], needed[-2], needed[-3], needed[-1])
        return "its heads are merged into the width", lambda x: x.reshape(apart).swapaxes(-3, -2)
    for one, other in combinations(range(len(needed)), 2):
        exchanged = [*needed]
        exchanged[one], exchanged[other] = needed[other], needed[one]
        if shape == tuple(exchanged):
            return f"axes {one} and {other} are exchanged", partial(np.swapaxes, axis1=one, axis2=other)
    return None


def _offsets(bias: Rows) -> list[int]:
    """Return where query 0 may stand among the keys: bottom right and top left first, then by where its bias is 0."""
    _, _, queries, keys = bias.shape
    found = [keys - queries, 0]
    found += [int(j - i) for i, j in np.argwhere(np.all(bias == 0.0, axis=(0, 1)))[:1]]
    # Where the queries stand outside of the keys: |offset| slope, and one slope more or less for a neighbour.
    own = bias[..., 0, 0].astype(np.float64)
    for other, sign in ((bias[..., 0, 1:2], 1.0), (bias[..., 1:2, 0], -1.0)):
        for a, b in zip(own.ravel(), other.astype(np.float64).ravel(), strict=False):
            found += [round(sign * a / (a - b))] if a != b else []
    return list(dict.fromkeys(found))[:8]
