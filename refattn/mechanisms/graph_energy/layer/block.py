"""The multi-head block: projections around the core.

Equations (y are the tokens of the memory where there is one, otherwise x; heads splits a width into heads)::

    [GE.17]  q = heads(x w_q + b_q)
    [GE.18]  k = heads(y w_k + b_k)
    [GE.19]  v = heads(y w_v + b_v)
    [GE.23]  a = merge(o)                               o of the core for these q, k, v and numbers
    [GE.24]  x' = x + a w_o + b_o                       without a residual: x' = a w_o + b_o

Adjoints, for given dx'::

    [dGE.23]  da = dx' w_o^T
    [dGE.16]  do = heads(da)
    [dGE.18]  dk = dk of the core + dl u
    [dGE.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx'      the parts for k and v go to the memory where there is one

with dq, dk and dv of the core, and those of numbers there and in `refattn.mechanisms.graph_energy.learned`, which says
what u, dl and the numbers are. The gradients of weights and biases are those of the affine map. Where the configuration
has a regulariser R and the call belongs to training, these are the gradients of the loss plus strength times R.

Axes: b batch, i token, j token of y, m width of the model, h head, g key/value head, d and e widths of a head.

Source: that of the core; Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2, for the projections.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.mechanisms.arguments import check_arrays, check_gradient, check_mask
from refattn.mechanisms.context import Context
from refattn.mechanisms.graph_energy import core, learned
from refattn.mechanisms.graph_energy.config import Config, Params, check_params, core_options, init
from refattn.mechanisms.graph_energy.regularisers import added
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array

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
]


@dataclass(frozen=True)
class State:
    """What flows through the layers: the tokens x (b, i, m)."""

    x: Array


@dataclass(frozen=True)
class Saved:
    """What the backward of the block reads."""

    x: Array
    memory: Array | None
    keys: Array
    joined: Array
    numbers: dict[str, Array | None]
    core: core.Saved
    training: bool
    positions: Array | None


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
    x = state.x  # (b, i, m): it came in
    y = x if context.memory is None else _check_memory(params, context.memory, x)  # (b, j, m): keys
    queries, keys, values = project(params, x, y)  # tagged there
    if context.positions is not None and config.classes is None:
        raise ValueError("context.positions was given to a block without classes, needs None")
    own = equations.active(learned)
    chosen = own.numbers(params, context)
    begin = own.starts(params, keys)  # tagged there
    attended, core_saved = core.forward(
        queries,
        keys,
        values,
        mask=mask_of(context, (x.shape[0], config.heads, x.shape[1], y.shape[1])),
        causal=context.causal,
        start=begin,
        jitter=own.jitter_of(config, context),
        **core_options(config, chosen),
    )  # o of the core, tagged there
    joined = merge_heads(attended)  # (b, i, h*e) [GE.23]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m): GE.24 without its residual
    result = x + out if config.residual else out  # (b, i, m) [GE.24]
    return State(result), Saved(
        x, context.memory, keys, joined, chosen, core_saved, context.training, context.positions
    )


def project(params: Params, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return the queries of tokens x (b, i, m), and the keys and values of tokens y (b, j, m)."""
    h, g, _, _ = params.config.sizes
    _check_tokens("state.x", x, params.config.width)
    check_params(params)
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), h)  # (b, h, i, d) [GE.17]
    keys = split_heads(linear_forward(y, params.w_k, params.b_k), g)  # (b, g, j, d) [GE.18]
    values = split_heads(linear_forward(y, params.w_v, params.b_v), g)  # (b, g, j, e) [GE.19]
    return queries, keys, values


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context's gradient has "memory" where there is one."""
    config, x = params.config, saved.x
    own = equations.active(learned)
    y = x if saved.memory is None else saved.memory  # (b, j, m): as in the forward
    check_gradient("d_state.x", d_state.x, x.shape, x)
    d_result = d_state.x  # (b, i, m): it came in
    # forward: out = joined @ w_o + b_o
    d_out, d_w_o, d_b_o = linear_backward(saved.joined, params.w_o, d_result)  # the first is dGE.23
    d_joined = d_out  # (b, i, h*e) [dGE.23]
    # forward: joined = merge_heads(attended)
    d_attended = split_heads(d_joined, config.heads)  # (b, h, i, e) [dGE.16]
    more = added(config.regulariser if saved.training else None, config.strength, saved.core)
    d = core.backward(saved.core, d_attended, **more)
    d_learned = own.numbers_backward(params, saved.positions, saved.numbers, d)
    d_key = d["k"]  # (b, g, j, d): part of dGE.18
    if params.probe is not None:
        begin = saved.core.inner.graph.start[..., 0]  # (b, h, j): GE.27
        d_pushed, d_probe = own.starts_backward(params.probe, saved.keys, begin, d["start"])  # tagged there
        d_learned["probe"] = d_probe
        d_key = d_key + d_pushed  # (b, g, j, d): dGE.18
    d_keys = d_key  # (b, g, j, d) [dGE.18]
    # forward: queries = split_heads(x @ w_q + b_q), and so for the keys and values of y
    d_x_q, d_w_q, d_b_q = linear_backward(x, params.w_q, merge_heads(d["q"]))  # part of dGE.x
    d_y_k, d_w_k, d_b_k = linear_backward(y, params.w_k, merge_heads(d_keys))  # part of dGE.x
    d_y_v, d_w_v, d_b_v = linear_backward(y, params.w_v, merge_heads(d["v"]))  # part of dGE.x
    d_y = d_y_k + d_y_v  # (b, j, m): part of dGE.x
    direct = d_x_q if saved.memory is not None else d_x_q + d_y  # (b, i, m): part of dGE.x
    d_x = direct + d_result if config.residual else direct  # (b, i, m) [dGE.x]
    biases = (d_b_q, d_b_k, d_b_v, d_b_o) if config.bias else (None,) * 4
    d_biases = dict(zip(("b_q", "b_k", "b_v", "b_o"), biases, strict=True))
    d_params = Params(config, d_w_q, d_w_k, d_w_v, d_w_o, **d_learned, **d_biases)
    return State(d_x), d_params, {} if saved.memory is None else {"memory": d_y}


