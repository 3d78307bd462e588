"""Statistics and metrics: sums over batches, T with and without masks, and what solves T(P) = N."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms.growing.growth import metric
from refattn.mechanisms.growing.growth.statistics import Kept, Statistics, apply_metric
from refattn.mechanisms.precision import PrecisionError, PrecisionWarning
from refattn.ops.solve import conjugate_gradients
from tests.mechanisms.growing.calls import BLOCK, SIZES, block_of, cut, draw, step

GROWTH: Any = ra.mechanism("growing").grow


def observed(name: str, **changes: Any) -> tuple[Any, Statistics]:
    """Parameters, and kept statistics of one batch for a fixed upstream gradient."""
    params, x, context = block_of(name, **changes)
    y, saved = step(params, x, context)
    return params, GROWTH.observe(params, saved, BLOCK.module.State(draw("d_y", *y.shape)), keep=True)


def problem(
    b: int, n: int, e: int, h: int = 1, condition: float = 5.0, spread: float = 0.0, seed: int = 0
) -> Statistics:
    """Statistics of random functional gradients; `spread` makes the sequences' covariances differ."""
    root = spectrum(e, condition, "shared", seed)
    tokens = np.stack([draw(f"x{i}", n, e, seed=seed) @ root for i in range(b)])
    if spread:
        own = [
            spectrum(e, condition, f"own{i}", seed) * np.exp(0.5 * spread * float(draw(f"s{i}", 1, seed=seed)[0]))
            for i in range(b)
        ]
        tokens = np.stack([draw(f"x{i}", n, e, seed=seed) @ own[i] for i in range(b)])
    # What one kernel would do, and noise beside it.
    common = tokens[:, None] @ draw("common", 1, h, e, e, seed=seed) @ np.swapaxes(tokens, 1, 2)[:, None]
    return of_tokens(tokens, common / np.std(common) + draw("g", b, h, n, n, seed=seed))


def of_tokens(tokens: Any, g: Any, mask: Any = None) -> Statistics:
    """Statistics of given tokens (b, n, e) and functional gradients (b, h, n, n)."""
    b, n, e = tokens.shape
    g = g if mask is None else np.where(mask, g, 0.0)
    gradient = np.swapaxes(tokens, 1, 2)[:, None] @ g @ tokens[:, None]
    flat, centred = tokens.reshape(b * n, e), (tokens - tokens.mean(axis=1, keepdims=True)).reshape(b * n, e)
    visible = g.size if mask is None else int(np.broadcast_to(mask, g.shape).sum())
    kept = (Kept(tokens, gradient, mask, None),)
    grams, masked, square = (flat.T @ flat, centred.T @ centred), mask is not None, float(np.sum(g**2))
    return Statistics(gradient.sum(0), *grams, b, float(visible), masked, kept, square)


def spectrum(e: int, condition: float, name: str, seed: int = 0) -> Any:
    """A random matrix with singular values from 1 to `condition`."""
    u, _, v = np.linalg.svd(draw(name, e, e, seed=seed))
    return u * np.geomspace(1.0, condition, e) @ v


def dense_operator(statistics: Statistics) -> Any:
    """T as a matrix on kernels laid out row by row."""
    total: Any = 0.0
    for kept in statistics.kept:
        for y in kept.tokens:
            c = y.T @ y
            total = total + np.kron(c, c)
    return total


@pytest.mark.parametrize("name", [name for name in SIZES if name != "one token"])
def test_statistics_add_up_over_batches(name: str) -> None:
    params, x, context = block_of(name)
    if x.shape[0] == 1:
        x = np.concatenate([x, x[:, ::-1]])
    d_y = draw("d_y", *x.shape)

    def part(rows: slice, keep: bool) -> Statistics:
        masks = {n: m[rows] for n in ("mask", "key_mask") if (m := getattr(context, n)) is not None}
        _, saved = step(params, x[rows], replace(context, **masks))
        return GROWTH.observe(params, saved, BLOCK.module.State(d_y[rows]), keep=keep)

    whole = part(slice(None), True)
    merged = GROWTH.merge(part(slice(1), True), part(slice(1, None), True))
    for field in ("gradient", "gram", "gram_keys"):
        np.testing.assert_allclose(getattr(merged, field), getattr(whole, field), rtol=0.0, atol=1e-12)
    assert (merged.sequences, merged.pairs, merged.masked) == (whole.sequences, whole.pairs, whole.masked)
    z = draw("z", *whole.gradient.shape)
    np.testing.assert_allclose(apply_metric(merged, z), apply_metric(whole, z), rtol=1e-11)
    assert part(slice(None), False).kept == ()
    with pytest.raises(ValueError, match="b: got statistics of which not all or not none are kept"):
        GROWTH.merge(whole, part(slice(None), False))


