"""Honest kernels of softmax attention, written here in plain NumPy: what verification must never reject.

They compute in float32 as kernels for an accelerator do: keys in chunks with an online maximum, in either order, the
scale folded into q or not, exponentials to base 2, weights rounded to the storage type before their products, the
backward from the stored output. Each of these is a legitimate way to be slightly off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from refattn.golden.storage import round_to

F = np.float32


@dataclass(frozen=True)
class Kernel:
    """The choices that kernels differ in."""

    name: str
    chunk: int = 10_000
    backwards: bool = False
    fused_scale: bool = False
    base_2: bool = False
    rounded_weights: bool = True
    sequential_sums: bool = False


KERNELS = (
    Kernel("plain", rounded_weights=False),
    Kernel("rounded weights"),
    Kernel("chunks of 8", chunk=8),
    Kernel("chunks of 16 from the end", chunk=16, backwards=True),
    Kernel("fused scale", fused_scale=True, chunk=32),
    Kernel("base 2", base_2=True, fused_scale=True, chunk=24),
    Kernel("sequential sums", sequential_sums=True, rounded_weights=False),
)


def _sum_last(x: np.ndarray, sequential: bool) -> np.ndarray:
    return np.add.accumulate(x, axis=-1)[..., -1:] if sequential else np.sum(x, axis=-1, keepdims=True)


def _product(a: np.ndarray, b: np.ndarray, sequential: bool) -> np.ndarray:
    """a @ b, or the same with each sum taken one term after the other."""
    if not sequential:
        return a @ b
    out = np.zeros((*a.shape[:-1], b.shape[-1]), F)
    for n in range(a.shape[-1]):
        out += a[..., :, n : n + 1] * b[..., n : n + 1, :]
    return out


def run(
    kernel: Kernel,
    dtype: str,
    inputs: dict[str, np.ndarray],
    upstream: np.ndarray,
    *,
    causal: Any = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> dict[str, np.ndarray]:
    """Return out, lse and the gradients of q, k, v as the kernel stores them (bfloat16 held in float32)."""

    def store(x: np.ndarray) -> np.ndarray:
        return round_to(x.astype(np.float64), dtype).astype(F)

    def inner(x: np.ndarray) -> np.ndarray:
        return store(x) if kernel.rounded_weights else x

    q, k, v = (inputs[name].astype(F) for name in "qkv")
    d_out = upstream.astype(F)
    times = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, times, axis=1), np.repeat(v, times, axis=1)
    queries, keys = q.shape[2], k.shape[2]
    allowed = np.ones((queries, keys), bool)
    if causal is not False:
        offset = 0 if causal == "top_left" else keys - queries
        allowed = np.arange(keys)[None, :] <= np.arange(queries)[:, None] + offset
    allowed = np.broadcast_to(allowed & inputs.get("mask", True), (*q.shape[:2], queries, keys))
    factor = F(1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    seq = kernel.sequential_sums

    def scores(at: slice) -> tuple[np.ndarray, np.ndarray]:
        kt = np.swapaxes(k[:, :, at], -1, -2)
        s = _product(q * factor, kt, seq) if kernel.fused_scale else _product(q, kt, seq) * factor
        tanh = np.tanh(s / F(softcap)) if softcap is not None else np.zeros((), F)
        capped = F(softcap) * tanh if softcap is not None else s
        return np.where(allowed[..., at], capped, F(-np.inf)), tanh

    log2e, exp = (F(math.log2(math.e)), np.exp2) if kernel.base_2 else (F(1.0), np.exp)
    starts = range(0, keys, kernel.chunk)
    top = np.full((*q.shape[:3], 1), -np.inf, F)
    total, out = np.zeros((*q.shape[:3], 1), F), np.zeros((*q.shape[:3], v.shape[-1]), F)
    for start in reversed(starts) if kernel.backwards else starts:
        at = slice(start, min(start + kernel.chunk, keys))
        s = scores(at)[0]
        new = np.maximum(top, np.max(s, axis=-1, keepdims=True))
        shift = np.where(np.isinf(new), F(0), new)
        decay, p = exp((top - shift) * log2e), exp((s - shift) * log2e)
        total = total * decay + _sum_last(p, seq)
        out = out * decay + _product(inner(p), v[:, :, at], seq)
        top = new
    alive = total > 0
    out = store(out / np.where(alive, total, F(1)))
    with np.errstate(divide="ignore"):
        lse = np.where(alive, np.where(alive, top, F(0)) + np.log(total), F(-np.inf))

    delta = np.sum(d_out * out, axis=-1, keepdims=True)
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for start in starts:
        at = slice(start, min(start + kernel.chunk, keys))
        s, tanh = scores(at)
        p = exp((s - np.where(alive, lse, F(0))) * log2e)
        d_v[:, :, at] = _product(np.swapaxes(inner(p), -1, -2), d_out, seq)
        d_s = p * (_product(d_out, np.swapaxes(v[:, :, at], -1, -2), seq) - delta)
        d_s = inner(d_s * (F(1) - tanh * tanh))
        d_q += _product(d_s, k[:, :, at], seq) * factor
        d_k[:, :, at] = _product(np.swapaxes(d_s, -1, -2), q, seq) * factor
    b, h, n, _ = k.shape

    def per_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(b, h // times, times, n, -1).sum(axis=2)

    gradients = {"d_q": store(d_q), "d_k": store(per_group(d_k)), "d_v": store(per_group(d_v))}
    return {"out": out, "lse": lse[..., 0], **gradients}
