"""The multi-head block: projections around the core, and strengths of the two forces that are learned, per head.

Equations (heads splits a width into heads; the largest slope of the coupling is 1)::

    [GE.17]  q = heads(x w_q + b_q)
    [GE.18]  k = heads(x w_k + b_k)
    [GE.19]  v = heads(x w_v + b_v)
    [GE.20]  mu = log(1 + exp(r_mu))
    [GE.21]  kappa = log(1 + exp(r_kappa))
    [GE.22]  h = 1 / (mu + 2 kappa)                  with a step of the configuration: not computed
    [GE.23]  a = merge(o)                               o of the core for these q, k, v, mu, kappa and h
    [GE.24]  x' = x + a w_o + b_o                       without a residual: x' = a w_o + b_o

Adjoints, for given dx'::

    [dGE.23]  da = dx' w_o^T
    [dGE.16]  do = heads(da)
    [dGE.21]  dkappa = dkappa of the core - 2 h^2 dh
    [dGE.20]  dmu = dmu of the core - h^2 dh
    [dGE.raw_mu]  dr_mu = dmu sigmoid(r_mu)
    [dGE.raw_kappa]  dr_kappa = dkappa sigmoid(r_kappa)
    [dGE.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx'

with dq, dk, dv, dmu, dkappa and dh of the core. The gradients of weights and biases are those of the affine map.

Axes: b batch, i token, m width of the model, h head, g key/value head, d and e widths of a head.

Source: that of the core; Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2, for the projections.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.arguments import check_arrays, check_gradient, check_mask
from refattn.mechanisms.context import Context
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.config import Config, Params, check_params, core_options, init, is_bounded
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array, namespace

__all__ = [
    "Config",
    "Params",
    "Saved",
    "State",
    "backward",
    "core_options",
    "forward",
    "init",
    "mask_of",
    "project",
    "read",
    "read_backward",
    "start",
    "start_backward",
    "strengths",
]


@dataclass(frozen=True)
class State:
    """What flows through the layers: the tokens x (b, i, m)."""

    x: Array


@dataclass(frozen=True)
class Saved:
    """What the backward of the block reads."""

    x: Array
    joined: Array
    step: Array | None
    core: core.Saved


def start(params: Params, x: Array, context: Context) -> State:
    """Return the state of tokens x (b, i, m)."""
    _check_tokens("x", x, params.config.width)
    return State(x)


def start_backward(params: Params, d_state: State) -> tuple[Array, None]:
    """Return (d_x, d_params); start uses no parameter."""
    return d_state.x, None


def read(params: Params, state: State) -> Array:
    """Return the tokens of a state."""
    return state.x


def read_backward(params: Params, state: State, d_x: Array) -> tuple[State, None]:
    """Return (d_state, d_params); read uses no parameter."""
    return State(d_x), None


def forward(params: Params, state: State, context: Context) -> tuple[State, Saved]:
    """Return the next state and what `backward` reads."""
    config = params.config
    x = state.x  # (b, i, m) untagged: it came in
    queries, keys, values = project(params, x)  # untagged: tagged there
    mu, kappa, step = strengths(params, context)  # untagged: tagged there
    attended, core_saved = core.forward(
        queries,
        keys,
        values,
        mask=mask_of(context, (x.shape[0], config.heads, x.shape[1], x.shape[1])),
        causal=context.causal,
        **core_options(config, mu, kappa, step),
    )  # untagged: o of the core, tagged there
    joined = merge_heads(attended)  # (b, i, h*e) [GE.23]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m) untagged: GE.24 without its residual
    result = x + out if config.residual else out  # (b, i, m) [GE.24]
    return State(result), Saved(x, joined, step, core_saved)


def project(params: Params, x: Array) -> tuple[Array, Array, Array]:
    """Return the queries, keys and values of tokens x (b, i, m)."""
    h, g, _, _ = params.config.sizes
    _check_tokens("state.x", x, params.config.width)
    check_params(params)
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), h)  # (b, h, i, d) [GE.17]
    keys = split_heads(linear_forward(x, params.w_k, params.b_k), g)  # (b, g, i, d) [GE.18]
    values = split_heads(linear_forward(x, params.w_v, params.b_v), g)  # (b, g, i, e) [GE.19]
    return queries, keys, values


def strengths(params: Params, context: Context) -> tuple[Array | None, Array, Array | None]:
    """Return mu, kappa and the step, where they are learned."""
    config = params.config
    mu = None
    if params.raw_mu is not None:
        mu = _softplus(params.raw_mu)  # (h) [GE.20]
    kappa = _softplus(params.raw_kappa)  # (h) [GE.21]
    step = None
    if config.step is None and is_bounded(config, context):
        step = 1.0 / (2.0 * kappa if mu is None else mu + 2.0 * kappa)  # (h) [GE.22]
    return mu, kappa, step


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context has no gradient."""
    config, x = params.config, saved.x
    check_gradient("d_state.x", d_state.x, x.shape, x)
    d_result = d_state.x  # (b, i, m) untagged: it came in
    # forward: out = joined @ w_o + b_o
    d_out, d_w_o, d_b_o = linear_backward(saved.joined, params.w_o, d_result)  # untagged: the first is dGE.23
    d_joined = d_out  # (b, i, h*e) [dGE.23]
    # forward: joined = merge_heads(attended)
    d_attended = split_heads(d_joined, config.heads)  # (b, h, i, e) [dGE.16]
    d = core.backward(saved.core, d_attended)
    # forward: step = 1 / (mu + 2 kappa)
    moved = 0.0 if saved.step is None else saved.step * saved.step * d["step"]  # (h) untagged: h^2 dh
    d_kappa = d["kappa"] - 2.0 * moved  # (h) [dGE.21]
    # forward: kappa = log(1 + exp(raw_kappa)), and so mu
    d_raw_kappa = d_kappa * _sigmoid(params.raw_kappa)  # (h) [dGE.raw_kappa]
    d_raw_mu = None
    if params.raw_mu is not None:
        d_mu = d["mu"] - moved  # (h) [dGE.20]
        d_raw_mu = d_mu * _sigmoid(params.raw_mu)  # (h) [dGE.raw_mu]
    # forward: queries = split_heads(x @ w_q + b_q), and so the keys and values
    d_x_q, d_w_q, d_b_q = linear_backward(x, params.w_q, merge_heads(d["q"]))  # untagged: part of dGE.x
    d_x_k, d_w_k, d_b_k = linear_backward(x, params.w_k, merge_heads(d["k"]))  # untagged: part of dGE.x
    d_x_v, d_w_v, d_b_v = linear_backward(x, params.w_v, merge_heads(d["v"]))  # untagged: part of dGE.x
    own = d_x_q + d_x_k + d_x_v  # (b, i, m) untagged: part of dGE.x
    d_x = own + d_result if config.residual else own  # (b, i, m) [dGE.x]
    biases = (d_b_q, d_b_k, d_b_v, d_b_o) if config.bias else (None,) * 4
    return State(d_x), Params(config, d_w_q, d_w_k, d_w_v, d_w_o, d_raw_kappa, d_raw_mu, *biases), {}


def _softplus(x: Array) -> Array:
    xp = namespace(x)
    return xp.log1p(xp.exp(-xp.abs(x))) + 0.5 * (x + xp.abs(x))


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * namespace(x).tanh(0.5 * x)


def mask_of(context: Context, shape: tuple[int, int, int, int]) -> Array | None:
    """Combine the context's masks to one that broadcasts to (b, h, i, j); padding is masked as query and as key."""
    mask = check_mask(context.mask, shape, "context.mask")  # untagged: with four axes
    if context.key_mask is None:
        return mask
    if (got := tuple(context.key_mask.shape)) != (shape[0], shape[3]):
        raise ValueError(f"context.key_mask: got shape {got}, needs {(shape[0], shape[3])} (True = a token)")
    columns, rows = context.key_mask[:, None, None, :], context.key_mask[:, None, :, None]  # untagged: for all heads
    return rows & columns if mask is None else mask & rows & columns


def _check_tokens(name: str, x: Array, width: int) -> None:
    check_arrays(**{name: x})
    if len(x.shape) != 3 or x.shape[2] != width:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs (batch, tokens, {width})")
