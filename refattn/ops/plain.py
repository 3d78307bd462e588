"""What the definitions share, written straight: the softmax of rows, and rows of mean 0 and variance 1."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from refattn.xp import Array, namespace

P = ParamSpec("P")
R = TypeVar("R")


def softmax(scores: Array) -> Array:
    """Return w_j = exp(s_j) / sum_l exp(s_l) of each row; 0 for a row that sees nothing, where every score is -inf.

    The largest score is subtracted first, so that exp cannot overflow.
    """
    xp, largest = namespace(scores), namespace(scores).max(scores, axis=-1, keepdims=True)
    sees = largest != float("-inf")
    exponentials = xp.exp(scores - xp.where(sees, largest, 0.0))
    return exponentials / xp.where(sees, xp.sum(exponentials, axis=-1, keepdims=True), 1.0)


def softmax_backward(weights: Array, d_weights: Array) -> Array:
    """Return ds_j = w_j (dw_j - sum_l w_l dw_l): adding the same to a whole row of scores changes no weight."""
    mean = namespace(weights).sum(weights * d_weights, axis=-1, keepdims=True)
    return weights * (d_weights - mean)


def normalise(x: Array, eps: float = 1e-5) -> tuple[Array, Array]:
    """Return n = (x - mean x) r of each row, and r = 1 / sqrt(var x + eps)."""
    xp = namespace(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    rate = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return centred * rate, rate


def normalise_backward(n: Array, rate: Array, d_n: Array) -> Array:
    """Return dx = r (dn - mean dn - n mean(n dn)): neither a shift of x nor its length changes n."""
    xp = namespace(n)
    return rate * (d_n - xp.mean(d_n, axis=-1, keepdims=True) - n * xp.mean(n * d_n, axis=-1, keepdims=True))


def paper_alone(function: Callable[P, R]) -> Callable[P, R]:
    """Let a definition refuse an option that its paper does not have, and point at the general call."""
    names = inspect.signature(function).parameters.keys()
    home = ".".join(function.__module__.split(".")[::2][:2])  # refattn.mechanisms.X.definition -> refattn.X

    @functools.wraps(function)
    def definition(*args: P.args, **kwargs: P.kwargs) -> R:
        if unknown := kwargs.keys() - names:
            raise TypeError(f"{min(unknown)}: the definition does not have it, needs {home}.{function.__name__}")
        return function(*args, **kwargs)

    return definition
