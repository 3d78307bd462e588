"""The configuration of a model, its parameters, and how they start."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from refattn import tree
from refattn.args import Axes, Maybe, One, Whole, check, check_all, check_arrays, check_floating
from refattn.mechanisms import registry
from refattn.mechanisms.record import Mechanism
from refattn.ops import mlp
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, any_outside, device, namespace

OWN = ("width", "heads", "residual", "layer", "layers", "vocabulary", "context")
"""Fields of a block's configuration that the model fills in, where the block has them."""

DECODE = ("vocabulary", "pointer")

NEEDS: dict[str, Any] = {
    **dict.fromkeys(("vocabulary", "context", "width", "heads", "layers", "loops", "mlp_ratio"), Whole(1, 2**24)),
    "mlp": Maybe(bool),
    "gelu": One(tuple(mlp.GELU)),
    "decode": One(DECODE),
    "options": Mapping,
}

SPREAD = 0.02
"""Standard deviation of fresh embeddings: small beside what the sublayers add, and as a head nearly uniform."""


@dataclass(frozen=True)
class Config:
    """Static choices of a model.

    Attributes
    ----------
    mechanism
        Name of the mechanism of the blocks; of one from another package its record.
    vocabulary
        Number of different tokens: 256 for bytes.
    context
        The most tokens of a sequence.
    width, heads, layers
        Width of the tokens, heads of a block, number of layers.
    loops
        How often all layers are passed, one after the other: what has as many places as passes, `depth`, has the
        parameters of `layers`.
    mlp
        Whether each block is followed by an MLP; None: unless the block brings or replaces it.
    mlp_ratio, gelu
        Width of the MLP in widths of the model; "tanh" or "exact".
    decode
        What the next token is chosen by: "vocabulary", its products with all embeddings, or "pointer", where a last
        layer points at the tokens so far, for a mechanism whose record has a `pointer`.
    options
        Further fields of the block's configuration.

    Examples
    --------
    >>> from refattn import model
    >>> config = model.Config("higher_order", width=8, heads=2, options={"order": 1})
    >>> config.block(layer=0).order
    1
    """

    mechanism: str | Mechanism
    vocabulary: int = 256
    context: int = 256
    width: int = 128
    heads: int = 4
    layers: int = 4
    loops: int = 1
    mlp: bool | None = None
    mlp_ratio: int = 4
    gelu: str = "tanh"
    decode: str = "vocabulary"
    options: Mapping[str, Any] = field(default_factory=dict)
    STATIC: ClassVar[bool] = True  # of `refattn.tree`

    def __post_init__(self) -> None:
        name = self.record.name
        check_all(self, **NEEDS)
        if self.decode == "pointer" and self.record.pointer is None:
            raise ValueError(f"decode: got 'pointer' with {name}, needs one of {registry.able('pointer')}")
        if "causal" not in self.record.context_fields:
            raise ValueError(f"mechanism: got {name!r}, which cannot be causal, needs one that can")
        known = [f.name for f in dataclasses.fields(self.record.block.Config) if f.name not in OWN]
        if unknown := [option for option in self.options if option not in known]:
            raise ValueError(f"options: got {', '.join(map(repr, unknown))}, {name} has {', '.join(known)}")
        for place in range(self.depth):
            self.block(place)  # which checks the rest

    @property
    def record(self) -> Mechanism:
        """The record of the mechanism."""
        if isinstance(self.mechanism, Mechanism):
            return self.mechanism
        check("mechanism", self.mechanism, str)
        return registry.listed(self.mechanism)

    @property
    def depth(self) -> int:
        """How many times a token passes through a layer."""
        return self.layers * self.loops

    @property
    def has_mlp(self) -> bool:
        """Whether layers have an MLP sublayer."""
        return "mlp" not in self.record.provides if self.mlp is None else self.mlp

    @property
    def has_norm(self) -> bool:
        """Whether layers normalise what their block receives, and add what it gives."""
        return "norm" not in self.record.provides

    def block(self, layer: int) -> Any:
        """Return the configuration of the block at a place, of 0 to `depth` - 1."""
        kind = self.record.block.Config
        own = {name: getattr(self, name) for name in ("width", "heads", "vocabulary", "context")}
        own |= {"layer": layer, "layers": self.depth}
        if self.has_norm:
            own["residual"] = False
        known = {f.name for f in dataclasses.fields(kind)}
        try:
            return kind(**{name: value for name, value in own.items() if name in known}, **self.options)
        except (TypeError, ValueError) as error:
            error.of_block = str(error).partition(":")[0] not in OWN  # type: ignore[union-attr]
            raise


@dataclass(frozen=True)
class Norm:
    """Gain and bias of a layer normalisation."""

    gain: Array  # (m,)
    bias: Array  # (m,)


@dataclass(frozen=True)
class Layer:
    """Parameters of a layer; None for what it does not have."""

    norm_1: Norm | None
    block: Any
    norm_2: Norm | None
    mlp: mlp.Params | None


