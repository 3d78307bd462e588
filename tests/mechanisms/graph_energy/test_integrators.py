"""Integrators whose steps are chosen, or solved for, and flows that stop: laws, gradients and bad input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.solvers import rk45
from refattn.mechanisms.graph_energy.system import weights_of
from tests.mechanisms.graph_energy.calls import STATES, SYMMETRIC, B, H, N, draw, flow_of, forward, kept, qkv, run
from tests.mechanisms.graph_energy.test_gradients import numbers_of

BOUNDED = ("sin", "tanh", "identity", "arctan", "sinh")
"""Couplings whose energy has a lower bound."""


# --- orders, energies, conservation


@pytest.mark.parametrize("accuracy", [1e-3, 1e-6, 1e-9])
def test_rk45_is_as_exact_as_it_is_asked_to_be(accuracy: float) -> None:
    graph, start = run()[1].graph, draw("start", B, H, N, 2)
    true, _ = flow_of(graph, start, integrator="rk4", step=0.01, steps=400)
    x, saved = flow_of(graph, start, integrator="rk45", step=0.5, steps=8, accuracy=accuracy)
    # A flow that contracts forgets errors; each of some ten steps errs by less than its accuracy times 1 + |x|.
    assert np.max(np.abs(x - true)) < 10.0 * accuracy
    factors = np.sum([step.factor for step in saved.steps], axis=0)
    np.testing.assert_allclose(factors, 8.0 * np.ones((B, H, 1, 2)), rtol=0, atol=1e-12)


def test_every_channel_has_steps_of_its_own() -> None:
    """rk45 and stopping: a head by itself gives the same bits."""
    q, k, v = qkv()
    for options in ({"integrator": "rk45"}, {"stop_force": 1e-3, "steps": 60}, {"integrator": "discrete_gradient"}):
        for state in STATES:
            out, saved = forward(q, k, v, state=state, **options)
            alone, other = forward(q[1:, 2:3], k[1:, 1:2], v[1:, 1:2], state=state, **options)
            np.testing.assert_allclose(out[1:, 2:3], alone, rtol=0, atol=1e-14)
            counts = ra.graph_energy.steps_taken(saved)
            assert np.array_equal(counts[1:, 2:3], ra.graph_energy.steps_taken(other))
            assert state == "token" or len(set(counts.ravel().tolist())) > 1 or "discrete" in str(options)


@pytest.mark.parametrize("symmetrise", SYMMETRIC)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("coupling", BOUNDED)
def test_energy_falls_with_steps_of_any_length(coupling: str, state: str, symmetrise: str) -> None:
    """By the square of the way, divided by the step: to rounding, relative to the energy."""
    for step in (0.1, 1.0, 20.0, 1000.0):
        options: dict[str, Any] = {"coupling": coupling, "state": state, "symmetrise": symmetrise, "step": step}
        _, saved = run(**options, integrator="discrete_gradient", steps=6)
        levels, pi = ra.graph_energy.energy(saved), weights_of(saved.inner.graph)
        for n, done in enumerate(saved.inner.flow.steps):
            way = saved.inner.flow.states[n + 1] - saved.inner.flow.states[n]
            lost = np.sum(pi * way * way / (step * done.factor), axis=(2, 3))
            size = 1.0 + np.abs(levels[..., n])
            assert np.all(np.abs(levels[..., n + 1] - levels[..., n] + lost) <= 1e-12 * size)


def test_energy_falls_in_wells() -> None:
    for step in (0.1, 3.0, 100.0):
        options: dict[str, Any] = {"intrinsic": "double_well", "mu": 2.0, "step": step, "steps": 8}
        _, saved = run(**options, integrator="discrete_gradient", state="feature")
        assert np.max(np.diff(ra.graph_energy.energy(saved), axis=-1)) <= 1e-12


def test_a_step_that_does_not_converge_is_halved() -> None:
    """Without a lower bound of the energy, an equation of a long step may have no solution near."""
    options: dict[str, Any] = {"state": "feature", "coupling": "cubic", "kappa": 0.3, "step": 3.0, "steps": 2}
    q, k, v = qkv()
    _, saved = forward(q, k, 2.0 * v, **options, integrator="discrete_gradient")
    factors = np.concatenate([np.ravel(step.factor) for step in saved.inner.flow.steps])
    assert np.min(factors) < 1.0 and np.max(np.diff(ra.graph_energy.energy(saved), axis=-1)) <= 1e-9
    message = "integrator: Newton's method does not converge for a step of 1e[+]?300, halved 10 times"
    with np.errstate(all="ignore"), pytest.raises(ArithmeticError, match=message):
        forward(q, k, 2.0 * v, **{**options, "step": 1e300}, integrator="discrete_gradient")


def test_a_quadratic_energy_makes_the_implicit_integrators_one() -> None:
    both = [run(coupling="identity", integrator=i, step=2.0)[0] for i in ("implicit_midpoint", "discrete_gradient")]
    np.testing.assert_allclose(both[0], both[1], rtol=0, atol=1e-14)


# --- gradients


CALLS: list[dict[str, Any]] = [
    {"integrator": integrator, "state": state, "coupling": coupling, "intrinsic": intrinsic, "symmetrise": symmetrise}
    for integrator in ("implicit_midpoint", "discrete_gradient")
    for state, coupling, intrinsic, symmetrise in (
        ("token", "sin", "anchor", "kernel"),
        ("token", "cubic", "double_well", "mean"),
        ("query", "arctan", "anchor", "min"),
        ("query", "tanh", "none", "kernel"),
        ("feature", "tanh", "anchor", "kernel"),
        ("feature", "sinh", "double_well", "min"),
    )
] + [
    {"stop_force": 0.2, "state": "feature", "coupling": "sin"},
    {"stop_plateau": 0.05, "state": "query"},
    {"stop_level": 0.0009, "state": "token"},
    {"integrator": "rk45", "state": "token"},
    {"integrator": "rk45", "state": "feature", "accuracy": 1e-4},
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients_are_those_of_autograd(call: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the steps that were taken: those of rk45 are given to the other side."""
    torch: Any = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    arrays = dict(zip("qkv", qkv(5), strict=True)) | numbers_of(call["state"]) | {"step": np.asarray(0.4)}
    options = {**call, "steps": 6 if any(name.startswith("stop") for name in call) else 2, "kind": "soft"}
    mask = kept("mask", B, 1, 5, 5, keep=0.8)
    out, saved = forward(**arrays, **options, mask=mask)
    counts = ra.graph_energy.steps_taken(saved)
    assert "stop" not in str(call) or 0 < np.sum(counts) < 6 * counts.size
    d_out = draw("d_out", *out.shape)
    by_hand = core.backward(saved, d_out)
    planned = [torch.tensor(step.factor) for step in saved.inner.flow.steps]
    if call.get("integrator") == "rk45":
        monkeypatch.setattr(rk45, "plan", lambda *given: planned)
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    other, _ = forward(**leaves, **options, mask=torch.tensor(mask), implementation="dense")
    found = torch.autograd.grad((other * torch.tensor(d_out)).sum(), list(leaves.values()), materialize_grads=True)
    floor = 1e-2 * max(float(np.max(np.abs(x.numpy()))) for x in found)
    for name, expected in zip(leaves, found, strict=True):
        size = max(float(np.max(np.abs(expected.numpy()))), floor)
        # Newton's method ends at rounding times the conditioning of its systems.
        np.testing.assert_allclose(by_hand[name], expected.numpy(), rtol=0, atol=2e-12 * size, err_msg=name)


