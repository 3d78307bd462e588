"""The multi-head block: projections around the core, and optional biases and residual.

Equations (y are the tokens of the memory where there is one, otherwise x; heads splits a width into heads)::

    [HOL.10]  q = heads(x w_q + b_q)
    [HOL.11]  k = heads(y w_k + b_k)
    [HOL.12]  v = heads(y w_v + b_v)
    [HOL.13]  a = merge(o)                              o of HOL.9 for these q, k, v
    [HOL.14]  x' = x + a w_o + b_o                      without a residual: x' = a w_o + b_o

Adjoints, for given dx'::

    [dHOL.13]  da = dx' w_o^T
    [dHOL.9]  do = heads(da)
    [dHOL.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx' the parts for k and v go to the memory where there is one

with dq, dk, dv of the core. The gradients of weights and biases are those of the affine map.

The layer normalisation of the core stands between the projections and the scores, so nothing depends on the size of a
head's part of x w_q + b_q, nor on a number that is added to all of its elements: the loss is flat in these directions.

Axes: b batch, i query token, j key token, m width of the model, h head, g key/value head, d and e widths of a head.

Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2, around Mercat 2020 (arXiv:2010.14816).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn import tree
from refattn.mechanisms.arguments import check_arrays, check_gradient, check_is
from refattn.mechanisms.context import Context
from refattn.mechanisms.higher_order import core
from refattn.mechanisms.higher_order.options import Options, check_options
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, device, namespace


@dataclass(frozen=True)
class Config:
    """Static choices of a block.

    Attributes
    ----------
    width
        Width of the tokens.
    heads, kv_heads
        Query heads, and key/value heads (None: as many).
    head_width, value_width
        Widths of a head (None: width / heads; None: as head_width).
    bias, residual
        Whether the projections have biases, and whether x is added to the result.
    order, alpha, delta, policy, layer_norm, eps, norm_eps, denominator
        As in the core.
    """

    width: int
    heads: int
    kv_heads: int | None = None
    head_width: int | None = None
    value_width: int | None = None
    bias: bool = False
    residual: bool = True
    order: int = 2
    alpha: float = 3.0
    delta: float = 0.0
    policy: str = "exact"
    layer_norm: bool = True
    eps: float | None = None
    norm_eps: float = 1e-5
    denominator: str = "matched"

    def __post_init__(self) -> None:
        for name in ("width", "heads", "kv_heads", "head_width", "value_width"):
            value = getattr(self, name)
            if value is None and name not in ("width", "heads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}, needs a whole number of at least 1")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, needs a divisor of the {self.heads} heads")
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"heads: got {self.heads}, needs a divisor of the width {self.width}, or a head_width")
        for name in ("bias", "residual"):
            check_is(name, getattr(self, name), bool)
        _ = self.options

    @property
    def options(self) -> Options:
        """The choices of the core."""
        return check_options(
            order=self.order,
            alpha=self.alpha,
            delta=self.delta,
            policy=self.policy,
            layer_norm=self.layer_norm,
            eps=self.eps,
            norm_eps=self.norm_eps,
            denominator=self.denominator,
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, key/value heads, width of a query or key head, width of a value head."""
        head_width = self.head_width or self.width // self.heads
        return self.heads, self.kv_heads or self.heads, head_width, self.value_width or head_width


