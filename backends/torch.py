"""PyTorch: the CPU and CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.backends.base import Array, Backend


class TorchBackend(Backend):
    """PyTorch."""

    name = "torch"
    package = "torch"
    array_type = "Tensor"
    install = 'pip install "refattn[torch]"'

    def namespace(self) -> ModuleType:
        self.library()
        import array_api_compat.torch

        return array_api_compat.torch

    def devices(self) -> tuple[str, ...]:
        torch = self.library()
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return ("cpu", *(f"cuda:{i}" for i in range(gpus)))

    def from_numpy(self, x: NDArray[Any], device: Any = None) -> Array:
        torch = self.library()
        if str(device) == "cuda" and torch.cuda.is_available():
            device = f"cuda:{torch.cuda.current_device()}"
        self.check_device(device)
        # A copy in C order: torch has no negative strides and no tensors that cannot be written to.
        return torch.tensor(np.asarray(x, order="C"), device=device)

    def to_numpy(self, x: Array) -> NDArray[Any]:
        torch = self.library()
        x = x.detach().cpu().resolve_conj().resolve_neg()
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy()

    def precision_lost(self, x: Array) -> str | None:
        import torch  # torch.compile follows this, but not `library`

        if torch.compiler.is_compiling() or x.dtype == torch.float64:
            return None
        if torch.is_autocast_enabled(x.device.type):
            return "torch.autocast is on"
        set_to = _matmul_precision(torch)
        return None if set_to == "highest" else f"torch's products of float32 are set to {set_to!r}"

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        torch = self.library()
        if torch.compiler.is_compiling():
            yield
            return
        set_to = _matmul_precision(torch)
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            if set_to not in SETTINGS:  # it was set for each library of products by itself
                for products in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
                    stack.callback(setattr, products, "fp32_precision", products.fp32_precision)
                    products.fp32_precision = "ieee"
            elif set_to != "highest":
                torch.set_float32_matmul_precision("highest")
                stack.callback(torch.set_float32_matmul_precision, set_to)
            yield

    def concrete(self, value: Any) -> bool | None:
        import torch  # torch.compile follows this, but not `library`

        if isinstance(value, torch.Tensor) and torch.compiler.is_compiling():
            return None
        return bool(value)

    def erf(self, x: Array) -> Array:
        return self.library().erf(x)

    def sparse_product(self, indptr: Array, indices: Array, data: Array, x: Array) -> Array:
        torch = self.library()
        rows = torch.repeat_interleave(indptr[1:] - indptr[:-1])
        total = torch.zeros((len(indptr) - 1, x.shape[1]), dtype=x.dtype, device=x.device)
        return total.index_add(0, rows, data[:, None] * x[indices])

    def synchronize(self) -> None:
        torch = self.library()
        if torch.cuda.is_initialized():
            for i in range(torch.cuda.device_count()):
                torch.cuda.synchronize(i)

    def peak_memory(self) -> int | None:
        torch = self.library()
        if not torch.cuda.is_available():
            return None
        if not torch.cuda.is_initialized():
            return 0
        return sum(int(torch.cuda.max_memory_allocated(i)) for i in range(torch.cuda.device_count()))

    def reset_peak_memory(self) -> None:
        torch = self.library()
        if torch.cuda.is_initialized():
            for i in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(i)


backend = TorchBackend()


SETTINGS = ("highest", "high", "medium")


def _matmul_precision(torch: Any) -> str:
    """Return how products of float32 are computed: torch's word for all, or what each library of products is set to.

    Where they were set one by one torch raises when it is asked for one word.
    """
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        both = {name: getattr(torch.backends, name).matmul.fp32_precision for name in ("cuda", "mkldnn")}
        low = [f"{name} {set_to}" for name, set_to in both.items() if set_to not in ("none", "ieee")]
        return ", ".join(low) or "highest"
