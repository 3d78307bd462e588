"""Runs of softmax that together reach every line with a tag, for tests/test_equation_ids.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from refattn import Context, mechanism
from tests.mechanisms.exercises import Make, Run, draw, hidden, step


def runs(sizes: Mapping[str, int], make: Make, implementation: str) -> list[Run]:
    """Return (size by axis letter, call) for calls of the core in `implementation` and of the block, forward and
    backward.

    `sizes` are all different; `make` turns a NumPy array into one of the library that the calls shall use.
    """
    alone, one = {**sizes, "j": sizes["i"]}, {**sizes, "s": 1}  # a block has one sink for each head
    core = partial(_core, make=make, implementation=implementation)
    block = partial(_block, make=make)
    return [
        (sizes, partial(core, sizes, full=True)),
        (sizes, partial(core, sizes, full=False)),
        (
            sizes,
            partial(core, sizes, full=False, logits=1e3),
        ),  # so large that the tiled implementation needs the maximum
        (sizes, partial(core, sizes, full=False, softcap=2.0)),
        (one, partial(block, one, full=True)),
        (alone, partial(block, alone, full=False)),
    ]


def _core(
    sizes: Mapping[str, int], *, make: Make, implementation: str, full: bool, logits: float = 1.0, **options: Any
) -> None:
    b, h, g, i, j, d, e = (sizes[letter] for letter in "bhgijde")
    record = mechanism("softmax")
    assert record.core is not None
    if full:
        options = {"mask": make(hidden("mask", b, h, i, j)), "causal": True, "window": (9, None), "offset": j - i}
        options |= {"scale": 0.3, "softcap": 2.0, "bias": make(draw("bias", b, h, i, j))}
        options |= {"sink": make(draw("sink", h, sizes["s"])), "keep": make(2.0 * hidden("keep", b, h, i, j))}
        lengths = {"q_lengths": np.arange(i, i - b, -1), "k_lengths": np.arange(j, j - b, -1)}
        options |= {name: make(x) for name, x in lengths.items()}
        assert set(record.defaults) == {*options, "implementation"}
    q, k, v = make(draw("q", b, h, i, d) * logits), make(draw("k", b, g, j, d)), make(draw("v", b, g, j, e))
    _, saved = record.core.forward(q, k, v, implementation=implementation, **options)
    record.core.backward(saved, make(draw("d_out", b, h, i, e)), make(draw("d_lse", b, h, i)) if full else None)


def _block(sizes: Mapping[str, int], *, make: Make, full: bool) -> None:
    b, h, g, i, j, d, e, m = (sizes[letter] for letter in "bhgijdem")
    options = (
        {"bias": True, "scale": 0.3, "softcap": 2.0, "window": (9, None), "sink": True} if full else {"residual": False}
    )
    x = make(np.asarray(draw("x", b, i, m)))
    context = Context()
    if full:
        padding = make(hidden("padding", b, j))
        memory = make(draw("memory", b, j, m))
        mask = make(hidden("mask", b, h, i, j))
        context = Context(mask=mask, causal=True, memory=memory, memory_mask=padding)
    step("softmax", x, context, make, width=m, heads=h, kv_heads=g, head_width=d, value_width=e, **options)
