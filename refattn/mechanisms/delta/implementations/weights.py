"""What a chunk reads and writes with, for a decay of heads, of channels, and for a state with momentum.

Equations, for tokens i and j of a chunk of C tokens, Gamma and s of `segments`::

    [DELTA.key_products]  B_ij = sum_d k'_id k'_jd Gamma_ijd      for j < i, otherwise 0
    [DELTA.query_products]  P_ij = sum_d q'_id k'_jd Gamma_ijd    for j <= i, otherwise 0
    [DELTA.momentum_weights]  c = Gamma_a diag(beta) Gamma_mu     with momentum; c0 = Gamma_a diag(beta) s_mu
    [DELTA.weights_before]  c-_i = a_i c_{i-1}            with momentum, 0 for the first token: before its own write

and the keys and queries of the state before the chunk, s_i k'_i and s_i q'_i; those with which the chunk writes,
Gamma_Cj k'_j; and what is kept of the state, s_C. With momentum the state is S above M, of twice as many rows: keys are
[s_a k', c0- k'], queries [s_a q', c0 q'], writes go with [c_C k', Gamma_mu,C k'], what is kept of S and M is s_a,C and
s_mu,C, and c0_C M goes from M to S; B = c- * k' k'^T, and P = c * q' k'^T. All coefficients are sums of products of
numbers that are not negative where beta is not: no logarithm of beta, and no division.

Adjoints, for dP and dB and the gradients of keys, queries and writes (R of `chunked` gives them)::

    [dDELTA.momentum_weights]  dX_il = sum_j dc_ij Gamma_mu,lj + dc0_i s_mu,l    with momentum, X = Gamma_a diag(beta)

With a decay of channels P and B are found by `halves`, without an array Gamma of three axes (i, j, d).

Axes: b batch, g state head, l chunk, r query head of a state head, i and j tokens of a chunk, d width of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.delta.implementations import halves, segments
from refattn.mechanisms.delta.implementations.halves import Span
from refattn.mechanisms.delta.implementations.segments import later
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Weights:
    """What the sweep over chunks needs, and what the backward reads.

    Attributes
    ----------
    queries, keys, writes
        (b, g, l, r, i, d), (b, g, l, i, d), (b, g, l, i, d): to read the state with, to predict with, to write with.
        With momentum d is twice the width.
    pairs, before
        P (b, g, l, r, i, j) and B (b, g, l, i, j).
    kept
        (b, g, l, 1 or d, 1): what is kept of the state.
    crossing
        (b, g, l, 1, 1): what of the momentum goes to the state; None without.
    """

    queries: Array
    keys: Array
    writes: Array
    pairs: Array
    before: Array
    kept: Array
    crossing: Array | None = None


def weights_of(q: Array, k: Array, gates: Mapping[str, Array]) -> Weights:
    """Return the weights for q' (b, g, l, r, i, d), k' (b, g, l, i, d) and gates (b, g, l, i), or by channel."""
    if "log_momentum" in gates:
        return of_momentum(q, k, gates["log_decay"], gates["log_momentum"], gates["beta"])
    log_decay = gates["log_decay"]  # (b, g, l, i) or (b, g, l, i, d)
    return of_heads(q, k, log_decay) if len(log_decay.shape) == 4 else of_channels(q, k, log_decay)


def weights_backward(
    saved: Weights, q: Array, k: Array, gates: Mapping[str, Array], d: Weights
) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of q', k' and the gates for those of the weights, `d`."""
    if "log_momentum" in gates:
        return of_momentum_backward(saved, q, k, gates["log_decay"], gates["log_momentum"], gates["beta"], d)
    log_decay = gates["log_decay"]  # (b, g, l, i) or (b, g, l, i, d)
    through = of_heads_backward if len(log_decay.shape) == 4 else of_channels_backward
    return through(saved, q, k, log_decay, d)


def strictly(pairs: Array) -> Array:
    """Return pairs (..., i, j), 0 but for j < i."""
    return namespace(pairs).where(later(pairs.shape[-1], pairs), pairs, 0.0)


