"""Runs of Koopman attention that together reach every line with a tag, for tests/test_equation_ids.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from refattn import Context, equations, mechanism, philox
from refattn.mechanisms.cache import KeysAndValues
from refattn.mechanisms.koopman.layer import pointer

Make = Callable[[Any], Any]
Run = tuple[Mapping[str, int], Callable[[], None]]


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


def _draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=7, purpose=name)


def _mask(name: str, *shape: int) -> Any:
    return philox.uniform(shape, seed=7, purpose=name) < 0.8


def _core(sizes: Mapping[str, int], *, make: Make, implementation: str, full: bool = False, **options: Any) -> None:
    b, h, g, i, j, d = (sizes[letter] for letter in "bhgijd")
    record = mechanism("koopman")
    assert record.core is not None
    options = {"perturbation": "identity"} | options
    if full:
        options = {"perturbation": "pencil(mix=0.9)", "causal": True}
        # The shared implementation is for masks of keys, and where the future is hidden for one fit.
        rows, fit = (1, "separable") if implementation == "shared" else (i, "stein")
        options |= {"mask": make(_mask("mask", b, h, rows, j)), "fit": fit}
    q, k, v = make(_draw("q", b, h, i, d)), make(_draw("k", b, g, j, d)), make(_draw("v", b, g, j, d))
    _, saved = record.core.forward(q, k, v, implementation=implementation, **options)
    record.core.backward(saved, make(_draw("d_out", b, h, i, d)))


def _block(sizes: Mapping[str, int], *, make: Make, full: bool) -> None:
    b, h, g, i, j, d, m = (sizes[letter] for letter in "bhgijdm")
    block = mechanism("koopman").block
    options: dict[str, Any] = {"bias": True} if full else {"residual": False, "learn_kernel": False}
    config = block.Config(width=m, heads=h, kv_heads=g, head_width=d, **options)
    x = make(np.asarray(_draw("x", b, i, m)))
    context = Context()
    if full:
        padding, mask = make(_mask("padding", b, j)), make(_mask("mask", b, h, i, j))
        draws = {name: make(np.asarray([0.1])) for name in ("ridge", "epsilon")}
        memory = make(_draw("memory", b, j, m))
        context = Context(mask=mask, causal=True, memory=memory, memory_mask=padding, draws=draws)
    params = block.init(config, seed=7, like=x)
    state, saved = block.forward(params, block.start(params, x, context), context)
    d_state, _ = block.read_backward(params, state, make(_draw("d_x", b, i, m)))
    block.backward(params, saved, d_state)


def _pointer(sizes: Mapping[str, int], *, make: Make, similarity: str) -> None:
    b, h, g, i, d, m = (sizes[letter] for letter in "bhgidm")
    config = mechanism("koopman").block.Config(width=m, heads=h, kv_heads=g, head_width=d, similarity=similarity)
    x = make(np.asarray(_draw("x", b, i, m)))
    params, own = pointer.init(config, seed=7, like=x, layer=0), equations.active(pointer)
    _, _, saved = own.forward(params, x, Context(causal=True))
    own.backward(params, saved, make(_draw("d_l", b, h, i, i + 1)), make(_draw("d_x", b, i, m)))


def _extended(sizes: Mapping[str, int], *, make: Make) -> None:
    """Tokens behind none at all: so that there are as many keys as queries."""
    b, h, g, i, d, m = (sizes[letter] for letter in "bhgidm")
    config = mechanism("koopman").block.Config(width=m, heads=h, kv_heads=g, head_width=d)
    x, none = make(np.asarray(_draw("x", b, i, m))), make(np.zeros((b, g, 0, d)))
    params = pointer.init(config, seed=7, like=x, layer=0)
    equations.active(pointer).extend(params, KeysAndValues(none, none), x, Context(causal=True))
