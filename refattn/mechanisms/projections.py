"""What blocks have in common that project tokens to queries, keys and values: all that is no equation of their own.

The state is the tokens. A memory stands for other tokens whose keys and values are attended; its mask comes with it.

Axes: b batch, i query token, j key token, m width of the model, h head, g key/value head, d and e widths of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from refattn import tree
from refattn.args import check, check_arrays, check_gradient, check_mask, check_plain, check_whole
from refattn.mechanisms.context import Context
from refattn.ops.heads import merge_heads
from refattn.ops.linear import linear_backward
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, zeros

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
    STATIC: ClassVar[bool] = True  # of `refattn.tree`

    def __post_init__(self) -> None:
        check_plain(self)
        check_sizes(self, "width", "heads", "kv_heads", "head_width")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, needs a divisor of the {self.heads} heads")
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"heads: got {self.heads}, needs a divisor of the width {self.width}, or a head_width")
        for name in ("bias", "residual"):
            check(name, getattr(self, name), bool)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, key/value heads, width of a query or key head, width of a value head."""
        head_width = self.head_width or self.width // self.heads
        return self.heads, self.kv_heads or self.heads, head_width, head_width

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name."""
        (h, g, d, e), m = self.sizes, self.width
        found: dict[str, tuple[int, ...]] = {"w_q": (m, h * d), "w_k": (m, g * d), "w_v": (m, g * e), "w_o": (h * e, m)}
        return found | {f"b_{name[-1]}": shape[1:] for name, shape in found.items() if self.bias}


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
class Saved:
    """What the backward of a block reads whose heads attend keys and values."""

    x: Array
    memory: Array | None
    joined: Array  # (b, i, h*e): its heads side by side
    core: Any


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


def forward(own: Any, params: Any, state: State, context: Context) -> tuple[State, Any]:
    """Return the next state and what the backward reads, of a block that attends keys and values.

    `own` is its module. It has ``keys_and_values(params, y)``, which returns the keys (b, g, j, d) and values
    (b, g, j, e) of tokens y (b, j, m), and ``attend(params, x, keys, values, context)``, which returns the next x of
    tokens x (b, i, m) that attend them, and what it saved.
    """
    x = state.x
    check_tokens("state.x", x, params.config.width)
    check_params(params)
    keys, values = own.keys_and_values(params, x if context.memory is None else check_memory(context.memory, x))
    following, saved = own.attend(params, x, keys, values, context)
    return State(following), saved


def fresh(config: Sizes, purpose: str, *, seed: int, like: Array, layer: int) -> dict[str, Array]:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, and biases of 0, by their names."""

    def drawn(name: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return zeros(shape, like)
        own: dict[str, Any] = {"seed": seed, "purpose": f"{purpose}.{name}", "layer": layer, "like": like}
        return fresh_weight(*shape, bound=math.sqrt(3.0 / shape[0]), **own)

    return {name: drawn(name, shape) for name, shape in Sizes.shapes(config).items()}


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


def output_backward(params: Params[C], saved: Any, d_state: State) -> tuple[Array, dict[str, Array | None]]:
    """Return the gradient of the heads side by side (b, i, h*e), and those of w_o and b_o.

    What a block saved has the tokens `x` and `joined`, its heads side by side.
    """
    check_gradient("d_state.x", d_state.x, saved.x.shape, saved.x)
    # forward: out = joined @ w_o + b_o
    d_joined, d_w_o, d_b_o = linear_backward(saved.joined, params.w_o, d_state.x)
    return d_joined, {"w_o": d_w_o, "b_o": d_b_o if params.config.bias else None}


def tokens_backward(
    params: Params[C], saved: Any, d_state: State, d: Mapping[str, Array]
) -> tuple[Array, dict[str, Array], dict[str, Array | None]]:
    """Return the gradient of x (b, i, m), that of a memory by its name, and those of the weights of q, k and v.

    What a block saved has the tokens `x`, and the `memory` or None; `d` has the gradients "q", "k" and "v", by head.
    """
    # forward: queries = split_heads(x @ w_q + b_q), and so for the keys and values of y; result = x + out
    d_x_q, d_y, gradients = projected_backward(params, saved.x, saved.memory, d)
    d_own = d_x_q + d_y if saved.memory is None else d_x_q
    d_x = d_own + d_state.x if params.config.residual else d_own
    return d_x, {} if saved.memory is None else {"memory": d_y}, gradients


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


def check_params(params: Any) -> None:
    """Raise where the parameters do not fit their configuration."""
    check_shapes(params, params.config.shapes())


def check_shapes(params: Any, needs: Mapping[str, tuple[int, ...]]) -> None:
    """Raise where the arrays of some parameters are others, or of other shapes."""
    shapes = {name: tuple(x.shape) for name, x in tree.flatten(params).items()}
    for name in {**needs, **shapes}:
        if shapes.get(name) != needs.get(name):
            raise ValueError(f"params.{name}: got shape {shapes.get(name)}, its configuration needs {needs.get(name)}")
