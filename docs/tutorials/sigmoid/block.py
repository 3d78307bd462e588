"""The multi-head block: projections around the core, and a residual.

Equations (heads splits a width into heads, merge joins them)::

    [SIG.10]  q = heads(x w_q + b_q)
    [SIG.11]  k = heads(x w_k + b_k)
    [SIG.12]  v = heads(x w_v + b_v)
    [SIG.13]  a = merge(o)                              o of SIG.3 for these q, k, v
    [SIG.14]  x' = x + a w_o + b_o                      without a residual: x' = a w_o + b_o

Adjoints, for given dx'::

    [dSIG.13]  da = dx' w_o^T
    [dSIG.3]  do = heads(da)
    [dSIG.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx'

Axes: b batch, i and j tokens, m width of the model, h head, d and e widths of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms import projections
from refattn.mechanisms.arguments import check_gradient
from refattn.mechanisms.context import Context
from refattn.mechanisms.projections import (
    Config,
    State,
    check_params,
    check_tokens,
    fresh,
    mask_of,
    projected_backward,
    read,
    read_backward,
    start,
    start_backward,
)
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array

from . import core

__all__ = ["Config", "Params", "Saved", "State", "init", "read", "read_backward", "start", "start_backward"]


@dataclass(frozen=True)
class Params(projections.Params[Config]):
    """Weights (in, out) and biases."""


@dataclass(frozen=True)
class Saved:
    """What the backward of the block reads."""

    x: Array
    joined: Array
    core: core.Saved


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights of variance 1 / inputs, and biases of 0."""
    return Params(config, *fresh(config, "sigmoid", seed=seed, like=like, layer=layer))


def forward(params: Params, state: State, context: Context) -> tuple[State, Saved]:
    """Return the next state and what `backward` reads."""
    x, (h, g, _, _) = state.x, params.config.sizes
    check_tokens("state.x", x, params.config.width)
    check_params(params)
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), h)  # (b, h, i, d) [SIG.10]
    keys = split_heads(linear_forward(x, params.w_k, params.b_k), g)  # (b, g, j, d) [SIG.11]
    values = split_heads(linear_forward(x, params.w_v, params.b_v), g)  # (b, g, j, e) [SIG.12]
    mask = mask_of(context, (x.shape[0], h, x.shape[1], x.shape[1]))
    attended, saved = core.forward(queries, keys, values, mask=mask, causal=context.causal)
    joined = merge_heads(attended)  # (b, i, h*e) [SIG.13]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m): SIG.14 without its residual
    result = x + out if params.config.residual else out  # (b, i, m) [SIG.14]
    return State(result), Saved(x, joined, saved)


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context)."""
    config, d_result = params.config, d_state.x
    check_gradient("d_state.x", d_result, saved.x.shape, saved.x)
    d_joined, d_w_o, d_b_o = linear_backward(saved.joined, params.w_o, d_result)  # (b, i, h*e) [dSIG.13]
    d_attended = split_heads(d_joined, config.sizes[0])  # (b, h, i, e) [dSIG.3]
    d_x_q, d_y, gradients = projected_backward(params, saved.x, None, core.backward(saved.core, d_attended))
    own = d_x_q + d_y  # (b, i, m): what comes through the projections
    d_x = own + d_result if config.residual else own  # (b, i, m) [dSIG.x]
    return State(d_x), Params(config, **gradients, w_o=d_w_o, b_o=d_b_o if config.bias else None), {}
