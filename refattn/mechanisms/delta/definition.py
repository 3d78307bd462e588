"""The gated delta rule: a memory that learns, token by token, which value belongs to which key.

The memory is a matrix S, which starts at 0 and answers a key k with S^T k. Each token does four things. It lets the
memory fade. It looks up its own key and sees by how much the answer misses its value. It writes a correction for this
key. It reads the answer to its query. Each token and head brings two numbers: beta in [0, 1], how firmly to write, and
log_decay <= 0, how much to forget (0: nothing fades).

Linear attention, which the rule improves on, adds every value to what is there (S_n = S_(n-1) + k_n v_n^T), so that old
values of a key stay mixed in; here only what is missing is added. Adding k u^T to S changes the answer to k by
(k . k) u, and the answer to a key perpendicular to k not at all. If keys have length 1, as the caller makes them, the
faded answer a to k becomes (1 - beta) a + beta v: beta = 1 replaces it, beta = 0 leaves it. It is a step of gradient
descent in S on |v - S^T k|^2 / 2, from S = D_n, at the rate beta. A correction clears only its own key; fading, the
gate, clears everything else. Its factor exp(log_decay) is in (0, 1]. Factors multiply over tokens, logarithms add up.
S has the same size for any number of tokens (but `backward`, in this plain version, reads the S of all). No causal mask
is needed: o_n depends on the tokens up to n, n included, because the read follows the write.

    [DELTA.1]  D_n = exp(log_decay_n) S_(n-1)       the faded memory; S_0 = 0
    [DELTA.2]  m_n = v_n - D_n^T k_n                the miss: what the memory's answer to k_n lacks
    [DELTA.3]  u_n = beta_n m_n                     the correction of the answer
    [DELTA.4]  S_n = D_n + k_n u_n^T                the memory after it was written to
    [DELTA.5]  o_n = S_n^T q_n / sqrt(d)            the answer to the query, scaled as in softmax attention

Backward: do is the gradient of a loss with respect to o, and a d before a symbol means the gradient with respect to it;
d alone is the width. [dDELTA.4] is of the value of DELTA.4, [dDELTA.q] of the input q. It goes from the last token to
the first. The memory after token n is read by token n and fades into token n + 1, so two terms meet in dS_n. After the
last token dD_(n+1) = 0.

    [dDELTA.4]  dS_n = q_n do_n^T / sqrt(d) + exp(log_decay_(n+1)) dD_(n+1)
    [dDELTA.3]  du_n = dS_n^T k_n
    [dDELTA.2]  dm_n = beta_n du_n
    [dDELTA.1]  dD_n = dS_n - k_n dm_n^T
    [dDELTA.q]  dq_n = S_n do_n / sqrt(d)
    [dDELTA.k]  dk_n = dS_n u_n - D_n dm_n          k_n is in the write, and in the lookup before it
    [dDELTA.v]  dv_n = dm_n
    [dDELTA.beta]  dbeta_n = du_n . m_n
    [dDELTA.log_decay]  dlog_decay_n = sum of all elements of dD_n * D_n    D_n is its own derivative by log_decay_n

Axes: b batch, h head, n token, d width of queries and keys, e width of values. A vector of the formulas is a column;
the code holds it as a row, (b, h, 1, d), so that D_n^T k_n is `k_n @ faded` there, and k_n u_n^T `transpose(k_n) @
correction`. Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024
(arXiv:2412.06464), section 3.1, whose S is the transpose of this one; 1 / sqrt(d) is of their code, not of the rule.
"""

from __future__ import annotations

import math

# namespace(x): the library of x; zeros(shape, x): like x; transpose: last two axes; paper_alone: refuses other options
from refattn.ops.plain import paper_alone
from refattn.xp import Array, namespace, transpose, zeros


