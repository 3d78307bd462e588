"""Hopfield attention: what Ramsauer et al. claim, the gradient of a fixed point, and wrong kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Wrong
from guests import hopfield

import refattn as ra
from refattn.verify import check, verify

Q, K, V, D = np.random.default_rng(0).standard_normal((4, 2, 3, 5, 4))


def step(x: Any, k: Any, beta: float) -> Any:
    """One update, in NumPy."""
    powers = np.exp(beta * x @ k.swapaxes(-1, -2))
    return powers / powers.sum(-1, keepdims=True) @ k


def energy(x: Any, k: Any, beta: float) -> Any:
    return 0.5 * (x * x).sum(-1) - np.log(np.exp(beta * x @ k.swapaxes(-1, -2)).sum(-1)) / beta


def test_every_check_agrees() -> None:
    report = check(hopfield.record)
    assert report.exit_code == 0
    rows = {row.name: row.status for row in report.rows}
    assert rows["every stored case"] == "agrees" and rows["every equation"] == "agrees"


# --- claims


def test_without_updates_it_is_softmax_attention() -> None:
    out, saved = hopfield.forward(Q, K, V, updates=0, causal=True)
    expected, other = ra.softmax.forward(Q, K, V, causal=True)
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-15)
    own, theirs = hopfield.backward(saved, D), ra.softmax.backward(other, D)
    for name in "qkv":
        np.testing.assert_allclose(own[name], theirs[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("updates", [1, 3])
def test_an_update_is_attention_with_keys_as_values(updates: int) -> None:
    x = Q
    for _ in range(updates):
        x, _ = ra.softmax.forward(x, K, K, scale=0.7)
    np.testing.assert_allclose(
        hopfield.forward(Q, K, V, beta=0.7, updates=updates)[0],
        ra.softmax.forward(x, K, V, scale=0.7)[0],
        rtol=1e-12,
    )


@pytest.mark.parametrize("beta", [0.1, 0.5, 2.0])
def test_the_energy_falls(beta: float) -> None:
    """By at least half the squared step: what the definition derives from the concave-convex procedure."""
    x = 3.0 * Q
    for _ in range(6):
        after, _ = hopfield.forward(x, K, K, beta=beta, updates=0)
        assert (energy(x, K, beta) - energy(after, K, beta) >= 0.5 * ((after - x) ** 2).sum(-1) - 1e-12).all()
        x = after


def test_the_bound_of_the_concave_convex_procedure() -> None:
    """The energy lies below a parabola that touches it at x and is lowest at x'."""
    beta, rng = 0.8, np.random.default_rng(1)
    after = step(Q, K, beta)

    def bound(y: Any) -> Any:
        lse = 0.5 * (Q * Q).sum(-1) - energy(Q, K, beta)
        return 0.5 * (y * y).sum(-1) - lse - (after * (y - Q)).sum(-1)

    np.testing.assert_allclose(bound(Q), energy(Q, K, beta), rtol=1e-12)
    for _ in range(20):
        y = Q + rng.standard_normal(Q.shape)
        assert (bound(y) >= energy(y, K, beta) - 1e-12).all()
        assert (bound(y) >= bound(after) - 1e-12).all()


@pytest.mark.parametrize("beta", [4.0, 8.0, 12.0, 16.0])
def test_the_error_of_retrieval_is_exponentially_small(beta: float) -> None:
    """Theorem 5: 2 (N - 1) exp(-beta (Delta - 2 max(|x - k|, |x* - k|) M)) M after one update."""
    rng = np.random.default_rng(2)
    k = rng.standard_normal((1, 1, 6, 32))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)  # M = 1
    x = k + 0.01 * rng.standard_normal(k.shape)
    products = (k @ k.swapaxes(-1, -2))[0, 0]
    delta = np.min(1.0 - products + 10.0 * np.eye(6), axis=-1)
    out, _ = hopfield.forward(x, k, k, beta=beta, updates=0)
    rest, _ = hopfield.forward(x, k, k, beta=beta, updates=200)
    near = np.maximum(np.linalg.norm(x - k, axis=-1), np.linalg.norm(rest - k, axis=-1))[0, 0]
    bound = 2.0 * 5.0 * np.exp(-beta * (delta - 2.0 * near))
    error = np.linalg.norm(out - k, axis=-1)[0, 0]
    assert (error <= bound).all()
    assert beta < 16.0 or (error < 1e-3).all()  # the bound is worth something
    assert beta > 4.0 or (error > 1e-2).any()


