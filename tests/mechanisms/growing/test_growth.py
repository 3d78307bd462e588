"""The growth step: its slope, its certificate, what it keeps, and what it gains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from docs.experiments import teacher
from refattn import equations, tree
from refattn.backends import get
from refattn.mechanisms.growing import loops
from refattn.mechanisms.growing.growth import path
from refattn.mechanisms.growing.growth.bottleneck import bottleneck, select_columns
from refattn.mechanisms.growing.growth.metric import direction, kronecker
from refattn.mechanisms.growing.growth.search import search
from refattn.mechanisms.growing.growth.statistics import apply_metric
from refattn.mechanisms.growing.growth.truncate import truncate
from refattn.mechanisms.growing.testing import block_derived_twice
from refattn.verify.selfcheck import sections
from tests.mechanisms.growing.calls import BLOCK, block_of, draw, step
from tests.mechanisms.growing.test_metric import observed, problem
from tests.mechanisms.growing.test_truncate import one_sequence

GROWTH: Any = ra.mechanism("growing").grow
Options = GROWTH.Options
State = BLOCK.module.State
NAMES = ("two heads", "causal", "padded")


def loss_of(name: str, params: Any) -> float:
    """The loss of which `observed` has the statistics: linear in what the block gives."""
    _, x, context = block_of(name)
    y, _ = step(params, x, context)
    return float(np.sum(draw("d_y", *y.shape) * y))


# --- slopes


@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize("mode", ["replace", "additive"])
@pytest.mark.parametrize("name", NAMES)
def test_the_slope_in_closed_form_is_that_of_the_path(name: str, mode: str, columns: int) -> None:
    """Test 13: the loss along the truncated path falls by the tangent part and the columns' squares."""
    params, statistics = observed(name)
    made = GROWTH.plan(params, statistics, Options(mode=mode), columns=columns)
    kernel = path.kernel_of(params)
    if mode == "replace":
        small = 1e-6 * np.linalg.norm(kernel) / np.linalg.norm(made.direction.p) * made.direction.size
        left, right = path._factors(made, kernel, small)
        change = left @ np.swapaxes(right, 1, 2) - kernel
    else:
        small = 1e-3
        change = path.kernel_of(GROWTH.apply(made, small)) - kernel
    found = float(np.sum(statistics.gradient * change)) / small
    total = bottleneck(params, statistics).total / made.direction.size
    assert abs(found - made.slope) < 1e-5 * total
    assert made.slope <= 0.0 and (made.slope < 0.0 or (mode == "additive" and not columns))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_changes_as_predicted(name: str) -> None:
    """Test 15: the actual change over the predicted one is 1 for small amplitudes."""
    params, statistics = observed(name)
    before = loss_of(name, params)
    for options in (Options(), Options(mode="additive"), Options(metric="exact", method="optimal_als")):
        made = GROWTH.plan(params, statistics, options, columns=1)
        amplitude = 1e-4
        ratio = (loss_of(name, GROWTH.apply(made, amplitude)) - before) / (amplitude * made.slope)
        assert abs(ratio - 1.0) < 1e-3, options


@pytest.mark.parametrize("mode", ["replace", "additive"])
def test_the_slope_with_centred_keys(mode: str) -> None:
    """The metric has another factor for keys than for queries."""
    params, statistics = observed("two heads")
    options = Options(mode=mode, center_keys=True)
    made = GROWTH.plan(params, statistics, options, columns=1)
    assert made.metric.left is not made.metric.right
    change = path.kernel_of(GROWTH.apply(made, 1e-4)) - path.kernel_of(params)
    assert float(np.sum(statistics.gradient * change)) / 1e-4 == pytest.approx(made.slope, rel=1e-2)


def test_the_gain_is_that_of_the_columns() -> None:
    params, statistics = observed("two heads")
    additive = GROWTH.plan(params, statistics, Options(mode="additive"), columns=2)
    assert additive.gain == -additive.slope > 0.0
    assert GROWTH.plan(params, statistics, columns=2).gain == additive.gain
    assert GROWTH.plan(params, statistics, columns=0).gain == 0.0