def test_statistics_do_not_depend_on_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = observed("causal")
    monkeypatch.setattr("refattn.mechanisms.softmax.core.DENSE_UP_TO", 0)
    with cut(4, 3):
        _, found = observed("causal")
    assert np.max(np.abs(found.gradient - expected.gradient)) < 1e-12 * np.max(np.abs(expected.gradient))
    assert found.pairs == expected.pairs == 2 * 3 * 9 * 10 / 2


def test_statistics_hold_no_score_of_all_pairs() -> None:
    """Neither they nor the block in tiles before them, for the Kronecker metric and for the exact one."""
    n = 2048
    x = draw("long", 1, n, 8)
    params = BLOCK.init(BLOCK.Config(width=8, heads=2), seed=0, like=x, layer=0)
    for keep in (False, True):
        tracemalloc.start()
        with ra.backends.use_workers(1):
            _, saved = step(params, x, ra.Context(causal=True))
            statistics = GROWTH.observe(params, saved, BLOCK.module.State(x), keep=keep)
            metric.direction(statistics, "exact" if keep else "kron")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * n * n  # one head has n^2 scores of 8 bytes


@pytest.mark.parametrize("name", ["two heads", "causal", "padded"])
def test_the_metric_is_the_change_of_the_visible_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test 5: T is self-adjoint and positive, and with a mask counts visible scores alone."""
    _, statistics = observed(name)
    (kept,) = statistics.kept
    y, n = kept.tokens, kept.tokens.shape[1]
    visible = np.ones((y.shape[0], statistics.gradient.shape[0], n, n), bool)
    visible = visible if kept.mask is None else visible & kept.mask
    visible = visible if kept.offset is None else np.tril(visible, kept.offset)
    assert statistics.pairs == visible.sum()
    a, b = draw("a", *statistics.gradient.shape), draw("b", *statistics.gradient.shape)
    change = np.where(visible, np.einsum("bni,hij,bmj->bhnm", y, a, y), 0.0)
    expected = np.einsum("bni,bhnm,bmj->hij", y, change, y)
    for rows in (256, 4):
        monkeypatch.setattr("refattn.mechanisms.growing.growth.statistics.ROWS", rows)
        monkeypatch.setattr("refattn.mechanisms.growing.growth.statistics.CHUNK", rows)
        found = apply_metric(statistics, a)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * np.max(np.abs(expected)))
    assert abs(np.sum(found * b) - np.sum(a * apply_metric(statistics, b))) < 1e-12 * np.sum(np.abs(found * b))
    np.testing.assert_allclose(np.sum(a * found), np.sum(change**2), rtol=1e-12)


@pytest.mark.parametrize(("b", "n", "e", "condition"), [(4, 9, 6, 10.0), (3, 4, 8, 5.0), (2, 20, 12, 3.0)])
def test_conjugate_gradients_solve_the_normal_equations(b: int, n: int, e: int, condition: float) -> None:
    """Test 6, also with fewer tokens than widths."""
    statistics = problem(b, n, e, condition=condition, spread=1.0)
    found = metric.direction(statistics, "exact", tolerance=1e-11)
    residual = apply_metric(statistics, found.p) - statistics.gradient
    assert np.linalg.norm(residual) < 1e-8 * np.linalg.norm(statistics.gradient)
    # Of all solutions the least one in the norm of A: the pseudo-inverse in whitened coordinates.
    a = statistics.gram / np.sqrt(b)
    values, vectors = np.linalg.eigh(a)
    root = np.kron(*[vectors / np.sqrt(values) @ vectors.T] * 2)
    whitened = np.linalg.pinv(root @ dense_operator(statistics) @ root, rcond=1e-11, hermitian=True)
    solution = root @ whitened @ root @ statistics.gradient.reshape(-1)
    assert np.max(np.abs(found.p.reshape(-1) - solution)) < 1e-8 * np.max(np.abs(solution))
    assert found.iterations < 60


def test_preconditioning_is_what_makes_it_quick() -> None:
    statistics = problem(16, 20, 12, condition=30.0)
    n = statistics.gradient
    _, plain = conjugate_gradients(lambda z: apply_metric(statistics, z), n, lambda r: r)
    assert metric.direction(statistics, "exact").iterations < 25 < 200 == plain


def test_solved_systems_go_nowhere() -> None:
    target = np.stack([np.zeros((3, 3)), np.eye(3)])
    found, count = conjugate_gradients(lambda z: 2.0 * z, target, lambda r: r)
    np.testing.assert_array_equal(found, 0.5 * target)
    assert count == 1
    assert conjugate_gradients(lambda z: z, 0.0 * target, lambda r: r)[1] == 0


def behind_a_layer_norm(left: float) -> Statistics:
    """Tokens with a small part of their mean over the width left, as a layer normalisation leaves them."""
    tokens = draw("x", 8, 9, 6)
    tokens = tokens - (1.0 - left) * tokens.mean(axis=-1, keepdims=True)
    return of_tokens(tokens, draw("g", 8, 2, 9, 9))


def test_the_size_of_a_direction_is_no_difference_of_large_numbers() -> None:
    """<P, A P A>, taken from the whitened gradient: from P itself it would be noise where A is ill-conditioned."""
    found = [metric.direction(behind_a_layer_norm(left)).size for left in (1e-3, 3e-6)]
    assert 1e11 < np.linalg.cond(behind_a_layer_norm(3e-6).gram) < metric.SINGULAR_FROM
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_damping_makes_a_direction_cost_something_that_hardly_occurs() -> None:
    statistics = behind_a_layer_norm(1e-5)
    lengths = []
    for damping in (0.0, 0.01):
        own = metric.kronecker(statistics, damping=damping)
        lengths.append(np.linalg.norm(own.left.back, axis=0).max())
        way = metric.direction(statistics, metric=own)
        assert np.sum(way.p * statistics.gradient) > 0.0  # -P descends in any metric
    assert lengths[0] > 1e3 * lengths[1]
    mean = np.trace(statistics.gram) / 6 / np.sqrt(8)
    plain, damped = (metric.factor(statistics.gram, 8, damping=d) for d in (0.0, 0.5))
    np.testing.assert_allclose(damped.roots**2, plain.roots**2 + 0.5 * mean, rtol=1e-12)


def test_one_sequence_has_one_direction() -> None:
    statistics = problem(1, 12, 6)
    found = [metric.direction(statistics, how) for how in ("kron", "exact", "mean")]
    x = statistics.kept[0].tokens[0]
    expected = np.linalg.inv(x.T @ x) @ statistics.gradient[0] @ np.linalg.inv(x.T @ x)
    for way in found:
        np.testing.assert_allclose(way.p[0], expected, rtol=0.0, atol=1e-9 * np.max(np.abs(expected)))
        change = x @ way.p[0] @ x.T
        np.testing.assert_allclose(way.size, np.sqrt(np.mean(change**2)), rtol=1e-8)


def test_sequences_of_the_same_tokens_have_one_direction() -> None:
    """There T is the Kronecker metric, and all three metrics and their sizes are the same."""
    x = np.stack([draw("X", 9, 5)] * 3)
    statistics = of_tokens(x, draw("g", 3, 2, 9, 9))
    kron, exact, mean = (metric.direction(statistics, how, tolerance=1e-12) for how in ("kron", "exact", "mean"))
    for way in (kron, mean):
        np.testing.assert_allclose(way.p, exact.p, rtol=0.0, atol=1e-9 * np.max(np.abs(exact.p)))
        assert way.size == pytest.approx(exact.size, rel=1e-9)


def test_a_mask_of_either_batch_is_one_of_both() -> None:
    mask = np.tril(np.ones((1, 1, 4, 4), bool))
    parts = [of_tokens(draw("x", 2, 4, 3), draw("g", 2, 1, 4, 4), given) for given in (None, mask)]
    assert GROWTH.merge(*parts).masked and GROWTH.merge(*parts[::-1]).masked
    assert not GROWTH.merge(parts[0], parts[0]).masked


def test_the_number_by_hand() -> None:
    tokens = np.asarray([[[1.0], [2.0]]])
    g = np.asarray([[[[-0.196612, 0.196612], [-0.104994, 0.104994]]]])
    statistics = of_tokens(tokens, g)
    np.testing.assert_allclose(statistics.gradient, 0.406594, atol=1e-5)
    assert statistics.gram[0, 0] == 5.0
    assert apply_metric(statistics, np.ones((1, 1, 1)))[0, 0, 0] == 25.0
    np.testing.assert_allclose(metric.direction(statistics).p, 0.016264, atol=1e-6)


def decrease(statistics: Statistics, p: Any) -> float:
    """What the best multiple of a direction takes off the loss plus half the square of the scores' change."""
    along = float(np.sum(statistics.gradient * p))
    return along * abs(along) / float(np.sum(p * apply_metric(statistics, p)))


