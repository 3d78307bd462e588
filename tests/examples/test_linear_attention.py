"""ONNX's LinearAttention, as its reference evaluates it, agrees where it has what is asked for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import refattn as ra
from refattn.verify import verify_case

CASES = (
    "linear",
    "gated-head",
    "gated-channel",
    "delta",
    "gated-delta",
    "kda",
    "state-kda",
    "grouped-queries",
    "scale",
)


def test_onnx_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install refattn[onnx]")
    if onnx.defs.onnx_opset_version() < 27:
        pytest.skip("this onnx has no LinearAttention")
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "examples"), *sys.path])
    attend = importlib.import_module("onnx_linear_attention").attend
    record = ra.mechanism("delta")
    for name in CASES:
        found = verify_case(record, attend, record.case(name), "float32")
        assert found.status == "agrees", (name, found)
    for name in ("momentum", "norm", "mask-some", "grouped-values"):
        assert verify_case(record, attend, record.case(name), "float32").status == "declined"
