"""Attention with a softmax for each head, by the core: at rest it gives o = z times that attention."""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.sympformer import core
from refattn.mechanisms.sympformer.prefix import Prefix
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Saved:
    """What the backward reads; `core` is None where tokens came one after the other."""

    core: core.Saved | None
    log_z: Array  # (b, h, i, 1)
    result: Array  # (b, h, i, e)


def forward(q: Array, k: Array, v: Array, causal: bool | Prefix) -> tuple[Array, Saved]:
    """Return the attention (b, h, i, e) of queries and keys (b, h, i, d), values (b, h, i, e); and what is saved."""
    xp, inner = namespace(q), None
    if isinstance(causal, Prefix):
        out, log_z = causal.attend(q, k, v, None, q.shape[-1] ** -0.5)
    else:
        out, inner = core.forward(q, k, v, causal=causal)
        log_z = inner.log_z
    result = out * xp.exp(-log_z)[..., None]
    return result, Saved(inner, log_z[..., None], result)


def backward(saved: Saved, d_result: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v."""
    xp = namespace(d_result)
    assert saved.core is not None
    # forward: result = out * exp(-log_z)
    d_log_z = -xp.sum(d_result * saved.result, axis=-1)
    d = core.backward(saved.core, d_result * xp.exp(-saved.log_z), d_log_z)
    return d["q"], d["k"], d["v"]
