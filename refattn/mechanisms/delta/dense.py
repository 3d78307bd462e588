"""Linear recurrences with a matrix state, with all options: token by token.

The gated delta rule, DELTA.1 to DELTA.5, stands in `refattn.mechanisms.delta.definition`: read that first. A state S, a
matrix, holds the value S^T k for the key k. Each token lets it decay, asks it for the value of its key, writes what was
missed, and reads with its query. What is not given is neutral, and so one recurrence is seven rules: linear attention;
gated, with a decay of heads (RetNet, Mamba-2) or of channels (GLA); with beta delta; with beta and a decay of heads
gated delta, of channels KDA; and with a momentum of what is written momentum delta. The equations of other rules and of
options have names.

For a token n of one state head::

    [DELTA.unit_q]  q'_n = q_n / sqrt(|q_n|^2 + norm_eps)    without qk_norm: q' = q
    [DELTA.unit_k]  k'_n = k_n / sqrt(|k_n|^2 + norm_eps)    without qk_norm: k' = k
    [DELTA.fade]  a_n = exp(log_decay_n)                  without: a = 1; a number, or one for each row of S
    [DELTA.1]  D_n = a_n S_{n-1}                          without log_decay: D = S
    [DELTA.predicted]  p_n = D_n^T k'_n                   without beta: none
    [DELTA.2]  m_n = v_n - p_n                            without beta: m = v
    [DELTA.3]  u_n = beta_n m_n                           without beta: u = m; with momentum: u = step m
    [DELTA.momentum]  M_n = mu_n M_{n-1} + k'_n u_n^T     with momentum alone, mu = exp(log_momentum)
    [DELTA.4]  S_n = D_n + k'_n u_n^T                     with momentum: S = D + beta M
    [DELTA.5]  o_n = scale S_n^T q'_n

Decay, then predict, then write, then read: S_n = (I - beta k k^T) diag(a) S_{n-1} + beta k v^T. Adjoints, for given do
and the gradient of the last state, from the last token to the first (dDELTA.n is the gradient with respect to the value
of DELTA.n; what is of the next token is 0 after the last one, or what came in)::

    [dDELTA.4]  dS_n = a_{n+1} dD_{n+1} + scale q'_n do_n^T    summed over the query heads of the state head
    [dDELTA.unit_q]  dq'_n = scale S_n do_n
    [dDELTA.momentum]  dM_n = mu_{n+1} dM_{n+1} + beta_n dS_n    with momentum alone
    [dDELTA.3]  du_n = dS_n^T k'_n                        with momentum: dM_n^T k'_n
    [dDELTA.2]  dm_n = beta_n du_n                        without beta: dm = du; with momentum: step du
    [dDELTA.predicted]  dp_n = -dm_n
    [dDELTA.1]  dD_n = dS_n + k'_n dp_n^T                 without beta: dD = dS
    [dDELTA.unit_k]  dk'_n = dS_n u_n + D_n dp_n          without beta: dS u; with momentum: dM u + D dp
    [dDELTA.q]  dq_n = r (dq'_n - q'_n (q'_n . dq'_n)), r = 1 / sqrt(|q_n|^2 + norm_eps)    without qk_norm: dq'
    [dDELTA.k]  dk_n = r (dk'_n - k'_n (k'_n . dk'_n)), r = 1 / sqrt(|k_n|^2 + norm_eps)    without qk_norm: dk'
    [dDELTA.v]  dv_n = dm_n
    [dDELTA.beta]  dbeta_n = du_n . m_n                   with momentum: <dS_n, M_n>
    [dDELTA.step]  dstep_n = du_n . m_n
    [dDELTA.log_decay]  dlog a_n = rowsums of dD_n * D_n  for a decay of heads their sum; a may be 0
    [dDELTA.log_momentum]  dlog mu_n = mu_n <dM_n, M_{n-1}>
    [dDELTA.state]  dS_0 = a_1 dD_1                       with momentum also dM_0 = mu_1 dM_1
    [dDELTA.scale]  dscale = sum_n do_n . (S_n^T q'_n)

Axes: b batch, h query head, f key head, g state head, r query head of it, n token, d width of keys, e width of
values. The state has the key's axis first. f divides g, and h is a multiple or a divisor of g: of max(h, g) outputs,
output o is of query head floor(o h / max(h, g)) and of state head floor(o g / max(h, g)). Neighbours share.

Sources: linear, Katharopoulos et al. 2020 (arXiv:2006.16236); gated, Dao and Gu 2024 (arXiv:2405.21060) and Yang et
al. 2023 (arXiv:2312.06635); delta, Yang et al. 2024 (arXiv:2406.06484); gated delta, Yang, Kautz and Hatamizadeh 2024
(arXiv:2412.06464); KDA, Kimi Team 2025 (arXiv:2510.26692); momentum delta, MomentumDeltaNet (arXiv:2605.05838). Most
hold the transposed state, and the last one a momentum of the other sign: see docs/deviations.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.ops.heads import group_heads, repeat_heads, sum_heads, ungroup_heads
from refattn.ops.unit_norm import unit, unit_backward
from refattn.xp import Array, namespace, sum_wide, zeros


@dataclass(frozen=True)
class Token:
    """What the backward reads of one token."""

    faded: Array  # (b, g, d, e): D
    state: Array  # (b, g, d, e): S
    miss: Array  # (b, g, 1, e): e
    correction: Array  # (b, g, 1, e): u
    before: Array | None  # (b, g, d, e): M of the token before
    momentum: Array | None  # (b, g, d, e): M


@dataclass(frozen=True)
class Saved:
    """What the backward of the recurrence reads."""

    q_hat: Array  # (b, h, n, d)
    k_hat: Array  # (b, f, n, d)
    v: Array  # (b, g, n, e)
    q_normal: tuple[Array, Array] | None  # q' and r (b, h, n, 1); None without qk_norm
    k_normal: tuple[Array, Array] | None  # k' and r (b, f, n, 1)
    beta: Array | None  # (b, g, n)
    decay: Array | None  # (b, g, n) or (b, g, n, d): a
    mu: Array | None  # (b, g, n)
    rate: Array | None  # (b, g, n): of the miss, beta or the step
    lengths: tuple[int, ...] | None
    scale: float | Array
    moving: bool
    shape: tuple[int, ...]  # of the first state
    tokens: list[Token]


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    beta: Array | None,
    log_decay: Array | None,
    log_momentum: Array | None,
    step: Array | None,
    state: Array | None,
    lengths: tuple[int, ...] | None,
    scale: float | Array,
    qk_norm: bool,
    norm_eps: float,
    moving: bool,
) -> tuple[Array, Array, Saved]:
    """Return (out, last, saved): (b, h, n, e), the state after the last token, and what `backward` reads.

    Gates are (b, g, n), `log_decay` may be (b, g, n, d). `state` is (b, g, d, e), or (b, g, 2, d, e) for S and M where
    it is `moving`, which is to have a momentum; with `lengths` one for each sequence in place of b, which is 1.
    """
    xp = namespace(q, k, v)
    groups, heads = v.shape[1], max(q.shape[1], v.shape[1])
    q_hat, q_normal = unit(q, norm_eps) if qk_norm else (q, None)  # (b, h, n, d) [DELTA.unit_q], -
    k_hat, k_normal = unit(k, norm_eps) if qk_norm else (k, None)  # (b, f, n, d) [DELTA.unit_k], -
    queries = group_heads(repeat_heads(q_hat, heads), groups)  # (b, g, r, n, d): q' by state head
    keys = repeat_heads(k_hat, groups)  # (b, g, n, d): k' by state head
    decay = mu = None  # without a decay, without a momentum
    if log_decay is not None:
        decay = xp.exp(log_decay)  # [DELTA.fade]: (b, g, n) or (b, g, n, d)
    if moving:
        mu = xp.exp(log_momentum)  # (b, g, n): of DELTA.momentum
    if state is None:
        count = v.shape[0] if lengths is None else len(lengths)
        state = zeros((count, groups, *((2,) if moving else ()), k.shape[3], v.shape[3]), v)  # S_0 = 0
    rate = step if moving else beta  # (b, g, n): of DELTA.3
    rows, tokens, ends = [], [], []
    for first, last, start in sequences(state, v.shape[2], lengths):
        at, momentum = (start[:, :, 0, ...], start[:, :, 1, ...]) if moving else (start, None)  # S_0 and M_0
        for n in range(first, last):
            key, value = keys[:, :, n : n + 1, :], v[:, :, n : n + 1, :]  # (b, g, 1, d), (b, g, 1, e)
            column = xp.matrix_transpose(key)  # (b, g, d, 1): k'
            if decay is None:
                faded = at  # (b, g, d, e): DELTA.1 without a decay
            else:
                faded = by_row(decay, n) * at  # (b, g, d, e) [DELTA.1]
            if beta is None:
                miss = value  # (b, g, 1, e): DELTA.2 without beta
            else:
                prediction = key @ faded  # (b, g, 1, e) [DELTA.predicted]
                miss = value - prediction  # (b, g, 1, e) [DELTA.2]
            if rate is None:
                correction = miss  # (b, g, 1, e): DELTA.3 without a rate
            else:
                correction = by_row(rate, n) * miss  # (b, g, 1, e) [DELTA.3]
            before = momentum  # (b, g, d, e): M of the token before
            if moving:
                momentum = by_row(mu, n) * momentum + column * correction  # (b, g, d, e) [DELTA.momentum]
                at = faded + by_row(beta, n) * momentum  # (b, g, d, e) [DELTA.4]
            else:
                at = faded + column * correction  # (b, g, d, e) [DELTA.4]
            row = scale * (queries[:, :, :, n, :] @ at)  # (b, g, r, e) [DELTA.5]
            rows.append(row)
            tokens.append(Token(faded, at, miss, correction, before, momentum))
        ends.append(xp.stack([at, momentum], axis=2) if moving else at)
    out, final = ungroup_heads(xp.stack(rows, axis=3)), xp.concat(ends, axis=0)  # (b, h, n, e), as `state`
    saved = Saved(
        q_hat, k_hat, v, q_normal, k_normal, beta, decay, mu, rate, lengths, scale, moving, state.shape, tokens
    )
    return out, final, saved


def backward(saved: Saved, d_out: Array, d_state: Array | None) -> dict[str, Array]:
    """Return the gradients of all that came in, of the scale and of the first state, for d_out and that of the last."""
    xp = namespace(d_out)
    q_hat, k_hat, v = saved.q_hat, saved.k_hat, saved.v
    beta, decay, mu, rate = saved.beta, saved.decay, saved.mu, saved.rate
    groups, heads = v.shape[1], max(q_hat.shape[1], v.shape[1])
    queries = group_heads(repeat_heads(q_hat, heads), groups)  # (b, g, r, n, d): q' by state head
    keys = repeat_heads(k_hat, groups)  # (b, g, n, d): k' by state head
    d_rows = group_heads(d_out, groups)  # (b, g, r, n, e)
    if d_state is None:
        d_state = zeros(saved.shape, v)  # as `state`
    products, d_queries, d_keys, d_values, d_rates = [], [], [], [], []  # of all tokens, the last one first
    d_betas, d_decays, d_momenta, d_starts = [], [], [], []
    for first, last, end in sequences(d_state, v.shape[2], saved.lengths)[::-1]:
        d_at, d_momentum = (end[:, :, 0, ...], end[:, :, 1, ...]) if saved.moving else (end, None)  # of the last S, M
        for n in range(last - 1, first - 1, -1):
            token, key = saved.tokens[n], keys[:, :, n : n + 1, :]  # -, (b, g, 1, d)
            query, d_row = queries[:, :, :, n, :], d_rows[:, :, :, n, :]  # (b, g, r, d), (b, g, r, e)
            column = xp.matrix_transpose(key)  # (b, g, d, 1): k'
            # forward: row = scale * (queries[:, :, :, n, :] @ at)
            d_read = d_at + saved.scale * (xp.matrix_transpose(query) @ d_row)  # (b, g, d, e) [dDELTA.4]
            d_product = (d_row @ xp.matrix_transpose(token.state))[:, :, :, None, :]  # (b, g, r, 1, d)
            product = sum_heads(ungroup_heads(d_product), q_hat.shape[1])  # (b, h, 1, d): dq' without its scale
            d_query = saved.scale * product  # (b, h, 1, d) [dDELTA.unit_q]
            if saved.moving:
                # forward: momentum = mu * momentum + column * correction; at = faded + beta * momentum
                d_moved = d_momentum + by_row(beta, n) * d_read  # (b, g, d, e) [dDELTA.momentum]
                d_correction = key @ d_moved  # (b, g, 1, e) [dDELTA.3]
                d_key = token.correction @ xp.matrix_transpose(d_moved)  # (b, g, 1, d): of the write
                d_momentum = by_row(mu, n) * d_moved  # (b, g, d, e): of M of the token before
                d_betas.append(xp.sum(d_read * token.momentum, axis=(-2, -1)))
                d_momenta.append(xp.sum(d_momentum * token.before, axis=(-2, -1)))
            else:
                # forward: at = faded + column * correction
                d_correction = key @ d_read  # (b, g, 1, e) [dDELTA.3]
                d_key = token.correction @ xp.matrix_transpose(d_read)  # (b, g, 1, d): of the write
            # forward: correction = rate * miss
            if rate is None:
                d_miss = d_correction  # (b, g, 1, e): dDELTA.2 without a rate
            else:
                d_miss = by_row(rate, n) * d_correction  # (b, g, 1, e) [dDELTA.2]
                d_rates.append(xp.vecdot(d_correction, token.miss)[:, :, 0])
            # forward: prediction = key @ faded; miss = value - prediction
            if beta is None:
                d_faded = d_read  # (b, g, d, e): dDELTA.1 without beta
            else:
                d_prediction = -d_miss  # (b, g, 1, e) [dDELTA.predicted]
                d_faded = d_read + column * d_prediction  # (b, g, d, e) [dDELTA.1]
                d_key = d_key + d_prediction @ xp.matrix_transpose(token.faded)  # (b, g, 1, d)
            d_k_hat = sum_heads(d_key, k_hat.shape[1])  # (b, f, 1, d) [dDELTA.unit_k]
            # forward: faded = decay * at
            if decay is None:
                d_at = d_faded  # (b, g, d, e): of S of the token before
            else:
                d_decays.append(xp.sum(d_faded * token.faded, axis=(-2, -1) if len(decay.shape) == 3 else -1))
                d_at = by_row(decay, n) * d_faded  # (b, g, d, e): of S of the token before
            products.append(product)
            d_queries.append(d_query)
            d_keys.append(d_k_hat)
            d_values.append(d_miss)
        d_starts.append(xp.stack([d_at, d_momentum], axis=2) if saved.moving else d_at)
    # forward: q_hat = unit(q); k_hat = unit(k)
    q_normal, k_normal = saved.q_normal, saved.k_normal
    d_q_all, d_k_all = xp.concat(d_queries[::-1], axis=2), xp.concat(d_keys[::-1], axis=2)  # (b, h, n, d), (b, f, n, d)
    d_q = d_q_all if q_normal is None else unit_backward(*q_normal, d_q_all)  # (b, h, n, d) [dDELTA.q]
    d_k = d_k_all if k_normal is None else unit_backward(*k_normal, d_k_all)  # (b, f, n, d) [dDELTA.k]
    d_v = xp.concat(d_values[::-1], axis=2)  # (b, g, n, e) [dDELTA.v]
    d_start = xp.concat(d_starts[::-1], axis=0)  # [dDELTA.state]: as `state`
    d_scale = sum_wide(xp.concat(products[::-1], axis=2) * q_hat)  # () [dDELTA.scale]
    gradients = {"q": d_q, "k": d_k, "v": d_v, "state": d_start, "scale": d_scale}
    if beta is not None:
        if saved.moving:
            d_beta = xp.stack(d_betas[::-1], axis=2)  # (b, g, n) [dDELTA.beta]
            d_log_momentum = xp.stack(d_momenta[::-1], axis=2)  # (b, g, n) [dDELTA.log_momentum]
            gradients["log_momentum"] = d_log_momentum
            if rate is not None:
                d_step = xp.stack(d_rates[::-1], axis=2)  # (b, g, n) [dDELTA.step]
                gradients["step"] = d_step
        else:
            d_beta = xp.stack(d_rates[::-1], axis=2)  # (b, g, n) [dDELTA.beta]
        gradients["beta"] = d_beta
    # forward: decay = exp(log_decay)
    if decay is not None:
        d_log_decay = xp.stack(d_decays[::-1], axis=2)  # [dDELTA.log_decay]: as log_decay
        gradients["log_decay"] = d_log_decay
    return gradients


def by_row(x: Array, n: int) -> Array:
    """Return what token n has of x, to be multiplied with a state: (b, g, 1, 1), or (b, g, d, 1) of an x by channel."""
    return x[:, :, n, None, None] if len(x.shape) == 3 else x[:, :, n, :, None]


def sequences(state: Array, tokens: int, lengths: tuple[int, ...] | None) -> list[tuple[int, int, Array]]:
    """Return of each sequence its first token, the one after its last, and its part of what there is one of each."""
    if lengths is None:
        return [(0, tokens, state)]
    found, first = [], 0
    for at, length in enumerate(lengths):
        found.append((first, first + length, state[at : at + 1, ...]))
        first += length
    return found
