"""The feed-forward sublayer: y = gelu(x w_in + b_in) w_out + b_out, applied to each token.

Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 2, with GELU in place of the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.args import One, checked
from refattn.ops import activations
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array

GELU = {
    "tanh": (activations.gelu_tanh_forward, activations.gelu_tanh_backward),
    "exact": (activations.gelu_exact_forward, activations.gelu_exact_backward),
}


@dataclass(frozen=True)
class Params:
    """Weights (in, out) and biases."""

    w_in: Array  # (m, in)
    b_in: Array  # (in,)
    w_out: Array  # (in, m)
    b_out: Array  # (m,)


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    x: Array  # (b, n, m)
    hidden: Array  # (b, n, in)
    gate: Array  # (b, n, in)
    active: Array  # (b, n, in)


@checked(params=Params, x="... m", gelu=One(("tanh", "exact")))
def mlp_forward(params: Params, x: Array, gelu: str = "tanh") -> tuple[Array, Saved]:
    """Return (y, saved), y (b, n, m).

    >>> import numpy as np
    >>> from refattn.ops.mlp import Params, mlp_forward
    >>> params = Params(np.eye(2), np.zeros(2), np.eye(2), np.zeros(2))
    >>> y, saved = mlp_forward(params, np.asarray([[[-1.0, 1.0]]]))
    >>> y.round(4).tolist()
    [[[-0.1588, 0.8412]]]
    """
    hidden = linear_forward(x, params.w_in, params.b_in)
    active, gate = GELU[gelu][0](hidden)
    return linear_forward(active, params.w_out, params.b_out), Saved(x, hidden, gate, active)


@checked(params=Params, saved=Saved, d_y="... m", gelu=One(("tanh", "exact")))
def mlp_backward(params: Params, saved: Saved, d_y: Array, gelu: str = "tanh") -> tuple[Array, Params]:
    """Return the gradients with respect to x and the parameters.

    >>> import numpy as np
    >>> from refattn.ops.mlp import Params, mlp_backward, mlp_forward
    >>> params = Params(np.eye(2), np.zeros(2), np.eye(2), np.zeros(2))
    >>> y, saved = mlp_forward(params, np.asarray([[[-1.0, 1.0]]]))
    >>> d_x, d_params = mlp_backward(params, saved, np.ones_like(y))
    >>> d_x.round(4).tolist(), d_params.b_out.tolist()
    ([[[-0.083, 1.083]]], [1.0, 1.0])
    """
    # forward: y = active @ w_out + b_out
    d_active, d_w_out, d_b_out = linear_backward(saved.active, params.w_out, d_y)
    # forward: active, gate = gelu(hidden)
    d_hidden = GELU[gelu][1](saved.hidden, saved.gate, d_active)
    # forward: hidden = x @ w_in + b_in
    d_x, d_w_in, d_b_in = linear_backward(saved.x, params.w_in, d_hidden)
    return d_x, Params(d_w_in, d_b_in, d_w_out, d_b_out)
