"""Runs of higher-order attention that together reach every line with a tag, for tests/test_equation_ids.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from refattn import Context, mechanism
from refattn.mechanisms.higher_order.options import Add
from tests.mechanisms.exercises import Make, Run, draw, hidden, step


def runs(sizes: Mapping[str, int], make: Make, implementation: str) -> list[Run]:
    """Return (size by axis letter, call) for calls of the core in `implementation` and of the block, forward and
    backward.

    `sizes` are all different; `make` turns a NumPy array into one of the library that the calls shall use.
    """
    alone = {**sizes, "j": sizes["i"]}
    core = partial(_core, make=make, implementation=implementation)
    block = partial(_block, make=make)
    return [
        (sizes, partial(core, sizes, full=True)),
        (sizes, partial(core, sizes, full=False)),
        (sizes, partial(block, sizes, full=True)),
        (alone, partial(block, alone, full=False)),
    ]


def _core(sizes: Mapping[str, int], *, make: Make, implementation: str, full: bool) -> None:
    b, h, g, i, j, d, e = (sizes[letter] for letter in "bhgijde")
    record = mechanism("higher_order")
    assert record.core is not None
    options: dict[str, Any] = {"causal": implementation in ("chunked", "recurrent")}
    if full:
        delta = make(np.asarray(0.5))
        options |= {"order": 3, "alpha": make(np.asarray(2.0)), "normaliser": Add(delta, plain=True, eps=0.1)}
        options |= {"layer_norm": False}
        options |= {"norm_eps": 0.0, "key_mask": make(hidden("mask", b, j))}
        assert set(record.defaults) == {*options, "mask", "state", "implementation"}
        options |= {"mask": make(hidden("pairs", b, h, i, j))} if implementation in ("dense", "tiled") else {}
    q, k, v = make(draw("q", b, h, i, d)), make(draw("k", b, g, j, d)), make(draw("v", b, g, j, e))
    _, saved = record.core.forward(q, k, v, implementation=implementation, **options)
    record.core.backward(saved, make(draw("d_out", b, h, i, e)))


def _block(sizes: Mapping[str, int], *, make: Make, full: bool) -> None:
    b, h, g, i, j, d, e, m = (sizes[letter] for letter in "bhgijdem")
    options: dict[str, Any] = {"bias": True} if full else {"residual": False}
    x = make(np.asarray(draw("x", b, i, m)))
    context = Context()
    if full:
        memory, padding = make(draw("memory", b, j, m)), make(hidden("padding", b, j))
        context = Context(causal=True, memory=memory, memory_mask=padding)
    step("higher_order", x, context, make, width=m, heads=h, kv_heads=g, head_width=d, value_width=e, **options)
