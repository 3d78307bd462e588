"""Evaluations of softmax attention where numbers are huge, tiny or missing, and what memory they take."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.mechanisms.softmax.implementations.bound import safe_rows
from tests.mechanisms.softmax.calls import (
    Call,
    as_stored,
    assert_close,
    assert_same_bits,
    bounds,
    cut,
    make,
    run,
)

# --- sizes, and which implementation is taken


@pytest.mark.parametrize("implementation", ["auto", "dense", "tiled"])
@pytest.mark.parametrize("sizes", [
    (0, 2, 1, 3, 4, 2, 5), (2, 0, 0, 3, 4, 2, 5), (2, 0, 2, 3, 4, 2, 5), (2, 2, 1, 0, 4, 2, 5), (2, 2, 1, 3, 0, 2, 5),
    (2, 2, 1, 3, 4, 2, 0), (1, 1, 1, 1, 1, 1, 1),
])  # fmt: skip
def test_sizes_of_zero_and_one(sizes: tuple[int, ...], implementation: str) -> None:
    call = make(*sizes, causal=True, softcap=2.0, scale=0.3)
    found, expected = run(call, implementation), run(call)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in expected.items()}
    assert_close(found, expected, bounds(call))
    if sizes[4] == 0:
        assert not np.any(found["out"]) and np.all(found["lse"] == -math.inf)
    if sizes == (1,) * 7:
        np.testing.assert_array_equal(found["out"], call.v)


def test_the_choice_of_an_implementation() -> None:
    def implementation(i: int, j: int, **options: Any) -> str:
        x = np.zeros((1, 1, max(i, j), 1))
        return str(ra.softmax.forward(x[:, :, :i], x[:, :, :j], x[:, :, :j], **options)[1].implementation)

    assert (
        implementation(128, 128) == "dense"
        and implementation(128, 129) == "tiled"
        and implementation(1, 128 * 128 + 1) == "tiled"
    )
    assert (
        implementation(2, 2, implementation="tiled") == "tiled"
        and implementation(300, 300, implementation="dense") == "dense"
    )
    assert implementation(0, 5, implementation="tiled") == "dense"
    with ra.trace() as t:
        assert implementation(128, 129) == "dense"
    assert t["SM.1"].shape == (1, 1, 128, 129)


# --- queries that may attend nothing


@pytest.mark.parametrize("queries", [600, 40])
def test_blocks_of_empty_rows_are_silent(queries: int) -> None:
    call = make(1, 1, 1, queries, 10, 2, 2, causal=True, softcap=1.0)
    assert_close(run(call, "tiled"), run(call), bounds(call))


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_propagates_in_the_core(value: float, implementation: str) -> None:
    """It reaches the rows that it belongs to, and no others."""
    call = make(1, 2, 2, 4, 5, 3, 2)
    plain = run(call, implementation)
    with np.errstate(all="ignore"):
        for name, rows in (("q", [2]), ("k", range(4)), ("v", range(4))):
            array: Any = np.array(getattr(call, name))
            array[0, 1, 2, 0] = value
            out = run(replace(call, **{name: array}), implementation)["out"]
            assert np.array_equal(out[0, 0], plain["out"][0, 0])
            kept = [row for row in range(4) if row not in rows]
            assert np.array_equal(out[0, 1, kept], plain["out"][0, 1, kept])
            if name != "k" or math.isnan(value):
                assert not np.any(np.isfinite(out[0, 1, list(rows), 0]))
        d_out = np.array(call.d_out)
        d_out[0, 1, 2, 0] = value
        found = run(replace(call, d_out=d_out), implementation)
        assert not np.any(np.isfinite(found["q"][0, 1, 2])) and np.array_equal(found["q"][0, 0], plain["q"][0, 0])


# --- the tiled implementation: memory, and the choice to do without a maximum


def peak(n: int, **options: Any) -> int:
    q, k, v, d_out = (philox.normal((1, 1, n, 8), seed=0, purpose=name).astype("float32") for name in "qkvo")
    tracemalloc.start()
    try:
        out, saved = ra.softmax.forward(q, k, v, **options, implementation="tiled")
        ra.softmax.backward(saved, d_out)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=["plain", "causal"])
def test_memory_is_linear_in_the_length(options: dict[str, Any]) -> None:
    small, large = peak(2048, **options), peak(4096, **options)
    assert large < 4096 * 4096 * 4 / 8
    # A few tiles for each worker do not grow; what does grow are some tens of arrays (n, 8).
    assert large - small < 2048 * (8 * 4) * 60
    assert ra.softmax.forward(*(np.zeros((1, 1, 4096, 8), "float32"),) * 3)[1].implementation == "tiled"


def rows_are_safe(call: Call, dtype: str) -> Any:
    """Which rows do without a maximum: those whose first SM.top is 0."""
    with ra.trace() as t, cut(1000, 1000, 9, 9):
        run(call, "tiled", dtype=dtype)
    return np.reshape(t["SM.top"], call.q.shape[:3]) == 0.0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_has_the_same_bits_whatever_its_neighbours_need(dtype: str, causal: bool) -> None:
    call = as_stored(make(2, 2, 1, 12, 15, 4, 3, causal=causal), dtype)
    assert rows_are_safe(call, dtype).all()
    loud = Call(call.q.copy(), call.k, call.v, call.d_out, call.d_lse, call.options)
    loud.q[:, :, 5] *= 2.0**12
    safe = rows_are_safe(loud, dtype)
    others = [row for row in range(12) if row != 5]
    assert safe[:, :, others].all() and not safe[:, :, 5].any()
    with cut(12, 4):
        plain, mixed = run(call, "tiled", dtype=dtype), run(loud, "tiled", dtype=dtype)
    for name in ("out", "lse", "q"):
        assert_same_bits({name: plain[name][:, :, others]}, {name: mixed[name][:, :, others]})
    assert_close(mixed, run(loud), bounds(loud, dtype))


def scores_call(scores: Any, v: Any, dtype: str, **options: Any) -> Call:
    """One query whose scores are given: q = 1, k = scores."""
    k = np.asarray(scores, dtype=dtype).astype("float64").reshape(1, 1, -1, 1)
    v = np.asarray(v, dtype=dtype).astype("float64").reshape(1, 1, k.shape[2], -1)
    ones = np.ones((1, 1, 1, 1))
    return Call(ones, k, v, np.ones((1, 1, 1, v.shape[3])), ones[..., 0], {"scale": 1.0, **options})


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 60.0), ("float64", 600.0)])
@pytest.mark.parametrize("value", [1.0, 1e-12, 1e-30, 1e30, 0.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("part", [0.25, 0.9, 0.999999, 1.0, 1.000001, 1.3])
def test_no_score_near_the_limit_loses_digits(sign: float, part: float, value: float, dtype: str, limit: float) -> None:
    for scores, v in (
        ([sign * limit * part] * 5, [value] * 5),
        ([sign * limit * part, 0.0, 1.0], [value, 1.0, value]),
        ([sign * limit * part, 0.0, -sign * limit * part], [[value, 1.0], [1.0, value], [value, value]]),
    ):
        for options in ({}, {"softcap": limit * 2.0}, {"softcap": limit * part}):
            call = scores_call(scores, v, dtype, **options)
            with np.errstate(under="ignore"):  # weights that are as good as 0
                truth, found = run(call), run(call, "tiled", dtype=dtype)
            # The error of each score goes through the exponential; everything else is a few units of rounding.
            near = 64.0 * limit * float(np.finfo(dtype).eps)
            np.testing.assert_allclose(found["out"], truth["out"], rtol=near, atol=float(np.finfo(dtype).tiny))
            np.testing.assert_allclose(found["lse"], truth["lse"], rtol=near)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 55.0), ("float64", 590.0)])
@pytest.mark.parametrize("options", [{"causal": "top_left"}, {"mask": np.asarray([[[[True, False, False]]]])}])
def test_what_is_hidden_may_be_larger_than_any_float(options: dict[str, Any], dtype: str, limit: float) -> None:
    """exp of a hidden score less lse, here of 110 or 1180, overflows: it must leave no trace in a gradient."""
    call = scores_call([-limit, limit, limit], [1.0, 2.0, 3.0], dtype, **options)
    assert rows_are_safe(call, dtype).all()
    found = run(call, "tiled", dtype=dtype)
    assert_close(found, run(call), bounds(call, dtype))
    assert found["out"].item() == 1.0 and found["v"].ravel().tolist() == [1.0, 0.0, 0.0]


def test_a_value_of_zero_is_no_small_value() -> None:
    """Nothing underflows in a product with 0, so that zeros (padding, say) cost nothing."""
    call = make(1, 1, 1, 5, 6, 2, 3)
    call.v[:, :, 2], call.v[..., 1] = 0.0, 0.0
    assert rows_are_safe(call, "float32").all()
    tiny = replace(call, v=np.where(call.v == 0.0, 1e-38, call.v))
    assert not rows_are_safe(tiny, "float32").any()


@pytest.mark.parametrize("change", ["none", "zeros", "loud query", "loud key", "large value", "tiny value"])
def test_harmless_inputs_are_recognised_as_a_whole(change: str) -> None:
    """None says that no row was looked at: the usual case, which should cost the least."""
    call = as_stored(make(1, 4, 2, 6, 7, 3, 2), "float32")
    q, k, v = (x.astype("float32") for x in (call.q.reshape(1, 2, 2, 6, 3), call.k, call.v))
    x, value = {
        "none": (q, q[0, 1, 1, 4, 0]), "zeros": (v, 0.0), "loud query": (q, 1e6), "loud key": (k, 1e6),
        "large value": (v, 3e38), "tiny value": (v, 1e-38),
    }[change]  # fmt: skip
    x[(0, 1, 1, 4, 0) if x is q else (0, 1, 4, 0)] = value
    safe = safe_rows(q, k, v, None, 0.5, None)
    assert (safe is None) == (change in ("none", "zeros"))
    if safe is not None:
        assert safe.shape == (1, 2, 2, 6, 1)
        assert safe[:, 0].all() and (not safe[:, 1].all())  # the other key/value head is as it was


def test_masked_or_mixed_values_do_not_hide_small_ones() -> None:
    """The largest value says nothing of what underflows: the smallest counts, and it may stand in another column."""
    mask = np.asarray([[False, True, True]])
    masked = scores_call([-59.0] * 3, [1.0, 1e-30, 1e-30], "float32", mask=mask)
    mixed = scores_call([-59.0] * 3, [[1.0, 1e-30]] * 3, "float32")
    for call in (masked, mixed):
        np.testing.assert_allclose(run(call, "tiled", dtype="float32")["out"], run(call)["out"], rtol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}, {"scale": 0.0}], ids=str)
@pytest.mark.parametrize(
    ("q", "k"), [(1e30, 1e-30), (1e30, 1e-25), (1e30, 0.0), (0.0, 1e38), (1e-30, 1e30), (3e38, 1e-38), (1e-45, 1e38)]
)
def test_huge_numbers_with_a_finite_result(q: float, k: float, options: dict[str, Any], implementation: str) -> None:
    call = make(1, 1, 1, 5, 5, 2, 2, **options)
    signs = Call(np.sign(call.q) * q, np.sign(call.k) * k, call.v * 1e30, call.d_out * 1e-6, None, options)
    call = as_stored(signs, "float32")
    q32, k32, v32 = (x.astype("float32") for x in (call.q, call.k, call.v))
    out, saved = ra.softmax.forward(
        q32, k32, v32, **options, implementation=implementation
    )  # a warning is an error here
    truth = run(call)
    assert_close({"out": out, "lse": saved.lse}, {n: truth[n] for n in ("out", "lse")}, bounds(call, "float32"))


def test_tiny_queries_are_not_lost_from_the_bound() -> None:
    """The squares of 1e-24 underflow; with a large scale the scores are huge all the same."""
    call = make(1, 1, 1, 5, 6, 2, 2, scale=1e12)
    call = as_stored(Call(call.q * 1e-24, call.k * 1e18, call.v, call.d_out, None, call.options), "float32")
    assert not rows_are_safe(call, "float32").any()
    found = run(call, "tiled", dtype="float32")
    assert np.all(np.isfinite(found["out"])) and np.all(np.isfinite(found["lse"]))


def test_norms_that_overflow_though_the_scores_do_not() -> None:
    q, k = np.asarray([[1e30, 0.0]] * 3), np.asarray([[0.0, 1e30]] * 4)
    v = philox.normal((1, 1, 4, 2), seed=0, purpose="v")
    call = as_stored(Call(q[None, None], k[None, None], v, np.ones((1, 1, 3, 2)), None, {}), "float32")
    found = run(call, "tiled", dtype="float32")
    np.testing.assert_allclose(
        found["out"], np.broadcast_to(call.v.mean(axis=2, keepdims=True), (1, 1, 3, 2)), rtol=1e-5
    )


@pytest.mark.parametrize("number", [2, np.int64(2), np.float32(2.0), np.float64(2.0)], ids=lambda x: type(x).__name__)
def test_any_real_number_is_a_scale_and_a_softcap(number: Any) -> None:
    x = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(1, 1, 6, 4)
    out, _ = ra.softmax.forward(x, x, x, scale=number, softcap=number)
    expected, _ = ra.softmax.forward(x, x, x, scale=2.0, softcap=2.0)
    assert out.dtype == np.float32 and np.array_equal(out, expected)
