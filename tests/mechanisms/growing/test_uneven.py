"""What the basic step leaves out: heads of unequal widths, equal singular values, and what no width can help."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.growing.growth import path, uneven
from refattn.mechanisms.growing.growth.bottleneck import bottleneck, embedding_bottleneck, with_ties
from refattn.mechanisms.growing.growth.metric import direction, kronecker
from refattn.train.growing import widened
from refattn.train.optimiser import AdamW, Group
from tests.mechanisms.growing.calls import BLOCK, block_of, cut, draw, step, uniform
from tests.mechanisms.growing.test_growth import loss_of
from tests.mechanisms.growing.test_metric import observed, of_tokens
from tests.mechanisms.growing.test_truncate import one_sequence, pieces

GROWTH: Any = ra.mechanism("growing").grow
Options = GROWTH.Options
State = BLOCK.module.State


def lopsided(name: str) -> tuple[Any, Any]:
    """Statistics whose last head has most of the gradient."""
    params, statistics = observed(name)
    factor = np.ones((params.config.heads, 1, 1))
    factor[-1] = 10.0
    kept = tuple(replace(k, gradient=k.gradient * factor) for k in statistics.kept)
    return params, replace(statistics, gradient=statistics.gradient * factor, kept=kept)


# --- unequal widths


def test_columns_go_where_the_squares_are() -> None:
    params, statistics = lopsided("two heads")
    found = bottleneck(params, statistics)
    squares = sorted(((found.square(i, j), i) for i in range(2) for j in range(9)), reverse=True)
    for total in range(8):
        expected = [i for _, i in squares[:total]]
        assert uneven.allot(found, total, (9, 9)) == (expected.count(0), expected.count(1))
    assert uneven.allot(found, 4, (7, 7))[1] > uneven.allot(found, 4, (7, 7))[0]
    assert uneven.allot(found, 6, (7, 1))[1] == 1  # no more than its room
    assert uneven.allot(found, 9, (7, 7), least=1e9) == (0, 0)
    each = uneven.allot(found, 4, (7, 7))
    pooled = sum(sum(found.square(i, j) for j in range(n)) for i, n in enumerate(each))
    assert pooled > found.gain(2)  # what two columns of each would follow


@pytest.mark.parametrize("mode", ["replace", "additive", "gradmax", "zero", "net2wider"])
@pytest.mark.parametrize("name", ["two heads", "causal", "padded"])
def test_a_head_grows_as_if_it_were_alone(name: str, mode: str) -> None:
    params, statistics = lopsided(name)
    heads, width = params.config.heads, params.config.sizes[1]
    made = GROWTH.plan(params, statistics, Options(mode=mode, uneven=True), columns=2)
    each = made.facts["each"]
    assert sum(each) == 2 * heads and max(each) == made.columns > min(each)
    grown = GROWTH.apply(made, 0.3)
    assert grown.config.sizes[1] == grown.w_q.shape[2] == width + made.columns
    assert [len(places) for places in path.live(grown)] == [width + n for n in each]
    for i, own in enumerate(each):
        alike = replace(statistics, kept=())
        even = GROWTH.plan(params, alike, Options(mode=mode, seed=i), columns=own)
        if mode != "net2wider":  # of which the places differ
            expected = path.kernel_of(GROWTH.apply(even, 0.3))[i]
            np.testing.assert_allclose(path.kernel_of(grown)[i], expected, rtol=0.0, atol=1e-10)
    if mode not in ("replace", "additive"):
        _, x, context = block_of(name)
        np.testing.assert_allclose(step(grown, x, context)[0], step(params, x, context)[0], rtol=0.0, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"mode": "additive"}, {"metric": "exact", "method": "optimal_als"}, {"method": "frobenius"}]
)
def test_the_slope_of_uneven_heads_is_that_of_their_path(options: dict[str, Any]) -> None:
    params, statistics = observed("padded")
    made = GROWTH.plan(params, statistics, Options(uneven=True, **options), columns=1)
    assert made.facts["each"] != [1, 1]
    before = loss_of("padded", params)
    ratio = (loss_of("padded", GROWTH.apply(made, 1e-4)) - before) / (1e-4 * made.slope)
    assert made.slope < 0.0 and abs(ratio - 1.0) < 1e-3
    grown, facts = GROWTH.grow(params, statistics, lambda p: loss_of("padded", p), Options(uneven=True), columns=1)
    assert facts["after"] == loss_of("padded", grown) < before


def test_each_head_has_a_mask_of_its_own() -> None:
    params, x, _ = block_of("two heads")
    mask = uniform("mask", 3, 2, 6, 6) < 0.6
    context = ra.Context(mask=mask)
    y, saved = step(params, x, context)
    statistics = GROWTH.observe(params, saved, State(draw("d_y", *y.shape)), keep=True)
    options = Options(uneven=True, metric="exact", method="optimal_als")
    made = GROWTH.plan(params, statistics, options, columns=1)
    for i, head in enumerate(made.heads):
        (kept,) = head.statistics.kept
        np.testing.assert_array_equal(kept.mask[:, 0], mask[:, i])
        np.testing.assert_array_equal(kept.gradient[:, 0], statistics.kept[0].gradient[:, i])
    assert GROWTH.apply(made, 0.1).w_q.shape[2] == 2 + made.columns


def test_no_two_draws_of_random_columns_are_the_same() -> None:
    """Neither those of two heads that grow unevenly, nor those of two growths one after the other."""
    params, statistics = observed("two heads")
    for options in (Options(mode="zero", uneven=True), Options(mode="zero")):
        once = GROWTH.apply(GROWTH.plan(params, statistics, options, columns=1))
        twice = GROWTH.apply(GROWTH.plan(once, statistics, options, columns=1))
        drawn = [twice.w_q[i, :, j] for i in range(2) for j in range(2, twice.w_q.shape[2])]
        drawn = [column for column in drawn if np.any(column)]
        assert len(drawn) == 4
        assert all(not np.array_equal(a, b) for n, a in enumerate(drawn) for b in drawn[:n])
    made = GROWTH.plan(params, statistics, Options(mode="zero", uneven=True, largest=3), columns=1)
    assert made.facts["each"] == [1, 1]
    first, second = GROWTH.apply(made).w_q[..., 2]
    assert not np.array_equal(first, second)


def test_columns_of_zeros_stay_zeros_and_grow_no_more() -> None:
    """They have no gradient; the next growth is behind them, so that new columns have a count of steps of their own."""
    params, statistics = lopsided("two heads")
    _, x, context = block_of("two heads")
    adam = AdamW(0.1, groups=(Group("*"),))
    grown = GROWTH.apply(GROWTH.plan(params, statistics, Options(uneven=True), columns=2), 0.3)
    moments = widened(adam.start(params), grown)
    for _ in range(3):
        y, saved = step(grown, x, context)
        _, gradients, _ = BLOCK.backward(grown, saved, State(draw("d_y", *y.shape)))
        before, (grown, moments) = grown, adam.update(moments, grown, gradients)
        assert path.live(grown) == path.live(before) and not np.array_equal(grown.w_q, before.w_q)
    seen = GROWTH.observe(grown, step(grown, x, context)[1], State(draw("d_y", *x.shape)))
    again = GROWTH.apply(GROWTH.plan(grown, seen, Options(uneven=True), columns=1), 0.2)
    old = grown.config.sizes[1]
    for i, places in enumerate(path.live(again)):
        assert [place for place in places if place < old] == path.live(grown)[i]
    count = widened(moments, again).count.w_q
    np.testing.assert_array_equal(count[..., old:], 0.0)
    # A block of unequal heads is a block: what was zeros grows as any other column where heads grow alike.
    alike = GROWTH.apply(GROWTH.plan(grown, seen, columns=1), 0.2)
    assert all(len(places) == old + 1 for places in path.live(alike))


def test_uneven_columns_are_confirmed_by_the_other_half() -> None:
    params, statistics = lopsided("two heads")
    options = Options(uneven=True, most=2, share=0.0)
    opposite = replace(statistics, gradient=-statistics.gradient)
    assert sum(GROWTH.plan(params, statistics, options, halves=(statistics, statistics)).facts["each"]) == 4
    assert GROWTH.plan(params, statistics, options, halves=(statistics, opposite)).columns == 0
    one = statistics.gradient * np.asarray([1.0, -1.0])[:, None, None]
    half = replace(statistics, gradient=one)
    assert GROWTH.plan(params, statistics, options, halves=(statistics, half)).facts["each"] == [4, 0]
    few = GROWTH.plan(params, statistics, replace(options, largest=3))
    assert few.facts["each"] == [1, 1]
    assert GROWTH.plan(params, statistics, replace(options, share=2.0)).columns == 0


def test_one_scale_cannot_follow_several_widths() -> None:
    with pytest.raises(ValueError, match="scale: got 'rescale' with uneven heads, needs frozen"):
        Options(uneven=True, scale="rescale")
    with pytest.raises(TypeError, match="keep_ties: got 1, needs true or false"):
        Options(keep_ties=1)


# --- equal singular values


def test_equal_singular_values_are_kept_together() -> None:
    """Of a pair of equal ones either could be the last: with `keep_ties` both are, without it the number asked for."""
    params, statistics = observed("one head")
    found = bottleneck(params, statistics)
    sigma = np.asarray(found.sigma)[:, :3].copy()
    assert [with_ties(found, n, 3) for n in (0, 1, 2)] == [0, 1, 2]
    for equal, expected in (((2.0, 2.0, 1.0), 2), ((2.0, 2.0, 2.0), 3), ((2.0, 2.0 * (1 - 1e-7), 1.0), 1)):
        sigma[0] = equal
        tied = replace(found, sigma=np.concatenate([sigma, found.sigma[:, 3:] * 0.0], axis=1))
        assert with_ties(tied, 1, 3) == expected
    assert with_ties(tied, 1, 2) == 1
    assert with_ties(replace(found, sigma=0.0 * found.sigma), 1, 3) == 1  # nothing is no tie
    # The whole step: a gradient whose hidden part has two equal singular values.
    metric = kronecker(statistics)
    u, v = (np.asarray(x)[0] for x in (found.u, found.v))
    hidden = (u[:, :2] @ v[:, :2].T)[None]
    gradient = np.swapaxes(metric.left.whitener, 0, 1) @ hidden @ metric.right.whitener
    plateau = replace(statistics, gradient=gradient, kept=())
    for kind in (partial(Options, damping=0.0), partial(Options, damping=0.0, uneven=True)):
        assert GROWTH.plan(params, plateau, kind(), columns=1).columns == 1
        made = GROWTH.plan(params, plateau, kind(keep_ties=True), columns=1)
        assert made.columns == 2 and GROWTH.apply(made, 0.1).config.sizes[1] == params.config.sizes[1] + 2


# --- what no width can help


@pytest.mark.parametrize(("n", "e"), [(12, 5), (6, 6), (4, 7)])
def test_the_bottleneck_of_the_embedding(n: int, e: int) -> None:
    """One sequence: what of the functional gradient lies outside of the tokens' columns, on either side."""
    x, g, statistics = one_sequence(n, e, 5.0)
    outside = pieces(x, g)[1] / np.sum(g**2)
    assert embedding_bottleneck(statistics) == pytest.approx(outside, abs=1e-9)
    assert (outside > 0.1) == (n > e)
    inside = of_tokens(x[None], (x @ draw("z", e, e) @ x.T)[None, None])
    assert embedding_bottleneck(inside) < 1e-9
    assert embedding_bottleneck(replace(inside, square=0.0)) == 0.0


@pytest.mark.parametrize("name", ["two heads", "causal", "padded"])
def test_the_square_of_the_functional_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, x, context = block_of(name)
    y, saved = step(params, x, context)
    d_state = State(draw("d_y", *y.shape))
    g = ra.growing.functional_gradient(saved.core, BLOCK.module.attended_backward(params, saved, d_state))
    _, statistics = observed(name)
    assert statistics.square == pytest.approx(float(np.sum(g**2)), rel=1e-12)
    assert GROWTH.merge(statistics, statistics).square == 2.0 * statistics.square
    made = GROWTH.plan(params, statistics, Options(metric="exact"), columns=1)
    assert 0.0 <= made.facts["embedding"] < 1.0
    assert made.facts["embedding"] == pytest.approx(embedding_bottleneck(statistics), abs=1e-7)
    followed = float(np.sum(statistics.gradient * direction(statistics, "exact").p))
    assert 0.0 < followed <= statistics.square * (1.0 + 1e-9)
    monkeypatch.setattr("refattn.mechanisms.softmax.core.DENSE_UP_TO", 0)
    with cut(4, 3):
        _, tiled = observed(name)
    assert tiled.square == pytest.approx(statistics.square, rel=1e-12)
