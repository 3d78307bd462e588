"""The flow of graph energy attention beside PyTorch: its matrix products, and every pair at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from asv_benchmarks.comparison import Comparison, Side
from refattn import philox

CHANNELS, STEP = 16, 1.0 / 3.0

MEMORY = 16 * 2**30
"""What a side may need: autograd keeps two arrays of every difference for each of two stages of every step."""


def arrays(n: int, dtype: str) -> list[Any]:
    """Return q, k, v and the upstream gradient, (1, 1, n, 16) each."""
    shape = (1, 1, n, CHANNELS)
    names = ("q", "k", "v", "d_out")
    return [philox.normal(shape, seed=0, purpose=f"graph_energy.{name}").astype(dtype) for name in names]


def ours(n: int, steps: int, dtype: str) -> Callable[[], Any]:
    """refattn on NumPy, in the form that it chooses itself: matrix products."""
    import refattn as ra

    q, k, v, d_out = arrays(n, dtype)
    options: dict[str, Any] = {"state": "feature", "coupling": "sin", "integrator": "heun", "steps": steps}

    def both() -> Any:
        out, saved = ra.graph_energy.forward(q, k, v, step=STEP, **options)
        gradients = ra.graph_energy.backward(saved, d_out)
        return out, tuple(gradients[name] for name in ("q", "k", "v"))

    return both


def products(n: int, steps: int, dtype: str) -> Callable[[], Any]:
    """sin(x_j - x_i) as products with the graph, in PyTorch's operations, and autograd."""

    def pull(graph: Any, x: Any) -> Any:
        return x.cos() * (graph @ x.sin()) - x.sin() * (graph @ x.cos())

    return in_torch(pull, n, steps, dtype)


def pairwise(n: int, steps: int, dtype: str) -> Callable[[], Any]:
    """Every difference of two scores, as the equation is written, and autograd."""
    if (needed := 4 * steps * n * n * CHANNELS * (8 if dtype == "float64" else 4)) > MEMORY:
        raise NotImplementedError(f"it would keep {needed / 2**30:.0f} GiB for its backward")

    def pull(graph: Any, x: Any) -> Any:
        return (graph[..., None] * (x[:, :, None, :, :] - x[:, :, :, None, :]).sin()).sum(3)

    return in_torch(pull, n, steps, dtype)


def in_torch(pull: Callable[[Any, Any], Any], n: int, steps: int, dtype: str) -> Callable[[], Any]:
    """Return the whole call in PyTorch, forward and backward, with a function that sums over the edges."""
    import torch

    q, k, v, d_out = (torch.from_numpy(x) for x in arrays(n, dtype))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    own = torch.eye(n, dtype=torch.bool)

    def both() -> Any:
        q, k, v = inputs
        scores = q @ k.transpose(-2, -1) / math.sqrt(CHANNELS)
        graph = torch.softmax(0.5 * (scores + scores.transpose(-2, -1)), dim=-1).masked_fill(own, 0.0)
        x = v
        for _ in range(steps):
            first = v - x + pull(graph, x)
            there = x + STEP * first
            x = x + 0.5 * STEP * (first + v - there + pull(graph, there))
        return x, torch.autograd.grad(x, inputs, d_out)

    return both


COMPARISON = Comparison(
    name="graph_energy",
    title="Graph energy attention beside PyTorch",
    text=(
        f"State *feature*: {CHANNELS} channels of one head flow for some steps of Heun's method, coupled by sin; "
        "forward and backward. *products* is the same with matrix products in PyTorch, *pairwise* with every "
        "difference of two scores, as the equation is written: both with autograd. What *pairwise* keeps for its "
        "backward grows with the steps, as its time does: where 20 steps of it do not fit into memory, those of the "
        "point with 4 steps are a fifth of them. All sides keep the memory of freed arrays, as the trainer does."
    ),
    sides=(
        Side("refattn", f"{__name__}:ours", ours=True),
        Side("products", f"{__name__}:products"),
        Side("pairwise", f"{__name__}:pairwise"),
    ),
    grid=tuple({"n": n, "steps": steps, "dtype": "float32"} for n, steps in ((256, 20), (1024, 4), (1024, 20))),
    quick=lambda point: point["n"] <= 256,
    agree=1e-3,  # float32, forty stages in turn
)
