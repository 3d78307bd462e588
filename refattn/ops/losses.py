"""Losses: cross entropy of the next token, and the mean of squared differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.args import Axes, check, checked
from refattn.ops.embedding import one_hot
from refattn.xp import Array, any_outside, is_array, max_last, namespace, sum_wide


@dataclass(frozen=True)
class Saved:
    """What the backward of the cross entropy reads."""

    probabilities: Array  # (..., t)
    hot: Array  # (..., t)


@checked(logits="... t")
def cross_entropy_forward(logits: Array, targets: Array) -> tuple[Array, Saved]:
    """Return the loss of each token in nats, log(sum_t exp(logits_t)) - logits_target, and what the backward reads.

    `logits` are (..., t), `targets` (...,) whole numbers from 0 to t - 1, and the losses (...,).

    Source: Bishop 2006, *Pattern Recognition and Machine Learning*, equations 4.104 and 4.108, for one token.

    Raises
    ------
    TypeError
        Where the targets are no whole numbers, or the arrays are of several libraries.
    ValueError
        Where the shape of the targets is another, or one of them is outside of 0 to t - 1.

    Examples
    --------
    >>> import numpy as np
    >>> from refattn.ops.losses import cross_entropy_forward
    >>> losses, saved = cross_entropy_forward(np.log([[1.0, 3.0]]), np.asarray([1]))
    >>> losses.round(4).tolist(), round(float(-np.log(3 / 4)), 4)
    ([0.2877], 0.2877)
    """
    if not is_array(targets):
        raise TypeError(f"targets: got {type(targets).__name__}, needs an array")
    xp = namespace(logits, targets)
    check_targets(targets, tuple(logits.shape[:-1]), logits.shape[-1])
    shifted = logits - max_last(logits)
    exponentials = xp.exp(shifted)
    total = xp.sum(exponentials, axis=-1, keepdims=True)
    hot = one_hot(targets, logits.shape[-1], logits)
    losses = xp.log(total[..., 0]) - xp.sum(hot * shifted, axis=-1)
    return losses, Saved(exponentials / total, hot)


def check_targets(targets: Array, shape: tuple[int, ...], vocabulary: int) -> None:
    """Raise where targets are no whole numbers of a shape, from 0 to the vocabulary - 1."""
    check("targets", targets, Axes("*", "whole"))
    if tuple(targets.shape) != shape:
        raise ValueError(f"targets: got shape {tuple(targets.shape)}, needs {shape}")
    if any_outside(targets, vocabulary):
        raise ValueError(f"targets: got one outside of 0 to {vocabulary - 1}")


@checked(saved=Saved, d_losses="...")
def cross_entropy_backward(saved: Saved, d_losses: Array) -> Array:
    """Return the gradient with respect to the logits.

    >>> import numpy as np
    >>> from refattn.ops.losses import cross_entropy_backward, cross_entropy_forward
    >>> losses, saved = cross_entropy_forward(np.log([[1.0, 3.0]]), np.asarray([1]))
    >>> cross_entropy_backward(saved, np.ones(1)).round(4).tolist()
    [[0.25, -0.25]]
    """
    if tuple(d_losses.shape) != tuple(saved.hot.shape[:-1]):
        raise ValueError(f"d_losses: got shape {tuple(d_losses.shape)}, needs {tuple(saved.hot.shape[:-1])}")
    # forward: losses = log(sum(exp(logits))) - logits[target]
    return (saved.probabilities - saved.hot) * d_losses[..., None]


@checked(x="...", target="...")
def mse_forward(x: Array, target: Array) -> tuple[Array, Array]:
    """Return the mean of the squares of ``x - target``, an array without axes, and the difference for the backward.

    >>> import numpy as np
    >>> from refattn.ops.losses import mse_forward
    >>> loss, difference = mse_forward(np.asarray([1.0, 5.0]), np.asarray([1.0, 3.0]))
    >>> float(loss), difference.tolist()
    (2.0, [0.0, 2.0])
    """
    _check_elements(x=x)
    difference = x - target
    return sum_wide(difference * difference) / math.prod(difference.shape), difference


@checked(difference="...", d_loss="")
def mse_backward(difference: Array, d_loss: Array) -> Array:
    """Return the gradient with respect to x; that of the target is its negative.

    >>> import numpy as np
    >>> from refattn.ops.losses import mse_backward, mse_forward
    >>> loss, difference = mse_forward(np.asarray([1.0, 5.0]), np.asarray([1.0, 3.0]))
    >>> mse_backward(difference, np.ones(())).tolist()
    [0.0, 2.0]
    """
    _check_elements(difference=difference)
    # forward: loss = mean((x - target)^2)
    return difference * (2.0 / math.prod(difference.shape)) * d_loss


def _check_elements(**given: Array) -> None:
    for name, x in given.items():
        if 0 in x.shape:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs at least one element")
