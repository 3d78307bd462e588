"""The force: as it is published, for large scores, in both implementations, on every library, and in linear memory."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import backends
from refattn.verify.selfcheck.probe import Core
from refattn.verify.selfcheck.properties import PROPERTIES
from refattn.verify.selfcheck.samples import Sample
from tests.mechanisms.sympformer.calls import RECORD, draw, published

IMPLEMENTATIONS = RECORD.implementations


def inputs(b: int, h: int, g: int, n: int, d: int, e: int, logits: float = 1.0) -> dict[str, Any]:
    shapes = {"q": (b, h, n, d), "k": (b, g, n, d), "v": (b, g, n, e), "kinetic": (b, h, n, 1)}
    found = {name: draw(name, *shape) for name, shape in shapes.items()}
    return {**found, "q": logits * found["q"]}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=25)
@given(
    st.integers(1, 2), st.sampled_from([(1, 1), (4, 2), (3, 3)]), st.integers(1, 70), st.integers(1, 9), st.booleans()
)
def test_it_is_the_published_prefix_oracle(
    implementation: str, b: int, heads: tuple[int, int], n: int, d: int, causal: bool
) -> None:
    x = inputs(b, *heads, n, d, d + 1)
    out, saved = ra.sympformer.forward(**x, causal=causal, implementation=implementation)
    expected, z = published(**x, causal=causal)
    np.testing.assert_allclose(out, expected, rtol=0.0, atol=1e-12 * np.max(np.abs(expected)))
    np.testing.assert_allclose(saved.log_z, np.log(z[..., 0]), rtol=0.0, atol=1e-12)


def test_the_eps_of_the_authors_is_another_function() -> None:
    x = inputs(1, 1, 1, 40, 8, 8)
    ours, _ = ra.sympformer.forward(**x, causal=True)
    theirs, _ = published(**x, causal=True, eps=1e-8)
    error = np.max(np.abs(ours - theirs)) / np.max(np.abs(ours))
    assert 1e-11 < error < 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("score", [21.0, -21.0, 40.0, -40.0])
def test_no_log_z_is_clipped(implementation: str, score: float) -> None:
    """One token at rest: its force is e^score v, and its gradients of q and k are those of an exponential."""
    one = np.ones((1, 1, 1, 1), np.float32)
    q = np.float32(score) * one
    out, saved = ra.sympformer.forward(q, one, one, implementation=implementation)
    gradients = ra.sympformer.backward(saved, one)
    mass = math.exp(score)
    np.testing.assert_allclose(out, mass, rtol=1e-5)
    np.testing.assert_allclose(saved.log_z, score, rtol=1e-6)
    np.testing.assert_allclose([gradients[name].item() / mass for name in "qkv"], [1.0, score, 1.0], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [2.0, 25.0, 40.0, 80.0])
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_large_scores_in_float32_are_those_of_float64(implementation: str, size: float, sign: float) -> None:
    """Scores up to +-size, all of one sign or of both; beyond 40 at rest, as u is z^-2."""
    x = {name: value.astype(np.float32) for name, value in inputs(1, 2, 2, 37, 4, 4).items()}
    if sign:
        x["q"], x["k"] = sign * np.abs(x["q"]), np.abs(x["k"])
    if size > 40.0:
        del x["kinetic"]
    scores, d_out = x["q"] @ np.swapaxes(x["k"], -1, -2), draw("d", 1, 2, 37, 4).astype(np.float32)
    options: dict[str, Any] = {
        "causal": True,
        "scale": size / float(np.max(np.abs(scores))),
        "implementation": implementation,
    }
    found: list[dict[str, Any]] = []
    for dtype in (np.float32, np.float64):
        out, saved = ra.sympformer.forward(**{name: value.astype(dtype) for name, value in x.items()}, **options)
        gradients = ra.sympformer.backward(saved, d_out.astype(dtype))
        found.append({"out": out, "log_z": saved.log_z, **gradients})
    for name, exact in found[1].items():
        assert np.max(np.abs(found[0][name] - exact)) <= 1e-6 * size * np.max(np.abs(exact)), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_beyond_its_dtype_nothing_is_finite(implementation: str) -> None:
    """No number is wrong in silence: e^90 and, for a token that moves, e^100 are none of float32."""
    one = np.ones((1, 1, 1, 1), np.float32)
    with np.errstate(all="ignore"):
        assert np.isinf(ra.sympformer.forward(90.0 * one, one, one, implementation=implementation)[0])
        moving = ra.sympformer.forward(-50.0 * one, one, one, kinetic=one, implementation=implementation)[0]
    assert not np.isfinite(moving)


@pytest.mark.parametrize("causal", [True, False])
def test_forms_and_loops_agree_for_large_scores(causal: bool) -> None:
    x, upstream = inputs(1, 1, 1, 7, 3, 2, 30.0), {"d_out": draw("d", 1, 1, 7, 2), "d_log_z": draw("d_log_z", 1, 1, 7)}
    expected = RECORD.loops.forward(**x, causal=causal) | RECORD.loops.backward(**x, **upstream, causal=causal)
    assert np.max(np.abs(expected["SYMP.7"])) > 20.0
    for implementation in IMPLEMENTATIONS:
        out, saved = ra.sympformer.forward(**x, causal=causal, implementation=implementation)
        found = {"SYMP.12": out, "SYMP.7": saved.log_z[..., None]}
        found |= {f"dSYMP.{name}": value for name, value in ra.sympformer.backward(saved, **upstream).items()}
        for id, value in found.items():
            np.testing.assert_allclose(value, expected[id], rtol=1e-9, atol=1e-12 * np.max(np.abs(expected[id])))


@pytest.mark.parametrize("causal", [True, False])
def test_at_rest_the_force_is_z_times_softmax_attention(causal: bool) -> None:
    x = inputs(2, 3, 3, 17, 5, 4)
    out, saved = ra.sympformer.forward(x["q"], x["k"], x["v"], causal=causal)
    attention, _ = ra.softmax.forward(x["q"], x["k"], x["v"], causal=causal)
    np.testing.assert_allclose(out, np.exp(saved.log_z)[..., None] * attention, rtol=1e-12, atol=1e-13)
    still, _ = ra.sympformer.forward(**x | {"kinetic": 0.0 * x["kinetic"]}, causal=causal)
    assert np.array_equal(out, still)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_number_added_to_all_scores_is_no_symmetry(implementation: str) -> None:
    """F gets e^-c, the kinetic part of the force e^-c, the potential part e^c."""
    x = inputs(1, 1, 1, 12, 3, 3)
    moved = {**x, "q": np.concatenate([x["q"], np.ones((1, 1, 12, 1))], axis=-1)}
    moved["k"] = np.concatenate([x["k"], np.full((1, 1, 12, 1), 0.7)], axis=-1)
    rest = {"kinetic": None, "causal": True, "scale": 1.0, "implementation": implementation}
    before, saved = ra.sympformer.forward(**x, causal=True, scale=1.0, implementation=implementation)
    after, later = ra.sympformer.forward(**moved, causal=True, scale=1.0, implementation=implementation)
    potential, _ = ra.sympformer.forward(**{**x, **rest})
    potential_after, _ = ra.sympformer.forward(**{**moved, **rest})
    np.testing.assert_allclose(later.log_z, saved.log_z + 0.7, rtol=1e-12)
    np.testing.assert_allclose(potential_after, np.exp(0.7) * potential, rtol=1e-11)
    np.testing.assert_allclose(after - potential_after, np.exp(-0.7) * (before - potential), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("law", RECORD.properties)
def test_laws_hold_with_momenta(law: str) -> None:
    """The samples of the check are at rest."""
    x = inputs(2, 4, 2, 17, 8, 6)
    sample = Sample("moving", x, {}, {"d_out": draw("d_out", 2, 4, 17, 6), "d_log_z": draw("d_log_z", 2, 4, 17)})
    known: dict[bytes, dict[str, float]] = {}
    for implementation, dtype in itertools.product(IMPLEMENTATIONS, ("float64", "float32")):
        assert PROPERTIES[law](Core(RECORD, implementation, backends.get("numpy"), dtype, known), sample) <= 1.0, (
            implementation,
            dtype,
        )


def test_memory_is_linear_in_the_number_of_tokens() -> None:
    peaks = []
    for n in (256, 1024, 2048, 4096):  # the first one warms up
        x = {name: value.astype(np.float32) for name, value in inputs(1, 1, 1, n, 4, 4).items()}
        tracemalloc.start()
        with backends.use_workers(1):  # with several, the peak depends on which tasks coincide
            out, saved = ra.sympformer.forward(**x, causal=True, implementation="tiled")
            ra.sympformer.backward(saved, out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[3] < 2.3 * peaks[2] and peaks[2] < 2.3 * peaks[1], peaks


# --- bad input


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": np.ones((1, 2, 4, 3))}, ValueError, "k: got 4 tokens, needs the 5 tokens of q"),
        ({"kinetic": np.ones((1, 2, 5))}, ValueError, r"kinetic: got shape \(1, 2, 5\), needs \(1, 2, 5, 1\)"),
        ({"kinetic": np.ones((1, 2, 5, 1), "float32")}, TypeError, "got arrays of several dtypes"),
        ({"scale": np.ones(())}, TypeError, "scale: got an array, needs a finite number"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    x: dict[str, Any] = {"q": np.ones((1, 2, 5, 3)), "k": np.ones((1, 2, 5, 3)), "v": np.ones((1, 2, 5, 3))}
    given = {**x, **changes}
    given["v"] = given["v"][:, :, : given["k"].shape[2]]
    with pytest.raises(error, match=message):
        ra.sympformer.forward(**given)


def test_no_token() -> None:
    empty = np.ones((1, 1, 0, 3))
    with pytest.raises(ValueError, match=r"q: got no token in shape \(1, 1, 0, 3\), needs at least 1"):
        ra.sympformer.forward(empty, empty, empty)


def test_bad_gradients() -> None:
    x = inputs(1, 1, 1, 5, 4, 4)
    out, saved = ra.sympformer.forward(**x)
    with pytest.raises(ValueError, match=r"d_out: got shape \(5, 4\), needs \(1, 1, 5, 4\)"):
        ra.sympformer.backward(saved, out[0, 0])
    with pytest.raises(ValueError, match=r"d_log_z: got shape \(1, 1, 5, 4\), needs \(1, 1, 5\)"):
        ra.sympformer.backward(saved, out, out)
    with pytest.raises(TypeError, match="saved: got None, needs the Saved of .* that forward returned"):
        ra.sympformer.backward(None, out)  # type: ignore[arg-type]
