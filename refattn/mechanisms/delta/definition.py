"""The gated delta rule: a memory that learns, token by token, which value belongs to which key.

The memory is a matrix S of d x e numbers, 0 at the start. For a vector x of d numbers it has an answer S^T x, of e
numbers. Token n has a query q_n, a key k_n, a value v_n and two numbers. beta_n in [0, 1] says how firmly to write,
log_decay_n <= 0 how much to forget: nothing if it is 0. Token n does four things. It lets the memory fade (the gate): S
is multiplied by exp(log_decay_n), in (0, 1]. It looks up its key: the miss is the value of the token minus the answer
to its key. It writes a correction of this answer. It reads the answer to its query. Vectors are columns here (the code
has rows, see Axes); k u^T is a matrix of rank 1.

    [DELTA.1]  D_n = exp(log_decay_n) S_(n-1)       the faded memory; S_0 = 0
    [DELTA.2]  m_n = v_n - D_n^T k_n                the miss
    [DELTA.3]  u_n = beta_n m_n                     the correction: by how much the answer shall change
    [DELTA.4]  S_n = D_n + k_n u_n^T                the memory after the write
    [DELTA.5]  o_n = S_n^T q_n / sqrt(d)            the answer to the query, scaled as in softmax attention

Why this write. The answer to any x becomes (D + k u^T)^T x = D^T x + u (k . x). For x perpendicular to k it stays as it
was. For x = k, and keys of length 1 as the caller makes them, it becomes D^T k + beta m = (1 - beta) D^T k + beta v: if
beta = 1 the new value replaces the old answer, if beta = 0 the answer stays. It is a step of gradient descent with the
rate beta on |v_n - S^T k_n|^2 / 2: the gradient with respect to S, at S = D_n, is -k_n m_n^T. Linear attention, which
the rule improves on, has neither lookup nor gate, S_n = S_(n-1) + k_n v_n^T, so the values of a key pile up. A write
does not change the answers to keys perpendicular to its own; only the gate fades them. The gate is given by its
logarithm: over several tokens gates multiply and logarithms add up, which fast kernels use.

S has the same size for any number of tokens, where softmax attention keeps all keys and values (KV cache). (`forward`
keeps the S of all tokens here, for a plain `backward`.) No causal mask is needed: o_n is read after the write of token
n and before that of token n + 1.

Backward. A d before a symbol means the gradient of a loss L with respect to it, of the same shape (d alone is the
width): dS_n of S_n, dq_n of q_n. The caller gives do_n, that of o_n. [dDELTA.4] is the gradient with respect to the
value of DELTA.4, [dDELTA.q] that with respect to the input q. <A, B> is the sum of the products of elements at equal
places: if S changes by a small matrix R, L changes by <dS, R>. Two products occur. For any matrices A, B and vectors x,
y, p:

    if B = A + x y^T:    dA = dB,        dx = dB y,    dy = dB^T x      as <dB, x y^T> = x . (dB y) = y . (dB^T x)
    if p = A^T x:        dA = x dp^T,    dx = A dp                      as dp . (A^T x) = <A, x dp^T> = x . (A dp)

What is used several times gets the sum of the gradients of all its uses. S_n is read by token n, and fades into
D_(n+1); for the last token this second term of dS_n is 0. So the loop goes from the last token to the first. Both k_n
and D_n are in the write and in the lookup. The miss contains -D_n^T k_n, so dm_n enters with a minus.

    [dDELTA.4]  dS_n = q_n do_n^T / sqrt(d) + exp(log_decay_(n+1)) dD_(n+1)
    [dDELTA.3]  du_n = dS_n^T k_n
    [dDELTA.2]  dm_n = beta_n du_n
    [dDELTA.1]  dD_n = dS_n - k_n dm_n^T            by the write, and by the lookup
    [dDELTA.q]  dq_n = S_n do_n / sqrt(d)
    [dDELTA.k]  dk_n = dS_n u_n - D_n dm_n          by the write, and by the lookup
    [dDELTA.v]  dv_n = dm_n
    [dDELTA.beta]  dbeta_n = du_n . m_n
    [dDELTA.log_decay]  dlog_decay_n = <dD_n, D_n>    the derivative of exp(x) S with respect to x is exp(x) S itself

Axes: b batch, h head, n token, d width of queries and keys, e width of values. The code holds a vector as a row, (b, h,
1, d): D_n^T k_n is `k_n @ faded` there, and k_n u_n^T is `transpose(k_n) @ correction`. Source: Yang, Kautz and
Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024 (arXiv:2412.06464), section 3.1, whose S is
the transpose of this one; 1 / sqrt(d) is of their code, not of the rule.

The same key three times. If beta = 1 each value replaces the one before, if beta = 1/2 the answer goes half the way.
Linear attention would add the values up, to 5, 12 and 21.

    >>> import numpy as np, refattn.mechanisms.delta.definition as delta
    >>> k, v, one = np.ones((1, 1, 3, 1)), np.asarray([[[[5.0], [7.0], [9.0]]]]), np.ones((1, 1, 3))
    >>> [delta.forward(k, k, v, beta=x * one, log_decay=0.0 * one)[0].ravel().tolist() for x in (1.0, 0.5)]
    [[5.0, 7.0, 9.0], [2.5, 4.75, 6.875]]
"""

