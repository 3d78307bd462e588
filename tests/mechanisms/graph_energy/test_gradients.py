"""Gradients of what no designed case has: starts off by a jitter, a mu of each node, gradients straight through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.mechanisms.graph_energy import core
from tests.mechanisms.graph_energy.calls import (
    STATES,
    B,
    E,
    H,
    check_gradients,
    check_loops,
    draw,
    forward,
    kept,
    qkv,
)

N = 5


def numbers_of(state: str) -> dict[str, Any]:
    """Numbers for each head, and a tau that empties few rows."""
    per_head = {name: np.abs(draw(name, H)) * size for name, size in (("mu", 1.0), ("kappa", 0.5))}
    tau = {"token": 0.45, "prefix": 0.45, "query": 0.05, "feature": 0.2}[state]
    return {**per_head, "step": np.asarray(0.07), "tau": np.full((H,), tau), "scale": np.asarray(0.6)}


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
