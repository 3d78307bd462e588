"""Growing attention's definition, against the library and against differences of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import refattn as ra
from refattn import Context
from refattn.mechanisms.growing import definition
from refattn.mechanisms.growing.growth import search as searching

BLOCK: Any = ra.mechanism("growing").block
GROWTH: Any = ra.mechanism("growing").grow
SCALE = 0.7


class Task(NamedTuple):
    """A block of random sizes, tokens, and the gradient of a loss: the definition's arguments, and the library's."""

    params: Any
    statistics: Any
    y: Any
    g: Any
    causal: bool
    columns: int
    loss: Callable[[Any, Any], float]


def task(seed: int, causal: bool) -> Task:
    """Return the task of a seed; there are enough tokens for them to take all directions."""
    random = np.random.default_rng(seed)
    width = int(random.integers(4, 8))
    head_width, heads, batch = int(random.integers(1, 4)), int(random.integers(1, 4)), int(random.integers(1, 5))
    tokens, columns = int(random.integers(width, 12)), int(random.integers(0, width - head_width))
    config = BLOCK.Config(width=width, heads=heads, head_width=head_width, value_width=3, residual=False, scale=SCALE)
    params, context = BLOCK.init(config, seed=seed, like=np.zeros(1)), Context(causal=causal)
    y, wanted = random.standard_normal((2, batch, tokens, width))

    def loss(w_q: Any, w_k: Any) -> float:
        wider = replace(params, w_q=w_q, w_k=w_k, config=replace(config, head_width=w_q.shape[2]))
        found, _ = BLOCK.forward(wider, BLOCK.start(wider, y, context), context)
        return 0.5 * float(np.sum((found.x - wanted) ** 2))

    state, saved = BLOCK.forward(params, BLOCK.start(params, y, context), context)
    d_state = replace(state, x=state.x - wanted)
    statistics = GROWTH.observe(params, saved, d_state)
    g = ra.growing.functional_gradient(saved.core, BLOCK.module.attended_backward(params, saved, d_state))
    return Task(params, statistics, y, g, causal, columns, loss)


def own(given: Task) -> tuple[definition.Heads, definition.Statistics, definition.Plan]:
    """Return what the definition makes of a task, before it grows."""
    heads = definition.heads_of(given.params.w_q, given.params.w_k, scale=SCALE)
    statistics = definition.observe(given.y, given.g, causal=given.causal)
    return heads, statistics, definition.plan(heads, statistics)


def close(found: Any, expected: Any) -> None:
    """Raise where two arrays differ by more than 1e-12 of the largest element, or of 1."""
    size = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-12 * size)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_what_the_library_does(seed: int, causal: bool) -> None:
    """How new columns are turned among themselves the decomposition decides: kernels and old columns are compared."""
    given = task(seed, causal)
    heads, statistics, planned = own(given)
    close(statistics.gradient, given.statistics.gradient)
    close(statistics.gram, given.statistics.gram)
    assert statistics.scores == given.statistics.pairs and statistics.sequences == given.statistics.sequences
    made = GROWTH.plan(given.params, given.statistics, columns=given.columns)
    close(planned.sigma, made.found.sigma)
    close(planned.direction, made.direction.p)
    close(planned.unit, made.direction.size)
    close(definition.slope_of(planned, given.columns), made.slope)
    assert definition.columns_of(planned) == GROWTH.plan(given.params, given.statistics).columns
    old = given.params.w_q.shape[2]
    for amplitude in (0.3, 1.0):
        grown = GROWTH.apply(made, amplitude)
        w_q, w_k = definition.grow(heads, planned, columns=given.columns, amplitude=amplitude)
        assert w_q.shape == grown.w_q.shape
        close(w_q[..., :old], grown.w_q[..., :old])
        close(w_k[..., :old], grown.w_k[..., :old])
        close(w_q @ np.matrix_transpose(w_k), grown.w_q @ np.matrix_transpose(grown.w_k))

    def loss_at(amplitude: float) -> float:
        return given.loss(*definition.grow(heads, planned, columns=given.columns, amplitude=amplitude))

    expected = searching.search(loss_at, loss_at(0.0), made.slope, GROWTH.Options())
    assert definition.search(loss_at, made.slope) == expected.amplitude > 0.0
    assert loss_at(expected.amplitude) < given.loss(given.params.w_q, given.params.w_k)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_and_the_slope_are_those_of_the_loss(seed: int, causal: bool) -> None:
    """N by the kernel, and the slope by the amplitude: central differences."""
    given = task(seed, causal)
    heads, statistics, planned = own(given)
    one, step = np.eye(heads.kernel.shape[1]), 1e-5
    change = 0.1 * np.random.default_rng(seed).standard_normal(heads.kernel.shape)

    def loss(amount: float) -> float:
        kernel = heads.kernel + amount * change  # a factor of it and the identity: a head as wide as its tokens
        return given.loss(kernel / SCALE, np.broadcast_to(one, kernel.shape))

    slope = float(np.sum(statistics.gradient * change))
    assert (loss(step) - loss(-step)) / (2.0 * step) == pytest.approx(slope, rel=1e-6, abs=1e-8)

    def loss_at(amplitude: float) -> float:
        return given.loss(*definition.grow(heads, planned, columns=given.columns, amplitude=amplitude))

    found = (loss_at(step) - loss_at(-step)) / (2.0 * step)
    assert found == pytest.approx(float(definition.slope_of(planned, given.columns)), rel=1e-5, abs=1e-8)


def test_statistics_of_batches_add_up() -> None:
    """Field by field."""
    given = task(1, causal=True)
    halves = [definition.observe(y, g, causal=True) for y, g in zip(given.y[:, None], given.g[:, None], strict=True)]
    whole = definition.observe(given.y, given.g, causal=True)
    assert len(halves) > 1
    for field, parts in zip(whole, zip(*halves, strict=True), strict=True):
        close(sum(parts), field)


def test_what_the_root_mean_square_is_worth_to_scores_that_are_seen() -> None:
    """nu is what the direction does to a score if all are seen and sequences are alike; if causal, only about."""
    for causal in (False, True):
        shares = []
        for seed in range(12):
            given = task(seed, causal)
            _, statistics, planned = own(given)
            tokens = given.y[:, None, :, :]
            change = tokens @ planned.direction @ np.matrix_transpose(tokens)
            seen = np.tril(np.ones(change.shape[2:])) if causal else 1.0
            shares.append(np.sqrt(np.sum((seen * change) ** 2) / statistics.scores) / planned.unit)
        assert 0.7 < min(shares) and max(shares) < 1.4


@pytest.mark.parametrize("high", [1.0, np.nan])
def test_a_search_that_finds_nothing_ends_at_0(high: float) -> None:
    """Where the loss only rises, and where it is not a number; the library's ends there, too."""
    tried: list[float] = []

    def loss_at(amplitude: float) -> float:
        tried.append(amplitude)
        return high if amplitude > 0.0 else 0.0

    assert definition.search(loss_at, -1.0) == 0.0
    assert tried == [0.0, *(0.5**n for n in range(1, 31))]
    assert searching.search(loss_at, 0.0, -1.0, GROWTH.Options()).amplitude == 0.0
    assert tried[31:] == tried[1:31]


