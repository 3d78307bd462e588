"""Embedding: row t of a table stands for token t.

Tokens are compared with 0, 1, ..., size - 1 instead of being used as indices: one matrix product then adds up the rows
of the gradient, in an order that does not change from run to run.
"""

from __future__ import annotations

from refattn.args import Axes, Whole, checked
from refattn.xp import Array, any_outside, arange, namespace, product


@checked(tokens=Axes("...", "whole"), size=Whole(), like=Axes("*"))
def one_hot(tokens: Array, size: int, like: Array) -> Array:
    """(...,) integers -> (..., size): 1 where the last index is the token, otherwise 0, in the dtype of `like`.

    >>> import numpy as np
    >>> from refattn.ops.embedding import one_hot
    >>> one_hot(np.asarray([2, 0]), 3, like=np.ones(1)).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    xp = namespace(tokens, like)
    hot = tokens[..., None] == xp.astype(arange(0, size, like), tokens.dtype)
    return xp.astype(hot, like.dtype)


@checked(table="t m", tokens=Axes("...", "whole"))
def embedding_forward(table: Array, tokens: Array) -> Array:
    """(t, m), (b, n) -> (b, n, m).

    >>> import numpy as np
    >>> from refattn.ops.embedding import embedding_forward
    >>> embedding_forward(np.asarray([[0.0, 1.0], [2.0, 3.0]]), np.asarray([[1, 1, 0]])).tolist()
    [[[2.0, 3.0], [2.0, 3.0], [0.0, 1.0]]]
    """
    xp = namespace(table, tokens)
    if any_outside(tokens, table.shape[0]):
        raise ValueError(f"tokens: got one outside of 0 to {table.shape[0] - 1}")
    return xp.reshape(xp.take(table, xp.reshape(tokens, (-1,)), axis=0), (*tokens.shape, table.shape[1]))


@checked(table="t m", tokens=Axes("...", "whole"), d_x="... m")
def embedding_backward(table: Array, tokens: Array, d_x: Array) -> Array:
    """Return the gradient with respect to the table (t, m).

    >>> import numpy as np
    >>> from refattn.ops.embedding import embedding_backward
    >>> tokens, d_x = np.asarray([[1, 1, 0]]), np.asarray([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    >>> embedding_backward(np.zeros((2, 2)), tokens, d_x).tolist()
    [[5.0, 6.0], [4.0, 6.0]]
    """
    xp = namespace(table, tokens)
    hot = one_hot(xp.reshape(tokens, (-1,)), table.shape[0], table)  # (b*n, t)
    # forward: x = hot @ table
    return product(xp.matrix_transpose(hot), xp.reshape(d_x, (-1, d_x.shape[-1])))
