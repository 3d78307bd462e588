"""The force of a Hamiltonian of all tokens: it is the gradient, and never causal."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import pytest

from refattn import Context, tree
from refattn.analysis.particles import Exponential
from refattn.mechanisms.sympformer import core
from refattn.mechanisms.sympformer.config import module_of
from refattn.mechanisms.sympformer.forces import hamiltonian
from refattn.mechanisms.sympformer.params import Layer
from refattn.ops import layer_norm
from refattn.verify.selfcheck.gradients import block_subjects
from tests.mechanisms.sympformer.calls import BLOCK, RECORD, back, draw, run, stack

ALL = Context(causal=False)
N, D = 5, 6


def energy(params: Any, y: Any, p: Any) -> float:
    growth = np.exp(params.config.scale * (y @ params.w_q) @ (y @ params.w_k).T)
    kinetic = np.sum(p * (p @ params.w_b), axis=1)
    return float(0.5 * np.sum(kinetic / np.mean(growth, axis=1)) - 0.5 * np.sum(growth) / len(y))


def asked(params: Any, x: Any, p: Any) -> tuple[Any, Any, Any]:
    """The force, the velocity, and the normalised tokens."""
    numbers = {name: each.value(params.numbers.get(name), x) for name, each in params.config.numbers().items()}
    answer, saved = hamiltonian.forward(
        Layer(hamiltonian, params, numbers, False), x[None], None if p is None else p[None]
    )
    speed = None if p is None else hamiltonian.velocity(answer.b, answer.context)[0]
    assert answer.g is not None
    return answer.g[0], speed, saved[0][2][0]


@pytest.mark.parametrize("at_rest", [True, False])
def test_force_and_velocity_are_derivatives_of_the_hamiltonian(at_rest: bool) -> None:
    (params,) = stack(1, oracle="hamiltonian", mlp="none", start="linear")
    params = tree.unflatten(params, {**tree.flatten(params), "w_b": params.w_b + params.w_b.T})
    x, p, h = draw("x", N, D), np.zeros((N, D)) if at_rest else draw("p", N, D), 1e-5
    force, speed, y = asked(params, x, None if at_rest else p)
    for index in np.ndindex(N, D):
        step = np.zeros((N, D))
        step[index] = h
        slope = (energy(params, y + step, p) - energy(params, y - step, p)) / (2.0 * h)
        assert force[index] == pytest.approx(-slope, abs=1e-8)
        if not at_rest:
            slope = (energy(params, y, p + step) - energy(params, y, p - step)) / (2.0 * h)
            assert speed[index] == pytest.approx(slope, abs=1e-8)


def asymmetry(params: Any, causal: bool, normed: bool = False) -> float:
    """How far velocity and force are from those of any Hamiltonian of tokens and momenta, which have f_x = -g_p^T.

    And f_p and g_x are symmetric. The tokens are taken as they are, as the force takes them, unless `normed`.
    """
    numbers = {
        name: each.value(params.numbers.get(name), params.gain) for name, each in params.config.numbers().items()
    }
    oracle = module_of(type(params.config.oracle))
    layer = Layer(oracle, params, numbers, causal)

    def field(at: Any) -> Any:
        x, p = at.reshape(2, 1, N, D)
        answer, _ = oracle.forward(layer, x, p)
        moved = answer.b if answer.b is not None else oracle.mobilised(layer, p)
        return np.concatenate([oracle.velocity(moved, answer.context).ravel(), -answer.g.ravel()])

    at, h = np.concatenate([draw("x", N, D).ravel(), draw("p", N, D).ravel()]), 1e-5
    left = (
        contextlib.nullcontext()
        if normed
        else mock.patch.object(layer_norm, "layer_norm_forward", lambda x, *_: (x, None))
    )
    with left:
        slopes = np.stack([(field(at + h * e) - field(at - h * e)) / (2.0 * h) for e in np.eye(len(at))], axis=1)
    half = len(at) // 2
    second = np.concatenate([slopes[half:], slopes[:half]])  # of what would be H: by x, then by p
    return float(np.max(np.abs(second - second.T)) / np.max(np.abs(second)))


def symmetric(oracle: str) -> Any:
    """The parameters of a layer with A = scale w_q w_k^T = w_v w_o (linear attention: A and V) and B symmetric."""
    (params,) = stack(1, oracle=oracle, mlp="none", start="linear")
    leaves = {name: each for name, each in tree.flatten(params).items() if name.startswith("w_")}
    leaves |= {name: leaves[name] + leaves[name].T for name in ("w_a", "w_b", "w_v") if name in leaves}
    if oracle == "softmax":
        leaves |= {"w_k": leaves["w_q"], "w_v": params.config.scale * leaves["w_q"], "w_o": leaves["w_q"].T}
    return tree.unflatten(params, {**tree.flatten(params), **leaves})


@pytest.mark.parametrize("oracle", ["softmax", "linear", "hamiltonian"])
def test_when_there_is_a_hamiltonian(oracle: str) -> None:
    """Symmetric matrices, no causality; of oracle="hamiltonian" B alone. The norm of the tokens is left out of it."""
    params = symmetric(oracle)
    assert asymmetry(params, False) < 1e-8
    assert asymmetry(params, False, normed=True) > 1e-2
    if oracle == "hamiltonian":
        params = tree.unflatten(params, {**tree.flatten(params), "w_k": draw("other", D, D)})
        assert asymmetry(params, False) < 1e-8
    else:
        assert asymmetry(params, True) > 1e-2
    for name in {"softmax": ("w_b", "w_k", "w_v", "w_o"), "linear": ("w_a", "w_v"), "hamiltonian": ("w_b",)}[oracle]:
        leaves = tree.flatten(params)
        other = tree.unflatten(params, {**leaves, name: leaves[name] + 0.1 * draw("other", D, D)})
        assert asymmetry(other, False) > 1e-3, name


def test_it_is_the_force_of_the_particles() -> None:
    """For symmetric A = scale w_q w_k^T and B."""
    (params,) = stack(1, oracle="hamiltonian", mlp="none", start="linear")
    leaves = tree.flatten(params)
    leaves |= {"w_k": params.w_q, "w_b": params.w_b + params.w_b.T}
    params = tree.unflatten(params, leaves)
    force, speed, y = asked(params, draw("x", N, D), draw("p", N, D))
    system = Exponential(params.config.scale * params.w_q @ params.w_k.T, params.w_b)
    np.testing.assert_allclose(force, system.force(y, draw("p", N, D)), rtol=0.0, atol=1e-12)
    np.testing.assert_allclose(speed, system.velocity(y, draw("p", N, D)), rtol=0.0, atol=1e-12)


def test_two_calls_and_no_values() -> None:
    """One for tokens as queries, one for them as keys; only the first where nobody asks for the force."""
    for integrator, calls in (("presymplectic_euler", 2 * 3), ("forward_euler", 2 * 2 + 1)):
        params = stack(3, oracle="hamiltonian", integrator=integrator, mlp="none")
        assert all(each.w_v is None and each.w_o is None for each in params)
        with mock.patch.object(core, "forward", wraps=core.forward) as counted:
            run(params, draw("x", 1, N, D), ALL)
        assert counted.call_count == calls


def test_causal_is_an_error_that_says_why() -> None:
    (params,) = stack(1, oracle="hamiltonian")
    x, past, stream = draw("x", 1, N, D), Context(causal=True), RECORD.stream
    assert stream is not None
    message = "oracle: got hamiltonian with causal=True, needs causal=False: .* pushes a token by those that come later"
    with pytest.raises(ValueError, match=message):
        run((params,), x, past)
    with pytest.raises(ValueError, match=message):
        stream.prefill(params, stream.start(params, 1), BLOCK.start(params, x, past), past)
    with pytest.raises(ValueError, match="oracle: got Hamiltonian.*, but the attention of classical is one of"):
        BLOCK.Config(width=6, heads=2, oracle="hamiltonian", integrator="classical")


def test_a_token_knows_its_future() -> None:
    """Without causality the last token pushes the first: through the first one's key too."""
    params, x = stack(1, oracle="hamiltonian", mlp="none"), draw("x", 1, N, D)
    other = x.copy()
    other[:, -1] += draw("moved", 1, D)
    assert np.max(np.abs(run(params, other, ALL)[0].x[:, 0] - run(params, x, ALL)[0].x[:, 0])) > 1e-4


