"""The numbers that the mechanism has to reach, one test each, T1 to T22 and T7b, in float64.

T14 to T17 and T19 are laws (`test_laws`), and so is T18 but for what is in test_gradients.py; T22 is in
test_pointing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.analysis.known_systems import ROTATION, SYSTEMS
from refattn.analysis.operators import Koopman, spectral
from refattn.analysis.prediction import operators, predict
from refattn.mechanisms.koopman.layer.draws import draw as draw_numbers
from refattn.mechanisms.koopman.options.kernel import KERNELS, Rbf
from refattn.mechanisms.koopman.options.perturbation import invert
from tests.mechanisms.koopman.calls import drawn, forward, one_step_of

draw = drawn(11)


def qkv(queries: int = 5, keys: int = 7, d: int = 4, *, h: int = 2) -> tuple[Any, Any, Any]:
    return draw("q", 1, h, queries, d), draw("k", 1, h, keys, d), draw("v", 1, h, keys, d)


def run(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return run_saved(q, k, v, **options)[0]


def run_saved(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return forward(q, k, v, **{"perturbation": "identity", **options})


def coefficients(z: Any, g: Any, ridge: float, y: Any) -> Any:
    return ra.koopman.Stein().forward(z, g, ridge, y)


def gram_matrices(transitions: int = 3, observables: int = 8) -> tuple[Any, Any, Any]:
    g, z = draw("g", observables, observables), draw("z", transitions, transitions)
    return z @ z.T, g @ g.T + 0.1 * np.eye(observables), draw("y", transitions, observables)


def test_t1_one_update_is_attention() -> None:
    q, k, v = qkv()
    np.testing.assert_allclose(run(q, k, v, updates=1), ra.softmax.forward(q, k, v)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("solve", [coefficients, partial(spectral, "stein")])
def test_t2_the_fit_solves_the_kronecker_system(solve: Callable[..., Any]) -> None:
    z, g, y = gram_matrices()
    expected = np.linalg.solve(np.kron(z, g) + 0.2 * np.eye(24), y.reshape(-1)).reshape(3, 8)
    np.testing.assert_allclose(solve(z, g, 0.2, y), expected, rtol=0, atol=1e-12)


def test_t3_stationarity() -> None:
    z, g, y = gram_matrices()
    a = coefficients(z, g, 0.2, y)
    assert np.max(np.abs(z @ a @ g + 0.2 * a - y)) < 1e-12 * max(1.0, np.max(np.abs(y)))


def test_t4_no_other_operator_is_better() -> None:
    """Also none with sections elsewhere, which the representer theorem rules out."""
    kernel = Rbf(1.5, 1.0)
    starts, ends, keys, extra = draw("x", 3, 4), draw("x+", 3, 4), draw("p", 6, 4), draw("extra", 5, 4)
    left = np.concatenate([starts, extra])  # sections that the operator may depend on
    right = np.concatenate([keys, extra])  # sections that it may be applied to
    z, g, y = kernel.values(left, left), kernel.values(right, right), kernel.values(ends, keys)
    best = np.zeros((8, 11))
    best[:3, :6] = coefficients(z[:3, :3], g[:6, :6], 0.3, y)

    def loss(a: Any) -> float:
        image = z[:3] @ a @ g[:, :6]
        return float(np.sum((image - y) ** 2) + 0.3 * np.sum(a * (z @ a @ g)))

    for n in range(200):
        change = draw("change", 8, 11, seed=n) * 10.0 ** (-(n % 7))
        assert loss(best + change) >= (1.0 - 1e-12) * loss(best)


def linear_system() -> tuple[Any, Koopman, Any]:
    """The matrix of the known linear system, the operator of 12 transitions with 8 keys, and states it has not seen."""
    fitted: Any = operators(SYSTEMS["linear"], seed=11)["Koopman"]
    return np.asarray(ROTATION), fitted, draw("unseen", 50, 4)


def test_t5_a_linear_system_is_recovered() -> None:
    a0, fitted, x = linear_system()
    assert np.linalg.norm(fitted.predict(x, 1)[0] - x @ a0.T) / np.linalg.norm(x @ a0.T) < 1e-9


def test_t6_its_eigenvalues_are_those_of_the_koopman_matrix() -> None:
    a0, found = linear_system()[0], linear_system()[1].eigenvalues()
    for value in np.linalg.eigvals(a0):
        assert np.min(np.abs(found[:4] - value)) < 1e-9
    assert np.max(np.abs(found[4:])) < 1e-9


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.3), (0.07, 1.0), (0.2, 0.5)])
def test_t7_the_prediction_does_not_depend_on_psi(a: float, b: float) -> None:
    a0, fitted, x = linear_system()
    image = fitted.kappa(x) @ (a * fitted.modes + b * (fitted.matrix @ fitted.modes))  # (K psi)(x)
    psi = a * np.eye(4) + b * fitted.predict(np.eye(4), 1)[0].T
    assert np.max(np.abs(np.linalg.solve(psi, image.T).T - x @ a0.T)) < 1e-7


def test_t7b_without_a_ridge_it_is_edmd() -> None:
    kernel = Rbf(2.0, 1.0)
    starts, ends, keys, x = draw("x", 60, 4), draw("x+", 60, 4), draw("keys", 8, 4), draw("unseen", 20, 4)
    fitted = Koopman(kernel, starts, ends, keys, ridge=1e-12, jitter=1e-14)
    edmd = np.linalg.lstsq(kernel.values(starts, keys), kernel.values(ends, keys), rcond=None)[0]
    coordinates = np.linalg.solve(kernel.values(keys, keys), keys)  # of the projections of pi_p to the span
    assert np.max(np.abs(fitted.predict(x, 1)[0] - kernel.values(x, keys) @ edmd @ coordinates)) < 1e-11


@pytest.mark.parametrize("system", ["van der Pol", "Duffing"])
def test_t8_nonlinear_oscillators(system: str) -> None:
    """100 keys, 300 transitions, a ridge of 1e-9, a jitter of 1e-12, 200 states that were not seen."""
    found = predict(system, steps=1).powers
    assert found["Koopman"][0] < min(3e-4, 10.0 * found["kernel EDMD"][0])


@pytest.mark.parametrize("implementation", ["dense", "shared"])
@pytest.mark.parametrize("options", [{}, {"space": "augmented"}, {"space": "full"}, {"tau": 1.0, "epsilon": 0.05}])
def test_t9_the_inverse_of_psi(options: dict[str, Any], implementation: str) -> None:
    """psi^-1(psi(x)) = x where psi is certain to be one to one, from a start that is not x."""
    q, k, v = qkv()
    options, tau = {"epsilon": 0.1, "updates": 3, "certify": True} | options, options.get("tau", 0.0)
    _, saved = run_saved(q, k, v, implementation="dense", **options)
    one_step, step, x = one_step_of(saved.inner), saved.inner.updates[-1], draw("x", 1, 2, 5, 4)
    a, b = 1.0, options["epsilon"]
    own = a + b * tau
    image = own * x + b * one_step.at(x)[0]

    def evaluate(y: Any) -> Any:
        value, size, jacobian = one_step.at(y)
        slope = own * np.eye(4) + b * jacobian
        return own * y + b * value - image, np.linalg.norm(size, axis=-1), slope

    found, _ = invert(evaluate, [x + 0.05 * draw("noise", *x.shape)], np.ones((1, 2, 5), bool))
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-10)
    # psi(psi^-1(z)) = z for the z of the core, in either form
    out = run(q, k, v, implementation=implementation, **options)
    wanted = (a + b) * tau * step.attended
    wanted = wanted + np.sum(step.lifted * step.section[..., None], axis=-2)
    np.testing.assert_allclose(own * out + b * one_step.at(out)[0], wanted, rtol=0, atol=1e-10)


def test_t10_only_the_ratio_of_a_and_b_matters() -> None:
    q, k, v = qkv()
    pencil = run(q, k, v, updates=3, perturbation="pencil(epsilon=0.1, mix=0.5)")
    np.testing.assert_allclose(
        run(q, k, v, updates=3, perturbation="identity(epsilon=0.2)"), pencil, rtol=0, atol=1e-10
    )
    shift = run(q, k, v, updates=3, perturbation="shift(epsilon=5.0)")
    np.testing.assert_allclose(run(q, k, v, updates=3, perturbation="identity(epsilon=0.2)"), shift, rtol=0, atol=1e-10)


def test_t11_without_a_perturbation_it_is_phi() -> None:
    q, k, v = qkv()
    out, saved = ra.koopman.forward(q, k, v, perturbation="identity(epsilon=0.0)")
    step = saved.inner.updates[0]
    phi = np.sum(step.modes * step.section[..., None], axis=-2)
    np.testing.assert_allclose(out, phi, rtol=0, atol=1e-12)
    errors = [np.linalg.norm(run(q, k, v, epsilon=e) - phi) for e in (2e-3, 1e-3)]
    assert errors[0] / errors[1] == pytest.approx(2.0, rel=0.05)


def test_t12_a_huge_ridge() -> None:
    q, k, v = qkv()
    attended = run(q, k, v, updates=1)
    assert np.max(np.abs(run(q, k, v, fit="stein(ridge=1e10)"))) < 1e-6
    second = ra.softmax.forward(attended, k, v)[0]
    assert np.max(np.abs(run(q, k, v, fit="stein(ridge=1e10, tau=1.0)") - second)) < 1e-6


def test_t13_both_fits_agree_without_a_ridge() -> None:
    q, k, v = qkv()
    stein, separable = (run(q, k, v, updates=3, fit=f"{fit}(ridge=1e-10)") for fit in ("stein", "separable"))
    assert np.max(np.abs(stein - separable)) < 1e-7 * np.max(np.abs(stein))


@pytest.mark.parametrize("space", [{}, {"space": "full"}, {"space": "augmented"}])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "polynomial"])
def test_t20_the_certificate_bounds_the_slope(kernel: str, space: dict[str, Any]) -> None:
    x, y = 3.0 * draw("x", 1, 2, 5, 4), 3.0 * draw("y", 1, 2, 5, 4)
    for fit in ("stein", "separable"):
        one_step = one_step_of(
            run_saved(*qkv(), kernel=kernel, updates=3, fit=fit, implementation="dense", **space)[1].inner
        )
        change = np.linalg.norm(one_step.at(x)[0] - one_step.at(y)[0], axis=-1)
        assert np.all(change <= one_step.steepness() * np.linalg.norm(x - y, axis=-1))


def test_t21_draws() -> None:
    """One seed one output, another seed another; numbers in (0, 1] with the mean 0.1."""
    q, k, v = qkv()
    given = [draw_numbers(2, seed=seed, step=0, layer=0, like=q) for seed in (1, 1, 2)]
    one, same, other = (run(q, k, v, updates=3, **numbers) for numbers in given)
    assert np.array_equal(one, same)
    assert not np.any(one == other)
    for numbers in draw_numbers(100_001, seed=0, step=0, layer=0, like=q).values():
        assert np.all((numbers > 0.0) & (numbers <= 1.0))
        assert abs(np.mean(numbers) - 0.1) < 0.002
