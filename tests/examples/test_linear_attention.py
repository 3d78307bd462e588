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


@pytest.mark.parametrize(
    ("right", "wrong", "case"),
    [
        ("s * gate(log_decay, i).exp()", "s / gate(log_decay, i).exp()", "gated-head"),
        ("x[:, :, i, :, None]", "x[:, :, i, None, :].mean(-1, keepdim=True)", "kda"),
        ("error - (decayed * key).sum(-2, keepdim=True)", "error - (s * key).sum(-2, keepdim=True)", "gated-delta"),
        ("(error if step is None else gate(step, i) * error)", "error", "step-two"),
        ("m * gate(log_momentum, i).exp()", "m", "momentum"),
        ("decayed + gate(beta, i) * faster", "decayed + gate(beta, i) * (faster - m)", "momentum"),
        (", new, s)", ", new, decayed)", "mask-some"),
        (", faster, m)", ", faster, 0.0 * m)", "mask-momentum"),
        ("s.repeat_interleave(heads // g, 1)", "s.repeat(1, heads // g, 1, 1)", "grouped-queries"),
        ("k.repeat_interleave(g // k.shape[1], 1)", "k.repeat(1, g // k.shape[1], 1, 1)", "grouped-values"),
        ("+ norm_eps).sqrt()", ").sqrt() + norm_eps", "norm-small"),
        ("d**-0.5", "e**-0.5", "plain"),
    ],
)
def test_a_wrong_line_of_plain_pytorch_is_seen(right: str, wrong: str, case: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    source = DELTA.read_text()
    assert source.count(right) == 1
    (tmp_path / "wrong.py").write_text(source.replace(right, wrong))
    record = ra.mechanism("delta")
    chosen = record.case("gated-delta" if case == "plain" else case)
    found = verify_case(record, load(f"{tmp_path}/wrong.py:attend"), chosen, "float32", grad=True)
    assert found.status == "disagrees", found
