"""An attention substep of SympFormer beside the classical block, and beside the same equations in PyTorch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from asv_benchmarks.comparison import Comparison, Side


def _ours(batch: int, tokens: int, width: int, heads: int, integrator: str) -> Callable[[], Any]:
    """A middle layer of a stack without its MLP substep, forward and backward."""
    import numpy as np

    from refattn import Context, mechanism, philox, tree

    def draw(name: str) -> Any:
        return philox.normal((batch, tokens, width), seed=0, purpose=name).astype(np.float32)

    block, context, x = mechanism("sympformer").block, Context(causal=True), draw("x")
    config = block.Config(width=width, heads=heads, layer=1, layers=3, integrator=integrator, mlp="none")
    params = block.init(config, like=x, layer=1)
    state = block.start(params, x, context)
    state = dataclasses.replace(state, p=draw("p")) if config.integrator.carries else state

    def run() -> Any:
        result, saved = block.forward(params, state, context)
        d_state = tree.map_leaves(np.ones_like, result)
        return block.backward(params, saved, d_state)

    return run


def presymplectic(batch: int, tokens: int, width: int, heads: int) -> Callable[[], Any]:
    """The default integrator: one call of the prefix oracle."""
    return _ours(batch, tokens, width, heads, "presymplectic_euler")


def classical(batch: int, tokens: int, width: int, heads: int) -> Callable[[], Any]:
    """Softmax attention with a residual."""
    return _ours(batch, tokens, width, heads, "classical")


def plain(batch: int, tokens: int, width: int, heads: int) -> Callable[[], Any]:
    """The published equations as they stand, with autograd."""
    import torch

    def weight() -> Any:
        return (torch.randn(width, width) / math.sqrt(width)).requires_grad_()

    w_q, w_k, w_v, w_o, w_b = (weight() for _ in range(5))
    gain, gain_p = (torch.ones(width, requires_grad=True) for _ in range(2))
    h_x, h_y, c_log, c_lin = (torch.tensor(value, requires_grad=True) for value in (0.3, 0.3, 3.0, 1e-4))
    x, p = (torch.randn(batch, tokens, width, requires_grad=True) for _ in range(2))
    past, n = torch.ones(tokens, tokens).tril(), torch.arange(1.0, tokens + 1.0)[:, None]
    leaves = [x, p, w_q, w_k, w_v, w_o, w_b, gain, gain_p, h_x, h_y, c_log, c_lin]

    def run() -> Any:
        u = torch.nn.functional.layer_norm(x, (width,), gain)
        scores = (u @ w_q) @ (u @ w_k).transpose(1, 2) / math.sqrt(heads * width)
        growth = torch.exp(scores.clamp(-60.0, 60.0)) * past
        z = (growth.sum(-1, keepdim=True) / n).clamp_min(1e-8)
        s = ((p @ w_b) * p).sum(-1, keepdim=True) / (z * z + 1e-8)
        force = ((growth * (s + s.transpose(1, 2) + 2.0)) @ (u @ w_v) / (2.0 * n)) @ w_o
        raw = torch.exp(-(c_log * torch.log1p(h_y) + c_lin * h_y)) * (p + h_y * force)
        result = x + h_x * (raw @ w_b) / z
        momentum = torch.nn.functional.layer_norm(raw, (width,), gain_p)
        return torch.autograd.grad(result.sum() + momentum.sum(), leaves)

    return run


def products(batch: int, tokens: int, width: int, heads: int) -> Callable[[], Any]:
    """The products of the linear maps and of the oracle's causal strips in NumPy and nothing else: a bound for refattn.

    The strips of all heads are taken at once, which is quicker.
    """
    import numpy as np

    from refattn import backends, philox
    from refattn.ops.tiles import ROWS

    def draw(*shape: int) -> Any:
        return philox.normal(shape, seed=0, purpose="comparison.sympformer.products").astype(np.float32)

    backend, x, d_x, w = (
        backends.get("numpy"),
        draw(batch, tokens, width),
        draw(batch, tokens, width),
        draw(width, width),
    )
    rows, d_rows = x.reshape(-1, width), d_x.reshape(-1, width)

    def strip(at: tuple[int, int]) -> None:
        one, stop = at
        q, d_out, past = x[one, stop - ROWS : stop], d_x[one, stop - ROWS : stop], x[one, :stop]
        weights = q @ past.T
        weights @ past  # and here ends the forward
        weights = q @ past.T
        d_weights = d_out @ past.T
        weights.T @ d_out, d_weights @ past, d_weights.T @ q

    def run() -> None:
        for _ in range(6):
            backend.product(x, w), backend.product(d_x, w.T), backend.product(rows.T, d_rows)
        backend.map(strip, [(one, stop) for one in range(batch) for stop in range(ROWS, tokens + 1, ROWS)])

    return run


COMPARISON = Comparison(
    name="sympformer",
    title="An attention substep of SympFormer",
    text=(
        "One step of presymplectic Euler with its norm, forward and backward, causal, float32; no MLP. *classical* is "
        "our own classical block. *plain* is the prefix oracle in PyTorch's operations, as its authors write it but "
        "with one product for all heads, and autograd. A substep is a part of a training step, so all sides keep the "
        "memory of freed arrays, as the trainer does: otherwise faults of pages take another fifth of refattn's time. "
        "*products* are the matrix products in NumPy, without anything else."
    ),
    sides=(
        Side("refattn", f"{__name__}:presymplectic", ours=True),
        Side("classical", f"{__name__}:classical"),
        Side("products", f"{__name__}:products", bound=True),
        Side("plain", f"{__name__}:plain"),
    ),
    grid=(
        {"batch": 4, "tokens": 256, "width": 256, "heads": 8},
        {"batch": 1, "tokens": 1024, "width": 512, "heads": 8},
    ),
    quick=lambda point: point["tokens"] == 256,
    threads=(1, None),
)
