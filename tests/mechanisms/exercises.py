"""What the exercises of the mechanisms share: numbers, masks, and one step of a block, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from refattn import Context, mechanism, philox

Make = Callable[[Any], Any]
Run = tuple[Mapping[str, int], Callable[[], None]]


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=7, purpose=name)


def hidden(name: str, *shape: int) -> Any:
    return philox.uniform(shape, seed=7, purpose=name) < 0.8


def step(name: str, x: Any, context: Context, make: Make, **config: Any) -> None:
    """Run the block of a mechanism on tokens, forward and backward."""
    block = mechanism(name).block
    params = block.init(block.Config(**config), seed=7, like=x)
    state, saved = block.forward(params, block.start(params, x, context), context)
    d_state, _ = block.read_backward(params, state, make(draw("d_x", *x.shape)))
    block.backward(params, saved, d_state)
