"""The multi-head block: projections around the core, and optional biases and residual.

Equations (y are the tokens of the memory where there is one, otherwise x; heads splits a width into heads)::

    [HOL.queries]  q = heads(x w_q + b_q)
    [HOL.keys]  k = heads(y w_k + b_k)
    [HOL.values]  v = heads(y w_v + b_v)
    [HOL.merged]  a = merge(o)                              o of HOL.6 for these q, k, v
    [HOL.output]  x' = x + a w_o + b_o                      without a residual: x' = a w_o + b_o

Adjoints, for given dx'::

    [dHOL.merged]  da = dx' w_o^T
    [dHOL.6]  do = heads(da)
    [dHOL.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx' the parts for k and v go to the memory where there is one

with dq, dk, dv of the core, and dalpha and ddelta where these are parameters. The gradients of weights and biases are
those of the affine map.

The layer normalisation of the core stands between the projections and the scores, so nothing depends on the size of a
head's part of x w_q + b_q, nor on a number that is added to all of its elements: the loss is flat in these directions.

Axes: b batch, i query token, j key token, m width of the model, h head, g key/value head, d and e widths of a head.

Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2, around Mercat 2020 (arXiv:2010.14816).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refattn.args import check, check_mask
from refattn.mechanisms import projections
from refattn.mechanisms.context import Context
from refattn.mechanisms.higher_order import core
from refattn.mechanisms.higher_order.options import Options
from refattn.mechanisms.projections import State, fresh, output_backward, padding, tokens_backward
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_forward
from refattn.xp import Array, namespace, zeros

__all__ = ["Config", "Params", "Saved", "State", "init"]


@dataclass(frozen=True)
class Config(Options, projections.Config):
    """Static choices of a block: those of its projections, `refattn.mechanisms.projections.Config`, and of the core.

    Attributes
    ----------
    order, alpha, normaliser, layer_norm, norm_eps
        As in the core.
    train_alpha, train_delta
        Whether alpha and the delta of the normaliser are parameters, which start at these.
    """

    train_alpha: bool = False
    train_delta: bool = False

    def __post_init__(self) -> None:
        projections.Config.__post_init__(self)
        Options.__post_init__(self)
        for name in ("train_alpha", "train_delta"):
            check(name, getattr(self, name), bool)
        for name in self.learned:
            raise TypeError(f"{name}: got an array, needs a number, where a parameter starts: train_{name}=True")

    @property
    def starts(self) -> dict[str, float | Array]:
        """Where the numbers start that are parameters."""
        numbers = {"alpha": self.alpha, "delta": self.normaliser.delta}
        return {name: number for name, number in numbers.items() if getattr(self, f"train_{name}")}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name."""
        return super().shapes() | dict.fromkeys(self.starts, ())


@dataclass(frozen=True)
class Params(projections.Params[Config]):
    """Weights (in, out), biases, alpha and delta; what the configuration does not have is None."""

    alpha: Array | None = None  # ()
    delta: Array | None = None  # ()


@dataclass(frozen=True)
class Saved(projections.Saved):
    """What the backward of the block reads."""


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, and biases of 0."""
    params = Params(config, **fresh(config, "higher_order", seed=seed, like=like, layer=layer))
    numbers = {name: zeros((), like) + start for name, start in config.starts.items()}
    return replace(params, **numbers)


def options_of(params: Params) -> Options:
    """Return the choices of the core, with the numbers that are parameters."""
    config, xp = params.config, namespace(params.w_q)
    # A number that NumPy made of a 0-d array is one again. `asarray` would cut PyTorch's gradients off.
    numbers = (None if x is None else xp.reshape(xp.reshape(x, (1,)), ()) for x in (params.alpha, params.delta))
    alpha, delta = numbers
    normaliser = config.normaliser if delta is None else replace(config.normaliser, delta=delta)
    return Options(
        config.order, config.alpha if alpha is None else alpha, normaliser, config.layer_norm, config.norm_eps
    )


def attend(params: Params, x: Array, keys: Array, values: Array, context: Context) -> tuple[Array, Saved]:
    """Return the next x of tokens x (b, i, m) that attend the keys and values, and what `backward` reads."""
    plane = (x.shape[0], params.config.heads, x.shape[1], keys.shape[2])
    attended, core_saved = core.attend(
        queries_of(params, x),
        keys,
        values,
        options=options_of(params),
        mask=check_mask(context.mask, plane, "context.mask"),
        key_mask=padding(context, plane[0], plane[3]),
        causal=context.causal,
    )  # o of HOL.6, tagged in the core
    result, joined = output(params, x, attended)  # tagged in the function
    return result, Saved(x, context.memory, joined, core_saved)


def queries_of(params: Params, x: Array) -> Array:
    """Return the queries (b, h, i, d) of tokens x (b, i, m)."""
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), params.config.heads)  # (b, h, i, d) [HOL.queries]
    return queries


def keys_and_values(params: Params, y: Array) -> tuple[Array, Array]:
    """Return the keys (b, g, j, d) and values (b, g, j, e) of tokens y (b, j, m)."""
    _, g, _, _ = params.config.sizes
    keys = split_heads(linear_forward(y, params.w_k, params.b_k), g)  # (b, g, j, d) [HOL.keys]
    values = split_heads(linear_forward(y, params.w_v, params.b_v), g)  # (b, g, j, e) [HOL.values]
    return keys, values


def output(params: Params, x: Array, attended: Array) -> tuple[Array, Array]:
    """Return (result, joined) of tokens x (b, i, m) and what their heads attended to (b, h, i, e)."""
    joined = merge_heads(attended)  # (b, i, h*e) [HOL.merged]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m): HOL.output without its residual
    result = x + out if params.config.residual else out  # (b, i, m) [HOL.output]
    return result, joined


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context's gradient has "memory" where there is one."""
    config = params.config
    # forward: out = joined @ w_o + b_o
    d_joined, of_output = output_backward(params, saved, d_state)  # (b, i, h*e) [dHOL.merged]
    # forward: joined = merge_heads(attended)
    d_attended = split_heads(d_joined, config.heads)  # (b, h, i, e) [dHOL.6]
    d = core.backward(saved.core, d_attended)
    # forward: queries = split_heads(x @ w_q + b_q), and so for keys and values; result = x + out
    d_x, d_context, gradients = tokens_backward(params, saved, d_state, d)  # (b, i, m) [dHOL.x]
    numbers = {name: d[name] for name in config.starts}  # (): dHOL.alpha, dHOL.delta
    return State(d_x), Params(config, **gradients, **of_output, **numbers), d_context
