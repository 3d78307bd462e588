"""The shared pieces: each against its definition, and each backward as the adjoint of its forward."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refattn import backends, equations, philox
from refattn.ops import heads, linear, masks, plain, tiles

sizes = st.integers(0, 4)


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=11, purpose=name)


def inner(a: Any, b: Any) -> float:
    return float(np.sum(a * b))


# --- heads


@given(sizes, sizes, st.integers(1, 3), st.integers(1, 3))
def test_splitting_and_merging_heads(b: int, n: int, h: int, d: int) -> None:
    x, y = draw("x", b, n, h * d), draw("y", b, h, n, d)
    split = heads.split_heads(x, h)
    for batch, token, head, at in np.ndindex(b, n, h, d):
        assert split[batch, head, token, at] == x[batch, token, head * d + at]
    assert np.array_equal(heads.merge_heads(split), x)
    assert math.isclose(inner(split, y), inner(x, heads.merge_heads(y)), rel_tol=1e-12, abs_tol=1e-12)


@given(sizes, st.integers(0, 3), st.integers(0, 3), sizes, st.integers(1, 3))
def test_repeating_and_summing_heads(b: int, g: int, r: int, n: int, d: int) -> None:
    x, y = draw("x", b, g, n, d), draw("y", b, g * r, n, d)
    repeated = heads.repeat_heads(x, g * r)
    assert np.array_equal(repeated, np.repeat(x, r, axis=1))
    assert np.allclose(heads.sum_heads(y, g), y.reshape(b, g, r, n, d).sum(axis=2), rtol=1e-13)
    assert math.isclose(inner(repeated, y), inner(x, heads.sum_heads(y, g)), rel_tol=1e-12, abs_tol=1e-12)


def test_query_heads_of_a_group_are_consecutive() -> None:
    x = np.arange(2.0).reshape(1, 2, 1, 1)
    assert heads.repeat_heads(x, 6).ravel().tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert heads.repeat_heads(x, 2) is x and heads.sum_heads(x, 2) is x


def test_numbers_of_heads_that_do_not_fit_are_named() -> None:
    x = np.ones((1, 4, 2, 3))
    for call, told in (
        (lambda: heads.split_heads(x[0], 2), "heads: got 2, needs a divisor of the 3 of x"),
        (lambda: heads.repeat_heads(x, 6), "heads: got 6, needs a multiple of the 4 of x"),
        (lambda: heads.repeat_heads(x[:, :0], 2), "heads: got 2, needs a multiple of the 0 of x"),
        (lambda: heads.sum_heads(x, 3), "heads: got 3, needs a divisor of the 4 of x"),
        (lambda: heads.sum_heads(x, 0), "heads: got 0, needs a divisor of the 4 of x"),
        (lambda: heads.group_heads(x, 8), "groups: got 8, needs a divisor of the 4 of x"),
    ):
        with pytest.raises(ValueError, match=f"^{told}$"):
            call()
    none = np.ones((1, 0, 2, 3))
    assert heads.repeat_heads(none, 0) is none and heads.sum_heads(none, 0) is none


# --- the affine map


@given(sizes, sizes, st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_the_affine_map_and_its_backward(b: int, n: int, m: int, o: int, biased: bool) -> None:
    x, w, bias, d_y = draw("x", b, n, m), draw("w", m, o), draw("bias", o), draw("d_y", b, n, o)
    y = linear.linear_forward(x, w, bias if biased else None)
    expected = np.einsum("bnm,mo->bno", x, w) + (bias if biased else 0.0)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
    d_x, d_w, d_bias = linear.linear_backward(x, w, d_y)
    assert (d_x.shape, d_w.shape, d_bias.shape) == (x.shape, w.shape, bias.shape)
    # The map is linear in each argument: its backward is the adjoint in each.
    for argument, gradient, change in (
        (x, d_x, lambda a: linear.linear_forward(a, w, None)),
        (w, d_w, lambda a: linear.linear_forward(x, a, None)),
        (bias, d_bias, lambda a: linear.linear_forward(x, w, a) - linear.linear_forward(x, w, None)),
    ):
        direction = draw("direction", *argument.shape)
        assert math.isclose(inner(gradient, direction), inner(d_y, change(direction)), rel_tol=1e-9, abs_tol=1e-10)


# --- masks


@pytest.mark.parametrize(("causal", "offset"), [(False, None), (True, 3), ("bottom_right", 3), ("top_left", 0)])
def test_offsets(causal: Any, offset: int | None) -> None:
    assert masks.causal_offset(causal, 4, 7) == offset
    if offset:
        assert masks.causal_offset(causal, 7, 4) == -3


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([None, *range(-7, 8)]),
    st.sampled_from([None, (1, 1), (0, 1), (1, 0), (0, 0)]),
    st.data(),
)
def test_the_mask_of_a_tile_is_cut_from_the_whole(i: int, j: int, offset: Any, kind: Any, data: Any) -> None:
    mask, whole = None, np.ones((1, 1, i, j), dtype=bool)
    if kind is not None:
        mask = draw("mask", 1, 1, i if kind[0] else 1, j if kind[1] else 1) > 0.0
        whole = np.broadcast_to(mask, whole.shape)
    if offset is not None:
        whole = whole & (np.arange(j)[None, :] <= np.arange(i)[:, None] + offset)
    rows = sorted((data.draw(st.integers(0, i)), data.draw(st.integers(0, i))))
    columns = sorted((data.draw(st.integers(0, j)), data.draw(st.integers(0, j))))
    tile = masks.allowed_in_tile(mask, offset, (rows[0], rows[1]), (columns[0], columns[1]), np.zeros(1))
    expected = whole[..., slice(*rows), slice(*columns)]
    found = np.ones((1, 1, 1, 1), dtype=bool) if tile is None else tile
    assert found.dtype == bool
    assert np.array_equal(np.broadcast_to(found, expected.shape), expected)


# --- tiles


class Owner:
    """A backend in the two things that a cut depends on."""

    def __init__(self, pools: bool, tile_bytes: int) -> None:
        self.pools, self.tile_bytes = pools, tile_bytes


cuts = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 5, 33, 257, 600]),
    st.sampled_from([1, 7, 513, 3000]), st.booleans(), st.sampled_from([1, 1 << 12, 512 << 10, 16 << 20]),
)  # fmt: skip


@given(cuts, st.sampled_from(["float64", "float32"]))
def test_a_plan_covers_the_plane_once(cut: Any, dtype: str) -> None:
    b, g, r, i, j, pools, size = cut
    q, k = np.broadcast_to(np.zeros((), dtype), (b, g * r, i, 3)), np.broadcast_to(np.zeros((), dtype), (b, g, j, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "backend", lambda x: Owner(pools, size))
        plan = tiles.plan(q, k)
    seen = np.zeros((b, g, i), dtype=int)
    for tile in plan.rows:
        seen[tile.batch, tile.heads, slice(*tile.rows)] += 1
        assert 0 <= tile.rows[0] < tile.rows[1] <= i
    assert np.all(seen == 1)
    whole = np.zeros((b, g), dtype=int)
    for tile in plan.heads:
        whole[tile.batch, tile.heads] += 1
        assert tile.rows == (0, i)
    assert np.all(whole == 1)
    assert [part for tile in plan.heads for part in plan.rows_of(tile)] == list(plan.rows)
    together = [(t.batch.stop - t.batch.start) * (t.heads.stop - t.heads.start) for t in plan.rows]
    largest = max(t.rows[1] - t.rows[0] for t in plan.rows) * r * plan.columns * max(together)
    assert plan.columns >= 32
    if plan.columns > 32:
        assert largest * np.dtype(dtype).itemsize <= size
    if pools and max(i, j) > tiles.ROWS:
        assert set(together) == {1}
    # What was cut is put together again.
    x = draw("x", b, g, r, i, 2)
    assert np.array_equal(plan.join_rows([tile.of_rows(x) for tile in plan.rows]), x)
    assert np.array_equal(plan.join_heads([tile.of(x) for tile in plan.heads]), x)
    both = (lambda tile: (tile.of_rows(x), tile.of_rows(x[..., 0]))), (lambda tile: (tile.of(x), tile.of(x[..., 0])))
    for found in (plan.from_rows(both[0], x), plan.from_heads(both[1], x)):
        assert np.array_equal(found[0], x) and np.array_equal(found[1], x[..., 0])
    one = draw("one", 1, 1, 1, i, 2)
    assert all(np.array_equal(tile.of_rows(one), one[:, :, :, slice(*tile.rows)]) for tile in plan.rows)


def test_tiles_run_in_order_also_under_a_hook() -> None:
    like = np.zeros(1)
    plan = tiles.plan(np.zeros((2, 2, 300, 2)), np.zeros((2, 2, 300, 2)))
    expected = [tile.rows for tile in plan.rows]
    assert tiles.run(like, lambda tile: tile.rows, plan.rows) == expected
    order: list[Any] = []
    with equations.apply(lambda id, name, value: value), backends.use_workers(4):
        assert tiles.run(like, lambda tile: order.append(tile) or tile.rows, plan.rows) == expected  # type: ignore[func-returns-value]
    assert order == list(plan.rows)


def test_masks_over_libraries(backend: Any) -> None:
    mask = draw("mask", 2, 1, 4, 5) > 0.0
    tile = masks.allowed_in_tile(backend.array(mask), 1, (1, 3), (2, 5), backend.array(0.0))
    expected = mask[..., 1:3, 2:5] & (np.arange(2, 5) <= np.arange(1, 3)[:, None] + 1)
    assert np.array_equal(backend.host(tile), expected)


# --- the softmax of the definitions


@pytest.mark.parametrize("name", ["numpy", "strict", "torch", "jax"])
def test_a_softmax_of_rows_that_see_nothing(name: str) -> None:
    backend = backends.get(name)
    if backend.why_unavailable() is not None:
        pytest.skip(f"{name} is not installed")
    backend.enable_float64()
    scores = 900.0 * draw("scores", 2, 3, 5)
    scores[0, 1], scores[1, 2, 1:], scores[1, 0, 0] = -math.inf, -math.inf, math.nan
    weights = plain.softmax(backend.from_numpy(scores))
    found = backend.to_numpy(weights)
    assert found[0, 1].tolist() == [0.0] * 5 and found[1, 2].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert np.isnan(found[1, 0]).all()
    for row in ((0, 0), (0, 2), (1, 1)):
        exponentials = np.exp(scores[row] - np.max(scores[row]))
        tiny = np.finfo(np.float64).tiny  # XLA takes numbers below it for 0
        np.testing.assert_allclose(found[row], exponentials / np.sum(exponentials), rtol=1e-14, atol=tiny)
    d_scores = backend.to_numpy(plain.softmax_backward(weights, backend.from_numpy(draw("d_weights", 2, 3, 5))))
    assert d_scores[0, 1].tolist() == [0.0] * 5 and np.isfinite(d_scores[0]).all()
