"""Power attention: its features, its state, and wrong kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from conftest import Wrong
from guests import power
from guests.power.chunked import CHUNK, features_of, phi

from refattn.mechanisms.record import Unsupported
from refattn.verify import check, verify

Q, K, V, D = np.random.default_rng(0).standard_normal((4, 2, 4, 3 * CHUNK + 5, 3))


def test_every_check_agrees() -> None:
    report = check(power.record)
    assert report.exit_code == 0
    rows = {row.name: row.status for row in report.rows}
    assert rows["every stored case"] == "agrees" and rows["chunked, float64"] == "agrees"


# --- claims


@pytest.mark.parametrize("p", [2, 4, 6])
def test_products_of_features_are_powers(p: int) -> None:
    x, y = np.random.default_rng(1).standard_normal((2, 20, 4))
    features = features_of(4, p, x)
    np.testing.assert_allclose(
        (phi(x, features) * phi(y, features)).sum(-1), (x * y).sum(-1) ** p, rtol=1e-9, atol=1e-9
    )


def test_how_many_features_there_are() -> None:
    """C(d + p - 1, p), which is nearly d^p / p! of the d^p ordered products."""
    for d, p in ((4, 2), (3, 4), (5, 3)):
        assert features_of(d, p, Q).weights.shape == (math.comb(d + p - 1, p),)
    assert (math.comb(65, 2), 64**2) == (2080, 4096)
    assert (math.comb(67, 4), 64**4) == (766_480, 16_777_216)


@pytest.mark.parametrize("p", [2, 4])
def test_weights_are_shares(p: int) -> None:
    out, saved = power.forward(Q, K, np.ones_like(V), p=p, causal=True)
    np.testing.assert_allclose(out, np.ones_like(V), rtol=1e-12)
    assert (saved.inner[7] >= 0.0).all()
    with pytest.raises(ValueError, match="p: got 3, needs an even number"):
        power.forward(Q, K, V, p=3)


def test_the_scale_changes_no_output() -> None:
    outs = [power.forward(Q, K, V, p=4, causal=True, scale=scale)[0] for scale in (0.1, 1.0, 3.0)]
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("p", [2, 4])
def test_a_state_reads_what_attention_does(p: int) -> None:
    """Token by token: a sum of features times values, whose size does not grow, gives every output and gradient."""
    features = features_of(3, p, Q)
    whole, saved = power.forward(Q, K, V, p=p, causal=True, implementation="dense")
    state, sums = np.zeros((2, 4, math.comb(2 + p, p), 3)), np.zeros((2, 4, math.comb(2 + p, p)))
    for n in range(Q.shape[2]):
        key, query = phi(K[:, :, n], features), phi(Q[:, :, n] / math.sqrt(3.0), features)
        state, sums = state + key[..., None] * V[:, :, n, None, :], sums + key
        out = (query[..., None] * state).sum(-2) / (query * sums).sum(-1)[..., None]
        np.testing.assert_allclose(out, whole[:, :, n], rtol=1e-7, atol=1e-7)
    chunked, other = power.forward(Q, K, V, p=p, causal=True, implementation="chunked")
    np.testing.assert_allclose(chunked, whole, rtol=1e-9, atol=1e-10)
    own, theirs = power.backward(other, D), power.backward(saved, D)
    for name in "qkv":
        largest = np.abs(theirs[name]).max()
        np.testing.assert_allclose(own[name] / largest, theirs[name] / largest, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"causal": True, "mask": np.ones((1, 1, 1, 1), bool)}])
def test_chunks_decline_what_they_do_not_compute(options: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="implementation: got chunked, needs a causal call"):
        power.forward(Q, K, V, implementation="chunked", **options)


# --- wrong kernels


@pytest.mark.parametrize("name", list(power.wrong.of(power.record.core)))
def test_a_wrong_kernel_is_found(name: str) -> None:
    record = power.record.changed(cases=(power.record.case("tiny"), power.record.case("causal")))
    assert verify(record, Wrong(record, name), dtypes=["float32"], grad=True).exit_code == 1


@pytest.mark.parametrize("implementation", ["dense", "chunked"])
def test_an_honest_kernel_agrees(implementation: str) -> None:
    record = power.record.changed(cases=(power.record.case("causal"), power.record.case("causal-fourth")))

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return record.core.forward(q, k, v, implementation=implementation, **options)[0]

    assert verify(record, kernel, dtypes=["float32", "bfloat16"]).exit_code == 0
