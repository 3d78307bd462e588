"""Attention by feature maps in PyTorch agrees, or is seen not to: torch_taylor.py, torch_symmetric_taylor.py."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import refattn as ra
from refattn.verify.run import verify_case

torch = pytest.importorskip("torch", reason="torch is not installed: pip install refattn[torch]")
RECORD = ra.mechanism("higher_order")
EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"adapter_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def adapter() -> ModuleType:
    return loaded("torch_taylor")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", RECORD.cases, ids=lambda case: case.name)
def test_it_agrees_or_declines(case: Any, dtype: str, adapter: ModuleType) -> None:
    found = verify_case(RECORD, adapter.attend, case, dtype, grad=True)
    known = set(case.options) <= {"alpha", "causal"} and "mask" not in case.inputs
    assert found.status == ("agrees" if known else "declined"), found
    if found.status == "agrees":
        assert {verdict.tensor for verdict in found.verdicts} == {"out", "d_q", "d_k", "d_v"}


@pytest.fixture
def symmetric() -> ModuleType:
    return loaded("torch_symmetric_taylor")


@pytest.mark.parametrize("order", [3, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2, 4, 5, 6, 7))])
def test_symmetric_features_agree_up_to_order_8(order: int, symmetric: ModuleType) -> None:
    case = replace(RECORD.case("order-8"), options={"order": order, "alpha": 2.0, "causal": True})
    for dtype in ("float64", "float32"):
        found = verify_case(RECORD, symmetric.attend, case, dtype, grad=True)
        assert found.status == "agrees", found
    x = torch.ones((1, 1, 1, 4))
    assert symmetric.features(x, order).shape[-1] == math.comb(4 + order, order)
