"""What the paper says and its code computes, where this project does something else: see docs/deviations.md."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.instruments.counting import counting
from refattn.mechanisms.higher_order.dense import taylor
from refattn.mechanisms.higher_order.testing.wrong import READINGS
from tests.rows import holds


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=21, purpose=f"deviations.{name}")


def arrays(n: int = 24, d: int = 8) -> tuple[Any, Any, Any]:
    return draw("q", 1, 2, n, d), draw("k", 1, 2, n, d), draw("v", 1, 2, n, d)


def written_out(q: Any, k: Any, v: Any) -> Any:
    """Attention of order 2 with alpha = 3, of the formulas alone."""
    q, k = ((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) for x in (q, k))
    s = q @ np.swapaxes(k, 2, 3) / (3.0 * math.sqrt(q.shape[-1]))
    weights = 1.0 + s + s * s / 2.0
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def softmax_of_the_scores(q: Any, k: Any, v: Any) -> Any:
    with ra.trace() as t:
        ra.higher_order.forward(q, k, v)
    weights = np.exp(t["HOL.3"])
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def test_equation_3_is_the_square_alone() -> None:
    """It expands (q . k)^2, which is right; taken for the term of order 2, without its 1/2, it leads far off."""
    q, k, v = arrays()
    products = np.einsum("bhim,bhil,bhjm,bhjl->bhij", q, q, k, k)
    np.testing.assert_allclose(products, (q @ np.swapaxes(k, 2, 3)) ** 2, rtol=1e-9)
    exact = softmax_of_the_scores(q, k, v)
    ours = np.abs(ra.higher_order.forward(q, k, v)[0] - exact).max()
    printed = np.abs(READINGS["factorials left out"](q, k, v)[0] - exact).max()
    assert printed > 4.0 * ours


def test_the_normaliser_is_the_sum_of_the_same_weights() -> None:
    """The paper's formula divides by a sum of exponentials: then equal values would not come out."""
    q, k, _ = arrays()
    ones = np.ones((1, 2, 24, 1))
    np.testing.assert_allclose(ra.higher_order.forward(q, k, ones)[0], 1.0, rtol=1e-14)
    assert np.abs(READINGS["a sum of exponentials divides"](q, k, ones)[0] - 1.0).max() > 1e-3


def test_orders_err_to_one_side_for_negative_scores_alone() -> None:
    """Even orders are too large and odd ones too small for s < 0, as the paper says; for s > 0 all are too small."""
    s = np.linspace(0.1, 3.0, 30)
    for order in range(1, 7):
        assert np.all(taylor(s, order) < np.exp(s))
        assert np.all((taylor(-s, order) > np.exp(-s)) == (order % 2 == 0))


def test_opposite_keys_weigh_much_less_than_aligned_ones() -> None:
    """ "About the same" holds for large scores alone: T_2(-s) / T_2(s) falls to 0.172 at s = sqrt(2).

    8 / 3 is the largest score of width 64 with alpha = 3.
    """
    s = np.linspace(0.0, math.sqrt(64) / 3.0, 100_001)
    ratio = taylor(-s, 2) / taylor(s, 2)
    assert abs(ratio.min() - 0.172) < 1e-3 and abs(s[ratio.argmin()] - math.sqrt(2.0)) < 1e-3
    assert abs(ratio[-1] - 0.26) < 5e-3
    exact = [f"{math.exp(-2.0 * math.sqrt(2.0)):.2f}", f"{math.exp(-2.0 * s[-1]):.3f}"]
    wanted = (
        f"their ratio is {ratio.min():.2f} at a score of -{s[ratio.argmin()]:.1f}, where the exponential's is "
        f"{exact[0]}, and {ratio[-1]:.2f} at the largest of width 64 with alpha = 3, where that is {exact[1]}"
    )
    assert wanted in holds("higher_order", "opposite keys act about the same")
    page = (Path(__file__).resolve().parents[3] / "docs" / "deviations.md").read_text(encoding="utf-8")
    assert (
        f"is {ratio.min():.2f} at s = {s[ratio.argmin()]:.1f}, where the exponential's ratio is {exact[0]}, and "
        f"{ratio[-1]:.2f} at the largest score of width 64 with alpha = 3, where that is {exact[1]}"
    ) in page