@dataclass(frozen=True)
class Params:
    """Parameters of a model, named ``layers.0.block.w_q`` and so on by `refattn.tree`.

    >>> import numpy as np
    >>> from refattn import model, tree
    >>> config = model.Config("softmax", vocabulary=5, context=8, width=4, heads=2, layers=1)
    >>> list(tree.flatten(model.init(config, like=np.ones(1))))[:4]
    ['token_embedding', 'position_embedding', 'layers.0.norm_1.gain', 'layers.0.norm_1.bias']
    """

    config: Config
    token_embedding: Array  # (t, m)
    position_embedding: Array  # (context, m)
    layers: tuple[Layer, ...]
    norm: Norm
    pointer: Any = None  # of the mechanism's pointer, where the model has one

    @property
    def passes(self) -> tuple[Layer, ...]:
        """The layers in the order in which tokens pass through them, each as it stands at its place."""
        return tuple(self.at(place) for place in range(self.config.depth))

    def at(self, place: int) -> Layer:
        """Return the layer at a place, of 0 to `Config.depth` - 1, with the configuration of a block of that place.

        A block whose parameters depend on its place has there those of its configuration's ``shapes``.
        """
        layer = self.layers[place % len(self.layers)]
        own = layer.block.config
        told = {n: x for n, x in (("layer", place), ("layers", self.config.depth)) if hasattr(own, n)}
        if self.config.loops == 1 and all(getattr(own, name) == value for name, value in told.items()) or not told:
            return layer
        config = dataclasses.replace(own, **told)
        kept = tree.only(layer.block, config.shapes()) if hasattr(config, "shapes") else layer.block
        return dataclasses.replace(layer, block=dataclasses.replace(kept, config=config))


def init(config: Config, *, seed: int = 0, like: Array) -> Params:
    """Return fresh parameters: a pure function of the configuration and the seed.

    `like` gives the array library, the dtype and the device. Blocks start as their mechanism has it, with all
    parameters that they have at one of their places. The weights of an MLP have variance 1 / inputs, its last ones 1 /
    (inputs * 2 * depth), so that what all MLPs add keeps its size whatever the depth; embeddings have the
    standard deviation `SPREAD`, gains are 1 and biases 0.

    >>> import numpy as np
    >>> from refattn import model, tree
    >>> config = model.Config("softmax", vocabulary=5, context=8, width=4, heads=2, layers=1)
    >>> params = model.init(config, seed=1, like=np.ones(1, dtype=np.float32))
    >>> sum(x.size for x in tree.flatten(params).values()), params.token_embedding.dtype.name
    (288, 'float32')
    """
    check("config", config, Config)
    check_arrays(like=like)
    check_floating(like=like)
    xp, m, wide = namespace(like), config.width, config.mlp_ratio * config.width

    def drawn(name: str, rows: int, columns: int, spread: float, layer: int = 0) -> Array:
        bound, purpose = math.sqrt(3.0) * spread, f"model.{name}"
        return fresh_weight(rows, columns, bound=bound, seed=seed, purpose=purpose, layer=layer, like=like)

    def full(size: int, value: float) -> Array:
        return xp.full((size,), value, dtype=like.dtype, device=device(like))

    def norm() -> Norm:
        return Norm(full(m, 1.0), full(m, 0.0))

    def feed_forward(layer: int) -> mlp.Params:
        w_in = drawn("w_in", m, wide, m**-0.5, layer)
        w_out = drawn("w_out", wide, m, (2 * config.depth * wide) ** -0.5, layer)
        return mlp.Params(w_in, full(wide, 0.0), w_out, full(m, 0.0))

    def block(layer: int) -> Any:
        places = range(layer, config.depth, config.layers)
        at = [config.record.block.init(config.block(n), seed=seed, like=like, layer=layer) for n in places]
        return functools.reduce(lambda a, b: tree.union(a, b, lambda x, _: x), at)

    layers = tuple(
        Layer(
            norm() if config.has_norm else None,
            block(layer),
            norm() if config.has_mlp else None,
            feed_forward(layer) if config.has_mlp else None,
        )
        for layer in range(config.layers)
    )
    tokens = drawn("token_embedding", config.vocabulary, m, SPREAD)
    pointer = None
    if config.decode == "pointer":
        own = config.block(config.depth - 1)  # as the last layer's
        pointer = config.record.pointer.init(own, seed=seed, like=like, layer=config.depth)
    return Params(config, tokens, drawn("position_embedding", config.context, m, SPREAD), layers, norm(), pointer)


def check_tokens(params: Params, tokens: Array, name: str = "tokens") -> None:
    """Raise where tokens are none that the model can read."""
    check("params", params, Params)
    check_arrays(params=params.token_embedding, **{name: tokens})
    check(name, tokens, Axes("*", "whole"))
    config, width = params.config, params.config.width
    for table_name, rows in (("token_embedding", config.vocabulary), ("position_embedding", config.context)):
        table = getattr(params, table_name)
        check_floating(**{f"params.{table_name}": table})
        if tuple(table.shape) != (rows, width):
            raise ValueError(f"params.{table_name}: got shape {tuple(table.shape)}, needs {(rows, width)}")
    vocabulary, context = config.vocabulary, config.context
    if len(tokens.shape) != 2 or not 1 <= tokens.shape[1] <= context:
        raise ValueError(f"{name}: got shape {tuple(tokens.shape)}, needs (batch, 1 to {context})")
    if any_outside(tokens, vocabulary):
        raise ValueError(f"{name}: got one outside of 0 to {vocabulary - 1}")
