"""Gradients of every combination of options: by hand against the autograd of torch, and against scalar loops."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest

from refattn import philox
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.implementations import tiled
from tests.mechanisms.graph_energy.calls import (
    COUPLINGS,
    STATES,
    B,
    D,
    E,
    G,
    H,
    check_gradients,
    check_loops,
    draw,
    forward,
    kept,
    qkv,
)

GRAPHS = (
    (False, "kernel"),
    (False, "mean"),
    (False, "min"),
    (False, "none"),
    (True, None),
    ("kk", "kernel"),
    ("kk", "min"),
)
N, ROWS = 5, 4
ALL = [
    combination
    for combination in itertools.product(
        STATES,
        COUPLINGS,
        ("euler", "heun", "rk4"),
        GRAPHS,
        ("hard", "soft", "proximal"),
        ("anchor", "none", "double_well"),
    )
    if (combination[4] != "proximal" or combination[2] == "euler")
    and (combination[3][0] != "kk" or combination[0] not in ("prefix", "feature"))
]
"""Every combination of state, coupling, integrator, graph, threshold and intrinsic force, where they go together: 2394.

The graphs are causal or not, or "kk": of keys with keys, which other queries attend.
"""

FEW = [ALL[int(n)] for n in philox.permutation(len(ALL), seed=0, purpose="graph_energy.combinations")[:60]]


def options_of(combination: Any) -> dict[str, Any]:
    state, coupling, integrator, (causal, symmetrise), kind, intrinsic = combination
    names: dict[str, Any] = {"state": state, "coupling": coupling, "integrator": integrator, "intrinsic": intrinsic}
    over_keys = {"over": "keys"} if causal == "kk" else {"causal": causal}
    return names | over_keys | {"symmetrise": symmetrise, "kind": kind, "steps": 3}


def numbers_of(state: str) -> dict[str, Any]:
    """Numbers for each head, and a tau that empties few rows."""
    per_head = {name: np.abs(draw(name, H)) * size for name, size in (("mu", 1.0), ("kappa", 0.5))}
    tau = {"token": 0.45, "prefix": 0.45, "query": 0.05, "feature": 0.2}[state]
    return {**per_head, "step": np.asarray(0.07), "tau": np.full((H,), tau), "scale": np.asarray(0.6)}


def check(combination: Any, implementation: str = "dense") -> None:
    state, options = combination[0], options_of(combination)
    arrays, rows = dict(zip("qkv", qkv(N), strict=True)) | numbers_of(state), N
    if "over" in options:
        rows = ROWS
        arrays["q"] = arrays["q"][:, :, :rows]
        arrays |= {"start": draw("start", H, N)} if state == "token" else {}
    check_gradients(arrays, (implementation,), **options, mask=kept("mask", B, 1, rows, N, keep=0.8))


@pytest.mark.parametrize("combination", FEW, ids=str)
def test_gradients_are_those_of_autograd(combination: Any) -> None:
    check(combination)


@pytest.mark.slow
def test_gradients_of_every_combination_are_those_of_autograd() -> None:
    sample = float(os.environ.get("REFATTN_SLOW_SAMPLE", "0"))
    for each in ALL[:: max(1, len(ALL) // int(100 * sample))] if sample else ALL:
        check(each)


OTHERS = [(c, "products") for c in FEW if c[1] in ("sin", "identity", "cubic")] + [(c, "tiled") for c in FEW]


@pytest.mark.parametrize(("combination", "implementation"), OTHERS, ids=str)
def test_gradients_of_other_implementations(
    combination: Any, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "ELEMENTS", 2 * N)  # tiles of one or two rows
    check(combination, implementation)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("state", ["token", "query", "feature"])
@pytest.mark.parametrize("empty", ["argmax", "dense", "zero"])
def test_loops_agree_where_the_threshold_empties_rows(empty: str, state: str, kind: str) -> None:
    """Also with the gradient that passes the threshold by, which is no derivative and has no third way."""
    tau = {"token": 0.6, "query": 0.3, "feature": 1.0}[state]
    options: dict[str, Any] = {"state": state, "empty": empty, "kind": kind, "tau": tau, "steps": 3, "step": 0.1}
    options |= {"straight_through": True} if kind == "hard" else {}
    options |= {"mask": kept("mask", B, H, N, N, keep=0.6)}
    assert state == "feature" or not np.all(forward(*qkv(N), **options)[1].inner.readout.filled)
    check_loops(options, N)


OF_NODES = {"steps": 2, "mu": np.abs(draw("mu", H, N)), "mask": kept("mask", B, H, N, N, keep=0.6)}
JITTER: dict[str, Any] = {"steps": 3, "step": 0.1, "kind": "soft", "tau": 0.05, "mu": 0.8, "kappa": 0.6}


@pytest.mark.parametrize(
    "options",
    [
        OF_NODES,
        {**OF_NODES, "intrinsic": "double_well", "integrator": "heun", "coupling": "tanh"},
        {**OF_NODES, "state": "query", "symmetrise": "min", "integrator": "rk4"},
        {**OF_NODES, "state": "feature", "kind": "proximal", "tau": 0.1},
        {**OF_NODES, "over": "keys", "start": draw("start", N), "intrinsic": "none"},
        {**JITTER, "jitter": draw("jitter", H, N, N), "state": "query", "symmetrise": "min", "integrator": "heun"},
        {**JITTER, "jitter": draw("jitter", H, N, E), "state": "feature", "kind": "proximal"},
        {**JITTER, "jitter": draw("jitter", H, N, 1), "integrator": "rk4", "coupling": "tanh"},
    ],
)
def test_loops_agree_where_nodes_differ_in_mu_or_jitter(options: dict[str, Any]) -> None:
    check_loops(options, N)


@pytest.mark.parametrize(
    "options",
    [
        *({"state": state, "kind": kind} for state in STATES for kind in ("soft", "proximal")),
        {"jitter": 0.3 * draw("jitter", H, N, 1), "checkpoint": 2},
        {"jitter": 0.3 * draw("jitter", H, N, N), "state": "query", "symmetrise": "min", "integrator": "heun"},
    ],
)
def test_gradients_where_nodes_differ_in_mu_or_jitter(options: dict[str, Any]) -> None:
    arrays = dict(zip("qkv", qkv(N), strict=True)) | {"mu": np.abs(draw("mu", H, N)), "tau": np.full((H,), 0.05)}
    check_gradients(arrays, **{"kind": "soft", "steps": 3, "step": 0.2, **options})


@pytest.mark.parametrize("symmetrise", ["kernel", "mean", "min", "none"])
@pytest.mark.parametrize("state", ["token", "query"])
def test_gradients_over_keys(state: str, symmetrise: str) -> None:
    keys = 8
    arrays = {"q": draw("q", B, H, N, D), "k": draw("k", B, G, keys, D), "v": draw("v", B, G, keys, E)}
    arrays |= numbers_of(state) | {"bias": draw("bias", H, 1, keys), "tau": np.full((H,), 0.1)}
    arrays |= {"start": np.abs(draw("start", H, keys))} if state == "token" else {}
    mask = kept("mask", B, H, N, keys)
    mask[..., 3] = False
    options: dict[str, Any] = {"state": state, "symmetrise": symmetrise, "steps": 2, "integrator": "rk4"}
    check_gradients(arrays, ("dense", "products", "tiled"), **options, kind="soft", mask=mask, over="keys")


def test_the_gradient_passes_a_hard_threshold_by() -> None:
    """It is that of a threshold of 0, at the weights that the threshold leaves: a dropped score has one, too."""
    q, k, v = qkv(N)
    found = {}
    for through in (False, True):
        out, saved = forward(q, k, v, tau=0.5, straight_through=through)
        found[through] = core.backward(saved, draw("d_out", *out.shape)), saved.inner.readout
    dropped = (found[True][1].kept == 0.0) & (found[True][1].x > 0.0)
    assert np.any(dropped)
    assert not np.allclose(found[False][0]["q"], found[True][0]["q"])


def test_a_second_backward_has_the_same_bits_and_the_gradient_is_linear() -> None:
    q, k, v = qkv()
    out, saved = forward(q, k, v, causal=True)
    d = draw("d_out", *out.shape)
    once, twice, double = core.backward(saved, d), core.backward(saved, d), core.backward(saved, 2.0 * d)
    for name, x in once.items():
        assert np.array_equal(x, twice[name]) and np.array_equal(2.0 * x, double[name])


@pytest.mark.parametrize("options", [{"state": "token"}, {"state": "query"}, {"state": "feature"}, {"causal": True}])
def test_float32_is_computed_in_float32(options: dict[str, Any]) -> None:
    q, k, v = (x.astype(np.float32) for x in qkv())
    numbers: dict[str, Any] = {
        "mu": np.float32(1.0),
        "kappa": np.asarray(1.0),
        "step": np.full((H,), 0.2, np.float64),
        "tau": 0.01,
    }
    out, saved = forward(q, k, v, mask=kept("mask", N + 2, N + 2), **numbers, **options)
    gradients = core.backward(saved, out)
    assert {x.dtype for x in (out, saved.scores, saved.graph, *gradients.values())} == {np.dtype(np.float32)}
    wide_q, wide_k, wide_v = (x.astype(np.float64) for x in (q, k, v))
    exact, _ = forward(wide_q, wide_k, wide_v, mask=kept("mask", N + 2, N + 2), **numbers, **options)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5)


def test_float16_is_computed_in_float32() -> None:
    q, k, v = (x.astype(np.float16) for x in qkv())
    out, saved = forward(q, k, v)
    exact, _ = forward(*(x.astype(np.float32) for x in (q, k, v)))
    assert out.dtype == np.float16 and saved.scores.dtype == np.float32
    assert np.array_equal(out, exact.astype(np.float16))
    assert {x.dtype for x in core.backward(saved, out).values()} == {np.dtype(np.float16)}
