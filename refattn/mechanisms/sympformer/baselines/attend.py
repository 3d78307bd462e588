"""The attention of the baselines: a softmax for each head, by the core at rest, and the output matrix.

Equations (o, z of the core for heads(y w_q + b_q), heads(y w_k), heads(y w_v + b_v), y the normalised tokens)::

    [SYMP.attended]  a = merge(o / z)
    [SYMP.attended_force]  f = a w_o + b_o

Adjoints, for a given df::

    [dSYMP.attended]  da = df w_o^T
    [dSYMP.trotter_normed]  dy = dq w_q^T + dk w_k^T + dv w_v^T

where dq, dk and dv are the core's adjoint at do = da / z and dlog_z = -da . a.

Without biases b_q, b_v and b_o are 0. Keys have none: it would add one number to all scores of a query, which changes
no weight.

Axes: b batch, h head, i token, d width of a head, m width.

Source: Vaswani et al. 2017 (arXiv:1706.03762).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.softmax import core as softmax
from refattn.mechanisms.sympformer import core
from refattn.mechanisms.sympformer.oracles.past import Prefix
from refattn.mechanisms.sympformer.params import Add, Layer
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array, namespace

Heads = tuple[Array, Array, Array]
"""Queries, keys and values by head, or their gradients."""


@dataclass(frozen=True)
class Attended:
    """What the backward of the attention reads; `core` is None where tokens came one after the other."""

    core: Any
    log_z: Array | None  # (b, h, i, 1); None: with dropout
    result: Array  # (b, h, i, e)


@dataclass(frozen=True)
class Saved:
    """What the backward reads."""

    y: Array
    qkv: Heads
    attended: Attended
    joined: Array


def forward(layer: Layer, y: Array) -> tuple[Array, Saved]:
    """Return f of normalised tokens y, and what `backward` reads."""
    p, heads = layer.params, layer.params.config.heads
    maps = ((p.w_q, p.b_q), (p.w_k, None), (p.w_v, p.b_v))
    q, k, v = (split_heads(linear_forward(y, *each), heads) for each in maps)  # (b, h, i, d), (b, h, i, d)
    by_head, attended = attention(q, k, v, layer.causal, layer.keep.get("weights"))  # (b, h, i, d)
    joined = merge_heads(by_head)  # (b, i, m) [SYMP.attended]
    force = linear_forward(joined, p.w_o, p.b_o)  # (b, i, m) [SYMP.attended_force]
    return force, Saved(y, (q, k, v), attended, joined)


def backward(layer: Layer, saved: Saved, d_force: Array, d_further: Heads | None, add: Add) -> Array:
    """Return the gradient of y, and add those of the weights; `d_further` is what else asks of q, k and v."""
    # forward: force = joined @ w_o
    d_joined, d_w_o, d_b_o = linear_backward(saved.joined, layer.params.w_o, d_force)  # (b, i, m) [dSYMP.attended]
    add("w_o", d_w_o)
    add("b_o", d_b_o)
    # forward: joined = merge(attention(q, k, v))
    d_qkv = attention_backward(saved.attended, split_heads(d_joined, layer.params.config.heads))
    if d_further is not None:
        d_qkv = tuple(a + b for a, b in zip(d_qkv, d_further, strict=True))
    # forward: q = split(y @ w_q), and so for k and v
    parts = []
    for name, value in zip("qkv", d_qkv, strict=True):
        weight = getattr(layer.params, f"w_{name}")  # (m, m)
        d_part, d_w, d_b = linear_backward(saved.y, weight, merge_heads(value))  # (b, i, m), (m, m), (m)
        add(f"w_{name}", d_w)
        add(f"b_{name}", d_b)
        parts.append(d_part)
    d_y = parts[0] + parts[1] + parts[2]  # (b, i, m) [dSYMP.trotter_normed]
    return d_y


def attention(q: Array, k: Array, v: Array, causal: bool | Prefix, keep: Array | None = None) -> tuple[Array, Attended]:
    """Return o / z (b, h, i, e) of queries and keys (b, h, i, d), values (b, h, i, e); and what is saved.

    With a mask (b, h, i, j) of the weights it is that of softmax attention with dropout, SM.kept.
    """
    xp, inner = namespace(q), None
    if isinstance(causal, Prefix):
        out, log_z = causal.attend(q, k, v, None, q.shape[-1] ** -0.5)  # (b, h, i, e), (b, h, i)
    elif keep is not None:
        result, whole = softmax.forward(q, k, v, causal=causal, keep=keep)  # (b, h, i, e)
        return result, Attended(whole, None, result)
    else:
        out, inner = core.forward(q, k, v, causal=causal)  # (b, h, i, e)
        log_z = inner.log_z  # (b, h, i)
    result = out * xp.exp(-log_z)[..., None]  # (b, h, i, e)
    return result, Attended(inner, log_z[..., None], result)


def attention_backward(saved: Attended, d_result: Array) -> Heads:
    """Return the gradients of q, k and v."""
    xp = namespace(d_result)
    assert saved.core is not None
    if saved.log_z is None:
        d = softmax.backward(saved.core, d_result)
        return d["q"], d["k"], d["v"]
    # forward: result = out * exp(-log_z)
    d_log_z = -xp.sum(d_result * saved.result, axis=-1)  # (b, h, i)
    d = core.backward(saved.core, d_result * xp.exp(-saved.log_z), d_log_z)
    return d["q"], d["k"], d["v"]
