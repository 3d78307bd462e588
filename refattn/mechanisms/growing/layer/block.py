"""The block: projections of augmented tokens around the core, with weights that have an axis of heads.

Equations (y are the tokens with a 1 behind them where there are biases, otherwise x)::

    [GROW.augmented]  y_n = [x_n, 1]                    without bias: y = x
    [GROW.queries]  q = y w_q                           for each head
    [GROW.keys]  k = y w_k
    [GROW.values]  v = y w_v
    [GROW.joined]  c_n = [o_1n, ..., o_hn, 1]           o of SM.5 for these q, k, v; without bias: no 1
    [GROW.next]  x' = x + c w_o                         without a residual: x' = c w_o

Adjoints, for given dx'::

    [dGROW.joined]  dc = dx' w_o^T
    [dGROW.o]  do = heads(dc)                           without its 1
    [dGROW.augmented]  dy = sum over heads of dq w_q^T + dk w_k^T + dv w_v^T
    [dGROW.x]  dx = dy + dx'                            without its 1; without a residual: dx = dy

with dq, dk, dv of the core (dSM.q, dSM.k, dSM.v). The gradient of a weight is that of the linear map, and its last row
is its bias, so that whatever holds for weights holds for biases. With one kernel M = scale w_q w_k^T a head's scores
are y M y^T: a wider w_q and w_k allow an M of a higher rank, and the scale is stored, for M must not change if zeros
are added.

Axes: b batch, n token, m width of the model, in width of y, h head, d and e widths of a head.

Source: L. Burgund, Attention Growing Networks, section 1.1 (without biases) and 1.3 (biases by augmentation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.args import check, check_gradient, check_number, check_plain
from refattn.mechanisms.context import Context
from refattn.mechanisms.growing import core
from refattn.mechanisms.projections import State, check_sizes, mask_of
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.ops.masks import Causal
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, device, namespace, zeros

__all__ = ["Config", "Params", "Saved", "State", "init"]


@dataclass(frozen=True)
class Config:
    """Static choices of a block.

    Attributes
    ----------
    width, heads
        Width of the tokens, and heads.
    head_width, value_width
        Widths of a head: of queries and keys, which grows (None: width / heads), and of values (None: as head_width
        was at the start: width / heads).
    bias, residual
        Whether the projections have biases, and whether x is added to the result.
    scale
        Factor of the scores (None: 1 / sqrt(head_width)). Growth writes it down, so that it stays what it was.
    train_scale
        Whether the scale is a parameter, which starts at `scale`.
    softcap
        As in the core.
    """

    width: int
    heads: int
    head_width: int | None = None
    value_width: int | None = None
    bias: bool = False
    residual: bool = True
    scale: float | None = None
    train_scale: bool = False
    softcap: float | None = None

    def __post_init__(self) -> None:
        check_plain(self)
        check_sizes(self, "width", "heads", "head_width", "value_width")
        for name in ("head_width", "value_width"):
            if getattr(self, name) is None and self.width % self.heads:
                needs = f"a divisor of the width {self.width}, or a head_width and a value_width"
                raise ValueError(f"heads: got {self.heads}, needs {needs}")
        for name in ("bias", "residual", "train_scale"):
            check(name, getattr(self, name), bool)
        if self.scale is not None and not isinstance(check_number("scale", self.scale, positive=True), float):
            raise TypeError("scale: got an array, needs a finite number above 0")
        if self.softcap is not None:
            check_number("softcap", self.softcap, positive=True)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads, width of a query or key head, width of a value head."""
        each = self.width // self.heads
        return self.heads, self.head_width or each, self.value_width or each

    @property
    def factor(self) -> float:
        """The scale at the start, or for good where it is no parameter."""
        return 1.0 / math.sqrt(self.sizes[1]) if self.scale is None else float(self.scale)

    @property
    def inputs(self) -> int:
        """Width of the augmented tokens y."""
        return self.width + int(self.bias)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name."""
        h, d, e = self.sizes
        inputs, outputs = self.inputs, h * e + int(self.bias)
        found: dict[str, tuple[int, ...]] = {"w_q": (h, inputs, d), "w_k": (h, inputs, d), "w_v": (h, inputs, e)}
        return found | {"w_o": (outputs, self.width), **({"scale": ()} if self.train_scale else {})}


@dataclass(frozen=True)
class Params:
    """Weights; with biases the last row of each is the bias. The scale is None unless it is trained."""

    config: Config
    w_q: Array  # (h, in, d)
    w_k: Array  # (h, in, d)
    w_v: Array  # (h, in, e)
    w_o: Array  # (h*e, m), or one row more
    scale: Array | None = None  # ()


@dataclass(frozen=True)
class Saved:
    """What the backward of the block reads."""

    x: Array  # (b, n, m)
    tokens: Array  # (b, n, in)
    joined: Array
    allowed: tuple[Array | None, Causal]  # mask and causality, which the statistics of growth read
    core: core.Saved


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, and biases of 0."""
    h, d, e = config.sizes
    xp = namespace(like)

    def weight(name: str, rows: int, columns: int) -> Array:
        bound, purpose = math.sqrt(3.0 / rows), f"growing.{name}"
        drawn = fresh_weight(rows, columns, bound=bound, seed=seed, purpose=purpose, layer=layer, like=like)
        return xp.concat([drawn, zeros((1, columns), drawn)], axis=0) if config.bias else drawn

    m = config.width
    w_q, w_k, w_v = (split(weight(name, m, h * size), h) for name, size in (("w_q", d), ("w_k", d), ("w_v", e)))
    scale = xp.full((), config.factor, dtype=like.dtype, device=device(like)) if config.train_scale else None
    return Params(config, w_q, w_k, w_v, weight("w_o", h * e, m), scale)


