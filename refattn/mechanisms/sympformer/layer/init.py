"""How the parameters of a block start.

Weights are uniform with variance 1 / inputs, tables with the standard deviation `SPREAD`, or both with the `spread` of
the configuration; B starts as the identity, gains as 1, biases as 0. Which parameters there are
says the configuration: none that cannot have a gradient.
"""

from __future__ import annotations

import math

from refattn.mechanisms.sympformer.layer.config import Config, one_element
from refattn.mechanisms.sympformer.params import Mlp, Params
from refattn.ops.weights import fresh_weight
from refattn.xp import Array, device, namespace

SPREAD = 0.02
"""Standard deviation of a fresh table: that of the embeddings of a model, and the authors'."""


def init(config: Config, *, seed: int, like: Array, layer: int) -> Params:
    """Return fresh parameters."""
    xp = namespace(like)

    def fresh(name: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            start = xp.ones if "gain" in name else xp.zeros
            return start(shape, dtype=like.dtype, device=device(like))
        if name == "w_b":
            return xp.eye(shape[0], dtype=like.dtype, device=device(like))
        spread = config.spread or (SPREAD if name.endswith("embedding") else shape[0] ** -0.5)
        purpose = f"sympformer.{name.removeprefix('mlp.')}"
        return fresh_weight(*shape, bound=math.sqrt(3.0) * spread, seed=seed, purpose=purpose, layer=layer, like=like)

    shapes = config.shapes()
    arrays = {name: fresh(name, shape) for name, shape in shapes.items() if not name.startswith("numbers.")}
    of_mlp = {name.removeprefix("mlp."): arrays.pop(name) for name in shapes if name.startswith("mlp.")}
    numbers = {name: one_element(number.raw(), like) for name, number in config.numbers().items() if number.learned}
    return Params(config, **arrays, numbers=numbers, mlp=Mlp(**of_mlp) if of_mlp else None)