@pytest.mark.parametrize("best", [0.01, 0.3, 0.7, 2.5, 40.0, 1e12])
def test_a_search_is_the_library_s(best: float) -> None:
    """Along parabolas whose lowest point is nearer or farther than the first amplitude, or out of reach."""

    def loss_at(amplitude: float) -> float:
        return (amplitude / best - 1.0) ** 2

    expected = searching.search(loss_at, 1.0, -2.0 / best, GROWTH.Options())
    assert definition.search(loss_at, -2.0 / best) == expected.amplitude > 0.0


@pytest.mark.parametrize("head_width", [3, 4, 5])
def test_a_head_gets_no_more_columns_than_its_tokens_have_room_for(head_width: int) -> None:
    """With d = m or more there is nothing out of reach: what H has is rounding, and no column is worth while."""
    random = np.random.default_rng(0)
    w_q, w_k = random.standard_normal((2, 2, 4, head_width))
    heads = definition.heads_of(w_q, w_k, scale=SCALE)
    planned = definition.plan(
        heads, definition.observe(*(random.standard_normal(n) for n in ((3, 6, 4), (3, 2, 6, 6))))
    )
    room = max(0, 4 - head_width)
    assert definition.columns_of(planned) == planned.room == room
    if head_width <= 4:
        wider, _ = definition.grow(heads, planned, columns=room, amplitude=0.1)
        assert wider.shape == (2, 4, 4)


