"""Runs of Koopman attention that together reach every line with a tag, for tests/test_equation_ids.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from refattn import Context, equations, mechanism
from refattn.mechanisms.cache import KeysAndValues
from refattn.mechanisms.koopman.layer import pointer
from tests.mechanisms.exercises import Make, Run, draw, hidden, step


def runs(sizes: Mapping[str, int], make: Make, implementation: str) -> list[Run]:
    """Return (size by axis letter, call) for calls of the core in `implementation` and of the block, forward and
    backward.

    `sizes` are all different, but that one Koopman update has a single transition and that the observables are the
    keys, with the coordinates where they are augmented; `make` turns a NumPy array into one of the library that the
    calls shall use.
    """
    one = {**sizes, "l": 1, "o": sizes["j"]}
    augmented = {**one, "o": sizes["j"] + sizes["d"]}
    alone = {**one, "j": sizes["i"], "o": sizes["i"]}
    core = partial(_core, make=make, implementation=implementation)
    behind = {**one, "j": sizes["i"] + 1, "o": sizes["i"] + 1}
    return [
        (one, partial(core, sizes, full=True)),
        (one, partial(core, sizes)),
        (one, partial(core, sizes, updates=1)),
        (augmented, partial(core, sizes, space="augmented")),
        (one, partial(core, sizes, space="full", similarity="kernel", fit="separable")),
        (one, partial(core, sizes, fit="stein(scale='mean')")),
        (one, partial(core, sizes, fit="separable(norm=0.3)")),
        (one, partial(_block, sizes, make=make, full=True)),
        (alone, partial(_block, alone, make=make, full=False)),
        *((behind, partial(_pointer, behind, make=make, similarity=name)) for name in ("dot", "kernel")),
        (alone, partial(_extended, alone, make=make)),
    ]


def _core(sizes: Mapping[str, int], *, make: Make, implementation: str, full: bool = False, **options: Any) -> None:
    b, h, g, i, j, d = (sizes[letter] for letter in "bhgijd")
    record = mechanism("koopman")
    assert record.core is not None
    options = {"perturbation": "identity"} | options
    if full:
        options = {"perturbation": "pencil(mix=0.9)", "causal": True}
        # The shared implementation is for masks of keys, and where the future is hidden for one fit.
        rows, fit = (1, "separable") if implementation == "shared" else (i, "stein")
        options |= {"mask": make(hidden("mask", b, h, rows, j)), "fit": fit}
    q, k, v = make(draw("q", b, h, i, d)), make(draw("k", b, g, j, d)), make(draw("v", b, g, j, d))
    _, saved = record.core.forward(q, k, v, implementation=implementation, **options)
    record.core.backward(saved, make(draw("d_out", b, h, i, d)))


def _block(sizes: Mapping[str, int], *, make: Make, full: bool) -> None:
    b, h, g, i, j, d, m = (sizes[letter] for letter in "bhgijdm")
    options: dict[str, Any] = {"bias": True} if full else {"residual": False, "learn_kernel": False}
    x = make(np.asarray(draw("x", b, i, m)))
    context = Context()
    if full:
        padding, mask = make(hidden("padding", b, j)), make(hidden("mask", b, h, i, j))
        draws = {name: make(np.asarray([0.1])) for name in ("ridge", "epsilon")}
        memory = make(draw("memory", b, j, m))
        context = Context(mask=mask, causal=True, memory=memory, memory_mask=padding, draws=draws)
    step("koopman", x, context, make, width=m, heads=h, kv_heads=g, head_width=d, **options)


def _pointer(sizes: Mapping[str, int], *, make: Make, similarity: str) -> None:
    b, h, g, i, d, m = (sizes[letter] for letter in "bhgidm")
    config = mechanism("koopman").block.Config(width=m, heads=h, kv_heads=g, head_width=d, similarity=similarity)
    x = make(np.asarray(draw("x", b, i, m)))
    params, own = pointer.init(config, seed=7, like=x, layer=0), equations.active(pointer)
    _, _, saved = own.forward(params, x, Context(causal=True))
    own.backward(params, saved, make(draw("d_l", b, h, i, i + 1)), make(draw("d_x", b, i, m)))


def _extended(sizes: Mapping[str, int], *, make: Make) -> None:
    """Tokens behind none at all: so that there are as many keys as queries."""
    b, h, g, i, d, m = (sizes[letter] for letter in "bhgidm")
    config = mechanism("koopman").block.Config(width=m, heads=h, kv_heads=g, head_width=d)
    x, none = make(np.asarray(draw("x", b, i, m))), make(np.zeros((b, g, 0, d)))
    params = pointer.init(config, seed=7, like=x, layer=0)
    equations.active(pointer).extend(params, KeysAndValues(none, none), x, Context(causal=True))
