"""What blocks have in common that project tokens to queries, keys and values: all that is no equation of their own.

The state is the tokens. A memory stands for other tokens whose keys and values are attended; its mask comes with it.

Axes: b batch, i query token, j key token, m width of the model, h head, g key/value head, d and e widths of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from refattn import tree
from refattn.mechanisms.arguments import check_arrays, check_is, check_mask, check_plain, check_whole
from refattn.mechanisms.context import Context
from refattn.ops.heads import merge_heads
from refattn.ops.linear import linear_backward
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, device, namespace

C = TypeVar("C", bound="Sizes")


@dataclass(frozen=True)
class Sizes:
    """Static choices of the projections, where values are as wide as keys.

    Attributes
    ----------
    width
        Width of the tokens.
    heads, kv_heads
        Query heads, and key/value heads (None: as many).
    head_width
        Width of a head (None: width / heads).
    bias, residual
        Whether the projections have biases, and whether x is added to the result.
    """

    width: int
    heads: int
    kv_heads: int | None = None
    head_width: int | None = None
    bias: bool = False
    residual: bool = True

    def __post_init__(self) -> None:
        check_plain(self)
        check_sizes(self, "width", "heads", "kv_heads", "head_width")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, needs a divisor of the {self.heads} heads")
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"heads: got {self.heads}, needs a divisor of the width {self.width}, or a head_width")
        for name in ("bias", "residual"):
            check_is(name, getattr(self, name), bool)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, key/value heads, width of a query or key head, width of a value head."""
        head_width = self.head_width or self.width // self.heads
        return self.heads, self.kv_heads or self.heads, head_width, head_width


@dataclass(frozen=True)
class Config(Sizes):
    """Static choices of the projections, from which a block's configuration inherits.

    Attributes
    ----------
    value_width
        Width of a head's values (None: as head_width); all others are those of `Sizes`.
    """

    value_width: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "value_width")
        super().__post_init__()

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, key/value heads, width of a query or key head, width of a value head."""
        h, g, d, _ = super().sizes
        return h, g, d, self.value_width or d


@dataclass(frozen=True)
class Params(Generic[C]):
    """Weights (in, out) and biases; a bias is None where the configuration has none."""

    config: C
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


def start(params: Any, x: Array, context: Context) -> State:
    """Return the state of tokens x (b, i, m)."""
    check_tokens("x", x, params.config.width)
    return State(x)


def start_backward(params: Any, d_state: State) -> tuple[Array, None]:
    """Return (d_x, d_params); start uses no parameter."""
    return d_state.x, None


def read(params: Any, state: State) -> Array:
    """Return the tokens of a state."""
    return state.x


def read_backward(params: Any, state: State, d_x: Array) -> tuple[State, None]:
    """Return (d_state, d_params); read uses no parameter."""
    return State(d_x), None


def fresh(config: Sizes, purpose: str, *, seed: int, like: Array, layer: int) -> tuple[Array | None, ...]:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, and biases of 0, as `Params` has them."""
    h, g, d, e = config.sizes
    m = config.width
    xp = namespace(like)

    def weight(name: str, rows: int, columns: int) -> Array:
        own: dict[str, Any] = {"seed": seed, "purpose": f"{purpose}.{name}", "layer": layer, "like": like}
        return fresh_weight(rows, columns, bound=math.sqrt(3.0 / rows), **own)

    def bias(size: int) -> Array | None:
        return xp.zeros((size,), dtype=like.dtype, device=device(like)) if config.bias else None

    weights = (weight("w_q", m, h * d), weight("w_k", m, g * d), weight("w_v", m, g * e), weight("w_o", h * e, m))
    return (*weights, bias(h * d), bias(g * d), bias(g * e), bias(m))


