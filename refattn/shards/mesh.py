"""A mesh of devices, and how arrays are laid on it: `batch`, `heads` and `tokens` are the axes that can be shared out.

A mesh is written as text, ``heads=2,tokens=4``: 8 devices, of which 2 share the heads and 4 the tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from refattn.xp import Array

AXES = ("batch", "heads", "tokens")


def sizes_of(text: str) -> dict[str, int]:
    """Return the sizes that a text such as ``heads=2,tokens=4`` names, in its order.

    Raises
    ------
    ValueError
        Where a name is not one of `AXES` or comes twice, or a size is no whole number of at least 1.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES or name in found or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh: got {text!r}, needs sizes such as heads=2,tokens=4, of {', '.join(AXES)}")
        found[name] = int(size)
    return found


def use_devices(count: int) -> None:
    """See to so many devices in this process: a CPU alone is cut into virtual ones, as long as JAX has not begun.

    Raises
    ------
    ValueError
        Where there are fewer, and it is too late for virtual ones.
    """
    import jax

    try:  # what the environment or the process says goes first
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))
    except RuntimeError:  # its backends are there already
        pass
    if len(jax.devices()) < count:
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        raise ValueError(f"devices: got {len(jax.devices())} of JAX, needs {count}; on a CPU: {flag}, before it starts")


def make(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Any:
    """Return a mesh of these sizes by axis, over the first devices, or all, of several processes too."""
    import jax
    import numpy as np

    chosen = (jax.devices() if devices is None else list(devices))[: math.prod(sizes.values())]
    return jax.sharding.Mesh(np.array(chosen).reshape(tuple(sizes.values())), tuple(sizes))


def axes_of(name: str, x: Array, tokenless: Sequence[str] = ()) -> tuple[str | None, ...]:
    """Return the axis of the mesh that each axis of an argument of a core lies along, by its name and its axes.

    Arrays are (batch, tokens), (batch, heads, ...) for `tokenless` ones and (batch, heads, tokens, ...) otherwise; what
    has one axis or none, and every axis of size 1, is on all devices.
    """
    if len(x.shape) < 2:
        return (None,) * len(x.shape)
    known: tuple[str, ...] = ("batch", "tokens") if len(x.shape) == 2 else AXES
    known = known[:2] if name in tokenless else known
    padded = (*known, *(None,) * len(x.shape))[: len(x.shape)]
    return tuple(None if size == 1 else axis for axis, size in zip(padded, x.shape, strict=True))


def sharding(mesh: Any, axes: Sequence[str | None]) -> Any:
    """Return a `NamedSharding` of an array whose axes lie along these; axes that the mesh lacks are whole."""
    import jax

    return jax.sharding.NamedSharding(mesh, spec(mesh, *axes))


def spec(mesh: Any, *axes: str | None) -> Any:
    """Return a `PartitionSpec`; axes that the mesh lacks are whole."""
    import jax

    return jax.sharding.PartitionSpec(*(axis if axis in mesh.shape else None for axis in axes))


def place(mesh: Any, name: str, x: Array, tokenless: Sequence[str] = ()) -> Array:
    """Return an argument of a core on the devices of a mesh.

    Raises
    ------
    ValueError
        Where an axis is no multiple of the number of devices that are to share it.
    """
    import jax

    axes = axes_of(name, x, tokenless)
    for axis, size in zip(axes, x.shape, strict=True):
        if size % mesh.shape.get(axis, 1):
            raise ValueError(
                f"{name}: got {size} {axis}, needs a multiple of the {mesh.shape[axis]} devices of the mesh"
            )
    return jax.device_put(x, sharding(mesh, axes))


def over(mesh: Any, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """Return a function that runs on every device of a mesh, on its shards: `jax.shard_map`, or as it was called."""
    import jax

    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=False)
