"""Products of a chunk's rows and keys with decays of channels, by halves.

Equations, for rows x and keys k of tokens in a row, where r is the last token of their first half::

    X_ij = sum_d x_id k_jd exp(sum_{j<m<=i} log a_md)     for j <= i, otherwise 0
         = sum_d (x_id exp(start_id)) (k_jd exp(end_jd))  for i in the second half and j in the first one,
    start_i = sum_{r<m<=i} log a_m,    end_j = sum_{j<m<=r} log a_m

which is one product of matrices; pairs of tokens of the same half are found likewise, down to single tokens. No array
has three axes of tokens, tokens and channels. Exponents are sums of the log decays of one segment, each term once: with
decays of at most 1 both factors are at most 1, and r, which lies between j and i, depends on no later token.

Sums of both halves make those of the whole: its `start` is that of the first half, and that of the second one behind
all of the first; its `end` likewise from behind. The adjoints go down the same tree, and so only terms that depend on
log a_m are added for it.

Axes: b batch, g state head, l chunk, r rows of a token, i and j tokens, d width of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Span:
    """Log decays of tokens in a row, summed.

    Attributes
    ----------
    start, end
        (b, g, l, i, d): sums from the first token to each, and of those after each.
    halves
        The same of both halves; None for a single token.
    """

    start: Array
    end: Array
    halves: tuple[Span, Span] | None


def span_of(log_decay: Array) -> Span:
    """Return the sums of log a (b, g, l, i, d)."""
    xp, half = namespace(log_decay), log_decay.shape[-2] // 2
    if half == 0:
        return Span(log_decay, xp.zeros_like(log_decay), None)
    first, second = span_of(log_decay[..., :half, :]), span_of(log_decay[..., half:, :])
    start = xp.concat([first.start, first.start[..., -1:, :] + second.start], axis=-2)  # (b, g, l, i, d)
    end = xp.concat([first.end + second.start[..., -1:, :], second.end], axis=-2)  # (b, g, l, i, d)
    return Span(start, end, (first, second))


def pairs(rows: Array, keys: Array, span: Span) -> Array:
    """Return X (b, g, l, r, i, j) for rows (b, g, l, r, i, d) and keys (b, g, l, j, d)."""
    xp, half = namespace(keys), keys.shape[-2] // 2
    if span.halves is None:
        return xp.vecdot(rows, keys[:, :, :, None, ...])[..., None]  # (b, g, l, r, 1, 1)
    first, second = span.halves
    reads = xp.exp(second.start)[:, :, :, None, ...] * rows[..., half:, :]  # (b, g, l, r, i, d)
    writes = xp.exp(first.end) * keys[..., :half, :]  # (b, g, l, j, d)
    across = reads @ xp.matrix_transpose(writes)[:, :, :, None, ...]  # (b, g, l, r, i, j)
    top = pairs(rows[..., :half, :], keys[..., :half, :], first)  # (b, g, l, r, i, j)
    bottom = pairs(rows[..., half:, :], keys[..., half:, :], second)  # (b, g, l, r, i, j)
    none = xp.zeros_like(xp.matrix_transpose(across))  # (b, g, l, r, j, i): later keys
    return xp.concat([xp.concat([top, none], axis=-1), xp.concat([across, bottom], axis=-1)], axis=-2)


def pairs_backward(
    rows: Array, keys: Array, span: Span, d_pairs: Array, d_start: Array, d_end: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients of rows, keys and log a, for that of X and those of the sums of the span.

    What `d_pairs` (b, g, l, r, i, j) has for j > i is not read.
    """
    xp, half = namespace(keys), keys.shape[-2] // 2
    if span.halves is None:
        return d_pairs * keys[:, :, :, None, ...], xp.sum(d_pairs * rows, axis=3), d_start
    first, second = span.halves
    decay, fade = xp.exp(second.start)[:, :, :, None, ...], xp.exp(first.end)  # (b, g, l, 1, i, d), (b, g, l, j, d)
    reads = decay * rows[..., half:, :]  # (b, g, l, r, i, d)
    writes = fade * keys[..., :half, :]  # (b, g, l, j, d)
    d_across = d_pairs[..., half:, :half]  # (b, g, l, r, i, j)
    # forward: across = reads @ writes^T
    d_reads = d_across @ writes[:, :, :, None, ...]  # (b, g, l, r, i, d)
    d_writes = xp.sum(xp.matrix_transpose(d_across) @ reads, axis=3)  # (b, g, l, j, d)
    # forward: start = [first.start, first.start of its last token + second.start]; reads = exp(second.start) * rows
    behind = xp.sum(d_start[..., half:, :], axis=-2, keepdims=True)  # (b, g, l, 1, d): of all of the first half
    d_start_second = d_start[..., half:, :] + xp.sum(d_reads * reads, axis=3)  # (b, g, l, i, d)
    # forward: end = [first.end + second.start of its last token, second.end]; writes = exp(first.end) * keys
    ahead = xp.sum(d_end[..., :half, :], axis=-2, keepdims=True)  # (b, g, l, 1, d): of all of the second half
    d_end_first = d_end[..., :half, :] + d_writes * writes  # (b, g, l, j, d)
    d_start_first, d_end_second = on_last(d_start[..., :half, :], behind), d_end[..., half:, :]  # (b, g, l, i, d)
    top = rows[..., :half, :], keys[..., :half, :], first, d_pairs[..., :half, :half]
    bottom = rows[..., half:, :], keys[..., half:, :], second, d_pairs[..., half:, half:]
    d_top, d_keys_top, d_log_top = pairs_backward(*top, d_start_first, d_end_first)
    d_bottom, d_keys_bottom, d_log_bottom = pairs_backward(*bottom, on_last(d_start_second, ahead), d_end_second)
    d_rows = xp.concat([d_top, d_bottom + decay * d_reads], axis=-2)  # (b, g, l, r, i, d)
    d_keys = xp.concat([d_keys_top + fade * d_writes, d_keys_bottom], axis=-2)  # (b, g, l, j, d)
    return d_rows, d_keys, xp.concat([d_log_top, d_log_bottom], axis=-2)


def on_last(x: Array, row: Array) -> Array:
    """Return x (..., i, d) with a row (..., 1, d) added to its last one."""
    return namespace(x).concat([x[..., :-1, :], x[..., -1:, :] + row], axis=-2)
