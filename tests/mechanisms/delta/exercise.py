"""Runs of the linear recurrences that together reach every line with a tag, for tests/test_equation_ids.py."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from refattn import Context, equations, mechanism, philox
from tests.mechanisms.exercises import Make, Run, draw, step


def runs(sizes: Mapping[str, int], make: Make, implementation: str) -> list[Run]:
    """Return (size by axis letter, call) for calls of the core in `implementation` and of the block, forward and
    backward.

    `sizes` are all different; `make` turns a NumPy array into one of the library that the calls shall use. Key heads
    divide state heads, and chunks of i tokens, which are j too, are l times as long as n.
    """
    heads = {**sizes, "h": 12, "g": 6, "r": 2, "f": 3}
    chunks = {**heads, "i": 3, "j": 3, "l": 5, "n": 15}
    found: list[Run] = [
        (axes, partial(_core, axes, kind, rule=rule, make=make))
        for axes, kind in ((heads, implementation), (chunks, "chunked"))
        for rule in GATES
    ]
    single = {**heads, "b": 1}
    found.append(
        (single, partial(_core, single, implementation, rule="momentum", lengths=[4, 0, single["n"] - 4], make=make))
    )
    block, own = partial(_block, make=make), {**sizes, "f": sizes["g"]}
    found += [(own, partial(block, own, options=options)) for options in BLOCKS]
    return found


GATES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "gated_delta": ("beta", "log_decay"),
    "kda": ("beta", "channels"),
    "momentum": ("beta", "log_decay", "log_momentum", "step"),
    "momentum alone": ("beta", "log_momentum"),
}

BLOCKS: tuple[dict[str, Any], ...] = (
    {"rule": "linear", "activation": "none", "out_norm": False, "residual": False},
    {"rule": "gated_delta", "decay": "channel", "decay_map": "bounded", "conv": 3, "bias": True, "gate": "sigmoid"},
    {"rule": "momentum", "gate": "silu"},
)


def _core(
    sizes: Mapping[str, int], implementation: str, *, make: Make, rule: str, lengths: list[int] | None = None
) -> None:
    b, h, f, g, n, d, e = (sizes[letter] for letter in "bhfgnde")
    record = mechanism("delta")
    assert record.core is not None
    q, k, v = make(draw("q", b, h, n, d)), make(draw("k", b, f, n, d)), make(draw("v", b, g, n, e))
    given = {gate: make(-0.5 * philox.uniform((b, g, n), seed=7, purpose=gate)) for gate in GATES[rule]}
    if "channels" in given:
        given["log_decay"] = make(-0.5 * philox.uniform((b, g, n, d), seed=7, purpose="channels"))
        del given["channels"]
    options: dict[str, Any] = {
        "qk_norm": rule in ("kda", "momentum"),
        "lengths": lengths,
        "implementation": implementation,
    }
    options["chunk"] = sizes["i"]
    options["key_mask"] = make(philox.uniform((b, n), seed=7, purpose="mask") < 0.8)
    # Under a hook, even one that changes nothing, the chunked implementation takes all heads at once, and computes an
    # inverse.
    with equations.apply(lambda id, name, value: value) if implementation == "chunked" else nullcontext():
        _, saved = record.core.forward(q, k, v, **given, **options)
        record.core.backward(saved, make(draw("d_out", b, h, n, e)))


def _block(sizes: Mapping[str, int], *, make: Make, options: dict[str, Any]) -> None:
    b, h, g, n, d, e, m = (sizes[letter] for letter in "bhgndem")
    x = make(np.asarray(draw("x", b, n, m)))
    context = Context(causal=True, key_mask=make(philox.uniform((b, n), seed=7, purpose="padding") < 0.8))
    step("delta", x, context, make, width=m, heads=h, kv_heads=g, head_width=d, value_width=e, **options)