def lower(pairs: Array) -> Array:
    """Return pairs (..., i, j), 0 but for j <= i."""
    xp = namespace(pairs)
    return xp.where(xp.matrix_transpose(later(pairs.shape[-1], pairs)), 0.0, pairs)


def products(q: Array, k: Array, by: Span | tuple[Array, Array]) -> tuple[Array, Array]:
    """Return P (b, g, l, r, i, j) and B (b, g, l, i, j), by decays of channels or with coefficients (b, g, l, i, j)."""
    xp = namespace(k)
    if isinstance(by, Span):
        both = halves.pairs(above(q, k), k, by)  # (b, g, l, r+1, i, j)
        pairs = both[:, :, :, :-1, ...]  # (b, g, l, r, i, j) [DELTA.query_products]
        before = strictly(both[:, :, :, -1, ...])  # (b, g, l, i, j) [DELTA.key_products]
    else:
        columns, (now, ahead) = xp.matrix_transpose(k), by  # (b, g, l, d, j), -
        pairs = q @ columns[:, :, :, None, ...] * now[:, :, :, None, ...]  # (b, g, l, r, i, j) [DELTA.query_products]
        before = strictly(k @ columns) * ahead  # (b, g, l, i, j) [DELTA.key_products]
    return pairs, before


# --- a decay of heads, or none


def of_heads(q: Array, k: Array, log_decay: Array) -> Weights:
    """Return the weights for q' (b, g, l, r, i, d), k' (b, g, l, i, d) and log a (b, g, l, i)."""
    own = equations.active(segments)
    gamma, prefix = own.segments(log_decay), own.prefixes(log_decay)  # (b, g, l, i, j), (b, g, l, i)
    pairs, before = products(q, k, (gamma, gamma))  # (b, g, l, r, i, j), (b, g, l, i, j)
    rows = prefix[..., None]  # (b, g, l, i, 1): s
    writes = gamma[..., -1, :, None] * k  # (b, g, l, i, d)
    return Weights(rows[:, :, :, None, ...] * q, rows * k, writes, pairs, before, rows[..., -1:, :])


