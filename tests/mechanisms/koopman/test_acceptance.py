"""The numbers that the mechanism's specification asks for, one test each (T1 to T20, float64)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import counter
from refattn.mechanisms.koopman import operator
from refattn.mechanisms.koopman.kernel import KERNELS, Kernel
from refattn.mechanisms.koopman.perturbation import KoopmanInverseError

LINEAR = Kernel("linear", 1.0, 1.0)


def draw(name: str, *shape: int, seed: int = 11) -> Any:
    return counter.normal(shape, seed=seed, purpose=name)


def qkv(queries: int = 5, keys: int = 7, d: int = 4, *, b: int = 1, h: int = 2, seed: int = 11) -> tuple[Any, Any, Any]:
    shapes = {"q": queries, "k": keys, "v": keys}
    q, k, v = (draw(name, b, h, n, d, seed=seed) for name, n in shapes.items())
    return q, k, v


def run(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return ra.koopman.forward(q, k, v, **{"perturbation": "identity", **options})[0]


class Fit:
    """An operator fitted to given transitions, in the span of sections at given points, by the room's own pieces."""

    def __init__(
        self, kernel: Kernel, starts: Any, ends: Any, keys: Any, ridge: float, jitter: float, fit: str = "stein"
    ) -> None:
        self.kernel, self.keys = kernel, keys
        self.gram = kernel.values(keys, keys) + jitter * np.eye(len(keys))
        b = kernel.values(starts, keys)
        self.dual = np.linalg.solve(self.gram, b.T).T
        self.inner, self.targets = self.dual @ b.T, kernel.values(ends, keys)
        self.found = operator.spectral(fit, self.inner, self.gram, ridge, self.targets)
        self.modes, self.matrix = self.found @ keys, self.found @ b.T

    def kappa(self, x: Any) -> Any:
        return self.kernel.values(x, self.keys) @ self.dual.T

    def phi(self, x: Any) -> Any:
        return self.kappa(x) @ self.modes


def gram_matrices(transitions: int = 3, observables: int = 8) -> tuple[Any, Any, Any]:
    g, z = draw("g", observables, observables), draw("z", transitions, transitions)
    return z @ z.T, g @ g.T + 0.1 * np.eye(observables), draw("y", transitions, observables)


def test_t1_one_update_is_attention() -> None:
    q, k, v = qkv()
    expected = ra.softmax.forward(q, k, v)[0]
    np.testing.assert_allclose(run(q, k, v, updates=1), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("solve", [operator.coefficients, operator.spectral])
def test_t2_the_fit_solves_the_kronecker_system(solve: Callable[..., Any]) -> None:
    z, g, y = gram_matrices()
    expected = np.linalg.solve(np.kron(z, g) + 0.2 * np.eye(24), y.reshape(-1)).reshape(3, 8)
    np.testing.assert_allclose(solve("stein", z, g, 0.2, y), expected, rtol=0, atol=1e-12)
    separable = np.linalg.solve(z + 0.2 * np.eye(3), y) @ np.linalg.inv(g)
    np.testing.assert_allclose(solve("separable", z, g, 0.2, y), separable, rtol=1e-11, atol=1e-12)


def test_t3_stationarity() -> None:
    z, g, y = gram_matrices()
    a = operator.coefficients("stein", z, g, 0.2, y)
    assert np.max(np.abs(z @ a @ g + 0.2 * a - y)) < 1e-12 * max(1.0, np.max(np.abs(y)))


def test_t4_no_other_operator_is_better() -> None:
    """Also none with sections elsewhere, which the representer theorem rules out."""
    kernel = Kernel("linear+rbf", 1.5, 1.0)
    starts, ends, keys, extra = draw("x", 3, 4), draw("x+", 3, 4), draw("p", 6, 4), draw("extra", 5, 4)
    left = np.concatenate([starts, extra])  # sections that the operator may depend on
    right = np.concatenate([keys, extra])  # sections that it may be applied to
    z, g = kernel.values(left, left), kernel.values(right, right)
    y = kernel.values(ends, keys)
    best = np.zeros((8, 11))
    best[:3, :6] = operator.coefficients("stein", z[:3, :3], g[:6, :6], 0.3, y)

    def loss(a: Any) -> float:
        image = z[:3] @ a @ g[:, :6]
        return float(np.sum((image - y) ** 2) + 0.3 * np.sum(a * (z @ a @ g)))

    least = loss(best)
    for n in range(200):
        change = draw("change", 8, 11, seed=n) * 10.0 ** (-(n % 7))
        assert loss(best + change) >= least - 1e-12 * least


def linear_system(keys: int = 8) -> tuple[Any, Fit, Any]:
    a0 = np.asarray([[0.9, 0.3, 0, 0], [-0.3, 0.9, 0.1, 0], [0, 0, 0.7, 0.2], [0.1, 0, 0, -0.8]])
    path = [draw("start", 4)]
    for _ in range(12):
        path.append(a0 @ path[-1])
    points = np.asarray(path)
    return a0, Fit(LINEAR, points[:-1], points[1:], draw("keys", keys, 4), 1e-12, 1e-12), draw("unseen", 50, 4)


def test_t5_a_linear_system_is_recovered() -> None:
    a0, fit, x = linear_system()
    error = np.linalg.norm(fit.phi(x) - x @ a0.T) / np.linalg.norm(x @ a0.T)
    assert error < 1e-9


def test_t6_its_eigenvalues_are_those_of_the_koopman_matrix() -> None:
    a0, fit, _ = linear_system()
    found = np.linalg.eigvals(fit.matrix)
    largest = found[np.argsort(-np.abs(found))]
    for value in np.linalg.eigvals(a0):
        assert np.min(np.abs(largest[:4] - value)) < 1e-9
    assert np.max(np.abs(largest[4:])) < 1e-9


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.3), (0.07, 1.0), (0.2, 0.5)])
def test_t7_the_prediction_does_not_depend_on_psi(a: float, b: float) -> None:
    a0, fit, x = linear_system()
    lifted = a * fit.modes + b * (fit.matrix @ fit.modes)
    image = fit.kappa(x) @ lifted  # (K psi)(x)
    psi = a * np.eye(4) + b * fit.phi(np.eye(4)).T
    assert np.max(np.abs(np.linalg.solve(psi, image.T).T - x @ a0.T)) < 1e-7


