"""Runs of graph energy attention that together reach every line with a tag, for tests/test_equation_ids.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from refattn import Context, equations, mechanism
from refattn.mechanisms.graph_energy import Polynomial, Start
from refattn.mechanisms.graph_energy.layer import hierarchy
from tests.mechanisms.exercises import Make, Run, draw, hidden, step


def runs(sizes: Mapping[str, int], make: Make, implementation: str) -> list[Run]:
    """Return (size by axis letter, call) for calls of the core in `implementation` and of the block, forward and
    backward.

    `sizes` are all different, but for queries and keys, which are the same tokens; `make` turns a NumPy array into one
    of the library that the calls shall use.
    """
    token, cross = {**sizes, "j": sizes["i"], "c": 1}, {**sizes, "c": 1}
    query, feature = {**token, "c": sizes["i"]}, {**token, "c": sizes["e"]}
    links, mask = make(hidden("graph", token["i"], token["i"])), make(hidden("m", 1, sizes["j"]))
    full: dict[str, Any] = {"full": True}
    calls: list[tuple[dict[str, int], str, dict[str, Any]]] = [
        (token, "token", full),
        (token, "token", {}),
        (token, "token", {"threshold": "hard(tau=0.99, empty='dense')"}),
        (token, "token", {**full, "graph": "kernel", "causal": False}),
        (query, "query", {**full, "graph": "causal_mirror"}),
        (query, "query", {"integrator": "rk4", "threshold": "soft"}),
        (query, "query", {"integrator": "heun(stop_force=1e-3)", "steps": 2}),
        (token, "token", {"graph": links, "step": 0.1}),
        (token, "token", {"integrator": "euler(checkpoint=2)", "steps": 3}),
        (token, "token", {"threshold": "proximal"}),
        (cross, "token", {"graph": "mean(over='keys')", "step": 0.1}),
        (cross, "token", {"graph": "kernel(over='keys')", "mask": mask}),
        (feature, "feature", full),
        (feature, "feature", {"threshold": "soft(tau=0.1)"}),
    ]
    cubes = {"coupling": "polynomial(coefficients=(1.0, 0.0))", "step": 0.1, "classes": sizes["p"]}
    learned = {"graph": "kernel(over='keys')", "threshold": "soft", "learn_tau": True, "learn_step": True}
    blocks: list[tuple[dict[str, int], dict[str, Any]]] = [(token, full), (token, {}), (token, cubes), (cross, learned)]
    levels = {**token, "e": sizes["d"]}
    return [
        *((of, partial(_core, of, make=make, implementation=implementation, state=s, **o)) for of, s, o in calls),
        *((of, partial(_block, of, make=make, **options)) for of, options in blocks),
        (levels, partial(_levels, levels, make=make)),
    ]


def _levels(sizes: Mapping[str, int], *, make: Make) -> None:
    """One level: what its stage runs in the core has sizes of its own where there are more."""
    b, h, g, n, d = (sizes[letter] for letter in "bhgid")
    q, k, v = make(draw("q", b, h, n, d)), make(draw("k", b, g, n, d)), make(draw("v", b, g, n, d))
    options = {"level_logits": make(draw("logits", 1)), "key_mask": make(hidden("padding", b, n)), "levels": 1}
    options |= {
        "mask": make(hidden("mask", b, h, n, n)),
        "mu": make(abs(draw("mu", h, n))),
        "bias": make(draw("bias", h, 1, n)),
    }
    _, saved = equations.active(hierarchy).forward(q, k, v, **options)
    equations.active(hierarchy).backward(saved, make(draw("d_out", b, h, n, d)))


def _core(sizes: Mapping[str, int], *, make: Make, implementation: str, full: bool = False, **options: Any) -> None:
    b, h, g, n, keys, d, e = (sizes[letter] for letter in "bhgijde")
    record = mechanism("graph_energy")
    assert record.core is not None
    if full:
        more: dict[str, Any] = {"mask": make(hidden("mask", b, h, n, n)), "causal": True, "scale": 0.3, "step": 0.01}
        more |= {"mu": make(abs(draw("mu", h))), "kappa": 0.5, "steps": 3, "integrator": "heun", "graph": "none"}
        more |= {"coupling": Polynomial(make(0.1 * draw("coefficients", 3))), "bias": make(draw("bias", h, 1, n))}
        at = make(draw("start", h, n)) if sizes["c"] == 1 else None
        more |= {"start": Start(at=at, jitter=make(0.01 * draw("jitter", h, n, 1))), "intrinsic": "double_well"}
        more |= {"threshold": "hard(tau=0.2, straight_through=True, signed=True, empty='zero')"}
        options = more | options
        assert set(record.defaults) == {*options, "implementation"}
    elif implementation == "products":
        options = {**options, "coupling": "sin"}  # which products can compute
    if keys != n:
        options = {**options, "start": make(draw("start", h, keys))}
    q, k, v = make(draw("q", b, h, n, d)), make(draw("k", b, g, keys, d)), make(draw("v", b, g, keys, e))
    _, saved = record.core.forward(q, k, v, implementation=implementation, **options)
    record.core.backward(saved, make(draw("d_out", b, h, n, e)))


def _block(
    sizes: Mapping[str, int], *, make: Make, full: bool = False, classes: int | None = None, **more: Any
) -> None:
    b, h, g, n, keys, d, e, m = (sizes[letter] for letter in "bhgijdem")
    options: dict[str, Any] = {"bias": True} if full else {"residual": False}
    options |= {"classes": classes, **more}
    x = make(np.asarray(draw("x", b, n, m)))
    context = Context()
    if classes is not None:
        context = Context(positions=make(np.arange(keys) % classes))
    if full:
        context = Context(mask=make(hidden("mask", b, h, n, n)), key_mask=make(hidden("padding", b, n)), causal=True)
    if keys != n:
        memory = {"memory": make(draw("memory", b, keys, m)), "memory_mask": make(hidden("memory", b, keys))}
        context = Context(mask=make(hidden("mask", n, keys)), **memory)
    step("graph_energy", x, context, make, width=m, heads=h, kv_heads=g, head_width=d, value_width=e, **options)
