"""The configuration and the parameters of the block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refattn import tree
from refattn.mechanisms.arguments import check_is, check_number
from refattn.mechanisms.context import Context
from refattn.mechanisms.graph_energy.options import CHOICES, choice
from refattn.mechanisms.graph_energy.regularisers import NAMES
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, device, namespace

SLOPES_BELOW_1 = ("sin", "tanh", "identity", "arctan")
"""Couplings with a largest slope of 1: blocks learn how strong they are, and bound the step by that."""


@dataclass(frozen=True)
class Config:
    """Static choices of a block.

    Attributes
    ----------
    width
        Width of the tokens.
    heads, kv_heads
        Query heads, and key/value heads (None: as many).
    head_width, value_width
        Widths of a head (None: width / heads; None: as head_width).
    bias, residual
        Whether the projections have biases, and whether x is added to the result.
    state, coupling, intrinsic, tau, steps, integrator, symmetrise, graph_scores, scale, kind, empty, adjoint
        As in the core; the coupling is one whose slope is at most 1, or "polynomial", the intrinsic force "anchor" or
        "none". With the graph scores "kk" tokens may attend a memory, and where scores of keys start is learned.
    step
        None: 1/L of the learned strengths, or for the graphs "mean" and "causal_mirror", whose degrees have no bound,
        the core's own, a constant. A polynomial and classes need a number, or one that is learned.
    learn_step, learn_tau
        Whether the step and the threshold are learned, per head, from what they would be otherwise.
    terms
        How many coefficients the coupling "polynomial" has: learned, by all heads together, from those of the identity.
    classes
        None, or of how many classes tokens are: then mu is learned for each, and the context's positions (tokens,) say
        which class each node has.
    jitter
        How far from where they would start scores begin: times the context's draws "start", an array that broadcasts to
        the scores (b, h, n, c). 0: no draws are needed.
    regulariser, strength
        A sum R, one of `refattn.mechanisms.graph_energy.regularisers.NAMES`, and lambda: in training the backward adds
        the gradient of lambda R, over all sequences and heads, to that of the loss, which itself stays what it is.
        Where a loss is the mean over N tokens, lambda / N weighs the mean of R over tokens with lambda.
    """

    width: int
    heads: int
    kv_heads: int | None = None
    head_width: int | None = None
    value_width: int | None = None
    bias: bool = False
    residual: bool = True
    state: str = "token"
    coupling: str | None = None
    intrinsic: str = "anchor"
    tau: float | None = None
    step: float | None = None
    steps: int = 10
    integrator: str = "euler"
    symmetrise: str | None = None
    graph_scores: str = "qk"
    scale: float | None = None
    kind: str = "hard"
    empty: str = "argmax"
    adjoint: str = "unroll"
    learn_step: bool = False
    learn_tau: bool = False
    terms: int = 2
    classes: int | None = None
    jitter: float = 0.0
    regulariser: str | None = None
    strength: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("width", "heads", "kv_heads", "head_width", "value_width", "steps", "terms", "classes"):
            value = getattr(self, name)
            if value is None and name not in ("width", "heads", "steps", "terms"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}, needs a whole number of at least 1")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, needs a divisor of the {self.heads} heads")
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"heads: got {self.heads}, needs a divisor of the width {self.width}, or a head_width")
        for name in ("bias", "residual", "learn_step", "learn_tau"):
            check_is(name, getattr(self, name), bool)
        for name in ("tau", "step", "scale"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), positive=name == "step")
        if self.coupling is not None:
            choice("coupling", self.coupling, (*SLOPES_BELOW_1, "polynomial"))
        choice("intrinsic", self.intrinsic, ("anchor", "none"))
        for name, choices in CHOICES.items():
            if name not in ("coupling", "intrinsic") and getattr(self, name) is not None:
                choice(name, getattr(self, name), choices)
        if self.classes is not None and self.intrinsic != "anchor":
            raise ValueError(f'classes: got {self.classes} with intrinsic="{self.intrinsic}", which has no mu')
        if self.step is None and not self.learn_step:
            for name, there in (("classes", self.classes is not None), ("polynomial", self.is_polynomial)):
                if there:
                    raise ValueError(f"step: got None with {name}, needs a number, or learn_step")
        for name in ("strength", "jitter"):
            check_number(name, getattr(self, name))
        if self.regulariser is not None:
            choice("regulariser", self.regulariser, NAMES)
            if self.regulariser in ("entropy", "gini") and self.state == "feature":
                raise ValueError(f'regulariser: got "{self.regulariser}" with state="feature", which has no weights')
        if self.learn_tau and self.kind == "hard":
            raise ValueError(
                'learn_tau: got True with kind="hard", whose threshold has no gradient; needs another kind'
            )
        if self.learn_tau and not self.first_tau > 0.0:
            raise ValueError(f'tau: got {self.tau} with learn_tau and state="{self.state}", needs a number above 0')
        if self.learn_step and self.step is None and self.symmetrise in ("mean", "causal_mirror"):
            raise ValueError(f'step: got None with learn_step and symmetrise="{self.symmetrise}", needs a number')

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of the context that a block of this configuration reads."""
        others = ("memory", "memory_mask") if self.graph_scores == "kk" else ("causal",)
        own = {"positions": self.classes is not None, "draws": self.jitter != 0.0}
        return ("mask", "key_mask", *others, *(name for name, there in own.items() if there))

    @property
    def is_polynomial(self) -> bool:
        """Whether the coupling has coefficients, which are learned."""
        return self.coupling == "polynomial"

    @property
    def first_tau(self) -> float:
        """Where a threshold that is learned starts; 0 where there is none."""
        return self.tau if self.tau is not None else 0.4 if self.state == "token" else 0.0

    @property
    def first_step(self) -> float:
        """Where a step that is learned starts."""
        return self.step if self.step is not None else 1.0 / 3.0 if self.intrinsic == "anchor" else 0.5

    @property
    def probes(self) -> bool:
        """Whether it is learned where scores of keys start."""
        return self.graph_scores == "kk" and self.state == "token"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, key/value heads, width of a query or key head, width of a value head."""
        head_width = self.head_width or self.width // self.heads
        return self.heads, self.kv_heads or self.heads, head_width, self.value_width or head_width


@dataclass(frozen=True)
class Params:
    """Weights (in, out), biases (None where the configuration has none), and the numbers that are learned, most raw."""

    config: Config
    w_q: Array  # (m, h*d)
    w_k: Array  # (m, g*d)
    w_v: Array  # (m, g*e)
    w_o: Array  # (h*e, m)
    raw_kappa: Array  # (h)
    raw_mu: Array | None = None  # (h), or (h, p) for each class
    raw_step: Array | None = None  # (h)
    raw_tau: Array | None = None  # (h)
    probe: Array | None = None  # (h, d)
    coefficients: Array | None = None  # (terms)
    b_q: Array | None = None
    b_k: Array | None = None
    b_v: Array | None = None
    b_o: Array | None = None


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, biases of 0, and mu = kappa = 1.

    A step and a threshold that are learned start at what the configuration says, and a probe like a weight.
    """
    h, g, d, e = config.sizes
    m = config.width
    xp = namespace(like)

    def weight(name: str, rows: int, columns: int) -> Array:
        return fresh_weight(
            rows,
            columns,
            bound=math.sqrt(3.0 / rows),
            seed=seed,
            purpose=f"graph_energy.{name}",
            layer=layer,
            like=like,
        )

    def constant(size: int, value: float) -> Array:
        return xp.full((size,), value, dtype=like.dtype, device=device(like))

    weights = (weight("w_q", m, h * d), weight("w_k", m, g * d), weight("w_v", m, g * e), weight("w_o", h * e, m))

    def raw(size: float, there: bool = True) -> Array | None:
        """Return what the softplus of is a number."""
        return constant(h, math.log(math.expm1(size))) if there else None

    mu = raw(1.0, config.intrinsic == "anchor")
    if mu is not None and config.classes is not None:
        mu = xp.broadcast_to(mu[:, None], (h, config.classes)) + 0.0
    learned = (
        mu,
        raw(config.first_step, config.learn_step),
        raw(config.first_tau if config.learn_tau else 1.0, config.learn_tau),
        namespace(like).matrix_transpose(weight("probe", d, h)) if config.probes else None,
        xp.concat([constant(1, 1.0), constant(config.terms - 1, 0.0)]) if config.is_polynomial else None,
    )
    biases = (constant(h * d, 0.0), constant(g * d, 0.0), constant(g * e, 0.0), constant(m, 0.0))
    return Params(config, *weights, raw(1.0), *learned, *(biases if config.bias else (None,) * 4))


