"""JAX: whatever XLA runs on. It computes in float32 until it is told to allow float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.backends.base import Array, Backend, widened


class JaxBackend(Backend):
    """JAX. It counts no peak that can be started again, so `peak_memory` is None."""

    name = "jax"
    package = "jax"
    array_type = "Array"
    install = 'pip install "refattn[jax]"'

    def namespace(self) -> ModuleType:
        self.library()
        import jax.numpy

        return jax.numpy

    def devices(self) -> tuple[str, ...]:
        return tuple(self._devices())

    def float64(self) -> bool:
        return bool(self.library().config.jax_enable_x64)

    def enable_float64(self) -> None:
        self.library().config.update("jax_enable_x64", True)

    @contextlib.contextmanager
    def with_float64(self) -> Iterator[None]:
        before = self.float64()
        self.enable_float64()
        try:
            yield
        finally:
            self.library().config.update("jax_enable_x64", before)

    def precision_lost(self, x: Array) -> str | None:
        jax = self.library()
        if x.dtype == np.float64:
            return None
        set_to = jax.config.jax_default_matmul_precision
        if set_to in ("highest", "float32") or (set_to is None and jax.default_backend() == "cpu"):
            return None
        return f"JAX's products of float32 are set to {set_to!r} on {jax.default_backend()}"

    def full_precision(self) -> Any:
        return self.library().default_matmul_precision("highest")

    def from_numpy(self, x: NDArray[Any], device: Any = None) -> Array:
        if isinstance(device, str):
            self.check_device(device)
            device = self._devices()[device]
        if np.dtype(x.dtype) in (np.float64, np.complex128) and not self.float64():
            raise ValueError(f"x: got {x.dtype}, which JAX would cut to half; call enable_float64() first or cast it")
        return self.library().numpy.array(x, device=device)

    def to_numpy(self, x: Array) -> NDArray[Any]:
        return widened(np.asarray(x))

    def concrete(self, value: Any) -> bool | None:
        return None if isinstance(value, self.library().core.Tracer) else bool(value)

    def erf(self, x: Array) -> Array:
        import jax.scipy.special

        return jax.scipy.special.erf(x)

    def sparse_product(self, indptr: Array, indices: Array, data: Array, x: Array) -> Array:
        import jax

        count, edges = len(indptr) - 1, jax.numpy.arange(len(indices))
        rows = jax.numpy.searchsorted(indptr, edges, side="right") - 1
        return jax.ops.segment_sum(data[:, None] * x[indices], rows, num_segments=count, indices_are_sorted=True)

    def synchronize(self) -> None:
        jax = self.library()
        jax.effects_barrier()
        jax.block_until_ready(jax.live_arrays())

    def note(self) -> str:
        return "" if self.float64() else "float64 is off by default: JAX_ENABLE_X64=1, or enable_float64()"

    def _devices(self) -> dict[str, Any]:
        jax = self.library()
        devices = jax.local_devices()
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
            devices = [*devices, *jax.local_devices(backend="cpu")]
        return {f"{device.platform}:{device.id}": device for device in devices}


backend = JaxBackend()