def test_at_a_small_beta_all_states_rest_near_the_mean_of_all_patterns() -> None:
    out, _ = hopfield.forward(Q, K, K, beta=0.01, updates=30)
    np.testing.assert_allclose(out, np.broadcast_to(K.mean(2, keepdims=True), K.shape), atol=0.05)


# --- the gradient of a fixed point


def test_the_gradient_of_a_fixed_point_is_that_of_all_updates() -> None:
    """Where the states have come to rest; the query has no part in it."""
    given: dict[str, Any] = {"beta": 0.3, "updates": 200}
    both = {}
    for fixed in (False, True):
        out, saved = hopfield.forward(Q, K, V, fixed_point=fixed, **given)
        both[fixed] = hopfield.backward(saved, D)
    for name in ("k", "v", "beta"):
        np.testing.assert_allclose(both[True][name], both[False][name], rtol=1e-9, atol=1e-12)
    assert np.abs(both[False]["q"]).max() < 1e-12 and not both[True]["q"].any()


def test_before_rest_it_is_another_gradient() -> None:
    given: dict[str, Any] = {"beta": 0.3, "updates": 1}
    both = [hopfield.backward(hopfield.forward(Q, K, V, fixed_point=x, **given)[1], D)["k"] for x in (False, True)]
    assert np.abs(both[0] - both[1]).max() > 1e-3


def test_the_gradient_of_beta_is_a_difference() -> None:
    out, saved = hopfield.forward(Q, K, V, beta=np.asarray(0.7), updates=2, causal=True)
    found, h = hopfield.backward(saved, D)["beta"], 1e-6
    up, down = (hopfield.forward(Q, K, V, beta=0.7 + x, updates=2, causal=True)[0] for x in (h, -h))
    assert found.shape == () and np.isclose(found, ((up - down) * D).sum() / (2.0 * h), rtol=1e-7)
    assert set(hopfield.backward(hopfield.forward(Q, K, V)[1], D)) == {"q", "k", "v"}  # none was given


# --- what it takes, and wrong kernels


@pytest.mark.parametrize(("option", "value"), [("beta", 0.0), ("updates", -1), ("updates", 1.5), ("fixed_point", 1)])
def test_bad_options_are_named(option: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{option}: got "):
        hopfield.forward(Q, K, V, **{option: value})
    with pytest.raises((TypeError, ValueError), match=f"{option}: got "):
        hopfield.record.block.Config(width=8, heads=2, **{option: value})


def test_options_reach_the_block() -> None:
    x, block = np.random.default_rng(3).standard_normal((1, 5, 8)), hopfield.record.block
    outs = []
    for options in ({}, {"updates": 2}, {"updates": 3}, {"beta": 0.1}):
        params = block.init(block.Config(width=8, heads=2, **options), seed=0, like=x)
        outs.append(block.forward(params, block.start(params, x, ra.Context()), ra.Context())[0].x)
    assert np.array_equal(outs[0], outs[1])
    assert not np.allclose(outs[0], outs[2]) and not np.allclose(outs[0], outs[3])


@pytest.mark.parametrize("name", list(hopfield.wrong.of(hopfield.record.core)))
def test_a_wrong_kernel_is_found(name: str) -> None:
    record = hopfield.record.changed(cases=(hopfield.record.case("tiny"), hopfield.record.case("flat")))
    assert verify(record, Wrong(record, name), dtypes=["float32"], grad=True).exit_code == 1
