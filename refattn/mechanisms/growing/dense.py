"""What growth reads of softmax attention, the definition: every score at once.

The core is softmax attention; its equations, SM.1 to SM.9, stand in `refattn.mechanisms.softmax.dense`. With the
weights w_ij = SM.7, the capped scores c_ij = SM.2, and do, the gradient of a loss with respect to the output::

    g_ij = w_ij (do_i . v_j - sum_l w_il do_i . v_l)    with a soft-cap: times 1 - (c_ij / softcap)^2
    N = x^T g x = sum_ij x_i g_ij x_j^T                 for tokens x that are queries and keys at once
    |g|^2 = sum_ij g_ij^2

g is the functional gradient: that of the loss with respect to the scores, were each of them free to change (dSM.1).
Its rows sum to 0 without a soft-cap, because a softmax does not see what is added to a whole row, and it is 0 where a
mask hides a key. Where the scores are x M x^T with a kernel M, N is the gradient of the loss with respect to M, and all
that growth does follows from it.

Axes: b batch, h query head, i query, j key, n token, e width of values, in width of the tokens.

Source: L. Burgund, Attention Growing Networks (internship report, LISN), section 1; it writes softmax(S) where the
scores S_i of head i are meant, and says nothing of masks.
"""

from __future__ import annotations

from refattn.mechanisms.softmax.dense import Saved
from refattn.ops.heads import repeat_heads
from refattn.xp import Array, namespace, sum_wide


def functional_gradient(saved: Saved, d_out: Array) -> Array:
    """Return g (b, h, i, j) for the gradient d_out (b, h, i, e) of the output."""
    xp, weights = namespace(d_out), saved.weights
    v_heads = repeat_heads(saved.v, weights.shape[1])  # (b, h, j, e): copies of v
    # forward: out = weights @ v_heads
    d_weights = d_out @ xp.matrix_transpose(v_heads)  # (b, h, i, j)
    # forward: weights = softmax(scores)
    inner = xp.sum(d_weights * weights, axis=-1, keepdims=True)  # (b, h, i, 1)
    d_capped = weights * (d_weights - inner)  # (b, h, i, j)
    if saved.softcap is None:
        return d_capped
    # forward: capped = softcap * tanh(scores / softcap)
    tanh = xp.tanh(saved.scores / saved.softcap)  # (b, h, i, j)
    return d_capped * (1.0 - tanh * tanh)


def contract(saved: Saved, d_out: Array, x: Array, total: bool) -> tuple[Array, Array]:
    """Return N of each sequence (b, h, in, in), or their sum (h, in, in), for tokens x (b, n, in); and |g|^2."""
    xp = namespace(x)
    g = xp.astype(functional_gradient(saved, d_out), x.dtype, copy=False)  # (b, h, n, n)
    b, h, n, _ = g.shape
    # All heads of a sequence at once, and where the sum is wanted all sequences: few large products are quicker.
    pulled = xp.reshape(xp.reshape(g, (b, h * n, n)) @ x, (b, h, n, x.shape[2]))  # (b, h, n, in): g x
    square = sum_wide(g * g)  # ()
    if not total:
        return xp.matrix_transpose(x)[:, None, :, :] @ pulled, square
    pulled = xp.reshape(xp.permute_dims(pulled, (1, 0, 2, 3)), (h, b * n, x.shape[2]))  # (h, b*n, in): g x
    return xp.matrix_transpose(xp.reshape(x, (b * n, x.shape[2]))) @ pulled, square
