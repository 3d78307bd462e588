"""Static choices of a block, its parameters, and how they start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn import philox
from refattn.args import Real, Whole, check, check_all, check_choice
from refattn.mechanisms import projections
from refattn.mechanisms.projections import fresh
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, backend, device, namespace

RULES = ("linear", "gated", "delta", "gated_delta", "momentum")
DECAYS = ("head", "channel")
DECAY_MAPS = ("softplus", "bounded")
ACTIVATIONS = ("silu", "none")
GATES = ("none", "silu", "sigmoid")

NORMALISED = True
"""Layers normalise queries and keys, which the core does only where it is asked to."""

RMS_EPS = 1e-5
"""What the output norm adds to the mean of the squares."""


@dataclass(frozen=True)
class Config(projections.Config):
    """Static choices of a block: those of its projections, `refattn.mechanisms.projections.Config`, and these.

    Attributes
    ----------
    rule
        "linear", "gated", "delta", "gated_delta" or "momentum": which gates the tokens have.
    decay
        "head" or "channel": whether the decay of a gated rule is one for each head, or for each channel of its keys.
    decay_map, lower_bound
        "softplus": log_decay = -exp(A) softplus(x w + b); "bounded": lower_bound sigmoid(exp(A) (x w + b)).
    beta_max
        Largest beta: 1, or 2, for which a write may turn the sign of what is stored.
    conv
        Taps of a causal convolution of queries, keys and values, each channel alone; 0 for none.
    activation
        "silu" or "none": of queries, keys and values.
    qk_norm
        Whether queries and keys are normalised to length 1.
    gate
        "none", or the activation of the output gate: "silu" or "sigmoid".
    out_norm, norm_eps
        Whether heads are divided by the root of the mean of their squares, to which norm_eps is added.

    Published layers are these: DeltaNet is "delta" with conv 4; GDN "gated_delta" with conv 4 and a gate "silu"; KDA
    the same with a decay "channel" and a gate "sigmoid", whose two matrices of low rank are one of full rank here.
    """

    rule: str = "gated_delta"
    decay: str = "head"
    decay_map: str = "softplus"
    lower_bound: float = -5.0
    beta_max: float = 1.0
    conv: int = 0
    activation: str = "silu"
    qk_norm: bool = NORMALISED
    gate: str = "none"
    out_norm: bool = True
    norm_eps: float = RMS_EPS

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = {"rule": RULES, "decay": DECAYS, "decay_map": DECAY_MAPS, "activation": ACTIVATIONS, "gate": GATES}
        for name, known in choices.items():
            check_choice(name, getattr(self, name), known)
        for name in ("qk_norm", "out_norm"):
            check(name, getattr(self, name), bool)
        check_all(self, conv=Whole(0, 1024), norm_eps=Real(0.0))
        check_all(self, lower_bound=Real(high=0.0, below=True), beta_max=Real(0.0, 2.0, above=True))
        if self.conv == 1:
            raise ValueError("conv: got 1, needs 0, or a number of taps of at least 2")
        for name in ("lower_bound", "beta_max", "norm_eps"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.rule == "momentum" and self.decay == "channel":
            raise ValueError('decay: got "channel" with the rule "momentum", needs "head"')

    @property
    def gates(self) -> tuple[str, ...]:
        """The gates of the rule."""
        known = {"linear": (), "gated": ("log_decay",), "delta": ("beta",), "gated_delta": ("beta", "log_decay")}
        return known.get(self.rule, ("beta", "log_decay", "log_momentum", "step"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters, by name."""
        (h, g, d, e), m = self.sizes, self.width
        found = super().shapes()
        widths = {"q": h * d, "k": g * d, "v": g * e}
        if self.conv:
            found |= {f"conv_{name}": (self.conv, width) for name, width in widths.items()}
            found |= {f"conv_b_{name}": (width,) for name, width in widths.items() if self.bias}
        if "beta" in self.gates:
            found["w_beta"] = (m, g)
        if "log_decay" in self.gates:
            outs = g if self.decay == "head" else g * d
            found |= {"w_decay": (m, outs), "b_decay": (outs,), "a_decay": (g,)}
        if "log_momentum" in self.gates:
            found |= {"w_momentum": (m, g), "b_momentum": (g,), "a_momentum": (g,), "w_step": (m, g)}
        if self.gate != "none":
            found["w_gate"] = (m, h * e)
        if self.out_norm:
            found["gain"] = (e,)
        return found


@dataclass(frozen=True)
class Params(projections.Params[Config]):
    """Weights (in, out), taps (tap, channel), and biases; what the configuration does not have is None."""

    conv_q: Array | None = None  # (taps, h*d): the last tap is of the token itself
    conv_k: Array | None = None  # (taps, g*d)
    conv_v: Array | None = None  # (taps, g*e)
    conv_b_q: Array | None = None  # (h*d)
    conv_b_k: Array | None = None  # (g*d)
    conv_b_v: Array | None = None  # (g*e)
    w_beta: Array | None = None  # (m, g)
    w_decay: Array | None = None  # (m, g) or (m, g*d)
    b_decay: Array | None = None  # (g) or (g*d)
    a_decay: Array | None = None  # (g): A
    w_momentum: Array | None = None  # (m, g)
    b_momentum: Array | None = None  # (g)
    a_momentum: Array | None = None  # (g)
    w_step: Array | None = None  # (m, g)
    w_gate: Array | None = None  # (m, h*e)
    gain: Array | None = None  # (e)


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, biases of 0 and gains of 1.

    A is the logarithm of a number uniform in (0, 16), by channel in (1, 16), and what is added in the softplus lets
    decays begin between exp(-16 0.1) and 1: its softplus is log-uniform in (0.001, 0.1).
    """
    projected = fresh(config, "delta", seed=seed, like=like, layer=layer)
    xp, own = namespace(like), {}
    for name, shape in config.shapes().items():
        if name in projected:
            continue
        if name.startswith(("w_", "conv_")) and len(shape) == 2:
            bound = math.sqrt(3.0 / shape[0])
            own[name] = fresh_weight(*shape, bound=bound, seed=seed, purpose=f"delta.{name}", layer=layer, like=like)
        elif name.startswith("conv_b_"):
            own[name] = xp.zeros(shape, dtype=like.dtype, device=device(like))
        elif name == "gain":
            own[name] = xp.ones(shape, dtype=like.dtype, device=device(like))
        else:
            own[name] = _placed(_rates(config, name, shape, seed, layer), like)
    return Params(config, **projected, **own)


def _rates(config: Config, name: str, shape: tuple[int, ...], seed: int, layer: int) -> Array:
    """Return the numbers that a decay starts with, on the host."""
    np = namespace(draw := philox.uniform(shape, seed=seed, purpose=f"delta.{name}", layer=layer))
    if name.startswith("a_"):
        low = 1.0 if config.decay == "channel" else 1e-3
        return np.log(low + (16.0 - low) * draw)
    start = np.exp(math.log(1e-3) + (math.log(0.1) - math.log(1e-3)) * draw)
    return start + np.log(-np.expm1(-start))  # the inverse of softplus


def _placed(values: Array, like: Array) -> Array:
    """Return numbers of the host in the library, dtype and device of `like`."""
    values = values if backend(like).float64() else values.astype("float32")
    return namespace(like).astype(backend(like).from_numpy(values, device=device(like)), like.dtype)
