"""Time refattn on a GPU: softmax attention, on CuPy and on PyTorch's CUDA tensors, beside PyTorch's kernels; all cores.

    python tools/gpu_timings.py [--short]

Prints Markdown tables. Each number is the median of several runs after two to warm up, in milliseconds; the device is
waited for around each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

import refattn as ra
from refattn import backends

SHORT = "--short" in sys.argv
RUNS, SECONDS = (2, 1.0) if SHORT else (7, 3.0)
HEADS, WIDTH = (2, 8) if SHORT else (8, 64)
TOKENS = (32, 64) if SHORT else (1024, 4096, 16384)
CORES = {
    "softmax": 4096,
    "higher_order": 4096,
    "sympformer": 4096,
    "growing": 4096,
    "delta": 4096,
    "graph_energy": 1024,
    "koopman": 512,
}
"""Tokens of each core."""

KERNELS = ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")


def median(work: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Return the median time of `work` in milliseconds; fewer runs where one takes long."""
    times: list[float] = []
    begun = time.perf_counter()
    for _ in range(RUNS + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
        if time.perf_counter() - begun > SECONDS and len(times) > 2:
            break
    return statistics.median(times[2:])


def both(times: Callable[[], tuple[float, float]]) -> str:
    """Return two times as cells of a table, or why there are none."""
    try:
        return "{:.2f} | {:.2f}".format(*times())
    except Exception as error:  # not installed, without CUDA, or a kernel that is not there
        words = " ".join(str(error).split()).replace("|", "/")
        return f"{type(error).__name__}: {words[:60]} | "


def core(name: str, library: str, arrays: list[Any], **options: Any) -> tuple[float, float]:
    """Return the times of the forward, and of forward and backward, of a core."""
    backend, module = backends.get(library), getattr(ra, name)
    device = "cuda:0" if library == "torch" else None
    q, k, v, d_out = (backend.from_numpy(x, device) for x in arrays)

    def run() -> None:
        _, saved = module.forward(q, k, v, **options)
        module.backward(saved, d_out)

    forward = median(lambda: module.forward(q, k, v, **options), backend.synchronize)
    return forward, median(run, backend.synchronize)


def kernel(call: Callable[..., Any], arrays: list[Any], dtype: str, context: Any = nullcontext) -> tuple[float, float]:
    """Return the same for a function of PyTorch."""
    import torch

    q, k, v, d_out = (torch.tensor(x, device="cuda", dtype=getattr(torch, dtype)).requires_grad_() for x in arrays)

    def run() -> None:
        with context():
            out = call(q, k, v)
        torch.autograd.grad(out, (q, k, v), d_out)

    def forward() -> None:
        with context(), torch.no_grad():
            call(q, k, v)

    return median(forward, torch.cuda.synchronize), median(run, torch.cuda.synchronize)


def kernels(arrays: list[Any]) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Yield PyTorch's kernels with what times them."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import flex_attention

    attend = torch.nn.functional.scaled_dot_product_attention
    for name in KERNELS:
        held = partial(sdpa_kernel, getattr(SDPBackend, name))
        for dtype in ("float32", "bfloat16"):
            yield f"SDPA {name.partition('_')[0].lower()}, {dtype}", partial(kernel, attend, arrays, dtype, held)
    yield "FlexAttention, compiled, float32", partial(kernel, torch.compile(flex_attention), arrays, "float32")


def has_cuda() -> bool:
    """Tell whether PyTorch is installed with CUDA."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def main() -> None:
    """Print the tables."""
    draw = np.random.default_rng(0)

    def drawn(n: int, dtype: Any = np.float32) -> list[Any]:
        return [(draw.standard_normal((1, HEADS, n, WIDTH)) / 4).astype(dtype) for _ in range(4)]

    backend = backends.get("cupy")
    print(f"### Softmax attention: {HEADS} heads of width {WIDTH}\n\n| tokens | what | forward, ms | both, ms |")
    print("| --- | --- | --- | --- |")
    for n in TOKENS:
        arrays, rows = drawn(n), [("refattn on CuPy, float32", partial(core, "softmax", "cupy", drawn(n)))]
        if has_cuda():
            rows += [("refattn on PyTorch's CUDA tensors, float32", partial(core, "softmax", "torch", arrays))]
            rows += kernels(arrays)
        if not SHORT:
            rows += [("refattn on CuPy, float64", partial(core, "softmax", "cupy", drawn(n, np.float64)))]
        for label, times in rows:
            print(f"| {n} | {label} | {both(times)} |", flush=True)
    print(f"\n### Every core on CuPy: {HEADS} heads of width {WIDTH}, float32\n")
    print("| core | tokens | forward, ms | both, ms | peak, MiB |\n| --- | --- | --- | --- | --- |")
    for name, tokens in CORES.items():
        n, options = (32 if SHORT else tokens), ({"causal": True} if name == "higher_order" else {})
        backend.reset_peak_memory()
        cells, peak = both(partial(core, name, "cupy", drawn(n), **options)), backend.peak_memory() or 0
        print(f"| `{name}`{' causal' * bool(options)} | {n} | {cells} | {peak >> 20} |", flush=True)


if __name__ == "__main__":
    main()
