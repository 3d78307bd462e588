"""The classical block: attention and an MLP, each behind a norm, without a momentum; and softmax attention of heads.

Equations (f is SYMP.attended_force for y; with oracle="linear" SYMP.linear_attention_force, with "signed"
SYMP.signed_force)::

    [SYMP.classical_normed]  y = gain norm(x) + shift    without biases shift = 0
    [SYMP.classical_moved]  x' = x + f

Adjoints, for a given dx'::

    [dSYMP.classical_normed]  dy = Y                    Y: the dy of the attention's own file at df = dx'

and dx = dx' + the adjoint of norm at dy, dshift = sum_i dy.

Equations of the attention: a softmax for each head, and the output matrix (o is softmax attention of heads(y w_q +
b_q), heads(y w_k), heads(y w_v + b_v))::

    [SYMP.attended]  a = merge(o)
    [SYMP.attended_force]  f = a w_o + b_o

Adjoints, for a given df::

    [dSYMP.attended]  da = df w_o^T
    [dSYMP.trotter_normed]  dy = dq w_q^T + dk w_k^T + dv w_v^T

where dq, dk and dv are the adjoint of softmax attention at do = da.

Without biases b_q, b_v and b_o are 0. Keys have none: it would add one number to all scores of a query, which changes
no weight.

Axes: b batch, h head, i token, d width of a head, m width.

Source: Vaswani et al. 2017 (arXiv:1706.03762), with norms before the sublayers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.mechanisms.softmax import core as softmax
from refattn.mechanisms.sympformer.forces.prefix import Prefix
from refattn.mechanisms.sympformer.params import (
    Add,
    Integrator,
    Layer,
    affine,
    affine_backward,
    normed,
    normed_backward,
)
from refattn.ops import layer_norm
from refattn.ops.heads import merge_heads, split_heads
from refattn.xp import Array


@dataclass(frozen=True)
class Classical(Integrator):
    """The classical block: this file. With linear attention its step is where the factor h of that starts."""

    moves: ClassVar[bool] = True
    baseline: ClassVar[bool] = True
    damped: ClassVar[str] = "nothing"
    carries: ClassVar[bool] = False


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    norm: layer_norm.Saved
    attended: Any


def forward(layer: Layer, x: Array, p: Array | None, t: Array, history: None) -> tuple[Array, None, None, Saved]:
    """Return the next tokens, no momenta, no history, and what `backward` reads."""
    y, norm = normed(layer.params, x)  # (b, i, m) [SYMP.classical_normed]
    force, attended = layer.force.attend(layer, y)  # (b, i, m): SYMP.attended_force
    result = x + force  # (b, i, m) [SYMP.classical_moved]
    return result, None, None, Saved(norm, attended)


def backward(
    layer: Layer, saved: Saved, d_result: Array, d_momentum: Array | None, d_following: None, add: Add
) -> tuple[Array, None, None, None]:
    """Return the gradient of x, and none of a momentum, a history and the time; add those of the parameters."""
    # forward: result = x + attend(norm(x))
    d_y = layer.force.attend_backward(layer, saved.attended, d_result, None, add)  # (b, i, m) [dSYMP.classical_normed]
    return d_result + normed_backward(layer.params, saved.norm, d_y, add), None, None, None


Heads = tuple[Array, Array, Array]
"""Queries, keys and values by head, or their gradients."""


@dataclass(frozen=True)
class Attended:
    """What `attend_backward` reads; `attended` is what softmax attention saved."""

    y: Array
    qkv: Heads
    attended: Any
    joined: Array


def attend(layer: Layer, y: Array) -> tuple[Array, Attended]:
    """Return f of normalised tokens y, and what `attend_backward` reads."""
    q, k, v = (heads_of(layer, y, name) for name in "qkv")  # (b, h, i, d), (b, h, i, d), (b, h, i, e)
    by_head, attended = attention(q, k, v, layer.causal)  # (b, h, i, d)
    joined = merge_heads(by_head)  # (b, i, m) [SYMP.attended]
    force = affine(layer.params, joined, "o")  # (b, i, m) [SYMP.attended_force]
    return force, Attended(y, (q, k, v), attended, joined)


def attend_backward(layer: Layer, saved: Attended, d_force: Array, d_further: Heads | None, add: Add) -> Array:
    """Return the gradient of y, and add those of the weights; `d_further` is what else asks of q, k and v."""
    # forward: force = joined @ w_o
    d_joined = affine_backward(layer.params, saved.joined, "o", d_force, add)  # (b, i, m) [dSYMP.attended]
    # forward: joined = merge(attention(q, k, v))
    d_qkv = attention_backward(saved.attended, split_heads(d_joined, layer.params.config.heads))
    # forward: q = split(y @ w_q), and so for k and v
    d_three = zip("qkv", both(d_qkv, d_further), strict=True)
    d_y_q, d_y_k, d_y_v = (heads_of_backward(layer, saved.y, name, d, add) for name, d in d_three)
    d_y = d_y_q + d_y_k + d_y_v  # (b, i, m) [dSYMP.trotter_normed]
    return d_y


def heads_of(layer: Layer, x: Array, name: str) -> Array:
    """Return heads(x w + b) for the matrix and the bias of a name: "q", "k" or "v"."""
    return split_heads(affine(layer.params, x, name), layer.params.config.heads)


def heads_of_backward(layer: Layer, x: Array, name: str, d_part: Array, add: Add) -> Array:
    """Return the gradient of x, and add those of the matrix and the bias."""
    return affine_backward(layer.params, x, name, merge_heads(d_part), add)


def both(d_qkv: Heads, d_further: Heads | None) -> Heads:
    """Return the gradients of q, k and v with what else asks of them."""
    if d_further is None:
        return d_qkv
    return d_qkv[0] + d_further[0], d_qkv[1] + d_further[1], d_qkv[2] + d_further[2]


def attention(q: Array, k: Array, v: Array, causal: bool | Prefix) -> tuple[Array, Any]:
    """Return softmax attention (b, h, i, e) of q and k (b, h, i, d) and v (b, h, i, e), and what is saved."""
    if isinstance(causal, Prefix):
        k, v = causal.with_past(k, v)  # (b, h, j, d), (b, h, j, e)
    return softmax.forward(q, k, v, causal=causal is not False)


def attention_backward(saved: Any, d_result: Array) -> Heads:
    """Return the gradients of q, k and v."""
    d = softmax.backward(saved, d_result)
    return d["q"], d["k"], d["v"]
