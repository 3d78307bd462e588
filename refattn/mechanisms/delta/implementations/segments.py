"""Decays over segments of tokens: what is kept of token j when token i comes.

Equations, for the tokens i and j of a chunk of C tokens::

    [DELTA.between]  Gamma_ij = exp(sum_{j<m<=i} log a_m)   0 for j > i
    [DELTA.since_start]  s_i = exp(sum_{m<=i} log a_m)      from the start of the chunk; s_C is for the state

Exponents are sums of the log decays of one segment, each term once. They are never differences of cumulative sums,
which lose all digits of a segment behind one strong decay and are NaN behind a decay to 0; and nothing is masked after
an exponential, whose gradient would be NaN there.

Adjoints, for the gradients w_ij = dGamma_ij Gamma_ij of the exponents, and t_i = ds_i s_i::

    [dDELTA.between]  dlog a_m = sum_{j<m<=i} w_ij + sum_{i>=m} t_i    only terms that depend on a_m are added

These are of a decay of heads. One of channels has the same s of each channel; its Gamma is never formed, see `halves`.

Axes: b batch, g state head, l chunk, i and j tokens of a chunk.
"""

from __future__ import annotations

import math

from refattn.xp import Array, arange, namespace


def segments(log_decay: Array) -> Array:
    """Return Gamma (b, g, l, i, j) for log a (b, g, l, i)."""
    xp, after = namespace(log_decay), later(log_decay.shape[-1], log_decay)  # -, (i, j)
    exponents = xp.cumulative_sum(xp.where(after, log_decay[..., :, None], 0.0), axis=-2)  # (b, g, l, i, j)
    past = after | ~xp.matrix_transpose(after)  # (i, j): j <= i
    gamma = xp.exp(xp.where(past, exponents, -math.inf))  # (b, g, l, i, j) [DELTA.between]
    return gamma


def prefixes(log_decay: Array) -> Array:
    """Return s (b, g, l, i) for log a (b, g, l, i)."""
    xp = namespace(log_decay)
    prefix = xp.exp(xp.cumulative_sum(log_decay, axis=-1))  # (b, g, l, i) [DELTA.since_start]
    return prefix


def segments_backward(weights: Array, prefix_weights: Array) -> Array:
    """Return dlog a (b, g, l, i) for w (b, g, l, i, j) and t (b, g, l, i)."""
    xp, after = namespace(weights), later(weights.shape[-1], weights)  # -, (i, j)
    # forward: exponents = cumulative_sum(where(after, log_decay, 0)), and of all for the prefixes
    spanning = xp.where(after, from_the_end(weights, -2), 0.0)  # (b, g, l, i, j): sum over i >= m, for m > j
    d_log_decay = xp.sum(spanning, axis=-1) + from_the_end(prefix_weights, -1)  # (b, g, l, i) [dDELTA.between]
    return d_log_decay


def from_the_end(x: Array, axis: int) -> Array:
    """Return sums from each element on to the last one of an axis."""
    xp = namespace(x)
    return xp.flip(xp.cumulative_sum(xp.flip(x, axis=axis), axis=axis), axis=axis)


def later(size: int, like: Array) -> Array:
    """Return (i, j): whether i > j."""
    at = arange(0, size, like)  # (i)
    return at[:, None] > at[None, :]
