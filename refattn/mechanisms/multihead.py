"""The multi-head block of any core: projections around it, and a residual.

Equations (y are the tokens of the memory if there is one, otherwise x; heads splits a width into heads, merge joins
them; o is what the core makes of q, k and v)::

    [MHA.queries]  q = heads(x w_q + b_q)
    [MHA.keys]  k = heads(y w_k + b_k)
    [MHA.values]  v = heads(y w_v + b_v)
    [MHA.merged]  a = merge(o)
    [MHA.output]  x' = x + a w_o + b_o                  without a residual: x' = a w_o + b_o

Adjoints, for given dx'::

    [dMHA.merged]  da = dx' w_o^T
    [dMHA.attended]  do = heads(da)
    [dMHA.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx' the parts for k and v go to the memory if there is one

with dq, dk and dv of the core. The gradients of weights and biases are those of the affine map.

Axes: b batch, i token of x, j token of y, m width of the model, h head, g key/value head, d and e widths of a head.

Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2; the residual of its section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from refattn.args import check_all
from refattn.mechanisms import projections
from refattn.mechanisms.context import Context
from refattn.mechanisms.projections import State, fresh, mask_of, output_backward, tokens_backward
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_forward
from refattn.xp import Array

__all__ = ["Config", "Params", "Saved", "State", "init"]


@dataclass(frozen=True)
class Config(projections.Config):
    """Static choices of a block; those of its projections are `refattn.mechanisms.projections.Config`.

    Attributes
    ----------
    core
        The module with the map of q, k and v, which takes `mask` and `causal`.
    needs
        What the fields that it takes beside these have to be, in the words of `refattn.args`.
    """

    core: ClassVar[ModuleType]
    needs: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_all(self, **self.needs)


@dataclass(frozen=True)
class Params(projections.Params[Config]):
    """Weights (in, out) and biases."""


@dataclass(frozen=True)
class Saved(projections.Saved):
    """What the backward of the block reads."""


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, and biases of 0."""
    return Params(config, **fresh(config, config.core.__name__, seed=seed, like=like, layer=layer))


def keys_and_values(params: Params, y: Array) -> tuple[Array, Array]:
    """Return the keys (b, g, j, d) and values (b, g, j, e) of tokens y (b, j, m)."""
    _, g, _, _ = params.config.sizes
    keys = split_heads(linear_forward(y, params.w_k, params.b_k), g)  # (b, g, j, d) [MHA.keys]
    values = split_heads(linear_forward(y, params.w_v, params.b_v), g)  # (b, g, j, e) [MHA.values]
    return keys, values


def attend(params: Params, x: Array, keys: Array, values: Array, context: Context) -> tuple[Array, Saved]:
    """Return the next x of tokens x (b, i, m) that attend the keys and values, and what `backward` reads."""
    config, h = params.config, params.config.heads
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), h)  # (b, h, i, d) [MHA.queries]
    mask = mask_of(context, (x.shape[0], h, x.shape[1], keys.shape[2]))  # of pairs and of padding
    options = {name: getattr(config, name) for name in config.needs}
    attended, saved = config.core.forward(queries, keys, values, mask=mask, causal=context.causal, **options)
    joined = merge_heads(attended)  # (b, i, h*e) [MHA.merged]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m): MHA.output without its residual
    result = x + out if config.residual else out  # (b, i, m) [MHA.output]
    return result, Saved(x, context.memory, joined, saved)


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context's gradient has "memory" if there is one."""
    config = params.config
    # forward: out = linear_forward(joined, params.w_o, params.b_o)
    d_joined, of_output = output_backward(params, saved, d_state)  # (b, i, h*e) [dMHA.merged]
    # forward: joined = merge_heads(attended)
    d_attended = split_heads(d_joined, config.heads)  # (b, h, i, e) [dMHA.attended]
    d = config.core.backward(saved.core, d_attended)
    # forward: queries = split_heads(linear_forward(x, params.w_q, params.b_q), h), and so for keys and values
    d_x, d_context, gradients = tokens_backward(params, saved, d_state, d)  # (b, i, m) [dMHA.x]
    return State(d_x), Params(config, **gradients, **of_output), d_context
