"""The linear attention of the baselines: what it adds to a token, or to its momentum, with the matrices A and V alone.

Equations (y the normalised tokens, n_i the number of tokens that i attends, h a number of the block)::

    [SYMP.linear_attention_turned]  a = y w_a
    [SYMP.linear_attention_values]  w = y w_v
    [SYMP.linear_attention_force]  f_i = h/n_i sum_j <a_i, y_j> w_j

Adjoints, for a given df::

    [dSYMP.linear_attention_force]  dm = h df / n       of the sum
    [dSYMP.linear_attention_values]  dw_j = sum_{i>=j} <a_i, y_j> dm_i
    [dSYMP.linear_attention_turned]  da_i = sum_j <dm_i, w_j> y_j

and dy = da w_a^T + dw w_v^T + sum_{i>=j} <dm_i, w_j> a_i, dh = sum df f / h.

Axes: b batch, i token, m width.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535): the linear attention that their accelerated one is compared with.
"""

from __future__ import annotations

from refattn.mechanisms.sympformer import maps
from refattn.mechanisms.sympformer.oracles import linear
from refattn.mechanisms.sympformer.oracles.linear import Kernel
from refattn.mechanisms.sympformer.params import Add, Layer, inner
from refattn.xp import Array

Saved = tuple[Kernel, Array, Array]
"""What the backward reads: w, and the sum of SYMP.linear_attention_force over n."""


def forward(layer: Layer, y: Array) -> tuple[Array, Saved]:
    """Return f of normalised tokens y, and what `backward` reads."""
    a = maps.affine(layer.params, y, "a")  # (b, i, m) [SYMP.linear_attention_turned]
    w = maps.affine(layer.params, y, "v")  # (b, i, m) [SYMP.linear_attention_values]
    kernel = linear.kernel_of(layer, y, a)
    mean = kernel.mix("force", a, y, w) / kernel.n  # (b, i, m)
    force = layer.numbers["attention_step"] * mean  # (b, i, m) [SYMP.linear_attention_force]
    return force, (kernel, w, mean)


def backward(layer: Layer, saved: Saved, d_force: Array, d_further: None, add: Add) -> Array:
    """Return the gradient of y, and add those of the weights and of h; there is nothing else that asks."""
    kernel, w, mean = saved  # -, (b, i, m), (b, i, m)
    # forward: force = attention_step * mix(a, y, w) / n
    add("attention_step", inner(d_force, mean))
    d_sum = layer.numbers["attention_step"] * d_force / kernel.n  # (b, i, m) [dSYMP.linear_attention_force]
    d_a, d_y, d_w = kernel.mix_backward(
        kernel.a, kernel.y, w, d_sum
    )  # (b, i, m) [dSYMP.linear_attention_turned], (b, i, m), (b, i, m) [dSYMP.linear_attention_values]
    # forward: a = y @ w_a, w = y @ w_v
    d_y = d_y + maps.affine_backward(layer.params, kernel.y, "a", d_a, add)  # (b, i, m)
    return d_y + maps.affine_backward(layer.params, kernel.y, "v", d_w, add)
