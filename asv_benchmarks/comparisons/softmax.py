"""Softmax attention beside PyTorch and JAX: a library's own kernel, and the formula by hand, compiled or not."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from asv_benchmarks.comparison import Comparison, Side
from refattn import philox

HEADS, WIDTH = 8, 64


def arrays(n: int, dtype: str, heads: int = HEADS, width: int = WIDTH) -> list[Any]:
    """Return q, k, v and the upstream gradient, (1, heads, n, width) each."""
    shape = (1, heads, n, width)
    return [philox.normal(shape, seed=0, purpose=f"softmax.{name}").astype(dtype) for name in ("q", "k", "v", "d_out")]


def ours(
    n: int, dtype: str, run: str, causal: bool = False, heads: int = HEADS, width: int = WIDTH
) -> Callable[[], Any]:
    """refattn on NumPy, in the form that it chooses itself."""
    import refattn as ra

    q, k, v, d_out = arrays(n, dtype, heads, width)

    def forward() -> Any:
        return ra.softmax.forward(q, k, v, causal=causal)[0]

    def both() -> Any:
        out, saved = ra.softmax.forward(q, k, v, causal=causal)
        return out, ra.softmax.backward(saved, d_out)

    return forward if run == "forward" else both


def sdpa(
    n: int, dtype: str, run: str, causal: bool = False, heads: int = HEADS, width: int = WIDTH
) -> Callable[[], Any]:
    """torch.nn.functional.scaled_dot_product_attention, and its autograd."""
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    return in_torch(lambda q, k, v: attend(q, k, v, is_causal=causal), arrays(n, dtype, heads, width), run)


def eager(
    n: int, dtype: str, run: str, causal: bool = False, heads: int = HEADS, width: int = WIDTH
) -> Callable[[], Any]:
    """The formula in PyTorch's own operations, as people write it, and autograd."""
    return in_torch(_formula(n, causal, width), arrays(n, dtype, heads, width), run)


def compiled(
    n: int, dtype: str, run: str, causal: bool = False, heads: int = HEADS, width: int = WIDTH
) -> Callable[[], Any]:
    """The formula and its gradients by torch.compile, which takes a compiler of C++."""
    import torch

    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise NotImplementedError("torch.compile needs a compiler of C++ here, and there is none")
    return in_torch(torch.compile(_formula(n, causal, width)), arrays(n, dtype, heads, width), run)


def _formula(n: int, causal: bool, width: int) -> Callable[..., Any]:
    """Return attention in PyTorch's operations."""
    import torch

    hidden = torch.ones(n, n, dtype=torch.bool).triu(1) if causal else None
    scale = 1.0 / math.sqrt(width)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-2, -1) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, dim=-1) @ v

    return attend


