"""Products on the workers: they are those of the library, for every order of the axes, and never depend on workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import backends
from refattn.backends import pool
from refattn.xp import product

CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "a small one": ((3, 4), (4, 5)),
    "one piece": ((100, 80), (80, 70)),
    "pieces of rows": ((1100, 130), (130, 129)),
    "two pieces of few rows": ((301, 400), (400, 300)),
    "tokens of a batch": ((3, 500, 120), (120, 130)),
    "several matrices to a piece": ((5, 90, 110), (5, 110, 100)),
    "large matrices": ((1, 2, 300, 300), (1, 2, 300, 280)),
    "one matrix for all": ((2, 90, 110), (1, 110, 100)),
    "a row": ((1, 4000), (4000, 5000)),
    "nothing": ((0, 4), (4, 5)),
}


def arrays(name: str) -> tuple[Any, Any]:
    draw = np.random.default_rng(5)  # of many numbers quicker than those of refattn
    first, second = CALLS[name]
    return draw.normal(size=first), draw.normal(size=second)


@pytest.mark.parametrize("name", CALLS)
def test_it_is_the_product_for_any_number_of_workers(name: str) -> None:
    a, b = arrays(name)
    found = []
    for number in (1, 2, 3):
        with backends.use_workers(number):
            found.append(product(a, b))
    np.testing.assert_allclose(found[0], a @ b, rtol=1e-12, atol=1e-12)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_arrays_may_lie_in_any_order() -> None:
    a, b = arrays("pieces of rows")
    expected = a @ b
    for given in (a, np.asfortranarray(a), np.repeat(a, 2, axis=1)[:, ::2]):
        np.testing.assert_allclose(product(given, np.asfortranarray(b)), expected, rtol=1e-12, atol=1e-12)
    left, right = np.moveaxis(np.stack([a, a]), 0, 1), np.stack([b, b])
    np.testing.assert_allclose(product(np.moveaxis(left, 1, 0), right)[1], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (2, 4, 0)])
def test_products_may_be_empty(shape: tuple[int, ...]) -> None:
    a, b = np.ones(shape), np.ones((shape[-1], 5))
    for found in (product(a, b), *pool.run(lambda _: product(a, b), (None,))):
        np.testing.assert_array_equal(found, a @ b)


def test_every_library_has_it(backend: Any) -> None:
    a, b = arrays("one piece")
    found = backend.host(product(backend.array(a), backend.array(b)))
    np.testing.assert_allclose(found, a @ b, rtol=1e-12, atol=1e-12)
