"""The multi-head block: projections around the core, and optional biases and residual.

Equations (y are the tokens of the memory where there is one, otherwise x; heads splits a width into heads)::

    [KOOP.queries]  q^0 = heads(x w_q + b_q)
    [KOOP.keys]  k = heads(y w_k + b_k)
    [KOOP.values]  v = heads(y w_v + b_v)
    [KOOP.merged]  o = merge(q^m)                           q^m of KOOP.15 for these q^0, k, v
    [KOOP.output]  x' = x + o w_o + b_o                     without a residual: x' = o w_o + b_o

Adjoints, for given dx'::

    [dKOOP.merged]  do = dx' w_o^T
    [dKOOP.x]  dx = dq w_q^T + dk w_k^T + dv w_v^T + dx'  the parts for k and v go to the memory where there is one

with dq, dk, dv of the core. The gradients of weights and biases are those of the affine map; the kernel's bandwidth and
weight are exponentials of the parameters log_bandwidth and log_weight.

Beside the core its jitter is larger, because tokens that repeat make the Gram matrix singular, and float32 holds no
1e-8. It takes the fit "separable", because "stein", the core's default, has a large system for each query where the
future is hidden. Ridge and epsilon are those of the configuration, or what the context's draws hold: a block with a law
has them drawn in training and in sampling, and takes the law's means elsewhere.

Axes: b batch, i query token, j key token, m width of the model, h head, g key/value head, d width of a head.

Source: N. Tie 2024, Koopman attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from refattn.args import check
from refattn.mechanisms import projections
from refattn.mechanisms.context import Context
from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.koopman import core
from refattn.mechanisms.koopman.layer.draws import LAWS, Beta, Law, draw, law_of
from refattn.mechanisms.koopman.options.kernel import Own
from refattn.mechanisms.option_kinds import text_of
from refattn.mechanisms.projections import State, fresh, mask_of, output_backward, tokens_backward
from refattn.ops.heads import merge_heads, split_heads
from refattn.ops.linear import linear_forward
from refattn.xp import Array, device, namespace

__all__ = ["Config", "Params", "Saved", "State", "init"]

_USUAL = defaults_of(core.forward)
_FIT, _JITTER = "separable", 1e-2  # why they are others: above


@dataclass(frozen=True)
class Config(projections.Sizes):
    """Static choices of a block; those of its projections are `refattn.mechanisms.projections.Sizes`.

    Attributes
    ----------
    updates, kernel, space, fit, perturbation, similarity, jitter
        As in the core; families as text, or as objects without arrays, which become text, an `Own` kernel excepted.
    learn_kernel
        Whether the bandwidth and weight of the second kernel are parameters, which start at the kernel's.
    draws
        None, or the law of ridges and epsilons: "beta", "beta(b=19.0, candidates=8)", or a
        `refattn.mechanisms.koopman.layer.draws.Law` of your own.
    """

    updates: int = _USUAL["updates"]
    kernel: str | Own = _USUAL["kernel"]
    space: str = _USUAL["space"]
    fit: str = _FIT
    perturbation: str = _USUAL["perturbation"]
    similarity: str = _USUAL["similarity"]
    jitter: float | None = _JITTER
    learn_kernel: bool = True
    draws: str | Beta | Law | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check("learn_kernel", self.learn_kernel, bool)
        own = {name: getattr(self, name) for name in ("updates", "space", "similarity", "jitter")}
        core.check_choices(**own)
        families = core.chosen_families(**{name: getattr(self, name) for name in core.KINDS})
        for name, kind in families.items():
            if not isinstance(getattr(self, name), (str, Own)):
                object.__setattr__(self, name, text_of(kind, core.KINDS[name]))
        if self.law is not None:
            for name, kind in (("ridge", families["fit"]), ("epsilon", families["perturbation"])):
                if getattr(kind, name) is not None:
                    raise ValueError(f"draws: got {self.draws!r} with a {name} that is given, needs one of them")
        if isinstance(self.draws, Beta):
            object.__setattr__(self, "draws", text_of(self.draws, LAWS))

    @property
    def families(self) -> dict[str, Any]:
        """The families of options of the core, as objects."""
        return {name: make(getattr(self, name)) for name, make in core.FAMILIES.items()}

    @property
    def law(self) -> Law | Beta | None:
        """The law of ridges and epsilons, where they are drawn."""
        return None if self.draws is None else law_of(self.draws)

    def chances(self, *, seed: int, step: int, layer: int, like: Array) -> dict[str, Array] | None:
        """Return the context's draws of a layer for a step; None where there is no law."""
        law = self.law
        return None if law is None else draw(self.updates, seed=seed, step=step, layer=layer, like=like, law=law)

    def standing(self, like: Array) -> dict[str, Any]:
        """Return ridge and epsilon where none are drawn: the law's means, and behind them candidates of seed 0."""
        law = self.law
        if law is None or law.candidates == 1 or self.updates == 1:
            return {} if law is None else law.means
        xp, drawn = namespace(like), draw(self.updates, seed=0, step=0, layer=0, like=like, law=law)
        return {name: xp.concat([0.0 * x[:1, :] + law.means[name], x[:-1, :]]) for name, x in drawn.items()}

    @property
    def learns(self) -> bool:
        """Whether there is a second kernel whose numbers are parameters."""
        second = any(field.name == "bandwidth" for field in fields(self.families["kernel"]))
        return self.learn_kernel and second and self.updates > 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name."""
        return super().shapes() | ({"log_bandwidth": (1,), "log_weight": (1,)} if self.learns else {})


@dataclass(frozen=True)
class Params(projections.Params[Config]):
    """Weights (in, out) and biases; what the configuration has not is None."""

    log_bandwidth: Array | None = None  # (1,)
    log_weight: Array | None = None  # (1,)


@dataclass(frozen=True)
class Saved(projections.Saved):
    """What the backward of the block reads."""


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, biases of 0, and the kernel's numbers."""
    weights = fresh(config, "koopman", seed=seed, like=like, layer=layer)
    if not config.learns:
        return Params(config, **weights)
    xp, kernel = namespace(like), config.families["kernel"]
    bandwidth = math.sqrt(config.sizes[2]) if kernel.bandwidth is None else kernel.bandwidth
    starts = (math.log(bandwidth), math.log(1.0 if kernel.weight is None else kernel.weight))
    numbers = (xp.full((1,), x, dtype=like.dtype, device=device(like)) for x in starts)
    return Params(config, **weights, **dict(zip(("log_bandwidth", "log_weight"), numbers, strict=True)))


