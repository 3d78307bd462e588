"""What growth reads of softmax attention, every score at once: the gradient of the scores, and its sums over tokens.

The core is softmax attention, which `refattn.mechanisms.softmax.dense` defines. With its weights w_ij, its capped
scores c_ij, and do, the gradient of a loss with respect to the output::

    [GROW.functional_gradient]  ds_ij = w_ij (do_i . v_j - sum_l w_il do_i . v_l)
    [dGROW.1]  N = sum_b sum_ij x_i ds_ij x_j^T         for tokens x that are queries and keys at once, and each head
    [GROW.2]  C = sum_b sum_i x_i x_i^T

With a soft-cap ds is multiplied by 1 - (c_ij / softcap)^2. With dropout do_i . v_j is multiplied by keep_ij.

ds is the functional gradient: that of the loss with respect to the scores, if each were free to change. Its rows
sum to 0 without a soft-cap, because a softmax does not see what is added to a whole row. It is 0 where a mask hides a
key. If the scores are x M x^T with a kernel M (GROW.1), N is the gradient of the loss with respect to M, and C says
what a change of M does to the scores. All that growth does follows from the two.

Axes: b batch, h query head, i query, j key, n token, e width of values, in width of the tokens.

Source: L. Burgund 2025, Attention Growing Networks (internship report, LISN), section 1; it writes softmax(S) where the
scores S_i of head i are meant, and says nothing of masks.
"""

from __future__ import annotations

from refattn.mechanisms.softmax.dense import Saved
from refattn.ops.heads import repeat_heads
from refattn.xp import Array, namespace, sum_wide


def functional_gradient(saved: Saved, d_out: Array) -> Array:
    """Return ds (b, h, i, j) for the gradient d_out (b, h, i, e) of the output."""
    xp, weights = namespace(d_out), saved.weights
    v_heads = repeat_heads(saved.v, weights.shape[1])  # (b, h, j, e): copies of v
    # forward: out = keep * weights @ v_heads
    d_kept = d_out @ xp.matrix_transpose(v_heads)  # (b, h, i, j)
    d_weights = d_kept if saved.keep is None else saved.keep * d_kept  # (b, h, i, j)
    # forward: weights = softmax(scores)
    inner = xp.sum(d_weights * weights, axis=-1, keepdims=True)  # (b, h, i, 1)
    if saved.softcap is None:
        g = weights * (d_weights - inner)  # (b, h, i, j) [GROW.functional_gradient]
    else:
        # forward: capped = softcap * tanh(scores / softcap)
        tanh = xp.tanh(saved.scores / saved.softcap)  # (b, h, i, j)
        g = weights * (d_weights - inner) * (1.0 - tanh * tanh)  # (b, h, i, j) [GROW.functional_gradient]
    return g


def contract(saved: Saved, d_out: Array, x: Array, total: bool) -> tuple[Array, Array]:
    """Return N of each sequence (b, h, in, in), or of all (h, in, in), for tokens x (b, n, in); and |ds|^2."""
    xp = namespace(x)
    g = xp.astype(functional_gradient(saved, d_out), x.dtype, copy=False)  # (b, h, n, n)
    b, h, n, _ = g.shape
    # All heads of a sequence at once, and where the sum is wanted all sequences: few large products are quicker.
    pulled = xp.reshape(xp.reshape(g, (b, h * n, n)) @ x, (b, h, n, x.shape[2]))  # (b, h, n, in): ds x
    if total:
        side = xp.reshape(xp.permute_dims(pulled, (1, 0, 2, 3)), (h, b * n, x.shape[2]))  # (h, b*n, in): ds x
        found = xp.matrix_transpose(xp.reshape(x, (b * n, x.shape[2]))) @ side  # (h, in, in) [dGROW.1]
    else:
        found = xp.matrix_transpose(x)[:, None, :, :] @ pulled  # (b, h, in, in): the part of each sequence in N
    return found, sum_wide(g * g)


def gram(x: Array) -> Array:
    """Return C (in, in) of tokens x (b, n, in)."""
    flat = namespace(x).reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))  # (b*n, in)
    found = namespace(x).matrix_transpose(flat) @ flat  # (in, in) [GROW.2]
    return found
