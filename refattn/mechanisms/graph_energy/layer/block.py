"""The multi-head block: projections around the core.

Equations (y are the tokens of the memory where there is one, otherwise x; heads splits a width into heads)::

    [GE.queries]  q = heads(x w_q + b_q)
    [GE.keys]  k = heads(y w_k + b_k)
    [GE.values]  v = heads(y w_v + b_v)
    [GE.merged]  a = merge(o)                           o of the core for these q, k, v and numbers
    [GE.output]  x' = x + a w_o + b_o                   without a residual: x' = a w_o + b_o

Adjoints, for given dx'::

    [dGE.merged]  da = dx' w_o^T
    [dGE.13]  do = heads(da)
    [dGE.keys]  dk = dk of the core + dl u
    [dGE.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx'      the parts for k and v go to the memory where there is one

with dq, dk and dv of the core, and those of numbers there and in `.numbers`, which says what u, dl and the numbers are.
The gradients of weights and biases are those of the affine map. Where the configuration has a regulariser R and the
call belongs to training, these are the gradients of the loss plus strength times R.

Axes: b batch, i token, j token of y, m width of the model, h head, g key/value head, d and e widths of a head.

Source: that of the core; Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2, for the projections.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn import equations
from refattn.args import check_mask
from refattn.mechanisms import projections
from refattn.mechanisms.context import Context
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.layer import hierarchy, numbers
from refattn.mechanisms.graph_energy.layer.config import Config, Params, core_options, init
from refattn.mechanisms.graph_energy.layer.regularisers import added
from refattn.mechanisms.graph_energy.options.call import tau_of
from refattn.mechanisms.graph_energy.options.state import Start
from refattn.mechanisms.graph_energy.options.threshold import Proximal
from refattn.mechanisms.projections import (
    State,
    check_memory,
    check_params,
    check_tokens,
    output_backward,
    padding,
    tokens_backward,
)
from refattn.ops.activations import soft_threshold
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_forward
from refattn.ops.sums import sum_of
from refattn.xp import Array, sum_wide

__all__ = ["Config", "Params", "Saved", "State", "init"]


@dataclass(frozen=True)
class Saved(projections.Saved):
    """What the backward of the block reads."""

    context: Context
    keys: Array
    numbers: dict[str, Array | None]


def forward(params: Params, state: State, context: Context) -> tuple[State, Saved]:
    """Return the next state and what `backward` reads."""
    config, x = params.config, state.x  # -, (b, i, m)
    if context.memory is not None and not config.over_keys:
        raise ValueError(
            "context.memory was given to a block with links over tokens, needs graph=\"kernel(over='keys')\""
        )
    y = x if context.memory is None else check_memory(context.memory, x)  # (b, j, m): whose keys are attended
    queries, keys, values = project(params, x, y)  # (b, h, i, d), (b, g, j, d), (b, g, j, e)
    if context.positions is not None and config.classes is None:
        raise ValueError("context.positions was given to a block without classes, needs None")
    own = equations.active(numbers)
    chosen = own.numbers(params, context)
    begin = Start(at=own.starts(params, keys), jitter=own.jitter_of(config, context))
    way = core if config.levels is None else equations.active(hierarchy)
    if config.levels is None:
        masks = {"mask": mask_of(context, (x.shape[0], config.heads, x.shape[1], y.shape[1])), "start": begin}
    else:
        masks = {"mask": context.mask, "key_mask": padding(context, x.shape[0], x.shape[1])}
    attended, core_saved = way.forward(
        queries, keys, values, causal=context.causal, **masks, **core_options(config, chosen)
    )  # (b, h, i, e)
    joined = merge_heads(attended)  # (b, i, h*e) [GE.merged]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m): without its residual
    result = x + out if config.residual else out  # (b, i, m) [GE.output]
    return State(result), Saved(x, context.memory, joined, core_saved, context, keys, chosen)


def project(params: Params, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return the queries of tokens x (b, i, m), and the keys and values of tokens y (b, j, m)."""
    h, g, _, _ = params.config.sizes
    check_tokens("state.x", x, params.config.width)
    check_params(params)
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), h)  # (b, h, i, d) [GE.queries]
    keys = split_heads(linear_forward(y, params.w_k, params.b_k), g)  # (b, g, j, d) [GE.keys]
    values = split_heads(linear_forward(y, params.w_v, params.b_v), g)  # (b, g, j, e) [GE.values]
    return queries, keys, values


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context's gradient has "memory" where there is one."""
    config, own = params.config, equations.active(numbers)
    # forward: out = joined @ w_o + b_o
    d_joined, of_output = output_backward(params, saved, d_state)  # (b, i, h*e) [dGE.merged]
    # forward: joined = merge_heads(attended)
    d_attended = split_heads(d_joined, config.heads)  # (b, h, i, e) [dGE.13]
    d_pushed = d_probe = None  # of parts that there are not
    regulariser = config.regulariser if saved.context.training else None
    if isinstance(saved.core, hierarchy.Saved):
        d = equations.active(hierarchy).backward(saved.core, d_attended, regulariser, config.strength)
    else:
        more = added(regulariser, config.strength, saved.core)
        d = core.backward(saved.core, d_attended, **more)
        if params.probe is not None:
            begin = saved.core.inner.graph.start[..., 0]  # (b, h, j): GE.learned_start
            d_pushed, d_probe = own.starts_backward(params.probe, saved.keys, begin, d["start"])  # (b, g, j, d)
    d_learned = own.numbers_backward(params, own.classes_of(config, saved.context), saved.numbers, d)
    d_learned["probe"] = d_probe
    d_keys = sum_of(d["k"], d_pushed)  # (b, g, j, d) [dGE.keys]
    # forward: queries = split_heads(x @ w_q + b_q), and so for the keys and values of y; result = x + out
    d_x, d_context, gradients = tokens_backward(params, saved, d_state, {**d, "k": d_keys})  # (b, i, m) [dGE.x]
    return State(d_x), Params(config, **gradients, **of_output, **d_learned), d_context


def mask_of(context: Context, shape: tuple[int, int, int, int]) -> Array | None:
    """Combine the context's masks to one that broadcasts to (b, h, i, j); padding is masked as query and as key."""
    mask = check_mask(context.mask, shape, "context.mask")  # with four axes
    tokens = padding(context, shape[0], shape[3])  # (b, j)
    if tokens is None:
        return mask
    seen = tokens[:, None, None, :]  # (b, 1, 1, j)
    if context.memory is None:
        seen = tokens[:, None, :, None] & seen  # (b, 1, i, j)
    return seen if mask is None else mask & seen


def force(saved: Saved) -> tuple[Array, int]:
    """Return the sum over batch and heads of the squared norm of the rate after the last step, and how many there are.

    With a threshold after every step the rate is that of such a step: 0 where neither the flow nor the threshold moves
    a score. Those of several levels of tokens are added. Where the graph has an energy, the rate of the scores is minus
    its gradient.
    """
    options = saved.core.options
    h = options.step
    if isinstance(saved.core, hierarchy.Saved):
        ends = [(stage.scores, stage.rate, tau_of(options, None, stage.scores)) for stage in saved.core.stages]
    else:
        x = saved.core.scores
        ends = [(x, saved.core.system.rate(x), saved.core.inner.flow.tau)]
    squares: list[Array] = []
    for x, rate, tau in ends:
        if isinstance(options.threshold, Proximal):
            rate = (soft_threshold(x + h * rate, h * tau, signed=bool(options.threshold.signed)) - x) / h
        squares.append(sum_wide(rate * rate))
    return sum_of(*squares), x.shape[0] * x.shape[1]
