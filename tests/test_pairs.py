"""What is left of the combinations of a test's parameters still holds every pair of values."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import _beyond_pairs


@pytest.mark.parametrize("sizes", [(2, 3, 4), (3, 3, 3, 3), (1, 5, 1)])
def test_every_pair_of_values_is_left(sizes: tuple[int, ...]) -> None:
    names = "abcd"[: len(sizes)]
    values = [[f"{name}{n}" for n in range(size)] for name, size in zip(names, sizes, strict=True)]
    items: list[Any] = [
        SimpleNamespace(callspec=SimpleNamespace(params=dict(zip(names, each, strict=True))))
        for each in itertools.product(*values)
    ]
    beyond = _beyond_pairs(items)
    left = [item for item in items if item not in beyond]

    def pairs(chosen: list[Any]) -> set[Any]:
        return {pair for item in chosen for pair in itertools.combinations(item.callspec.params.values(), 2)}

    assert pairs(left) == pairs(items)
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert len(left) <= 2 * largest * second
