"""Higher-order attention beside the same function in PyTorch with the features written out, as it is mostly found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from asv_benchmarks.comparison import Comparison, Side
from asv_benchmarks.comparisons import higher_order, softmax

CHUNK = 256


def features(n: int, d: int, run: str, causal: bool) -> Callable[[], Any]:
    """All 1 + d + d^2 products by einsum and concatenation, a state of that size, and autograd."""
    import torch

    root = (3.0 * math.sqrt(d)) ** -0.5

    def phi(x: Any) -> Any:
        x = torch.nn.functional.layer_norm(x, (d,)) * root
        squares = torch.einsum("bhni,bhnj->bhnij", x, x).flatten(-2) / math.sqrt(2.0)
        return torch.cat([torch.ones_like(x[..., :1]), x, squares], dim=-1)

    def whole(q: Any, k: Any, v: Any) -> Any:
        rows, columns = phi(q), phi(k)
        state = torch.einsum("bhnf,bhne->bhfe", columns, v)
        total = torch.einsum("bhnf,bhf->bhn", rows, columns.sum(dim=2))
        return torch.einsum("bhnf,bhfe->bhne", rows, state) / total[..., None]

    def chunked(q: Any, k: Any, v: Any) -> Any:
        past = torch.ones(CHUNK, CHUNK).tril()
        rows, columns, values = (x.unflatten(2, (-1, CHUNK)) for x in (phi(q), phi(k), v))
        states = torch.einsum("bhcnf,bhcne->bhcfe", columns, values).cumsum(2)
        sums = columns.sum(dim=3).cumsum(2)
        states, sums = (torch.cat([torch.zeros_like(x[:, :, :1]), x[:, :, :-1]], dim=2) for x in (states, sums))
        weights = torch.einsum("bhcif,bhcjf->bhcij", rows, columns) * past
        above = torch.einsum("bhcnf,bhcfe->bhcne", rows, states) + weights @ values
        total = torch.einsum("bhcnf,bhcf->bhcn", rows, sums) + weights.sum(dim=-1)
        return (above / total[..., None]).flatten(2, 3)

    return softmax.in_torch(chunked if causal else whole, higher_order.arrays(n, d), run)


COMPARISON = Comparison(
    name="higher_order_features",
    title="Higher-order attention beside features in PyTorch",
    text=(
        f"Order 2, with layer normalisation, {higher_order.HEADS} heads, one batch, float32. *features* is the same "
        f"function in PyTorch's operations with all 1 + d + d^2 products written out, causal in chunks of {CHUNK} "
        "tokens, and autograd. *both* is forward and backward."
    ),
    sides=(Side("refattn", f"{higher_order.__name__}:ours", ours=True), Side("features", f"{__name__}:features")),
    grid=tuple(
        {"n": n, "d": d, "run": run, "causal": causal}
        for d, n in ((64, 1024), (16, 1024), (16, 4096))
        for run in ("forward", "both")
        for causal in (False, True)
    ),
    quick=lambda point: point["n"] == 1024 and point["d"] == 16,
    threads=(None,),
    agree=1e-4,  # float32 sums of 4096 terms in different orders
)