def test_halves_have_to_agree() -> None:
    params, statistics = observed("two heads")
    opposite = replace(statistics, gradient=-statistics.gradient)
    options = Options(share=0.0, most=3)
    assert GROWTH.plan(params, statistics, options, halves=(statistics, statistics)).columns == 3
    assert GROWTH.plan(params, statistics, options, halves=(statistics, opposite)).columns == 0


def test_the_parts_of_the_gradient_add_up() -> None:
    params, statistics = observed("two heads")
    found = bottleneck(params, statistics)
    assert math.isclose(found.total, found.tangent + found.normal, rel_tol=1e-12)
    assert math.isclose(found.normal, sum(found.squares), rel_tol=1e-12)
    assert 0.0 < found.psi < 1.0
    whole = BLOCK.Config(width=8, heads=2, head_width=9, value_width=4, bias=True)
    wide = BLOCK.init(whole, seed=1, like=np.zeros(1))
    moved = tree.map_leaves(lambda w: w + draw("w", *w.shape), wide)
    assert bottleneck(moved, statistics).psi < 1e-20  # nothing is hidden from a kernel of full rank


def test_the_tangent_part_is_what_the_weights_gradients_say() -> None:
    """It vanishes exactly where the gradients of w_q and w_k do."""
    params, statistics = observed("two heads")
    n = statistics.gradient
    metric = kronecker(statistics)
    normal = bottleneck(params, statistics)
    whitened = normal.u * normal.sigma[:, None, :] @ np.swapaxes(normal.v, 1, 2)
    hidden = np.swapaxes(metric.left.whitener, 0, 1) @ whitened @ metric.right.whitener
    plateau = replace(statistics, gradient=hidden)
    assert (
        np.max(np.abs(hidden @ params.w_k)) < 1e-12 and np.max(np.abs(np.swapaxes(hidden, 1, 2) @ params.w_q)) < 1e-12
    )
    assert bottleneck(params, plateau).psi > 1.0 - 1e-12
    assert np.max(np.abs(n @ params.w_k)) > 1e-3


# --- the certificate


@pytest.mark.parametrize(("condition", "least", "most"), [(3.0, 0.0, 0.2), (10.0, 0.5, 1.0), (30.0, 0.9, 1.0)])
def test_a_certificate_of_descent(condition: float, least: float, most: float) -> None:
    """Test 14: a step that is at least as near to F as M is descends; only the optimal one always is as near."""
    broken = 0
    for seed in range(100):
        x, b, statistics = one_sequence(12, 8, condition, seed=seed)
        metric = kronecker(statistics)
        way = direction(statistics, metric=metric)
        kernel = (draw("l", 8, 3, seed=seed) @ draw("r", 8, 3, seed=seed).T)[None] / condition
        eta = 0.3 * np.linalg.norm(x @ kernel[0] @ x.T) / np.linalg.norm(x @ way.p[0] @ x.T)
        f = kernel - eta * way.p

        def near(m: Any) -> float:
            return float(np.sum((m - f) * apply_metric(statistics, m - f)))  # noqa: B023

        for how in ("optimal", "frobenius"):
            left, right = truncate(f, 4, how, metric)
            moved = left @ np.swapaxes(right, 1, 2)
            slope = float(np.sum(statistics.gradient * (moved - kernel)))
            certified = near(moved) <= near(kernel) * (1.0 + 1e-12)
            if certified:
                size = float(np.sum((moved - kernel) * apply_metric(statistics, moved - kernel)))
                assert slope <= -size / (2.0 * eta) * (1.0 - 1e-9)
            assert certified or how == "frobenius"
            broken += not certified
    assert least <= broken / 100 <= most


