"""`refattn trace`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import refattn as ra
from tests.cli.command import facts, refused, run


def test_trace_shows_every_equation(tmp_path: Path) -> None:
    result = run("trace", "softmax", "--json", tmp_path / "trace.json")
    assert result.exit_code == 0 and result.stdout.startswith(
        "Softmax attention: the definition, case tiny, float64 on numpy"
    )
    data = facts((tmp_path / "trace.json").read_text())
    assert [one["id"] for one in data["forward"]][:2] == ["SM.1", "SM.2"]
    for one in (*data["forward"], *data["backward"]):
        assert f"\n{one['id']}  {re.sub(' {2,}', '   ', one['formula'])}\n" in result.stdout
        assert f"    {one['file']}:{one['line']}: {one['variable']} = " in result.stdout
    piped = run("trace", "softmax", "--json", "-")
    assert facts(piped.stdout) == data and piped.stderr == result.stdout


def test_trace_of_one_equation() -> None:
    result = run("trace", "graph_energy", "--only", "GE.6", "--only", "dGE.q")
    assert result.exit_code == 0
    assert re.findall(r"^(\S+)  ", result.stdout, re.MULTILINE) == ["GE.6", "GE.6[1]", "dGE.q"]
    refused = run("trace", "softmax", "--only", "SM.99")
    assert refused.exit_code == 2 and "--only: got 'SM.99', needs one of those that ran: SM.1, SM.2" in refused.stderr


def test_trace_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("trace", "softmax", "--block")
    assert result.stdout.startswith("Softmax attention: the block, one step, float64 on numpy")
    assert "\nSM.output  " in result.stdout and "\nd_params.w_o (4, 4)\n" in result.stdout
    record = dataclasses.replace(ra.mechanism("softmax"), core=None)
    monkeypatch.setattr("refattn.mechanisms.softmax.record", record)
    assert run("trace", "softmax").stdout == result.stdout
    assert refused("trace", "softmax", "--case", "tiny").startswith("--case: got 'tiny', needs none")


def test_trace_takes_options_of_the_core_and_choices_of_the_block() -> None:
    assert "SM.capped" in run("trace", "softmax", "--only", "SM.capped", "--set", "softcap=2.0").stdout
    result = run("trace", "sympformer", "--block", "--set", "integrator=strang", "--only", "SYMP.rotated_x")
    assert "SYMP.rotated_x  " in result.stdout and result.exit_code == 0
    assert refused("trace", "softmax", "--set", "q=1").startswith("--set: got 'q', needs one of mask, causal")
    assert refused("trace", "softmax", "--block", "--set", "mask=1").startswith("--set: got 'mask', needs one of width")
    assert refused("trace", "softmax", "--set", "softcap=-1").startswith("softcap: got -1, needs")
    assert refused("trace", "softmax", "--set", "softcap").startswith("--set: got 'softcap', needs NAME=VALUE")


def test_trace_writes_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    result = run("trace", "softmax", "--case", "mask-causal", "--safetensors", tmp_path / "trace.safetensors")
    assert result.exit_code == 0
    data = facts(run("trace", "softmax", "--case", "mask-causal", "--json", "-").stdout)
    with safe_open(tmp_path / "trace.safetensors", "numpy") as tensors:
        metadata = tensors.metadata()
        for one in (*data["forward"], *data["backward"]):
            x = tensors.get_tensor(one["id"])
            assert (list(x.shape), x.dtype.name) == (one["shape"], one["dtype"])
            assert x.astype(str).tolist() == np.array(one["value"], dtype=np.float64).astype(str).tolist()
            assert metadata[f"axes {one['id']}"] == ", ".join(one["axes"])
        assert {"q", "k", "v", "mask", "d_out", "out", "lse", "d_q"} <= set(tensors.keys())
        assert tensors.get_tensor("mask").dtype == bool
    expected = {"mechanism": "softmax", "part": "core", "case": "mask-causal", "dtype": "float64"}
    assert expected | {"version": ra.__version__} == {n: x for n, x in metadata.items() if not n.startswith("axes ")}


def test_trace_refuses_what_is_not_there(tmp_path: Path) -> None:
    assert refused("trace", "relu").startswith("mechanism: got 'relu', needs one of softmax")
    assert refused("trace", "softmax", "--case", "huge").startswith("--case: got 'huge', needs one of tiny, plain")
    assert refused("trace", "softmax", "--dtype", "float8") == (
        "--dtype: got 'float8', needs one of float64, float32, float16, bfloat16 (did you mean float64?)"
    )
    assert "'abacus'" in refused("trace", "softmax", "--backend", "abacus")
    line = refused("trace", "softmax", "--case", "tiny", "--block")
    assert line == "--case: got 'tiny', needs none: the block of softmax is run, which has no cases"
    assert refused("trace", "softmax", "--safetensors", tmp_path / "no" / "t").startswith("--safetensors: got ")
    assert refused("trace", "softmax", "--safetensors", "-").startswith("--safetensors: got '-', needs a file")
    assert refused("trace", "softmax", "--json", tmp_path / "no" / "t").startswith("--json: got ")


def test_trace_says_what_a_backend_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refattn.backends.numpy.NumpyBackend.float64", lambda self: False)
    assert refused("trace", "softmax").startswith("--dtype: got float64, which numpy does not have here")
    assert run("trace", "softmax", "--dtype", "float32").exit_code == 0
    monkeypatch.setattr("refattn.backends.numpy.NumpyBackend.why_unavailable", lambda self: "no numbers today")
    assert refused("trace", "softmax") == "backend: numpy cannot be used: no numbers today"
