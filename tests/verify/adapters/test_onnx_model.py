"""ONNX models as kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from refattn.cli import cli

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def model(file: Path, inputs: dict[str, Any], out: str = "Y", rank: int = 4, **attributes: Any) -> Path:
    """Write a model of one Attention node; inputs are shapes by name, those of floats but for "mask"."""
    helper, kinds = onnx.helper, onnx.TensorProto
    given = [
        helper.make_tensor_value_info(name, kinds.BOOL if "mask" in name else kinds.FLOAT, shape)
        for name, shape in inputs.items()
    ]
    node = helper.make_node("Attention", [*inputs], [out], **attributes)
    graph = helper.make_graph(
        [node], "attention", given, [helper.make_tensor_value_info(out, kinds.FLOAT, [None] * rank)]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(made, file)
    return file


def verify(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["verify", "softmax", "--impl", str(file), *arguments])


OPEN = [None] * 4


def test_a_model_is_run(tmp_path: Path) -> None:
    file = model(tmp_path / "attn.onnx", {"query": OPEN, "key": OPEN, "value": OPEN, "attn_mask": OPEN})
    result = verify(file, "--case", "plain,mask-full,causal")
    assert result.exit_code == 0 and "2 cases run" in result.stdout, result.output
    assert "out         2" in result.stdout and "float64" not in result.stdout
    file = model(tmp_path / "wrong.onnx", {"q": OPEN, "k": OPEN, "v": OPEN}, scale=1.0)
    result = verify(file, "--shape", "h=2,n=9,d=8")
    assert result.exit_code == 3 and "it always has scale=1.0" in result.stdout
    assert verify(file, "--shape", "h=2,n=9,d=8,scale=1.0").exit_code == 0
    result = verify(file, "--shape", "h=2,n=9,d=8,scale=1.0", "--dtype", "float16")
    assert result.exit_code == 3 and "its q is float32" in result.stdout


def test_what_a_model_has_no_choice_of_is_in_every_case(tmp_path: Path) -> None:
    file = model(tmp_path / "attn.onnx", {"q": OPEN, "k": OPEN, "v": OPEN}, is_causal=1, softcap=5.0)
    result = verify(file, "--case", "plain,causal,unequal,one-query,grouped")
    assert result.exit_code == 0 and "0 declined" in result.stdout, result.output


def test_sizes_and_heads_of_a_model(tmp_path: Path) -> None:
    shapes = {"q": [2, 5, 32], "k": [2, 9, 16], "v": [2, 9, 16]}
    file = model(tmp_path / "attn.onnx", shapes, rank=3, q_num_heads=4, kv_num_heads=2)
    result = verify(file, "--case", "plain,unequal")
    assert result.exit_code == 0 and "0 failed" in result.stdout, result.output
    assert verify(file, "--shape", "b=2,h=4,g=2,nq=5,nk=9,d=8").exit_code == 0


def test_names_of_a_model(tmp_path: Path) -> None:
    file = model(tmp_path / "attn.onnx", {"a": OPEN, "k": OPEN, "v": OPEN})
    result = verify(file, "--shape", "n=9,d=8")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "--rename a=NAME" in result.stderr
    assert verify(file, "--shape", "n=9,d=8", "--rename", "a=q").exit_code == 0
    result = verify(file, "--shape", "n=9,d=8", "--rename", "a=q,b=k")
    assert result.exit_code == 2 and "got 'b'" in result.stderr
    for damaged in (b"", b"none", file.read_bytes()[:40]):
        (tmp_path / "none.onnx").write_bytes(damaged)
        result = verify(tmp_path / "none.onnx", "--shape", "n=9,d=8")
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "there is no file" in verify(tmp_path / "absent.onnx").stderr