# --- what is kept


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", ["frozen", "rescale"])
@pytest.mark.parametrize("mode", ["gradmax", "zero", "net2wider"])
@pytest.mark.parametrize("name", NAMES)
def test_modes_that_keep_the_function(name: str, mode: str, scale: str, dtype: str) -> None:
    """Test 17."""
    params, statistics = observed(name)
    _, x, context = block_of(name)
    params = tree.map_leaves(lambda w: w.astype(dtype), params)
    x = x.astype(dtype)
    made = GROWTH.plan(params, statistics, Options(mode=mode, scale=scale), columns=2)
    grown = GROWTH.apply(made)
    d = params.config.sizes[1]
    assert grown.w_q.shape[2] == grown.w_k.shape[2] == d + 2 == grown.config.sizes[1]
    assert grown.w_q.dtype == dtype and GROWTH.apply(made).w_q.tobytes() == grown.w_q.tobytes()
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(step(grown, x, context)[0], step(params, x, context)[0], rtol=0.0, atol=tolerance)
    assert np.all(np.linalg.norm(grown.w_q[..., d:], axis=1) > 0.0)  # zeros in both would stay zeros
    if scale == "frozen" and mode != "net2wider":
        np.testing.assert_array_equal(grown.w_q[..., :d], params.w_q)
        assert not np.any(grown.w_k[..., d:])