def keys_and_values(params: Params, y: Array) -> tuple[Array, Array]:
    """Return the keys and values (b, g, j, d) of tokens y (b, j, m)."""
    _, g, _, _ = params.config.sizes
    keys = split_heads(linear_forward(y, params.w_k, params.b_k), g)  # (b, g, j, d) [KOOP.keys]
    values = split_heads(linear_forward(y, params.w_v, params.b_v), g)  # (b, g, j, d) [KOOP.values]
    return keys, values


def attend(params: Params, x: Array, keys: Array, values: Array, context: Context) -> tuple[Array, Saved]:
    """Return the next x of tokens x (b, i, m) whose queries move among the keys and values, and what is saved."""
    config, h, families = params.config, params.config.heads, families_of(params)
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), h)  # (b, h, i, d) [KOOP.queries]
    draws: dict[str, Any] = dict(context.draws or config.standing(x))
    if unknown := sorted(set(draws) - {"ridge", "epsilon"}):
        raise ValueError(f"context.draws: got {', '.join(unknown)}, needs ridge and epsilon")
    families["fit"] = replace(families["fit"], **{n: d for n, d in draws.items() if n == "ridge"})
    families["perturbation"] = replace(families["perturbation"], **{n: d for n, d in draws.items() if n == "epsilon"})
    last, core_saved = core.forward(
        queries,
        keys,
        values,
        mask=mask_of(context, (x.shape[0], h, x.shape[1], keys.shape[2])),
        causal=context.causal,
        updates=config.updates,
        space=config.space,
        similarity=config.similarity,
        jitter=config.jitter,
        **families,
    )  # q^m of KOOP.15, tagged in the core
    joined = merge_heads(last)  # (b, i, h*d) [KOOP.merged]
    out = linear_forward(joined, params.w_o, params.b_o)  # (b, i, m): KOOP.output without its residual
    result = x + out if config.residual else out  # (b, i, m) [KOOP.output]
    return result, Saved(x, context.memory, joined, core_saved)


def backward(params: Params, saved: Saved, d_state: State) -> tuple[State, Params, dict[str, Array]]:
    """Return (d_state, d_params, d_context); the context's gradient has "memory" where there is one."""
    config = params.config
    # forward: out = joined @ w_o + b_o
    d_joined, of_output = output_backward(params, saved, d_state)  # (b, i, h*d) [dKOOP.merged]
    # forward: joined = merge_heads(last)
    d = core.backward(saved.core, split_heads(d_joined, config.heads))
    # forward: queries = split_heads(x @ w_q + b_q), and so for keys and values; result = x + out
    d_x, d_context, gradients = tokens_backward(params, saved, d_state, d)  # (b, i, m) [dKOOP.x]
    return State(d_x), Params(config, **gradients, **of_output, **kernel_backward(params, d)), d_context


def families_of(params: Params) -> dict[str, Any]:
    """Return the families of options of the core, with the kernel's numbers if they are parameters."""
    families = params.config.families
    if params.log_bandwidth is not None and params.log_weight is not None:
        exp = namespace(params.w_q).exp
        numbers = {"bandwidth": exp(params.log_bandwidth)[0], "weight": exp(params.log_weight)[0]}
        families["kernel"] = replace(families["kernel"], **numbers)
    return families


def kernel_backward(params: Params, d: dict[str, Array]) -> dict[str, Array]:
    """Return the gradients (1) of the kernel's parameters, if there are some, for those of its numbers."""
    # forward: bandwidth = exp(log_bandwidth), and so for the weight
    names, exp = ("bandwidth", "weight") if params.config.learns else (), namespace(params.w_q).exp
    return {f"log_{name}": d[name] * exp(getattr(params, f"log_{name}")) for name in names}