def test_t7b_without_a_ridge_it_is_edmd() -> None:
    kernel = Kernel("linear+rbf", 2.0, 1.0)
    starts, ends, keys, x = draw("x", 60, 4), draw("x+", 60, 4), draw("keys", 8, 4), draw("unseen", 20, 4)
    fit = Fit(kernel, starts, ends, keys, 1e-12, 1e-14)
    edmd = np.linalg.lstsq(kernel.values(starts, keys), kernel.values(ends, keys), rcond=None)[0]
    coordinates = np.linalg.solve(kernel.values(keys, keys), keys)  # of the projections of pi_p to the span
    assert np.max(np.abs(fit.phi(x) - kernel.values(x, keys) @ edmd @ coordinates)) < 1e-11


def van_der_pol(x: Any) -> Any:
    return np.stack([x[:, 1], (1.0 - x[:, 0] ** 2) * x[:, 1] - x[:, 0]], axis=-1)


def duffing(x: Any) -> Any:
    return np.stack([x[:, 1], x[:, 0] - x[:, 0] ** 3 - 0.5 * x[:, 1]], axis=-1)


@pytest.mark.parametrize("field", [van_der_pol, duffing])
def test_t8_nonlinear_oscillators(field: Callable[[Any], Any]) -> None:
    def advance(x: Any, dt: float = 0.1) -> Any:
        k1 = field(x)
        k2, k3 = field(x + dt / 2 * k1), None
        k3 = field(x + dt / 2 * k2)
        return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + field(x + dt * k3))

    kernel = Kernel("linear+rbf", 1.0, 1.0)
    points = 4.0 * counter.uniform((600, 2), seed=3, purpose="points") - 2.0
    starts, keys, x = points[:300], points[300:400], points[400:]
    fit = Fit(kernel, starts, advance(starts), keys, 1e-9, 1e-12)
    exact = advance(x)
    error = np.sqrt(np.mean((fit.phi(x) - exact) ** 2) / np.mean(exact**2))
    k_xx = kernel.values(starts, starts)
    values, vectors = np.linalg.eigh(k_xx)
    kept = values > 1e-10 * values[-1]
    inverse = (vectors[:, kept] / values[kept]) @ vectors[:, kept].T
    kernel_edmd = kernel.values(x, starts) @ inverse @ advance(starts)
    peer = np.sqrt(np.mean((kernel_edmd - exact) ** 2) / np.mean(exact**2))
    assert error < 3e-4
    assert error < 10.0 * peer