def test_the_gradients_of_a_check_are_without_causality() -> None:
    """A configuration of the record says so, and a check runs it with the rest."""
    (given,) = [each for each in RECORD.configs if each.get("oracle") == "hamiltonian"]
    assert BLOCK.Config(**given).context_fields == ()
    names = [subject.name for subject in block_subjects(RECORD)]
    assert sum(name.endswith("no context") for name in names) == 3  # two of all mechanisms, with biases and without


@pytest.mark.parametrize(
    ("options", "size"), [({"oracle": "hamiltonian"}, 3.0), ({"integrator": "lie_trotter(connection='r2')"}, 100.0)]
)
def test_large_scores_stay_finite_in_float32(options: dict[str, Any], size: float) -> None:
    """Softmax attention knows no largest score; a force has e^score as a factor, here of scores of about 20."""
    given: dict[str, Any] = {"mlp": "none", "start": "linear", **options}
    (params,) = stack(1, **given)
    leaves = {name: np.asarray(value, np.float32) for name, value in tree.flatten(params).items()}
    leaves |= {name: size * leaves[name] for name in ("w_q", "w_k")}
    params, x = tree.unflatten(params, leaves), draw("x", 1, N, D).astype(np.float32)
    with np.errstate(over="raise", invalid="raise"):
        state, saves = run((params,), x, ALL)
        found = back((params,), state, saves, np.ones_like(x))
    assert all(np.all(np.isfinite(value)) for value in (state.x, *found.values()))
