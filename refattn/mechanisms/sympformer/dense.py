"""The force of SympFormer with its options, every score at once: the part of `definition` between q, k, v and o.

Beyond the definition there are heads, which may share keys and values; q, k and v of any width; any scale of the
scores; all tokens in place of those up to i; and tokens that come after others of a past. e_i = <B p_i, p_i> comes in,
as the argument `kinetic`.

Equations (A(i) is the set of tokens that i attends, and n_i their number; numbers are those of the definition)::

    [SYMP.unmasked]  s_ij = scale q_i . k_j
    [SYMP.5]  m_ij = s_ij if j in A(i), else -inf       if not causal: m = s
    [SYMP.largest]  t_i = max_j m_ij
    [SYMP.exponentials]  p_ij = exp(m_ij - t_i)
    [SYMP.total]  r_i = sum_j p_ij
    [SYMP.6]  w_ij = p_ij / r_i
    [SYMP.7]  c_i = t_i + log(r_i / n_i)                which is log z_i
    [SYMP.10]  u_i = e_i exp(-2 c_i)
    [SYMP.11]  as in the definition
    [SYMP.12]  as in the definition

Adjoints, for given d_o and a further gradient d_log_z of c (t has none, because neither o nor c changes when t does)::

    [dSYMP.v]  dv_j = sum_i a_ij exp(c_i) do_i
    [dSYMP.11]  as in the definition
    [dSYMP.10]  as in the definition
    [dSYMP.kinetic]  de_i = du_i exp(-2 c_i)
    [dSYMP.7]  dc_i = do_i . o_i - 2 u_i du_i + dlog_z_i
    [dSYMP.6]  as in the definition
    [dSYMP.total]  dr_i = (dc_i - sum_j dw_ij w_ij) / r_i
    [dSYMP.exponentials]  dp_ij = dw_ij / r_i + dr_i
    [dSYMP.5]  dm_ij = dp_ij p_ij
    [dSYMP.q]  dq_i = scale sum_j dm_ij k_j
    [dSYMP.k]  dk_j = scale sum_i dm_ij q_i

Axes: b batch, h query head, g key/value head, i token as a query, j token as a key, d and e widths of a head.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535), the accelerated softmax attention, with the prefix in place of all
tokens; derived again here from H.

Nothing is clipped. Weights share the largest score of the row, so that no score overflows; but z and 1 / z are factors.
In float32 they are numbers up to |log z| = 87, and u = e z^-2 is for momenta of about unit size one from log z = -43
on. Beyond that results are infinite or NaN.

How the authors' code differs: it takes e^(s) of scores that are clipped at 60, whose square overflows float32 from 44
on, and adds 1e-8 to z^2; their paper has neither. Its first version divides by the number of all tokens and takes the
gradient of the whole H, so that a token's force knows its future.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import allowed_pairs
from refattn.xp import Array, arange, max_last, namespace, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the dense implementation reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    scale: float
    exponentials: Array  # (b, h, i, j)
    total: Array  # (b, h, i, 1)
    weights: Array  # (b, h, i, j)
    log_z: Array  # (b, h, i, 1)
    push: Array  # (b, h, i, 1)
    factor: Array  # (b, h, i, j)
    pairs: Array  # (b, h, i, j)
    out: Array  # (b, h, i, e)


def counts(offset: int | None, rows: tuple[int, int], keys: int, like: Array) -> Array:
    """Return n_i of the rows from first to last plus one, as floats (i, 1)."""
    xp = namespace(like)
    if offset is None:
        return zeros((rows[1] - rows[0], 1), like) + float(keys)
    return xp.astype(arange(rows[0] + offset + 1, rows[1] + offset + 1, like), like.dtype)[:, None]


def forward(
    q: Array, k: Array, v: Array, kinetic: Array, *, offset: int | None, scale: float, before: Array | None = None
) -> tuple[Array, Array, Saved]:
    """Return (out, log_z, saved): (b, h, i, e), (b, h, i) and what `backward` reads.

    `offset` is 0 where token i attends the tokens up to itself, None where it attends all. In decoding it is the number
    of tokens of the past, whose u are `before` (b, h, offset, 1); there is no backward of that.
    """
    xp = namespace(q, k, v)
    heads, tokens, keys = q.shape[1], q.shape[2], k.shape[2]
    k_heads = repeat_heads(k, heads)  # (b, h, j, d): copies of k
    v_heads = repeat_heads(v, heads)  # (b, h, j, e): copies of v
    n = counts(offset, (0, tokens), keys, q)  # (i, 1): n_i
    scores = q @ xp.matrix_transpose(k_heads) * scale  # (b, h, i, j) [SYMP.unmasked]
    allowed = allowed_pairs(None, offset, tokens, keys, q)  # j in A(i)
    if allowed is None:
        masked = scores  # (b, h, i, j): SYMP.5 without causality
    else:
        masked = xp.where(allowed, scores, -math.inf)  # (b, h, i, j) [SYMP.5]
    exponentials, total, _, log_z = masses(masked, n)  # (b, h, i, j), (b, h, i, 1), -, (b, h, i, 1)
    weights = exponentials / total  # (b, h, i, j) [SYMP.6]
    push = push_of(kinetic, log_z)  # (b, h, i, 1): SYMP.10
    pushes = push if before is None else xp.concat([before, push], axis=2)  # (b, h, j, 1): u of the keys
    factor = (1.0 + 0.5 * push) + 0.5 * xp.matrix_transpose(pushes)  # (b, h, i, j): 1 + (u_i + u_j) / 2
    pairs = weights * factor  # (b, h, i, j) [SYMP.11]
    out = xp.exp(log_z) * (pairs @ v_heads)  # (b, h, i, e) [SYMP.12]
    saved = Saved(q, k, v, scale, exponentials, total, weights, log_z, push, factor, pairs, out)
    return out, log_z[..., 0], saved


def masses(masked: Array, n: Array) -> tuple[Array, Array, Array, Array]:
    """Return the exponentials of scores (..., i, j), and by row their sum, the largest score and log z."""
    xp = namespace(masked)
    maximum = max_last(masked)  # (b, h, i, 1) [SYMP.largest]
    exponentials = xp.exp(masked - maximum)  # (b, h, i, j) [SYMP.exponentials]
    total = xp.sum(exponentials, axis=-1, keepdims=True)  # (b, h, i, 1) [SYMP.total]
    log_z = maximum + xp.log(total / n)  # (b, h, i, 1) [SYMP.7]
    return exponentials, total, maximum, log_z


def push_of(kinetic: Array, log_z: Array) -> Array:
    """Return u of tokens with kinetic terms and log z (..., i, 1)."""
    inverse = namespace(log_z).exp(-log_z)  # (b, h, i, 1): 1 / z, whose square would overflow first
    push = kinetic * inverse * inverse  # (b, h, i, 1) [SYMP.10]
    return push


def backward(saved: Saved, d_out: Array, d_log_z: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v and kinetic for given d_out and d_log_z."""
    q, k, v, weights, scale = saved.q, saved.k, saved.v, saved.weights, saved.scale
    xp = namespace(q, k, v)
    k_heads = repeat_heads(k, q.shape[1])  # (b, h, j, d): copies of k
    v_heads = repeat_heads(v, q.shape[1])  # (b, h, j, e): copies of v
    d_given = zeros(saved.log_z.shape, q) if d_log_z is None else d_log_z[..., None]  # (b, h, i, 1): came in
    # forward: out = exp(log_z) * (pairs @ v_heads)
    d_sum = xp.exp(saved.log_z) * d_out  # (b, h, i, e): the gradient of pairs @ v
    d_v = sum_heads(xp.matrix_transpose(saved.pairs) @ d_sum, v.shape[1])  # (b, g, j, e) [dSYMP.v]
    d_pairs = d_sum @ xp.matrix_transpose(v_heads)  # (b, h, i, j) [dSYMP.11]
    # forward: pairs = weights * (1 + (push_i + push_j) / 2)
    pulled = d_pairs * weights  # (b, h, i, j): part of dSYMP.10
    as_query = xp.sum(pulled, axis=-1, keepdims=True)  # (b, h, i, 1): part of dSYMP.10
    as_key = xp.matrix_transpose(xp.sum(pulled, axis=-2, keepdims=True))  # (b, h, i, 1): part of dSYMP.10
    d_push = 0.5 * (as_query + as_key)  # (b, h, i, 1) [dSYMP.10]
    d_weights = d_pairs * saved.factor  # (b, h, i, j) [dSYMP.6]
    # forward: push = kinetic * inverse * inverse; inverse = exp(-log_z)
    inverse = xp.exp(-saved.log_z)  # (b, h, i, 1)
    d_kinetic = d_push * inverse * inverse  # (b, h, i, 1) [dSYMP.kinetic]
    along = xp.sum(d_out * saved.out, axis=-1, keepdims=True)  # (b, h, i, 1): part of dSYMP.7
    d_mean = along - 2.0 * saved.push * d_push + d_given  # (b, h, i, 1) [dSYMP.7]
    # forward: log_z = maximum + log(total / n); weights = exponentials / total
    inner = xp.sum(d_weights * weights, axis=-1, keepdims=True)  # (b, h, i, 1): part of dSYMP.total
    d_total = (d_mean - inner) / saved.total  # (b, h, i, 1) [dSYMP.total]
    d_exponentials = d_weights / saved.total + d_total  # (b, h, i, j) [dSYMP.exponentials]
    # forward: exponentials = exp(masked - maximum)
    d_masked = d_exponentials * saved.exponentials  # (b, h, i, j) [dSYMP.5]
    # forward: scores = q @ k_heads^T * scale
    d_q = d_masked @ k_heads * scale  # (b, h, i, d) [dSYMP.q]
    d_k = sum_heads(xp.matrix_transpose(d_masked) @ q, k.shape[1]) * scale  # (b, g, j, d) [dSYMP.k]
    return {"q": d_q, "k": d_k, "v": d_v, "kinetic": d_kinetic}
