"""ONNX's own cases of attention and rotary positions: all agree, and wrong readings of an option would not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import refattn as ra
from tests.examples.test_adapters import load


@pytest.fixture(scope="module")
def own() -> Any:
    return load("onnx_cases", "onnx")


def test_all_agree(own: Any) -> None:
    found = [(case.operator, case.name, own.agrees(case)) for case in own.cases()]
    assert [name for _, name, agrees in found if not agrees] == []
    if own.onnx.__version__.startswith("1.23."):
        assert Counter(operator for operator, *_ in found) == {
            "Attention": 93,
            "FlexAttention": 11,
            "RotaryEmbedding": 8,
        }


@pytest.mark.parametrize(
    ("option", "change", "noticing"),
    [
        ("window", lambda x: tuple(None if n is None else n + 1 for n in x), 9),
        ("bias", lambda x: None, 40),
        ("k_lengths", lambda x: None, 11),
        ("offset", lambda x: x + 1, 20),
    ],
    ids=["window one wider", "bias ignored", "lengths ignored", "offset one too far"],
)
def test_wrong_readings_do_not(
    own: Any, monkeypatch: pytest.MonkeyPatch, option: str, change: Any, noticing: int
) -> None:
    """Of 10 cases with a window, 45 with a bias, 13 with lengths and 80 with an offset (0 mostly, not causal)."""
    right = ra.softmax.forward

    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return right(q, k, v, **{**options, **({option: change(options[option])} if option in options else {})})

    cases = own.cases()
    monkeypatch.setattr(ra.softmax, "forward", wrong)
    assert sum(not own.agrees(case) for case in cases if case.operator != "RotaryEmbedding") >= noticing
