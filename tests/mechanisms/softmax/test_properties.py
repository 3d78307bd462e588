"""What holds for softmax attention whatever the numbers are; in float64 on NumPy, for both implementations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import backends, counter, equations
from tests.mechanisms.softmax.calls import (
    Call,
    as_stored,
    assert_close,
    assert_same_bits,
    bounds,
    calls,
    cut,
    make,
    run,
)

IMPLEMENTATIONS = ("dense", "tiled")
some = calls(smallest=1, longest=7)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
laws = settings(max_examples=50)


def tiles() -> Any:
    return cut(3, 2)


def close(found: Any, expected: Any, scale: float = 1.0) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10 * scale)


def spread(call: Call) -> Call:
    """The same call with its mask written out in full."""
    shape = (*call.q.shape[:3], call.k.shape[2])
    return call.but(mask=np.array(np.broadcast_to(call.options.get("mask", True), shape)))


# --- symmetries


@each_implementation
@laws
@given(call=some, seed=st.integers(0, 9))
def test_keys_in_another_order(implementation: str, call: Call, seed: int) -> None:
    """Keys, values and the columns of the mask together: d_k and d_v follow, nothing else changes."""
    call = spread(call.but(mask=call.allowed, causal=False))
    order = counter.permutation(call.k.shape[2], seed=seed, purpose="order")
    moved = replace(call, k=call.k[:, :, order], v=call.v[:, :, order]).but(mask=call.options["mask"][..., order])
    with tiles():
        plain, found = run(call, implementation), run(moved, implementation)
    for name in ("k", "v"):
        plain[name] = plain[name][:, :, order]
    assert_close(
        found, plain, {n: 2.0 * x if n not in ("k", "v") else 2.0 * x.max(initial=0.0) for n, x in bounds(call).items()}
    )


@each_implementation
@laws
@given(call=some, seed=st.integers(0, 9))
def test_queries_in_another_order(implementation: str, call: Call, seed: int) -> None:
    call = spread(call.but(mask=call.allowed, causal=False))
    order = counter.permutation(call.q.shape[2], seed=seed, purpose="order")
    moved = replace(
        call,
        q=call.q[:, :, order],
        d_out=call.d_out[:, :, order],
        d_lse=None if call.d_lse is None else call.d_lse[:, :, order],
    ).but(mask=call.options["mask"][:, :, order])
    with tiles():
        plain, found = run(call, implementation), run(moved, implementation)
    for name in ("out", "lse", "q"):
        plain[name] = plain[name][:, :, order]
    assert_close(found, plain, {n: 2.0 * np.max(x, initial=0.0) for n, x in bounds(call).items()})


@each_implementation
@laws
@given(call=some, factor=st.floats(-4.0, 4.0))
def test_the_output_is_linear_in_the_values(implementation: str, call: Call, factor: float) -> None:
    other = counter.normal(call.v.shape, seed=77, purpose="other")
    with tiles():
        parts = [run(replace(call, v=v, d_lse=None), implementation) for v in (call.v, other, call.v + factor * other)]
    a, b, both = parts
    assert_same_bits({"lse": both["lse"]}, {"lse": a["lse"]})
    close(both["out"], a["out"] + factor * b["out"], 10.0)
    for name in ("q", "k"):
        size = 1e3 * (1.0 + np.abs(a[name]).max(initial=0.0) + abs(factor) * np.abs(b[name]).max(initial=0.0))
        close(both[name], a[name] + factor * b[name], size)
    close(both["v"], a["v"], 10.0)


@each_implementation
@laws
@given(call=calls(smallest=1, longest=7, softcaps=False), seed=st.integers(0, 9))
def test_a_shift_of_all_keys_changes_lse_alone(implementation: str, call: Call, seed: int) -> None:
    """Keys k + c: all scores of a query grow by scale q . c."""
    shift = counter.normal((*call.k.shape[:2], 1, call.k.shape[3]), seed=seed, purpose="shift")
    moved = replace(call, k=call.k + shift)
    with tiles():
        plain, found = run(call, implementation), run(moved, implementation)
    per_head = np.repeat(shift, call.q.shape[1] // call.k.shape[1], axis=1)
    added = call.options.get("scale", 1.0 / math.sqrt(call.q.shape[3])) * np.sum(call.q * per_head, axis=-1)
    alive = np.isfinite(plain["lse"])
    close(found["lse"][alive], (plain["lse"] + added)[alive], 100.0)
    close(found["out"], plain["out"], 1e3)
    for name in ("k", "v"):
        close(found[name], plain[name], 1e4)


@each_implementation
@laws
@given(call=calls(smallest=1, longest=7, softcaps=False))
def test_gradients_of_the_keys_add_up_to_nothing(implementation: str, call: Call) -> None:
    """For out alone, since a shift of all keys does not change it; with lse they add up to its part."""
    with tiles():
        found = run(replace(call, d_lse=None), implementation)["k"]
    limit = bounds(call)["k"].max(initial=0.0) * call.k.shape[2] * 4.0
    assert np.all(np.abs(found.sum(axis=2)) <= limit)


@each_implementation
@laws
@given(call=some)
def test_scores_are_homogeneous(implementation: str, call: Call) -> None:
    """Only scale q . k matters: <d_q, q> = <d_k, k> = scale d_scale, and powers of two move freely between them."""
    call = call.but(scale=call.options.get("scale", 0.5))
    with tiles():
        found = run(call, implementation)
        moved = run(
            replace(call, q=call.q * 4.0, k=call.k * 0.5).but(scale=call.options["scale"] * 0.5), implementation
        )
    products = [float(np.sum(found["q"] * call.q)), float(np.sum(found["k"] * call.k))]
    products.append(float(call.options["scale"] * found["scale"]))
    limit = 1e-10 * (1.0 + sum(float(np.sum(np.abs(found[n] * getattr(call, n)))) for n in ("q", "k")))
    assert max(products) - min(products) <= limit
    expected = {**found, "q": found["q"] / 4.0, "k": found["k"] * 2.0, "scale": found["scale"] * 2.0}
    assert_close(moved, expected, {name: 8.0 * x for name, x in bounds(call).items()})


@each_implementation
@laws
@given(call=some)
def test_outputs_are_means_of_values(implementation: str, call: Call) -> None:
    """Each lies between the smallest and the largest value that the query may attend; equal values come out."""
    with tiles():
        out = run(call, implementation)["out"]
        ones = run(replace(call, v=np.ones(call.v.shape)), implementation)["out"]
    v = np.repeat(call.v, call.q.shape[1] // call.k.shape[1], axis=1)[:, :, None]
    allowed = call.allowed[..., None]
    alive = call.allowed.any(axis=-1)[..., None]
    low = np.where(alive, np.min(np.where(allowed, v, np.inf), axis=3), 0.0)
    high = np.where(alive, np.max(np.where(allowed, v, -np.inf), axis=3), 0.0)
    assert np.all(out >= low - 1e-13) and np.all(out <= high + 1e-13)
    close(ones, np.broadcast_to(np.where(alive, 1.0, 0.0), ones.shape))


# --- what lse is


@each_implementation
@laws
@given(call=some)
def test_parts_of_the_keys_merge_by_their_lse(implementation: str, call: Call) -> None:
    """Attention over all keys is the mean of attention over two parts, weighted by exp(lse)."""
    call = call.but(mask=call.allowed, causal=False)
    half = (call.k.shape[2] + 1) // 2
    with tiles():
        whole = run(call, implementation)
        parts = [
            run(
                replace(call, k=call.k[:, :, s], v=call.v[:, :, s]).but(mask=call.options["mask"][..., s]),
                implementation,
            )
            for s in (slice(0, half), slice(half, None))
        ]
    a, b = parts
    lse = np.logaddexp(a["lse"], b["lse"])
    alive = np.isfinite(lse)
    np.testing.assert_array_equal(alive, np.isfinite(whole["lse"]))
    close(whole["lse"][alive], lse[alive])
    with np.errstate(invalid="ignore"):
        shares = [np.where(alive, np.exp(part["lse"] - lse), 0.0)[..., None] for part in parts]
    close(whole["out"], shares[0] * a["out"] + shares[1] * b["out"], 10.0)


@each_implementation
@laws
@given(call=calls(smallest=1, longest=7, softcaps=False))
def test_the_gradient_of_lse_is_attention_over_the_keys(implementation: str, call: Call) -> None:
    """d lse_i / d q_i = scale sum_j w_ij k_j: attention with the keys as values."""
    ones = replace(call, d_out=np.zeros(call.d_out.shape), d_lse=np.ones(call.q.shape[:3]))
    keys = replace(call, v=call.k, d_out=np.zeros(call.q.shape))
    with tiles():
        found, attended = run(ones, implementation)["q"], run(keys, implementation)["out"]
    close(found, call.options.get("scale", 1.0 / math.sqrt(call.q.shape[3])) * attended, 100.0)


@each_implementation
def test_a_large_cap_is_no_cap(implementation: str) -> None:
    call = make(1, 2, 1, 5, 6, 3, 2)
    found, plain = run(call.but(softcap=1e8), implementation), run(call, implementation)
    for name in plain:
        close(found[name], plain[name], 10.0)
    assert abs(found["softcap"]) < 1e-15


# --- masks


@each_implementation
@laws
@given(call=some)
def test_causal_is_a_mask(implementation: str, call: Call) -> None:
    explicit = call.but(mask=call.allowed, causal=False)
    with tiles():
        assert_close(
            run(explicit, implementation), run(call, implementation), {n: 2.0 * x for n, x in bounds(call).items()}
        )


@each_implementation
@laws
@given(call=some)
def test_padding_is_deletion(implementation: str, call: Call) -> None:
    """Keys that nobody may attend, with any numbers in them, are no keys."""
    call = spread(call.but(mask=call.allowed, causal=False))

    def pad(x: Any, value: float, axis: int) -> Any:
        shape = list(x.shape)
        shape[axis] = 3
        return np.concatenate([x, np.full(shape, value)], axis=axis)

    padded = replace(call, k=pad(call.k, 1e6, 2), v=pad(call.v, -1e6, 2))
    padded = padded.but(mask=pad(call.options["mask"], False, 3).astype(bool))
    with tiles():
        plain, found = run(call, implementation), run(padded, implementation)
    for name in ("k", "v"):
        assert not np.any(found[name][:, :, -3:])
        found[name] = found[name][:, :, :-3]
    assert_close(found, plain, {n: 4.0 * x for n, x in bounds(call).items()})


@each_implementation
@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize("lengths", [(9, 9), (6, 9), (9, 6)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_past_does_not_see_the_future_to_the_bit(
    dtype: str, lengths: tuple[int, int], causal: Any, implementation: str
) -> None:
    """Changes of 1e6, so that some rows of a block need their maximum and others do not."""
    i, j = lengths
    call = as_stored(make(2, 4, 2, i, j, 3, 2, causal=causal), dtype)
    offset = 0 if causal == "top_left" else j - i
    with cut(4, 3):
        plain = run(call, implementation, dtype=dtype)
        for t in range(i + 1):
            first_key = min(max(t + offset, 0), j)  # what rows before t may not see
            q, k, v, d_out, d_lse = (np.array(x) for x in (call.q, call.k, call.v, call.d_out, call.d_lse))
            for x, start in ((q, t), (k, first_key), (v, first_key), (d_out, t), (d_lse, t)):
                x[:, :, start:] += 1e6
            found = run(Call(q, k, v, d_out, d_lse, call.options), implementation, dtype=dtype)
            for name in ("out", "lse", "q"):
                assert_same_bits({name: found[name][:, :, :t]}, {name: plain[name][:, :, :t]})


def test_the_future_does_change_the_choice_of_the_maximum() -> None:
    """Else the test before this one would say little."""
    call = make(1, 1, 1, 9, 9, 3, 2, causal=True)
    loud = replace(call, k=np.concatenate([call.k[:, :, :5], call.k[:, :, 5:] + 1e6], axis=2))

    def safe(c: Call) -> Any:
        with ra.trace() as t, cut(9, 9):
            run(c, "tiled")
        return np.ravel(t["SM.top"]) == 0.0

    assert safe(call).all() and safe(loud).tolist() == [True] * 5 + [False] * 4


def test_the_past_does_not_see_the_future_in_real_tiles() -> None:
    call = as_stored(make(1, 2, 1, 600, 700, 16, 8, causal=True, d_lse=False), "float32")
    t = 301
    loud = [np.array(x) for x in (call.q, call.k, call.v, call.d_out)]
    for x, start in zip(loud, (t, t + 100, t + 100, t), strict=True):
        x[:, :, start:] += 1e6
    plain, found = (
        run(c, "tiled", dtype="float32") for c in (call, replace(call, q=loud[0], k=loud[1], v=loud[2], d_out=loud[3]))
    )
    for name in ("out", "lse", "q"):
        assert_same_bits({name: found[name][:, :, :t]}, {name: plain[name][:, :, :t]})


@each_implementation
@pytest.mark.parametrize("causal", [True, "top_left"])
def test_the_past_is_what_a_shorter_call_gives(causal: Any, implementation: str) -> None:
    """Under truncation shapes change, and so may the last bits."""
    call = make(1, 2, 1, 8, 8, 3, 2, causal=causal, softcap=3.0)
    with tiles():
        whole = run(call, implementation)
        for t in (1, 3, 7):
            arrays: Any = {n: getattr(call, n)[:, :, :t] for n in ("q", "k", "v", "d_out", "d_lse")}
            short = run(replace(call, **arrays), implementation)
            limit = bounds(call)
            assert_close(
                {n: whole[n][:, :, :t] for n in ("out", "lse", "q")},
                {n: short[n] for n in ("out", "lse", "q")},
                {n: limit[n][:, :, :t] for n in ("out", "lse", "q")},
            )


def test_the_last_query_sees_all_keys() -> None:
    """Bottom-right: decoding one token over a cache is the last row of the whole."""
    call = make(2, 4, 2, 7, 9, 3, 2, causal=True)
    last = {n: getattr(call, n)[:, :, -1:] for n in ("q", "d_out", "d_lse")}
    one = replace(call, **last)
    assert_close(
        {n: run(call)[n][:, :, -1:] for n in ("out", "lse", "q")},
        {n: run(one)[n] for n in ("out", "lse", "q")},
        {n: bounds(call)[n][:, :, -1:] for n in ("out", "lse", "q")},
    )
    assert_close(run(one), run(one.but(causal=False)), bounds(one))


# --- batch, heads, workers


@each_implementation
def test_batches_and_heads_do_not_meet(implementation: str) -> None:
    """Changing everything of one batch element, or of one key/value head, leaves the others as they are."""
    call = make(3, 4, 2, 5, 6, 3, 2, mask=(3, 4, 5, 6), causal=True, softcap=2.0)
    with tiles():
        plain = run(call, implementation)
        for axis, own in ((0, {"q": 1, "k": 1}), (1, {"q": 2, "k": 1})):  # how many of the axis are changed
            arrays: dict[str, Any] = {}
            for name in ("q", "k", "v", "d_out", "d_lse"):
                x = np.array(getattr(call, name))
                x[(slice(None),) * axis + (slice(own["k" if name in ("k", "v") else "q"]),)] += 1e3
                arrays[name] = x
            found = run(replace(call, **arrays), implementation)
            for name in ("out", "lse", "q", "k", "v"):
                start = own["k" if name in ("k", "v") else "q"]
                rest = (slice(None),) * axis + (slice(start, None),)
                assert_same_bits({name: found[name][rest]}, {name: plain[name][rest]})


@each_implementation
@laws
@given(call=some)
def test_one_head_alone(implementation: str, call: Call) -> None:
    call = spread(call)
    with tiles():
        whole = run(call, implementation)
        share = call.q.shape[1] // call.k.shape[1]
        b, h = call.q.shape[0] - 1, call.q.shape[1] - 1
        at, group = (slice(b, b + 1), slice(h, h + 1)), (slice(b, b + 1), slice(h // share, h // share + 1))
        arrays: Any = {n: None if (x := getattr(call, n)) is None else x[at] for n in ("q", "d_out", "d_lse")}
        alone = run(
            replace(call, **arrays, k=call.k[group], v=call.v[group]).but(mask=call.options["mask"][at]), implementation
        )
    limit = bounds(call)
    names = ("out", "lse", "q")
    assert_close({n: alone[n] for n in names}, {n: whole[n][at] for n in names}, {n: 2.0 * limit[n][at] for n in names})


@each_implementation
@laws
@given(call=some)
def test_grouped_heads_are_repeated_heads(implementation: str, call: Call) -> None:
    """Each key/value head serves consecutive query heads; its gradient is the sum over them."""
    (b, g, j, _), h = call.k.shape, call.q.shape[1]
    repeated = replace(call, k=np.repeat(call.k, h // g, axis=1), v=np.repeat(call.v, h // g, axis=1))
    with tiles():
        found, expected = run(call, implementation), run(repeated, implementation)
    for name in ("k", "v"):
        expected[name] = expected[name].reshape(b, g, h // g, j, -1).sum(axis=2) if expected[name].size else found[name]
    assert_close(found, expected, {n: 2.0 * x for n, x in bounds(call).items()})


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_any_number_of_workers_gives_the_same_bits(dtype: str) -> None:
    call = make(2, 4, 2, 300, 520, 16, 8, mask=(300, 520), causal=True, softcap=4.0, scale=0.3)
    results = []
    for blas, workers in ((4, 1), (1, 1), (4, 3), (1, 8)):
        with threadpoolctl.threadpool_limits(blas, user_api="blas"), backends.use_workers(workers):
            results.append(run(call, "tiled", dtype=dtype))
    with equations.apply(lambda id, name, value: value):
        results.append(run(call, "tiled", dtype=dtype))
    for other in results[1:]:
        assert_same_bits(other, results[0])


@each_implementation
def test_calls_do_not_depend_on_what_ran_before(implementation: str) -> None:
    call, other = make(1, 2, 1, 5, 6, 3, 2, softcap=2.0), make(2, 2, 2, 7, 3, 1, 4, seed=9, causal=True)
    first = run(call, implementation)
    run(other, implementation)
    assert_same_bits(run(call, implementation), first)


def test_what_was_saved_serves_any_number_of_backwards() -> None:
    call = make(1, 2, 1, 5, 6, 3, 2)
    saves = [
        ra.softmax.forward(call.q, call.k, call.v, implementation=implementation)[1]
        for implementation in IMPLEMENTATIONS
    ]
    for saved in saves:
        first = ra.softmax.backward(saved, call.d_out, call.d_lse)
        ra.softmax.backward(saves[0], 2.0 * call.d_out)
        second = ra.softmax.backward(saved, call.d_out, call.d_lse)
        assert_same_bits(first, second)
