"""The shared implementation computes what dense.py does (T19), and says what it is not for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import philox
from refattn.mechanisms.koopman import core
from refattn.mechanisms.koopman.implementations import shared
from refattn.mechanisms.koopman.options.kernel import KERNELS
from refattn.mechanisms.koopman.options.perturbation import KoopmanInverseError, first_that_inverts
from refattn.mechanisms.record import Unsupported
from tests.mechanisms.koopman.calls import drawn, forward

KERNELS_FITS = list(itertools.product(KERNELS, ("stein", "separable"), ("keys", "full", "augmented")))


draw = drawn(31)


def qkv(queries: int = 6, keys: int = 7, d: int = 4, b: int = 2, h: int = 2, g: int = 1) -> tuple[Any, Any, Any]:
    return draw("q", b, h, queries, d), draw("k", b, g, keys, d), draw("v", b, g, keys, d)


def both(q: Any, k: Any, v: Any, implementation: str, **options: Any) -> dict[str, Any]:
    """The output and all gradients."""
    names = ("ridge", "epsilon", "bandwidth", "weight")
    numbers = {name: np.asarray(x) for name, x in zip(names, (0.15, 0.2, 1.3, 0.8), strict=True)}
    if options.get("kernel") == "linear":
        del numbers["bandwidth"], numbers["weight"]
    numbers |= {"mix": np.asarray(0.9)} if options.get("perturbation") == "pencil" else {}
    options = {"perturbation": "identity", "updates": 4} | numbers | options
    out, saved = forward(q, k, v, implementation=implementation, **options)
    assert saved.implementation == implementation
    return {"out": out, **ra.koopman.backward(saved, draw("d", *out.shape))}


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    assert set(found) == set(expected)
    for name, x in expected.items():
        assert np.max(np.abs(found[name] - x)) <= tolerance * max(np.max(np.abs(x)), 1e-3), name


@pytest.mark.parametrize(("kernel", "fit", "space"), KERNELS_FITS)
def test_t19_forms_agree(kernel: str, fit: str, space: str) -> None:
    """For every kernel, fit and space, with tau, masks of keys and perturbations taken in turn."""
    n = KERNELS_FITS.index((kernel, fit, space))
    mask = np.asarray([True, False, True, True, True, False, True])[None, None, None]
    varied = {
        "tau": float(n % 2),
        "mask": mask if n % 3 == 0 else None,
        "perturbation": ("identity", "pencil")[n % 2],
        "similarity": ("dot", "kernel")[n % 5 == 0],
        "scale": ("sum", "mean")[n % 7 == 0],
        "window": (None, 2)[n % 4 == 0],
    }
    given = {"kernel": kernel, "fit": fit, "space": space, **varied}
    found, expected = both(*qkv(), "shared", **given), both(*qkv(), "dense", **given)
    if kernel == "linear":
        # K psi is psi of a linear map then, and psi drops out, but for the jitter, 1e-8: 100 times as much may be left.
        assert max(abs(found.pop("epsilon")), abs(expected.pop("epsilon"))) < 1e-6
    assert_same(found, expected)


CAUSAL: list[dict[str, Any]] = [
    {},
    {"space": "full"},
    {"space": "augmented"},
    {"tau": 1.0, "window": 1},
    {"scale": "mean"},
    {"mask": np.asarray([True, False, True, True, True, False, True])[None, None, None]},
]


@pytest.mark.parametrize("options", CAUSAL)
@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize("queries", [5, 7, 9])
def test_t19_forms_agree_where_the_future_is_hidden(queries: int, causal: Any, options: dict[str, Any]) -> None:
    """With fewer queries than keys, and with more: then the first of them see nothing."""
    given = {"fit": "separable", "causal": causal, **options}
    assert_same(both(*qkv(queries), "shared", **given), both(*qkv(queries), "dense", **given))


@pytest.mark.parametrize(
    "given",
    [
        {"perturbation": "shift", "epsilon": np.asarray(2.0), "updates": 3},
        {"fit": "separable", "rank": 1, "scale": "mean", "tau": 1.0, "jitter": 1e-3},
        {"fit": "separable", "nuclear": 0.2, "space": "full", "tau": 1.0, "jitter": 1e-3, "updates": 3},
    ],
    ids=str,
)
def test_a_strong_perturbation_and_limits(given: dict[str, Any]) -> None:
    assert_same(both(*qkv(), "shared", **given), both(*qkv(), "dense", **given), 1e-8)


@settings(max_examples=30)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.sampled_from(["stein", "separable"])
)
def test_any_sizes(queries: int, keys: int, updates: int, d: int, fit: str) -> None:
    given = {"fit": fit, "updates": updates, "jitter": 1e-2}
    arrays = qkv(queries, keys, d)
    assert_same(both(*arrays, "shared", **given), both(*arrays, "dense", **given))
    once, attended = forward(*arrays, updates=1, jitter=1e-2)[0], ra.softmax.forward(*arrays)[0]
    np.testing.assert_allclose(once, attended, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{"fit": "stein"}, {"fit": "separable", "causal": True}])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    arrays = qkv(41, 41, b=1)
    whole = both(*arrays, "shared", **options)
    monkeypatch.setattr(shared, "CHUNK", 1)  # of 8 queries
    assert len(list(shared.chunks_of(saved_of(*arrays), 41))) == 6
    assert_same(both(*arrays, "shared", **options), whole, 1e-12)


def saved_of(q: Any, k: Any, v: Any) -> Any:
    return forward(q, k, v, perturbation="identity", implementation="shared")[1].inner


@pytest.mark.parametrize("options", [{}, {"space": "augmented"}, {"space": "full"}])
def test_no_bit_of_the_future(options: dict[str, Any]) -> None:
    """T15 for the shared implementation: tokens from j on become others, and huge ones."""
    q, k, v = qkv(21, 21, b=1)
    given: dict[str, Any] = {
        "perturbation": "identity",
        "fit": "separable",
        "causal": True,
        "updates": 3,
        "implementation": "shared",
    }
    out = forward(q, k, v, **given, **options)[0]
    for j, size in itertools.product((1, 9, 17), (1.0, 1e3)):
        changed = [np.concatenate([x[:, :, :j], size * draw("other", *x[:, :, j:].shape)], axis=2) for x in (q, k, v)]
        try:
            other = forward(changed[0], changed[1], changed[2], **given, **options)[0]
        except KoopmanInverseError:  # of a query with huge keys
            continue
        assert np.array_equal(other[:, :, :j], out[:, :, :j])


# --- candidates


def test_a_candidate_is_one_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second candidate is taken by all queries, as in dense.py, although the first failed for some alone."""
    monkeypatch.setattr(shared, "CHUNK", 1)
    arrays = qkv(33, 7, b=1)
    given = {"perturbation": "shift", "updates": 3, "epsilon": np.asarray([[0.0, 0.0], [3.0, 2.5]])}
    found = both(*arrays, "shared", **given)
    assert_same(found, both(*arrays, "dense", **given))
    assert np.all(found["epsilon"][0] == 0.0)
    assert np.all(found["epsilon"][1] != 0.0)


