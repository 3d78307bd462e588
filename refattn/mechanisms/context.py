"""What changes from call to call of a block."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from refattn.args import Whole, check_all, refused
from refattn.ops.masks import Causal
from refattn.xp import Array, dtype_name, is_array


@dataclass(frozen=True)
class Context:
    """What a block is told beside its parameters and its state.

    A mechanism's record lists the fields that it reads; any other field that is given raises, `training` and `layer`
    excepted.

    Attributes
    ----------
    mask
        Boolean, broadcastable to (batch, heads, queries, keys); True = may attend.
    key_mask
        Boolean (batch, tokens); False = padding, which no query may attend.
    causal
        False, True or "bottom_right", "top_left".
    memory
        (batch, keys, width): what is attended in place of the block's own tokens.
    memory_mask
        Boolean (batch, keys); False = padding of the memory.
    graph
        A given graph on the tokens.
    positions
        Integer (batch, tokens) or (tokens,).
    tokens
        Integer (batch, tokens): the numbers of the tokens in their vocabulary.
    draws
        Random numbers by name, as arrays.
    training
        Whether the call belongs to training.
    layer
        Index of the block in its stack.

    Examples
    --------
    >>> import numpy as np, refattn as ra
    >>> block = ra.mechanism("softmax").block
    >>> params = block.init(block.Config(width=4, heads=2), like=np.ones(1))
    >>> context = ra.Context(causal=True, key_mask=np.asarray([[True, True, False]]))  # the last token is padding
    >>> state, saved = block.forward(params, block.start(params, np.ones((1, 3, 4)), context), context)
    >>> block.read(params, state).shape
    (1, 3, 4)
    """

    mask: Array | None = None
    key_mask: Array | None = None
    causal: Causal = False
    memory: Array | None = None
    memory_mask: Array | None = None
    graph: Any = None
    positions: Array | None = None
    tokens: Array | None = None
    draws: dict[str, Array] | None = None
    training: bool = False
    layer: int = 0

    def __post_init__(self) -> None:
        for name in ("mask", "key_mask", "memory", "memory_mask", "positions", "tokens"):
            if (x := getattr(self, name)) is not None and not is_array(x):
                raise refused(f"context.{name}", x, "an array of NumPy, CuPy, PyTorch, JAX, ...")
            if x is not None and dtype_name(x).startswith(("str", "<U", "object", "complex")):
                raise TypeError(f"context.{name}: got dtype {dtype_name(x)}, needs numbers, or a mask")
        if self.draws is not None and not isinstance(self.draws, dict):
            raise refused("draws", self.draws, "a dict of arrays by name")
        check_all(self, training=bool, layer=Whole())

    def check_reads(self, title: str, reads: tuple[str, ...]) -> None:
        """Raise ValueError where a field is given that the mechanism does not read."""
        for field in fields(self):
            given = getattr(self, field.name)
            if field.name in (*reads, "training", "layer") or given is None or given is False:
                continue
            raise ValueError(f"context.{field.name} was given, but {title} reads only: {', '.join(reads)}")
