"""Couplings that a user brings: polynomials with coefficients that have a gradient, and functions that are checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn.mechanisms.graph_energy import core
from refattn.mechanisms.graph_energy.forces import COUPLINGS, Coupling, polynomial
from tests.mechanisms.graph_energy.calls import draw, forward, qkv, run

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
    for form in ("dense", "products", "tiled"):
        out, _ = run(coupling="polynomial", coefficients=(1.0, -1.0 / 6.0), step=0.1, form=form)
        np.testing.assert_allclose(out, run(coupling="cubic", step=0.1)[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("form", ["dense", "products", "tiled"])
@pytest.mark.parametrize("state", ["token", "query", "feature"])
def test_coefficients_have_a_gradient(state: str, form: str) -> None:
    torch: Any = pytest.importorskip("torch", reason='autograd needs torch: pip install "refattn[torch]"')
    a = np.array([0.8, -0.3, 0.05])
    mask = np.tri(7, dtype=np.bool_)
    options: dict[str, Any] = {"state": state, "coupling": "polynomial", "step": 0.05, "steps": 4, "tau": 0.01}
    out, saved = run(**options, coefficients=a, mask=mask, symmetrise="none", integrator="heun", form=form)
    d_out = draw("d_out", *out.shape)
    found = core.backward(saved, d_out)["coefficients"]
    leaf = torch.tensor(a, requires_grad=True)
    arrays = [torch.tensor(x) for x in qkv()]
    other, _ = forward(
        *arrays, **options, coefficients=leaf, mask=torch.tensor(mask), symmetrise="none", integrator="heun"
    )
    (expected,) = torch.autograd.grad((other * torch.tensor(d_out)).sum(), [leaf])
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12, atol=1e-13 * float(expected.abs().max()))


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


def test_known_couplings_pass_the_check() -> None:
    for known in COUPLINGS.values():
        run(coupling=dataclasses.replace(known, name="mine"), step=0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"coupling": "polynomial"}, TypeError, "coupling: got 'polynomial'; .*coefficients"),
        ({"coupling": "polynomial(coefficients=1.0)"}, TypeError, "coefficients: got 1.0, needs an array"),
        ({"coupling": "polynomial", "coefficients": "1"}, TypeError, "coefficients: got '1', needs an array"),
        ({"coupling": "polynomial", "coefficients": np.ones((1, 2))}, ValueError, r"coefficients: got shape \(1, 2\)"),
        ({"coupling": "polynomial", "coefficients": np.ones(0)}, ValueError, r"coefficients: got shape \(0,\)"),
        ({"coupling": "polynomial", "coefficients": np.ones(2, int)}, TypeError, "coefficients: got dtype int64"),
        (
            {"coupling": "polynomial", "coefficients": (1.0, np.inf)},
            ValueError,
            "coefficients: got a number that is not",
        ),
    ],
)
def test_wrong_coefficients(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(**options)