def test_candidates_after_one_that_changes_are_tried_again() -> None:
    tried = []

    def run(chosen: Any) -> Any:
        tried.append(chosen)
        update = {(0, 0): 3, (0, 1): 2}.get(chosen)
        return chosen, None, None if update is None else KoopmanInverseError([(0, 0, 0)], 1, 1.0, update)

    assert first_that_inverts(run, 2, 2) == ((1, 0), None, (1, 0))
    assert tried == [(0, 0), (0, 1), (1, 0)]
    with pytest.raises(KoopmanInverseError):
        first_that_inverts(lambda chosen: run((0, 1)), 2, 2)


def test_the_position_of_an_error_is_that_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "CHUNK", 1)
    q, k, v = qkv(20, 7, b=1)
    with pytest.raises(KoopmanInverseError, match=r"update 2: the perturbation was not inverted") as first:
        forward(q, 0.0 * k, v, perturbation="shift", epsilon=0.0, implementation="shared")
    assert first.value.positions[:2] == ((0, 0, 0), (0, 0, 1))


# --- what is chosen


def test_auto_takes_the_quicker_one() -> None:
    small, large = qkv(4, 4, b=1), qkv(40, 40)
    assert forward(*small, perturbation="identity")[1].implementation == "dense"
    assert forward(*large, perturbation="identity")[1].implementation == "shared"
    assert forward(*large, perturbation="identity", causal=True)[1].implementation == "dense"
    assert forward(*large, perturbation="identity", causal=True, fit="separable")[1].implementation == "shared"
    with ra.trace() as traced:
        forward(*large, perturbation="identity")
    assert "KOOP.9" in traced.variables


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"causal": True},
            r'implementation: got "shared" with fit="stein" where the future is hidden, needs fit="separable"',
        ),
        ({"mask": np.ones((6, 7), bool)}, r"a mask that differs between queries, needs one of shape \(..., 1, keys\)"),
    ],
)
def test_what_the_shared_form_is_not_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        forward(*qkv(), implementation="shared", perturbation="identity", **options)