def check_params(params: Params) -> None:
    (h, g, d, e), m = params.config.sizes, params.config.width
    needs: dict[str, tuple[int, ...]] = {"w_q": (m, h * d), "w_k": (m, g * d), "w_v": (m, g * e), "w_o": (h * e, m)}
    if params.config.bias:
        needs |= {f"b_{name[-1]}": shape[1:] for name, shape in needs.items()}
    needs["raw_kappa"] = (h,)
    own = {"raw_mu": params.config.intrinsic == "anchor", "raw_step": params.config.learn_step}
    needs |= {name: (h,) for name, there in (own | {"raw_tau": params.config.learn_tau}).items() if there}
    if params.config.probes:
        needs["probe"] = (h, d)
    if params.config.is_polynomial:
        needs["coefficients"] = (params.config.terms,)
    if params.config.classes is not None:
        needs["raw_mu"] = (h, params.config.classes)
    shapes = {name: tuple(x.shape) for name, x in tree.flatten(params).items()}
    for name in {**needs, **shapes}:
        if shapes.get(name) != needs.get(name):
            raise ValueError(f"params.{name}: got shape {shapes.get(name)}, its configuration needs {needs.get(name)}")


def is_bounded(config: Config, context: Context) -> bool:
    """Tell whether no token of the graph has links of more than 1 in all."""
    symmetrise = config.symmetrise
    if symmetrise is None:
        return config.state != "query" or context.causal is False
    return symmetrise not in ("mean", "causal_mirror")


def core_options(config: Config, numbers: Mapping[str, Array | None]) -> dict[str, Any]:
    """Return the options of the core, for the numbers that are learned; None stands for what is not."""
    chosen = {name: getattr(config, name) for name in (*CHOICES, "tau", "step", "steps", "scale")}
    return chosen | {"mu": 0.0} | {name: x for name, x in numbers.items() if x is not None}