def of_heads_backward(
    saved: Weights, q: Array, k: Array, log_decay: Array, d: Weights
) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of q', k' and the gates for those of the weights, `d`."""
    xp, own = namespace(k), equations.active(segments)
    gamma, prefix = own.segments(log_decay), own.prefixes(log_decay)  # (b, g, l, i, j), (b, g, l, i)
    rows = prefix[..., None]  # (b, g, l, i, 1): s
    d_pairs, d_before = lower(d.pairs) * gamma[:, :, :, None, ...], strictly(d.before) * gamma  # as P, as B
    # forward: pairs = q @ k^T * gamma; queries = prefix * q
    d_q = rows[:, :, :, None, ...] * d.queries + d_pairs @ k[:, :, :, None, ...]  # (b, g, l, r, i, d)
    # forward: before = strictly(k @ k^T) * gamma; keys = prefix * k; writes = gamma of the last row * k
    d_k = rows * d.keys + gamma[..., -1, :, None] * d.writes  # (b, g, l, i, d): through the state
    d_k = d_k + (d_before + xp.matrix_transpose(d_before)) @ k  # (b, g, l, i, d): and through B
    d_k = d_k + xp.sum(xp.matrix_transpose(d_pairs) @ q, axis=3)  # (b, g, l, i, d): and through P
    # forward: all that depends on gamma and prefix; w = d_gamma * gamma
    weights = xp.sum(lower(d.pairs) * saved.pairs, axis=3) + strictly(d.before) * saved.before  # (b, g, l, i, j)
    last = xp.vecdot(d.writes, saved.writes)[..., None, :]  # (b, g, l, 1, j): of the last row
    weights = xp.concat([weights[..., :-1, :], weights[..., -1:, :] + last], axis=-2)  # (b, g, l, i, j)
    through = xp.sum(xp.vecdot(d.queries, saved.queries), axis=3) + xp.vecdot(d.keys, saved.keys)  # (b, g, l, i)
    kept = (d.kept * saved.kept)[..., 0]  # (b, g, l, 1)
    through = xp.concat([through[..., :-1], through[..., -1:] + kept], axis=-1)  # (b, g, l, i)
    return d_q, d_k, {"log_decay": own.segments_backward(weights, through)}


# --- a decay of channels


def of_channels(q: Array, k: Array, log_decay: Array) -> Weights:
    """Return the weights for q' (b, g, l, r, i, d), k' (b, g, l, i, d) and log a (b, g, l, i, d)."""
    xp, span = namespace(k), halves.span_of(log_decay)
    prefix, suffix = xp.exp(span.start), xp.exp(span.end)  # (b, g, l, i, d): s, and from each token to the end
    pairs, before = products(q, k, span)  # (b, g, l, r, i, j), (b, g, l, i, j)
    kept = xp.matrix_transpose(prefix[..., -1:, :])  # (b, g, l, d, 1)
    return Weights(prefix[:, :, :, None, ...] * q, prefix * k, suffix * k, pairs, before, kept)


def of_channels_backward(
    saved: Weights, q: Array, k: Array, log_decay: Array, d: Weights
) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of q', k' and the gates for those of the weights, `d`."""
    xp, span = namespace(k), halves.span_of(log_decay)
    prefix, suffix = xp.exp(span.start), xp.exp(span.end)  # (b, g, l, i, d)
    # forward: queries = prefix * q; keys = prefix * k; kept = prefix of the last token, prefix = exp(start)
    d_start = xp.sum(d.queries * saved.queries, axis=3) + d.keys * saved.keys  # (b, g, l, i, d)
    d_start = halves.on_last(d_start, xp.matrix_transpose(d.kept * saved.kept))  # (b, g, l, i, d)
    # forward: writes = suffix * k, suffix = exp(end)
    d_end = d.writes * saved.writes  # (b, g, l, i, d)
    # forward: both = pairs(above(q, k), k, span); pairs, before = of q', strictly of k'
    d_both = above(d.pairs, strictly(d.before))  # (b, g, l, r+1, i, j)
    d_rows, d_columns, d_log_decay = halves.pairs_backward(
        above(q, k), k, span, d_both, d_start, d_end
    )  # (b, g, l, r+1, i, d), (b, g, l, i, d), (b, g, l, i, d)
    d_q = d_rows[:, :, :, :-1, ...] + prefix[:, :, :, None, ...] * d.queries  # (b, g, l, r, i, d)
    d_k = d_rows[:, :, :, -1, ...] + d_columns + prefix * d.keys + suffix * d.writes  # (b, g, l, i, d)
    return d_q, d_k, {"log_decay": d_log_decay}


def above(x: Array, y: Array) -> Array:
    """Return x (b, g, l, r, i, ...) with y (b, g, l, i, ...) as one more row of each token."""
    return namespace(x).concat([x, y[:, :, :, None, ...]], axis=3)


# --- a state and its momentum


@dataclass(frozen=True)
class Moving:
    """Coefficients of the state that the momentum has made: from M before the chunk, and from each write."""

    decay: Array  # (b, g, l, i, j): Gamma of log_decay
    decay_prefix: Array  # (b, g, l, i)
    mu: Array  # (b, g, l, i, j): Gamma of log_momentum
    mu_prefix: Array  # (b, g, l, i)
    scaled: Array  # (b, g, l, i, j): X = Gamma_a diag(beta)
    now: Array  # (b, g, l, i, j): c
    first: Array  # (b, g, l, i): c0
    ahead: Array  # (b, g, l, i, j): c-
    first_ahead: Array  # (b, g, l, i): c0-


