"""Packed monomials: how many there are, that their inner product is a power, and that the adjoint is the adjoint."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refattn as ra
from refattn import philox
from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.mechanisms.higher_order.implementations.monomials import count, monomials, pieces
from refattn.mechanisms.higher_order.options import Options
from tests.rows import holds

widths, degrees = st.integers(1, 9) | st.just(24), st.integers(0, 5)


def draw(name: str, *shape: int) -> Any:
    return philox.normal(shape, seed=3, purpose=name)


def whole(x: Any, lowest: int, degree: int, *, divided: bool) -> Any:
    """All monomials in one array, once it is seen that the pieces are where they shall be."""
    found = list(monomials(x, lowest, degree, divided=divided))
    together, places = np.concatenate(found, axis=-2), list(pieces(x.shape[-2], lowest, degree))
    assert len(found) == len(places)
    for piece, at in zip(found, places, strict=True):
        np.testing.assert_array_equal(piece, together[..., at, :])
    return together


@settings(max_examples=80)
@given(widths, degrees, st.booleans())
def test_each_monomial_stands_once(width: int, degree: int, all_degrees: bool) -> None:
    x = np.exp(draw("x", width, 1))
    lowest = 0 if all_degrees else degree
    found = whole(x, lowest, degree, divided=False)[:, 0]
    expected = [
        math.prod(float(x[a, 0]) for a in chosen)
        for r in range(lowest, degree + 1)
        for chosen in combinations_with_replacement(range(width), r)
    ]
    assert len(found) == len(expected) == count(width, lowest, degree)
    np.testing.assert_allclose(found, expected, rtol=1e-13)


@settings(max_examples=80)
@given(widths, degrees, st.booleans())
def test_inner_products_are_powers(width: int, degree: int, all_degrees: bool) -> None:
    x, y = draw("x", 2, width, 5), draw("y", 2, width, 5)
    lowest = 0 if all_degrees else degree
    phi, psi = whole(x, lowest, degree, divided=False), whole(y, lowest, degree, divided=True)
    found = np.sum(phi * psi, axis=-2, dtype=np.longdouble)  # of up to a hundred thousand terms
    s = np.sum(x * y, axis=-2)
    size = sum(np.sum(np.abs(x * y), axis=-2) ** r / math.factorial(r) for r in range(lowest, degree + 1))
    expected = sum(s**r / math.factorial(r) for r in range(lowest, degree + 1))
    assert np.all(np.abs(found - expected) <= 1e-14 * size)


@pytest.mark.parametrize(("width", "square", "general"), [(16, 136, 153), (64, 2080, 2145)])
def test_counts_of_order_2(width: int, square: int, general: int) -> None:
    """d (d + 1) / 2 with layer normalisation, C(d + 2, 2) without."""

    def features(layer_norm: bool) -> int:
        return Kernel(Options(layer_norm=layer_norm), width).features

    assert (features(True), features(False)) == (square, general)
    assert square == width * (width + 1) // 2
    assert "d (d + 1) / 2 are enough for orders 0 to 2" in holds(
        "higher_order", "features of order 2 are 1 + d + d^2 products"
    )


@pytest.mark.parametrize(("width", "order", "needs"), [(16, 3, 969), (16, 4, 4845), (8, 3, 165)])
def test_counts_of_other_orders(width: int, order: int, needs: int) -> None:
    """Of all powers up to the order; one power needs C(d + p - 1, p)."""
    assert count(width, 0, order) == math.comb(width + order, order) == needs
    assert count(width, order, order) == math.comb(width + order - 1, order)
    said = "C(d + p - 1, p) of them suffice, where the paper has d^p, and C(d + p, p) for all powers up to p"
    assert said in holds("higher_order", "the product of queries and keys, to any power")


def test_squares_of_elements_are_not_the_square() -> None:
    """What implementations have mistaken for the features of order 2."""
    x, y = draw("x", 6), draw("y", 6)
    assert abs(np.sum(x**2 * y**2) - np.sum(x * y) ** 2) > 0.1
    np.testing.assert_allclose(np.sum(np.outer(x, x) * np.outer(y, y)), np.sum(x * y) ** 2)
    q, k, v = (draw(name, 1, 1, 5, 6) for name in ("q", "k", "v"))
    found, _ = ra.higher_order.forward(q, k, v, layer_norm=False, alpha=1.0, implementation="linear")
    s = q @ np.swapaxes(k, 2, 3) / np.sqrt(6.0)
    weights, squares = 1.0 + s + s * s / 2.0, 1.0 + s + q * q @ np.swapaxes(k * k, 2, 3) / 12.0
    right, mistaken = (w @ v / w.sum(-1, keepdims=True) for w in (weights, squares))
    np.testing.assert_allclose(found, right, rtol=1e-11, atol=1e-12)
    assert np.abs(found - mistaken).max() > 0.01