def test_causal_stein_beyond_its_limit_names_the_alternative() -> None:
    q = k = v = np.ones((1, 1, 400, 2))
    message = r'fit="stein" where the future is hidden, needs fit="separable"; or matrices of at most 33554432 elements'
    with pytest.raises(ValueError, match=message):
        forward(q, k, v, causal=True)
    with pytest.raises(
        ValueError, match=r'with 64000000 elements, needs implementation="shared" or matrices of at most'
    ):
        forward(q, k, v, implementation="dense")
    assert core.LARGEST == 2**25


def test_one_query_that_sees_all_keys_may_be_of_either_fit() -> None:
    """As in decoding."""
    q, k, v = qkv(1, 7)
    assert_same(both(q, k, v, "shared", causal=True), both(q, k, v, "dense", causal=True))


def test_a_gram_matrix_without_jitter_is_refused() -> None:
    q, k, v = qkv(5, 7, 2)
    with pytest.raises(ValueError, match=r"jitter: the Gram matrix of the keys is not positive to rounding"):
        forward(q, k, v, kernel="linear", fit="separable", jitter=0.0, implementation="shared")


@pytest.mark.slow
def test_memory_is_that_of_a_chunk() -> None:
    """Four times the queries take hardly more than the trajectories do."""
    import tracemalloc

    def peak(queries: int) -> int:
        arrays = qkv(queries, 256, 8, b=1, h=1)
        tracemalloc.start()
        _, saved = forward(*arrays, perturbation="identity", updates=3, implementation="shared")
        ra.koopman.backward(saved, arrays[0])
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert shared.CHUNK == 2**18  # 1024 queries with 256 keys
    few, many = peak(1024), peak(4096)
    assert many < few + 4 * 4096 * 8 * 8 * 4


@pytest.mark.skip_xp_backend("jax", reason="JAX compiles every operation for every shape: see the slow test")
def test_every_library_gives_the_same(backend: Any) -> None:
    for options in ({"fit": "stein"}, {"fit": "separable", "causal": True, "space": "augmented"}):
        expected = both(*qkv(9, 9), "shared", jitter=1e-3, **options)
        arrays = [backend.array(x) for x in qkv(9, 9)]
        given = {"perturbation": "identity", "jitter": 1e-3, "updates": 4, "implementation": "shared", **options}
        given |= {"ridge": 0.15, "epsilon": 0.2, "bandwidth": 1.3, "weight": 0.8}
        out, saved = forward(*arrays, **given)
        gradients = ra.koopman.backward(saved, backend.array(draw("d", *out.shape)))
        for name, x in {"out": out, **gradients}.items():
            np.testing.assert_allclose(backend.host(x), expected[name], rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"fit": "stein"}, pytest.param({"fit": "separable", "causal": True}, marks=pytest.mark.slow(sampled=False))],
)
def test_under_jit(options: dict[str, Any]) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jax.config.update("jax_enable_x64", True)
    given = {"perturbation": "identity", "jitter": 1e-3, "updates": 3, "implementation": "shared", **options}
    upstream = draw("d", 2, 2, 6, 4)

    def run(*arrays: Any) -> dict[str, Any]:
        out, saved = forward(*arrays, **given)
        return {"out": out, **ra.koopman.backward(saved, 0.0 * out + upstream)}

    expected = run(*qkv())
    for name, x in jax.jit(run)(*qkv()).items():
        np.testing.assert_allclose(np.asarray(x), expected[name], rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(("seed", "d"), [(15, 8), (23, 16)])
def test_points_that_hardly_differ_are_no_reason_to_refuse_an_inverse(seed: int, d: int) -> None:
    """The first token sees one key, where a path comes to rest: there psi has an inverse, in float32 too."""
    q, k, v = (2.0 * philox.normal((1, 1, 3, d), seed=seed, purpose=name) for name in "qkv")

    def out(implementation: str, dtype: Any) -> Any:
        given = (x.astype(dtype) for x in (q, k, k + 0.1 * v))
        options: dict[str, Any] = {"causal": True, "updates": 6, "fit": "separable"}
        return ra.koopman.forward(*given, **options, implementation=implementation)[0]

    right = out("dense", np.float64)
    errors = [np.max(np.abs(out(name, np.float32) - right)) for name in ("dense", "shared")]
    assert max(errors) < 0.2 and errors[1] < 4.0 * errors[0]