@pytest.mark.parametrize(
    ("shape", "spread", "kron", "mean"),
    [((64, 16, 8), 0.0, 0.95, (0.9, 1.0)), ((64, 16, 8), 1.0, 0.7, (-1.0, 0.5)), ((64, 6, 8), 0.0, 0.8, (-1.0, 0.6))],
)
def test_what_the_metrics_are_worth(
    shape: tuple[int, int, int], spread: float, kron: float, mean: tuple[float, float]
) -> None:
    """Kronecker is nearly exact for sequences that are alike; the mean of solutions is not where they differ."""
    share: dict[str, list[float]] = {"kron": [], "mean": []}
    for seed in range(5):
        statistics = problem(*shape, condition=5.0 + seed, spread=spread, seed=seed)
        best = decrease(statistics, metric.direction(statistics, "exact").p)
        for how, shares in share.items():
            shares.append(decrease(statistics, metric.direction(statistics, how).p) / best)
    assert kron <= np.mean(share["kron"]) <= 1.0
    assert mean[0] <= np.mean(share["mean"]) <= mean[1]


def test_a_mask_keeps_the_unmasked_factor_and_still_descends() -> None:
    mask = np.tril(np.ones((1, 1, 9, 9), bool))
    statistics = of_tokens(draw("x", 4, 9, 5), draw("g", 4, 2, 9, 9), mask)
    unmasked = of_tokens(draw("x", 4, 9, 5), draw("g", 4, 2, 9, 9))
    np.testing.assert_array_equal(metric.kronecker(statistics).left.roots, metric.kronecker(unmasked).left.roots)
    for how in ("kron", "exact"):
        assert np.sum(statistics.gradient * metric.direction(statistics, how).p) > 0.0
    exact = metric.direction(statistics, "exact", tolerance=1e-11).p
    np.testing.assert_allclose(apply_metric(statistics, exact), statistics.gradient, atol=1e-8)


