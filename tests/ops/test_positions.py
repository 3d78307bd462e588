"""ALiBi and rotary positions: against their definitions, and each backward as the adjoint of its forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn.ops.alibi import alibi_backward, alibi_forward, alibi_slopes
from refattn.ops.rotary import angles, rotary_backward, rotary_forward

X = np.random.default_rng(0).normal(size=(2, 3, 5, 8))
COS, SIN = angles(np.arange(5) + 3, 6, X)


def test_slopes() -> None:
    eight = 2.0 ** -np.arange(1.0, 9.0)
    assert (alibi_slopes(8, X) == eight).all()
    np.testing.assert_allclose(alibi_slopes(12, X), [*eight, *2.0 ** -np.asarray([0.5, 1.5, 2.5, 3.5])], rtol=1e-15)


@pytest.mark.parametrize("offset", [4, np.asarray([4, -1])], ids=["one", "batch"])
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_alibi(shape: tuple[int, ...], offset: Any) -> None:
    slopes = np.random.default_rng(1).normal(size=shape)
    bias = alibi_forward(slopes, 5, 7, offset)
    at = np.broadcast_to(offset, (2,))
    for b, h, i, j in np.ndindex(*bias.shape):
        assert bias[b, h, i, j] == -np.broadcast_to(slopes, (2, 3))[b, h] * abs(i + at[b] - j)
    pull = np.random.default_rng(2).normal(size=bias.shape)
    found = alibi_backward(pull, slopes, offset)
    other = np.random.default_rng(3).normal(size=shape)
    np.testing.assert_allclose(np.sum(found * other), np.sum(pull * alibi_forward(other, 5, 7, offset)), rtol=1e-12)
    assert found.shape == shape


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool) -> None:
    y = rotary_forward(X, COS, SIN, interleaved=interleaved)
    assert (y[..., 6:] == X[..., 6:]).all()
    for n in range(3):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + 3)
        turned = (X[..., a] + 1j * X[..., b]) * np.exp(1j * (np.arange(5) + 3) * 10000.0 ** (-n / 3))
        np.testing.assert_allclose(y[..., a] + 1j * y[..., b], turned, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(rotary_backward(y, COS, SIN, interleaved=interleaved), X, rtol=1e-12, atol=1e-14)
    pull = np.flip(X, axis=3)
    back = rotary_backward(pull, COS, SIN, interleaved=interleaved)
    np.testing.assert_allclose(np.sum(back * X), np.sum(pull * y), rtol=1e-12)


def test_positions_of_each_sequence() -> None:
    cos, sin = angles(np.asarray([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]), 8, X)
    for n, first in enumerate((0, 7)):
        one = angles(np.arange(first, first + 5), 8, X)
        assert (rotary_forward(X, cos, sin)[n] == rotary_forward(X[n : n + 1], *one)[0]).all()
    with pytest.raises(ValueError, match="cos, sin: got shapes"):
        rotary_forward(X, cos[..., :1, :], sin[..., :1, :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_of_turned_rows_depend_on_the_difference_of_their_places(interleaved: bool) -> None:
    r = np.random.default_rng(1)
    q, k, places = r.normal(size=(1, 1, 5, 8)), r.normal(size=(1, 1, 5, 8)), r.integers(0, 1000, size=(2, 5))

    def scores(shift: int) -> Any:
        q_angles, k_angles = (angles(place + shift, 8, q) for place in places)
        turned = rotary_forward(q, *q_angles, interleaved=interleaved)
        return turned @ rotary_forward(k, *k_angles, interleaved=interleaved).mT

    np.testing.assert_allclose(scores(1), scores(0), rtol=1e-10, atol=1e-11)
    assert (
        np.abs(np.sum(rotary_forward(q, *angles(places[0], 8, q)) ** 2, axis=3) - np.sum(q * q, axis=3)).max() < 1e-13
    )
    other = places[0] + 1  # positions that begin at 1 change the op, and no score
    assert np.abs(rotary_forward(q, *angles(other, 8, q)) - rotary_forward(q, *angles(places[0], 8, q))).max() > 0.1
