"""The block: an attention step that moves tokens and momenta, then an MLP step that moves the tokens.

Equations (the attention step is that of the integrator, the MLP step that of `mlp`)::

    [SYMP.first_momentum]  p0 = x w_start               the first momentum with start="linear"
    [SYMP.19]  p = gain_p norm(p') + shift_p            p' of the attention step; without biases shift_p = 0

and the time of the next layer is t + h_x.

Adjoints, for given dp and dp0::

    [dSYMP.19]  dp' = adjoint of norm at dp             and dshift_p = sum_i dp
    [dSYMP.first_momentum]  dx = dp0 w_start^T + what else comes

Axes: b batch, i token, m width; momenta that are matrices (oracle="reduced") have one axis m more.

The state is (x, t, p, v, history): tokens, the time, momenta, the velocity of the MLP step, and what a multistep
integrator remembers. All but x and t are None before the first layer and after the last: see `config`. The first
momentum may also be looked up. float16 and bfloat16 are raised to float32 at entry, and results cast back.

Source: Stein, Li, Steidl 2026 (arXiv:2603.16535).

How the authors' code differs: it lets no gradient through the time, so that its gradients are not those of its loss;
here they are, unless `detach` asks for the same.

With start="table" the first momenta come from two learned tables, one row for each token of the vocabulary and one for
each position. The first velocities of the MLP step may come from two tables of their own, by the same equations.

Equations of tables, for the token at position n::

    [SYMP.looked_up]  p0_n = E[token_n] + P[n]

Adjoints, for given dp0::

    [dSYMP.token_embedding]  dE = sum of dp0_n in the row of token_n
    [dSYMP.position_embedding]  dP_n = sum_b dp0_bn

There t is a token of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from refattn import equations, tree
from refattn.args import check_causal, check_gradient
from refattn.mechanisms.context import Context
from refattn.mechanisms.projections import check_shapes, check_tokens
from refattn.mechanisms.sympformer import mlp as substep
from refattn.mechanisms.sympformer.config import Config, init, one_element
from refattn.mechanisms.sympformer.forces.prefix import Prefix
from refattn.mechanisms.sympformer.integrators.two_steps import History
from refattn.mechanisms.sympformer.params import (
    Add,
    Layer,
    Mlp,
    Numbers,
    Params,
    affine,
    affine_backward,
    normed,
    normed_backward,
)
from refattn.ops import embedding, layer_norm
from refattn.xp import Array, arange, concrete, namespace, raised, zeros

__all__ = ["Config", "History", "Mlp", "Params", "Saved", "State", "init"]

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """What flows through the layers."""

    x: Array  # (b, i, m)
    t: Array  # (1,)
    p: Array | None = None  # (b, i, m), or matrices (b, i, m, m)
    v: Array | None = None  # (b, i, m)
    history: History | None = None


@dataclass(frozen=True)
class Saved:
    """What the backward of the block reads."""

    state: State
    tokens: Array | None  # (b, i), of tables
    numbers: Numbers
    attention: Any  # of the integrator
    norm_p: layer_norm.Saved | None
    mlp: substep.Saved | None
    like: Array  # the tokens as they came, for their dtype


def start(params: Params, x: Array, context: Context) -> State:
    """Return the state of tokens x (b, i, m); given to a later layer they are at rest."""
    check_tokens("x", x, params.config.width)
    config, at_rest = params.config, None
    if config.layer:
        at_rest = namespace(x).zeros_like(x)  # (b, i, m): no velocity
    t = one_element(config.start_time + config.layer * config.integrator.step, x)  # (1): the time
    momentum = at_rest if config.integrator.carries else None  # (b, i, m)
    if config.matrices and at_rest is not None:
        momentum = namespace(x).zeros_like(x[..., None] * x[..., None, :])  # (b, i, m, m)
    return State(x, t, momentum, at_rest if isinstance(config.mlp, substep.Velocity) else None)


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
    config, like = params.config, state.x
    check_tokens("state.x", like, config.width)
    check_shapes(params, config.shapes())
    _check_state(params, state)
    params, state = _raised(params, like), _raised(state, like)
    x, t, p = state.x, state.t, state.p
    numbers = {name: number.value(params.numbers.get(name), x) for name, number in config.numbers().items()}
    if params.w_start is not None:
        p = affine(params, x, "start")  # (b, i, m) [SYMP.first_momentum]
    looked_up, velocity = None, state.v  # -, (b, i, m)
    if tokens is not None and "table" not in (config.start, getattr(config.mlp, "start", "")):
        raise ValueError(f'context.tokens was given with start="{config.start}", which reads none; needs "table"')
    if config.tables or config.velocity_tables:
        first = causal.tokens() if isinstance(causal, Prefix) else 0
        looked_up = check_numbers(params, tokens, x, first)  # (b, i): they came in
        if config.tables:
            p = look_up(params, looked_up, first)  # (b, i, m): SYMP.looked_up
        if config.velocity_tables and params.mlp is not None:
            velocity = look_up(params.mlp, looked_up, first)  # (b, i, m): SYMP.looked_up
    layer, own = Layer(equations.active(config.asks), params, numbers, causal), equations.active(config.steps)
    moved, raw, history, attention = own.forward(layer, x, p, t, state.history)  # (b, i, m), (b, i, m)
    momentum, norm_p = raw if config.keeps else None, None  # (b, i, m)
    if momentum is not None and params.gain_p is not None and not config.integrator.baseline:
        momentum, norm_p = normed(params, raw, "_p")  # (b, i, m) [SYMP.19]
    result, v, mlp = moved, None, None  # (b, i, m)
    if params.mlp is not None:
        carried = momentum if isinstance(config.mlp, substep.Momentum) else velocity  # (b, i, m): what it carries on
        result, push, mlp = equations.active(substep).forward(layer, x, moved, carried)  # (b, i, m), (b, i, m)
        if isinstance(config.mlp, substep.Momentum):
            momentum = push  # (b, i, m): SYMP.mlp_push
        elif isinstance(config.mlp, substep.Velocity):
            v = push  # (b, i, m): SYMP.mlp_push
    later = t + numbers.get("h_x", 0.0)  # (1): the time of the next layer
    following = State(result, later, *((None, None, None) if config.last else (momentum, v, history)))
    return _cast(following, like), Saved(state, looked_up, numbers, attention, norm_p, mlp, like)


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); no field of the context has a gradient."""
    check_gradient("d_state.x", d_state.x, saved.like.shape, saved.like)
    params, d_state = _raised(params, saved.like), _raised(d_state, saved.like)
    config, x = params.config, saved.state.x
    layer = Layer(equations.active(config.asks), params, saved.numbers, None)
    found: dict[str, Array] = {}

    def add(name: str, value: Array) -> None:
        found[name] = found[name] + value if name in found else value  # a sum over uses

    d_moved, d_before, d_momentum, d_v = d_state.x, None, d_state.p, None
    if saved.mlp is not None:
        carries = isinstance(config.mlp, substep.Momentum)
        d_later = d_state.p if carries else d_state.v  # (b, i, m)
        turned = equations.active(substep).backward(layer, saved.mlp, d_state.x, d_later, add)
        d_before, d_moved, d_carried = turned  # (b, i, m), (b, i, m), (b, i, m)
        if carries:
            d_momentum = d_carried  # (b, i, m): dSYMP.mlp_carried
        elif isinstance(config.mlp, substep.Velocity):
            d_v = d_carried  # (b, i, m): dSYMP.mlp_carried, or nothing
    d_raw = d_momentum  # (b, i, m): dSYMP.19 without a norm
    if saved.norm_p is not None and d_momentum is not None:
        # forward: momentum = norm(raw)
        d_raw = normed_backward(params, saved.norm_p, d_momentum, add, "_p")  # (b, i, m) [dSYMP.19]
    step = equations.active(config.steps).backward(layer, saved.attention, d_moved, d_raw, d_state.history, add)
    d_x, d_p, d_history, d_t = step  # (b, i, m), (b, i, m), -, (1)
    d_t = 0.0 * d_state.t if d_t is None else d_t  # (1)
    # forward: later = t + h_x
    if not config.detach:
        d_t = d_t + d_state.t  # (1): the gradient of the time
        add("h_x", d_state.t)
    else:
        d_t = 0.0 * d_t  # (1): no gradient through the time
        if d_history is not None:
            d_history = replace(d_history, t=d_t, h_x=d_t, h_y=d_t)
    if d_before is not None:
        d_x = d_x + d_before  # (b, i, m): the velocity of the attention step begins at x
    if params.w_start is not None:
        # forward: p = x @ w_start
        d_x = d_x + affine_backward(params, x, "start", d_p, add)  # (b, i, m) [dSYMP.first_momentum]
    if saved.tokens is not None and config.tables:
        # forward: p = look_up(params, tokens)
        look_up_backward(params, saved.tokens, d_p, add)
    if saved.tokens is not None and config.velocity_tables and params.mlp is not None:
        # forward: velocity = look_up(params.mlp, tokens)
        look_up_backward(params.mlp, saved.tokens, d_v, add)
        d_v = None
    d_inner = State(d_x, d_t, None if saved.state.p is None else d_p, d_v, d_history)
    return _cast(d_inner, saved.like), _cast(_gradients(params, found), saved.like), {}


