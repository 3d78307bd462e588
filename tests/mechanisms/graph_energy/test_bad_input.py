"""What does not fit raises, and says which argument, what it got and what it needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context
from refattn.mechanisms.graph_energy import Heun, Min, Soft, core
from refattn.mechanisms.graph_energy.layer import hierarchy
from tests.mechanisms.graph_energy.calls import H, N, draw, forward, kept, qkv, run

GOOD = ra.graph_energy.sparse_graph(np.where(kept("edges", N, N, keep=0.4), draw("weights", N, N), 0.0))


def graph(**changes: Any) -> dict[str, Any]:
    """A sparse graph of which something is another."""
    return {"graph": dataclasses.replace(GOOD, **changes)}


KEYS: dict[str, Any] = {"over": "keys"}
CUBES: dict[str, Any] = {"coupling": "polynomial"}
PROXIMAL: dict[str, Any] = {"kind": "proximal"}
CAUSAL: dict[str, Any] = {"causal": True}

WRONG: dict[str, dict[str, Any]] = {
    "steps: got -1, needs a whole number of at least 0": {"steps": -1},
    "steps: got 1000000000, needs at most 1000000": {"steps": 10**9},
    "step: got 0.0, needs a number above 0": {"step": 0.0},
    "step: got -1.0, needs a number above 0": {"step": -1.0},
    "tau: got -0.1, needs a number at least 0": {"tau": -0.1},
    "(?s)tau: got .*, needs a number at least 0": {"tau": np.array([0.1, 0.2, -0.1, 0.3])},
    r"mu: got shape \(5,\), needs a number or an array \(4,\)": {"mu": np.ones(H + 1)},
    "kappa: got dtype int64, needs a floating one": {"kappa": np.ones(H, int)},
    "kappa: got a number that is not finite": {"kappa": np.full(H, np.nan)},
    "threshold: got 'straight_through' in .* but soft has": {"threshold": "soft(straight_through=True)"},
    'implementation: got "products" with the coupling tanh': {"coupling": "tanh", "implementation": "products"},
    'graph: got "min" with causal scores': {"state": "query", "symmetrise": "min", **CAUSAL},
    # integrators
    'stop_force: got a number with causal scores and state="token"': {"stop_force": 0.1, **CAUSAL},
    "stop_force: got -0.1, needs a number at least 0": {"stop_force": -0.1},
    'graph: got "none", which has no energy': {"stop_level": 0.1, "symmetrise": "none"},
    "checkpoint: got 0, needs a whole number of at least 1": {"checkpoint": 0},
    # a threshold after every step
    'integrator: got "heun" with threshold="proximal", needs "euler"': {"integrator": "heun", **PROXIMAL},
    'adjoint: got "implicit" with threshold="proximal"': {"adjoint": "implicit", **PROXIMAL},
    'stop_force: got a number with threshold="proximal", needs None': {"stop_force": 0.1, **PROXIMAL},
    # links over keys, and starts
    "graph: got links over keys with causal scores": {**CAUSAL, **KEYS},
    'graph: got links over keys with state="feature"': {"state": "feature", **KEYS},
    'start: got None with links over keys and state="token"': KEYS,
    'graph: got links over keys with state="prefix"': {"state": "prefix", **KEYS},
    'graph: got "causal_mirror" over keys': {"state": "query", "symmetrise": "causal_mirror", **KEYS},
    'start: got an array with state="query"': {"state": "query", "start": np.zeros(N)},
    r"start: got shape \(3,\), needs one that broadcasts to \(2, 4, 7\)": {"start": np.zeros(3)},
    r"jitter: got shape \(7, 2\), needs one that broadcasts to \(2, 4, 7, 1\)": {"jitter": np.zeros((N, 2))},
    r"bias: got shape \(3,\), needs one that broadcasts to": {"bias": np.zeros(3)},
    # polynomials
    "coupling: got 'polynomial'; .*coefficients": CUBES,
    r"coefficients: got shape \(1, 2\)": {"coefficients": np.ones((1, 2)), **CUBES},
    r"coefficients: got shape \(0,\)": {"coefficients": np.ones(0), **CUBES},
    "coefficients: got dtype int64": {"coefficients": np.ones(2, int), **CUBES},
    "coefficients: got a number that is not": {"coefficients": (1.0, np.inf), **CUBES},
    # graphs that are given
    "graph: got dtype int64, needs bool or a floating one": {"graph": np.zeros((N, N), int)},
    r"graph: got shape \(3, 7\), needs \(2, 4, 7, 7\)": {"graph": np.zeros((3, N))},
    "only for graphs with detailed bal": {"graph": draw("weights", N, N), "stop_level": 0.1},
    'adjoint: got "implicit" with a sparse graph': {"graph": GOOD, "adjoint": "implicit"},
    'implementation: got "dense" with a sparse graph': {"graph": GOOD, "implementation": "dense"},
    "mask: got one with a sparse graph": {"graph": GOOD, "mask": np.ones((N, N), bool)},
    "graph.indices: got a later token": {"graph": GOOD, "step": 0.1, **CAUSAL},
    r"graph.shape: got \(3, 3\), needs \(7, 7\)": graph(shape=(3, 3)),
    "graph.indptr: needs numbers that": graph(indptr=GOOD.indptr[::-1]),
    "graph.indices: got one that is no": graph(indices=GOOD.indices + 7),
    "graph.indices: got dtype float64": graph(indices=GOOD.data),
    "graph.indices: got shape": graph(data=GOOD.data[1:]),
    "graph.data: got NoneType": graph(data=None),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options(message: str) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        run(**WRONG[message])


WRONG_BLOCKS: dict[str, dict[str, Any]] = {
    "steps: got 0, needs a whole number of at least 1": {"steps": 0},
    "step: got None with coupling='sinh', needs a number": {"coupling": "sinh"},
    "step: got None with intrinsic='double_well', needs a number": {"intrinsic": "double_well"},
    "step: got 0.0, needs a finite number above 0": {"step": 0.0},
    "classes: got 0, needs a whole number of at least 1": {"classes": 0, "step": 0.1},
    "step: got None with classes, needs a number, or learn_step": {"classes": 2},
    "step: got None with coupling='polynomial.*, needs a number, or": {"coupling": "polynomial(coefficients=(1.0,))"},
    'classes: got 2 with intrinsic="none", which has no mu': {"classes": 2, "intrinsic": "none"},
    "graph: got ndarray, needs the links of a block": {"graph": np.ones((6, 6))},
    "levels: got 0, needs a whole number of at least 1": {"levels": 0},
    "window: got 3 without levels, needs levels": {"window": 3},
    "stride: got 1, needs a whole number of at least 2": {"levels": 2, "stride": 1},
    'levels: got 2 with state="query", which levels do not have': {"levels": 2, "state": "query"},
    'levels: got 2 with state="feature", which levels do not have': {"levels": 2, "state": "feature"},
    "levels: got 2 with jitter=0.1, which levels do not have": {"levels": 2, "jitter": 0.1},
    'levels: got 2 with regulariser="gini", which levels do not have': {"levels": 2, "regulariser": "gini"},
    "levels: got 2 with graph=.*, which levels do not have": {"levels": 2, "graph": "kernel(over='keys')"},
    "regulariser: got 'sharpness', needs one of entropy, gini, size": {"regulariser": "sharpness"},
    'regulariser: got "gini" with state="feature"': {"regulariser": "gini", "state": "feature"},
    'learn_tau: got True with threshold="hard", whose tau has no gradient': {"learn_tau": True},
    'tau: got None with learn_tau and state="query"': {"learn_tau": True, "threshold": "soft", "state": "query"},
    "step: got None with graph=.*, whose degrees have no bound": {"learn_step": True, "graph": "mean"},
}


@pytest.mark.parametrize("message", WRONG_BLOCKS)
def test_a_wrong_configuration_of_the_block(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ra.mechanism("graph_energy").block.Config(**{"width": 8, "heads": 2, **WRONG_BLOCKS[message]})


WRONG_LEVELS: dict[str, dict[str, Any]] = {
    "stride: got 1, needs a whole number of at least 2": {"stride": 1},
    "levels: got 0, needs a whole number of at least 1": {"levels": 0},
    "window: got 0, needs a whole number of at least 1": {"window": 0},
    'state: got "query" with levels, needs "token" or "prefix"': {"state": "query"},
    "start: got an option that a hierarchy does not take": {"start": 0.5},
    r"level_logits: got shape \(2,\), needs \(3,\)": {"level_logits": np.zeros(2)},
    r"key_mask: got shape \(2, 3\), needs \(2, 7\)": {"key_mask": np.ones((2, 3), bool)},
    "key_mask: got dtype float64, needs bool": {"key_mask": np.ones((2, 7))},
    'threshold: got empty="error" with levels': {"threshold": "hard(empty='error')"},
    'graph: got "kernel" with causal scores': {"causal": True, "graph": "kernel"},
}


@pytest.mark.parametrize("message", WRONG_LEVELS)
def test_levels_that_do_not_fit(message: str) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        hierarchy.forward(*qkv(), **WRONG_LEVELS[message])


WRONG_CONTEXTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "context.memory was given to a block with links over tokens": ({}, {"memory": np.ones((2, 5, 8))}),
    "classes: got some, needs context.positions": ({"classes": 2}, {}),
    r"context.positions: got shape \(2, 5\) with classes, needs": (
        {"classes": 2},
        {"positions": np.zeros((2, 5), int)},
    ),
    "context.positions was given to a block without classes": ({}, {"positions": np.zeros(5, int)}),
    r"context.memory: got shape \(2, 5, 7\), needs \(2, keys, 8\)": (KEYS, {"memory": np.ones((2, 5, 7))}),
    "context.memory_mask was given without context.memory": (KEYS, {"memory_mask": np.ones((2, 5), bool)}),
    "context.key_mask was given with context.memory": (
        KEYS,
        {"memory": np.ones((2, 5, 8)), "key_mask": np.ones((2, 5), bool)},
    ),
    r"context.memory_mask: got shape \(2, 4\)": (
        KEYS,
        {"memory": np.ones((2, 5, 8)), "memory_mask": np.ones((2, 4), bool)},
    ),
    "graph: got links over keys with causal scores": (KEYS, CAUSAL),
    'jitter: got 0.1 without draws, needs "start" of context.draws': ({"jitter": 0.1}, {}),
    "context.draws: got start with jitter=0.0, needs none": ({}, {"draws": {"start": np.zeros((2, 2, 5, 1))}}),
}


@pytest.mark.parametrize("message", WRONG_CONTEXTS)
def test_a_context_that_does_not_fit_the_block(message: str) -> None:
    config, context = WRONG_CONTEXTS[message]
    config = {"graph": "kernel(over='keys')"} if config is KEYS else config
    block, x = ra.mechanism("graph_energy").block, draw("x", 2, 5, 8)
    params = block.init(block.Config(width=8, heads=2, step=0.1, **config), seed=1, like=x)
    with pytest.raises((ValueError, IndexError), match=message):
        block.forward(params, block.start(params, x, Context()), Context(**context))


@pytest.mark.parametrize(("name", "value"), [("mu", -1.0), ("kappa", np.array([1.0, 1.0, -0.1, 1.0]))])
def test_forces_of_the_other_sign_are_warned_of(name: str, value: Any) -> None:
    with pytest.warns(UserWarning, match=f"(?s){name}: got .* may diverge"):
        run(step=0.01, **{name: value})


def test_scores_that_diverge() -> None:
    message = "the scores diverged at step [0-9]+: reduce step, which is 30.0"
    with np.errstate(all="ignore"), pytest.warns(UserWarning), pytest.raises(FloatingPointError, match=message):
        run(intrinsic="double_well", step=30.0, steps=40)


@pytest.mark.parametrize("stop", ["stop_force=1e-6", "stop_plateau=1e-9", "stop_level=-1.0"])
def test_links_that_are_nan_are_no_rest(stop: str) -> None:
    q, k, v = qkv()
    with np.errstate(all="ignore"):
        out, _ = forward(np.nan * q, k, v, state="feature", step=0.2, integrator=f"euler({stop})")
    assert np.isnan(out).all()


@pytest.mark.parametrize("integrator", ["euler(adjoint='implicit')", "rk4"])
@pytest.mark.parametrize(("name", "state"), [("q", "token"), ("q", "feature"), ("v", "feature")])
def test_every_integrator_lets_nan_through(integrator: str, name: str, state: str) -> None:
    """NaN is where steps of Euler have it, and elsewhere are the bits of a call without it."""
    arrays = dict(zip("qkv", (x.copy() for x in qkv()), strict=True))
    more: dict[str, Any] = {"state": state, "step": 0.2, "steps": 60}
    expected, known = forward(*arrays.values(), integrator=integrator, **more)
    exact = core.backward(known, np.ones_like(expected))
    arrays[name][0, 0, 1, 0] = np.nan
    with np.errstate(all="ignore"):
        explicit, _ = forward(*arrays.values(), **more)
        out, saved = forward(*arrays.values(), integrator=integrator, **more)
        d = core.backward(saved, np.ones_like(out))
    nan = np.isnan(explicit)
    assert nan[0, 0].any() and not nan[1].any()
    np.testing.assert_array_equal(np.isnan(out), nan)
    np.testing.assert_array_equal(out[1], expected[1])
    np.testing.assert_array_equal(d["q"][1], exact["q"][1])
    assert np.isnan(d[name][0, 0]).any()


def test_nan_hides_no_divergence() -> None:
    """One sequence has NaN, the other one diverges without: an error, as it is alone."""
    q, k, v = (x.copy() for x in qkv())
    q[0, :, 1, 0] = np.nan
    options: dict[str, Any] = {"state": "feature", "coupling": "cubic", "step": 3.0, "steps": 12}
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="the scores diverged"):
        forward(q, k, 4.0 * v, **options)


def test_wrong_gradients() -> None:
    out, saved = run()
    with pytest.raises(ValueError, match=r"d_weights: got shape"):
        core.backward(saved, out, out)
    _, feature = run(state="feature")
    with pytest.raises(ValueError, match='d_weights was given, but state="feature" has no weights, and a'):
        core.backward(feature, out, draw("d_weights", 2, 4, 7, 7))


def test_kinds_are_objects_names_or_text() -> None:
    """The same call, three ways; and numbers of a kind that it does not have."""
    texts: dict[str, Any] = {"threshold": "soft(tau=0.1, empty='zero')", "integrator": "heun(checkpoint=2)"}
    kinds: dict[str, Any] = {"threshold": Soft(tau=0.1, empty="zero"), "integrator": Heun(checkpoint=2), "graph": Min()}
    assert np.array_equal(core.forward(*qkv(), **texts, graph="min")[0], core.forward(*qkv(), **kinds)[0])
    for wrong in ({"threshold": None}, {"integrator": 3}, {"graph": "kernel(over=1)"}, {"threshold": "soft(by=1)"}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))}: got|over: got"):
            core.forward(*qkv(), **wrong)
    with pytest.raises(TypeError, match="tables: is no argument of graph_energy.forward"):
        core.forward(*qkv(), tables=1)  # type: ignore[call-arg]
