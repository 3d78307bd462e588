"""What does not fit raises, and says which argument, what it got and what it needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import Context
from refattn.mechanisms.graph_energy import Heun, Min, Soft, core
from refattn.mechanisms.graph_energy.options import RENAMED
from tests.mechanisms.graph_energy.calls import H, draw, forward, qkv, run


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"state": "node"}, ValueError, "state: got 'node', needs one of token, query, feature"),
        ({"coupling": "relu"}, ValueError, "coupling: got 'relu', needs one of sin, tanh, identity"),
        ({"intrinsic": None}, ValueError, "intrinsic: got None, needs one of anchor, none, double_well"),
        ({"integrator": "leapfrog"}, ValueError, "integrator: got 'leapfrog', needs one of euler, heun, rk4"),
        ({"graph": "max"}, ValueError, "graph: got 'max', needs one of kernel, mean, min, none"),
        ({"threshold": "firm"}, ValueError, "threshold: got 'firm', needs one of hard, soft"),
        ({"empty": "nan"}, ValueError, "empty: got 'nan', needs one of argmax, dense, zero, error"),
        ({"adjoint": "exact"}, ValueError, "adjoint: got 'exact', needs one of unroll, implicit"),
        (
            {"implementation": "sparse"},
            ValueError,
            "implementation: got 'sparse', needs one of auto, dense, products, tiled",
        ),
        ({"steps": -1}, ValueError, "steps: got -1, needs a whole number of at least 0"),
        ({"steps": 2.0}, TypeError, "steps: got 2.0, needs a whole number of at least 0"),
        ({"steps": 10**9}, ValueError, "steps: got 1000000000, needs at most 1000000"),
        ({"step": 0.0}, ValueError, "step: got 0.0, needs a number above 0"),
        ({"step": -1.0}, ValueError, "step: got -1.0, needs a number above 0"),
        ({"tau": -0.1}, ValueError, "tau: got -0.1, needs a number at least 0"),
        ({"tau": np.array([0.1, 0.2, -0.1, 0.3])}, ValueError, "(?s)tau: got .*, needs a number at least 0"),
        ({"mu": np.ones(H + 1)}, ValueError, r"mu: got shape \(5,\), needs a number or an array \(4,\)"),
        ({"kappa": np.ones(H, int)}, TypeError, "kappa: got dtype int64, needs a floating one"),
        ({"kappa": np.full(H, np.nan)}, ValueError, "kappa: got a number that is not finite"),
        ({"mu": float("inf")}, ValueError, "mu: got inf, needs a finite number"),
        ({"mu": "strong"}, TypeError, "mu: got 'strong', needs a finite number"),
        ({"signed": 1}, TypeError, "signed: got 1, needs true or false"),
        (
            {"threshold": "soft(straight_through=True)"},
            ValueError,
            "threshold: got 'straight_through' in .* but soft has",
        ),
        ({"mask": np.ones((7, 7))}, TypeError, "mask: got dtype float64, needs bool"),
        ({"mask": np.ones((3, 7), bool)}, ValueError, r"mask: got shape \(3, 7\)"),
        ({"causal": "left"}, ValueError, "causal: got 'left', needs True, False"),
        ({"step": None}, TypeError, r"step: got None, needs a number, or an array \(4,\)"),
        (
            {"coupling": "tanh", "implementation": "products"},
            ValueError,
            'implementation: got "products" with the coupling tanh',
        ),
        (
            {"state": "query", "causal": True, "symmetrise": "min"},
            ValueError,
            'graph: got "min" with causal scores',
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(**options)


def test_queries_and_keys_of_different_lengths() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="k: got 7 tokens and 5 in q, needs as many"):
        forward(q[:, :, :5], k, v)


@pytest.mark.parametrize(("name", "value"), [("mu", -1.0), ("kappa", np.array([1.0, 1.0, -0.1, 1.0]))])
def test_forces_of_the_other_sign_are_warned_of(name: str, value: Any) -> None:
    with pytest.warns(UserWarning, match=f"(?s){name}: got .* may diverge"):
        run(step=0.01, **{name: value})


def test_scores_that_diverge() -> None:
    message = "the scores diverged at step [0-9]+: reduce step, which is 30.0"
    with np.errstate(all="ignore"), pytest.warns(UserWarning), pytest.raises(FloatingPointError, match=message):
        run(intrinsic="double_well", step=30.0, steps=40)


def test_inputs_that_are_not_finite_propagate() -> None:
    q, k, v = (x.copy() for x in qkv())
    q[0, 0, 1, 0] = np.nan
    with np.errstate(all="ignore"):
        out, _ = forward(q, k, v)
    assert np.any(np.isnan(out[0, 0])) and np.all(np.isfinite(out[1]))


SOLVERS = (
    "rk45",
    "implicit_midpoint",
    "discrete_gradient",
    "discrete_gradient(adjoint='implicit')",
    "euler(adjoint='implicit')",
)


@pytest.mark.parametrize("stop", ["stop_force=1e-6", "stop_plateau=1e-9", "stop_level=-1.0"])
def test_links_that_are_nan_are_no_rest(stop: str) -> None:
    q, k, v = qkv()
    with np.errstate(all="ignore"):
        out, _ = forward(np.nan * q, k, v, state="feature", step=0.2, integrator=f"euler({stop})")
    assert np.isnan(out).all()


@pytest.mark.parametrize("integrator", SOLVERS)
@pytest.mark.parametrize(("name", "state"), [("q", "token"), ("q", "feature"), ("v", "feature")])
def test_every_solver_lets_nan_through(integrator: str, name: str, state: str) -> None:
    """NaN is where fixed explicit steps have it, and elsewhere are the bits of a call without it."""
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


@pytest.mark.parametrize("integrator", ["euler", "rk45"])
def test_nan_hides_no_divergence(integrator: str) -> None:
    """One sequence has NaN, the other one diverges without: an error, as it is alone."""
    q, k, v = (x.copy() for x in qkv())
    q[0, :, 1, 0] = np.nan
    options: dict[str, Any] = {"state": "feature", "coupling": "cubic", "step": 3.0, "steps": 12}
    with np.errstate(all="ignore"), pytest.raises(ArithmeticError, match="the scores diverged|max_nfe|shorter one"):
        forward(q, k, 4.0 * v, integrator=integrator, **options)


def test_a_step_whose_equation_is_singular_is_halved() -> None:
    """At x = 0 between two wells 1 - h mu / 2 is 0 for h = 2: the matrix of the midpoint rule has no inverse."""
    q, k, v = qkv(3)
    options: dict[str, Any] = {"intrinsic": "double_well", "kappa": 0.0, "step": 2.0, "steps": 1}
    options["start"] = 0.0 * q[..., 0]
    _, saved = forward(q, k, v, integrator="implicit_midpoint", **options)
    np.testing.assert_array_equal(saved.scores, 0.0)


def test_wrong_gradients() -> None:
    out, saved = run()
    with pytest.raises(ValueError, match=r"d_out: got shape \(2, 4, 7\), needs \(2, 4, 7, 5\)"):
        core.backward(saved, out[..., 0])
    with pytest.raises(ValueError, match=r"d_weights: got shape"):
        core.backward(saved, out, out)
    with pytest.raises(TypeError, match="saved: got NoneType, needs what forward returned"):
        core.backward(None, out)  # type: ignore[arg-type]
    _, feature = run(state="feature")
    with pytest.raises(ValueError, match='d_weights was given, but state="feature" has no weights, and a'):
        core.backward(feature, out, draw("d_weights", 2, 4, 7, 7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads: got 3, needs a divisor of the width 8, or a head_width"),
        ({"steps": 0}, "steps: got 0, needs a whole number of at least 1"),
        ({"kv_heads": 3}, "kv_heads: got 3, needs a divisor of the 2 heads"),
        ({"coupling": "sinh"}, "step: got None with coupling='sinh', needs a number"),
        ({"coupling": "math:nothing"}, "coupling: got 'math:nothing', needs MODULE:NAME of a Coupling"),
        ({"intrinsic": "double_well"}, "step: got None with intrinsic='double_well', needs a number"),
        (
            {"intrinsic": "nowhere:force"},
            "intrinsic: got 'nowhere:force', needs MODULE:NAME of an Intrinsic: No module",
        ),
        ({"step": 0.0}, "step: got 0.0, needs a finite number above 0"),
        ({"state": "node"}, "state: got 'node'"),
    ],
)
def test_a_wrong_configuration_of_the_block(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ra.mechanism("graph_energy").block.Config(**{"width": 8, "heads": 2, **changes})


def test_a_wrong_context_and_wrong_params_of_the_block() -> None:
    block = ra.mechanism("graph_energy").block
    x = draw("x", 2, 5, 8)
    params = block.init(block.Config(width=8, heads=2), like=x)
    state = block.start(params, x, Context())
    with pytest.raises(ValueError, match=r"context.key_mask: got shape \(2, 4\), needs \(2, 5\)"):
        block.forward(params, state, Context(key_mask=np.ones((2, 4), bool)))
    with pytest.raises(ValueError, match="context.memory was given"):
        block.forward(params, state, Context(memory=x))
    with pytest.raises(ValueError, match=r"x: got shape \(2, 5, 7\), needs \(batch, tokens, 8\)"):
        block.start(params, x[..., :7], Context())


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_option_says_what_it_is_called_now(name: str) -> None:
    given: dict[str, Any] = {name: None}
    with pytest.raises(TypeError, match=f"{name}: got an option of before, needs (thr|int|coup|gra|sta)"):
        core.forward(*qkv(), **given)


def test_kinds_are_objects_names_or_text() -> None:
    """The same call, three ways; and numbers of a kind that it does not have."""
    texts: dict[str, Any] = {"threshold": "soft(tau=0.1, empty='zero')", "integrator": "heun(checkpoint=2)"}
    kinds: dict[str, Any] = {"threshold": Soft(tau=0.1, empty="zero"), "integrator": Heun(checkpoint=2), "graph": Min()}
    assert np.array_equal(core.forward(*qkv(), **texts, graph="min")[0], core.forward(*qkv(), **kinds)[0])
    for wrong in ({"threshold": None}, {"integrator": 3}, {"graph": "kernel(over=1)"}, {"threshold": "soft(by=1)"}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))}: got|over: got"):
            core.forward(*qkv(), **wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tables'"):
        core.forward(*qkv(), tables=1)
