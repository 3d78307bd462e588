"""The factorisation that all queries of a head share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refattn import counter
from refattn.mechanisms.koopman.implementations import whitening


def draw(name: str, *shape: int) -> Any:
    return counter.normal(shape, seed=31, purpose=name)


@pytest.mark.parametrize("size", [1, 5, 16, 17, 40, 100])
def test_the_inverse_of_a_triangular_matrix(size: int) -> None:
    lower = np.tril(draw("lower", 2, size, size)) / np.sqrt(size) + 2.0 * np.eye(size)
    inverse = whitening.triangular_inverse(lower)
    np.testing.assert_allclose(inverse @ lower, np.broadcast_to(np.eye(size), lower.shape), atol=1e-12)
    assert np.all(np.triu(inverse, 1) == 0.0)


@pytest.mark.parametrize("stein", [True, False])
def test_whitening(stein: bool) -> None:
    x = draw("x", 1, 2, 6, 9)
    gram = x @ np.swapaxes(x, -1, -2)
    found = whitening.whiten(gram, stein)
    whitened = found.factor @ gram @ np.swapaxes(found.factor, -1, -2)
    np.testing.assert_allclose(whitened, np.broadcast_to(np.eye(6), gram.shape), atol=1e-12)
    assert (found.gains is None) != stein