def test_without_a_gradient_nothing_grows() -> None:
    """No column, no slope, and a search along kernels that stay gives 0; the library does the same."""
    given = task(2, causal=True)
    heads, statistics, _ = own(given)
    planned = definition.plan(heads, statistics._replace(gradient=np.zeros_like(statistics.gradient)))
    made = GROWTH.plan(given.params, replace(given.statistics, gradient=np.zeros_like(given.statistics.gradient)))
    assert (definition.columns_of(planned), definition.slope_of(planned, 0)) == (0, 0.0) == (made.columns, made.slope)

    def grown(amplitude: float) -> tuple[Any, Any]:
        return definition.grow(heads, planned, columns=0, amplitude=amplitude)

    w_q, w_k = grown(0.5)
    close(SCALE * w_q @ np.matrix_transpose(w_k), heads.kernel)
    assert definition.search(lambda amplitude: given.loss(*grown(amplitude)), 0.0) == 0.0


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_that_old_columns_can_follow_gets_no_new_ones(seed: int, uneven: bool) -> None:
    """H is then rounding, of which every part is more than 2 % of the whole."""
    given = task(seed, causal=False)
    heads, statistics, planned = own(given)
    random, (h, m, d) = np.random.default_rng(seed), heads.w_q.shape
    metric = planned.whiten.T @ planned.whiten
    gradient = metric @ (
        heads.w_q @ random.standard_normal((h, d, m)) + random.standard_normal((h, m, d)) @ heads.w_k.mT @ metric
    )
    planned = definition.plan(heads, statistics._replace(gradient=gradient))
    worths = np.sum(planned.sigma**2, axis=0)
    assert definition.columns_of(planned) == 0 < np.sum(worths > 0.02 * np.sum(worths))
    options = GROWTH.Options(uneven=uneven)
    assert GROWTH.plan(given.params, replace(given.statistics, gradient=gradient), options).columns == 0


def test_columns_that_are_grown_at_0_never_learn() -> None:
    """They are 0 in both factors, but for rounding: so a search that gives 0 grows nothing."""
    given = task(2, causal=False)
    heads, _, planned = own(given)
    w_q, w_k = definition.grow(heads, planned, columns=1, amplitude=0.0)
    for new in (w_q, w_k):
        assert np.sort(np.max(np.abs(new), axis=1), axis=1)[:, 0].max() < 1e-6


@pytest.mark.parametrize("seed", [0, 12, 25])
def test_a_head_without_a_gradient_gets_columns_that_only_the_library_can_use(seed: int) -> None:
    """The definition's are 0 in both, but for rounding; the library's are random in w_q, which w_k can follow."""
    given = task(seed, causal=False)
    heads, statistics, _ = own(given)
    gradient = statistics.gradient * (np.arange(heads.w_q.shape[0]) != 1)[:, None, None]
    planned = definition.plan(heads, statistics._replace(gradient=gradient))
    made = GROWTH.plan(given.params, replace(given.statistics, gradient=gradient))
    assert definition.columns_of(planned) == made.columns > 0
    narrow = definition.grow(heads, planned, columns=made.columns, amplitude=0.3)
    grown, old = GROWTH.apply(made, 0.3), heads.w_q.shape[2]

    def sizes(w: Any) -> Any:
        found = np.linalg.svdvals(w[1])
        return found[old:] / found[0]

    assert max(np.max(sizes(w)) for w in narrow) < 1e-6
    assert np.min(sizes(grown.w_q)) > 1e-3 and np.max(sizes(grown.w_k)) < 1e-14
    close(SCALE * grown.w_q[1] @ grown.w_k[1].T, heads.kernel[1])
