"""Biases that fall off with the distance of a query from a key, by a slope for each head.

[forward]  bias_ij = -slope |i + offset - j|

Source: Press et al. 2022 (arXiv:2108.12409), section 3 and its code for the slopes. The adjoint is the gradient of the
slopes: dslope = -sum_ij dbias_ij |i + offset - j|.

Letters: b batch, h query head, i query, j key.
"""

from __future__ import annotations

from refattn.xp import Array, arange, constants, namespace, sum_wide_to


def alibi_slopes(heads: int, like: Array) -> Array:
    """Return the slopes (h,) of so many heads: 2^(-8 n/h) for n = 1 to h.

    Where h is no power of two: those of the next lower one, and then every other one of the next higher one.
    """
    power = 1
    while 2 * power <= heads:
        power *= 2
    slopes = [2.0 ** (-8.0 * n / power) for n in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * n / power) for n in range(1, 2 * (heads - power) + 1, 2)]
    return constants(slopes[:heads], like.dtype, like)


def alibi_forward(slopes: Array, queries: int, keys: int, offset: int | Array) -> Array:
    """Return the bias (1 or b, h, i, j) of slopes (h,) or (b, h); query i stands at i + offset, a number or (b,)."""
    grouped = slopes[None, :, None, None] if len(slopes.shape) == 1 else slopes[:, :, None, None]
    return -grouped * _distances(slopes, queries, keys, offset)


def alibi_backward(d_bias: Array, slopes: Array, offset: int | Array) -> Array:
    """Return the gradient of the slopes, for that of the bias (1 or b, h, i, j)."""
    pulled = -d_bias * _distances(slopes, d_bias.shape[2], d_bias.shape[3], offset)
    batch = 1 if len(slopes.shape) == 1 else slopes.shape[0]
    found = sum_wide_to(pulled, (batch if pulled.shape[0] != 1 else 1, pulled.shape[1], 1, 1))
    return namespace(slopes).reshape(found, slopes.shape)


def _distances(like: Array, queries: int, keys: int, offset: int | Array) -> Array:
    """Return |i + offset - j| (1 or b, 1, i, j)."""
    xp = namespace(like)
    place = arange(0, queries, like)[:, None] - arange(0, keys, like)[None, :]
    moved = place + offset if isinstance(offset, int) else place + offset[:, None, None, None]
    distance = xp.astype(xp.abs(moved), like.dtype)
    return distance if len(distance.shape) == 4 else distance[None, None, :, :]
