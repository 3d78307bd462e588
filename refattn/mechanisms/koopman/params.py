"""The configuration of a block, its parameters, and how they start.

Letters: m width of the model, h heads, g key/value heads, d width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from refattn import tree
from refattn.mechanisms.arguments import check_is
from refattn.mechanisms.koopman.options import check_options
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, device, namespace


@dataclass(frozen=True)
class Config:
    """Static choices of a block.

    Attributes
    ----------
    width
        Width of the tokens.
    heads, kv_heads
        Query heads, and key/value heads (None: as many).
    head_width
        Width of a head (None: width / heads).
    bias, residual
        Whether the projections have biases, and whether x is added to the result.
    learn_kernel
        Whether the bandwidth and weight of the second kernel are parameters.
    updates, kernel, degree, constant, fit, space, augment, ridge_scale, tau, perturbation, similarity, window, jitter
        As in the core.
    """

    width: int
    heads: int
    kv_heads: int | None = None
    head_width: int | None = None
    bias: bool = False
    residual: bool = True
    learn_kernel: bool = True
    updates: int = 2
    kernel: str = "linear+rbf"
    degree: int = 2
    constant: float = 1.0
    fit: str = "separable"
    space: str = "keys"
    augment: bool = False
    ridge_scale: str = "sum"
    tau: float = 0.0
    perturbation: str = "identity"
    similarity: str = "dot"
    window: int | None = None
    jitter: float | None = 1e-2

    def __post_init__(self) -> None:
        for name in ("width", "heads", "kv_heads", "head_width"):
            value = getattr(self, name)
            if value is None and name not in ("width", "heads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}, needs a whole number of at least 1")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: got {self.kv_heads}, needs a divisor of the {self.heads} heads")
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"heads: got {self.heads}, needs a divisor of the width {self.width}, or a head_width")
        for name in ("bias", "residual", "learn_kernel"):
            check_is(name, getattr(self, name), bool)
        check_options(**self.choices, certify=False)

    @property
    def choices(self) -> dict[str, Any]:
        """The options of the core."""
        return {name: getattr(self, name) for name in _CHOICES}

    @property
    def learns(self) -> bool:
        """Whether there is a second kernel whose numbers are parameters."""
        return self.learn_kernel and self.kernel != "linear" and self.updates > 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, width of a head."""
        return self.heads, self.kv_heads or self.heads, self.head_width or self.width // self.heads


_CHOICES = (
    *("updates", "kernel", "degree", "constant", "fit", "space", "augment", "ridge_scale", "tau"),
    *("perturbation", "similarity", "window", "jitter"),
)


@dataclass(frozen=True)
class Params:
    """Weights (in, out) and biases; what the configuration has not is None."""

    config: Config
    w_q: Array  # (m, h*d)
    w_k: Array  # (m, g*d)
    w_v: Array  # (m, g*d)
    w_o: Array  # (h*d, m)
    b_q: Array | None = None
    b_k: Array | None = None
    b_v: Array | None = None
    b_o: Array | None = None
    log_bandwidth: Array | None = None  # (1,)
    log_weight: Array | None = None  # (1,)


def init(config: Config, *, seed: int = 0, like: Array, layer: int) -> Params:
    """Return weights uniform in +-sqrt(3 / inputs), of variance 1 / inputs, biases of 0, and the core's kernel."""
    h, g, d = config.sizes
    m = config.width
    xp = namespace(like)

    def weight(name: str, rows: int, columns: int) -> Array:
        bound = math.sqrt(3.0 / rows)
        return fresh_weight(rows, columns, bound=bound, seed=seed, purpose=f"koopman.{name}", layer=layer, like=like)

    def bias(size: int) -> Array | None:
        return xp.zeros((size,), dtype=like.dtype, device=device(like)) if config.bias else None

    def number(value: float) -> Array | None:
        return xp.full((1,), value, dtype=like.dtype, device=device(like)) if config.learns else None

    weights = (weight("w_q", m, h * d), weight("w_k", m, g * d), weight("w_v", m, g * d), weight("w_o", h * d, m))
    biases = (bias(h * d), bias(g * d), bias(g * d), bias(m))
    return Params(config, *weights, *biases, number(0.5 * math.log(d)), number(0.0))


def check_params(params: Params) -> None:
    """Raise where a shape is not that of the configuration."""
    (h, g, d), m = params.config.sizes, params.config.width
    needs: dict[str, tuple[int, ...]] = {"w_q": (m, h * d), "w_k": (m, g * d), "w_v": (m, g * d), "w_o": (h * d, m)}
    if params.config.bias:
        needs |= {f"b_{name[-1]}": shape[1:] for name, shape in needs.items()}
    if params.config.learns:
        needs |= {"log_bandwidth": (1,), "log_weight": (1,)}
    shapes = {name: tuple(x.shape) for name, x in tree.flatten(params).items()}
    for name in {**needs, **shapes}:
        if shapes.get(name) != needs.get(name):
            raise ValueError(f"params.{name}: got shape {shapes.get(name)}, its configuration needs {needs.get(name)}")