def mask_of(context: Context, shape: tuple[int, int, int, int]) -> Array | None:
    """Combine the context's masks to one that broadcasts to (b, h, i, j); padding is masked as query and as key."""
    mask = check_mask(context.mask, shape, "context.mask")  # with four axes
    if context.memory is None and context.memory_mask is not None:
        raise ValueError("context.memory_mask was given without context.memory")
    if context.memory is not None and context.key_mask is not None:
        raise ValueError("context.key_mask was given with context.memory, whose tokens are the keys: use memory_mask")
    if context.memory_mask is not None:
        if (got := tuple(context.memory_mask.shape)) != (shape[0], shape[3]):
            raise ValueError(f"context.memory_mask: got shape {got}, needs {(shape[0], shape[3])} (True = a token)")
        columns = context.memory_mask[:, None, None, :]  # for all heads and queries
        return columns if mask is None else mask & columns
    if context.key_mask is None:
        return mask
    if (got := tuple(context.key_mask.shape)) != (shape[0], shape[3]):
        raise ValueError(f"context.key_mask: got shape {got}, needs {(shape[0], shape[3])} (True = a token)")
    columns, rows = context.key_mask[:, None, None, :], context.key_mask[:, None, :, None]  # for all heads
    return rows & columns if mask is None else mask & rows & columns


def _check_memory(params: Params, memory: Array, x: Array) -> Array:
    if params.config.graph_scores != "kk":
        raise ValueError('context.memory was given to a block with graph_scores="qk", needs one with "kk"')
    if len(memory.shape) != 3 or (memory.shape[0], memory.shape[2]) != (x.shape[0], x.shape[2]):
        raise ValueError(f"context.memory: got shape {tuple(memory.shape)}, needs ({x.shape[0]}, keys, {x.shape[2]})")
    return memory


def _check_tokens(name: str, x: Array, width: int) -> None:
    check_arrays(**{name: x})
    if len(x.shape) != 3 or x.shape[2] != width:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs (batch, tokens, {width})")
