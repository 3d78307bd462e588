"""Layouts: each is brought back to what it was made from, and attention over it is attention without it, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

import refattn as ra
from refattn.ops.alibi import alibi_forward, alibi_slopes
from refattn.verify import layouts

RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(4, h, 7, 3)) for h in (4, 2, 2))
LENGTHS = np.asarray([7, 0, 3, 1])


def existing(x: np.ndarray) -> np.ndarray:
    return np.where((np.arange(x.shape[2]) < LENGTHS[:, None])[:, None, :, None], x, 0.0)


def test_packed_sequences_are_each_alone() -> None:
    packed, starts = layouts.pack(K, LENGTHS)
    assert packed.shape == (11, 2, 3) and starts.tolist() == [0, 7, 7, 10, 11]
    assert (layouts.unpack(packed, starts, 7) == existing(K)).all()
    other = RNG.normal(size=packed.shape)
    np.testing.assert_allclose(np.sum(packed * other), np.sum(K * layouts.unpack(other, starts, 7)), rtol=1e-12)
    whole, _ = ra.softmax.forward(Q, K, V, causal=True, q_lengths=LENGTHS, k_lengths=LENGTHS)
    out, _ = layouts.pack(whole, LENGTHS)
    for n, length in enumerate(LENGTHS):
        alone, _ = ra.softmax.forward(*(x[n : n + 1, :, :length] for x in (Q, K, V)), causal=True)
        np.testing.assert_allclose(np.moveaxis(alone[0], 0, 1), out[starts[n] : starts[n + 1]], rtol=1e-14, atol=1e-15)


def test_pages() -> None:
    cache, table = layouts.to_pages(K, LENGTHS, 2, seed=5)
    assert np.isnan(cache).any() and (table[1] == -1).all()
    for n, length in enumerate(LENGTHS):
        for t in range(length):
            assert (cache[table[n, t // 2], t % 2] == K[n, :, t]).all()
    assert (layouts.from_pages(cache, table, LENGTHS, 7) == existing(K)).all()


def test_selected_keys_are_a_set() -> None:
    mask = RNG.random((2, 3, 9)) < 0.4
    for more in ({}, {"seed": 1}, {"seed": 2, "repeat": True}):
        assert (layouts.mask_of(layouts.indices_of(mask, 9, **more), 9) == mask).all()  # type: ignore[arg-type]
    assert layouts.mask_of(np.asarray([-1, 9, 2, 2]), 9).nonzero()[0].tolist() == [2]
    with pytest.raises(ValueError, match="needs at most 1"):
        layouts.indices_of(mask, 1)


@pytest.mark.parametrize("offset", [-20, -3, 0, 24, 60])
@pytest.mark.parametrize("heads", [4, 12])
def test_slopes_are_found_again(heads: int, offset: int) -> None:
    for dtype in ("float64", "float32"):
        bias = alibi_forward(alibi_slopes(heads, np.zeros(1, dtype)), 13, 37, offset)
        found = layouts.slopes_of(bias)
        assert found is not None and found[1] == offset
        assert (found[0] == alibi_slopes(heads, np.zeros(1, dtype))).all()
        bias[0, 0, 3, 4] *= 1.5
        assert layouts.slopes_of(bias) is None
