"""Linear attention of several heads, for the baselines: products of queries and keys, of either sign, and no softmax.

Equations (y the normalised tokens, d the width of a head, n_i the number of tokens that i attends)::

    [SYMP.signed_queries]  q = heads(y w_q + b_q) d^(-1/4)
    [SYMP.signed_keys]  k = heads(y w_k + b_k) d^(-1/4)
    [SYMP.signed_values]  w = heads(y w_v + b_v)
    [SYMP.signed_attended]  a_i = 1/n_i sum_j <q_i, k_j> w_j
    [SYMP.signed_force]  f = merge(a) w_o + b_o         without biases the b_ are 0

Adjoints, for a given df::

    [dSYMP.signed_attended]  da = heads(df w_o^T)
    [dSYMP.signed_values]  dw_j = sum_{i>=j} <q_i, k_j> da_i / n_i
    [dSYMP.signed_keys]  dk_j = sum_{i>=j} <da_i, w_j> q_i / n_i
    [dSYMP.signed_queries]  dq_i = 1/n_i sum_j <da_i, w_j> k_j

and dy = merge(dq) w_q^T d^(-1/4) + merge(dk) w_k^T d^(-1/4) + merge(dw) w_v^T. A connection asks of q and k besides.

Axes: b batch, h head, i token, d and e widths of a head, m width.

Source: the signed linear family of the authors' manuscript of October 2026.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.args import check_number
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
    """Return heads(y w + b) d^(-1/4) for the matrix and the bias of a name, "q" or "k"."""
    heads = layer.params.config.heads
    own = (getattr(layer.params, f"w_{name}"), getattr(layer.params, f"b_{name}"))  # (m, m), (m)
    part = split_heads(linear_forward(y, *own), heads)  # (b, h, i, d)
    return part * part.shape[-1] ** -0.25


def heads_of_backward(layer: Layer, y: Array, name: str, d_part: Array, add: Add) -> Array:
    """Return the gradient of y, and add those of the matrix and the bias."""
    # forward: part = split(y @ w + b) * d^(-1/4)
    d_merged = merge_heads(d_part * d_part.shape[-1] ** -0.25)  # (b, i, m)
    weight = getattr(layer.params, f"w_{name}")  # (m, m)
    d_y, d_w, d_b = linear_backward(y, weight, d_merged)  # (b, i, m), (m, m), (m)
    add(f"w_{name}", d_w)
    add(f"b_{name}", d_b)
    return d_y


def forward(layer: Layer, y: Array) -> tuple[Array, Saved]:
    """Return f of normalised tokens y, and what `backward` reads."""
    q = heads_of(layer, y, "q")  # (b, h, i, d) [SYMP.signed_queries]
    k = heads_of(layer, y, "k")  # (b, h, i, d) [SYMP.signed_keys]
    values = linear_forward(y, layer.params.w_v, layer.params.b_v)  # (b, i, m): SYMP.signed_values before the heads
    w = split_heads(values, layer.params.config.heads)  # (b, h, i, d) [SYMP.signed_values]
    kernel = linear.kernel_of(layer, y, None)
    mean = linear.mixed(kernel, "force", q, k, w) / kernel.n  # (b, h, i, d) [SYMP.signed_attended]
    joined = merge_heads(mean)  # (b, i, m)
    force = linear_forward(joined, layer.params.w_o, layer.params.b_o)  # (b, i, m) [SYMP.signed_force]
    return force, Saved(kernel, (q, k, w), joined)


def backward(layer: Layer, saved: Saved, d_force: Array, d_further: Heads | None, add: Add) -> Array:
    """Return the gradient of y, and add those of the weights; `d_further` is what else asks of q, k and w."""
    kernel, (q, k, w), heads = saved.kernel, saved.qkv, layer.params.config.heads
    # forward: force = merge(mean) @ w_o
    d_joined, d_w_o, d_b_o = linear_backward(saved.joined, layer.params.w_o, d_force)  # (b, i, m), (m, m), (m)
    add("w_o", d_w_o)
    add("b_o", d_b_o)
    d_mean = split_heads(d_joined, heads)  # (b, h, i, d) [dSYMP.signed_attended]
    # forward: mean = mix(q, k, w) / n
    d_q, d_k, d_w = mix_backward(
        q, k, w, kernel.side, kernel.implementation, d_mean / kernel.n
    )  # (b, h, i, d) [dSYMP.signed_queries], (b, h, i, d) [dSYMP.signed_keys], (b, h, i, d) [dSYMP.signed_values]
    if d_further is not None:
        d_q, d_k, d_w = d_q + d_further[0], d_k + d_further[1], d_w + d_further[2]  # (b, h, i, d), (b, h, i, d)
    # forward: w = split(y @ w_v)
    d_y, d_w_v, d_b_v = linear_backward(kernel.y, layer.params.w_v, merge_heads(d_w))  # (b, i, m), (m, m), (m)
    add("w_v", d_w_v)
    add("b_v", d_b_v)
    # forward: q, k = heads(y @ w_q), heads(y @ w_k)
    d_y = d_y + heads_of_backward(layer, kernel.y, "q", d_q, add)  # (b, i, m)
    d_y = d_y + heads_of_backward(layer, kernel.y, "k", d_k, add)  # (b, i, m): dSYMP.trotter_normed
    return d_y