def _gradients(params: Params, found: dict[str, Array]) -> Params:
    """Return the gradients of all parameters."""
    numbers = params.config.numbers()
    leaves = {f"numbers.{name}": numbers[name].backward(r, found[name]) for name, r in params.numbers.items()}
    names = tree.flatten(params)
    leaves |= {name: value for name, value in found.items() if name in names}
    return tree.unflatten(params, leaves)


def _raised(given: T, like: Array) -> T:
    """Return a tree of the dtype of `like` in the one that is computed in."""
    return given if raised(like).dtype == like.dtype else tree.map_leaves(raised, given)


def _cast(given: T, like: Array) -> T:
    """Return a tree in the dtype of the tokens that came in."""
    if raised(like).dtype == like.dtype:
        return given
    return tree.map_leaves(lambda leaf: namespace(leaf).astype(leaf, like.dtype), given)


def _check_state(params: Params, state: State) -> None:
    """Raise where the state is none that this layer of the stack receives."""
    config, later, shape = params.config, params.config.layer > 0, tuple(state.x.shape)
    carried, momentum = isinstance(config.mlp, substep.Velocity), (*shape, shape[-1]) if config.matrices else shape
    for name, needed, wanted in (
        ("p", later and config.integrator.carries, momentum),
        ("v", later and carried, shape),
    ):
        given = getattr(state, name)  # what it is called
        got = None if given is None else tuple(given.shape)
        if got != (wanted if needed else None):
            wants = f"{wanted}" if needed else "None: a stack starts at rest"
            found = "None" if got is None else f"shape {got}"
            raise ValueError(f"state.{name}: got {found}, layer {config.layer} of {config.layers} needs {wants}")
    if state.history is not None and not (later and config.integrator.remembers):
        raise ValueError(
            f"state.history: was given, {type(config.integrator).__name__} in layer {config.layer} reads none"
        )
    if tuple(state.t.shape) != (1,):
        raise ValueError(f"state.t: got shape {tuple(state.t.shape)}, needs (1,)")


