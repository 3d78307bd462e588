"""The block: an attention step that moves tokens and momenta, then an MLP step that moves the tokens.

Equations (the attention step is that of `step` or `doubled`, the MLP step that of `substep`)::

    [SYMP.39]  p0 = x w_start                           the first momentum with start="linear"
    [SYMP.40]  p = gain_p norm(p')                      p' of the attention step

and the time of the next layer is t + h_x.

Adjoints, for given dp and dp0::

    [dSYMP.40]  dp' = adjoint of norm at dp
    [dSYMP.39]  dx = dp0 w_start^T + what else comes

Axes: b batch, i token, m width.

The state is (x, t, p, v, history): tokens, the time, momenta, the velocity of the MLP step, and what a multistep
integrator remembers. p, v and the history are None before the first layer and after the last: see `options`. The first
momentum may also be looked up: see `tables`.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535).

How the authors' code differs: it lets no gradient through the time, so that its gradients are not those of its loss;
here they are, unless `detach` asks for the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refattn import equations, tree
from refattn.mechanisms.arguments import check_arrays, check_causal, check_gradient
from refattn.mechanisms.context import Context
from refattn.mechanisms.sympformer import baseline, doubled, params, step, substep, tables
from refattn.mechanisms.sympformer.choices import DOUBLED
from refattn.mechanisms.sympformer.numbers import number, numbers_backward, numbers_forward
from refattn.mechanisms.sympformer.options import Config
from refattn.mechanisms.sympformer.params import Mlp, Params, check_params
from refattn.mechanisms.sympformer.prefix import Prefix
from refattn.mechanisms.sympformer.step import History
from refattn.ops import layer_norm
from refattn.ops.linear import linear_backward, linear_forward
from refattn.xp import Array, namespace

__all__ = ["Config", "History", "Mlp", "Params", "Saved", "State", "init"]

init = params.init


@dataclass(frozen=True)
class State:
    """What flows through the layers."""

    x: Array  # (b, i, m)
    t: Array  # (1,)
    p: Array | None = None  # (b, i, m)
    v: Array | None = None  # (b, i, m)
    history: History | None = None


@dataclass(frozen=True)
class Saved:
    """What the backward of the block reads."""

    state: State
    tokens: Array | None  # (b, i), of tables
    numbers: dict[str, Array]
    attention: step.Saved | doubled.Saved | baseline.Saved
    norm_p: layer_norm.Saved | None
    mlp: substep.Saved | None


def start(params: Params, x: Array, context: Context) -> State:
    """Return the state of tokens x (b, i, m); given to a later layer they are at rest."""
    _check_tokens("x", x, params.config.width)
    config, at_rest = params.config, None
    if config.layer:
        at_rest = namespace(x).zeros_like(x)  # no velocity
    t = number(config.start_time + config.layer * config.step, x)  # (1): the time
    return State(x, t, at_rest if config.carries else None, at_rest if config.mlp == "velocity" else None)


def start_backward(params: Params, d_state: State) -> tuple[Array, None]:
    """Return (d_x, d_params); start uses no parameter."""
    return d_state.x, None


def read(params: Params, state: State) -> Array:
    """Return the tokens of a state."""
    return state.x


def read_backward(params: Params, state: State, d_x: Array) -> tuple[State, None]:
    """Return (d_state, d_params); read uses no parameter."""
    return replace(tree.zeros_like(state), x=d_x), None


def forward(params: Params, state: State, context: Context) -> tuple[State, Saved]:
    """Return the next state and what `backward` reads."""
    return advance(params, state, check_causal(context.causal) is not False, context.tokens)


def advance(params: Params, state: State, causal: bool | Prefix, tokens: Array | None) -> tuple[State, Saved]:
    """Return the same; of new tokens alone where those before them stand in a `Prefix`."""
    config, x, t = params.config, state.x, state.t
    _check_tokens("state.x", x, config.width)
    check_params(params)
    _check_state(params, state)
    numbers = numbers_forward(config.numbers(), params.numbers, x)
    p = state.p  # (b, i, m): it came in
    if params.w_start is not None:
        p = linear_forward(x, params.w_start, None)  # (b, i, m) [SYMP.39]
    looked_up = None
    if config.tables:
        first = causal.count if isinstance(causal, Prefix) else 0
        looked_up = tables.check_tokens(params, tokens, x, first)  # (b, i): they came in
        own = equations.active(tables)
        p = own.forward(params, looked_up, first)  # tagged in the function
    history, attention = None, None
    if config.baseline:
        own = equations.active(baseline)
        moved, raw, attention = own.forward(params, numbers, x, p, causal)  # tagged in the function
    elif config.integrator in DOUBLED:
        four = equations.active(doubled)
        moved, raw, attention = four.forward(params, numbers, x, p, t, causal)  # tagged in the function
    else:
        own = equations.active(step)
        answer = own.forward(params, numbers, x, p, state.history, t, causal)
        moved, raw, history, attention = answer
    momentum, norm_p = raw, None
    if raw is not None and params.gain_p is not None and not config.baseline:
        unit, norm_p = layer_norm.layer_norm_forward(raw, params.gain_p)  # the first is SYMP.40
        momentum = unit  # (b, i, m) [SYMP.40]
    result, v, mlp = moved, None, None
    if params.mlp is not None:
        carried = {"momentum": momentum, "velocity": state.v}.get(config.mlp)  # what the MLP step carries on
        own = equations.active(substep)
        result, push, mlp = own.forward(params, numbers, x, moved, carried)  # tagged in the function
        if config.mlp == "momentum":
            momentum = push  # (b, i, m): SYMP.37
        elif config.mlp == "velocity":
            v = push  # (b, i, m): SYMP.37
    later = t + numbers.get("h_x", 0.0)  # (1): the time of the next layer
    kept = (None, None, None) if config.last else (momentum, v, history)
    return State(result, later, *kept), Saved(state, looked_up, numbers, attention, norm_p, mlp)


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); no field of the context has a gradient."""
    config, numbers, x = params.config, saved.numbers, saved.state.x
    check_gradient("d_state.x", d_state.x, x.shape, x)
    found: dict[str, Array] = {}

    def add(name: str, value: Array) -> None:
        found[name] = found[name] + value if name in found else value  # a sum over uses

    d_moved, d_before, d_momentum, d_v = d_state.x, None, d_state.p, None
    if saved.mlp is not None:
        d_later = {"momentum": d_state.p, "velocity": d_state.v}.get(config.mlp)  # it came in
        own = equations.active(substep)
        found_mlp = own.backward(params, numbers, saved.mlp, d_state.x, d_later, add)
        d_before, d_moved, d_carried = found_mlp
        if config.mlp == "momentum":
            d_momentum = d_carried  # (b, i, m): dSYMP.33
        elif config.mlp == "velocity":
            d_v = d_carried  # dSYMP.33, or nothing
    d_raw = d_momentum  # (b, i, m): dSYMP.40 without a norm
    if saved.norm_p is not None and d_momentum is not None:
        # forward: momentum = norm(raw)
        d_unit, d_gain, _ = layer_norm.layer_norm_backward(saved.norm_p, d_momentum)  # the first is dSYMP.40
        d_raw = d_unit  # (b, i, m) [dSYMP.40]
        add("gain_p", d_gain)
    d_history = None
    if isinstance(saved.attention, baseline.Saved):
        own = equations.active(baseline)
        d_x, d_p = own.backward(params, numbers, saved.attention, d_moved, d_raw, add)  # in the function
        d_t = 0.0 * d_state.t  # (1): no gradient
    elif isinstance(saved.attention, doubled.Saved):
        four = equations.active(doubled)
        d_x, d_p, d_t = four.backward(params, numbers, saved.attention, d_moved, d_raw, add)  # tagged in the function
    else:
        one = equations.active(step)
        found_step = one.backward(params, saved.attention, d_moved, d_raw, d_state.history, add)
        d_x, d_p, d_history, d_t = found_step
    # forward: later = t + h_x
    if not config.detach:
        d_t = d_t + d_state.t  # (1): the gradient of the time
        add("h_x", 0.0 * d_state.t if config.baseline else d_state.t)
    else:
        d_t = 0.0 * d_t  # (1): no gradient through the time
        if d_history is not None:
            d_history = replace(d_history, t=d_t, h_x=d_t, h_y=d_t)
    if d_before is not None:
        d_x = d_x + d_before  # (b, i, m): the velocity of the attention step begins at x
    if params.w_start is not None:
        # forward: p = x @ w_start
        d_from, d_w_start, _ = linear_backward(x, params.w_start, d_p)  # part of dSYMP.39
        add("w_start", d_w_start)
        d_x = d_x + d_from  # (b, i, m) [dSYMP.39]
    if saved.tokens is not None:
        # forward: p = tables.forward(params, tokens)
        equations.active(tables).backward(params, saved.tokens, d_p, add)
    d_inner = State(d_x, d_t, None if saved.state.p is None else d_p, d_v, d_history)
    return d_inner, _gradients(params, found), {}


