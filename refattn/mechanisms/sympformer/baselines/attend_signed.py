"""Linear attention of several heads, for the baselines: products of queries and keys, of either sign, and no softmax.

Equations (y the normalised tokens, d the width of a head, n_i the number of tokens that i attends)::

    [SYMP.98]  q = heads(y w_q) d^(-1/4)
    [SYMP.99]  k = heads(y w_k) d^(-1/4)
    [SYMP.100]  w = heads(y w_v)
    [SYMP.101]  a_i = 1/n_i sum_j <q_i, k_j> w_j
    [SYMP.102]  f = merge(a) w_o

Adjoints, for a given df::

    [dSYMP.101]  da = heads(df w_o^T)
    [dSYMP.100]  dw_j = sum_{i>=j} <q_i, k_j> da_i / n_i
    [dSYMP.99]  dk_j = sum_{i>=j} <da_i, w_j> q_i / n_i
    [dSYMP.98]  dq_i = 1/n_i sum_j <da_i, w_j> k_j

and dy = merge(dq) w_q^T d^(-1/4) + merge(dk) w_k^T d^(-1/4) + merge(dw) w_v^T. A connection asks of q and k besides.

Axes: b batch, h head, i token, d and e widths of a head, m width.

Source: the signed linear family of the authors' manuscript of October 2026.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.arguments import check_number
from refattn.mechanisms.sympformer.oracles import linear
from refattn.mechanisms.sympformer.oracles.linear import Kernel, Linear
from refattn.mechanisms.sympformer.oracles.mixing import mix_backward
from refattn.mechanisms.sympformer.params import Add, Layer
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array

Heads = tuple[Array, Array, Array]


@dataclass(frozen=True)
class Signed(Linear):
    """Linear attention of heads, with the four matrices of softmax attention, which baselines alone have: this file.

    Attributes
    ----------
    ridge
        What is added to the matrices that a connection divides by, see `connection_signed`.
    """

    ridge: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ridge", self.ridge, positive=True)

    def weights(self, kicks: bool, drifts: bool) -> set[str]:
        """Return the matrices of a block."""
        return {"w_q", "w_k", "w_v", "w_o"}


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    kernel: Kernel
    qkv: Heads
    joined: Array


def heads_of(layer: Layer, y: Array, name: str) -> Array:
    """Return heads(y w) d^(-1/4) for the matrix of a name."""
    heads = layer.params.config.heads
    part = split_heads(linear_forward(y, getattr(layer.params, name), None), heads)  # (b, h, i, d)
    return part * part.shape[-1] ** -0.25


def heads_of_backward(layer: Layer, y: Array, name: str, d_part: Array, add: Add) -> Array:
    """Return the gradient of y, and add that of the matrix."""
    # forward: part = split(y @ w) * d^(-1/4)
    d_merged = merge_heads(d_part * d_part.shape[-1] ** -0.25)  # (b, i, m)
    d_y, d_weight, _ = linear_backward(y, getattr(layer.params, name), d_merged)  # (b, i, m), (m, m)
    add(name, d_weight)
    return d_y


def forward(layer: Layer, y: Array) -> tuple[Array, Saved]:
    """Return f of normalised tokens y, and what `backward` reads."""
    q = heads_of(layer, y, "w_q")  # (b, h, i, d) [SYMP.98]
    k = heads_of(layer, y, "w_k")  # (b, h, i, d) [SYMP.99]
    w = split_heads(linear_forward(y, layer.params.w_v, None), layer.params.config.heads)  # (b, h, i, d) [SYMP.100]
    kernel = linear.kernel_of(layer, y, None)
    mean = linear.mixed(kernel, "force", q, k, w) / kernel.n  # (b, h, i, d) [SYMP.101]
    joined = merge_heads(mean)  # (b, i, m)
    force = linear_forward(joined, layer.params.w_o, None)  # (b, i, m) [SYMP.102]
    return force, Saved(kernel, (q, k, w), joined)


def backward(layer: Layer, saved: Saved, d_force: Array, d_further: Heads | None, add: Add) -> Array:
    """Return the gradient of y, and add those of the weights; `d_further` is what else asks of q, k and w."""
    kernel, (q, k, w), heads = saved.kernel, saved.qkv, layer.params.config.heads
    # forward: force = merge(mean) @ w_o
    d_joined, d_w_o, _ = linear_backward(saved.joined, layer.params.w_o, d_force)  # (b, i, m), (m, m)
    add("w_o", d_w_o)
    d_mean = split_heads(d_joined, heads)  # (b, h, i, d) [dSYMP.101]
    # forward: mean = mix(q, k, w) / n
    d_q, d_k, d_w = mix_backward(
        q, k, w, kernel.side, kernel.form, d_mean / kernel.n
    )  # (b, h, i, d) [dSYMP.98], (b, h, i, d) [dSYMP.99], (b, h, i, d) [dSYMP.100]
    if d_further is not None:
        d_q, d_k, d_w = d_q + d_further[0], d_k + d_further[1], d_w + d_further[2]  # (b, h, i, d), (b, h, i, d)
    # forward: w = split(y @ w_v)
    d_y, d_w_v, _ = linear_backward(kernel.y, layer.params.w_v, merge_heads(d_w))  # (b, i, m), (m, m)
    add("w_v", d_w_v)
    # forward: q, k = heads(y @ w_q), heads(y @ w_k)
    d_y = d_y + heads_of_backward(layer, kernel.y, "w_q", d_q, add)  # (b, i, m)
    d_y = d_y + heads_of_backward(layer, kernel.y, "w_k", d_k, add)  # (b, i, m): dSYMP.45
    return d_y
