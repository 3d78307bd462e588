"""What changes nothing: above all what layer normalisation takes away."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.higher_order import loops
from tests.mechanisms.higher_order.calls import IMPLEMENTATIONS, assert_close, cut, make, run

# --- means, invariances


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[False])
def test_outputs_of_even_orders_are_means_of_values(implementation: str) -> None:
    call = make(1, 2, 2, 30, 40, 5, 3, order=2, alpha=0.5)
    out = run(call, implementation)["out"]
    assert np.all(out <= call.v.max(axis=2, keepdims=True)) and np.all(out >= call.v.min(axis=2, keepdims=True))


def test_layer_normalisation_takes_size_and_mean_away() -> None:
    call = make(1, 2, 2, 7, 9, 6, 4, norm_eps=0.0)
    moved = replace(call, q=3.7 * call.q + 0.9, k=0.2 * call.k - 1.3)
    np.testing.assert_allclose(run(moved)["out"], run(call)["out"], rtol=0.0, atol=1e-14)
    usual = make(1, 2, 2, 7, 9, 6, 4)
    tiny = replace(usual, q=1e-3 * usual.q)  # beside 1e-5 in the variance
    assert np.abs(run(tiny)["out"] - run(usual)["out"]).max() > 0.1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[True])
def test_gradients_have_no_part_along_what_is_taken_away(implementation: str) -> None:
    call = make(1, 2, 2, 9, 9, 6, 4, causal=True)
    found = run(call, implementation)
    for name in ("q", "k"):
        x = getattr(call, name)
        hat = (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)
        size = np.abs(found[name]).max()
        assert np.abs(found[name].sum(axis=-1)).max() < 1e-14 * size
        assert np.abs(np.sum(found[name] * hat, axis=-1)).max() < 1e-3 * size  # of the size of the 1e-5 in the variance


def test_a_constant_query_takes_the_mean() -> None:
    """Its normalised form is 0; the gradient is finite, r being 1 / sqrt(1e-5) = 316."""
    call = make(1, 1, 1, 3, 9, 6, 4)
    found = run(replace(call, q=np.full(call.q.shape, 2.5)))
    np.testing.assert_allclose(found["out"], np.broadcast_to(call.v.mean(axis=2, keepdims=True), found["out"].shape))
    assert np.all(np.isfinite(found["q"])) and np.abs(found["q"]).max() > 0.0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("keep", [None, 0.6])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[False])
def test_a_constant_query_attends_nothing_with_delta_1(implementation: str, keep: float | None, dtype: str) -> None:
    """All its weights are T_2(0) - 1 = 0: what rounding leaves of them, in any implementation, divides nothing."""
    call = make(2, 4, 2, 7, 700, 8, 4, keep=keep, normaliser="exact(delta=1.0)")
    q = np.array(call.q)
    q[:, :, 1], q[:, :, 3], q[:, :, 4] = 2.5, 0.1, 1000.1  # the mean of the last two is rounded
    rest = [0, 2, 5, 6]
    found, other = (
        run(replace(call, q=q), implementation, dtype=dtype),
        run(replace(call, q=q[:, :, rest], d_out=call.d_out[:, :, rest])),
    )
    for name in ("out", "q"):
        assert not np.any(found[name][:, :, [1, 3, 4]])
    if dtype == "float64":
        found |= {name: found[name][:, :, rest] for name in ("out", "normaliser", "q")}
        assert_close(found, other, 1e-9)  # z is small: weights of both signs
    if implementation == "dense" and dtype == "float64":
        small = make(1, 1, 1, 3, 5, 4, 2, normaliser="exact(delta=1.0)")
        small = replace(small, q=np.full(small.q.shape, 0.1))
        with ra.trace() as t:
            assert_close({"out": run(small)["out"]}, {"out": np.zeros((1, 1, 3, 2))}, 0.0)
        value = loops.forward(small.q, small.k, small.v, **small.options)
        assert (
            np.all(np.isinf(t["HOL.divisor"])) and np.all(np.isinf(value["HOL.divisor"])) and not np.any(value["HOL.6"])
        )


def test_narrow_heads_lose_what_they_hold() -> None:
    """Width 1 is always normalised to 0, width 2 to a sign."""
    one = make(1, 1, 1, 4, 5, 1, 2)
    np.testing.assert_allclose(run(one)["out"], np.broadcast_to(one.v.mean(axis=2, keepdims=True), (1, 1, 4, 2)))
    with ra.trace() as t:
        run(make(1, 1, 1, 4, 5, 2, 2).but(norm_eps=0.0))
    np.testing.assert_allclose(np.abs(t["HOL.1"]), 1.0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[True])
def test_a_large_mean_costs_float32_no_digits_of_the_square(implementation: str) -> None:
    """The elements of a normalised vector add up to 0 only as far as float32 holds a mean of 1000."""
    call = make(1, 2, 2, 40, 40, 16, 4, causal=True)
    arrays = {n: (getattr(call, n) + (1000.0 if n in ("q", "k") else 0.0)).astype("float32") for n in ("q", "k", "v")}
    moved = replace(call, **{n: x.astype("float64") for n, x in arrays.items()})
    with cut(8):
        np.testing.assert_allclose(
            run(moved, implementation, dtype="float32")["out"], run(moved)["out"], rtol=0.0, atol=2e-4
        )
        dense = run(moved, "dense", dtype="float32")["out"]
        np.testing.assert_allclose(run(moved, implementation, dtype="float32")["out"], dense, rtol=0.0, atol=2e-6)


# --- a rotation


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[True])
def test_rotated_queries_and_keys(implementation: str) -> None:
    """Normalise, rotate, and leave the normalisation of the core out: the sum of a rotated vector is no longer 0."""
    call = make(1, 2, 2, 21, 21, 6, 4, causal=True)
    angles = np.arange(21)[:, None] * 10.0 ** -np.arange(3)

    def rotated(x: Any) -> Any:
        x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
        a, b = x[..., :3], x[..., 3:]
        turned = (a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles))
        return np.concatenate(turned, axis=-1)

    given = replace(call, q=rotated(call.q), k=rotated(call.k)).but(layer_norm=False)
    s = given.q @ np.swapaxes(given.k, 2, 3) / (3.0 * math.sqrt(6))
    assert np.abs(s).max() <= math.sqrt(6) / 3.0
    weights = np.tril(1.0 + s + 0.5 * s * s)
    expected = weights @ call.v / weights.sum(axis=-1, keepdims=True)
    with cut(4):
        np.testing.assert_allclose(run(given, implementation)["out"], expected, rtol=0.0, atol=1e-13)
