"""The parameters of a block, and how they start.

Weights are uniform with variance 1 / inputs, tables with the standard deviation `SPREAD`, or both with the `spread` of
the configuration; B starts as the identity, gains as 1. Which parameters there are says `options`: none that cannot
have a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from refattn import tree
from refattn.mechanisms.sympformer.choices import DOUBLED
from refattn.mechanisms.sympformer.numbers import number, raw
from refattn.mechanisms.sympformer.options import Config
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, device, namespace

SPREAD = 0.02
"""Standard deviation of a fresh table: that of the embeddings of a model, and the authors'."""

Add = Callable[[str, Array], None]
"""Adds to the gradient of a parameter."""


@dataclass(frozen=True)
class Mlp:
    """Parameters of the MLP substep; weights are (in, out)."""

    gain: Array  # (m,)
    w_in: Array  # (m, in)
    w_out: Array  # (in, m)
    gain_v: Array | None = None  # (m,)


@dataclass(frozen=True)
class Params:
    """Parameters of a block: None for what it does not have. `numbers` holds the r of each learned number."""

    config: Config
    gain: Array  # (m,)
    w_q: Array | None = None  # (m, m), as all weights
    w_k: Array | None = None
    w_v: Array | None = None
    w_o: Array | None = None
    w_b: Array | None = None
    w_a: Array | None = None
    gain_p: Array | None = None  # (m,)
    w_start: Array | None = None
    token_embedding: Array | None = None  # (t, m): first momenta
    position_embedding: Array | None = None  # (context, m)
    numbers: dict[str, Array] = field(default_factory=dict)  # (1,) each
    mlp: Mlp | None = None


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return fresh parameters."""
    m, wide, xp = config.width, config.mlp_ratio * config.width, namespace(like)

    def weight(name: str, rows: int, columns: int, spread: float | None = None) -> Array:
        bound = math.sqrt(3.0) * (config.spread or spread or rows**-0.5)
        return fresh_weight(rows, columns, bound=bound, seed=seed, purpose=f"sympformer.{name}", layer=layer, like=like)

    def ones() -> Array:
        return xp.ones((m,), dtype=like.dtype, device=device(like))

    has = present(config)
    squares: dict[str, Array] = {n: weight(n, m, m) for n in ("w_q", "w_k", "w_v", "w_o", "w_a", "w_start") if n in has}
    if "w_b" in has:
        squares["w_b"] = xp.eye(m, dtype=like.dtype, device=device(like))
    tables = {name: weight(name, rows, m, SPREAD) for name, rows in _rows(config).items()}
    mlp = None
    if config.mlp != "none":
        gain_v = ones() if config.mlp in ("momentum", "velocity") else None
        mlp = Mlp(ones(), weight("w_in", m, wide), weight("w_out", wide, m), gain_v)
    numbers = {name: number(raw(*given[:2]), like) for name, given in config.numbers().items() if given[2]}
    gain_p = ones() if "gain_p" in has else None
    return Params(config, ones(), **squares, **tables, gain_p=gain_p, numbers=numbers, mlp=mlp)


def present(config: Config) -> set[str]:
    """Return the names of the weights that a block has, beside the gain of its first norm."""
    if config.attention == "linear":
        has = {name for name, there in (("w_a", config.drifts), ("w_v", config.kicks)) if there}
    else:
        has = {"w_q", "w_k"} | ({"w_v", "w_o"} if config.kicks and config.force == "prefix" else set())
        has |= {"w_b"} if config.drifts and config.mobility == "learned" and not config.baseline else set()
    each = config.normalise == "each_substep" and config.integrator in DOUBLED
    if each or (config.normalise == "end" and config.keeps) or config.integrator == "lie_trotter":
        has |= {"gain_p"}
    if config.layer == 0 and config.start == "linear":
        has |= {"w_start"}
    return has


def _rows(config: Config) -> dict[str, int]:
    """Return the number of rows of each table that a block has."""
    return {"token_embedding": config.vocabulary, "position_embedding": config.context} if config.tables else {}


def check_params(params: Params) -> None:
    """Raise where a parameter is missing, too many or of a wrong shape."""
    m, config = params.config.width, params.config
    has, wide = present(config), config.mlp_ratio * config.width
    needs: dict[str, tuple[int, ...]] = {"gain": (m,)} | {n: (m, m) for n in has if n.startswith("w_")}
    needs |= {name: (rows, m) for name, rows in _rows(config).items()}
    needs |= {"gain_p": (m,)} if "gain_p" in has else {}
    needs |= {f"numbers.{name}": (1,) for name, given in config.numbers().items() if given[2]}
    if config.mlp != "none":
        needs |= {"mlp.gain": (m,), "mlp.w_in": (m, wide), "mlp.w_out": (wide, m)}
        needs |= {"mlp.gain_v": (m,)} if config.mlp in ("momentum", "velocity") else {}
    shapes = {name: tuple(x.shape) for name, x in tree.flatten(params).items()}
    for name in {**needs, **shapes}:
        if shapes.get(name) != needs.get(name):
            raise ValueError(f"params.{name}: got shape {shapes.get(name)}, its configuration needs {needs.get(name)}")
