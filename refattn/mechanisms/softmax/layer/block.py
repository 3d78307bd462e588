"""The multi-head block: projections around the core, and optional biases, residual, window and learned sinks.

Equations (y are the tokens of the memory where there is one, otherwise x; heads splits a width into heads)::

    [SM.queries]  q = heads(x w_q + b_q)
    [SM.keys]  k = heads(y w_k + b_k)
    [SM.values]  v = heads(y w_v + b_v)
    [SM.merged]  a = merge(o)                               o of SM.5 for these q, k, v
    [SM.output]  x' = x + a w_o + b_o                       without a residual: x' = a w_o + b_o

Adjoints, for given dx'::

    [dSM.merged]  da = dx' w_o^T
    [dSM.5]  do = heads(da)
    [dSM.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx'  the parts for k and v go to the memory where there is one

with dq, dk, dv of the core. The gradients of weights and biases are those of the affine map; that of the sinks is the
core's.

Axes: b batch, i query token, j key token, m width of the model, h head, g key/value head, d and e widths of a head.

Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2; the residual of its section 3.1; sinks: gpt-oss
(arXiv:2508.10925), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refattn.args import check, check_number
from refattn.mechanisms import projections
from refattn.mechanisms.context import Context
from refattn.mechanisms.projections import State, fresh, mask_of, output_backward, tokens_backward
from refattn.mechanisms.softmax import core
from refattn.mechanisms.softmax.options import Window, check_window
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_forward
from refattn.xp import Array, zeros

__all__ = ["Config", "Params", "Saved", "State", "init"]


@dataclass(frozen=True)
class Config(projections.Config):
    """Static choices of a block; those of its projections are `refattn.mechanisms.projections.Config`.

    Attributes
    ----------
    scale, softcap, window
        As in the core.
    sink
        Whether each query head has a sink that is learned; it starts at 0.
    """

    scale: float | None = None
    softcap: float | None = None
    window: Window | None = None
    sink: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check("sink", self.sink, bool)
        if self.window is not None:
            given = tuple(self.window) if isinstance(self.window, list) else self.window  # as JSON has it
            object.__setattr__(self, "window", check_window(given))
        for name in ("scale", "softcap"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), positive=name == "softcap")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name."""
        return super().shapes() | ({"sink": (self.heads,)} if self.sink else {})


@dataclass(frozen=True)
class Params(projections.Params[Config]):
    """Weights (in, out), biases and sinks; what the configuration does not have is None."""

    sink: Array | None = None  # (h,)


@dataclass(frozen=True)
class Saved(projections.Saved):
    """What the backward of the block reads."""


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, and biases and sinks of 0."""
    sink = zeros((config.heads,), like) if config.sink else None  # (h)
    params = Params(config, **fresh(config, "softmax", seed=seed, like=like, layer=layer))
    return replace(params, sink=sink)


def keys_and_values(params: Params, y: Array) -> tuple[Array, Array]:
    """Return the keys (b, g, j, d) and values (b, g, j, e) of tokens y (b, j, m)."""
    _, g, _, _ = params.config.sizes
    keys = split_heads(linear_forward(y, params.w_k, params.b_k), g)  # (b, g, j, d) [SM.keys]
    values = split_heads(linear_forward(y, params.w_v, params.b_v), g)  # (b, g, j, e) [SM.values]
    return keys, values


def attend(params: Params, x: Array, keys: Array, values: Array, context: Context) -> tuple[Array, Saved]:
    """Return the next x of tokens x (b, i, m) that attend the keys and values, and what `backward` reads."""
    config, h = params.config, params.config.heads
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), h)  # (b, h, i, d) [SM.queries]
    attended, core_saved = core.forward(
        queries,
        keys,
        values,
        mask=mask_of(context, (x.shape[0], h, x.shape[1], keys.shape[2])),
        causal=context.causal,
        window=config.window,
        sink=params.sink,
        scale=config.scale,
        softcap=config.softcap,
    )  # o of SM.5, tagged in the core
    joined = merge_heads(attended)  # (b, i, h*e) [SM.merged]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m): SM.output without its residual
    result = x + out if config.residual else out  # (b, i, m) [SM.output]
    return result, Saved(x, context.memory, joined, core_saved)


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context's gradient has "memory" where there is one."""
    config = params.config
    # forward: out = joined @ w_o + b_o
    d_joined, of_output = output_backward(params, saved, d_state)  # (b, i, h*e) [dSM.merged]
    # forward: joined = merge_heads(attended)
    d_attended = split_heads(d_joined, config.heads)  # (b, h, i, e) [dSM.5]
    d = core.backward(saved.core, d_attended)
    # forward: queries = split_heads(x @ w_q + b_q), and so for keys and values; result = x + out
    d_x, d_context, gradients = tokens_backward(params, saved, d_state, d)  # (b, i, m) [dSM.x]
    return State(d_x), Params(config, **gradients, **of_output, sink=d.get("sink")), d_context
