"""Edges of Koopman attention: certificates, inverses that fail, ridges by coordinate, odd inputs, NaN."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.koopman.implementations import shared
from refattn.mechanisms.koopman.options.kernel import KERNELS
from refattn.mechanisms.koopman.options.perturbation import KoopmanInverseError, certify
from refattn.mechanisms.precision import PrecisionWarning
from tests.mechanisms.koopman.calls import drawn, forward, one_step_of

draw = drawn(11)


def qkv(queries: int = 5, keys: int = 7, d: int = 4) -> tuple[Any, Any, Any]:
    return draw("q", 1, 2, queries, d), draw("k", 1, 2, keys, d), draw("v", 1, 2, keys, d)


def run(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return forward(q, k, v, **{"perturbation": "identity", **options})[0]


@pytest.mark.parametrize("implementation", ["dense", "shared"])
def test_certify_raises(implementation: str) -> None:
    q, k, v = qkv()
    forward(q, k, v, perturbation="identity", epsilon=0.01, certify=True, implementation=implementation)
    with pytest.raises(ValueError, match="certify: got a perturbation whose share of the one-step map is"):
        forward(q, k, v, perturbation="identity", epsilon=50.0, certify=True, implementation=implementation)
    given: dict[str, Any] = {"perturbation": "identity", "implementation": implementation}
    most = 1.0 / np.max(one_step_of(forward(q, k, v, **{**given, "implementation": "dense"})[1].inner).steepness())
    forward(q, k, v, epsilon=0.999 * most, certify=True, **given)
    with pytest.raises(ValueError, match="certify: got a perturbation whose share of the one-step map is 1"):
        forward(q, k, v, epsilon=1.001 * most, certify=True, **given)


def test_what_is_certified_is_what_the_map_adds_to_tau_x() -> None:
    """tau = 1, f(x) = -1.5 x, phi(x) = -0.5 x: for b = 2 psi = (1 + b) x + b f is 0, though b lip(phi) = 1 < 1 + b."""
    x, steepness, alive = np.linspace(-1.0, 1.0, 5), np.full((1, 1, 1), 1.5), np.ones((1, 1, 1), bool)
    for b, one_to_one in ((1.9, True), (2.0, False)):
        assert np.all(np.diff((1.0 + b) * x - 1.5 * b * x) > 1e-3) == one_to_one
        with nullcontext() if one_to_one else pytest.raises(ValueError, match="certify: got a perturbation"):
            certify(steepness, 1.0 + b, b, alive)


@pytest.mark.parametrize("space", [{}, {"space": "full"}, {"space": "augmented"}])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "polynomial"])
def test_the_certificate_is_that_of_the_dense_implementation(kernel: str, space: dict[str, Any]) -> None:
    """Without the matrix that the dense implementation has for every query."""
    q, k, v = qkv()
    for fit in ("stein", "separable"):
        given = {"perturbation": "identity", "kernel": kernel, "updates": 3, "fit": fit, "jitter": 1e-3, **space}
        inner = forward(q, k, v, implementation="dense", **given)[1].inner
        expected = one_step_of(inner).steepness()
        chunk = shared.chunk_of(forward(q, k, v, implementation="shared", **given)[1].inner, 0, 5)
        way = shared.Way(chunk, list(inner.trajectory))
        found = shared.Step(way, inner.updates[-1].attended, 3).steepness()
        np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "polynomial"])
def test_the_bound_of_the_certificate_is_reached(kernel: str) -> None:
    """By one key in one dimension: somewhere the map is as steep as it may be."""
    q, k = np.full((1, 1, 2001, 1), 0.4), np.full((1, 1, 1, 1), 0.7)
    width = {} if kernel == "linear" else {"bandwidth": 0.8}
    inner = forward(q, k, k, perturbation="identity", kernel=kernel, **width, implementation="dense")[1].inner
    one_step = one_step_of(inner)
    steepest = np.max(np.abs(one_step.at(np.linspace(-4.0, 4.0, 2001).reshape(q.shape))[2]))
    np.testing.assert_allclose(steepest, one_step.steepness()[0, 0, 0], rtol=1e-5)


def test_a_singular_perturbation_raises_with_its_place() -> None:
    q, k, v = qkv()
    with pytest.raises(KoopmanInverseError, match=r"update 2: the perturbation was not inverted at 10 positions") as e:
        forward(q, k * 0.0, v, perturbation="shift", epsilon=0.0)  # psi = phi = 0, and z = 0 ... has no single root
    assert e.value.update == 2
    assert e.value.positions[0] == (0, 0, 0)


def test_another_candidate_is_tried() -> None:
    q, k, v = qkv()
    epsilon = np.asarray([[0.0], [3.0]])
    out, saved = forward(q, k, v, perturbation="shift", epsilon=epsilon)
    np.testing.assert_array_equal(out, forward(q, k, v, perturbation="shift", epsilon=3.0)[0])
    gradient = ra.koopman.backward(saved, draw("d", *out.shape))["epsilon"]
    assert gradient[0, 0] == 0.0
    assert gradient[1, 0] != 0.0


def test_twice_every_key_is_half_the_ridge() -> None:
    q, k, v = qkv()
    twice = [np.concatenate([x, x], axis=2) for x in (k, v)]
    for fit, ridge in (("stein", 0.1), ("separable", 0.2)):
        out = run(q, *twice, ridge=0.2, updates=3, fit=fit)
        assert np.max(np.abs(out - run(q, k, v, ridge=ridge, updates=3, fit=fit))) < 1e-5


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"fit": "separable"}, {"space": "full"}, {"space": "augmented"}]
)
def test_trouble_gives_finite_numbers(options: dict[str, Any]) -> None:
    """One key; equal keys; no keys but 0; a trajectory that stands still; more transitions than keys.

    Of equal keys the gradients have few digits: dense and shared differ by up to 3e-5. That is said.
    """
    q, k, v = qkv()
    equal = (q, k[:, :, :1] + 0.0 * k, v)
    for given in ((q, k[:, :, :1], v[:, :, :1]), equal, (q, 0.0 * k, v), (v, v, v)):
        for updates in (2, 5):
            out, saved = forward(*given, perturbation="identity", updates=updates, **options)
            said = given is equal and updates == 5 and "space" not in options
            with pytest.warns(PrecisionWarning, match="^gradient of k") if said else nullcontext():
                gradients = ra.koopman.backward(saved, draw("d", *out.shape))
            assert all(np.all(np.isfinite(x)) for x in (out, *gradients.values()))


# --- a ridge for each coordinate


def by_coordinate(ridges: Any, **options: Any) -> Any:
    """The second query: where psi = pi the update is phi, and phi_p is that of the ridge of coordinate p."""
    columns = []
    for p, ridge in enumerate(ridges):
        columns.append(run(*qkv(), ridge=float(ridge), epsilon=0.0, **options)[..., p])
    return np.stack(columns, axis=-1)


@pytest.mark.parametrize("implementation", ["dense", "shared"])
@pytest.mark.parametrize("fit", ["stein", "separable"])
def test_each_coordinate_has_the_operator_of_its_ridge(fit: str, implementation: str) -> None:
    ridges = np.asarray([0.1, 2.0, 0.1, 0.7])
    given: dict[str, Any] = {"fit": fit, "implementation": implementation, "jitter": 1e-3}
    found = run(*qkv(), ridge=ridges[None, None], epsilon=0.0, **given)
    np.testing.assert_allclose(found, by_coordinate(ridges, **given), rtol=0, atol=1e-12)
    alike = run(*qkv(), ridge=np.full((1, 1, 4), 0.3), updates=4, **given)
    np.testing.assert_allclose(alike, run(*qkv(), ridge=0.3, updates=4, **given), rtol=0, atol=1e-12)


def test_psi_of_several_operators() -> None:
    """(K psi)_p = a phi_p(q') + b (K_p phi_p)(q'), and psi takes that at the root: from fits of one ridge each."""
    q, k, v = qkv()
    ridges = (0.1, 2.0, 0.5, 0.7)
    given: dict[str, Any] = {"perturbation": "identity", "epsilon": 0.4, "implementation": "dense"}
    out = forward(q, k, v, ridge=np.asarray(ridges)[None, None], **given)[0]
    for p, ridge in enumerate(ridges):
        inner = forward(q, k, v, ridge=ridge, **given)[1].inner
        step, kernel = inner.updates[0], inner.options.kernel

        def kappa(x: Any, step: Any = step, kernel: Any = kernel) -> Any:
            return np.squeeze(kernel.values(x[..., None, :], k[:, :, None]) @ np.swapaxes(step.kappa.dual, -1, -2), -2)

        twice = np.sum(kappa(step.attended) * (step.koopman @ step.modes)[..., p], axis=-1)
        image = np.sum(kappa(step.attended) * step.modes[..., p], axis=-1) + 0.4 * twice
        reached = out[..., p] + 0.4 * np.sum(kappa(out) * step.modes[..., p], axis=-1)
        np.testing.assert_allclose(reached, image, rtol=0, atol=1e-12)


# --- what is not finite


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "options",
    [
        {"implementation": "dense"},
        {"implementation": "dense", "fit": "separable", "causal": True},
        {"implementation": "shared"},
        {"implementation": "shared", "fit": "separable", "causal": True},
        {"implementation": "dense", "fit": "separable(norm=0.5)"},
    ],
)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_goes_on(name: str, options: dict[str, Any], bad: float) -> None:
    """As NaN, and raises nothing; other heads, and for a query all others, keep their bits."""
    arrays = dict(zip("qkv", qkv(5, 5), strict=True))
    given: dict[str, Any] = {"perturbation": "identity", "updates": 3, **options}
    out = forward(**arrays, **given)[0]
    arrays[name] = arrays[name].copy()
    arrays[name][0, 1, 2, 0] = bad
    with np.errstate(all="ignore"):
        other, saved = forward(**arrays, **given)
        gradients = ra.koopman.backward(saved, np.ones_like(out))
    assert np.array_equal(other[0, 0], out[0, 0])
    assert np.all(np.isnan(other[0, 1, 2]))
    assert np.any(np.isnan(gradients[name][0, 1]))
    assert np.all(np.isfinite(gradients["q"][0, 0]))
    if name == "q":
        rest = [0, 1, 3, 4]
        assert np.array_equal(other[0, 1, rest], out[0, 1, rest])


def test_numbers_that_overflow_within_are_an_error() -> None:
    """Finite numbers came in, and there is no inverse to be had."""
    q, k, v = qkv()
    with np.errstate(all="ignore"), pytest.raises(KoopmanInverseError):
        forward(q, 1e200 * k, v, updates=3)
