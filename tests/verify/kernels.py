"""Honest kernels of softmax attention, written here in plain NumPy: what verification must never reject.

They compute in float32 as kernels for an accelerator do: keys in chunks with an online maximum, in either order, or in
parts that are merged by their lse; the scale folded into q or not, exponentials to base 2, weights rounded to the
storage type before their products, products of short operands or with wide sums; the backward from the stored output.
Each of these is a legitimate way to be slightly off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from refattn.golden.storage import round_to, spacing

F = np.float32


@dataclass(frozen=True)
class Kernel:
    """The choices that kernels differ in.

    Attributes
    ----------
    chunk, backwards
        Keys at a time, from the end if backwards, with an online maximum.
    parts
        Runs of keys that are attended apart, each normalised, and then merged by their lse.
    reversed_keys
        Whether all keys come in the opposite order.
    fused_scale, base_2
        Whether q is scaled before its products, and whether exponentials are powers of 2.
    rounded_weights
        Whether weights and their adjoint are rounded to the storage type before their products.
    product
        A key of `PRODUCTS`.
    reciprocal
        Whether outputs are multiplied by 1 / sum, not divided by the sum.
    delta_of_weights
        Whether the inner product of the backward is that of weights and their adjoint, not of output and upstream.
    """

    name: str
    chunk: int = 10_000
    backwards: bool = False
    parts: int = 1
    reversed_keys: bool = False
    fused_scale: bool = False
    base_2: bool = False
    rounded_weights: bool = True
    product: str = "whole"
    reciprocal: bool = False
    delta_of_weights: bool = False


KERNELS = (
    Kernel("plain", rounded_weights=False),
    Kernel("rounded weights"),
    Kernel("chunks of 8", chunk=8),
    Kernel("chunks of 16 from the end", chunk=16, backwards=True),
    Kernel("fused scale", fused_scale=True, chunk=32),
    Kernel("base 2", base_2=True, fused_scale=True, chunk=24),
    Kernel("sequential sums", product="sequential", rounded_weights=False),
    Kernel("wide sums", product="wide", chunk=16),
    Kernel("products of TF32", product="tf32", rounded_weights=False),
    Kernel("sums of two halves", product="halves"),
    Kernel("transposed products", product="transposed", delta_of_weights=True),
    Kernel("parts merged by lse", parts=3),
    Kernel("parts to base 2, merged by lse", parts=4, base_2=True, rounded_weights=False),
    Kernel("keys reversed", reversed_keys=True, reciprocal=True),
)


def _sequential(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One term after the other."""
    out = np.zeros((*a.shape[:-1], b.shape[-1]), F)
    for n in range(a.shape[-1]):
        out += a[..., :, n : n + 1] * b[..., n : n + 1, :]
    return out


def _halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The first half of the terms, and then the second."""
    half = a.shape[-1] // 2
    return a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]


def _tf32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Three products of operands of 11 bits, as matrix units make a float32 product of them."""

    def split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wide = x.astype(np.float64)
        step = spacing(wide, "float32") * 2.0**13
        high = np.rint(wide / step) * step
        return high.astype(F), (np.rint((wide - high) / step * 2.0**11) * step * 2.0**-11).astype(F)

    (a1, a2), (b1, b2) = split(a), split(b)
    return a2 @ b1 + a1 @ b2 + a1 @ b1


PRODUCTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "whole": lambda a, b: a @ b,
    "sequential": _sequential,
    "wide": lambda a, b: (a.astype(np.float64) @ b.astype(np.float64)).astype(F),
    "tf32": _tf32,
    "halves": _halves,
    "transposed": lambda a, b: np.swapaxes(
        np.ascontiguousarray(np.swapaxes(b, -1, -2)) @ np.ascontiguousarray(np.swapaxes(a, -1, -2)), -1, -2
    ),
}


def _sum_last(x: np.ndarray, sequential: bool) -> np.ndarray:
    return np.add.accumulate(x, axis=-1)[..., -1:] if sequential else np.sum(x, axis=-1, keepdims=True)


