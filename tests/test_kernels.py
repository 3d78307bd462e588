"""Kernels side by side: the formula is judged as it is, and the page has a row for it."""

from __future__ import annotations

from dataclasses import replace

import refattn as ra
from tools.kernels import measured, page


def test_the_formula_overflows_and_has_no_empty_rows() -> None:
    record = ra.mechanism("softmax")
    names = ("plain", "causal-tail", "mask-full", "empty-rows", "huge-scores", "sink")
    few = replace(record, cases=tuple(record.case(name) for name in names), kernel_sizes=())
    (row,) = measured(few, ("float32",), "NumPy")
    assert row.classes["plain"] == (1, 1) and row.classes["causal"] == (1, 1) and row.classes["masked"] == (1, 1)
    assert row.classes["empty-row"] == (0, 1) and row.classes["extreme"] == (0, 1) and row.classes["sink"] == (0, 0)
    text = page([row])
    assert "| NumPy, the formula | float32 | 1 | 1 | 1 | **0 of 1** | **0 of 1** | **3 of 5** |" in text
    assert "sink" not in text.partition("| --- |")[0].partition("| kernel |")[2]