# --- checkpoints


@pytest.mark.parametrize("checkpoint", [1, 3, 4, 50])
@pytest.mark.parametrize(
    "options",
    [
        {"integrator": "heun"},
        {"integrator": "discrete_gradient"},
        {"integrator": "rk45", "state": "query"},
        {"stop_force": 0.05},
    ],
    ids=str,
)
def test_checkpoints_change_no_bit(options: dict[str, Any], checkpoint: int) -> None:
    out, saved = run(**options, steps=10)
    again, kept_less = run(**options, steps=10, checkpoint=checkpoint)
    assert np.array_equal(out, again)
    assert all(step.stages == () for step in kept_less.inner.flow.steps)
    assert len(kept_less.inner.flow.states) == 1 + math.ceil(len(saved.inner.flow.steps) / checkpoint)
    d_out = draw("d_out", *out.shape)
    plain, checked = core.backward(saved, d_out), core.backward(kept_less, d_out)
    assert all(np.array_equal(x, checked[name]) for name, x in plain.items())


# --- stopping


def test_what_stops_a_flow() -> None:
    limits: dict[str, dict[str, Any]] = {
        "force": {"stop_force": 1e-2},
        "plateau": {"stop_plateau": 1e-4},
        "level": {"stop_level": 0.01, "state": "feature", "coupling": "identity", "intrinsic": "none"},
    }
    for name, options in limits.items():
        _, saved = run(**options, steps=200)
        counts = ra.graph_energy.steps_taken(saved)
        assert np.all(counts < 200) and len(saved.inner.flow.steps) == np.max(counts)
        if name == "force":
            assert np.max(ra.graph_energy.residual(saved)) <= 1e-2
            before = [saved.inner.flow.states[int(n) - 1][b, h] for (b, h, _), n in np.ndenumerate(counts)]
            # One step earlier it was not at rest: a step of Euler is h times the rate.
            ends = zip(np.ndindex(B, H), before, strict=True)
            steps = [np.max(np.abs(saved.scores[at] - x)) for at, x in ends]
            assert np.min(steps) > 1e-2 * saved.options.step * 0.9999
    every = run(state="feature", steps=40)[1].inner.flow
    for n, x in enumerate(run(state="feature", steps=40, stop_force=0.1)[1].inner.flow.states):
        where = np.max(np.abs(every.steps[n].stages[0][2]), axis=2) > 0.1 if n < 40 else None
        if where is not None:
            assert np.array_equal(np.swapaxes(x, 2, 3)[where], np.swapaxes(every.states[n], 2, 3)[where])


def test_a_batch_stops_element_by_element() -> None:
    q, k, v = qkv()
    out, saved = forward(q, k, v, stop_force=1e-4, steps=300)
    counts = ra.graph_energy.steps_taken(saved)
    assert len(set(counts.ravel().tolist())) > 1
    for b in range(B):
        for h in range(H):
            alone = q[b : b + 1, h : h + 1], *(x[b : b + 1, h // 2 : h // 2 + 1] for x in (k, v))
            one, _ = forward(*alone, steps=int(counts[b, h, 0]))
            np.testing.assert_allclose(out[b, h], one[0, 0], rtol=0, atol=1e-15)


def test_a_stiff_flow_is_too_much_for_rk45() -> None:
    with np.errstate(all="ignore"), pytest.raises(ArithmeticError, match="rk45 took more than 10000 evaluations"):
        run(integrator="rk45", kappa=1e5, step=1.0, steps=10, coupling="identity", state="feature")
