"""The multi-head block: projections around the core, and optional biases and residual.

Equations (y are the tokens of the memory where there is one, otherwise x; heads splits a width into heads)::

    [KOOP.18]  q^0 = heads(x w_q + b_q)
    [KOOP.19]  k = heads(y w_k + b_k)
    [KOOP.20]  v = heads(y w_v + b_v)
    [KOOP.21]  t = merge(q^m)                           q^m of KOOP.17 for these q^0, k, v
    [KOOP.22]  x' = x + t w_o + b_o                     without a residual: x' = t w_o + b_o

Adjoints, for given dx'::

    [dKOOP.21]  dt = dx' w_o^T
    [dKOOP.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx'  the parts for k and v go to the memory where there is one

with dq, dk, dv of the core. The gradients of weights and biases are those of the affine map; the kernel's bandwidth and
weight are exponentials of the parameters log_bandwidth and log_weight.

A block that is trained takes psi = pi + epsilon phi, which did invert wherever it was tried, where the core's default
psi = phi + epsilon pi often does not. Its jitter is larger too, because tokens that repeat make the Gram matrix
singular, and float32 holds no 1e-8. It takes the fit "separable", because "stein", the core's default, has a large
system for each query where the future is hidden. Ridge and epsilon are their means, or what the context's draws hold.

Axes: b batch, i query token, j key token, m width of the model, h head, g key/value head, d width of a head.

Source: N. Tie 2024, Koopman attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.arguments import check_arrays, check_gradient, check_mask
from refattn.mechanisms.context import Context
from refattn.mechanisms.koopman import core
from refattn.mechanisms.koopman.params import Config, Params, check_params, init
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array, namespace

__all__ = [
    "Config",
    "Params",
    "Saved",
    "State",
    "attend",
    "backward",
    "forward",
    "init",
    "keys_and_values",
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
    joined: Array
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
    x = state.x  # (b, i, m): it came in
    _check_tokens("state.x", x, params.config.width)
    check_params(params)
    y = x if context.memory is None else _check_memory(context.memory, x)  # (b, j, m): whose keys are attended
    keys, values = keys_and_values(params, y)  # tagged in the function
    result, joined, core_saved = attend(params, x, keys, values, context)  # tagged in the function
    return State(result), Saved(x, context.memory, joined, core_saved)


def keys_and_values(params: Params, y: Array) -> tuple[Array, Array]:
    """Return the keys and values (b, g, j, d) of tokens y (b, j, m)."""
    _, g, _ = params.config.sizes
    keys = split_heads(linear_forward(y, params.w_k, params.b_k), g)  # (b, g, j, d) [KOOP.19]
    values = split_heads(linear_forward(y, params.w_v, params.b_v), g)  # (b, g, j, d) [KOOP.20]
    return keys, values


def attend(params: Params, x: Array, keys: Array, values: Array, context: Context) -> tuple[Array, Array, core.Saved]:
    """Return (result, joined, saved) of tokens x (b, i, m) whose queries move among the keys and values."""
    config, h = params.config, params.config.heads
    xp = namespace(x)
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), h)  # (b, h, i, d) [KOOP.18]
    given = dict(context.draws or {})
    if unknown := sorted(set(given) - {"ridge", "epsilon"}):
        raise ValueError(f"context.draws: got {', '.join(unknown)}, needs ridge and epsilon")
    for name in ("bandwidth", "weight"):
        logarithm = getattr(params, f"log_{name}")  # (1): a parameter
        if logarithm is not None:
            given[name] = xp.exp(logarithm)[0]  # (): a number of the core
    last, core_saved = core.forward(
        queries,
        keys,
        values,
        mask=_mask(context, (x.shape[0], h, x.shape[1], keys.shape[2])),
        causal=context.causal,
        **given,
        **config.choices,
    )  # q^m of KOOP.17, tagged in the core
    joined = merge_heads(last)  # (b, i, h*d) [KOOP.21]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m): KOOP.22 without its residual
    result = x + out if config.residual else out  # (b, i, m) [KOOP.22]
    return result, joined, core_saved


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context's gradient has "memory" where there is one."""
    config, x = params.config, saved.x
    h, _, _ = config.sizes
    y = x if saved.memory is None else saved.memory  # (b, j, m): as in the forward
    check_gradient("d_state.x", d_state.x, x.shape, x)
    d_result = d_state.x  # (b, i, m): it came in
    # forward: out = joined @ w_o + b_o
    d_out, d_w_o, d_b_o = linear_backward(saved.joined, params.w_o, d_result)  # the first is dKOOP.21
    d_joined = d_out  # (b, i, h*d) [dKOOP.21]
    # forward: joined = merge_heads(last)
    d = core.backward(saved.core, split_heads(d_joined, h))
    # forward: queries = split_heads(x @ w_q + b_q), and so for the keys and values of y
    d_x_q, d_w_q, d_b_q = linear_backward(x, params.w_q, merge_heads(d["q"]))  # part of dKOOP.x
    d_y_k, d_w_k, d_b_k = linear_backward(y, params.w_k, merge_heads(d["k"]))  # part of dKOOP.x
    d_y_v, d_w_v, d_b_v = linear_backward(y, params.w_v, merge_heads(d["v"]))  # part of dKOOP.x
    d_y = d_y_k + d_y_v  # (b, j, m): part of dKOOP.x
    own = d_x_q if saved.memory is not None else d_x_q + d_y  # (b, i, m): part of dKOOP.x
    d_x = own + d_result if config.residual else own  # (b, i, m) [dKOOP.x]
    biases = (d_b_q, d_b_k, d_b_v, d_b_o) if config.bias else (None,) * 4
    # forward: bandwidth = exp(log_bandwidth), and so for the weight
    numbers = [None] * 2
    if config.learns:
        xp = namespace(x)
        logarithms = (params.log_bandwidth, params.log_weight)
        numbers = [d[name] * xp.exp(log) for name, log in zip(("bandwidth", "weight"), logarithms, strict=True)]
    d_params = Params(config, d_w_q, d_w_k, d_w_v, d_w_o, *biases, *numbers)
    return State(d_x), d_params, {} if saved.memory is None else {"memory": d_y}


