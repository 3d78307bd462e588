"""Time softmax attention on a GPU: refattn on CuPy beside PyTorch's scaled_dot_product_attention, float32 and linear
memory. Prints a Markdown table; each number is the median of several runs, the device synchronised around each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import refattn as ra
from refattn import backends

SIZES = ((8, 1024, 64), (8, 4096, 64), (8, 16384, 64))


def median_ms(work: Callable[[], Any], wait: Callable[[], None], runs: int = 7) -> float:
    """Return the median time of `work` in milliseconds, after two runs to warm up."""
    times = []
    for n in range(runs + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if n >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def cupy_times(arrays: list[Any]) -> tuple[float, float]:
    """Return the times of forward, and of forward and backward."""
    backend = backends.get("cupy")
    q, k, v, d_out = (backend.from_numpy(x) for x in arrays)

    def both() -> None:
        _, saved = ra.softmax.forward(q, k, v, implementation="tiled")
        ra.softmax.backward(saved, d_out)

    forward = median_ms(lambda: ra.softmax.forward(q, k, v, implementation="tiled"), backend.synchronize)
    return forward, median_ms(both, backend.synchronize)


def torch_times(arrays: list[Any]) -> tuple[float, float]:
    """Return the same for PyTorch."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v, d_out = (torch.tensor(x, device="cuda", requires_grad=True) for x in arrays)

    def both() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), d_out)

    with torch.no_grad():
        forward = median_ms(lambda: attend(q, k, v), torch.cuda.synchronize)
    return forward, median_ms(both, torch.cuda.synchronize)


def main() -> None:
    """Print the table."""
    draw = np.random.default_rng(0)
    print("| heads, n, d | refattn forward, both (ms) | PyTorch forward, both (ms) |")
    print("| --- | --- | --- |")
    for heads, n, d in SIZES:
        arrays = [draw.standard_normal((1, heads, n, d), dtype=np.float32) for _ in range(4)]
        ours = cupy_times(arrays)
        try:
            theirs = "{:.2f}, {:.2f}".format(*torch_times(arrays))
        except ImportError:
            theirs = "not installed"
        print(f"| {heads}, {n}, {d} | {ours[0]:.2f}, {ours[1]:.2f} | {theirs} |")


if __name__ == "__main__":
    main()
