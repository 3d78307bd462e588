"""What a compiled function holds on each device, as XLA counts it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_SHAPE = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[(\d+(?:,\d+)*)\]")


@dataclass(frozen=True)
class Held:
    """What a device holds while a compiled function runs.

    Attributes
    ----------
    bytes
        Arguments, results, and what is held on the way.
    pairs
        How many different shapes on the way have two axes of the full length.
    """

    bytes: int
    pairs: int


def held(compiled: Any, tokens: int) -> Held:
    """Return what a device holds while a compiled function, `jax.jit(f).lower(...).compile()`, runs.

    `tokens` is the length of the sequence: an axis of at least as many numbers is one of full length.
    """
    counted = compiled.memory_analysis()
    total = counted.argument_size_in_bytes + counted.output_size_in_bytes + counted.temp_size_in_bytes
    shapes = {tuple(map(int, sizes.split(","))) for _, sizes in _SHAPE.findall(compiled.as_text())}
    return Held(total, sum(sum(size >= tokens for size in shape) >= 2 for shape in shapes))
