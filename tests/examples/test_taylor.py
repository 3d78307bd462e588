"""Attention by symmetric feature maps in PyTorch agrees or declines, in every case and of every order up to 8."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import refattn as ra
from refattn.verify.run import verify_case
from tests.examples.test_adapters import load

torch = pytest.importorskip("torch", reason="torch is not installed: pip install refattn[torch]")
RECORD = ra.mechanism("higher_order")


@pytest.fixture(scope="module")
def adapter() -> ModuleType:
    return load("torch_symmetric_taylor")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", RECORD.cases, ids=lambda case: case.name)
def test_it_agrees_or_declines(case: Any, dtype: str, adapter: ModuleType) -> None:
    found = verify_case(RECORD, adapter.attend, case, dtype, grad=True)
    few = math.comb(case.inputs["q"].shape[-1] + case.options.get("order", 2), case.options.get("order", 2))
    known = set(case.options) <= {"order", "alpha", "causal"} and "mask" not in case.inputs and few <= adapter.MOST
    assert found.status == ("agrees" if known else "declined"), found
    if found.status == "agrees":
        assert {verdict.tensor for verdict in found.verdicts} == {"out", "d_q", "d_k", "d_v"}


@pytest.mark.parametrize("order", [3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2, 4, 5, 6, 7))])
def test_symmetric_features_agree_up_to_order_8(order: int, adapter: ModuleType) -> None:
    case = replace(RECORD.case("order-8"), options={"order": order, "alpha": 2.0, "causal": True})
    for dtype in ("float64", "float32"):
        found = verify_case(RECORD, adapter.attend, case, dtype, grad=True)
        assert found.status == "agrees", found
    assert adapter.features(torch.ones((1, 1, 1, 4)), order).shape[-1] == math.comb(4 + order, order)