def keys_and_values(params: Params, x: Array) -> tuple[Array, Array]:
    """Return the keys (b, h, n, d) and values (b, h, n, e) of tokens x (b, n, m)."""
    y, h = augmented(params, x), params.config.heads  # (b, n, in)
    keys = split_heads(linear_forward(y, join(params.w_k), None), h)  # (b, h, n, d) [GROW.keys]
    values = split_heads(linear_forward(y, join(params.w_v), None), h)  # (b, h, n, e) [GROW.values]
    return keys, values


def attend(params: Params, x: Array, keys: Array, values: Array, context: Context) -> tuple[Array, Saved]:
    """Return the next x of tokens x (b, n, m) that attend the keys and values, and what `backward` reads."""
    y, config, h = augmented(params, x), params.config, params.config.heads  # (b, n, in)
    queries = split_heads(linear_forward(y, join(params.w_q), None), h)  # (b, h, n, d) [GROW.queries]
    mask = mask_of(context, (x.shape[0], h, x.shape[1], keys.shape[2]))  # of all masks
    attended, core_saved = core.forward(
        queries,
        keys,
        values,
        mask=mask,
        causal=context.causal,
        scale=config.factor if params.scale is None else params.scale,
        softcap=config.softcap,
    )  # o of SM.5, tagged in the core
    joined = with_one(merge_heads(attended), config.bias)  # [GROW.joined]
    out = linear_forward(joined, params.w_o, None)  # (b, n, m): GROW.next without its residual
    result = x + out if config.residual else out  # (b, n, m) [GROW.next]
    return result, Saved(x, y, joined, (mask, context.causal), core_saved)


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); no field of the context has a gradient."""
    config, h = params.config, params.config.heads
    d_result = d_state.x  # (b, n, m)
    d_attended = attended_backward(params, saved, d_state)  # (b, h, n, e)
    # forward: out = joined @ w_o
    _, d_w_o, _ = linear_backward(saved.joined, params.w_o, d_result)  # the gradient of a weight
    d = core.backward(saved.core, d_attended)
    # forward: queries = split_heads(y @ join(w_q)), and so for keys and values
    d_y_q, d_w_q, _ = linear_backward(saved.tokens, join(params.w_q), merge_heads(d["q"]))  # part of dGROW.augmented
    d_y_k, d_w_k, _ = linear_backward(saved.tokens, join(params.w_k), merge_heads(d["k"]))  # part of dGROW.augmented
    d_y_v, d_w_v, _ = linear_backward(saved.tokens, join(params.w_v), merge_heads(d["v"]))  # part of dGROW.augmented
    d_y = d_y_q + d_y_k + d_y_v  # (b, n, in) [dGROW.augmented]
    # forward: y = with_one(x)
    own = d_y[..., : config.width]  # (b, n, m): without the gradient of its 1
    d_x = own + d_result if config.residual else own  # (b, n, m) [dGROW.x]
    d_scale = d["scale"] if params.scale is not None else None  # (): dSM.scale
    return State(d_x), Params(config, split(d_w_q, h), split(d_w_k, h), split(d_w_v, h), d_w_o, d_scale), {}


def attended_backward(params: Params, saved: Saved, d_state: State) -> Array:
    """Return the gradient of what the heads attended (b, h, n, e): what the statistics of growth start from."""
    xp = namespace(d_state.x)
    check_gradient("d_state.x", d_state.x, saved.x.shape, saved.x)
    h, _, e = params.config.sizes
    # forward: out = joined @ w_o
    d_joined = d_state.x @ xp.matrix_transpose(params.w_o)  # [dGROW.joined]
    # forward: joined = with_one(merge_heads(attended))
    d_attended = split_heads(d_joined[..., : h * e], h)  # (b, h, n, e) [dGROW.o]
    return d_attended


def augmented(params: Params, x: Array) -> Array:
    """Return the tokens y (b, n, in): x (b, n, m), with a 1 behind every token where there are biases."""
    y = with_one(x, params.config.bias)  # (b, n, in) [GROW.augmented]
    return y


def with_one(x: Array, bias: bool) -> Array:
    """Return x (b, n, width) with a 1 behind every token where there are biases."""
    if not bias:
        return x
    ones = zeros((*x.shape[:-1], 1), x) + 1.0  # (b, n, 1)
    return namespace(x).concat([x, ones], axis=-1)


def join(w: Array) -> Array:
    """(h, in, d) -> (in, h*d): the weights of all heads side by side, for one product."""
    heads, inputs, width = w.shape
    xp = namespace(w)
    return xp.reshape(xp.permute_dims(w, (1, 0, 2)), (inputs, heads * width))


def split(w: Array, heads: int) -> Array:
    """(in, h*d) -> (h, in, d): the inverse and the adjoint of `join`."""
    inputs, width = w.shape
    xp = namespace(w)
    return xp.permute_dims(xp.reshape(w, (inputs, heads, width // heads)), (1, 0, 2))