def run(
    kernel: Kernel,
    dtype: str,
    inputs: dict[str, np.ndarray],
    upstream: np.ndarray,
    *,
    causal: Any = False,
    window: tuple[int | None, int | None] = (None, None),
    offset: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> dict[str, np.ndarray]:
    """Return out, lse and the gradients of the floating inputs as the kernel stores them (bfloat16 held in float32)."""

    def store(x: np.ndarray) -> np.ndarray:
        return round_to(x.astype(np.float64), dtype).astype(F)

    def inner(x: np.ndarray) -> np.ndarray:
        return store(x) if kernel.rounded_weights else x

    (n_b, heads, queries, _), keys = inputs["q"].shape, inputs["k"].shape[2]
    counts = {
        name: inputs.get(name, np.full(n_b, n))[:, None, None, None]
        for name, n in (("q_lengths", queries), ("k_lengths", keys))
    }
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    rows, columns = i < counts["q_lengths"], j < counts["k_lengths"]  # what exists
    q, d_out = (np.where(rows, x.astype(F), F(0)) for x in (inputs["q"], upstream))
    k, v = (np.where(np.swapaxes(columns, -1, -2), inputs[name].astype(F), F(0)) for name in "kv")
    times = heads // k.shape[1]
    k, v = np.repeat(k, times, axis=1), np.repeat(v, times, axis=1)
    if "offset" in inputs:
        at_key = i + inputs["offset"][:, None, None, None]
    elif offset is not None:
        at_key = i + offset
    else:
        at_key = i + (0 if causal == "top_left" else counts["k_lengths"] - counts["q_lengths"])
    left, right = window[0], window[1] if causal is False else 0
    allowed = rows & columns & inputs.get("mask", True)
    allowed = allowed if left is None else allowed & (j >= at_key - left)
    allowed = allowed if right is None else allowed & (j <= at_key + right)
    plane = (n_b, heads, queries, keys)
    allowed = np.broadcast_to(allowed, plane)
    bias = np.broadcast_to(inputs.get("bias", np.zeros((), F)).astype(F), plane)
    keep = np.broadcast_to(inputs.get("keep", np.ones((), F)).astype(F), plane)
    sink = inputs.get("sink", np.zeros((heads, 0), F)).astype(F).reshape(heads, -1)[None, :, None, :]
    sinks = np.where(rows, sink, F(-np.inf))  # of each query that exists
    factor = F(1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    product, seq = PRODUCTS[kernel.product], kernel.product == "sequential"
    if kernel.reversed_keys:
        k, v = k[:, :, ::-1], v[:, :, ::-1]
        allowed, bias, keep = allowed[..., ::-1], bias[..., ::-1], keep[..., ::-1]

    def scores(at: slice) -> tuple[np.ndarray, np.ndarray]:
        kt = np.swapaxes(k[:, :, at], -1, -2)
        s = product(q * factor, kt) if kernel.fused_scale else product(q, kt) * factor
        tanh = np.tanh(s / F(softcap)) if softcap is not None else np.zeros((), F)
        capped = F(softcap) * tanh if softcap is not None else s
        return np.where(allowed[..., at], capped + bias[..., at], F(-np.inf)), tanh

    log2e, exp = (F(math.log2(math.e)), np.exp2) if kernel.base_2 else (F(1.0), np.exp)

    def attend(first: int, last: int, sinks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Output and lse over sinks and the keys from `first` to before `last`."""
        starts = range(first, last, kernel.chunk)
        top = np.full((*q.shape[:3], 1), -np.inf, F)
        total, out = np.zeros((*q.shape[:3], 1), F), np.zeros((*q.shape[:3], v.shape[-1]), F)
        if sinks.shape[3]:
            top = np.broadcast_to(np.max(sinks, axis=-1, keepdims=True), top.shape)
            total = _sum_last(exp((sinks - np.where(np.isinf(top), F(0), top)) * log2e), seq)
        for start in reversed(starts) if kernel.backwards else starts:
            at = slice(start, min(start + kernel.chunk, last))
            s = scores(at)[0]
            new = np.maximum(top, np.max(s, axis=-1, keepdims=True))
            shift = np.where(np.isinf(new), F(0), new)
            decay, p = exp((top - shift) * log2e), exp((s - shift) * log2e)
            total = total * decay + _sum_last(p, seq)
            out = out * decay + product(inner(p * keep[..., at]), v[:, :, at])
            top = new
        alive = total > 0
        divisor = np.where(alive, total, F(1))
        with np.errstate(divide="ignore"):
            lse = np.where(alive, np.where(alive, top, F(0)) + np.log(total), F(-np.inf))
        return out * (F(1) / divisor) if kernel.reciprocal else out / divisor, lse

    starts = range(0, keys, kernel.chunk)
    cuts = [keys * n // kernel.parts for n in range(kernel.parts + 1)]
    out, lse = attend(cuts[0], cuts[1], sinks)
    for first, last in pairwise(cuts[1:]):
        other, its_lse = attend(first, last, sinks[..., :0])
        both = np.logaddexp(lse, its_lse)
        known = np.where(np.isinf(both), F(0), both)
        out = out * np.exp(lse - known) + other * np.exp(its_lse - known)
        lse = both
    alive, out = ~np.isinf(lse), store(out)

    def d_kept(at: slice) -> np.ndarray:
        return product(d_out, np.swapaxes(v[:, :, at], -1, -2))

    def weights(at: slice) -> tuple[np.ndarray, np.ndarray]:
        s, tanh = scores(at)
        return exp((s - np.where(alive, lse, F(0))) * log2e), tanh

    if kernel.delta_of_weights:
        delta = _sum_last(weights(slice(None))[0] * keep * d_kept(slice(None)), seq)
    else:
        delta = np.sum(d_out * out, axis=-1, keepdims=True)
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    d_bias, d_keep = np.zeros(plane, F), np.zeros(plane, F)
    for start in starts:
        at = slice(start, min(start + kernel.chunk, keys))
        p, tanh = weights(at)
        d_v[:, :, at] = product(np.swapaxes(inner(p * keep[..., at]), -1, -2), d_out)
        d_y = d_kept(at)
        d_keep[..., at] = p * d_y
        d_bias[..., at] = p * (keep[..., at] * d_y - delta)
        d_s = inner(d_bias[..., at] * (F(1) - tanh * tanh))
        d_q += product(d_s, k[:, :, at]) * factor
        d_k[:, :, at] = product(np.swapaxes(d_s, -1, -2), q) * factor

    def per_group(x: np.ndarray) -> np.ndarray:
        b, h, n, width = x.shape
        one = x.reshape(b, h // times, times, n, width).sum(axis=2)
        return one[:, :, ::-1] if kernel.reversed_keys else one

    def of_scores(name: str, x: np.ndarray) -> np.ndarray:
        """The sum over the axes that an input was broadcast along."""
        shape = inputs[name].shape
        full = (1,) * (4 - len(shape)) + shape
        axes = tuple(n for n in range(4) if full[n] != plane[n])
        x = x[..., ::-1] if kernel.reversed_keys else x
        return np.sum(x, axis=axes, keepdims=True).reshape(shape)

    gradients = {"d_q": store(d_q), "d_k": store(per_group(d_k)), "d_v": store(per_group(d_v))}
    gradients |= {f"d_{n}": store(of_scores(n, x)) for n, x in (("bias", d_bias), ("keep", d_keep)) if n in inputs}
    if "sink" in inputs:
        of_sinks = exp((sinks - np.where(alive, lse, F(0))) * log2e)
        gradients["d_sink"] = store(-np.sum(of_sinks * delta, axis=(0, 2)).reshape(inputs["sink"].shape))
    return {"out": out, "lse": lse[..., 0], **gradients}
