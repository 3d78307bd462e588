"""Kernels in any language: a program per case, or files of results; each way to fail is one clear line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from refattn.cli import cli
from refattn.golden import vectors
from refattn.golden.storage_types import round_to
from refattn.golden.tensors import decode, encode
from refattn.mechanisms.record import Mechanism
from refattn.verify import run
from refattn.verify.adapters import result_files
from refattn.verify.adapters.adapter import LoadError
from refattn.verify.adapters.program import Program
from refattn.verify.freeze import thaw
from refattn.verify.outcome import Report
from tests.verify.test_freeze import FEW, written

ONE = dataclasses.replace(FEW, cases=FEW.cases[:1])

# Reads and writes the format by itself, and computes in its own way, as a program of another language does.
SOFTMAX = """
import json, sys
import numpy as np
data = open(sys.argv[1], "rb").read()
size = int.from_bytes(data[:8], "little")
header = json.loads(data[8 : 8 + size])
about = header.pop("__metadata__")
options = json.loads(about["options"])
if set(options) - {"causal", "softcap"}:
    print("some words\\nno " + ", ".join(options))
    sys.exit(77)
types = {"F64": "<f8", "F32": "<f4", "BOOL": "?"}
x = {
    name: np.frombuffer(data[8 + size :][slice(*e["data_offsets"])], types[e["dtype"]]).reshape(e["shape"])
    for name, e in header.items()
}
q, k, v = x["q"], x["k"], x["v"]
scale = q.dtype.type(q.shape[3] ** -0.5)
s = q @ k.swapaxes(2, 3) * scale
cap = options.get("softcap")
t = np.tanh(s / cap) if cap else s
s = (cap * t).astype(q.dtype) if cap else s
allowed = x.get("mask", np.True_)
p = np.where(allowed, np.exp(s - s.max(-1, keepdims=True)), 0)
total = p.sum(-1, keepdims=True)
p = p / np.where(total == 0, 1, total)
out = {"out": p @ v}
if "d_out" in x:
    d_p = x["d_out"] @ v.swapaxes(2, 3)
    d_s = p * (d_p - (d_p * p).sum(-1, keepdims=True)) * (1 - t * t if cap else 1)
    out = {"d_q": d_s @ k * scale, "d_k": d_s.swapaxes(2, 3) @ q * scale, "d_v": p.swapaxes(2, 3) @ x["d_out"]}
header, body = {}, b""
for name, y in out.items():
    y = np.ascontiguousarray(y, q.dtype)
    kind = "F64" if y.dtype == "f8" else "F32"
    header[name] = {"dtype": kind, "shape": y.shape, "data_offsets": [len(body), len(body) + y.nbytes]}
    body += y.tobytes()
