"""Couplings that a user brings: polynomials with coefficients that have a gradient, and functions that are checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import Context
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.forces import COUPLINGS, INTRINSICS, Coupling, Intrinsic, polynomial
from tests.mechanisms.graph_energy.calls import check_gradients, draw, forward, qkv, run

numbers = st.floats(-2.0, 2.0)


@settings(max_examples=50)
@given(st.lists(numbers, min_size=1, max_size=4))
def test_a_polynomial_is_odd_and_its_derivatives_and_terms_fit(coefficients: list[float]) -> None:
    g, x, h = polynomial(coefficients), np.linspace(-1.5, 1.5, 31), 1e-5
    size = 100.0 * (1.0 + sum(map(abs, coefficients)))
    assert np.array_equal(g.force(-x), -g.force(x))
    expected = sum(a * x ** (2 * n + 1) for n, a in enumerate(coefficients))
    np.testing.assert_allclose(g.force(x), expected, rtol=0, atol=1e-14 * size)
    for function, derivative in ((g.potential, g.force), (g.force, g.slope), (g.slope, g.curvature)):
        np.testing.assert_allclose(
            (function(x + h) - function(x - h)) / (2.0 * h), derivative(x), rtol=0, atol=1e-8 * size
        )
    assert g.terms is not None
    total = sum(alpha[:, None] * beta[None, :] for alpha, beta, _, _ in g.terms(x))
    np.testing.assert_allclose(total, g.force(x[None, :] - x[:, None]), rtol=0, atol=1e-13 * size)


def test_a_polynomial_of_the_cubic_is_the_cubic() -> None:
    for implementation in ("dense", "products", "tiled"):
        out, _ = run(coupling="polynomial", coefficients=(1.0, -1.0 / 6.0), step=0.1, implementation=implementation)
        np.testing.assert_allclose(out, run(coupling="cubic", step=0.1)[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("implementation", ["dense", "products", "tiled"])
@pytest.mark.parametrize("state", ["token", "query", "feature"])
def test_coefficients_have_a_gradient(state: str, implementation: str) -> None:
    options: dict[str, Any] = {"state": state, "coupling": "polynomial", "step": 0.05, "steps": 4, "tau": 0.01}
    options |= {"mask": np.tri(7, dtype=np.bool_), "symmetrise": "none", "integrator": "heun"}
    arrays = dict(zip("qkv", qkv(), strict=True)) | {"coefficients": np.array([0.8, -0.3, 0.05])}
    check_gradients(arrays, (implementation,), **options)


# --- functions that a user brings


def logistic() -> Coupling:
    """2 sigmoid(x) - 1 = tanh(x / 2), written another way."""
    return Coupling(
        name="logistic",
        force=lambda x: np.tanh(0.5 * x),
        potential=lambda x: 2.0 * np.log(np.cosh(0.5 * x)),
        slope=lambda x: 0.5 / np.cosh(0.5 * x) ** 2,
        curvature=lambda x: -0.5 * np.tanh(0.5 * x) / np.cosh(0.5 * x) ** 2,
        largest_slope=lambda reach: 0.5,
    )


def test_a_function_that_fits_is_taken() -> None:
    out, saved = run(coupling=logistic(), steps=3)
    assert np.all(ra.graph_energy.longest_step(saved) == 2.0 / (1.0 + 2.0 * 0.5))
    gradients = core.backward(saved, out)
    assert np.all(np.isfinite(gradients["q"]))
    assert not np.array_equal(out, run(steps=3)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"force": lambda x: np.tanh(0.5 * x) + 1e-6 * x * x}, "coupling logistic: force: it is not odd"),
        (
            {"potential": lambda x: np.log(np.cosh(0.5 * x))},
            "coupling logistic: force: it is not the derivative of pot",
        ),
        ({"slope": lambda x: 0.501 / np.cosh(0.5 * x) ** 2}, "coupling logistic: slope: it is not the derivative of"),
        ({"curvature": lambda x: -np.tanh(0.5 * x)}, "coupling logistic: curvature: it is not the derivative of slope"),
        (
            {"potential": lambda x: 2.0 * np.log(np.cosh(0.5 * x)) + 1.0},
            "coupling logistic: potential: it is not 0 at 0",
        ),
    ],
)
def test_a_function_that_is_not_what_it_says(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(coupling=dataclasses.replace(logistic(), **changes))


@pytest.mark.parametrize("n", [1, 3])
def test_functions_that_are_not_analytic(n: int) -> None:
    """x |x| and x^3 |x|: odd, with the derivatives that they claim, one of which jumps at 0."""
    kinked = Coupling(
        name="kinked",
        force=lambda x: np.sign(x) * np.abs(x) ** (n + 1),
        potential=lambda x: np.abs(x) ** (n + 2) / (n + 2),
        slope=lambda x: (n + 1) * np.abs(x) ** n,
        curvature=lambda x: (n + 1) * n * np.sign(x) * np.abs(x) ** (n - 1),
        largest_slope=lambda reach: (n + 1) * reach**n,
    )
    with pytest.raises(ValueError, match="coupling kinked: force: it is not analytic"):
        run(coupling=kinked)


def sine(**changes: Any) -> Intrinsic:
    """mu sin(b - x)."""
    given: dict[str, Any] = {
        "force": lambda x, b, mu: mu * np.sin(b - x),
        "potential": lambda x, b, mu: -mu * np.cos(b - x),
        "d_x": lambda x, b, mu: -mu * np.cos(b - x),
        "d_b": lambda x, b, mu: mu * np.cos(b - x),
        "d_mu": lambda x, b, mu: np.sin(b - x),
        "potential_b": lambda x, b, mu: mu * np.sin(b - x),
        "potential_mu": lambda x, b, mu: -np.cos(b - x),
        "largest_slope": lambda mu, size: abs(mu),
    }
    return Intrinsic(name="sine", **(given | changes))


SINE, HALF = sine(), logistic()


def test_an_intrinsic_force_of_ones_own() -> None:
    """As the definition has it, by the loops' way: differences of the loss; and in a block."""
    q, k, v = qkv()
    options: dict[str, Any] = {"intrinsic": SINE, "steps": 3, "step": 0.2, "mu": 1.3}
    out, saved = forward(q, k, v, **options)
    d = draw("d_out", *out.shape)
    sides = [np.sum(d * forward(q, k, v, **{**options, "mu": 1.3 + h})[0]) for h in (1e-6, -1e-6)]
    np.testing.assert_allclose(core.backward(saved, d)["mu"], (sides[0] - sides[1]) / 2e-6, rtol=1e-6)
    levels = ra.graph_energy.energy(saved)
    assert np.all(np.diff(levels, axis=-1) < 0.0)
    block, x = ra.mechanism("graph_energy").block, draw("x", 2, 5, 4)
    found = {}
    for name, intrinsic in (("anchor", "anchor"), ("sine", SINE)):
        config = block.Config(width=4, heads=2, step=0.1, coupling=HALF, intrinsic=intrinsic)
        params = block.init(config, seed=1, like=x)
        found[name], inner = block.forward(params, block.start(params, x, Context()), Context())
        assert (inner.core.options.coupling, params.raw_mu is None) == (HALF, False)
    assert not np.allclose(*(state.x for state in found.values()))
    with pytest.raises(ValueError, match="step: got None with intrinsic='sine', needs a number, or learn_step"):
        block.Config(width=4, heads=2, intrinsic=SINE)


@pytest.mark.parametrize("name", ["potential", "d_x", "d_b", "d_mu", "potential_b", "potential_mu"])
def test_an_intrinsic_force_that_claims_what_does_not_hold(name: str) -> None:
    wrong = sine(**{name: lambda x, b, mu: x * b * mu})
    with pytest.raises(ValueError, match="intrinsic sine: .*: it is not .* derivative of"):
        run(intrinsic=wrong)


def test_known_couplings_pass_the_check() -> None:
    for known in COUPLINGS.values():
        run(coupling=dataclasses.replace(known, name="mine"), step=0.1)
    for force in INTRINSICS.values():
        run(intrinsic=dataclasses.replace(force, name="mine"), step=0.1)