def projected_backward(
    params: Params[C], x: Array, memory: Array | None, d: Mapping[str, Array]
) -> tuple[Array, Array, dict[str, Array | None]]:
    """Return the gradients of x, of the memory or x as keys and values, and of the weights and biases.

    Parameters
    ----------
    params, x, memory
        What was projected: x to queries, and the memory, or x where there is none, to keys and values.
    d
        The gradients "q", "k" and "v" of these, by head.
    """
    y = x if memory is None else memory
    # forward: queries = split_heads(x @ w_q + b_q), and so for the keys and values of y
    d_x, d_w_q, d_b_q = linear_backward(x, params.w_q, merge_heads(d["q"]))
    d_y_k, d_w_k, d_b_k = linear_backward(y, params.w_k, merge_heads(d["k"]))
    d_y_v, d_w_v, d_b_v = linear_backward(y, params.w_v, merge_heads(d["v"]))
    gradients: dict[str, Array | None] = {"w_q": d_w_q, "w_k": d_w_k, "w_v": d_w_v}
    if params.config.bias:
        gradients |= {"b_q": d_b_q, "b_k": d_b_k, "b_v": d_b_v}
    return d_x, d_y_k + d_y_v, gradients


def padding(context: Context, batch: int, keys: int) -> Array | None:
    """Return the mask (b, j) of the tokens whose keys are attended, those of the memory or of the block, or None."""
    if context.memory is None and context.memory_mask is not None:
        raise ValueError("context.memory_mask was given without context.memory")
    if context.memory is not None and context.key_mask is not None:
        raise ValueError("context.key_mask was given with context.memory, whose tokens are the keys: use memory_mask")
    name = "key_mask" if context.memory is None else "memory_mask"
    found: Array | None = getattr(context, name)
    if found is not None and tuple(found.shape) != (batch, keys):
        raise ValueError(f"context.{name}: got shape {tuple(found.shape)}, needs {(batch, keys)} (True = a token)")
    return found


def mask_of(context: Context, shape: tuple[int, int, int, int]) -> Array | None:
    """Combine the context's masks to one that broadcasts to (b, h, i, j)."""
    mask = check_mask(context.mask, shape, "context.mask")
    tokens = padding(context, shape[0], shape[3])
    if tokens is None:
        return mask
    columns = tokens[:, None, None, :]
    return columns if mask is None else mask & columns


def check_sizes(config: Any, *names: str) -> None:
    """Make the sizes ints; raise where one is no whole number of at least 1, or the width or the heads are None."""
    for name in names:
        value = getattr(config, name)
        if value is None and name not in ("width", "heads"):
            continue
        object.__setattr__(config, name, check_whole(name, value, 1))


def check_tokens(name: str, x: Array, width: int) -> None:
    """Raise where x is not (b, i, width)."""
    check_arrays(**{name: x})
    if len(x.shape) != 3 or x.shape[2] != width:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs (batch, tokens, {width})")


def check_memory(memory: Array, x: Array) -> Array:
    """Return the memory; raise where it does not fit tokens x (b, i, m)."""
    if len(memory.shape) != 3 or (memory.shape[0], memory.shape[2]) != (x.shape[0], x.shape[2]):
        raise ValueError(f"context.memory: got shape {tuple(memory.shape)}, needs ({x.shape[0]}, keys, {x.shape[2]})")
    return memory


def check_params(params: Params[C]) -> None:
    """Raise where the parameters do not fit their configuration."""
    check_shapes(params, shapes_of(params.config))


def shapes_of(config: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights and biases."""
    (h, g, d, e), m = config.sizes, config.width
    found: dict[str, tuple[int, ...]] = {"w_q": (m, h * d), "w_k": (m, g * d), "w_v": (m, g * e), "w_o": (h * e, m)}
    return found | {f"b_{name[-1]}": shape[1:] for name, shape in found.items() if config.bias}


def check_shapes(params: Any, needs: Mapping[str, tuple[int, ...]]) -> None:
    """Raise where the arrays of some parameters are others, or of other shapes."""
    shapes = {name: tuple(x.shape) for name, x in tree.flatten(params).items()}
    for name in {**needs, **shapes}:
        if shapes.get(name) != needs.get(name):
            raise ValueError(f"params.{name}: got shape {shapes.get(name)}, its configuration needs {needs.get(name)}")
