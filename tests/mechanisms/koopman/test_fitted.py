"""What a call of the mechanism fitted: the operator is optimal, and predicts. Read from what it saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.koopman import definition
from tests.mechanisms.koopman.calls import drawn

normal = drawn(47)
RIDGE, EPSILON, JITTER = 0.2, 0.15, 1e-6


def kernel(x: Any, y: Any) -> Any:
    """x . y + exp(-|x - y|^2 / 2d)."""
    apart = x[:, None, :] - y[None, :, :]
    return x @ y.T + np.exp(-np.sum(apart**2, axis=-1) / (2.0 * x.shape[1]))


def call(way: str, updates: int = 4, **fit: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Run the definition or the library; return the keys and for each query what it saved of its last update."""
    q, k, v = normal("q", 1, 1, 5, 3), normal("k", 1, 1, 6, 3), normal("v", 1, 1, 6, 3)
    if way == "definition":
        out, (*_, tape) = definition.forward(q, k, v, updates=updates, ridge=RIDGE, epsilon=EPSILON, jitter=JITTER)
        points, _, start, _, _, _, fit, *_ = tape[-1][1]
        own = {"points": points[..., :-1, :], "attended": points[..., -1, :], "starts": start, "found": fit}
        own |= {"modes": fit @ k[:, :, None], "koopman": fit @ np.swapaxes(start, -1, -2)}
    else:
        chosen = {"fit": ra.koopman.Stein(ridge=RIDGE), "perturbation": ra.koopman.Identity(epsilon=EPSILON)}
        more = {"jitter": JITTER, "implementation": "dense", "updates": updates}
        out, saved = ra.koopman.forward(q, k, v, **{**chosen, **more, **fit})
        own = {name: getattr(saved.inner.updates[-1], name) for name in STEP}
    own["out"] = out
    return k[0, 0], [{name: value[0, 0, i] for name, value in own.items()} for i in range(5)]


STEP = ("points", "attended", "starts", "found", "modes", "koopman", "expected")
WAYS = ("definition", "library")


def gram(k: Any) -> Any:
    return kernel(k, k) + 2.0 * JITTER * np.eye(len(k))


@pytest.mark.parametrize("way", WAYS)
def test_observables_are_sections_of_the_kernel_at_the_keys(way: str) -> None:
    k, queries = call(way)
    for each in queries:
        np.testing.assert_allclose(each["starts"], kernel(each["points"][:-1], k), rtol=1e-12)


def error(found: Any, x: Any, following: Any, k: Any, ridge: float) -> float:
    """Khosravi's: of all observables at all transitions, and the ridge times the squared norm of the operator."""
    b, g = kernel(x, k), gram(k)
    z = b @ np.linalg.inv(g) @ b.T
    misses = z @ found @ g - kernel(following, k)
    return float(np.sum(misses**2) + ridge * np.trace(found.T @ z @ found @ g))


@pytest.mark.parametrize("way", WAYS)
def test_what_was_fitted_is_optimal(way: str) -> None:
    """No other operator of that form has a smaller regularised error; half of it has a larger one."""
    k, queries = call(way)
    for n, each in enumerate(queries):
        x, following = each["points"][:-1], each["points"][1:]
        least = error(each["found"], x, following, k, RIDGE)
        assert error(0.5 * each["found"], x, following, k, RIDGE) > least
        for m in range(20):
            other = normal(f"other {n} {m}", *each["found"].shape)
            more, less = (error(each["found"] + size * other, x, following, k, RIDGE) for size in (1.0, -1.0))
            assert min(more, less) > least
            # Of a parabola: where along this direction the least error lies.
            assert abs(0.5 * (less - more) / (more + less - 2.0 * least)) < 1e-6


@pytest.mark.parametrize("limit", [{"norm": 0.3}, {"rank": 1}, {"nuclear": 0.5}], ids=str)
def test_what_was_fitted_within_a_limit_is_optimal(limit: dict[str, Any]) -> None:
    """As a matrix M between orthonormal coordinates of the observables: no other within the limit errs less."""
    k, queries = call("library", fit=ra.koopman.Separable(ridge=RIDGE, **limit))
    values, vectors = np.linalg.eigh(gram(k))
    root = vectors * np.sqrt(values) @ vectors.T
    back, size = np.linalg.inv(root), len(k)
    for n, each in enumerate(queries):
        w, y = (kernel(each["points"][part], k) @ back for part in (slice(None, -1), slice(1, None)))
        m = w.T @ each["found"] @ root

        def missed(m: Any, w: Any = w, y: Any = y) -> float:
            singular = np.linalg.svd(m, compute_uv=False)
            weighed = 2.0 * limit.get("nuclear", 0.0) * np.sum(singular)
            return float(np.sum((w @ m - y) ** 2) + RIDGE * np.sum(m * m) + weighed)

        least = missed(m)
        assert np.linalg.norm(m, 2) <= limit.get("norm", np.inf) * (1.0 + 1e-9)
        assert np.linalg.matrix_rank(m, tol=1e-9) <= limit.get("rank", size)
        for c in (0.5, 0.99, 1.01):  # scaled, it keeps its rank
            u, s, v = np.linalg.svd(c * m)
            assert missed((u * np.minimum(s, limit.get("norm", np.inf))) @ v) >= least * (1.0 - 1e-12)
        assert missed(0.5 * m) > least
        for t in range(60):
            u, s, v = np.linalg.svd(m + 10.0 ** (-(t % 5)) * normal(f"change {n} {t}", size, size))
            s = np.minimum(s, limit.get("norm", np.inf)) * (np.arange(size) < limit.get("rank", size))
            assert missed((u * s) @ v) >= least * (1.0 - 1e-9)


