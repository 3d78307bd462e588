"""Decoding, beyond T22 of test_acceptance.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.mechanisms.koopman.layer import pointing
from tests.mechanisms.koopman.calls import drawn

normal = drawn(5)


def test_pointing() -> None:
    q, k = normal("q", 2, 2, 5, 4), normal("k", 2, 2, 7, 4)
    indices, probabilities = pointing.point(q, k)
    scores = q @ np.swapaxes(k, -1, -2) / 2.0
    weights = np.exp(scores) / np.sum(np.exp(scores), axis=-1, keepdims=True)
    assert np.array_equal(indices, np.argmax(weights, axis=-1))
    np.testing.assert_allclose(probabilities, np.max(weights, axis=-1), rtol=1e-14)
    equal, _ = pointing.point(q, np.concatenate([k, k], axis=2))
    assert np.array_equal(equal, indices)  # of equals the first


def test_pointing_sees_masks() -> None:
    q, k = normal("q", 1, 1, 5, 4), normal("k", 1, 1, 5, 4)
    indices, _ = pointing.point(q, k, causal=True)
    assert np.all(indices[0, 0] <= np.arange(5))
    mask = np.ones((5, 5), dtype=bool)
    mask[2] = False
    indices, probabilities = pointing.point(q, k, mask=mask)
    assert indices[0, 0, 2] == -1
    assert probabilities[0, 0, 2] == 0.0


@pytest.mark.parametrize("kernel", ["rbf(bandwidth=0.8)", "matern52", "polynomial(weight=0.3)"])
def test_pointing_by_the_kernel_that_the_mechanism_attends_by(kernel: str) -> None:
    """The weights of its update, of which there is a trace; two query heads share a key head."""
    q, k = normal("q", 2, 4, 5, 3), normal("k", 2, 2, 7, 3)
    with ra.trace() as traced:
        ra.koopman.forward(q, k, k, updates=1, similarity="kernel", kernel=kernel)
    weights = traced["KOOP.3"]
    indices, probabilities = pointing.point(q, k, similarity="kernel", kernel=kernel)
    assert np.array_equal(indices, np.argmax(weights, axis=-1))
    np.testing.assert_allclose(probabilities, np.max(weights, axis=-1), rtol=1e-13)
    assert not np.allclose(probabilities, pointing.point(q, k)[1])
    drawn = pointing.sample(q, k, np.full((2, 4, 5), 0.5), similarity="kernel", kernel=kernel)
    assert np.array_equal(drawn, np.argmax(np.cumsum(weights, axis=-1) > 0.5, axis=-1))
    found = pointing.generate(lambda x: x, k[0, 0], k[0, 0], q[0, 0, 0], 1, similarity="kernel", kernel=kernel)
    assert found == (indices[0, 0, 0],)


def test_pointing_names_what_is_wrong() -> None:
    q, k = normal("q", 1, 4, 5, 3), normal("k", 1, 3, 7, 3)
    with pytest.raises(ValueError, match=r"k: got 3 heads, needs a number that divides the 4 heads of q"):
        pointing.point(q, k)
    with pytest.raises(ValueError, match=r"similarity: got 'cosine', needs one of dot, kernel"):
        pointing.point(q, k[:, :1], similarity="cosine")


def test_generation_repeats_itself() -> None:
    w_q, w_k, w_v = (normal(name, 6, 4) for name in ("w_q", "w_k", "w_v"))
    source = normal("source", 5, 6)
    k, v = ((source @ w)[None, None] for w in (w_k, w_v))

    def last_query(token: Any) -> Any:
        q = (token @ w_q)[None, None, None]
        return ra.koopman.forward(q, k, v, perturbation="identity", updates=3)[0][0, 0, 0]

    found = pointing.generate(last_query, source, k[0, 0], normal("start", 6), 30)
    assert len(found) == 30 and len(set(found)) > 1
    token = normal("start", 6)
    for n in found:  # each token is pointed at by the one before
        (scores,) = last_query(token)[None] @ np.swapaxes(k[0, 0], 0, 1)
        assert n == np.argmax(scores)
        token = source[n]
    after = {found[n]: found[n + 1] for n in range(29)}
    assert all(after[found[n]] == found[n + 1] for n in range(29))
    assert pointing.generate(last_query, source, k[0, 0], normal("start", 6), 30, stop=found[0]) == found[:1]


def test_a_sequence_is_answered_by_a_sequence() -> None:
    """Every query of one sequence points at a token of the other: the same as token by token, padding left out."""
    w_q, w_k, w_v = (normal(name, 6, 4) for name in ("w_q", "w_k", "w_v"))
    tokens, source = normal("tokens", 7, 6), normal("source", 5, 6)
    k, v = ((source @ w)[None, None] for w in (w_k, w_v))
    real = np.asarray([True, True, True, False, True])
    options: dict[str, Any] = {"perturbation": "identity", "updates": 3}
    out, _ = ra.koopman.forward((tokens @ w_q)[None, None], k, v, mask=real, **options)
    indices, probabilities = pointing.point(out, k, mask=real)
    assert 3 not in indices and len(set(indices[0, 0].tolist())) > 1
    assert np.all(probabilities > 0.25)

    kept = np.flatnonzero(real)

    def last_query(token: Any) -> Any:
        q = (token @ w_q)[None, None, None]
        return ra.koopman.forward(q, k[:, :, kept], v[:, :, kept], **options)[0][0, 0, 0]

    for n, token in enumerate(tokens):
        (found,) = pointing.generate(last_query, source[kept], k[0, 0, kept], token, 1)
        assert kept[found] == indices[0, 0, n]
    # The answer in token space: the source tokens themselves, or what the last queries are there.
    assert source[indices[0, 0]].shape == pointing.to_tokens(out[0, 0], w_q).shape == tokens.shape


def test_the_last_update_may_point() -> None:
    """The readout "last": the weights that the last update attended with, before it moved the query."""
    q, k = normal("q", 1, 2, 5, 4), normal("k", 1, 2, 7, 4)
    _, saved = ra.koopman.forward(q, k, k, perturbation="identity", updates=3, implementation="dense")
    used = saved.inner.weights[-1]
    indices, probabilities = pointing.point(saved.trajectory[-2], k)
    assert np.array_equal(indices, np.argmax(used, axis=-1))
    np.testing.assert_allclose(probabilities, np.max(used, axis=-1), rtol=1e-13)
    assert not np.allclose(pointing.point(saved.trajectory[-1], k)[1], probabilities)


def test_samples_come_as_often_as_they_are_probable() -> None:
    q, k = normal("q", 1, 1, 1, 4), normal("k", 1, 1, 5, 4)
    uniform = (np.arange(20_000) + 0.5)[None, None] / 20_000
    drawn = pointing.sample(np.broadcast_to(q, (1, 1, 20_000, 4)), k, uniform)[0, 0]
    scores = (k @ np.swapaxes(q, -1, -2))[0, 0, :, 0] / 2.0
    weights = np.exp(scores) / np.sum(np.exp(scores))
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 20_000, weights, atol=1e-4)


def test_what_is_hidden_is_never_drawn() -> None:
    q, k = normal("q", 1, 1, 5, 4), normal("k", 1, 1, 5, 4)
    for u in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        drawn = pointing.sample(q, k, np.full((1, 1, 5), u), causal=True)[0, 0]
        assert np.all((drawn >= 0) & (drawn <= np.arange(5)))
    nobody = pointing.sample(q, k, np.zeros((1, 1, 5)), mask=np.zeros((5, 5), bool))
    assert np.all(nobody == -1)
    with pytest.raises(ValueError, match=r"uniform: got shape \(5,\), needs \(1, 1, 5\)"):
        pointing.sample(q, k, np.zeros(5))


def test_a_sampled_sequence_need_not_repeat_itself() -> None:
    source = normal("source", 6, 4)

    def last_query(token: Any) -> Any:
        return 0.1 * token

    uniform = philox.uniform((40,), seed=1, purpose="tokens")
    found = pointing.generate(last_query, source, source, np.zeros(4), 40, uniform=uniform)  # from an empty token
    assert found == pointing.generate(last_query, source, source, np.zeros(4), 40, uniform=uniform)
    assert any(found[n + 1] != found[m + 1] for n in range(39) for m in range(39) if found[n] == found[m])
    with pytest.raises(ValueError, match=r"uniform: got shape \(40,\), needs \(30,\)"):
        pointing.generate(last_query, source, source, np.zeros(4), 30, uniform=uniform)


def test_back_to_tokens() -> None:
    x, w_q, w = normal("x", 2, 3, 4), normal("w_q", 6, 4), normal("w", 4, 6)
    np.testing.assert_allclose(pointing.to_tokens(x, w_q) @ w_q, x, atol=1e-12)
    np.testing.assert_array_equal(pointing.to_tokens(x, w_q, w), x @ w)
    d = normal("d", 2, 3, 6)
    d_x, d_w = pointing.to_tokens_backward(x, w, d)
    np.testing.assert_allclose(np.sum(d_x * x), np.sum(d * (x @ w)), rtol=1e-12)
    np.testing.assert_allclose(np.sum(d_w * w), np.sum(d * (x @ w)), rtol=1e-12)
    with pytest.raises(ValueError, match=r"w: got shape \(6, 4\), needs \(4, 6\)"):
        pointing.to_tokens(x, w_q, w_q)


SOURCE, KEYS = normal("source", 5, 6), normal("keys", 5, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": -1}, r"steps: got -1, needs a whole number of at least 0"),
        ({"steps": "6"}, r"steps: got '6', needs a whole number of at least 0"),
        ({"steps": 10**9}, r"steps: got 1000000000, needs at most 1000000"),
        ({"stop": 5}, r"stop: got 5, needs None or one of the 5 source tokens, from 0"),
        ({"stop": -1}, r"stop: got -1, needs None or one of the 5 source tokens, from 0"),
        ({"source": SOURCE[:3]}, r"source: got shape \(3, 6\), needs \(5, width\), a token for each of the keys"),
        ({"keys": KEYS[None]}, r"keys: got shape \(1, 5, 4\), needs \(keys, width\) with at least one key"),
        ({"start": np.zeros(4)}, r"start: got shape \(4,\), needs \(6,\) as the source tokens"),
    ],
)
def test_generation_names_what_is_wrong(given: dict[str, Any], message: str) -> None:
    usual = {"source": SOURCE, "keys": KEYS, "start": np.zeros(6), "steps": 3}
    with pytest.raises((TypeError, ValueError), match=message):
        pointing.generate(lambda token: token[:4], **usual | given)
    assert len(pointing.generate(lambda token: token[:4], **usual)) == 3


def test_numbers_to_sample_by_are_an_array() -> None:
    with pytest.raises(TypeError, match=r"uniform: got list, needs an array"):
        pointing.generate(lambda token: token[:4], SOURCE, KEYS, np.zeros(6), 2, uniform=[0.1, 0.2])
    with pytest.raises(TypeError, match=r"uniform: got list, needs an array"):
        pointing.sample(KEYS[None, None], KEYS[None, None], [0.1])


def test_a_way_back_to_tokens_names_what_is_wrong() -> None:
    x, w = normal("x", 2, 3, 4), normal("w", 4, 6)
    with pytest.raises(ValueError, match=r"x: got shape \(2, 3, 4\), needs \(..., 5\) as w_q \(6, 5\)"):
        pointing.to_tokens(x, normal("w_q", 6, 5))
    with pytest.raises(ValueError, match=r"d_tokens: got shape \(2, 3, 5\), needs \(2, 3, 6\)"):
        pointing.to_tokens_backward(x, w, normal("d", 2, 3, 5))
    with pytest.raises(ValueError, match=r"w: got shape \(6, 4\), needs \(4, width\)"):
        pointing.to_tokens_backward(x, w.T, normal("d", 2, 3, 6))
