"""Three mechanisms as their equations stand, in plain PyTorch, as implementations for `refattn verify`.

    refattn verify sympformer --impl examples/torch_mechanisms.py:sympformer --grad
    refattn verify graph_energy --impl examples/torch_mechanisms.py:graph_energy --grad
    refattn verify growing --impl examples/torch_mechanisms.py:growing --grad

Every pair at once, and PyTorch differentiates: for checking, not for training. Arithmetic is float32 for float16 and
bfloat16, with one rounding at the end.

What differs from refattn:
- `sympformer` takes exponentials of scores as they come, where refattn takes the largest score of a row out: those
  above 88 overflow in float32. It gives no `log_z`.
- `graph_energy` has the state "token", a fixed step that is given, and explicit integrators; it declines the rest.
- `growing` is PyTorch's own attention: growth is in the block, and the core differs from softmax attention by nothing
  but what it saves.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import refattn

COUPLINGS = {"sin": torch.sin, "tanh": torch.tanh, "identity": lambda x: x, "arctan": torch.arctan, "sinh": torch.sinh}

# Weights of the stages before, of each stage; and of all in a step.
TABLEAUS = {
    "euler": (((),), (1.0,)),
    "heun": (((), (1.0,)), (0.5, 0.5)),
    "rk4": (((), (0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
}


def in_float32(function: Any) -> Any:
    """Compute in float32 what comes in less, and round once."""

    @functools.wraps(function)
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        kept, wide = q.dtype, (lambda x: x if x.dtype in (torch.float64, torch.bool) else x.float())
        options = {name: wide(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        groups = q.shape[1] // k.shape[1]
        k, v = (wide(x).repeat_interleave(groups, dim=1) for x in (k, v))
        out = function(wide(q), k, v, **options)
        return out.to(kept) if isinstance(out, torch.Tensor) else out

    run.framework = "torch"  # type: ignore[attr-defined]
    return run


@in_float32
def sympformer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kinetic: torch.Tensor | None = None,
    causal: bool | str = False,
    scale: float | None = None,
) -> torch.Tensor:
    """q, k (b, h, n, d), v (b, h, n, e), kinetic energies (b, h, n, 1) -> forces (b, h, n, e)."""
    n = q.shape[2]
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    seen = torch.ones(n, n, dtype=q.dtype).tril() if causal else torch.ones(n, n, dtype=q.dtype)
    growth, count = torch.exp(scores) * seen, seen.sum(-1, keepdim=True)
    z = growth.sum(-1, keepdim=True) / count
    u = torch.zeros_like(z) if kinetic is None else kinetic / z**2
    return growth * (u + u.mT + 2.0) @ v / (2.0 * count)


@in_float32
def graph_energy(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mu: float = 1.0,
    kappa: float = 1.0,
    step: float | None = None,
    steps: int = 10,
    integrator: str = "euler",
    coupling: str = "sin",
    symmetrise: str = "kernel",
    tau: float = 0.4,
    kind: str = "hard",
    **options: Any,
) -> torch.Tensor | refattn.Decline:
    """q, k (b, h, n, d), v (b, h, n, e) -> out (b, h, n, e): scores of tokens flow, and weigh attention."""
    if options or kind == "proximal" or integrator not in TABLEAUS or symmetrise == "min" or coupling not in COUPLINGS:
        return decline("state token without a mask, explicit integrators, simple couplings")
    if step is None and steps:
        return decline("the step has to be given")
    scores = q @ k.mT / math.sqrt(q.shape[3])
    weights = torch.softmax(scores, dim=-1)
    graphs = {
        "kernel": lambda: torch.softmax((scores + scores.mT) / 2.0, dim=-1),
        "mean": lambda: (weights + weights.mT) / 2.0,
        "none": lambda: weights,
    }
    graph = graphs[symmetrise]() * (1.0 - torch.eye(q.shape[2], dtype=q.dtype))
    start = torch.sigmoid(scores.diagonal(dim1=-2, dim2=-1))
    x = start
    for _ in range(steps):
        rates: list[torch.Tensor] = []
        stages, shares = TABLEAUS[integrator]
        for stage in stages:
            y = x + step * sum((a * rate for a, rate in zip(stage, rates, strict=True)), torch.zeros_like(x))
            pull = (graph * COUPLINGS[coupling](y[..., None, :] - y[..., :, None])).sum(-1)
            rates.append(mu * (start - y) + kappa * pull)
        x = x + step * sum((share * rate for share, rate in zip(shares, rates, strict=True)), torch.zeros_like(x))
    kept = torch.where(x >= tau, x, 0.0) if kind == "hard" else torch.where(x > tau, x - tau, 0.0)
    shares_of = weights * kept[..., None, :]
    total = shares_of.sum(-1, keepdim=True)
    emptied = torch.nn.functional.one_hot((weights * x[..., None, :]).argmax(-1), x.shape[-1]).to(x.dtype)
    return torch.where(total > 0.0, shares_of / torch.where(total > 0.0, total, 1.0), emptied) @ v


@in_float32
def growing(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool | str = False,
    scale: float | None = None,
) -> torch.Tensor:
    """q (b, h, n_q, d), k (b, h, n_k, d), v (b, h, n_k, e), mask like (b, h, n_q, n_k) -> out (b, h, n_q, e)."""
    n_q, n_k = q.shape[2], k.shape[2]
    if causal:
        past = torch.ones(n_q, n_k, dtype=torch.bool).tril(0 if causal == "top_left" else n_k - n_q)
        mask = past if mask is None else mask & past
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def decline(reason: str) -> refattn.Decline:
    import refattn  # only here: whoever borrows a function for another purpose does not need it

    return refattn.Decline(reason)
