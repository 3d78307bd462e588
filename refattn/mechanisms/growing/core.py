"""The public core: softmax attention, and what growth reads of its backward.

`forward` and `backward` are those of softmax attention. What makes attention able to grow is that its scale is
stored with the weights, and so comes in as an option; 1/sqrt(d) is right before the first growth alone, since a change
of d must not change what the old columns mean.
"""

from __future__ import annotations

from refattn import equations
from refattn.args import check, check_arrays, check_floating, naming
from refattn.mechanisms.core_arguments import check_saved, upstream
from refattn.mechanisms.growing import dense
from refattn.mechanisms.growing.implementations import tiled
from refattn.mechanisms.record import Unsupported
from refattn.mechanisms.softmax.core import IMPLEMENTATIONS, Saved, backward, forward
from refattn.xp import Array, namespace

__all__ = ["IMPLEMENTATIONS", "Saved", "backward", "contract", "contract_and_square", "forward", "functional_gradient"]

CONTRACTIONS = {"dense": dense, "tiled": tiled}


@naming("saved")
def functional_gradient(saved: Saved, d_out: Array) -> Array:
    """Gradient of a loss with respect to the scores before soft-cap, mask and softmax, as if each were free.

    Parameters
    ----------
    saved
        What `forward` returned, of the dense implementation: the tiled one never holds the scores.
    d_out
        (b, h, i, e): gradient of the loss with respect to `out`.

    Returns
    -------
    Array
        (b, h, i, j) in the dtype of the inputs.

    Raises
    ------
    TypeError, ValueError
        Where an argument is of a wrong type, dtype, shape, library or device.
    Unsupported
        Where the implementation is not the dense one.

    Notes
    -----
    ds of `refattn.mechanisms.growing.dense`. Source: L. Burgund, Attention Growing Networks, section 1.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> q = k = v = np.eye(2).reshape(1, 1, 2, 2)
    >>> out, saved = ra.growing.forward(q, k, v, scale=0.0)
    >>> ra.growing.functional_gradient(saved, np.asarray([[[[1.0, 0.0], [0.0, 0.0]]]]))[0, 0]
    array([[ 0.25, -0.25],
           [ 0.  ,  0.  ]])
    """
    d_out = _upstream(saved, d_out)
    if saved.implementation != "dense":
        raise Unsupported(f'saved: got "{saved.implementation}", which holds no scores; needs implementation="dense"')
    g = equations.active(dense).functional_gradient(saved.inner, d_out)
    return namespace(g).astype(g, saved.like.dtype, copy=False)


@naming("saved")
def contract(saved: Saved, d_out: Array, x: Array, *, total: bool = False) -> Array:
    """Contract the functional gradient ds with tokens that are queries and keys at once: x^T ds x, for each head.

    Parameters
    ----------
    saved
        What `forward` returned, in any implementation.
    d_out
        (b, h, n, e): gradient of the loss with respect to `out`.
    x
        (b, n, in): tokens, as many as queries and as many as keys; of any floating dtype, in which the sums are taken.
    total
        Whether the sum over all sequences is wanted.

    Returns
    -------
    Array
        (b, h, in, in), or (h, in, in) with `total`. The gradient of the loss with respect to a kernel M with which the
        scores are x M x^T.

    Raises
    ------
    TypeError, ValueError
        Where an argument is of a wrong type, dtype, shape, library or device.
    """
    return contract_and_square(saved, d_out, x, total=total)[0]


@naming("saved")
def contract_and_square(saved: Saved, d_out: Array, x: Array, *, total: bool = False) -> tuple[Array, Array]:
    """Return what `contract` does, and the sum () of the squares of the functional gradient of all heads."""
    d_out = _upstream(saved, d_out)
    check("total", total, bool)
    check_arrays(x=x, d_out=d_out)
    check_floating(x=x)
    b, _, queries, _ = saved.shape
    keys = saved.inner.k.shape[2]
    if len(x.shape) != 3 or x.shape[:2] != (b, queries) or keys != queries:
        needs = f"({b}, {queries}, width)" if keys == queries else f"as many queries ({queries}) as keys ({keys})"
        raise ValueError(f"x: got shape {tuple(x.shape)}, needs {needs}")
    return equations.active(CONTRACTIONS[saved.implementation]).contract(saved.inner, d_out, x, total)


def _upstream(saved: Saved, d_out: Array) -> Array:
    """Return the gradient of the output in the dtype of the computation."""
    check_saved(saved, Saved)
    (d_out,) = upstream(saved.like, d_out=(d_out, saved.shape))
    return d_out