@dataclass(frozen=True)
class Params:
    """Weights (in, out) and biases; a bias is None where the configuration has none."""

    config: Config
    w_q: Array  # (m, h*d)
    w_k: Array  # (m, g*d)
    w_v: Array  # (m, g*e)
    w_o: Array  # (h*e, m)
    b_q: Array | None = None
    b_k: Array | None = None
    b_v: Array | None = None
    b_o: Array | None = None


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


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, and biases of 0."""
    h, g, d, e = config.sizes
    m = config.width
    xp = namespace(like)

    def weight(name: str, rows: int, columns: int) -> Array:
        bound, purpose = math.sqrt(3.0 / rows), f"higher_order.{name}"
        return fresh_weight(rows, columns, bound=bound, seed=seed, purpose=purpose, layer=layer, like=like)

    def bias(size: int) -> Array | None:
        return xp.zeros((size,), dtype=like.dtype, device=device(like)) if config.bias else None

    weights = (weight("w_q", m, h * d), weight("w_k", m, g * d), weight("w_v", m, g * e), weight("w_o", h * e, m))
    return Params(config, *weights, bias(h * d), bias(g * d), bias(g * e), bias(m))


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
    x = state.x  # (b, i, m) untagged: it came in
    _check_tokens("state.x", x, params.config.width)
    _check_params(params)
    y = x if context.memory is None else _check_memory(context.memory, x)  # (b, j, m) untagged: whose keys are attended
    keys, values = keys_and_values(params, y)  # untagged: tagged in the function
    attended, core_saved = core.attend(
        queries_of(params, x),
        keys,
        values,
        options=params.config.options,
        key_mask=_padding(context, y),
        causal=context.causal,
    )  # untagged: o of HOL.9, tagged in the core
    result, joined = output(params, x, attended)  # untagged: tagged in the function
    return State(result), Saved(x, context.memory, joined, core_saved)


def queries_of(params: Params, x: Array) -> Array:
    """Return the queries (b, h, i, d) of tokens x (b, i, m)."""
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), params.config.heads)  # (b, h, i, d) [HOL.10]
    return queries


def keys_and_values(params: Params, y: Array) -> tuple[Array, Array]:
    """Return the keys (b, g, j, d) and values (b, g, j, e) of tokens y (b, j, m)."""
    _, g, _, _ = params.config.sizes
    keys = split_heads(linear_forward(y, params.w_k, params.b_k), g)  # (b, g, j, d) [HOL.11]
    values = split_heads(linear_forward(y, params.w_v, params.b_v), g)  # (b, g, j, e) [HOL.12]
    return keys, values


def output(params: Params, x: Array, attended: Array) -> tuple[Array, Array]:
    """Return (result, joined) of tokens x (b, i, m) and what their heads attended to (b, h, i, e)."""
    joined = merge_heads(attended)  # (b, i, h*e) [HOL.13]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m) untagged: HOL.14 without its residual
    result = x + out if params.config.residual else out  # (b, i, m) [HOL.14]
    return result, joined


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context's gradient has "memory" where there is one."""
    config, x = params.config, saved.x
    h = config.heads
    y = x if saved.memory is None else saved.memory  # (b, j, m) untagged: as in the forward
    check_gradient("d_state.x", d_state.x, x.shape, x)
    d_result = d_state.x  # (b, i, m) untagged: it came in
    # forward: out = joined @ w_o + b_o
    d_out, d_w_o, d_b_o = linear_backward(saved.joined, params.w_o, d_result)  # untagged: the first is dHOL.13
    d_joined = d_out  # (b, i, h*e) [dHOL.13]
    # forward: joined = merge_heads(attended)
    d_attended = split_heads(d_joined, h)  # (b, h, i, e) [dHOL.9]
    d = core.backward(saved.core, d_attended)
    # forward: queries = split_heads(x @ w_q + b_q), and so for the keys and values of y
    d_x_q, d_w_q, d_b_q = linear_backward(x, params.w_q, merge_heads(d["q"]))  # untagged: part of dHOL.x
    d_y_k, d_w_k, d_b_k = linear_backward(y, params.w_k, merge_heads(d["k"]))  # untagged: part of dHOL.x
    d_y_v, d_w_v, d_b_v = linear_backward(y, params.w_v, merge_heads(d["v"]))  # untagged: part of dHOL.x
    d_y = d_y_k + d_y_v  # (b, j, m) untagged: part of dHOL.x
    own = d_x_q if saved.memory is not None else d_x_q + d_y  # (b, i, m) untagged: part of dHOL.x
    d_x = own + d_result if config.residual else own  # (b, i, m) [dHOL.x]
    biases = (d_b_q, d_b_k, d_b_v, d_b_o) if config.bias else (None,) * 4
    d_params = Params(config, d_w_q, d_w_k, d_w_v, d_w_o, *biases)
    return State(d_x), d_params, {} if saved.memory is None else {"memory": d_y}


def _padding(context: Context, y: Array) -> Array | None:
    """Return the mask (b, j) of the tokens y whose keys are attended, or None."""
    if context.memory is None and context.memory_mask is not None:
        raise ValueError("context.memory_mask was given without context.memory")
    if context.memory is not None and context.key_mask is not None:
        raise ValueError("context.key_mask was given with context.memory, whose tokens are the keys: use memory_mask")
    name, padding = "key_mask", context.key_mask
    if context.memory is not None:
        name, padding = "memory_mask", context.memory_mask
    if padding is not None and tuple(padding.shape) != tuple(y.shape[:2]):
        raise ValueError(
            f"context.{name}: got shape {tuple(padding.shape)}, needs {tuple(y.shape[:2])} (True = a token)"
        )
    return padding


def _check_tokens(name: str, x: Array, width: int) -> None:
    check_arrays(**{name: x})
    if len(x.shape) != 3 or x.shape[2] != width:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs (batch, tokens, {width})")


def _check_params(params: Params) -> None:
    (h, g, d, e), m = params.config.sizes, params.config.width
    needs: dict[str, tuple[int, ...]] = {"w_q": (m, h * d), "w_k": (m, g * d), "w_v": (m, g * e), "w_o": (h * e, m)}
    if params.config.bias:
        needs |= {f"b_{name[-1]}": shape[1:] for name, shape in needs.items()}
    shapes = {name: tuple(x.shape) for name, x in tree.flatten(params).items()}
    for name in {**needs, **shapes}:
        if shapes.get(name) != needs.get(name):
            raise ValueError(f"params.{name}: got shape {shapes.get(name)}, its configuration needs {needs.get(name)}")


def _check_memory(memory: Array, x: Array) -> Array:
    if len(memory.shape) != 3 or (memory.shape[0], memory.shape[2]) != (x.shape[0], x.shape[2]):
        raise ValueError(f"context.memory: got shape {tuple(memory.shape)}, needs ({x.shape[0]}, keys, {x.shape[2]})")
    return memory