def test_features_pay_from_d_squared_half_tokens_on() -> None:
    """The paper compares n d_v d^2 with n^2 d_v d, which are equal at n = d.

    In multiplications pairs cost n^2 (d + d_v), and features, folded in and read, 2 n d_v d (d + 1) / 2: they are equal
    at n = d_v d (d + 1) / (d + d_v), for d_v = d at d (d + 1) / 2; a causal call has half of the pairs. A CPU adds what
    it takes to make the features.
    """
    d, half = 64, 64 * 65 // 2
    for causal, least, most in ((False, half, 1.3 * half), (True, 2 * half, 2.6 * half)):
        below, above = (np.zeros((1, 1, int(n), d), "float32") for n in (least, most))
        assert ra.higher_order.forward(below, below, below, causal=causal)[1].implementation == "tiled"
        features = ra.higher_order.forward(above, above, above, causal=causal)[1].implementation
        assert features == ("chunked" if causal else "linear")
    for n, values in ((d, d), (half, d), (2 * half, d), (half, d // 4)):
        products = []
        for implementation in ("dense", "linear"):
            with counting() as count:
                x, v = (count.array(np.ones((1, 1, n, width), "float32")) for width in (d, values))
                tally = count.start()
                ra.higher_order.forward(x, x, v, implementation=implementation)
            products.append(tally.products)
        equal = values * d * (d + 1) / (d + values)
        assert products[0] / products[1] == pytest.approx(n / equal, rel=1.0 / values)  # features sum a 1, too
    said = "d_v d (d + 1) / (d + d_v) tokens on, d (d + 1) / 2 where d_v = d; twice that for causal attention"
    assert f"of order 2 from about {said}" == holds("higher_order", "features pay where n d_v d^2 < n^2 d_v d, from d")


def contracted_over_queries(q: Any, k: Any, v: Any, normaliser: str) -> Any:
    """Order 2 as the author's code sums it: over the queries, with the position of the key left over."""
    out, saved = ra.higher_order.forward(q, k, v, normaliser=normaliser, implementation="dense")
    with ra.trace() as t:
        ra.higher_order.forward(q, k, v, normaliser=normaliser)
    scores, total = t["HOL.3"], saved.normaliser[..., None]
    second = 0.5 * (scores * scores) @ v
    wrong = 0.5 * np.swapaxes(np.sum(scores * scores, axis=-2, keepdims=True), -1, -2) * v
    return out + (wrong - second) / total


def test_the_second_order_of_the_authors_code_is_no_attention() -> None:
    """Keys in another order change its result; ours they leave alone, to the last digits."""
    q, k, v = arrays()
    order = philox.permutation(24, seed=0, purpose="order")
    for normaliser in ("exact", "exact(delta=1)"):
        ours, theirs = (
            [f(q, keys, values, normaliser=normaliser) for keys, values in ((k, v), (k[:, :, order], v[:, :, order]))]
            for f in (lambda *x, **o: ra.higher_order.forward(*x, **o)[0], contracted_over_queries)
        )
        assert np.abs(ours[0] - ours[1]).max() < 1e-12 * max(1.0, np.abs(ours[0]).max())
        assert np.abs(theirs[0] - theirs[1]).max() > 0.1
    np.testing.assert_allclose(ra.higher_order.forward(q, k, v)[0], written_out(q, k, v), rtol=1e-12, atol=1e-13)
    expected = READINGS["order 2 summed over queries"](q, k, v)[0]
    np.testing.assert_allclose(contracted_over_queries(q, k, v, "exact"), expected, rtol=1e-12, atol=1e-12)


def test_the_authors_sums_change_sign() -> None:
    """1 is always subtracted there, and its eps is never used: about a quarter of the sums is negative."""
    q, k, v = (draw(name, 1, 40, 24, 8) for name in "qkv")
    _, saved = ra.higher_order.forward(q, k, v, normaliser="exact(delta=1.0)")
    assert 0.15 < float(np.mean(saved.normaliser < 0.0)) < 0.35
    exact, plain = ra.higher_order.forward(q, k, v, normaliser="exact(delta=1.0)")
    moved, _ = ra.higher_order.forward(q, k, v, normaliser="signed(delta=1.0, eps=0.5)")  # ours is used
    z = plain.normaliser[..., None]
    np.testing.assert_allclose(moved, exact * z / np.copysign(np.maximum(np.abs(z), 0.5), z), rtol=1e-9, atol=1e-9)
    assert np.any(np.abs(z) < 0.5)
    _, saved = ra.higher_order.forward(q, k, v)
    assert saved.normaliser.min() >= 12.0


def test_a_mask_on_the_keys_alone_is_enough_with_delta_1_only() -> None:
    """There a zeroed key weighs T(0) - 1 = 0; with delta = 0 it would weigh 1."""
    q, k, v = arrays()
    mask = philox.uniform((1, 24), seed=1, purpose="mask") < 0.7
    for normaliser, same in (("exact(delta=1)", True), ("exact", False)):
        right = ra.higher_order.forward(q, k, v, key_mask=mask, normaliser=normaliser)[0]
        seen = [x[:, :, mask[0]] for x in (k, v)]
        np.testing.assert_allclose(right, ra.higher_order.forward(q, *seen, normaliser=normaliser)[0], rtol=1e-9)
        zeroed = READINGS["padding by zeroed keys"](q, k, v, key_mask=mask, normaliser=normaliser)[0]
        assert (np.abs(right - zeroed).max() < 1e-10 * np.abs(right).max()) == same


def test_queries_and_keys_may_be_of_different_number() -> None:
    """Where the contraction over queries keeps the position of the key: it raises, or broadcasts a single one.

    With one query there is a row for each key; with one key as many rows as queries, which share the second order.
    """
    q, k, v = arrays()

    def theirs(queries: int, keys: int) -> tuple[int, ...]:
        """The shape of orders 1 and 2, as the author's code adds them up."""
        some_q, some_k, some_v = q[0, 0, :queries], k[0, 0, :keys], v[0, 0, :keys]
        first = np.einsum("ld,sd,sm->lm", some_q, some_k, some_v)
        second = np.einsum("ld,le,sd,se,sm->sm", some_q, some_q, some_k, some_k, some_v)
        return (first + second).shape

    assert theirs(1, 24) == theirs(24, 1) == (24, 8)
    with pytest.raises(ValueError, match="broadcast"):
        theirs(5, 24)
    for implementation in ("dense", "linear"):
        ours = ra.higher_order.forward(q[:, :, :5], k, v, implementation=implementation)[0]
        np.testing.assert_allclose(ours, written_out(q, k, v)[:, :, :5], rtol=1e-12, atol=1e-13)


def test_decoding_computes_what_training_did() -> None:
    """The author's code has no causal form, and its builder decodes with the features elu(x) + 1 of another paper."""
    q, k, v = arrays()

    def elu(x: Any) -> Any:
        return np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0))) + 1.0

    weights = np.tril(elu(q) @ np.swapaxes(elu(k), 2, 3))
    other = weights @ v / weights.sum(axis=-1, keepdims=True)
    dense, recurrent = (
        ra.higher_order.forward(q, k, v, causal=True, implementation=f)[0] for f in ("dense", "recurrent")
    )
    np.testing.assert_allclose(recurrent, dense, rtol=0.0, atol=1e-13)
    assert np.abs(other - dense).max() > 0.1


def test_layer_normalisation_before_the_scale() -> None:
    """Scaling first, as a docstring of the author's code reads, would do nothing but for the 1e-5 of the variance."""
    q, k, v = arrays()
    factor = 1.0 / (3.0 * math.sqrt(8.0))
    first = ra.higher_order.forward(factor * q, k, v, norm_eps=0.0)[0]
    np.testing.assert_allclose(first, ra.higher_order.forward(q, k, v, norm_eps=0.0)[0], rtol=1e-12, atol=1e-13)
    # After it, where ours stands, it does something.
    np.testing.assert_allclose(ra.higher_order.forward(q, k, v)[0], written_out(q, k, v), rtol=1e-12, atol=1e-13)
