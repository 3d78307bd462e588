"""The affine map y = x w + b, applied to the last axis; weights are (in, out)."""

from __future__ import annotations

from refattn.args import Maybe, checked
from refattn.xp import Array, namespace, product, products


@checked(x="... i", w="i o", bias=Maybe("o"))
def linear_forward(x: Array, w: Array, bias: Array | None) -> Array:
    """(b, n, in) -> (b, n, out).

    >>> import numpy as np
    >>> from refattn.ops.linear import linear_forward
    >>> w, bias = np.asarray([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]]), np.ones(3)
    >>> linear_forward(np.asarray([[[3.0, 4.0]]]), w, bias).tolist()
    [[[4.0, 5.0, 7.0]]]
    """
    y = product(x, w)
    return y if bias is None else y + bias


@checked(x="... i", w="i o", d_y="... o")
def linear_backward(x: Array, w: Array, d_y: Array) -> tuple[Array, Array, Array]:
    """Return the gradients with respect to x, w and the bias.

    >>> import numpy as np
    >>> from refattn.ops.linear import linear_backward
    >>> x, w = np.asarray([[[3.0, 4.0]]]), np.asarray([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
    >>> d_x, d_w, d_bias = linear_backward(x, w, np.asarray([[[1.0, 0.0, 1.0]]]))
    >>> d_x.tolist(), d_w.tolist(), d_bias.tolist()
    ([[[3.0, 0.0]]], [[3.0, 0.0, 3.0], [4.0, 0.0, 4.0]], [1.0, 0.0, 1.0])
    """
    xp = namespace(x)
    rows = xp.reshape(x, (-1, x.shape[-1]))  # (b*n, in)
    d_rows = xp.reshape(d_y, (-1, d_y.shape[-1]))  # (b*n, out)
    # forward: y = x @ w + bias
    d_x, d_w = products((d_y, xp.matrix_transpose(w)), (xp.matrix_transpose(rows), d_rows))
    d_bias = xp.sum(d_rows, axis=0)
    return d_x, d_w, d_bias
