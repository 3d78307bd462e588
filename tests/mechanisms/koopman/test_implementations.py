"""The shared implementation: candidates, chunks, memory, and what it is not for. That it is the dense one is a law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.mechanisms.koopman import core
from refattn.mechanisms.koopman.implementations import shared
from refattn.mechanisms.koopman.options.perturbation import KoopmanInverseError, first_that_inverts
from refattn.mechanisms.record import Unsupported
from tests.mechanisms.koopman.calls import drawn, forward

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
    # A system has a row for each transition of the window: two of 8 tokens are still quick, three are not.
    transitions = {(3, None): 2, (3, 5): 2, (4, 2): 2, (4, None): 3, (4, 5): 3}
    for (updates, window), count in transitions.items():
        saved = forward(*qkv(8, 8, b=1), perturbation="identity", updates=updates, window=window)[1]
        assert saved.implementation == ("dense" if count == 2 else "shared"), (updates, window)
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
