"""What is left of the combinations of a test's parameters still holds every pair of values."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import _beyond_pairs, _mark_other_parts
from tests.thinned import thinned


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


def test_every_variant_is_there_and_a_third_runs_always() -> None:
    found = thinned([*range(10), (10, 11)], 3)
    assert [each.values for each in found] == [*((n,) for n in range(10)), (10, 11)]
    assert [bool(each.marks) for each in found] == [bool(n % 3) for n in range(11)]


class Marked:
    """A test with markers."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.names else None

    def add_marker(self, marker: Any) -> None:
        self.names.add(marker.name)


def test_each_slow_test_is_of_one_part_and_others_of_all() -> None:
    names = [("slow",), (), ("slow", "skip"), ("slow",), ("slow",), ("slow",)]
    left = []
    for part in range(3):
        items: list[Any] = [Marked(*own) for own in names]
        _mark_other_parts(items, f"{part}/3")
        left.append({number for number, item in enumerate(items) if "skip" not in item.names})
    assert left == [{0, 1, 5}, {1, 3}, {1, 4}]
