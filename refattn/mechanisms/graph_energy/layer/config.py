"""The configuration and the parameters of the block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from refattn.args import check, check_choice, check_number, check_whole
from refattn.mechanisms import projections
from refattn.mechanisms.context import Context
from refattn.mechanisms.core_arguments import defaults_of
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.forces import Coupling, Intrinsic, Polynomial
from refattn.mechanisms.graph_energy.layer import hierarchy
from refattn.mechanisms.graph_energy.layer.regularisers import NAMES, OF_SCORES
from refattn.mechanisms.graph_energy.options import FAMILIES
from refattn.mechanisms.graph_energy.options.integrator import Integrator
from refattn.mechanisms.graph_energy.options.links import CausalMirror, Given, Links, Mean
from refattn.mechanisms.graph_energy.options.state import STATES, Start
from refattn.mechanisms.graph_energy.options.threshold import Hard, Threshold
from refattn.mechanisms.option_kinds import Forbidden, refuse
from refattn.mechanisms.projections import check_sizes, fresh
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, device, namespace, zeros

SLOPES_BELOW_1 = ("sin", "tanh", "identity", "arctan")
"""Couplings with a largest slope of 1: a block may bound the step by how strong they are, which it learns."""

USUAL = defaults_of(core.forward)

LEVELS = defaults_of(hierarchy.forward)

_NEEDS = "needs a number, such as 0.1"


@dataclass(frozen=True)
class Config(projections.Config):
    """Static choices of a block; those of its projections are `refattn.mechanisms.projections.Config`.

    Attributes
    ----------
    state, coupling, intrinsic, steps, integrator, threshold, graph, scale
        As in the core. Coefficients of a polynomial are learned by all heads together. With links over keys tokens may
        attend a memory, and where scores of keys start is learned.
    step
        None: GE.safe_step, 1/L of the learned strengths, for links that add up to at most 1. "mean" and
        "causal_mirror", which a causal block in state "query" or "prefix" has by itself, classes, couplings that may be
        steeper than 1 and other intrinsic forces need a number.
    learn_step, learn_tau
        Whether the step and the threshold's tau are learned, per head, from what they would be otherwise.
    classes
        None, or of how many classes tokens are: then mu is learned for each, and the context's positions (tokens,),
        modulo that many, say which class each node has.
    jitter
        How far from where they would start scores begin: times the context's draws "start", an array that broadcasts to
        the scores (b, h, n, c). 0: no draws are needed.
    regulariser, strength
        A sum R, one of `refattn.mechanisms.graph_energy.layer.regularisers.NAMES`, and lambda: in training the backward
        adds the gradient of lambda R, over all sequences and heads, to that of the loss, which itself stays what it is.
        Where a loss is the mean over N tokens, lambda / N weighs the mean of R over tokens with lambda.
    levels, window, stride
        How many levels of tokens there are, at most, of which a token reads a few nodes near to it: those of
        `refattn.mechanisms.graph_energy.layer.hierarchy`. How much each level counts is learned. None: a token reads
        all tokens, as in the core.
    """

    state: str = USUAL["state"]
    coupling: str | Coupling | Polynomial | None = USUAL["coupling"]
    intrinsic: str | Intrinsic = USUAL["intrinsic"]
    step: float | None = None
    steps: int = USUAL["steps"]
    integrator: str | Integrator = USUAL["integrator"]
    threshold: str | Threshold = USUAL["threshold"]
    graph: str | Links | None = USUAL["graph"]
    scale: float | None = USUAL["scale"]
    learn_step: bool = False
    learn_tau: bool = False
    classes: int | None = None
    jitter: float = 0.0
    regulariser: str | None = None
    strength: float = 1e-3
    levels: int | None = None
    window: int | None = LEVELS["window"]
    stride: int = LEVELS["stride"]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "steps", "classes", "levels", "window")
        check_whole("stride", self.stride, 2)
        for name in ("learn_step", "learn_tau"):
            check(name, getattr(self, name), bool)
        if self.graph is not None and (not isinstance(self.links, Links) or isinstance(self.links, Given)):
            raise TypeError(f"graph: got {type(self.graph).__name__}, needs the links of a block: a name, or a Links")
        kinds = (self.state, self.coupling, self.intrinsic, self.integrator, self.threshold, self.graph)
        core.kinds_of(False, *kinds, Start(at=0.0 if self.probes else None))
        for name, value in (("tau", self.tau), ("step", self.step), ("scale", self.scale)):
            if value is not None:
                check_number(name, value, positive=name == "step")
        for name in ("strength", "jitter"):
            check_number(name, getattr(self, name))
        if self.regulariser is not None:
            check_choice("regulariser", self.regulariser, NAMES)
        refuse(FORBIDDEN, self)

    def chosen(self, option: str) -> Any:
        """Return the object of an option that is one of several kinds, or None."""
        given = getattr(self, option)
        return None if given is None else FAMILIES[option](given)

    @property
    def links(self) -> Any:
        """The links of the graph, or None, as the core chooses."""
        return self.chosen("graph")

    @property
    def follows(self) -> bool:
        """Whether the step follows the strengths: 1 / L."""
        return self.step is None and not self.learn_step

    @property
    def coupling_name(self) -> str:
        """What a message calls the coupling."""
        return named(self.coupling)

    @property
    def intrinsic_name(self) -> str:
        """What a message calls the intrinsic force."""
        return named(self.intrinsic)

    @property
    def over_keys(self) -> bool:
        """Whether links are those of keys."""
        return self.links is not None and self.links.over == "keys"

    @property
    def context_fields(self) -> tuple[str, ...]:
        """The fields of the context that a block of this configuration reads."""
        others = ("memory", "memory_mask") if self.over_keys else ("causal",)
        own = {"positions": self.classes is not None, "draws": self.jitter != 0.0}
        return ("mask", "key_mask", *others, *(name for name, there in own.items() if there))

    def drawn(self, tokens: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the draws of a block that reads some, by name, for so many tokens."""
        return {"start": (self.heads, tokens, 1)}

    @property
    def is_polynomial(self) -> bool:
        """Whether the coupling has coefficients, which are learned."""
        return isinstance(self.chosen("coupling"), Polynomial)

    @property
    def has_mu(self) -> bool:
        """Whether there is an intrinsic force, whose strength is learned."""
        return self.chosen("intrinsic") != "none"

    @property
    def tau(self) -> float | None:
        """The tau of the threshold; None where the state says what it is."""
        tau: float | None = self.chosen("threshold").tau
        return tau

    @property
    def first_tau(self) -> float:
        """Where a threshold that is learned starts; 0 where there is none."""
        return self.tau if self.tau is not None else 0.4 if self.state in ("token", "prefix") else 0.0

    @property
    def first_step(self) -> float:
        """Where a step that is learned starts."""
        return self.step if self.step is not None else 1.0 / 3.0 if self.has_mu else 0.5

    @property
    def probes(self) -> bool:
        """Whether it is learned where scores of keys start."""
        return self.over_keys and self.state == "token"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name."""
        h, _, d, _ = self.sizes
        found = super().shapes() | {"raw_kappa": (h,)}
        own = {"raw_mu": self.has_mu, "raw_step": self.learn_step, "raw_tau": self.learn_tau}
        found |= {name: (h,) for name, there in own.items() if there}
        if self.probes:
            found["probe"] = (h, d)
        if self.is_polynomial:
            found["coefficients"] = (len(self.chosen("coupling").coefficients),)
        if self.classes is not None:
            found["raw_mu"] = (h, self.classes)
        if self.levels is not None:
            found["level_logits"] = (self.levels,)
        return found


def named(force: Any) -> str:
    """Return what a message calls a coupling or an intrinsic force."""
    return repr(force.name if isinstance(force, (Coupling, Intrinsic)) else force)


FORBIDDEN: Forbidden = (
    (
        lambda c: c.classes is not None and not c.has_mu,
        'classes: got {c.classes} with intrinsic="{c.intrinsic}", which has no mu',
    ),
    (
        lambda c: c.follows and c.classes is not None,
        "step: got None with classes, needs a number, or learn_step",
    ),
    (
        lambda c: c.follows and c.coupling is not None and c.chosen("coupling") not in SLOPES_BELOW_1,
        "step: got None with coupling={c.coupling_name}, needs a number, or learn_step",
    ),
    (
        lambda c: c.follows and c.intrinsic not in ("anchor", "none"),
        "step: got None with intrinsic={c.intrinsic_name}, needs a number, or learn_step",
    ),
    (
        lambda c: c.step is None and isinstance(c.links, (Mean, CausalMirror)),
        f"step: got None with graph={{c.graph!r}}, whose degrees have no bound; {_NEEDS}",
    ),
    (
        lambda c: c.regulariser in ("entropy", "gini") and c.state == "feature",
        'regulariser: got "{c.regulariser}" with state="feature", which has no weights',
    ),
    (
        lambda c: c.learn_tau and isinstance(c.chosen("threshold"), Hard),
        'learn_tau: got True with threshold="hard", whose tau has no gradient; needs another kind',
    ),
    (
        lambda c: c.learn_tau and not c.first_tau > 0.0,
        'tau: got {c.tau} with learn_tau and state="{c.state}", needs a number above 0',
    ),
    (
        lambda c: c.levels is None and c.window != LEVELS["window"],
        "window: got {c.window} without levels, needs levels, such as 3",
    ),
    (
        lambda c: c.levels is None and c.stride != LEVELS["stride"],
        "stride: got {c.stride} without levels, needs levels, such as 3",
    ),
    (
        lambda c: c.levels is not None and c.state not in ("token", "prefix"),
        'levels: got {c.levels} with state="{c.state}", which levels do not have; needs None',
    ),
    (
        lambda c: c.levels is not None and c.over_keys,
        "levels: got {c.levels} with graph={c.graph!r}, which levels do not have; needs None",
    ),
    (
        lambda c: c.levels is not None and c.jitter != 0.0,
        "levels: got {c.levels} with jitter={c.jitter}, which levels do not have; needs None",
    ),
    (
        lambda c: c.levels is not None and c.regulariser not in (None, *OF_SCORES),
        'levels: got {c.levels} with regulariser="{c.regulariser}", which levels do not have; needs None',
    ),
)
"""What does not go together in a block, beside what does not in the core."""


@dataclass(frozen=True, kw_only=True)
class Params(projections.Params[Config]):
    """Weights (in, out), biases (None where the configuration has none), and the numbers that are learned, most raw."""

    raw_kappa: Array  # (h)
    raw_mu: Array | None = None  # (h), or (h, p) for each class
    raw_step: Array | None = None  # (h)
    raw_tau: Array | None = None  # (h)
    probe: Array | None = None  # (h, d)
    coefficients: Array | None = None  # (o)
    level_logits: Array | None = None  # of each level


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, biases of 0, and mu = kappa = 1.

    A step, a threshold and coefficients that are learned start at what the configuration says, a probe like a weight,
    and levels count alike.
    """
    h, _, d, _ = config.sizes
    xp = namespace(like)

    def raw(size: float) -> Array:
        """Return what the softplus of is a number."""
        return xp.full((h,), math.log(math.expm1(size)), dtype=like.dtype, device=device(like))

    mu = raw(1.0) if config.has_mu else None
    if mu is not None and config.classes is not None:
        mu = xp.broadcast_to(mu[:, None], (h, config.classes)) + 0.0
    probe = None
    if config.probes:
        own: dict[str, Any] = {"seed": seed, "purpose": "graph_energy.probe", "layer": layer, "like": like}
        probe = xp.matrix_transpose(fresh_weight(d, h, bound=math.sqrt(3.0 / d), **own))
    return Params(
        config,
        **fresh(config, "graph_energy", seed=seed, like=like, layer=layer),
        raw_kappa=raw(1.0),
        raw_mu=mu,
        raw_step=raw(config.first_step) if config.learn_step else None,
        raw_tau=raw(config.first_tau) if config.learn_tau else None,
        probe=probe,
        coefficients=config.chosen("coupling").array(like) + 0.0 if config.is_polynomial else None,
        level_logits=None if config.levels is None else zeros((config.levels,), like),
    )


def check_bounded(config: Config, context: Context) -> None:
    """Raise where a step follows the strengths, and links may add up to more than 1."""
    if config.step is None and config.links is None and STATES[config.state].per_query and context.causal is not False:
        raise ValueError(
            f'step: got None with causal scores and state="{config.state}", whose degrees have no bound; {_NEEDS}'
        )


def core_options(config: Config, numbers: Mapping[str, Array | None]) -> dict[str, Any]:
    """Return the options of the core, or of levels, for the numbers that are learned; None stands for what is not."""
    names = ["coupling", "intrinsic", "step", "steps", "integrator", "threshold", "graph", "scale", "state"]
    names += [] if config.levels is None else ["levels", "window", "stride"]
    chosen = {name: getattr(config, name) for name in names} | {"mu": 0.0}
    chosen |= {name: numbers[name] for name in ("mu", "kappa", "step") if numbers[name] is not None}
    if numbers["tau"] is not None:
        chosen["threshold"] = replace(config.chosen("threshold"), tau=numbers["tau"])
    if (coefficients := numbers["coefficients"]) is not None:
        chosen["coupling"] = Polynomial(coefficients)
    if config.levels is not None:
        chosen["level_logits"] = numbers["level_logits"]
    return chosen