def look_up(owner: Params | Mlp, tokens: Array, first: int | Array) -> Array:
    """Return the momenta or velocities (b, i, m) of tokens (b, i) at the positions `first`, `first` + 1, ..."""
    table, places = owner.token_embedding, owner.position_embedding
    assert table is not None and places is not None
    at = first + arange(0, tokens.shape[1], tokens)  # (i): positions
    rows = namespace(places).take(places, at, axis=0)  # (i, m): part of P
    p = embedding.embedding_forward(table, tokens) + rows  # (b, i, m) [SYMP.looked_up]
    return p


def look_up_backward(owner: Params | Mlp, tokens: Array, d_p: Array, add: Add) -> None:
    """Add the gradients of both tables; the tokens are those from the first position on."""
    xp, n, head = namespace(d_p), tokens.shape[1], "mlp." if isinstance(owner, Mlp) else ""
    table, places = owner.token_embedding, owner.position_embedding
    assert table is not None and places is not None
    # forward: p = table[tokens] + places[:n]
    d_table = embedding.embedding_backward(table, tokens, d_p)  # (t, m) [dSYMP.token_embedding]
    unused = zeros((places.shape[0] - n, d_p.shape[2]), d_p)  # positions without a token
    d_places = xp.concat([xp.sum(d_p, axis=0), unused], axis=0)  # [dSYMP.position_embedding]
    add(f"{head}token_embedding", d_table)
    add(f"{head}position_embedding", d_places)


def check_numbers(params: Params, tokens: Array | None, x: Array, first: int | Array) -> Array:
    """Return the tokens of x; raise where the tables have no row for one of them, or for its position."""
    config, shape = params.config, tuple(x.shape[:2])
    if tokens is None:
        raise ValueError(f"context.tokens: got None, start='table' needs the numbers of the tokens {shape}")
    if tuple(tokens.shape) != shape:
        raise ValueError(f"context.tokens: got shape {tuple(tokens.shape)}, needs {shape}")
    if concrete(namespace(tokens).any((tokens < 0) | (tokens >= config.vocabulary))):
        raise ValueError(f"context.tokens: got one outside of 0 to {config.vocabulary - 1}")
    if concrete(namespace(x).any(namespace(x).asarray(first + shape[1] > config.context))):
        raise ValueError(f"context.tokens: got {int(first) + shape[1]} in all, needs at most {config.context}")
    return tokens
