"""A whole growth step of a block beside its forward pass: what growing costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asv_benchmarks.comparison import Comparison, Side
from refattn import philox
from refattn.mechanisms.context import Context
from refattn.mechanisms.registry import mechanism

COLUMNS = 1


def _task(b: int, n: int, m: int, d: int, h: int) -> tuple[Any, Any, Any, Callable[[Any], Any]]:
    """Return the block, parameters, tokens and what a wider block makes of them."""
    block = mechanism("growing").block
    x = philox.normal((b, n, m), seed=0, purpose="growing.x").astype("float32")

    def fresh(width: int, seed: int) -> Any:
        return block.init(block.Config(width=m, heads=h, head_width=width, value_width=m // h), seed=seed, like=x)

    def forward(params: Any) -> Any:
        return block.forward(params, block.start(params, x, Context()), Context())

    wanted = forward(fresh(2 * d, 1))[0].x
    return block, fresh(d, 0), wanted, forward


def ours(b: int, n: int, m: int, d: int, h: int, metric: str) -> Callable[[], Any]:
    """Statistics, plan, search and new weights, all of it."""
    growth: Any = mechanism("growing").grow
    block, params, wanted, forward = _task(b, n, m, d, h)
    options = growth.Options(metric=metric)

    def loss(params: Any) -> float:
        return float(np.mean((forward(params)[0].x - wanted) ** 2, dtype="float64"))

    def run() -> Any:
        state, saved = forward(params)
        d_state = block.module.State((state.x - wanted) * np.float32(2.0 / wanted.size))
        statistics = growth.observe(params, saved, d_state, keep=options.keeps)
        grown, facts = growth.grow(params, statistics, loss, options, columns=COLUMNS)
        assert facts["after"] < facts["before"]
        return grown.w_q, grown.w_k

    return run


def forward_pass(b: int, n: int, m: int, d: int, h: int, metric: str) -> Callable[[], Any]:
    """One forward pass of the same block over the same tokens."""
    _, params, _, forward = _task(b, n, m, d, h)
    return lambda: forward(params)[0].x


COMPARISON = Comparison(
    name="growing",
    title="A growth step beside a forward pass",
    text=(
        f"One block in float32, {COLUMNS} new column for every head. *growth step* is all of it: forward and backward, "
        "statistics and linear algebra in float64, and the search with its forward passes. The number beside it is how "
        "many forward passes it takes."
    ),
    sides=(Side("growth step", f"{__name__}:ours", ours=True), Side("forward pass", f"{__name__}:forward_pass")),
    grid=tuple(
        {"b": b, "n": n, "m": m, "d": d, "h": h, "metric": metric}
        for b, n, m, d, h in ((32, 128, 128, 8, 4), (8, 512, 128, 8, 4))
        for metric in (("kron",) if b == 32 else ("kron", "exact"))
    ),
    quick=lambda point: point["n"] == 128 and point["metric"] == "kron",
)
