"""The numbers that higher-order attention has to meet: rounding, the exponential, signs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.mechanisms.higher_order import definition
from refattn.mechanisms.higher_order.dense import divisor_of, taylor, through_divisor
from refattn.mechanisms.higher_order.options import Add, Clamp, Exact, Signed
from tests.mechanisms.higher_order.calls import rows
from tests.rows import holds


def scores_of(q: Any, k: Any, alpha: float) -> Any:
    with ra.trace() as t:
        ra.higher_order.forward(q, k, k, alpha=alpha)
    return t["HOL.3"]


def softmax(scores: Any, v: Any) -> Any:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


# --- rounding


@pytest.mark.parametrize("implementation", ["tiled", "chunked"])
def test_float32_is_as_good_over_many_tokens(implementation: str) -> None:
    q, k, v = (philox.normal((1, 1, 4096, 16), seed=2, purpose=n).astype("float32") for n in "qkv")
    wide = [x.astype("float64") for x in (q, k, v)]
    truth = ra.higher_order.forward(*wide, causal=True, implementation="tiled")[0]
    found = ra.higher_order.forward(q, k, v, causal=True, implementation=implementation)[0]
    assert np.abs(found - truth).max() < 1e-6 * np.abs(truth).max()


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
    out = ra.higher_order.forward(q, k, v, order=order, alpha=alpha, normaliser=normaliser, implementation="dense")[0]
    if rho < 1.0:
        assert np.abs(out - softmax(scores, v)).max() <= 2.0 * rho / (1.0 - rho) * np.abs(v).max() + 1e-14


def test_a_higher_order_may_be_farther_off() -> None:
    """A key opposed to the query weighs 0.065, beside one of score 0; the bound begins to count at order 3."""
    q = rows(1, 64, "q")
    k = np.concatenate([-q, np.ones_like(q)], axis=2)
    v = np.asarray([1.0, 0.0]).reshape(1, 1, 2, 1)
    exact = softmax(scores_of(q, k, 3.0), v)
    errors = [abs(ra.higher_order.forward(q, k, v, order=p, normaliser="signed")[0] - exact).item() for p in range(21)]
    assert errors[0] < errors[2] < errors[1] < errors[3]
    assert errors[20] < 1e-9
    b = 4.0 / 3.0
    assert [b ** (p + 1) * math.exp(b) / math.factorial(p + 1) < 1.0 for p in (2, 3)] == [False, True]
    said = holds("higher_order", "the higher the order, the nearer")
    assert "in the limit, with a bound that says nothing of order 2 at the largest scores of width 16" in said
    assert "beside an opposed key order 2 is farther off than order 0" in said


def test_order_20_is_softmax_to_1e_14() -> None:
    q, k, v = (rows(40, 16, name) for name in "qkv")
    k[:, :, :4], k[:, :, 4:8] = q[:, :, :4], -q[:, :, 4:8]
    scores = scores_of(q, k, 3.0)
    assert 1.3 < np.abs(scores).max() <= 1.4
    out = ra.higher_order.forward(q, k, v, order=20, implementation="dense")[0]
    assert np.abs(out - softmax(scores, v)).max() < 1e-14
    assert "order 20 is the softmax to 1e-14" in holds("higher_order", "the higher the order, the nearer")


@pytest.mark.parametrize(
    ("alpha", "percent", "uniform"), [(1.0, 33.0, 75.0), (2.0, 5.9, 42.0), (3.0, 2.0, 30.0), (5.0, 0.5, 21.0)]
)
def test_order_2_on_random_data(alpha: float, percent: float, uniform: float) -> None:
    """Relative error of the output against softmax of the same scores, 512 tokens of width 64; and that of the mean."""
    q, k, v = (philox.normal((1, 8, 512, 64), seed=4, purpose=f"random.{n}") for n in "qkv")
    exact = softmax(scores_of(q, k, alpha), v)
    found = ra.higher_order.forward(q, k, v, alpha=alpha)[0]
    mean = np.mean(v, axis=2, keepdims=True)
    assert 100.0 * np.linalg.norm(found - exact) / np.linalg.norm(exact) == pytest.approx(percent, rel=0.12)
    assert 100.0 * np.linalg.norm(mean - exact) / np.linalg.norm(exact) == pytest.approx(uniform, rel=0.12)
    said = {3.0: f"by {percent:.0f} % on random data at alpha = 3,", 1.0: f", by {percent:.0f} % at 1"}
    assert said.get(alpha, "") in holds("higher_order", "keep scores small enough")


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
    q = rows(50, d) * 10.0 ** philox.normal((1, 1, 50, 1), seed=1, purpose="size") + 3.0
    k = np.concatenate([q, -q], axis=2)
    scores = scores_of(q, k, 3.0)
    assert np.abs(scores).max() <= largest + 1e-12
    assert scores.max() > 0.99 * largest and scores.min() < -0.99 * largest


def test_without_layer_normalisation_large_scores_are_no_softmax() -> None:
    """The error grows with the square of the size of the inputs: scores leave the range of the polynomial."""
    q, k, v = (rows(64, 16, name) for name in "qkv")
    expected = {0.5: 4e-4, 1.0: 2.9e-2, 2.0: 1.3, 4.0: 2.8}
    for size, error in expected.items():
        with ra.trace() as t:
            out = ra.higher_order.forward(size * q, size * k, v, layer_norm=False, alpha=3.0)[0]
        assert np.abs(out - softmax(t["HOL.3"], v)).max() == pytest.approx(error, rel=0.3)


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
    _, saved = ra.higher_order.forward(q, k, k, order=order, alpha=0.3, implementation="dense")
    assert saved.normaliser.min() >= 50 * least
    page = Path(__file__).parents[3] / "docs" / "mechanisms" / "higher_order.md"
    assert "Weights should be positive, so that the output is a mean of values. An even order guarantees it." in (
        page.read_text(encoding="utf-8")
    )
    said = "without delta: of even orders always, of odd ones up to a width that order and alpha decide"
    assert holds("higher_order", "weights are positive") == said
    _, less = ra.higher_order.forward(q, k[:, :, :1], k[:, :, :1], normaliser="exact(delta=1.0)")
    assert less.normaliser.min() < 0.0


@pytest.mark.parametrize(("order", "widest"), [(1, 8), (3, 22), (5, 42), (7, 68)])
def test_odd_orders_are_positive_up_to_a_width(order: int, widest: int) -> None:
    """With alpha = 3 and layer normalisation s >= -sqrt(d) / 3; twice alpha, four times the width."""
    assert taylor(np.asarray(-math.sqrt(widest) / 3.0), order) > 0.0
    assert taylor(np.asarray(-math.sqrt(widest + 1) / 3.0), order) <= 0.0
    assert taylor(np.asarray(-math.sqrt(4 * widest) / 6.0), order) > 0.0


@pytest.mark.parametrize(("n", "percent"), [(4, 43.0), (16, 26.0), (64, 9.0), (256, 0.3)])
def test_how_often_sums_are_negative_with_delta_1(n: int, percent: float) -> None:
    """About Phi(-sqrt(n) / (2 alpha)): why a causal delta = 1 has to be asked for with its policy."""
    q, k = (philox.normal((1, 40, m, 64), seed=6, purpose=f"sign.{n}.{name}") for name, m in (("q", 100), ("k", n)))
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


@pytest.mark.parametrize(("n", "d", "alpha"), [(1, 1, 1.0), (7, 2, 3.0), (40, 5, 0.5)])
def test_the_state_of_the_definition_gives_what_all_pairs_give(n: int, d: int, alpha: float) -> None:
    normal = np.random.default_rng([n, d]).standard_normal
    q, k, v = normal((2, 3, 4, d)), normal((2, 3, n, d)), normal((2, 3, n, 6))
    out, _ = definition.forward(q, k, v, alpha=alpha, eps=0.1)
    np.testing.assert_allclose(definition.from_state(q, k, v, alpha=alpha, eps=0.1), out, rtol=0.0, atol=1e-13)
    s = (q[..., :1, :] @ np.matrix_transpose(k)) / 1.7
    products = definition.phi(q[..., :1, :], 1.7) @ np.matrix_transpose(definition.phi(k, 1.7))
    np.testing.assert_allclose(products, 1.0 + s + s**2 / 2.0, rtol=1e-13)