def test_t9_psi_is_inverted() -> None:
    """(K psi)(q') is psi of the last query: psi, evaluated by hand on the fit, gives what was to be inverted."""
    q, k, v = qkv()
    for options in ({}, {"updates": 3, "epsilon": 0.4}, {"perturbation": "pencil", "mix": 0.7}):
        _, saved = ra.koopman.forward(q, k, v, **{"perturbation": "identity", **options})
        step = saved.inner.updates[-1]
        a, b = step.ab
        keys, values = saved.inner.k, saved.inner.numbers.kernel(saved.inner.options).values
        sections = values(step.root[..., None, :], keys[:, :, None])[..., 0, :]
        phi = np.sum(step.modes * (step.dual @ sections[..., None]), axis=-2)
        image = np.sum(step.lifted * step.section[..., None], axis=-2)
        assert np.max(np.abs(a * step.root + b * phi - image)) < 1e-10


def test_t10_only_the_ratio_of_a_and_b_matters() -> None:
    q, k, v = qkv()
    pencil = run(q, k, v, updates=3, perturbation="pencil", mix=0.5, epsilon=0.1)
    np.testing.assert_allclose(run(q, k, v, updates=3, epsilon=0.2), pencil, rtol=0, atol=1e-10)
    shift = run(q, k, v, updates=3, perturbation="shift", epsilon=5.0)
    np.testing.assert_allclose(run(q, k, v, updates=3, epsilon=0.2), shift, rtol=0, atol=1e-10)


def test_t11_without_a_perturbation_it_is_phi() -> None:
    q, k, v = qkv()
    out, saved = ra.koopman.forward(q, k, v, perturbation="identity", epsilon=0.0)
    step = saved.inner.updates[0]
    phi = np.sum(step.modes * step.section[..., None], axis=-2)
    np.testing.assert_allclose(out, phi, rtol=0, atol=1e-12)
    errors = [np.linalg.norm(run(q, k, v, epsilon=e) - phi) for e in (2e-3, 1e-3)]
    assert errors[0] / errors[1] == pytest.approx(2.0, rel=0.05)


def test_t12_a_huge_ridge() -> None:
    q, k, v = qkv()
    attended = ra.koopman.forward(q, k, v, updates=1)[0]
    assert np.max(np.abs(run(q, k, v, ridge=1e10))) < 1e-6
    second = ra.softmax.forward(attended, k, v)[0]
    assert np.max(np.abs(run(q, k, v, ridge=1e10, tau=1.0) - second)) < 1e-6


def test_t13_both_fits_agree_without_a_ridge() -> None:
    q, k, v = qkv(keys=7)
    stein, separable = (run(q, k, v, updates=3, ridge=1e-10, jitter=1e-6, fit=fit) for fit in ("stein", "separable"))
    assert np.max(np.abs(stein - separable)) < 1e-7 * np.max(np.abs(stein))


@pytest.mark.parametrize("options", [{}, {"space": "full"}, {"augment": True}, {"fit": "separable"}])
def test_t14_permutations(options: dict[str, Any]) -> None:
    q, k, v = qkv()
    out = run(q, k, v, updates=3, jitter=1e-3, **options)
    order = [3, 0, 6, 1, 5, 2, 4]
    np.testing.assert_allclose(
        run(q, k[:, :, order], v[:, :, order], updates=3, jitter=1e-3, **options), out, atol=1e-11
    )
    turned, straight = (run(x, k, v, updates=3, jitter=1e-3, form="dense", **options) for x in (q[:, :, ::-1], q))
    assert np.array_equal(turned[:, :, ::-1], straight)
    # Matrix products of many queries at once round by place.
    turned = run(q[:, :, ::-1], k, v, updates=3, jitter=1e-3, form="shared", **options)
    assert np.max(np.abs(turned[:, :, ::-1] - straight)) < 1e-11


CAUSAL: list[dict[str, Any]] = [{"space": s, "fit": f} for s in ("keys", "full") for f in ("stein", "separable")]


@pytest.mark.parametrize("options", CAUSAL)
def test_t15_no_leak(options: dict[str, Any]) -> None:
    q, k, v = qkv(6, 6)
    out = run(q, k, v, updates=3, causal=True, **options)
    for j in (1, 3, 5):
        parts = []
        for name, x in (("q", q), ("k", k), ("v", v)):
            parts.append(np.concatenate([x[:, :, :j], 10.0 * draw(f"other {name}", 1, 2, 6 - j, 4)], axis=2))
        assert np.array_equal(run(*parts, updates=3, causal=True, **options)[:, :, :j], out[:, :, :j])


@pytest.mark.parametrize("options", CAUSAL)
def test_t16_a_prefix(options: dict[str, Any]) -> None:
    q, k, v = qkv(6, 6)
    out = run(q, k, v, updates=3, causal=True, **options)
    short = run(q[:, :, :4], k[:, :, :4], v[:, :, :4], updates=3, causal=True, **options)
    assert np.max(np.abs(short - out[:, :, :4])) < 1e-8


