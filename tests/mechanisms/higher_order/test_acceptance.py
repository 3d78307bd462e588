"""The numbers that higher-order attention has to meet, one test for each."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import backends, counter, tree
from refattn.mechanisms.higher_order.dense import divisor_of, taylor, through_divisor
from refattn.mechanisms.higher_order.judge import loops
from refattn.mechanisms.higher_order.options import NORMALISERS, Add, Clamp, Exact, Signed
from refattn.verify.itself import gradients
from tests.mechanisms.higher_order.calls import FORMS, Call, assert_close, assert_same_bits, cut, make, run

RECORD = ra.mechanism("higher_order")

# Calls with sums that are clear of 0, over what changes the way of evaluation.
WELL = {
    "plain": make(2, 4, 2, 33, 33, 8, 6),
    "causal": make(2, 4, 2, 33, 33, 8, 6, causal=True),
    "masked": make(2, 4, 2, 33, 33, 8, 6, causal=True, keep=0.7),
    "unequal": make(1, 2, 1, 21, 45, 16, 8, causal=True),
    "top left": make(1, 2, 1, 45, 21, 16, 8, causal="top_left"),
    "half": make(2, 4, 2, 33, 33, 8, 6, causal=True, normaliser="exact(delta=0.5)"),
    "order 4": make(1, 2, 1, 19, 33, 5, 6, order=4, alpha=1.0),
    "order 3": make(1, 2, 1, 33, 33, 6, 4, order=3, causal=True),
    "given": make(1, 2, 1, 33, 33, 6, 4, layer_norm=False, causal=True),
    "plain denominator": make(1, 2, 1, 33, 33, 6, 4, normaliser="exact(delta=1.0, plain=True)", causal=True),
}


def rows(n: int, d: int, name: str = "x") -> Any:
    return counter.normal((1, 1, n, d), seed=11, purpose=name)


def scores_of(q: Any, k: Any, alpha: float) -> Any:
    with ra.trace() as t:
        ra.higher_order.forward(q, k, k, alpha=alpha)
    return t["HOL.3"]


def softmax(scores: Any, v: Any) -> Any:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


# --- forms and gradients


@pytest.mark.parametrize("chunk", [4, 13, 64])
@pytest.mark.parametrize("name", WELL)
def test_float64_forms_agree_to_1e_12(name: str, chunk: int) -> None:
    expected = run(WELL[name])
    with cut(chunk):
        for form in WELL[name].forms[1:]:
            found = run(WELL[name], form)
            assert_close({"out": found["out"]}, {"out": expected["out"]}, 1e-12)
            assert_close(found, expected, 1e-11)


@pytest.mark.parametrize("name", WELL)
def test_float32_forms_agree_to_2e_6(name: str) -> None:
    call = WELL[name]
    call = replace(call, **{n: getattr(call, n).astype("float32").astype("float64") for n in ("q", "k", "v", "d_out")})
    expected = run(call)
    with cut(13):
        for form in call.forms:
            found = run(call, form, dtype="float32")
            assert found["out"].dtype == np.float32
            assert_close({"out": found["out"]}, {"out": expected["out"]}, 2e-6)


def test_delta_1_agrees_as_far_as_its_sums_are_conditioned() -> None:
    """1e-13 n max|w| / min|z|: weights of both signs cancel in z."""
    for seed in range(5):
        call = make(1, 2, 1, 24, 40, 8, 6, normaliser=Exact(delta=1.0), seed=seed)
        expected = run(call)
        condition = 40 * 0.5 * 2.7 / np.abs(expected["normaliser"]).min()
        for form in call.forms[1:]:
            error = np.abs(run(call, form)["out"] - expected["out"]).max()
            assert error <= 1e-13 * condition * max(1.0, np.abs(expected["out"]).max())


def test_gradients_agree_three_ways_to_1e_9() -> None:
    """By hand in every form, by differences, and by the autograd of torch."""
    names = (
        "plain",
        "mask-causal",
        "grouped-one",
        "half",
        "order-4",
        "given",
        "add",
        "clamp",
        "one-signed",
        "one-plain",
    )
    cases = [RECORD.case(name) for name in names]
    for subject in gradients.core_subjects(RECORD, cases):
        differences = gradients.by_differences(subject)
        for form in FORMS[RECORD.case(subject.name).options.get("causal", False)]:
            hand = gradients.by_hand(subject, backends.get("numpy"), form)
            assert gradients.largest_error(hand, differences)[0] < 1e-9, (subject.name, form)
    pytest.importorskip("torch")
    for subject in gradients.core_subjects(RECORD, cases):
        expected = gradients.by_autograd(subject)
        hand = gradients.by_hand(subject, backends.get("numpy"), "dense")
        assert gradients.largest_error(hand, expected)[0] < 1e-12, subject.name


@pytest.mark.parametrize("form", ["tiled", "chunked"])
def test_float32_is_as_good_over_many_tokens(form: str) -> None:
    q, k, v = (counter.normal((1, 1, 4096, 16), seed=2, purpose=n).astype("float32") for n in "qkv")
    wide = [x.astype("float64") for x in (q, k, v)]
    truth = ra.higher_order.forward(*wide, causal=True, form="tiled")[0]
    found = ra.higher_order.forward(q, k, v, causal=True, form=form)[0]
    assert np.abs(found - truth).max() < 1e-6 * np.abs(truth).max()


@pytest.mark.parametrize("parts", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["linear", "chunked", "recurrent"])
def test_a_mean_of_the_values_costs_float32_no_digits_of_the_gradients(form: str, parts: int) -> None:
    """That of a weight is da . (v_j - o_i): values have a mean of 30 here, and sums over keys of 30 n would be rounded.

    Where it comes in parts, the state carries the values about their mean.
    """
    n, causal = 2048 if form == "recurrent" else 8192, form != "linear"
    if parts > 1 and not causal:
        return
    arrays = [counter.normal((1, 1, n, 16), seed=2, purpose=name) for name in ("q", "k", "v", "d_out")]
    arrays[2] = arrays[2] + 30.0
    small = [x.astype("float32") for x in arrays]
    q, k, v, d_out = (x.astype("float64") for x in small)
    _, saved = ra.higher_order.forward(q, k, v, causal=causal, form="tiled")
    truth = ra.higher_order.backward(saved, d_out)
    state = ra.higher_order.empty_state(*small[1:3]) if parts > 1 else None
    found: dict[str, list[Any]] = {"q": [], "k": []}
    pieces, step = [], n // parts
    for first in range(0, n, step):
        q, k, v, d_out = (x[:, :, first : first + step] for x in small)
        _, saved = ra.higher_order.forward(q, k, v, causal=causal, form=form, state=state)
        state = saved.state
        pieces.append((saved, d_out))
    d_state = None
    for saved, d_out in reversed(pieces):
        gradients = ra.higher_order.backward(saved, d_out, d_state)
        d_state = gradients.get("state")
        for name, of in found.items():
            of.insert(0, gradients[name])
    # The first queries of a causal call attend few keys and have large gradients, which would hide the others.
    for name, of in found.items():
        late, expected = (
            x[:, :, n // 2 :] if name == "q" else x[:, :, : n // 2] for x in (np.concatenate(of, 2), truth[name])
        )
        assert np.abs(late - expected).max() < 4e-5 * np.abs(expected).max(), name


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_the_gradient_of_a_state_is_that_of_differences(form: str) -> None:
    """Of all its numbers, and of the values through the mean that is subtracted from them."""
    call = make(1, 2, 1, 9, 9, 4, 3, keep=0.8, normaliser="exact(delta=0.5)")
    options = {**call.options, "causal": True, "form": form}
    start = ra.higher_order.forward(call.q, call.k, call.v + 2.0, **options, state=empty(call))[1].state
    assert start is not None
    weigh = {n: counter.normal(x.shape, seed=3, purpose=n) for n, x in tree.flatten(start).items() if n != "settings"}
    steps, h = {1: 3.0 / 4.0, 2: -3.0 / 20.0, 3: 1.0 / 60.0}, 2.0**-10

    def loss(v: Any, **state: Any) -> float:
        out, saved = ra.higher_order.forward(call.q, call.k, v, **options, state=replace(start, **state))
        last = tree.flatten(saved.state)
        return float(np.sum(out * call.d_out) + sum(np.sum(w * last[n]) for n, w in weigh.items()))

    _, saved = ra.higher_order.forward(call.q, call.k, call.v, **options, state=start)
    gradients = ra.higher_order.backward(saved, call.d_out, replace(start, **weigh))
    hand = {"v": gradients["v"]} | {n: getattr(gradients["state"], n) for n in weigh}
    given: dict[str, Any] = {"v": call.v, **{n: getattr(start, n) for n in weigh}}
    for name, x in given.items():
        along = counter.normal(x.shape, seed=4, purpose=name)
        ends = {n: loss(**{"v": call.v, name: x + n * h * along}) for n in (-3, -2, -1, 1, 2, 3)}
        expected = sum(w * (ends[n] - ends[-n]) for n, w in steps.items()) / h
        assert math.isclose(float(np.sum(hand[name] * along)), expected, rel_tol=1e-8, abs_tol=1e-8), name


# --- how close the polynomial is to the exponential


@pytest.mark.parametrize("order", range(25))
@pytest.mark.parametrize(("d", "alpha"), [(16, 3.0), (64, 3.0), (16, 1.0)])
def test_the_distance_to_softmax_is_bounded(d: int, alpha: float, order: int) -> None:
    """With b = max |s| and rho = b^(p+1) e^b / (p+1)! < 1, outputs differ by at most 2 rho / (1 - rho) max |v|."""
    q, k, v = (rows(40, d, name) for name in "qkv")
    k[:, :, :4], k[:, :, 4:8] = q[:, :, :4], -q[:, :, 4:8]  # aligned and opposed
    scores = scores_of(q, k, alpha)
    b = np.abs(scores).max()
    rho = b ** (order + 1) * math.exp(b) / math.factorial(order + 1)
    normaliser = Signed(eps=1e-9) if order % 2 else Exact()
    out = ra.higher_order.forward(q, k, v, order=order, alpha=alpha, normaliser=normaliser, form="dense")[0]
    if rho < 1.0:
        assert np.abs(out - softmax(scores, v)).max() <= 2.0 * rho / (1.0 - rho) * np.abs(v).max() + 1e-14


def test_order_20_is_softmax_to_1e_14() -> None:
    q, k, v = (rows(40, 16, name) for name in "qkv")
    k[:, :, :4], k[:, :, 4:8] = q[:, :, :4], -q[:, :, 4:8]
    scores = scores_of(q, k, 3.0)
    assert 1.3 < np.abs(scores).max() <= 1.4
    out = ra.higher_order.forward(q, k, v, order=20, form="dense")[0]
    assert np.abs(out - softmax(scores, v)).max() < 1e-14


@pytest.mark.parametrize(
    ("alpha", "percent", "uniform"), [(1.0, 33.0, 75.0), (2.0, 5.9, 42.0), (3.0, 2.0, 30.0), (5.0, 0.5, 21.0)]
)
def test_order_2_on_random_data(alpha: float, percent: float, uniform: float) -> None:
    """Relative error of the output against softmax of the same scores, 512 tokens of width 64; and that of the mean."""
    q, k, v = (counter.normal((1, 8, 512, 64), seed=4, purpose=f"random.{n}") for n in "qkv")
    exact = softmax(scores_of(q, k, alpha), v)
    found = ra.higher_order.forward(q, k, v, alpha=alpha)[0]
    mean = np.mean(v, axis=2, keepdims=True)
    assert 100.0 * np.linalg.norm(found - exact) / np.linalg.norm(exact) == pytest.approx(percent, rel=0.12)
    assert 100.0 * np.linalg.norm(mean - exact) / np.linalg.norm(exact) == pytest.approx(uniform, rel=0.12)


@pytest.mark.parametrize(
    ("s", "below", "above"), [(1 / 3, 0.5, 0.8), (1.0, 8.0, 36.0), (4 / 3, 15.0, 111.0), (8 / 3, 50.0, 2618.0)]
)
def test_the_weight_of_order_2(s: float, below: float, above: float) -> None:
    """In per cent: too small for s > 0, too large for s < 0."""
    positive, negative = taylor(np.asarray([s, -s]), 2) / np.exp([s, -s]) - 1.0
    assert -100.0 * positive == pytest.approx(below, abs=0.5)
    assert 100.0 * negative == pytest.approx(above, abs=0.5)


@pytest.mark.parametrize(("d", "largest"), [(16, 4 / 3), (64, 8 / 3)])
def test_scores_are_bounded(d: int, largest: float) -> None:
    """|s| <= sqrt(d) / alpha, whatever comes in; reached by aligned and opposed vectors."""
    q = rows(50, d) * 10.0 ** counter.normal((1, 1, 50, 1), seed=1, purpose="size") + 3.0
    k = np.concatenate([q, -q], axis=2)
    scores = scores_of(q, k, 3.0)
    assert np.abs(scores).max() <= largest + 1e-12
    assert scores.max() > 0.99 * largest and scores.min() < -0.99 * largest


# --- signs


@pytest.mark.parametrize(
    ("order", "least", "at"),
    [(2, 0.5, -1.0), (4, 0.270395, -1.596072), (6, 0.149325, -2.180607), (8, 0.083272, -2.759003)],
)
def test_even_orders_are_positive(order: int, least: float, at: float) -> None:
    s = np.linspace(-10.0, 10.0, 2_000_001)
    values = taylor(s, order)
    assert values.min() == pytest.approx(least, abs=1e-6)
    assert s[values.argmin()] == pytest.approx(at, abs=2e-5)
    assert abs(at) ** order / math.factorial(order) == pytest.approx(least, abs=2e-6)
    q, k = rows(30, 6, "q"), rows(50, 6, "k")
    _, saved = ra.higher_order.forward(q, k, k, order=order, alpha=0.3, form="dense")
    assert saved.normaliser.min() >= 50 * least


@pytest.mark.parametrize(("order", "widest"), [(1, 8), (3, 22), (5, 42), (7, 68)])
def test_odd_orders_are_positive_up_to_a_width(order: int, widest: int) -> None:
    """With alpha = 3 and layer normalisation s >= -sqrt(d) / 3."""
    assert taylor(np.asarray(-math.sqrt(widest) / 3.0), order) > 0.0
    assert taylor(np.asarray(-math.sqrt(widest + 1) / 3.0), order) <= 0.0


@pytest.mark.parametrize(("n", "percent"), [(4, 43.0), (16, 26.0), (64, 9.0), (256, 0.3)])
def test_how_often_sums_are_negative_with_delta_1(n: int, percent: float) -> None:
    """About Phi(-sqrt(n) / (2 alpha)): why a causal delta = 1 has to be asked for with its policy."""
    q, k = (counter.normal((1, 40, m, 64), seed=6, purpose=f"sign.{n}.{name}") for name, m in (("q", 100), ("k", n)))
    _, saved = ra.higher_order.forward(q, k, k, normaliser="exact(delta=1.0)")
    found = 100.0 * float(np.mean(saved.normaliser <= 0.0))
    assert found == pytest.approx(percent, rel=0.25, abs=0.3)
    with pytest.raises(ValueError, match=r"normaliser: got 'exact' with delta=1 and causal=True, needs \"signed\""):
        ra.higher_order.forward(q, q, q, normaliser="exact(delta=1.0)", causal=True)


@pytest.mark.parametrize(
    ("normaliser", "expected"),
    [
        (Exact(), (-3.0, -0.1, 1.0, 0.1, 3.0)),
        (Add(eps=0.5), (-2.5, 0.4, 0.5, 0.6, 3.5)),
        (Clamp(eps=0.5), (0.5, 0.5, 0.5, 0.5, 3.0)),
        (Signed(eps=0.5), (-3.0, -0.5, 0.5, 0.5, 3.0)),
    ],
)
def test_what_divides(normaliser: Any, expected: tuple[float, ...]) -> None:
    """And its derivative, by differences but where it jumps: at 0."""
    total = np.asarray([-3.0, -0.1, 0.0, 0.1, 3.0])
    np.testing.assert_allclose(divisor_of(total, normaliser, None), expected, rtol=1e-15)
    slope = (divisor_of(total + 1e-3, normaliser, None) - divisor_of(total - 1e-3, normaliser, None)) / 2e-3
    away = total != 0.0
    np.testing.assert_allclose(through_divisor(np.ones_like(total), total, normaliser)[away], slope[away], atol=1e-12)
    assert through_divisor(np.ones_like(total), total, normaliser)[2] == (
        0.0 if isinstance(normaliser, Clamp | Signed) else 1.0
    )


# --- causality


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("form", FORMS[True])
@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize("lengths", [(13, 13), (9, 13), (13, 9)])
def test_the_past_does_not_see_the_future_to_the_bit(
    lengths: tuple[int, int], causal: Any, form: str, dtype: str
) -> None:
    i, j = lengths
    call = make(1, 4, 2, i, j, 5, 3, causal=causal)
    offset = 0 if causal == "top_left" else j - i
    with cut(4):
        plain = run(call, form, dtype=dtype)
        for t in range(1, i):
            first = min(max(t + offset, 0), j)  # the first key that rows before t may not see
            arrays: dict[str, Any] = {name: np.array(getattr(call, name)) for name in ("q", "k", "v", "d_out")}
            for name, x in arrays.items():
                x[:, :, (first if name in ("k", "v") else t) :] += 1e6
            found = run(replace(call, **arrays), form, dtype=dtype)
            for name in ("out", "normaliser", "q"):
                assert_same_bits({name: found[name][:, :, :t]}, {name: plain[name][:, :, :t]})


@pytest.mark.parametrize("form", FORMS[True])
def test_the_past_is_what_a_shorter_call_gives_to_1e_12(form: str) -> None:
    call = make(1, 4, 2, 21, 21, 5, 3, causal=True)
    with cut(4):
        whole = run(call, form)["out"]
        for t in (1, 3, 8, 20):
            short = run(replace(call, **{n: getattr(call, n)[:, :, :t] for n in ("q", "k", "v", "d_out")}), form)["out"]
            np.testing.assert_allclose(whole[:, :, :t], short, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS[True])
def test_the_first_causal_row_is_the_first_value(form: str) -> None:
    call = make(1, 2, 2, 5, 5, 6, 4, causal=True)
    np.testing.assert_allclose(run(call, form)["out"][:, :, 0], call.v[:, :, 0], rtol=1e-14)


# --- means, permutations, invariances


@pytest.mark.parametrize("name", sorted({*WELL} - {"plain denominator"}))
def test_equal_values_come_out(name: str) -> None:
    call = replace(WELL[name], v=np.ones(WELL[name].v.shape))
    alive = np.broadcast_to(call.allowed.any(axis=-1)[..., None], run(call)["out"].shape)
    for form in call.forms:
        np.testing.assert_allclose(run(call, form)["out"], np.where(alive, 1.0, 0.0), rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("form", FORMS[False])
def test_outputs_of_even_orders_are_means_of_values(form: str) -> None:
    call = make(1, 2, 2, 30, 40, 5, 3, order=2, alpha=0.5)
    out = run(call, form)["out"]
    assert np.all(out <= call.v.max(axis=2, keepdims=True)) and np.all(out >= call.v.min(axis=2, keepdims=True))


@pytest.mark.parametrize("form", FORMS[False])
def test_keys_in_another_order_change_nothing(form: str) -> None:
    call = make(1, 2, 2, 17, 23, 6, 4, keep=0.7)
    order = counter.permutation(23, seed=0, purpose="order")
    moved = replace(call, k=call.k[:, :, order], v=call.v[:, :, order]).but(key_mask=call.options["key_mask"][:, order])
    np.testing.assert_allclose(run(moved, form)["out"], run(call, form)["out"], rtol=0.0, atol=2e-15)


def test_layer_normalisation_takes_size_and_mean_away() -> None:
    call = make(1, 2, 2, 7, 9, 6, 4, norm_eps=0.0)
    moved = replace(call, q=3.7 * call.q + 0.9, k=0.2 * call.k - 1.3)
    np.testing.assert_allclose(run(moved)["out"], run(call)["out"], rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("form", FORMS[True])
def test_gradients_have_no_part_along_what_is_taken_away(form: str) -> None:
    call = make(1, 2, 2, 9, 9, 6, 4, causal=True)
    found = run(call, form)
    for name in ("q", "k"):
        x = getattr(call, name)
        hat = (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)
        size = np.abs(found[name]).max()
        assert np.abs(found[name].sum(axis=-1)).max() < 1e-14 * size
        assert np.abs(np.sum(found[name] * hat, axis=-1)).max() < 1e-3 * size  # of the size of the 1e-5 in the variance


def test_a_constant_query_takes_the_mean() -> None:
    """Its normalised form is 0; the gradient is finite, r being 1 / sqrt(1e-5) = 316."""
    call = make(1, 1, 1, 3, 9, 6, 4)
    found = run(replace(call, q=np.full(call.q.shape, 2.5)))
    np.testing.assert_allclose(found["out"], np.broadcast_to(call.v.mean(axis=2, keepdims=True), found["out"].shape))
    assert np.all(np.isfinite(found["q"])) and np.abs(found["q"]).max() > 0.0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("keep", [None, 0.6])
@pytest.mark.parametrize("form", FORMS[False])
def test_a_constant_query_attends_nothing_with_delta_1(form: str, keep: float | None, dtype: str) -> None:
    """All its weights are T_2(0) - 1 = 0: what rounding leaves of them, in any form, divides nothing."""
    call = make(2, 4, 2, 7, 700, 8, 4, keep=keep, normaliser="exact(delta=1.0)")
    q = np.array(call.q)
    q[:, :, 1], q[:, :, 3], q[:, :, 4] = 2.5, 0.1, 1000.1  # the mean of the last two is rounded
    rest = [0, 2, 5, 6]
    found, other = (
        run(replace(call, q=q), form, dtype=dtype),
        run(replace(call, q=q[:, :, rest], d_out=call.d_out[:, :, rest])),
    )
    for name in ("out", "q"):
        assert not np.any(found[name][:, :, [1, 3, 4]])
    if dtype == "float64":
        found |= {name: found[name][:, :, rest] for name in ("out", "normaliser", "q")}
        assert_close(found, other, 1e-9)  # z is small: weights of both signs
    if form == "dense" and dtype == "float64":
        small = make(1, 1, 1, 3, 5, 4, 2, normaliser="exact(delta=1.0)")
        small = replace(small, q=np.full(small.q.shape, 0.1))
        with ra.trace() as t:
            assert_close({"out": run(small)["out"]}, {"out": np.zeros((1, 1, 3, 2))}, 0.0)
        value = loops.forward(small.q, small.k, small.v, **small.options)
        assert np.all(np.isinf(t["HOL.8"])) and np.all(np.isinf(value["HOL.8"])) and not np.any(value["HOL.9"])


def test_narrow_heads_lose_what_they_hold() -> None:
    """Width 1 is always normalised to 0, width 2 to a sign."""
    one = make(1, 1, 1, 4, 5, 1, 2)
    np.testing.assert_allclose(run(one)["out"], np.broadcast_to(one.v.mean(axis=2, keepdims=True), (1, 1, 4, 2)))
    with ra.trace() as t:
        run(make(1, 1, 1, 4, 5, 2, 2).but(norm_eps=0.0))
    np.testing.assert_allclose(np.abs(t["HOL.1"]), 1.0)


@pytest.mark.parametrize("form", FORMS[True])
def test_a_large_mean_costs_float32_no_digits_of_the_square(form: str) -> None:
    """The elements of a normalised vector add up to 0 only as far as float32 holds a mean of 1000."""
    call = make(1, 2, 2, 40, 40, 16, 4, causal=True)
    arrays = {n: (getattr(call, n) + (1000.0 if n in ("q", "k") else 0.0)).astype("float32") for n in ("q", "k", "v")}
    moved = replace(call, **{n: x.astype("float64") for n, x in arrays.items()})
    with cut(8):
        np.testing.assert_allclose(run(moved, form, dtype="float32")["out"], run(moved)["out"], rtol=0.0, atol=2e-4)
        dense = run(moved, "dense", dtype="float32")["out"]
        np.testing.assert_allclose(run(moved, form, dtype="float32")["out"], dense, rtol=0.0, atol=2e-6)


# --- padding


@pytest.mark.parametrize("form", [*FORMS[False], "chunked", "recurrent"])
def test_masked_is_deleted(form: str) -> None:
    """To 1e-14, whatever padding holds; its gradients are exactly 0. Causal: the rows of the kept tokens."""
    causal = form in ("chunked", "recurrent")
    n = 19
    call = make(1, 4, 2, n, n, 6, 4, causal=causal)
    keep = counter.uniform((n,), seed=5, purpose="keep") < 0.6
    loud: dict[str, Any] = {}
    for name in ("k", "v"):
        loud[name] = np.where(keep[:, None], getattr(call, name), np.nan)
    masked = replace(call, **loud).but(key_mask=keep[None])
    short_rows = keep if causal else slice(None)
    names = {"q": short_rows, "k": keep, "v": keep, "d_out": short_rows}
    d_out = np.where(keep[:, None], call.d_out, 0.0) if causal else call.d_out
    short = replace(call, **{name: getattr(call, name)[:, :, at] for name, at in names.items()})
    with cut(4):
        found, expected = run(replace(masked, d_out=d_out), form), run(short)
    assert not np.any(found["k"][:, :, ~keep]) and not np.any(found["v"][:, :, ~keep])
    for name, at in (("out", short_rows), ("q", short_rows), ("k", keep), ("v", keep)):
        np.testing.assert_allclose(found[name][:, :, at], expected[name], rtol=0.0, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("kind", NORMALISERS)
@pytest.mark.parametrize("form", [*FORMS[False], "chunked", "recurrent"])
def test_nothing_to_attend_gives_0(form: str, kind: str) -> None:
    """Output and gradients, exactly; warnings are errors here."""
    call = make(2, 2, 2, 5, 5, 4, 3, causal=form in ("chunked", "recurrent"), normaliser=f"{kind}(delta=0.5)")
    mask = np.ones((2, 5), bool)
    mask[0] = False
    found = run(call.but(key_mask=mask), form)
    assert all(not np.any(x[0]) for x in found.values())
    assert all(np.any(x[1]) for x in found.values())


# --- without layer normalisation, and after a rotation


def test_without_layer_normalisation_large_scores_are_no_softmax() -> None:
    """The error grows with the square of the size of the inputs: scores leave the range of the polynomial."""
    q, k, v = (rows(64, 16, name) for name in "qkv")
    expected = {0.5: 4e-4, 1.0: 2.9e-2, 2.0: 1.3, 4.0: 2.8}
    for size, error in expected.items():
        with ra.trace() as t:
            out = ra.higher_order.forward(size * q, size * k, v, layer_norm=False, alpha=3.0)[0]
        assert np.abs(out - softmax(t["HOL.3"], v)).max() == pytest.approx(error, rel=0.3)


@pytest.mark.parametrize("form", FORMS[True])
def test_rotated_queries_and_keys(form: str) -> None:
    """Normalise, rotate, and leave the normalisation of the core out: the sum of a rotated vector is no longer 0."""
    call = make(1, 2, 2, 21, 21, 6, 4, causal=True)
    angles = np.arange(21)[:, None] * 10.0 ** -np.arange(3)

    def rotated(x: Any) -> Any:
        x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
        a, b = x[..., :3], x[..., 3:]
        turned = (a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles))
        return np.concatenate(turned, axis=-1)

    given = replace(call, q=rotated(call.q), k=rotated(call.k)).but(layer_norm=False)
    s = given.q @ np.swapaxes(given.k, 2, 3) / (3.0 * math.sqrt(6))
    assert np.abs(s).max() <= math.sqrt(6) / 3.0
    weights = np.tril(1.0 + s + 0.5 * s * s)
    expected = weights @ call.v / weights.sum(axis=-1, keepdims=True)
    with cut(4):
        np.testing.assert_allclose(run(given, form)["out"], expected, rtol=0.0, atol=1e-13)


# --- the state


def pieces(call: Call, t: int) -> list[dict[str, Any]]:
    n = call.q.shape[2]
    return [{x: getattr(call, x)[:, :, at] for x in ("q", "k", "v", "d_out")} for at in (slice(0, t), slice(t, n))]


def empty(call: Call) -> Any:
    known = ("order", "alpha", "normaliser", "layer_norm", "norm_eps")
    return ra.higher_order.empty_state(call.k, call.v, **{n: x for n, x in call.options.items() if n in known})


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
@pytest.mark.parametrize("name", ["causal", "half", "order 3", "given", "plain denominator"])
@pytest.mark.parametrize("t", [1, 8, 20, 32])
def test_two_parts_are_the_whole(t: int, name: str, form: str) -> None:
    """To 1e-12 forward, backward and through the state that is carried over."""
    call = WELL[name]
    whole = run(call, "chunked")
    (a, b), options = pieces(call, t), {**call.options, "form": form}
    with cut(4):
        first, saved_a = ra.higher_order.forward(a["q"], a["k"], a["v"], **options, state=empty(call))
        second, saved_b = ra.higher_order.forward(b["q"], b["k"], b["v"], **options, state=saved_a.state)
        gradients_b = ra.higher_order.backward(saved_b, b["d_out"])
        gradients_a = ra.higher_order.backward(saved_a, a["d_out"], gradients_b["state"])
    found = {"out": np.concatenate([first, second], axis=2)}
    found |= {x: np.concatenate([gradients_a[x], gradients_b[x]], axis=2) for x in "qkv"}
    assert_close(found, {x: whole[x] for x in found}, 1e-12)


def test_the_state_is_of_constant_size() -> None:
    """4 F (e + 1) bytes per head: 9.2 kB for width 16, less than 72 tokens of a cache of keys and values."""
    q = counter.normal((1, 1, 300, 16), seed=1, purpose="state").astype("float32")
    state, sizes = ra.higher_order.empty_state(q, q), []
    for _ in range(3):
        _, saved = ra.higher_order.forward(q, q, q, causal=True, state=state)
        state = saved.state
        sizes.append(state.products.nbytes)
    assert sizes == [136 * 17 * 4] * 3
    assert sizes[0] < 73 * 32 * 4
    assert float(state.values[0, 0, 0, -1]) == 900.0


@pytest.mark.slow
def test_a_million_tokens() -> None:
    """Causal forward of 4 heads of width 16, in pieces, with nothing that grows; the sums stay good in float32."""
    length, piece = 1 << (16 if os.environ.get("REFATTN_SLOW_SAMPLE") else 20), 1 << 14
    wide = narrow = None
    for n in range(length // piece):
        q, k, v = (counter.normal((1, 4, piece, 16), seed=n, purpose=f"million.{x}") for x in "qkv")
        small = [x.astype("float32") for x in (q, k, v)]
        if narrow is None:
            narrow, wide = ra.higher_order.empty_state(*small[1:]), ra.higher_order.empty_state(k, v)
        narrow = ra.higher_order.forward(*small, causal=True, state=narrow)[1].state
        wide = ra.higher_order.forward(q, k, v, causal=True, state=wide)[1].state
    assert narrow is not None and wide is not None
    np.testing.assert_array_equal(narrow.values[..., -1], float(length))
    assert np.abs(narrow.products - wide.products).max() < 1e-4 * np.abs(wide.products).max()