@paper_alone
def forward(q: Array, k: Array, v: Array, *, beta: Array, log_decay: Array) -> tuple[Array, tuple[Array, ...]]:
    """Return out (b, h, n, e) for q, k (b, h, n, d), v (b, h, n, e), beta, log_decay (b, h, n); and for `backward`."""
    xp, root = namespace(q, k, v), math.sqrt(q.shape[3])
    beta, keep = beta[..., None, None], xp.exp(log_decay)[..., None, None]  # (b, h, n, 1, 1), (b, h, n, 1, 1)
    state = zeros((*k.shape[:2], k.shape[3], v.shape[3]), k)  # (b, h, d, e): S_0
    steps = []
    for n in range(q.shape[2]):
        q_n, k_n, v_n = (x[:, :, n : n + 1, :] for x in (q, k, v))  # (b, h, 1, d), (b, h, 1, d), (b, h, 1, e)
        faded = keep[:, :, n, ...] * state  # (b, h, d, e) [DELTA.1]
        miss = v_n - k_n @ faded  # (b, h, 1, e) [DELTA.2]
        correction = beta[:, :, n, ...] * miss  # (b, h, 1, e) [DELTA.3]
        state = faded + transpose(k_n) @ correction  # (b, h, d, e) [DELTA.4]
        read = q_n @ state / root  # (b, h, 1, e) [DELTA.5]
        steps.append((faded, miss, correction, state, read))
    *saved, reads = (xp.stack(column, axis=2) for column in zip(*steps, strict=True))  # of all tokens: axis n after h
    return reads[:, :, :, 0, :], (q, k, beta, keep, root, *saved)


def backward(saved: tuple[Array, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, beta and log_decay for d_out, that of out."""
    q, k, beta, keep, root, faded, miss, correction, state = saved
    xp, d_unscaled = namespace(d_out), d_out[:, :, :, None, :] / root  # (b, h, n, 1, e): of q_n @ state
    steps, d_from_next = [], zeros(state[:, :, 0, ...].shape, state)  # (b, h, d, e): 0 for the last token
    for n in range(q.shape[2] - 1, -1, -1):
        q_n, k_n = q[:, :, n : n + 1, :], k[:, :, n : n + 1, :]  # (b, h, 1, d), (b, h, 1, d)
        # forward: read = q_n @ state / root; (faded of token n + 1) = keep * state
        d_state = transpose(q_n) @ d_unscaled[:, :, n, ...] + d_from_next  # (b, h, d, e) [dDELTA.4]
        # forward: state = faded + transpose(k_n) @ correction
        d_correction = k_n @ d_state  # (b, h, 1, e) [dDELTA.3]
        # forward: correction = beta * miss
        d_miss = beta[:, :, n, ...] * d_correction  # (b, h, 1, e) [dDELTA.2]
        # forward: miss = v_n - k_n @ faded; state = faded + transpose(k_n) @ correction
        d_faded = d_state - transpose(k_n) @ d_miss  # (b, h, d, e) [dDELTA.1]
        # forward: faded = keep * (state of token n - 1)
        d_from_next = keep[:, :, n, ...] * d_faded  # (b, h, d, e)
        steps.append((d_state, d_correction, d_miss, d_faded))
    d_state, d_correction, d_miss, d_faded = (xp.stack(column[::-1], axis=2) for column in zip(*steps, strict=True))
    # The gradients of the inputs, for all tokens at once: states are (b, h, n, d, e) now, rows (b, h, n, 1, e).
    # forward: read = q_n @ state / root
    d_q = xp.sum(state * d_unscaled, axis=-1)  # (b, h, n, d) [dDELTA.q]
    # forward: state = faded + transpose(k_n) @ correction; miss = v_n - k_n @ faded
    d_k = xp.sum(d_state * correction - faded * d_miss, axis=-1)  # (b, h, n, d) [dDELTA.k]
    d_v = d_miss[:, :, :, 0, :]  # (b, h, n, e) [dDELTA.v]
    # forward: correction = beta * miss
    d_beta = xp.sum(d_correction * miss, axis=(-2, -1))  # (b, h, n) [dDELTA.beta]
    # forward: faded = exp(log_decay) * (state of token n - 1)
    d_log_decay = xp.sum(d_faded * faded, axis=(-2, -1))  # (b, h, n) [dDELTA.log_decay]
    return {"q": d_q, "k": d_k, "v": d_v, "beta": d_beta, "log_decay": d_log_decay}