def test_the_gram_matrix_has_the_jitter_and_no_other_shift() -> None:
    k = normal("k", 1, 1, 6, 3)
    for jitter in (1e-6, 0.01):
        with ra.trace() as traced:
            ra.koopman.forward(k, k, k, jitter=jitter, implementation="dense")
        wanted = kernel(k[0, 0], k[0, 0]) + 2.0 * jitter * np.eye(6)
        np.testing.assert_allclose(traced["KOOP.1"][0, 0], wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", WAYS)
def test_the_next_query_is_what_the_operator_predicts(way: str) -> None:
    """x + epsilon phi(x) = phi(q') + epsilon (K phi)(q'), with phi the operator on the coordinates, written out."""
    k, queries = call(way)
    for each in queries:
        x = each["points"][:-1]
        dual, b = kernel(x, k) @ np.linalg.inv(gram(k)), kernel(x, k)

        def applied(values: Any, at: Any, dual: Any = dual, found: Any = each["found"]) -> Any:
            """(K f)(at) for the values of f at the keys."""
            return (kernel(at[None], k) @ dual.T) @ found @ values

        def phi(at: Any, applied: Any = applied) -> Any:
            return applied(k, at)[0]

        at_keys = np.stack([phi(key) for key in k])
        out, attended = each["out"], each["attended"]
        wanted = phi(attended) + EPSILON * applied(at_keys, attended)[0]
        np.testing.assert_allclose(out + EPSILON * phi(out), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(each["modes"], each["found"] @ k, rtol=1e-12)
        np.testing.assert_allclose(each["koopman"], each["found"] @ b.T, rtol=1e-12)
        if way == "library":
            np.testing.assert_allclose(each["expected"], phi(attended), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fit", ["stein", "separable"])
def test_one_transition_gives_an_operator_of_rank_1(fit: str) -> None:
    """Without a ridge it takes x_0 to x_1, and what is orthogonal to x_0 to 0: the next query is along x_1.

    So queries shrink: of q' only the part along x_0 is left. The one eigenvalue is that of this map.
    """
    options = {"kernel": "linear", "jitter": 1e-13, "fit": f"{fit}(ridge=1e-11)"}
    _, queries = call("library", updates=2, **options)
    for each in queries:
        first, second = each["points"]
        part = first @ each["attended"] / (first @ first)
        np.testing.assert_allclose(each["expected"], part * second, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(each["out"], part * second, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(each["koopman"], [[first @ second / (first @ first)]], rtol=1e-6)


@pytest.mark.parametrize("kernel_of", ["linear", "rbf"])
@pytest.mark.parametrize("ridge", [1e-9, 1e-3, 0.1, 1.0])
def test_a_second_query_lies_on_one_line_whatever_the_ridge(ridge: float, kernel_of: str) -> None:
    """All that one transition can say: phi is a multiple of one vector, the row of D."""
    _, queries = call("library", updates=2, kernel=kernel_of, fit=ra.koopman.Stein(ridge=ridge))
    for each in queries:
        (row,) = each["modes"]
        for moved in (each["expected"], each["out"]):
            across = moved - (moved @ row) / (row @ row) * row
            assert np.linalg.norm(across) < 1e-9 * np.linalg.norm(moved)


def test_queries_shrink_whatever_the_ridge() -> None:
    """Of random numbers of width 16, as the page of the experiment says."""
    q, k, v = (normal(f"wide {name}", 3, 4, 32, 16) for name in "qkv")
    left = {}
    for ridge in (1e-3, 1.0):
        out, saved = ra.koopman.forward(q, k, v, fit=f"separable(ridge={ridge})", jitter=1e-2)
        attended, _ = ra.softmax.forward(saved.trajectory[1], k, v)
        left[ridge] = float(np.linalg.norm(out) / np.linalg.norm(attended))
    assert left[1e-3] == pytest.approx(0.09, abs=0.005) and left[1.0] == pytest.approx(0.08, abs=0.01)


def test_each_coordinate_has_the_best_operator_for_its_ridge() -> None:
    """With a ridge of each coordinate the modes are, column by column, those of a call with that ridge."""
    ridges = np.asarray([0.05, 0.2, 2.0])
    q, k, v = normal("q", 1, 1, 5, 3), normal("k", 1, 1, 6, 3), normal("v", 1, 1, 6, 3)
    more: dict[str, Any] = {"perturbation": ra.koopman.Identity(epsilon=EPSILON), "jitter": JITTER}
    more |= {"fit": ra.koopman.Stein(ridges.reshape(1, 1, 3)), "implementation": "dense"}
    _, saved = ra.koopman.forward(q, k, v, **more)
    together = saved.inner.updates[-1].modes[0, 0]
    for p, ridge in enumerate(ridges):
        keys, alone = call("library", fit=ra.koopman.Stein(ridge=float(ridge)), updates=2)
        for each, own in zip(together, alone, strict=True):
            np.testing.assert_allclose(each[:, p], own["modes"][:, p], rtol=1e-10)
            x, following = own["points"][:-1], own["points"][1:]
            least = error(own["found"], x, following, keys, float(ridge))
            assert least < min(error(c * own["found"], x, following, keys, float(ridge)) for c in (0.5, 0.99, 1.01))