def _gradients(params: Params, found: dict[str, Array]) -> Params:
    """Return the gradients of all parameters."""
    numbers = numbers_backward(params.config.numbers(), params.numbers, found)
    leaves, names = {f"numbers.{name}": value for name, value in numbers.items()}, tree.flatten(params)
    leaves |= {name: value for name, value in found.items() if name in names}
    return tree.unflatten(params, leaves)


def _check_tokens(name: str, x: Array, width: int) -> None:
    check_arrays(**{name: x})
    if len(x.shape) != 3 or x.shape[2] != width:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, needs (batch, tokens, {width})")


def _check_state(params: Params, state: State) -> None:
    """Raise where the state is none that this layer of the stack receives."""
    config, x = params.config, state.x
    needs = {"state.p": config.layer > 0 and config.carries, "state.v": config.layer > 0 and config.mlp == "velocity"}
    for name, needed in needs.items():
        given = getattr(state, name.partition(".")[2])  # it came in
        if (given is not None) != needed:
            wants = f"{tuple(x.shape)}" if needed else "None: a stack starts at rest"
            got = "None" if given is None else f"shape {tuple(given.shape)}"
            raise ValueError(f"{name}: got {got}, layer {config.layer} of {config.layers} needs {wants}")
        if given is not None and tuple(given.shape) != tuple(x.shape):
            raise ValueError(f"{name}: got shape {tuple(given.shape)}, needs {tuple(x.shape)}")
    if state.history is not None and (config.layer == 0 or not config.multistep):
        raise ValueError(f"state.history: was given, {config.integrator} in layer {config.layer} reads none")
    if tuple(state.t.shape) != (1,):
        raise ValueError(f"state.t: got shape {tuple(state.t.shape)}, needs (1,)")
