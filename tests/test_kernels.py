"""Kernels side by side: the formula is judged as it is, and the page has a row for it."""

from __future__ import annotations

import refattn as ra
from tools.kernels import in_turn, measured, page


def test_the_formula_overflows_and_has_no_empty_rows() -> None:
    record = ra.mechanism("softmax")
    names = ("plain", "causal-tail", "mask-full", "empty-rows", "huge-scores", "sink", "peaked")
    cases = [record.case(name) for name in names]
    assert [case.name for case in in_turn(cases)] == [*names]
    (row,) = measured(cases, [("NumPy, the formula", "float32")], 100.0)
    text = page([row], cases, 100.0)
    assert "| kernel | type | plain | causal | masked | empty-row | extreme | all |" in text
    assert "| NumPy, the formula | float32 | 2 | 1 | 1 | **0 of 1** | **0 of 1** | **4 of 6** |" in text
    assert "- NumPy, the formula (float32): empty-rows, huge-scores" in text
    assert measured(cases, [("NumPy, the formula", "float32")], 0.0) == []  # no time, no row