@pytest.mark.parametrize("mode", ["replace", "additive"])
def test_an_amplitude_of_0_adds_columns_that_change_nothing(mode: str) -> None:
    params, statistics = observed("causal")
    _, x, context = block_of("causal")
    grown = GROWTH.apply(GROWTH.plan(params, statistics, Options(mode=mode), columns=1), 0.0)
    assert grown.config.sizes[1] == params.config.sizes[1] + 1
    np.testing.assert_allclose(step(grown, x, context)[0], step(params, x, context)[0], rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("method", ["optimal", "optimal_als", "frobenius"])
def test_a_path_starts_at_the_kernel(method: str) -> None:
    """Test 11: without a step and without columns the kernel, and with balanced weights the weights, are the same."""
    params, statistics = observed("two heads")
    made = GROWTH.plan(params, statistics, Options(method=method), columns=0)
    still = GROWTH.apply(made, 1e-300)
    np.testing.assert_allclose(path.kernel_of(still), path.kernel_of(params), rtol=0.0, atol=1e-12)
    made = GROWTH.plan(still, statistics, Options(method=method), columns=0)
    again = GROWTH.apply(made, 1e-300)
    for name in ("w_q", "w_k"):
        np.testing.assert_allclose(getattr(again, name), getattr(still, name), rtol=0.0, atol=1e-12)


def test_aligned_columns_lie_near_the_old_ones() -> None:
    params, statistics = observed("two heads")
    far, near = (
        GROWTH.apply(GROWTH.plan(params, statistics, Options(align=align), columns=1), 0.1) for align in (False, True)
    )
    np.testing.assert_allclose(path.kernel_of(near), path.kernel_of(far), rtol=0.0, atol=1e-12)
    moved = [np.linalg.norm(p.w_q[..., :2] - params.w_q) for p in (far, near)]
    assert moved[1] < 0.7 * moved[0]


@pytest.mark.parametrize("trained", [False, True])
def test_scales(trained: bool) -> None:
    """Test 19: kept or rescaled with the weights it is the same function; changed silently it is not."""
    params, x, context = block_of("two heads", train_scale=trained)
    params = replace(params, scale=params.scale * 1.3) if trained else params
    y, saved = step(params, x, context)
    statistics = GROWTH.observe(params, saved, State(draw("d_y", *y.shape)), keep=True)
    outs = {}
    for scale in ("frozen", "rescale"):
        grown = GROWTH.apply(GROWTH.plan(params, statistics, Options(scale=scale), columns=2), 0.4)
        outs[scale] = step(grown, x, context)[0]
        expected = path.scale_of(params) if scale == "frozen" else 0.5
        assert path.scale_of(grown) == pytest.approx(expected, rel=1e-15)
    np.testing.assert_allclose(outs["rescale"], outs["frozen"], rtol=0.0, atol=1e-12)
    silent = replace(grown, config=replace(grown.config, scale=0.9), scale=np.asarray(0.9) if trained else None)
    assert np.max(np.abs(step(silent, x, context)[0] - outs["frozen"])) > 1e-3


# --- columns


def test_gradmax_has_the_largest_gradient() -> None:
    """Test 18."""
    params, statistics = observed("two heads")
    made = GROWTH.plan(params, statistics, Options(mode="gradmax"), columns=2)
    new = GROWTH.apply(made).w_q[..., 2:]
    s = params.config.factor

    def square(columns: Any) -> Any:
        return s**2 * np.sum((np.swapaxes(statistics.gradient, 1, 2) @ columns) ** 2, axis=(1, 2))

    length = np.linalg.norm(new[..., 0], axis=1)
    np.testing.assert_allclose(length, np.sqrt(np.mean(np.sum(params.w_q**2, axis=1), axis=1)), rtol=1e-12)
    expected = s**2 * length**2 * np.sum(np.linalg.svd(statistics.gradient)[1][:, :2] ** 2, axis=1)
    np.testing.assert_allclose(square(new), expected, rtol=1e-12)
    for n in range(100):
        other = np.linalg.qr(draw("columns", 2, 9, 2, seed=n))[0] * length[:, None, None]
        assert np.all(square(other) <= square(new) * (1.0 + 1e-12))


@pytest.mark.parametrize(("split", "grows"), [(0.5, False), (0.7, True)])
def test_equal_halves_never_part(split: float, grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test 20: the copies of net2wider get the same gradient where their keys are the same."""
    monkeypatch.setattr("refattn.mechanisms.growing.growth.columns.net2wider.__defaults__", (split,))
    given = teacher.task(0, sequences=64)
    params = teacher.fresh(2, seed=0)
    made = GROWTH.plan(params, teacher.observe(params, given), Options(mode="net2wider"), columns=1)
    trained = teacher.train(GROWTH.apply(made), given, 50, seed=0, size=16)
    sigma = np.linalg.svd(path.kernel_of(trained)[0])[1]
    assert (sigma[2] / sigma[0] > 1e-3) if grows else (sigma[2] / sigma[0] < 1e-12)


def test_kernels_and_old_columns_agree_with_the_second_derivation() -> None:
    """Where no sign of a singular vector is left; every equation, but for such signs, stands below."""
    params, x, context = block_of("two heads")
    y, saved = step(params, x, context)
    with ra.trace() as t:
        d_state = BLOCK.module.State(draw("d_y", *y.shape))
        made = GROWTH.plan(params, GROWTH.observe(params, saved, d_state), columns=1)
        before = len(t.passes("GROW.1"))
        grown = GROWTH.apply(made, 0.3)
    assert before == 0 and len(t.passes("GROW.singular_values")) == 1
    values = BLOCK.module.keys_and_values(params, x)[1]
    d_out = BLOCK.module.attended_backward(params, saved, d_state)
    numbers = {"scale": params.config.factor, "damping": 0.01, "rank": params.w_q.shape[2] + 1, "amplitude": 0.3}
    expected = loops.step(saved.tokens, params.w_q, params.w_k, values, d_out, **numbers)
    for id, weight in (("GROW.17", grown.w_q), ("GROW.18", grown.w_k)):
        np.testing.assert_array_equal(t[id], weight)
        np.testing.assert_allclose(weight[..., :-1], expected[id][..., :-1], rtol=0.0, atol=1e-9)
    # Products know no signs: the truncated kernel, the same of balanced factors; and weights are made of these.
    first, second = ("GROW.left_factor", "GROW.right_factor"), ("GROW.14", "GROW.15")
    low, balanced = (t[left] @ np.swapaxes(t[right], 1, 2) for left, right in (first, second))
    wanted = expected[first[0]] @ np.swapaxes(expected[first[1]], 1, 2)
    np.testing.assert_allclose(low, wanted, rtol=0.0, atol=1e-9)
    np.testing.assert_allclose(balanced, low, atol=1e-12)
    for id, weight in (("GROW.14", grown.w_q), ("GROW.15", grown.w_k)):
        turned = t[id] @ t["GROW.16"] / math.sqrt(params.config.factor)
        np.testing.assert_allclose(turned, weight, atol=1e-12)


def test_the_check_derives_every_equation_beside_the_core_twice() -> None:
    """And names the first that differs."""
    found, expected = block_derived_twice.block_derived_twice()
    modules = (BLOCK.module, *ra.mechanism("growing").extra_modules)
    assert set(found) == {id for module in modules for id in equations.declared(module)}
    changed = {id: 1.001 * value if id in ("GROW.8", "GROW.10") else value for id, value in found.items()}

    def judged(values: Mapping[str, Any]) -> tuple[float, str]:
        record = replace(ra.mechanism("growing"), block_derived_twice=lambda: (values, expected))
        (task,) = (task for task in sections.tasks(sections.Scope(record, get("numpy"))) if "growth" in task.name)
        return task.run()

    assert judged(found)[0] < 1e-3
    share, where = judged(changed)
    assert share > 1e5 and where == "GROW.8, the first of 2 that differ"


# --- the search


def test_the_search() -> None:
    """Test 21."""
    calls: list[float] = []

    def bowl(a: float) -> float:
        calls.append(a)
        return (a - 3.0) ** 2

    found = search(bowl, 9.0, -6.0, Options())
    assert (found.amplitude, found.after, found.evaluations) == (2.0, 1.0, len(calls)) and found.actual == -8.0
    assert search(lambda a: (a - 0.01) ** 2, 1e-4, -0.02, Options()).amplitude == pytest.approx(2.0**-7, rel=1e-12)
    for never in (lambda a: 1.0 + a, lambda a: math.nan, lambda a: math.inf):
        found = search(never, 1.0, -1.0, Options(evaluations=12))
        assert (found.amplitude, found.after, found.evaluations, found.actual) == (0.0, 1.0, 12, 0.0)
    assert search(bowl, 9.0, 0.0, Options()).evaluations == 0
    assert search(lambda a: math.nan if a > 0.1 else -a, 0.0, -1.0, Options()).amplitude == 0.0625
    endless = search(lambda a: -a, 0.0, -1.0, Options(evaluations=7))
    assert endless.evaluations == 7 and endless.amplitude == 32.0


@pytest.mark.parametrize("name", NAMES)
def test_a_growth_step_never_increases_the_loss(name: str) -> None:
    """Test 21, of the whole step."""
    params, statistics = observed(name)
    for options in (
        Options(),
        Options(mode="additive"),
        Options(method="frobenius", metric="mean"),
        Options(metric="exact"),
    ):
        grown, facts = GROWTH.grow(params, statistics, lambda p: loss_of(name, p), options, columns=1)
        assert facts["after"] == loss_of(name, grown) < facts["before"] == loss_of(name, params)
        assert facts["predicted"] == facts["amplitude"] * facts["slope"] < 0.0
        kept, facts = GROWTH.grow(params, statistics, lambda p: 1.0, options, columns=1)
        assert facts["amplitude"] == 0.0 and kept.config.sizes[1] == params.config.sizes[1] + 1


# --- how many


def test_columns_are_believed_where_the_other_half_confirms_them() -> None:
    params, statistics = observed("two heads")
    metric = kronecker(statistics)
    found = bottleneck(params, statistics, metric)
    assert select_columns(found, metric, 3, Options(), statistics) == 3
    assert select_columns(found, metric, 2, Options()) == 2
    assert select_columns(found, metric, 9, Options(share=1.0)) == 0
    opposite = replace(statistics, gradient=-statistics.gradient)
    assert select_columns(found, metric, 3, Options(), opposite) == 0
    other = problem(3, 6, 9, h=2)
    noise = replace(other, gradient=draw("noise", 2, 9, 9))
    assert select_columns(found, metric, 3, Options(), noise) < 3


def test_without_a_gradient_nothing_grows() -> None:
    params, statistics = observed("one token")
    made = GROWTH.plan(params, statistics, columns=1)
    assert (made.columns, made.slope, made.facts["mode"]) == (0, 0.0, "none")
    assert GROWTH.apply(made, 1.0) is params
    assert GROWTH.grow(params, statistics, lambda p: 1.0)[0] is params


def test_no_more_columns_than_there_is_room() -> None:
    params, statistics = observed("two heads")
    made = GROWTH.plan(params, statistics, columns=50)
    assert made.columns == 7 and made.facts["asked"] == 50  # the augmented tokens have 9 widths, the heads have 2
    full = GROWTH.apply(made, 0.3)
    moved = path.kernel_of(params) - 0.3 / made.direction.size * made.direction.p
    np.testing.assert_allclose(path.kernel_of(full), moved, rtol=0.0, atol=1e-12)
    assert GROWTH.plan(params, statistics, Options(largest=3), columns=5).columns == 1
    assert GROWTH.plan(full, statistics).columns == 0


def test_a_direction_that_may_ascend_is_replaced() -> None:
    params, statistics = observed("two heads")
    fooled = replace(statistics, kept=tuple(replace(k, gradient=-k.gradient) for k in statistics.kept))
    made = GROWTH.plan(params, fooled, Options(metric="mean", method="frobenius"), columns=1)
    assert (made.options.metric, made.options.method) == ("kron", "optimal") and made.slope < 0.0
    assert made.facts["in_place_of"] == {"metric": "mean", "method": "frobenius"}  # a log tells what was done
    assert "in_place_of" not in GROWTH.plan(params, statistics, columns=1).facts


def test_bad_input() -> None:
    params, statistics = observed("two heads")
    for given, message in (
        ({"mode": "more"}, "mode: got 'more', needs one of replace, additive"),
        ({"method": "best"}, "method: got 'best', needs one of optimal, optimal_als, frobenius, report"),
        ({"metric": 3}, "metric: got 3, needs one of kron"),
        ({"singular": "pray"}, "singular: got 'pray', needs one of ridge, drop"),
        ({"scale": "free"}, "scale: got 'free', needs one of frozen, rescale"),
        ({"most": -1}, "most: got -1, needs a whole number of at least 0"),
        ({"largest": 0}, "largest: got 0, needs a whole number of at least 1"),
        ({"gain": -0.1}, "gain: got -0.1, needs a finite number from 0"),
        ({"amplitude": 0.0}, "amplitude: got 0.0, needs a finite number above 0"),
        ({"factor": 1.0}, "factor: got 1.0, needs a finite number above 0 to below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Options(**given)
    with pytest.raises(TypeError, match="align: got 1, needs true or false"):
        Options(align=1)
    with pytest.raises(ValueError, match="columns: got -1, needs None or a whole number"):
        GROWTH.plan(params, statistics, columns=-1)
    with pytest.raises(TypeError, match="statistics: got None, needs a Statistics"):
        GROWTH.plan(params, None)
    other = problem(3, 6, 8, h=2)
    with pytest.raises(
        ValueError, match=r"statistics: got those of kernels \(2, 8, 8\), needs \(2, 9, 9\) as the block"
    ):
        GROWTH.plan(params, other)
    for halves in (statistics, (statistics,), (statistics, None)):
        with pytest.raises(TypeError, match="halves: got .*, needs None or a pair of Statistics"):
            GROWTH.plan(params, statistics, halves=halves)
    with pytest.raises(ValueError, match=r"halves: got those of kernels \(2, 8, 8\), needs \(2, 9, 9\) as the block"):
        GROWTH.plan(params, statistics, halves=(statistics, other))
    with pytest.raises(ValueError, match="amplitude: got -1.0, needs a finite number from 0"):
        GROWTH.apply(GROWTH.plan(params, statistics), -1.0)


def test_on_every_library(backend: Any) -> None:
    """The whole step, with numbers of the same library, in its dtype and on its device."""
    params, x, context = block_of("padded")
    choices = [Options(mode=mode, metric="exact") for mode in ("replace", "additive", "gradmax", "net2wider")]
    choices += [Options(method="optimal_als"), Options(method="frobenius"), Options(uneven=True)]
    # JAX compiles every operation for every shape.
    choices = [Options()] if str(backend) == "jax" else choices
    kernels: list[list[Any]] = []
    for send in (np.asarray, backend.array):
        at = replace(context, mask=send(context.mask), key_mask=send(context.key_mask))
        given = tree.map_leaves(send, params)
        y, saved = step(given, send(x), at)
        statistics = GROWTH.observe(given, saved, State(send(draw("d_y", *x.shape))), keep=True)
        kernels.append([])
        for options in choices:
            grown = GROWTH.apply(GROWTH.plan(given, statistics, options, columns=1), 0.3)
            assert type(grown.w_q) is type(y) and grown.w_q.dtype == y.dtype
            w_q, w_k = (w if send is np.asarray else backend.host(w) for w in (grown.w_q, grown.w_k))
            kernels[-1].append(w_q @ np.swapaxes(w_k, 1, 2))
    for expected, found in zip(*kernels, strict=True):
        np.testing.assert_allclose(
            found, expected, rtol=0.0, atol=1e-8 * np.max(np.abs(expected)), err_msg=str(options)
        )
