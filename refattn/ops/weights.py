"""Fresh weights: uniform numbers of the counter, in the library, dtype and device of another array."""

from __future__ import annotations

from typing import Any

from refattn import philox
from refattn.xp import Array, backend, device, namespace


def fresh_weight(rows: int, columns: int, *, bound: float, seed: int, purpose: str, layer: int, like: Array) -> Array:
    """Return (rows, columns) numbers, uniform from -bound to bound and so of variance bound^2 / 3."""
    draw = philox.uniform((rows, columns), seed=seed, purpose=purpose, layer=layer)
    return _placed((2.0 * draw - 1.0) * bound, like)


def fresh_normal(shape: tuple[int, ...], purpose: str, layer: int, like: Array) -> Array:
    """Return nearly normal numbers of variance 1, the same for every seed."""
    return _placed(philox.normal(shape, seed=0, purpose=purpose, layer=layer), like)


def _placed(values: Any, like: Array) -> Array:
    values = values if backend(like).float64() else values.astype("float32")
    return namespace(like).astype(backend(like).from_numpy(values, device=device(like)), like.dtype)