def test_centred_keys_charge_nothing_for_what_a_softmax_does_not_see() -> None:
    """A mean that all tokens have is a constant of every row of scores."""
    tokens = draw("x", 3, 8, 4) + 3.0
    g = draw("g", 3, 1, 8, 8)
    g = g - g.mean(axis=-1, keepdims=True)
    statistics = of_tokens(tokens, g)
    effective = []
    for center in (False, True):
        p = metric.direction(statistics, "exact", center_keys=center).p
        change = np.einsum("bni,hij,bmj->bhnm", tokens, p, tokens)
        change = change - change.mean(axis=-1, keepdims=True)
        effective.append(float(np.sum(statistics.gradient * p)) / np.sqrt(np.sum(change**2)))
    assert effective[1] > 1.02 * effective[0]
    with pytest.raises(ValueError, match="center_keys: got True with a mask, needs False"):
        metric.kronecker(observed("causal")[1], center_keys=True)


def test_with_biases_and_centred_keys_the_bias_of_the_keys_is_left_alone() -> None:
    _, statistics = observed("two heads")
    p = metric.direction(
        statistics, center_keys=True, metric=metric.kronecker(statistics, center_keys=True, singular="drop")
    ).p
    assert np.max(np.abs(p[:, :, -1])) < 1e-10 * np.max(np.abs(p))


def test_bad_input() -> None:
    _, statistics = observed("two heads")
    for how in ("exact", "mean"):
        with pytest.raises(ValueError, match=r"statistics: got some without their sequences, needs .*keep=True"):
            metric.direction(replace(statistics, kept=()), how)
    with pytest.raises(ValueError, match="statistics: got tokens that are all 0"):
        metric.factor(np.zeros((3, 3)), 1)


def test_a_direction_that_was_not_reached_is_said() -> None:
    """With the residual that it ends with, of the equation itself; half of the digits are a warning, none an error."""
    statistics = problem(16, 20, 12, condition=30.0)
    exact = metric.direction(statistics, "exact")
    assert exact.residual < 1e-7
    with pytest.warns(PrecisionWarning, match=r"residual: rounding may move it by .*, needs more iterations") as said:
        early = metric.direction(statistics, "exact", iterations=4)
    assert said[0].filename == __file__
    missing = apply_metric(statistics, early.p) - statistics.gradient
    assert early.residual == pytest.approx(np.linalg.norm(missing) / np.linalg.norm(statistics.gradient))
    with pytest.raises(PrecisionError, match="needs more iterations"):
        metric.direction(statistics, "exact", iterations=0)
