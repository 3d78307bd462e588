"""The multi-head block around the two older linear attentions: softmax's projections, and their core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from docs.experiments import linear_attention as core
from refattn.mechanisms.context import Context
from refattn.mechanisms.projections import State
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_backward, linear_forward
from refattn.ops.weights import fresh_weight
from refattn.xp import Array


@dataclass(frozen=True)
class Config:
    """Static choices of a block: widths, heads, and a kind of `linear_attention.KINDS`."""

    width: int
    heads: int
    kind: str

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads: got {self.heads}, needs a divisor of the width {self.width}")
        if self.kind not in core.KINDS:
            raise ValueError(f"kind: got {self.kind!r}, needs one of {', '.join(core.KINDS)}")


@dataclass(frozen=True)
class Params:
    """Weights (in, out)."""

    config: Config
    w_q: Array  # (m, m)
    w_k: Array  # (m, m)
    w_v: Array  # (m, m)
    w_o: Array  # (m, m)


@dataclass(frozen=True)
class Saved:
    """What the backward of the block reads."""

    x: Array
    joined: Array
    core: core.Saved


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, as the library's blocks have them."""

    def weight(name: str) -> Array:
        bound, purpose = (3.0 / config.width) ** 0.5, f"linear_attention.{name}"
        return fresh_weight(config.width, config.width, bound=bound, seed=seed, purpose=purpose, layer=layer, like=like)

    return Params(config, *(weight(name) for name in ("w_q", "w_k", "w_v", "w_o")))


def forward(params: Params, state: State, context: Context) -> tuple[State, Saved]:
    """Return the next state and what `backward` reads."""
    if context.causal is not True:
        raise ValueError(f"context.causal: got {context.causal!r}, needs True: there is no other form here")
    x, h = state.x, params.config.heads
    heads = (split_heads(linear_forward(x, w, None), h) for w in (params.w_q, params.w_k, params.w_v))
    attended, saved = core.forward(*heads, kind=params.config.kind)
    joined = merge_heads(attended)
    return State(linear_forward(joined, params.w_o, None)), Saved(x, joined, saved)


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Any]]:
    """Return (d_state, d_params, d_context)."""
    # forward: out = joined @ w_o
    d_joined, d_w_o, _ = linear_backward(saved.joined, params.w_o, d_state.x)
    # forward: joined = merge_heads(attended)
    d = core.backward(saved.core, split_heads(d_joined, params.config.heads))
    # forward: q = split_heads(x @ w_q), and so for k and v
    parts = [
        linear_backward(saved.x, w, merge_heads(d[name]))
        for name, w in (("q", params.w_q), ("k", params.w_k), ("v", params.w_v))
    ]
    d_x = parts[0][0] + parts[1][0] + parts[2][0]
    d_w_q, d_w_k, d_w_v = (part[1] for part in parts)
    return State(d_x), Params(params.config, d_w_q, d_w_k, d_w_v, d_w_o), {}
