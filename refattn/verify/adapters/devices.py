"""Arrays where a kernel wants them: its attributes ``framework`` and ``device`` ("cuda:0").

What is given is copied to the device once, and all that runs there is waited for before a call and after it: a kernel
may use streams of its own. What comes back of a library that nobody knows is taken by DLPack where it lies.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import backends
from refattn.golden.storage_types import has_gradient

FRAMEWORKS = ("torch", "jax", "cupy")

BFLOAT16 = ("torch", "jax")
"""Those that have the type; others are given float32 that stand for it, as NumPy's kernels are."""


def placed(x: NDArray[Any], framework: str, dtype: str, device: str | None) -> Any:
    """Return a copy as an array of a library, floating numbers in a type, on a device; None is the library's own."""
    if framework == "torch":
        import torch

        given = torch.tensor(x, dtype=getattr(torch, dtype)) if has_gradient(x) else torch.tensor(x)
        return given if device is None else given.to(device)
    if framework == "jax":
        import jax
        import jax.numpy as jnp

        given = jnp.asarray(x, dtype=dtype) if has_gradient(x) else jnp.asarray(x)
        if device is None:
            return given
        kind, _, number = device.partition(":")
        return jax.device_put(given, jax.devices(kind)[int(number or 0)])
    typed = x.astype("float32" if dtype == "bfloat16" else dtype) if has_gradient(x) else x
    return backends.usable("cupy").from_numpy(typed, device)


def on(framework: str | None, device: str | None) -> AbstractContextManager[None]:
    """Call a kernel in the ``with`` block with its device as the current one, where its library has such a thing."""
    return backends.get("cupy").on(device) if framework == "cupy" and device is not None else nullcontext()


def checked(framework: str | None, device: Any) -> str | None:
    """Return the device that is asked for.

    Raises
    ------
    TypeError
        Where there is no library for it.
    """
    if device is None or (framework is None and not isinstance(device, str)):
        return None
    if framework not in FRAMEWORKS:
        raise TypeError(f"device: got {device!r}, needs framework beside it: {', '.join(FRAMEWORKS)}")
    return str(device)  # also of a torch.device


UNITS = {"tf32": ("amx_tf32",), "bf16x3": ("amx_bf16", "avx512_bf16", "bf16")}
"""What the flags of a processor say that multiplies in a type which programs do not ask for by name."""

ACCELERATORS = ("/dev/nvidia0", "/dev/kfd", "/dev/dri/renderD128", "/dev/accel0", "/dev/vfio/0")
"""Files of which a machine with an accelerator has one."""


def missing_types(device: Any) -> tuple[str, ...]:
    """Return which of `UNITS` a kernel cannot multiply in: it runs on the CPU, and this has none of them.

    A kernel that names no device runs on the CPU if the machine has nothing else.
    """
    elsewhere = any(Path(name).exists() for name in ACCELERATORS) or sys.platform == "darwin"
    if not str(device).startswith("cpu") if device is not None else elsewhere:
        return ()
    known = Path("/proc/cpuinfo")
    if not known.is_file():
        return ()
    flags = {*known.read_text(encoding="utf-8", errors="replace").split()}
    return tuple(name for name, units in UNITS.items() if not flags & {*units})


def wait() -> None:
    """Wait for all that runs on devices: in torch and cupy, where these were used; JAX's arrays wait by themselves."""
    for name in ("torch", "cupy"):
        if name in sys.modules:
            backends.get(name).synchronize()


def from_dlpack(x: Any) -> NDArray[Any]:
    """Return what an array of any library holds, wherever it lies."""
    kind = int(x.__dlpack_device__()[0]) if hasattr(x, "__dlpack_device__") else 1
    if kind == 1:  # the CPU
        return np.from_dlpack(x)
    for name in ("torch", "cupy"):  # whoever is there reads it in place
        if name in sys.modules:
            return backends.get(name).to_numpy(sys.modules[name].from_dlpack(x))
    raise TypeError(f"an array on a device (DLPack's number {kind}), needs torch or cupy to read it")