def moving(log_decay: Array, log_momentum: Array, beta: Array) -> Moving:
    """Return the coefficients for gates (b, g, l, i)."""
    xp, own = namespace(beta), equations.active(segments)
    decay, decay_prefix = own.segments(log_decay), own.prefixes(log_decay)  # (b, g, l, i, j), (b, g, l, i)
    mu, mu_prefix = own.segments(log_momentum), own.prefixes(log_momentum)  # (b, g, l, i, j), (b, g, l, i)
    scaled = decay * beta[..., None, :]  # (b, g, l, i, j): X
    now = scaled @ mu  # (b, g, l, i, j) [DELTA.momentum_weights]
    first = (scaled @ mu_prefix[..., None])[..., 0]  # (b, g, l, i): c0
    kept = xp.exp(log_decay)  # (b, g, l, i): a
    shifted = xp.concat([xp.zeros_like(now[..., :1, :]), now[..., :-1, :]], axis=-2)  # (b, g, l, i, j): c_{i-1}
    ahead = kept[..., None] * shifted  # (b, g, l, i, j) [DELTA.weights_before]
    first_ahead = kept * xp.concat([xp.zeros_like(first[..., :1]), first[..., :-1]], axis=-1)  # (b, g, l, i): c0-
    return Moving(decay, decay_prefix, mu, mu_prefix, scaled, now, first, ahead, first_ahead)


def of_momentum(q: Array, k: Array, log_decay: Array, log_momentum: Array, beta: Array) -> Weights:
    """Return the weights for q' (b, g, l, r, i, d), k' (b, g, l, i, d) and gates (b, g, l, i)."""
    xp, by = namespace(k), moving(log_decay, log_momentum, beta)
    rows, first, ahead = by.decay_prefix[..., None], by.first[..., None], by.first_ahead[..., None]  # (b, g, l, i, 1)
    queries = xp.concat([rows[:, :, :, None, ...] * q, first[:, :, :, None, ...] * q], axis=-1)  # (b, g, l, r, i, 2*d)
    keys = xp.concat([rows * k, ahead * k], axis=-1)  # (b, g, l, i, 2*d)
    writes = xp.concat([by.now[..., -1, :, None] * k, by.mu[..., -1, :, None] * k], axis=-1)  # (b, g, l, i, 2*d)
    pairs, before = products(q, k, (by.now, by.ahead))  # (b, g, l, r, i, j), (b, g, l, i, j)
    ones = xp.ones_like(k[..., :1, :])  # (b, g, l, 1, d)
    last = by.decay_prefix[..., -1:, None] * ones, by.mu_prefix[..., -1:, None] * ones  # (b, g, l, 1, d)
    kept = xp.matrix_transpose(xp.concat([*last], axis=-1))  # (b, g, l, 2*d, 1)
    return Weights(queries, keys, writes, pairs, before, kept, first[..., -1:, :])


