"""Higher-order attention beside PyTorch's kernel for softmax attention: from which length on linear time gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asv_benchmarks.comparison import Comparison, Side
from asv_benchmarks.comparisons import softmax
from refattn import philox

HEADS, WIDTHS, SHORT, LONG = 8, (64, 16), (1024, 4096), 16384
LONGER = (32768, 65536)
"""Lengths that show how time grows. Softmax attention would take minutes."""


def arrays(n: int, d: int) -> list[Any]:
    """Return q, k, v and the upstream gradient, (1, heads, n, d) each."""
    shape = (1, HEADS, n, d)
    names = ("q", "k", "v", "d_out")
    return [philox.normal(shape, seed=0, purpose=f"higher_order.{name}").astype("float32") for name in names]


def ours(n: int, d: int, run: str, causal: bool) -> Callable[[], Any]:
    """refattn on NumPy, order 2, in the form that it chooses itself."""
    import refattn as ra

    q, k, v, d_out = arrays(n, d)

    def forward() -> Any:
        return ra.higher_order.forward(q, k, v, causal=causal)[0]

    def both() -> Any:
        out, saved = ra.higher_order.forward(q, k, v, causal=causal)
        return out, ra.higher_order.backward(saved, d_out)

    return forward if run == "forward" else both


def sdpa(n: int, d: int, run: str, causal: bool) -> Callable[[], Any]:
    """torch.nn.functional.scaled_dot_product_attention, and its autograd."""
    if n in LONGER:
        raise NotImplementedError("left out at lengths that only show how the time of linear forms grows")
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    return softmax.in_torch(lambda q, k, v: attend(q, k, v, is_causal=causal), arrays(n, d), run)


def products(n: int, d: int, run: str, causal: bool) -> Callable[[], Any]:
    """The seven products of each tile of pairs, two of them forward, in NumPy and nothing else: a bound for refattn."""
    if not causal or d != max(WIDTHS) or n not in SHORT or run != "both":
        raise NotImplementedError("the bound is that of causal calls which refattn computes pair by pair")
    from refattn import backends
    from refattn.ops.tiles import ROWS

    q, k, v, d_out = (x[0] for x in arrays(n, d))
    backend = backends.get("numpy")
    width = backend.tile_bytes // (ROWS * q.itemsize)

    def task(head: int) -> None:
        for stop in range(ROWS, n + 1, ROWS):
            rows, slope = q[head, stop - ROWS : stop], d_out[head, stop - ROWS : stop]
            for first in range(0, stop, width):
                part = slice(first, min(first + width, stop))
                keys, values = k[head, part], v[head, part]
                weights = rows @ keys.T
                weights @ values  # and here ends the forward
                weights = rows @ keys.T
                d_weights = slope @ values.T
                weights.T @ slope, d_weights @ keys, d_weights.T @ rows

    return lambda: backend.map(task, range(HEADS))


def operations(n: int, d: int, run: str, causal: bool) -> Callable[[], Any]:
    """The same products with what stands between them, squares, masks and sums, in NumPy: a bound for refattn.

    Nothing is normalised or divided, no argument is looked at, and forward and backward share the loop.
    """
    if not causal or d != max(WIDTHS) or n not in SHORT or run != "both":
        raise NotImplementedError("the bound is that of causal calls which refattn computes pair by pair")
    import numpy as np

    from refattn import backends
    from refattn.ops.tiles import ROWS

    q, k, v, d_out = (x[0] for x in arrays(n, d))
    backend, past = backends.get("numpy"), np.tri(ROWS, dtype=q.dtype)
    width = backend.tile_bytes // (ROWS * q.itemsize)

    def squares(product: Any, diagonal: bool) -> Any:
        weights = product * product
        weights += 1.0
        if diagonal:
            weights[:, -ROWS:] *= past
        return weights

    def call() -> Any:
        out, d_q, d_k, d_v = (np.zeros_like(x) for x in (v, q, k, v))

        def task(head: int) -> None:
            for stop in range(ROWS, n + 1, ROWS):
                at = slice(stop - ROWS, stop)
                rows, slope = q[head, at], d_out[head, at]
                for first in range(0, stop, width):
                    part = slice(first, min(first + width, stop))
                    keys, values, diagonal = k[head, part], v[head, part], part.stop == stop
                    out[head, at] += squares(rows @ keys.T, diagonal) @ values
                    product = rows @ keys.T
                    d_v[head, part] += squares(product, diagonal).T @ slope
                    d_weights = slope @ values.T
                    if diagonal:
                        d_weights[:, -ROWS:] *= past
                    d_weights *= product
                    d_q[head, at] += d_weights @ keys
                    d_k[head, part] += d_weights.T @ rows

        backend.map(task, range(HEADS))
        return out, d_q, d_k, d_v

    return call


COMPARISON = Comparison(
    name="higher_order",
    title="Higher-order attention beside softmax attention in PyTorch",
    text=(
        f"Order 2, with layer normalisation, {HEADS} heads, one batch, float32. *SDPA* is "
        "`scaled_dot_product_attention`: another function of the same arrays, so that results are not compared. *both* "
        "is forward and backward. *AVX-512* is refattn with OpenBLAS told to use its kernels for AVX-512 "
        "(`OPENBLAS_CORETYPE=SkylakeX`). *products* are those of its tiles in NumPy, without anything else, where it "
        "goes pair by pair; *operations* have the squares, masks and sums between them as well."
    ),
    sides=(
        Side("refattn", f"{__name__}:ours", ours=True),
        Side(
            "refattn AVX-512",
            f"{__name__}:ours",
            ours=True,
            env={"OPENBLAS_CORETYPE": "SkylakeX"},
            why_not=softmax.without_avx512,
        ),
        Side("products", f"{__name__}:products", bound=True),
        Side("operations", f"{__name__}:operations", bound=True),
        Side("SDPA", f"{__name__}:sdpa"),
    ),
    grid=(
        *({"n": n, "d": d, "run": "both", "causal": causal} for d in WIDTHS for n in SHORT for causal in (False, True)),
        *({"n": n, "d": d, "run": "both", "causal": True} for d in WIDTHS for n in (LONG, *LONGER)),
    ),
    quick=lambda point: point["n"] == 1024,
    threads=(None,),
)
