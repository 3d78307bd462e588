"""Implementations of higher-order attention: their schedule, which one is taken, what is refused, and memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import equations
from refattn.mechanisms.higher_order.implementations.schedule import causal_schedule


@settings(max_examples=200)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(-12, 12), st.integers(1, 5))
def test_a_schedule_covers_what_may_be_attended(queries: int, keys: int, offset: int, size: int) -> None:
    plan = causal_schedule(queries, keys, offset, size)
    seen = np.zeros((queries, keys), dtype=int)
    folded: list[int] = [j for a, b in plan.before for j in range(a, b)]
    assert [i for (a, b), _ in plan.chunks for i in range(a, b)] == list(range(queries))
    for (a, b), (c, d) in plan.chunks:
        assert b - a <= size and d - c <= size
        seen[a:b, folded] += 1
        for i in range(a, b):
            for j in range(c, min(c + i - a + 1, d)):
                seen[i, j] += 1
        folded += range(c, d)
    assert folded == list(range(plan.seen))
    np.testing.assert_array_equal(seen, np.tri(queries, keys, offset, dtype=int))


def test_auto_takes_the_quickest() -> None:
    def implementation_of(n: int, m: int, d: int, **options: Any) -> str:
        arrays = (np.zeros((1, 1, rows, d), "float32") for rows in (n, m, m))
        return str(ra.higher_order.forward(*arrays, **options)[1].implementation)

    assert implementation_of(16, 16, 16) == "dense"
    assert implementation_of(200, 200, 16) == implementation_of(200, 200, 16, causal=True) == "tiled"
    assert implementation_of(2048, 2048, 16) == "linear"
    assert implementation_of(2048, 2048, 16, causal=True) == "chunked"
    assert implementation_of(1024, 1024, 64) == implementation_of(1024, 1024, 64, causal=True) == "tiled"
    assert implementation_of(1, 30000, 4, causal=True) == "tiled"
    with equations.trace():
        assert implementation_of(300, 300, 4) == "dense"
    assert implementation_of(0, 9, 4, implementation="tiled") == "dense"


@pytest.mark.parametrize(
    ("implementation", "options", "message"),
    [
        (
            "linear",
            {"causal": True},
            r'implementation: got "linear" with a causal mask, needs "chunked" or "recurrent"',
        ),
        ("chunked", {}, r'implementation: got "chunked" without a causal mask, needs "linear"'),
        ("recurrent", {}, r'implementation: got "recurrent" without a causal mask, needs "linear"'),
        ("fast", {}, r"implementation: got 'fast', needs one of auto, dense, tiled, linear, chunked, recurrent"),
    ],
)
def test_a_form_that_does_not_fit_is_refused(implementation: str, options: dict[str, Any], message: str) -> None:
    x = np.ones((1, 1, 3, 4))
    with pytest.raises(ValueError, match=message):
        ra.higher_order.forward(x, x, x, implementation=implementation, **options)


@pytest.mark.parametrize("implementation", ["tiled", "linear", "chunked"])
def test_memory_is_linear_in_the_length(implementation: str) -> None:
    """No array of size n x n, nor one of all features of all tokens."""

    def peak(n: int) -> float:
        x = np.random.default_rng(0).standard_normal((1, 1, n, 64), dtype="float32")
        tracemalloc.start()
        try:
            out, saved = ra.higher_order.forward(
                x, x, x, implementation=implementation, causal=implementation == "chunked"
            )
            ra.higher_order.backward(saved, out)
            return float(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    small, large = peak(1024), peak(4096)
    assert large < 4.3 * small
    assert large < 4096 * 2080 * 4  # the features of all tokens
    assert large < 4096 * 4096 * 4 / 2