def of_momentum_backward(
    saved: Weights, q: Array, k: Array, log_decay: Array, log_momentum: Array, beta: Array, d: Weights
) -> tuple[Array, Array, dict[str, Array]]:
    """Return the gradients of q', k' and the gates for those of the weights, `d`."""
    xp, by, width = namespace(k), moving(log_decay, log_momentum, beta), k.shape[-1]
    own = equations.active(segments)
    rows, first, ahead = by.decay_prefix[..., None], by.first[..., None], by.first_ahead[..., None]  # (b, g, l, i, 1)
    now, last_mu = by.now[..., -1, :, None], by.mu[..., -1, :, None]  # (b, g, l, i, 1): of the last row
    d_queries, d_moved_queries = d.queries[..., :width], d.queries[..., width:]  # (b, g, l, r, i, d)
    d_keys, d_moved_keys = d.keys[..., :width], d.keys[..., width:]  # (b, g, l, i, d)
    d_writes, d_moved_writes = d.writes[..., :width], d.writes[..., width:]  # (b, g, l, i, d)
    pairs, before = lower(d.pairs), strictly(d.before)  # (b, g, l, r, i, j), (b, g, l, i, j)
    d_pairs, d_before = pairs * by.now[:, :, :, None, ...], before * by.ahead  # of q' k'^T and k' k'^T
    # forward: queries = [prefix * q, first * q]; pairs = q @ k^T * now
    d_q = rows[:, :, :, None, ...] * d_queries + first[:, :, :, None, ...] * d_moved_queries  # (b, g, l, r, i, d)
    d_q = d_q + d_pairs @ k[:, :, :, None, ...]  # (b, g, l, r, i, d)
    # forward: keys = [prefix * k, first_ahead * k]; writes = [now_C * k, mu_C * k]; before = k @ k^T * ahead
    d_k = rows * d_keys + ahead * d_moved_keys + now * d_writes + last_mu * d_moved_writes  # (b, g, l, i, d)
    d_k = d_k + (d_before + xp.matrix_transpose(d_before)) @ k  # (b, g, l, i, d)
    d_k = d_k + xp.sum(xp.matrix_transpose(d_pairs) @ q, axis=3)  # (b, g, l, i, d)
    # the coefficients, by what they multiply
    d_now = xp.sum(pairs * (q @ xp.matrix_transpose(k)[:, :, :, None, ...]), axis=3)  # (b, g, l, i, j): of c
    d_now = on_last_row(d_now, xp.vecdot(d_writes, k))  # (b, g, l, i, j)
    d_ahead = before * (k @ xp.matrix_transpose(k))  # (b, g, l, i, j): of c-
    d_first = xp.sum(xp.vecdot(d_moved_queries, q), axis=3)  # (b, g, l, i): of c0
    assert d.crossing is not None
    d_first = on_last(d_first, d.crossing[..., 0])  # (b, g, l, i)
    d_first_ahead = xp.vecdot(d_moved_keys, k)  # (b, g, l, i): of c0-
    # forward: ahead_i = a_i now_{i-1}, and first_ahead likewise
    kept = xp.exp(log_decay)  # (b, g, l, i): a
    through_a = xp.vecdot(d_ahead, by.ahead) + d_first_ahead * by.first_ahead  # (b, g, l, i): of log a by itself
    back, back_first = kept[..., None] * d_ahead, kept * d_first_ahead  # (b, g, l, i, j), (b, g, l, i)
    d_now = d_now + xp.concat([back[..., 1:, :], xp.zeros_like(back[..., :1, :])], axis=-2)  # (b, g, l, i, j)
    d_first = d_first + xp.concat([back_first[..., 1:], xp.zeros_like(back_first[..., :1])], axis=-1)  # (b, g, l, i)
    # forward: now = scaled @ mu; first = scaled @ mu_prefix; scaled = decay * beta
    outer = d_first[..., None] * by.mu_prefix[..., None, :]  # (b, g, l, i, j)
    d_scaled = lower(d_now @ xp.matrix_transpose(by.mu) + outer)  # (b, g, l, i, j) [dDELTA.momentum_weights]
    turned = xp.matrix_transpose(by.scaled)  # (b, g, l, j, i)
    mu_weights = lower(turned @ d_now) * by.mu  # (b, g, l, i, j): w of log mu
    mu_weights = on_last_row(mu_weights, last_mu[..., 0] * xp.vecdot(d_moved_writes, k))  # (b, g, l, i, j)
    mu_through = (turned @ d_first[..., None])[..., 0] * by.mu_prefix  # (b, g, l, i): t of log mu
    through = xp.sum(xp.vecdot(d_queries, saved.queries[..., :width]), axis=3)  # (b, g, l, i): t of log a
    through = through + xp.vecdot(d_keys, saved.keys[..., :width])  # (b, g, l, i)
    kept_terms = (d.kept * saved.kept)[..., 0]  # (b, g, l, 2*d)
    through = on_last(through, xp.sum(kept_terms[..., :width], axis=-1, keepdims=True))  # (b, g, l, i)
    mu_through = on_last(mu_through, xp.sum(kept_terms[..., width:], axis=-1, keepdims=True))  # (b, g, l, i)
    gates = {
        "log_decay": own.segments_backward(d_scaled * by.scaled, through) + through_a,
        "log_momentum": own.segments_backward(mu_weights, mu_through),
        "beta": xp.sum(d_scaled * by.decay, axis=-2),
    }
    return d_q, d_k, gates


def on_last_row(x: Array, row: Array) -> Array:
    """Return x (..., i, j) with a row (..., j) added to its last one."""
    return namespace(x).concat([x[..., :-1, :], x[..., -1:, :] + row[..., None, :]], axis=-2)


def on_last(x: Array, number: Array) -> Array:
    """Return x (..., i) with a number (..., 1) added to its last one."""
    return namespace(x).concat([x[..., :-1], x[..., -1:] + number], axis=-1)