def jitted(
    n: int, dtype: str, run: str, causal: bool = False, heads: int = HEADS, width: int = WIDTH
) -> Callable[[], Any]:
    """The formula and its gradients by jax.jit."""
    import jax
    from jax import numpy as jnp

    jax.config.update("jax_enable_x64", dtype == "float64")
    q, k, v, d_out = (jnp.asarray(x) for x in arrays(n, dtype, heads, width))
    hidden = jnp.triu(jnp.ones((n, n), dtype=bool), 1) if causal else None
    scale = 1.0 / math.sqrt(width)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = q @ jnp.swapaxes(k, -2, -1) * scale
        if hidden is not None:
            scores = jnp.where(hidden, -jnp.inf, scores)
        return jax.nn.softmax(scores, axis=-1) @ v

    def with_gradients(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, back = jax.vjp(attend, q, k, v)
        return out, back(d_out)

    if run == "forward":
        forward = jax.jit(attend)
        return lambda: jax.block_until_ready(forward(q, k, v))
    both = jax.jit(with_gradients)
    return lambda: jax.block_until_ready(both(q, k, v, d_out))


def operations(
    n: int, dtype: str, run: str, causal: bool = False, heads: int = HEADS, width: int = WIDTH
) -> Callable[[], Any]:
    """The matrix products, exponentials and sums of tiles in NumPy, and nothing else: a bound for refattn.

    No argument is looked at, no score is feared to be large, results are written where they belong. Tiles are
    those that refattn takes for long sequences, workers are its own.
    """
    if causal:
        raise NotImplementedError("the bound is that of all pairs")
    from refattn import backends

    q, k, v, d_out = (x[0] for x in arrays(n, dtype, heads, width))
    scale = q.dtype.type(1.0 / math.sqrt(width))
    backend, ones = backends.get("numpy"), np.ones((n, 1), q.dtype)
    rows = [slice(start, min(start + 512, n)) for start in range(0, n, 512)]
    size = backend.tile_bytes // (512 * q.itemsize)
    columns = [slice(start, min(start + size, n)) for start in range(0, n, size)]

    def forward() -> Any:
        out, lse = np.empty_like(v), np.empty((heads, n, 1), q.dtype)

        def task(block: tuple[int, slice]) -> None:
            head, at = block
            scaled = q[block] * scale
            total, sums = np.zeros((len(scaled), 1), q.dtype), np.zeros((len(scaled), width), q.dtype)
            for part in columns:
                exponentials = np.exp(scaled @ k[head, part].T)
                total += exponentials @ ones[part]
                sums += exponentials @ v[head, part]
                del exponentials
            out[block], lse[head, at] = sums / total, np.log(total)

        list(backend.map(task, [(head, at) for head in range(heads) for at in rows]))
        return out, lse

    def backward(out: Any, lse: Any) -> Any:
        d_q, d_k, d_v = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
        inner = np.vecdot(d_out, out)[..., None]

        def task(head: int) -> None:
            k_ones, v_ones = (np.concat([x[head], ones], axis=1) for x in (k, v))
            for at in rows:
                scaled, slope = q[head, at] * scale, d_out[head, at]
                scaled_lse = np.concat([scaled, -lse[head, at]], axis=1)
                slope_inner = np.concat([slope, -inner[head, at]], axis=1)
                d_product = np.zeros((len(scaled), width), q.dtype)
                for part in columns:
                    weights = np.exp(scaled_lse @ k_ones[part].T)
                    d_v[head, part] += weights.T @ slope
                    weights *= slope_inner @ v_ones[part].T
                    d_product += weights @ k[head, part]
                    d_k[head, part] += weights.T @ scaled
                    del weights
                d_q[head, at] = d_product * scale

        list(backend.map(task, list(range(heads))))
        return d_q, d_k, d_v

    def both() -> Any:
        out, lse = forward()
        return out[None], [x[None] for x in backward(out, lse)]

    return (lambda: forward()[0][None]) if run == "forward" else both


def in_torch(attend: Callable[..., Any], given: list[Any], run: str) -> Callable[[], Any]:
    """Return the call of a function of q, k and v in PyTorch, with autograd where `run` is "both"."""
    import torch

    q, k, v, d_out = (torch.from_numpy(x) for x in given)
    inputs = [x.requires_grad_(run == "both") for x in (q, k, v)]

    def forward() -> Any:
        with torch.no_grad():
            return attend(*inputs)

    def both() -> Any:
        out = attend(*inputs)
        return out, torch.autograd.grad(out, inputs, d_out)

    return forward if run == "forward" else both


def without_avx512() -> str | None:
    """Say why OpenBLAS's kernels for AVX-512 cannot run here."""
    config: Any = np.show_config(mode="dicts")
    features = config.get("SIMD Extensions", {})
    found = {*features.get("baseline", ()), *features.get("found", ())}
    return None if found & {"X86_V4", "AVX512_SKX"} else "this CPU has no AVX-512"


def _grid() -> tuple[dict[str, Any], ...]:
    sizes = [(256, "float32", (False,)), (1024, "float32", (False, True)), (4096, "float32", (False, True))]
    sizes.append((1024, "float64", (False,)))
    return tuple(
        {"n": n, "dtype": dtype, "run": run, "causal": causal}
        for n, dtype, masks in sizes
        for run in ("forward", "both")
        for causal in masks
    )


COMPARISON = Comparison(
    name="softmax",
    title="Softmax attention beside PyTorch and JAX",
    text=(
        f"{HEADS} heads of width {WIDTH}, one batch. *SDPA* is `scaled_dot_product_attention`, *eager* the formula in "
        "PyTorch's operations, *compile* the same by `torch.compile`, *jit* by `jax.jit`. *both* is forward and "
        "backward. *AVX-512* is refattn with OpenBLAS told to use its kernels for AVX-512 "
        "(`OPENBLAS_CORETYPE=SkylakeX`), which it does not choose by itself on every CPU that has them. *operations* "
        "are the products, exponentials and sums of refattn's tiles in NumPy, without anything else."
    ),
    sides=(
        Side("refattn", f"{__name__}:ours", ours=True),
        Side(
            "refattn AVX-512",
            f"{__name__}:ours",
            ours=True,
            env={"OPENBLAS_CORETYPE": "SkylakeX"},
            why_not=without_avx512,
        ),
        Side("operations", f"{__name__}:operations"),
        Side("SDPA", f"{__name__}:sdpa"),
        Side("eager", f"{__name__}:eager"),
        Side("compile", f"{__name__}:compiled"),
        Side("jit", f"{__name__}:jitted"),
    ),
    grid=_grid(),
    quick=lambda point: point["n"] <= 1024 and not point["causal"],
    agree=1e-4,  # float32 sums of 4096 terms in different orders
)
