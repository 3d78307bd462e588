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
from refattn.mechanisms.sympformer import maps
from refattn.mechanisms.sympformer.baselines import attend
from refattn.mechanisms.sympformer.baselines.attend import Heads
from refattn.mechanisms.sympformer.oracles import linear
from refattn.mechanisms.sympformer.oracles.linear import Kernel, Linear
from refattn.mechanisms.sympformer.params import Add, Layer
from refattn.ops.heads import merge_heads, split_heads
from refattn.xp import Array


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


def scaled(layer: Layer, x: Array, name: str) -> Array:
    """Return heads(x w + b) d^(-1/4) for the matrix and the bias of a name, "q" or "k"."""
    part = attend.heads_of(layer, x, name)  # (b, h, i, d)
    return part * part.shape[-1] ** -0.25


def scaled_backward(layer: Layer, x: Array, name: str, d_part: Array, add: Add) -> Array:
    """Return the gradient of x, and add those of the matrix and the bias."""
    return attend.heads_of_backward(layer, x, name, d_part * d_part.shape[-1] ** -0.25, add)


def forward(layer: Layer, y: Array) -> tuple[Array, Saved]:
    """Return f of normalised tokens y, and what `backward` reads."""
    q = scaled(layer, y, "q")  # (b, h, i, d) [SYMP.signed_queries]
    k = scaled(layer, y, "k")  # (b, h, i, d) [SYMP.signed_keys]
    w = attend.heads_of(layer, y, "v")  # (b, h, i, d) [SYMP.signed_values]
    kernel = linear.kernel_of(layer, y, None)
    mean = kernel.mix("force", q, k, w) / kernel.n  # (b, h, i, d) [SYMP.signed_attended]
    joined = merge_heads(mean)  # (b, i, m)
    force = maps.affine(layer.params, joined, "o")  # (b, i, m) [SYMP.signed_force]
    return force, Saved(kernel, (q, k, w), joined)


def backward(layer: Layer, saved: Saved, d_force: Array, d_further: Heads | None, add: Add) -> Array:
    """Return the gradient of y, and add those of the weights; `d_further` is what else asks of q, k and w."""
    kernel = saved.kernel
    # forward: force = merge(mean) @ w_o
    d_joined = maps.affine_backward(layer.params, saved.joined, "o", d_force, add)  # (b, i, m)
    d_mean = split_heads(d_joined, layer.params.config.heads)  # (b, h, i, d) [dSYMP.signed_attended]
    # forward: mean = mix(q, k, w) / n
    d_q, d_k, d_w = kernel.mix_backward(
        *saved.qkv, d_mean / kernel.n
    )  # (b, h, i, d) [dSYMP.signed_queries], (b, h, i, d) [dSYMP.signed_keys], (b, h, i, d) [dSYMP.signed_values]
    d_q, d_k, d_w = attend.both((d_q, d_k, d_w), d_further)  # (b, h, i, d), (b, h, i, d), (b, h, i, d)
    # forward: q, k, w = scaled(y @ w_q), scaled(y @ w_k), split(y @ w_v)
    d_y = scaled_backward(layer, kernel.y, "q", d_q, add)  # (b, i, m)
    d_y = d_y + scaled_backward(layer, kernel.y, "k", d_k, add)  # (b, i, m)
    return d_y + attend.heads_of_backward(layer, kernel.y, "v", d_w, add)
