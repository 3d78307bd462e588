"""Layouts: each is brought back to what it was made from, and attention over it is attention without it, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.golden.storage_types import largest, round_to
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


def test_absorbed_latent_attention_is_the_plain_one() -> None:
    """Multi-head latent attention with w_k in the queries: output, lse and all gradients, with every option."""
    r = np.random.default_rng(4)
    (b, h, i, j), (c, d, n, e) = (2, 3, 4, 6), (8, 5, 2, 7)
    w_k, w_v = r.normal(size=(h, c, d)), r.normal(size=(h, c, e))
    q, latent, turned = r.normal(size=(b, h, i, d + n)), r.normal(size=(b, j, c)), r.normal(size=(b, j, n))
    d_out, d_lse = r.normal(size=(b, h, i, e)), r.normal(size=(b, h, i))
    mask = r.random((b, 1, i, j)) < 0.7
    options: dict[str, Any] = {"mask": mask, "causal": True, "softcap": 2.0, "sink": r.normal(size=(h,))}

    k, v = layouts.from_latent(latent, turned, w_k, w_v)
    out, saved = ra.softmax.forward(q, k, v, **options)
    g = ra.softmax.backward(saved, d_out, d_lse)
    plain = {"out": out, "lse": saved.lse, "q": g["q"], "turned": g["k"][..., d:].sum(axis=1), "sink": g["sink"]}
    plain["latent"] = np.sum(g["k"][..., :d] @ w_k.mT + g["v"] @ w_v.mT, axis=1)
    plain |= {"w_k": np.sum(latent.mT[:, None] @ g["k"][..., :d], axis=0)}
    plain |= {"w_v": np.sum(latent.mT[:, None] @ g["v"], axis=0)}

    own, one, values, scale = layouts.absorbed(q, latent, turned, w_k)
    assert own.shape == (b, h, i, c + n) and one.shape == (b, 1, j, c + n) and values.shape == (b, 1, j, c)
    inside, saved = ra.softmax.forward(own, one, values, scale=scale, **options)
    g = ra.softmax.backward(saved, d_out @ w_v.mT, d_lse)
    found = {"out": inside @ w_v, "lse": saved.lse, "turned": g["k"][:, 0, :, c:], "sink": g["sink"]}
    found["q"] = np.concatenate([g["q"][..., :c] @ w_k, g["q"][..., c:]], axis=3)
    found["latent"] = g["k"][:, 0, :, :c] + g["v"][:, 0]
    found["w_k"] = np.sum(g["q"][..., :c].mT @ q[..., :d], axis=0)
    found["w_v"] = np.sum(inside.mT @ d_out, axis=0)
    for name, x in plain.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-12, atol=1e-12, err_msg=name)
    wrong, _ = ra.softmax.forward(own, one, values, **options)  # the scale of the absorbed width
    assert np.abs(wrong @ w_v - out).max() > 0.1


def test_queries_of_values_are_wider_queries() -> None:
    """Scores that have a part of the values, too, are those of [q, q of the values] with [k, v]."""
    r = np.random.default_rng(7)
    q, k, v, of_v = (r.normal(size=(1, 2, n, d)) for n, d in ((3, 4), (6, 4), (6, 5), (3, 5)))
    found, _ = ra.softmax.forward(np.concatenate([q, of_v], axis=3), np.concatenate([k, v], axis=3), v)
    expected, _ = ra.softmax.forward(q, k, v, scale=1 / 3, bias=of_v @ v.mT / 3)
    np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_a_past_is_put_in_front() -> None:
    """With as many new keys as queries they stand behind the past; otherwise its length is their offset."""
    r = np.random.default_rng(5)
    q, k, v = (r.normal(size=(1, 2, n, 3)) for n in (3, 8, 8))
    whole, _ = ra.softmax.forward(np.concatenate([r.normal(size=(1, 2, 5, 3)), q], axis=2), k, v, causal=True)
    out, _ = ra.softmax.forward(q, k, v, causal=True)
    np.testing.assert_allclose(out, whole[:, :, 5:], rtol=1e-14)
    more, _ = ra.softmax.forward(q, *(np.concatenate([x, x], axis=2) for x in (k, v)), causal=True, offset=5)
    np.testing.assert_allclose(more, out, rtol=1e-14)


def test_repeated_keys_are_a_bias() -> None:
    """A kernel that counts a key as often as it is named adds the logarithm of the count to its scores."""
    r, indices = np.random.default_rng(6), np.asarray([[1, 1, 3], [0, 2, 2], [4, 4, 4]])
    q, k, v = (r.normal(size=(1, 1, n, 2)) for n in (3, 5, 5))
    counts = (indices[..., None] == np.arange(5)).sum(axis=1)
    with np.errstate(divide="ignore"):
        found, _ = ra.softmax.forward(q, k, v, bias=np.log(counts))
    gathered = [ra.softmax.forward(q[:, :, [n]], k[:, :, indices[n]], v[:, :, indices[n]])[0] for n in range(3)]
    np.testing.assert_allclose(found, np.concatenate(gathered, axis=2), rtol=1e-14)
    as_a_set, _ = ra.softmax.forward(q, k, v, mask=layouts.mask_of(indices, 5))
    assert np.abs(as_a_set - found).max() > 0.01


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_numbers_in_float8_and_their_factors(dtype: str) -> None:
    x = RNG.normal(size=(2, 3, 5, 8)) * np.asarray([1e-3, 1.0, 0.0])[:, None, None]
    small, factor = layouts.quantise(x, dtype, (2, 3))
    assert small.dtype == factor.dtype == np.float32 and factor.shape == (2, 3)
    assert (round_to(small.astype(np.float64), dtype) == small).all()
    assert (np.abs(small).max(axis=(2, 3)) == np.asarray([1, 1, 0]) * largest(dtype)).all()
    assert (factor[:, 2] == 1.0).all()
    unit = 2.0 ** -(4 if dtype == "float8_e4m3fn" else 3)
    error = np.abs(small * factor[:, :, None, None].astype(np.float64) - x)
    assert (error <= np.maximum(unit * np.abs(x) * (1 + 1e-6), factor[:, :, None, None] * 2.0**-10)).all()