from __future__ import annotations

import math

# namespace(x): the library of x; zeros(shape, x): like x; transpose: last two axes; paper_alone: allows no other option
from refattn.ops.plain import paper_alone
from refattn.xp import Array, namespace, transpose, zeros


@paper_alone
def forward(q: Array, k: Array, v: Array, *, beta: Array, log_decay: Array) -> tuple[Array, tuple[Array, ...]]:
    """Return out (b, h, n, e) and what `backward` reads, for q, k (b, h, n, d), v (b, h, n, e), the rest (b, h, n)."""
    xp, root = namespace(q, k, v), math.sqrt(q.shape[3])
    beta, keep = beta[..., None, None], xp.exp(log_decay)[..., None, None]  # (b, h, n, 1, 1), (b, h, n, 1, 1)
    state = zeros((*k.shape[:2], k.shape[3], v.shape[3]), k)  # (b, h, d, e): S_0
    tape = []
    for n in range(q.shape[2]):
        q_n, k_n, v_n = (x[:, :, n : n + 1, :] for x in (q, k, v))  # (b, h, 1, d), (b, h, 1, d), (b, h, 1, e)
        faded = keep[:, :, n, ...] * state  # (b, h, d, e) [DELTA.1]
        miss = v_n - k_n @ faded  # (b, h, 1, e) [DELTA.2]
        correction = beta[:, :, n, ...] * miss  # (b, h, 1, e) [DELTA.3]
        state = faded + transpose(k_n) @ correction  # (b, h, d, e) [DELTA.4]
        read = q_n @ state / root  # (b, h, 1, e) [DELTA.5]
        tape.append((faded, miss, correction, state, read))
    # The states are (b, h, n, d, e) now, the rows (b, h, n, 1, e).
    faded, miss, correction, state, read = of_all_tokens(tape)
    return read[:, :, :, 0, :], (q, k, beta, keep, faded, miss, correction, state)


def backward(saved: tuple[Array, ...], d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, beta and log_decay for d_out, that of out."""
    q, k, beta, keep, faded, miss, correction, state = saved
    xp, root = namespace(d_out), math.sqrt(q.shape[3])
    d_unscaled = d_out[:, :, :, None, :] / root  # (b, h, n, 1, e): of q_n @ state
    tape, d_from_next = [], zeros(state[:, :, 0, ...].shape, state)  # -, (b, h, d, e): 0 for the last token
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
        tape.append((d_state, d_correction, d_miss, d_faded))
    d_state, d_correction, d_miss, d_faded = of_all_tokens(tape[::-1])
    # The gradients of the inputs, of all tokens at once: states are (b, h, n, d, e) now, rows (b, h, n, 1, e). So a sum
    # over the last axis of state * row is the matrix times the vector.
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


def of_all_tokens(tape: list[tuple[Array, ...]]) -> list[Array]:
    """Return every value of the tape, which has an entry for each token, as one array of all tokens: axis n after h."""
    return [namespace(*values).stack(values, axis=2) for values in zip(*tape, strict=True)]
