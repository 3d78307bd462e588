"""Runs of growing attention that together reach every line with a tag, for tests/test_equation_ids.py."""

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
    # Tokens of the block are queries and keys at once, and each has as many heads.
    alone = {**sizes, "i": sizes["n"], "j": sizes["n"], "g": sizes["h"], "r": 1, "in": sizes["m"]}
    core = partial(_core, make=make, implementation=implementation)
    block = partial(_block, make=make)
    return [
        (sizes, partial(core, sizes, full=True)),
        (sizes, partial(core, sizes, full=False)),
        (alone, partial(core, alone, full=True)),
        (alone, partial(core, alone, full=False)),
        ({**alone, "in": sizes["m"] + 1}, partial(block, alone, full=True)),
        (alone, partial(block, alone, full=False)),
        (alone, partial(_growth, alone, make=make)),
    ]


def _core(sizes: Mapping[str, int], *, make: Make, implementation: str, full: bool) -> None:
    b, h, g, i, j, d, e = (sizes[letter] for letter in "bhgijde")
    room = mechanism("growing").core
    assert room is not None
    options: dict[str, Any] = {}
    if full:
        options = {"mask": make(hidden("mask", b, h, i, j)), "causal": True, "scale": 0.3, "softcap": 2.0}
        options |= {"bias": make(draw("bias", b, h, i, j)), "keep": make(2.0 * hidden("keep", b, h, i, j))}
        options |= {"sink": make(draw("sink", h, sizes["s"]))}
        assert set(options) < set(mechanism("growing").defaults)
    q, k, v = make(draw("q", b, h, i, d)), make(draw("k", b, g, j, d)), make(draw("v", b, g, j, e))
    _, saved = room.forward(q, k, v, implementation=implementation, **options)
    d_out = make(draw("d_out", b, h, i, e))
    room.backward(saved, d_out, make(draw("d_lse", b, h, i)) if full else None)
    if i == j:
        for total in (False, True):
            room.contract(saved, d_out, make(draw("x", b, i, sizes["in"])), total=total)


def _block(sizes: Mapping[str, int], *, make: Make, full: bool) -> None:
    b, h, n, d, e, m = (sizes[letter] for letter in "bhndem")
    options: dict[str, Any] = {"bias": True, "train_scale": True, "softcap": 2.0} if full else {"residual": False}
    x = make(np.asarray(draw("x", b, n, m)))
    context = Context()
    if full:
        mask, padding = make(hidden("mask", b, h, n, n)), make(hidden("padding", b, n))
        context = Context(mask=mask, key_mask=padding, causal=True)
    step("growing", x, context, make, width=m, heads=h, head_width=d, value_width=e, **options)


def _growth(sizes: Mapping[str, int], *, make: Make) -> None:
    b, h, n, d, e, m = (sizes[letter] for letter in "bhndem")
    block, growth = mechanism("growing").block, mechanism("growing").grow
    assert growth is not None
    params = block.init(block.Config(width=m, heads=h, head_width=d, value_width=e), seed=7, like=make(np.zeros(1)))
    x = make(np.asarray(draw("x", b, n, m)))
    state, saved = block.forward(params, block.start(params, x, Context()), Context())
    statistics = growth.observe(params, saved, state, keep=True)
    for metric in ("kron", "exact", "mean"):
        growth.apply(growth.plan(params, statistics, growth.Options(metric=metric), columns=1), 0.5)
    growth.apply(growth.plan(params, statistics, columns=m), 0.5)  # to the width of the tokens
