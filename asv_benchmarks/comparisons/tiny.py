"""The overhead of a call: arrays so small that next to nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from asv_benchmarks.comparison import Comparison, Side
from asv_benchmarks.comparisons import softmax
from asv_benchmarks.sides import Plan

N, HEADS, WIDTH = 16, 1, 8


def ours(run: str) -> Callable[[], Any]:
    """refattn on NumPy."""
    return softmax.ours(N, "float32", run, heads=HEADS, width=WIDTH)


def bare(run: str) -> Callable[[], Any]:
    """The formula in NumPy's functions, as people write it: no checks, no masks, nothing saved."""
    if run != "forward":
        raise NotImplementedError("NumPy has no gradients")
    q, k, v, _ = softmax.arrays(N, "float32", HEADS, WIDTH)
    scale = 1.0 / math.sqrt(WIDTH)

    def attend() -> Any:
        scores = q @ np.swapaxes(k, -2, -1) * scale
        weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
        return weights / np.sum(weights, axis=-1, keepdims=True) @ v

    return attend


def definition(run: str) -> Callable[[], Any]:
    """The forward of refattn's dense form, given what its core makes of the arguments: a bound for refattn."""
    if run != "forward":
        raise NotImplementedError("the bound is that of the forward")
    from refattn.mechanisms.softmax import dense

    q, k, v, _ = softmax.arrays(N, "float32", HEADS, WIDTH)
    absent = ("mask", "first", "last", "q_lengths", "k_lengths", "bias", "sink", "keep", "softcap")
    options: dict[str, Any] = dict.fromkeys(absent)
    return lambda: dense.forward(q, k, v, **options, scale=1.0 / math.sqrt(WIDTH))[0]


def sdpa(run: str) -> Callable[[], Any]:
    """PyTorch's own kernel."""
    return softmax.sdpa(N, "float32", run, heads=HEADS, width=WIDTH)


def eager(run: str) -> Callable[[], Any]:
    """The formula in PyTorch's operations."""
    return softmax.eager(N, "float32", run, heads=HEADS, width=WIDTH)


COMPARISON = Comparison(
    name="tiny",
    title="The overhead of a call",
    text=(
        f"Softmax attention of {N} tokens, one head of width {WIDTH}, float32: what a call costs before it computes "
        "anything. *NumPy* is the bare formula, *eager* the same in PyTorch. refattn also checks all its arguments, "
        "looks for queries that may attend nothing, returns lse and keeps what its backward reads. *definition* "
        "is the dense form as it stands, whose arguments nobody has looked at."
    ),
    sides=(
        Side("refattn", f"{__name__}:ours", ours=True),
        Side("NumPy", f"{__name__}:bare"),
        Side("definition", f"{__name__}:definition", bound=True),
        Side("SDPA", f"{__name__}:sdpa"),
        Side("eager", f"{__name__}:eager"),
    ),
    grid=({"run": "forward"}, {"run": "both"}),
    threads=(1,),
    plan=Plan(rounds=15, round_seconds=0.05),
    agree=1e-5,
)