@pytest.mark.parametrize("options", [*CAUSAL, {"augment": True}])
def test_t17_a_masked_key_is_deleted(options: dict[str, Any]) -> None:
    q, k, v = qkv()
    keep = np.asarray([True, False, True, True, False, True, True])
    masked = run(q, k, v, updates=3, mask=keep, **options)
    assert np.max(np.abs(masked - run(q, k[:, :, keep], v[:, :, keep], updates=3, **options))) < 1e-9


def test_t20_the_certificate_bounds_the_slope() -> None:
    x, y = 3.0 * draw("x", 1, 2, 5, 4), 3.0 * draw("y", 1, 2, 5, 4)
    for kernel in KERNELS:
        if kernel == "linear+polynomial":
            continue
        q, k, v = qkv()
        _, saved = ra.koopman.forward(q, k, v, perturbation="identity", kernel=kernel, updates=3)
        from refattn.mechanisms.koopman.observables import Observables
        from refattn.mechanisms.koopman.one_step import OneStep

        inner, step = saved.inner, saved.inner.updates[-1]
        seen = Observables(inner.numbers.kernel(inner.options), inner.k[:, :, None], inner.seen, False)
        one = OneStep(seen, step.dual, step.points[..., :-1, :], step.modes)
        change = np.linalg.norm(one.at(x)[0] - one.at(y)[0], axis=-1)
        assert np.all(change <= one.steepness() * np.linalg.norm(x - y, axis=-1))


def test_certify_raises() -> None:
    q, k, v = qkv()
    ra.koopman.forward(q, k, v, perturbation="identity", epsilon=0.01, certify=True)
    with pytest.raises(ValueError, match="certify: got a perturbation whose share of the one-step map is"):
        ra.koopman.forward(q, k, v, perturbation="identity", epsilon=50.0, certify=True)


# --- edges


def test_a_singular_perturbation_raises_with_its_place() -> None:
    q, k, v = qkv()
    with pytest.raises(KoopmanInverseError, match=r"update 2: the perturbation was not inverted at 10 positions") as e:
        ra.koopman.forward(q, k * 0.0, v, epsilon=0.0, tau=0.0)  # psi = phi = 0, and z = 0 ... has no single root
    assert e.value.update == 2
    assert e.value.positions[0] == (0, 0, 0)


def test_another_candidate_is_tried() -> None:
    q, k, v = qkv()
    epsilon = np.asarray([[0.0], [3.0]])
    out, saved = ra.koopman.forward(q, k, v, epsilon=epsilon)
    np.testing.assert_array_equal(out, ra.koopman.forward(q, k, v, epsilon=3.0)[0])
    gradient = ra.koopman.backward(saved, draw("d", *out.shape))["epsilon"]
    assert gradient[0, 0] == 0.0
    assert gradient[1, 0] != 0.0


def test_twice_every_key_is_half_the_ridge() -> None:
    q, k, v = qkv()
    twice = [np.concatenate([x, x], axis=2) for x in (k, v)]
    for fit, ridge in (("stein", 0.1), ("separable", 0.2)):
        out = run(q, *twice, ridge=0.2, updates=3, fit=fit)
        assert np.max(np.abs(out - run(q, k, v, ridge=ridge, updates=3, fit=fit))) < 1e-5


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"fit": "separable"}, {"space": "full"}, {"augment": True}])
def test_trouble_gives_finite_numbers(options: dict[str, Any]) -> None:
    """One key; equal keys; no keys but 0; a trajectory that stands still; more transitions than keys."""
    q, k, v = qkv()
    for given in ((q, k[:, :, :1], v[:, :, :1]), (q, k[:, :, :1] + 0.0 * k, v), (q, 0.0 * k, v), (v, v, v)):
        for updates in (2, 5):
            out, saved = ra.koopman.forward(*given, perturbation="identity", updates=updates, **options)
            gradients = ra.koopman.backward(saved, draw("d", *out.shape))
            assert all(np.all(np.isfinite(x)) for x in (out, *gradients.values()))


def test_a_query_that_sees_nothing_gives_nothing() -> None:
    q, k, v = qkv()
    mask = np.ones((5, 7), dtype=bool)
    mask[2] = False
    out, saved = ra.koopman.forward(q, k, v, perturbation="identity", mask=mask, updates=3)
    assert np.all(out[:, :, 2] == 0.0)
    assert np.all(ra.koopman.backward(saved, draw("d", *out.shape))["q"][:, :, 2] == 0.0)