def _mask(context: Context, shape: tuple[int, int, int, int]) -> Array | None:
    """Combine the context's masks to one that broadcasts to (b, h, i, j)."""
    b, _, _, keys = shape
    if context.memory is None and context.memory_mask is not None:
        raise ValueError("context.memory_mask was given without context.memory")
    if context.memory is not None and context.key_mask is not None:
        raise ValueError("context.key_mask was given with context.memory, whose tokens are the keys: use memory_mask")
    name, padding = "key_mask", context.key_mask
    if context.memory is not None:
        name, padding = "memory_mask", context.memory_mask
    mask = check_mask(context.mask, shape, "context.mask")  # with four axes
    if padding is None:
        return mask
    if tuple(padding.shape) != (b, keys):
        raise ValueError(f"context.{name}: got shape {tuple(padding.shape)}, needs {(b, keys)} (True = a token)")
    columns = padding[:, None, None, :]  # (b, 1, 1, j): for all heads and queries
    return columns if mask is None else mask & columns


def _check_tokens(name: str, x: Array, width: int) -> None:
    check_arrays(**{name: x})
    if len(x.shape) != 3 or x.shape[2] != width:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs (batch, tokens, {width})")


def _check_memory(memory: Array, x: Array) -> Array:
    if len(memory.shape) != 3 or (memory.shape[0], memory.shape[2]) != (x.shape[0], x.shape[2]):
        raise ValueError(f"context.memory: got shape {tuple(memory.shape)}, needs ({x.shape[0]}, keys, {x.shape[2]})")
    return memory
