"""LinearAttention of ONNX, as its reference evaluates it, and a loop of plain PyTorch agree where they have what is
asked for; wrong loops do not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import refattn as ra
from refattn.verify import load, verify_case

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


DELTA = Path(__file__).parents[2] / "examples" / "torch_delta.py"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_plain_pytorch_agrees(dtype: str) -> None:
    """Every case, outputs and gradients, but for packed sequences; autograd has none where no token reads an input."""
    pytest.importorskip("torch", reason="torch is not installed")
    record, attend = ra.mechanism("delta"), load(str(DELTA) + ":attend")
    for case in record.cases:
        found = verify_case(record, attend, case, dtype, grad=True)
        declines = case.kind == "packed" or case.name == "no-token"
        assert found.status == ("declined" if declines else "agrees"), found