text = json.dumps(header).encode()
open(sys.argv[2], "wb").write(len(text).to_bytes(8, "little") + text + body)
"""


def command(code: str, folder: Path) -> str:
    file = folder / "program.py"
    file.write_text(code)
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(file))}"


def verified(code: str, folder: Path, *, grad: bool = False, seconds: float = 60.0, record: Mechanism = FEW) -> Report:
    program = Program(command(code, folder), ("out", "lse"), seconds)
    return run.verify(record, program, dtypes=["float32"], grad=grad)


def test_a_program_agrees_with_gradients(tmp_path: Path) -> None:
    found = verified(SOFTMAX, tmp_path, grad=True)
    assert [outcome.status for outcome in found.outcomes] == ["agrees"] * 3
    assert {verdict.tensor for verdict in found.outcomes[0].verdicts} == {"out", "d_q", "d_k", "d_v"}


def test_a_program_that_is_wrong_disagrees(tmp_path: Path) -> None:
    found = verified(SOFTMAX.replace("** -0.5", "** -0.49"), tmp_path)
    assert [outcome.status for outcome in found.outcomes] == ["disagrees"] * 3


@pytest.mark.parametrize(
    ("code", "status", "detail"),
    [
        ("print('not today'); raise SystemExit(77)", "declined", "not today"),
        ("raise SystemExit('no such device')", "raises", "exit code 1: no such device"),
        ("pass", "raises", "wrote no OUT"),
        ("import sys; open(sys.argv[2], 'wb').write(b'!' * 99)", "raises", "OUT: no safetensors file"),
        ("import time; time.sleep(60)", "not finished", "did not end within 0.5 s"),
        ("import os; os.kill(os.getpid(), 9)", "raises", "exit code -9: it said nothing"),
        ("import os\nwhile True: os.write(1, bytes(1 << 16))", "not finished", "did not end within 0.5 s"),
        ("import os\nwhile True: os.write(2, b'x')", "not finished", "did not end within 0.5 s"),
        ("import sys; open(sys.argv[2], 'wb').truncate(6 << 30)", "raises", "OUT: got 6442450944 bytes, needs at most"),
        ("import os, sys; os.mkfifo(sys.argv[2])", "raises", "OUT: is no regular file"),
        ("import os, sys; os.symlink('/dev/zero', sys.argv[2])", "raises", "OUT: is no regular file"),
        ("import os, sys; os.mkdir(sys.argv[2])", "raises", "OUT: is no regular file"),
    ],
)
def test_every_way_to_fail_is_a_line(
    code: str, status: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = "0.5" in detail
    asked = []
    monkeypatch.setattr(run, "differing", lambda *_, **__: asked.append("conventions"))
    found = verified(code, tmp_path, seconds=0.5 if waits else 60.0, record=ONE if waits else FEW)
    assert [outcome.status for outcome in found.outcomes] == [status] * len(found.outcomes) != []
    assert not asked  # each question would wait once more for a program that hangs
    assert all(detail in outcome.detail for outcome in found.outcomes)
    raises = status == "raises"
    assert found.exit_code == (1 if raises else 3) and bool(found.counts()["all"]["run"]) is raises


@pytest.mark.parametrize("left", ["", ", start_new_session=True", ", process_group=0", ", env={}"])
def test_a_process_left_behind_holds_nothing_up_and_ends(left: str, tmp_path: Path) -> None:
    if "process_group" in left and sys.version_info < (3, 11):
        pytest.skip("Popen has no process_group")
    name = f"322.{os.getpid()}"  # nobody else's
    sleep = f"import subprocess; subprocess.Popen(['sleep', '{name}']{left})\n"
    found = verified(sleep + SOFTMAX, tmp_path)
    assert [outcome.status for outcome in found.outcomes] == ["agrees"] * 3
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert name.encode() not in (folder / "cmdline").read_bytes()


def test_what_is_no_command_is_told(tmp_path: Path) -> None:
    for text in ("", "'open"):
        with pytest.raises(LoadError, match="needs a command line"):
            Program(text, ("out",), 1.0)
    program = tmp_path / "program"
    with pytest.raises(LoadError, match="needs a program that is there and can be run"):
        Program(str(program), ("out",), 1.0)
    program.write_text("#!/nowhere/at/all\n")
    program.chmod(0o755)
    found = run.verify(FEW, Program(str(program), ("out",), 1.0), dtypes=["float32"])
    assert "cannot be run: No such file" in found.outcomes[0].detail


# --- files of results


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> vectors.GoldenSet:
    return written(tmp_path_factory.mktemp("golden") / "set")


@pytest.fixture
def results(golden: vectors.GoldenSet, tmp_path: Path) -> Path:
    """What an honest kernel writes: the true results, rounded."""
    folder = tmp_path / "results"
    folder.mkdir()
    for entry in golden.cases:
        for dtype in entry["dtypes"]:
            true = thaw(entry, golden.arrays(entry), dtype)
            arrays = {name: (kind, round_to(true.values[name], kind)) for name, kind in true.stored.items()}
            (folder / f"{entry['case']}.{dtype}.safetensors").write_bytes(encode(arrays))
    return folder


def cli_verify(*args: Any) -> Result:
    return CliRunner().invoke(cli, ["verify", "softmax", *map(str, args)])


def test_files_agree_in_every_type(golden: vectors.GoldenSet, results: Path) -> None:
    found = cli_verify("--outputs", results, "--vectors", golden.folder, "--grad", "--json", "-")
    data = json.loads(found.stdout)
    assert found.exit_code == 0 and data["counts"]["all"] == {"run": 12, "agreed": 12, "failed": 0, "declined": 0}
    assert {v["tensor"] for v in data["outcomes"][0]["verdicts"]} == {"out", "lse", "max", "d_q", "d_k", "d_v"}


def test_files_that_are_wrong_or_absent(golden: vectors.GoldenSet, results: Path) -> None:
    path = results / "tiny.float32.safetensors"
    arrays = decode(path.read_bytes())
    kind, out = arrays["out"]
    path.write_bytes(encode({**arrays, "out": (kind, (out * np.float32(1.001)).astype(np.float32))}))
    (results / "tiny.float64.safetensors").write_bytes(b"nothing")
    (results / "tiny.float16.safetensors").unlink()
    (results / "tiny.bfloat16.safetensors").unlink()
    os.mkfifo(results / "tiny.bfloat16.safetensors")
    gone = {name: x for name, x in arrays.items() if name != "d_k"}
    (results / "softcap.float32.safetensors").write_bytes(encode(gone))
    found = result_files.verify_files(FEW, results, golden, grad=True)
    by = {(outcome.case, outcome.dtype): outcome for outcome in found.outcomes}
    assert by["tiny", "float32"].status == "disagrees"
    assert by["tiny", "float64"].status == "raises" and "no safetensors file" in by["tiny", "float64"].detail
    assert by["tiny", "float16"].status == "declined"
    assert "tiny.bfloat16.safetensors: is no regular file" in by["tiny", "bfloat16"].detail
    assert by["softcap", "float32"].status == "raises" and "has no d_k" in by["softcap", "float32"].detail
    assert by["mask-full", "float32"].status == "agrees"
    for file in results.iterdir():
        file.unlink()
    assert result_files.verify_files(FEW, results, golden).exit_code == 3


def test_bad_usage(golden: vectors.GoldenSet, tmp_path: Path) -> None:
    assert "needs a folder" in cli_verify("--outputs", tmp_path / "x", "--vectors", golden.folder).stderr
    assert cli_verify("--outputs", tmp_path, "--vectors", tmp_path).exit_code == 3
    small = ("--shape", "b=1,h=1,nq=2,nk=2,d=2", "--dtype", "float32")
    assert cli_verify("--exec", "false", *small).exit_code == 1
    copy = Path(shutil.copytree(golden.folder, tmp_path / "copy"))
    (copy / "softmax" / "tiny.safetensors").unlink()
    assert cli_verify("--outputs", tmp_path, "--vectors", copy).exit_code == 2
