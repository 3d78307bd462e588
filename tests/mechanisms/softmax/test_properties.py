"""What holds for softmax attention whatever the numbers are; in float64 on NumPy, for both implementations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings

import refattn as ra
from refattn import backends, equations
from tests.mechanisms.softmax.calls import (
    Call,
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


def test_the_future_does_change_the_choice_of_the_maximum() -> None:
    """Else the test before this one would say little."""
    call = make(1, 1, 1, 9, 9, 3, 2, causal=True)
    loud = replace(call, k=np.concatenate([call.k[:, :, :5], call.k[:, :, 5:] + 1e6], axis=2))

    def safe(c: Call) -> Any:
        with ra.trace() as t, cut(9, 9):
            run(c, "tiled")
        return np.ravel(t["SM.top"]) == 0.0

    assert safe(call).all() and safe(loud).tolist() == [True] * 5 + [False] * 4


# --- batch, heads, workers


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
