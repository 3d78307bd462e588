"""Claims of sources that no other test of the room holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import philox
from refattn.instruments.counting import counting
from refattn.ops.rotary import angles, rotary_forward


def test_the_scale_keeps_scores_at_variance_1() -> None:
    """Vaswani et al. 2017, section 3.2.1: products of independent numbers of variance 1 have variance d."""
    for width in (4, 64):
        q, k = (philox.normal((1, 1, 300, width), seed=2, purpose=name) for name in "qk")
        with ra.trace() as trace:
            ra.softmax.forward(q, k, k, implementation="dense")
        assert np.var(trace["SM.1"]) == pytest.approx(1.0, abs=0.1)
        assert np.var(q @ np.swapaxes(k, 2, 3)) == pytest.approx(width, rel=0.1)


def test_rotated_queries_and_keys_see_distances_alone() -> None:
    q, k, v = (philox.normal((1, 2, 5, 4), seed=3, purpose=name) for name in "qkv")

    def attended(first: int) -> Any:
        at = angles(np.arange(first, first + 5), 4, q)
        return ra.softmax.forward(rotary_forward(q, *at), rotary_forward(k, *at), v)[0]

    np.testing.assert_allclose(attended(11), attended(0), rtol=0.0, atol=1e-13)
    assert np.max(np.abs(attended(0) - ra.softmax.forward(q, k, v)[0])) > 0.01


def test_several_heads_cost_what_one_of_the_whole_width_does() -> None:
    """Vaswani et al. 2017, section 3.2.2: the matrix products of attention do not depend on the number of heads."""
    products = set()
    for heads in (1, 2, 8):
        with counting() as count:
            x = count.array(np.ones((1, heads, 12, 16 // heads)))
            tally = count.start()
            ra.softmax.forward(x, x, x, implementation="dense")
        products.add(tally.products)
    assert len(products) == 1 and products.pop() == 4 * 12 * 12 * 16
