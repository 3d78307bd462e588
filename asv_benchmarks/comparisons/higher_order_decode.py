"""Decoding by a state of constant size beside decoding with a cache of all keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asv_benchmarks.comparison import Comparison, Side
from refattn import philox
from refattn.mechanisms.context import Context
from refattn.mechanisms.registry import mechanism

HEADS, TOKENS = 8, 64
"""Tokens of a call: as many as wait before they are folded into the state, so that each call folds once."""


def ours(n: int, d: int) -> Callable[[], Any]:
    """The stream of higher-order attention."""
    return _stream("higher_order", n, d)


def cached(n: int, d: int) -> Callable[[], Any]:
    """The stream of softmax attention in this library, whose cache is copied for each token."""
    return _stream("softmax", n, d)


def sdpa(n: int, d: int) -> Callable[[], Any]:
    """PyTorch's kernel over a cache in place, large enough from the start."""
    import torch

    width = HEADS * d
    x = torch.from_numpy(_normal("x", (1, n + TOKENS, width)))
    w_q, w_k, w_v, w_o = (torch.from_numpy(_normal(name, (width, width)) / width**0.5) for name in "qkvo")

    def of_heads(x: Any) -> Any:
        return x.unflatten(2, (HEADS, d)).transpose(1, 2)

    keys, values = (of_heads(x @ w).contiguous() for w in (w_k, w_v))

    def run() -> Any:
        outs = []
        with torch.no_grad():
            for t in range(n, n + TOKENS):
                new = x[:, t : t + 1]
                keys[:, :, t : t + 1], values[:, :, t : t + 1] = of_heads(new @ w_k), of_heads(new @ w_v)
                seen = keys[:, :, : t + 1], values[:, :, : t + 1]
                out = torch.nn.functional.scaled_dot_product_attention(of_heads(new @ w_q), *seen)
                outs.append(out.transpose(1, 2).flatten(2) @ w_o)
        return torch.cat(outs, dim=1)

    return run


def _stream(name: str, n: int, d: int) -> Callable[[], Any]:
    """A block without its residual, after n tokens."""
    record = mechanism(name)
    stream, width = record.stream, HEADS * d
    assert stream is not None
    x = _normal("x", (1, n + TOKENS, width))
    params = record.block.init(record.block.Config(width=width, heads=HEADS, residual=False), seed=0, like=x)
    context = Context(causal=True)
    states = [record.block.start(params, x[:, t : t + 1], context) for t in range(n, n + TOKENS)]
    _, full = stream.prefill(params, stream.start(params, 1), record.block.start(params, x[:, :n], context), context)

    def run() -> Any:
        cache, outs = full, []
        for state in states:
            after, cache = stream.step(params, cache, state, context)
            outs.append(after.x)
        return np.concatenate(outs, axis=1)

    return run


def _normal(name: str, shape: tuple[int, ...]) -> Any:
    return philox.normal(shape, seed=0, purpose=f"higher_order_decode.{name}").astype("float32")


COMPARISON = Comparison(
    name="higher_order_decode",
    title="Decoding by a state of constant size beside a cache of keys and values",
    text=(
        f"A block of {HEADS} heads with its four maps of width {HEADS} d, one sequence, float32: {TOKENS} tokens, one "
        "by one, after n others. *refattn* is higher-order attention, order 2. *softmax* is softmax attention of this "
        "library, *SDPA* `scaled_dot_product_attention` over a cache that is written in place."
    ),
    sides=(
        Side("refattn", f"{__name__}:ours", ours=True),
        Side("softmax", f"{__name__}:cached"),
        Side("SDPA", f"{__name__}:sdpa"),
    ),
    grid=tuple({"n": n, "d": d} for d in (64, 16) for n in (256, 1024, 4096)),
    quick=lambda point: point["n"] <= 1024,
    threads=(1,),
    work=lambda point: float(TOKENS),
    unit="tokens",
)
