"""Layer normalisation over the last axis: mean 0, variance 1, then an optional gain and bias.

    y = (x - mean x) r gain + bias,   r = 1 / sqrt(var x + eps),   var with division by the width m

The gradient loses its parts along 1 and along the normalised x, because y does not change in these directions::

    dx = r (g - mean g - n mean(g n)),   n = (x - mean x) r,   g = dy gain

which holds for eps > 0 as well. Source: Ba, Kiros, Hinton 2016 (arXiv:1607.06450), equation 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.args import Maybe, Real, checked
from refattn.xp import Array, namespace, sum_last


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    normalised: Array  # (..., m)
    inverse: Array  # (..., 1): r
    gain: Array | None  # (m,)


@checked(x="... m", eps=(Real(0.0), ""))
def normalise(x: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    """Return n (..., m) for x (..., m), and what the backward reads: n and r (..., 1)."""
    xp, width = namespace(x), x.shape[-1]
    centred = x - sum_last(x) / width
    inverse = 1.0 / xp.sqrt(xp.vecdot(centred, centred)[..., None] / width + eps)
    normalised = centred * inverse
    return normalised, (normalised, inverse)


@checked(normalised="... m", inverse="*", d_normalised="... m")
def normalise_backward(normalised: Array, inverse: Array, d_normalised: Array) -> Array:
    """Return the gradient of x for that of n, and for n and r."""
    width = normalised.shape[-1]
    # forward: normalised = (x - mean(x)) * inverse
    along_one = sum_last(d_normalised) / width
    along_x = namespace(normalised).vecdot(d_normalised, normalised)[..., None] / width
    return (d_normalised - along_one - normalised * along_x) * inverse


@checked(x="... m", gain=Maybe("m"), bias=Maybe("m"), eps=Real(0.0))
def layer_norm_forward(
    x: Array, gain: Array | None = None, bias: Array | None = None, eps: float = 1e-5
) -> tuple[Array, Saved]:
    """Return (y, saved) for x (..., m), and a gain and a bias (m,) that are 1 and 0 where they are None.

    >>> import numpy as np
    >>> from refattn.ops.layer_norm import layer_norm_forward
    >>> y, saved = layer_norm_forward(np.asarray([1.0, 2.0, 3.0]), eps=0.0)
    >>> y.round(4).tolist()
    [-1.2247, 0.0, 1.2247]
    """
    normalised, (_, inverse) = normalise(x, eps)
    y = normalised if gain is None else normalised * gain
    return y if bias is None else y + bias, Saved(normalised, inverse, gain)


@checked(saved=Saved, d_y="... m")
def layer_norm_backward(saved: Saved, d_y: Array) -> tuple[Array, Array, Array]:
    """Return the gradients with respect to x, the gain and the bias.

    >>> import numpy as np
    >>> from refattn.ops.layer_norm import layer_norm_backward, layer_norm_forward
    >>> y, saved = layer_norm_forward(np.asarray([[1.0, 2.0, 3.0]]), eps=0.0)
    >>> d_x, d_gain, d_bias = layer_norm_backward(saved, np.asarray([[0.0, 1.0, 0.0]]))
    >>> d_x.round(4).tolist(), d_bias.tolist()
    ([[-0.4082, 0.8165, -0.4082]], [0.0, 1.0, 0.0])
    """
    if tuple(d_y.shape) != tuple(saved.normalised.shape):
        raise ValueError(f"d_y: got shape {tuple(d_y.shape)}, needs {tuple(saved.normalised.shape)}")
    axes = tuple(range(len(d_y.shape) - 1))
    xp = namespace(d_y)
    # forward: y = normalised * gain + bias
    d_gain = xp.sum(d_y * saved.normalised, axis=axes)
    d_bias = xp.sum(d_y, axis=axes)
    d_normalised = d_y if saved.gain is None else d_y * saved.gain
    return normalise_backward(saved.normalised, saved.inverse, d_normalised), d_gain, d_bias
