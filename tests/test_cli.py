"""The command line: what it prints and where, its exit codes, and how it says what is wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import refattn as ra
from refattn.cli import cli, output, streams
from refattn.verify.outcome import CheckReport, Row

ROOT = Path(__file__).parents[1]
SMALL = ("--shape", "b=1,h=2,nq=3,nk=4,d=4", "--dtype", "float32")

# Softmax attention written for torch or JAX, which differentiate it.
DIFFERENTIATED = """
import numpy as np
import {library} as np_like


def attend(q, k, v, *, mask=None, causal=False, scale=None):
    q, k, v = (np_like.asarray(x) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    k, v = (np_like.{repeat}(x, q.shape[1] // x.shape[1], {axis}=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    n, m = scores.shape[2:]
    allowed = np_like.asarray(np.tri(n, m, m - n if causal else m, dtype=bool))
    allowed = allowed if mask is None else allowed & np_like.asarray(np.asarray(mask))
    weights = np_like.where(allowed, np_like.exp(np_like.where(allowed, scores, 0.0)), 0.0)
    total = weights.sum(-1)[..., None]
    return (weights @ v) / np_like.where(total == 0.0, 1.0, total)
"""

# Softmax attention in plain NumPy, right and wrong in many ways: a user's file.
KERNELS = '''
import sys

import numpy as np

import refattn


def attend(q, k, v, *, mask=None, causal=False, scale=None, softcap=None):
    dtype, (n, m), repeat = q.dtype, (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, repeat, axis=1) for x in (k, v))
    scores = q @ np.swapaxes(k, 2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    allowed = np.tri(n, m, {False: m, "top_left": 0}.get(causal, m - n), dtype=bool)
    allowed = allowed if mask is None else allowed & mask
    top = np.max(np.where(allowed, scores, -1e9), axis=-1, keepdims=True, initial=-1e9)
    weights = np.where(allowed, np.exp(np.where(allowed, scores - top, 0.0)), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    attend.total, attend.top = total[..., 0], top[..., 0]
    return ((weights @ v) / np.where(total == 0.0, 1.0, total)).astype(dtype)


def with_lse(q, k, v, **options):
    out = attend(q, k, v, **options)
    total = attend.total
    lse = np.where(total == 0.0, -np.inf, attend.top + np.log(np.where(total == 0.0, 1.0, total)))
    return out, lse.astype(np.float64 if q.dtype == np.float64 else np.float32)


def told(q, k, v, *, dtype, **options):
    assert dtype == "bfloat16" and q.dtype == np.float32 and np.all(q.view(np.uint32) % 2**16 == 0)
    return attend(q, k, v, **options)


def top_left(q, k, v, *, causal=False, **options):
    return attend(q, k, v, causal="top_left" if causal else False, **options)


def short(q, k, v, **options):
    return attend(q, k, v, **options)[..., :-1]


def wide(q, k, v, **options):
    return attend(q, k, v, **options).astype(np.float64)


def nan(q, k, v, **options):
    out = attend(q, k, v, **options)
    out[..., -1:] = np.nan
    return out


def none(q, k, v, **options):
    return None


def text(q, k, v, **options):
    return "attention"


def objects(q, k, v, **options):
    return [object()]


def four(q, k, v, **options):
    return q, k, v, v


def raises(q, k, v, **options):
    raise RuntimeError("no kernel\\nfor this")


def mutates(q, k, v, **options):
    q.setflags(write=True)
    q += 1.0
    return attend(q, k, v, **options)


def declines(q, k, v, **options):
    return refattn.Decline("not today")


def declines_masks(q, k, v, *, mask=None, **options):
    return attend(q, k, v, **options) if mask is None else refattn.Decline("no masks")


def prints(q, k, v, **options):
    print("noise")
    return attend(q, k, v, **options)


def leaves(q, k, v, **options):
    sys.exit(0)


def interrupted(q, k, v, **options):
    raise KeyboardInterrupt


class Pair:
    """Hands out a backward that is right, by way of the reference."""

    def forward(self, q, k, v, **options):
        out, self.saved = refattn.softmax.forward(q, k, v, **options)
        return out

    def backward(self, d_out):
        return refattn.softmax.backward(self.saved, d_out)


class Failing:
    def __init__(self):
        raise OSError("no device")


number = 3
'''


@pytest.fixture
def kernels(tmp_path: Path) -> Callable[[str], str]:
    """The spec of a function of KERNELS, in a file of its own."""
    file = tmp_path / "kernels.py"
    file.write_text(KERNELS)
    return lambda name: f"{file}:{name}"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Leave softmax five small cases, so that a test takes no longer than it must."""
    names = ("tiny", "causal-tail", "mask-keys", "grouped", "empty-rows")
    record = ra.mechanism("softmax")
    small = dataclasses.replace(record, cases=tuple(record.case(name) for name in names), kernel_sizes=())
    monkeypatch.setattr("refattn.mechanisms.softmax.record", small)
    return names


def run(*arguments: object) -> Result:
    """Run a command in this process; nothing but its exit may come out of it."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="refattn")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def verify(spec: str, *arguments: object) -> Result:
    """Verify in this process, which is faster than in one more."""
    return run("verify", "softmax", "--impl", spec, "--dtype", "float32", "--in-process", *arguments)


def refused(*arguments: object) -> str:
    """The message of a command that refuses its input: the only line, and exit code 2."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("refattn: error: ")
    return line.removeprefix("refattn: error: ")


def process(*arguments: object, **extra: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as users do."""
    command = [sys.executable, "-m", "refattn", *map(str, arguments)]
    extra = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120} | extra
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **extra)


def facts(text: str) -> Any:
    """Read JSON as other languages do: without NaN and Infinity."""

    def refuse(token: str) -> None:
        raise AssertionError(token)

    return json.loads(text, parse_constant=refuse)


# Help, version, tables


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["verify", "--help"], ["check", "--help"], ["trace", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = "{'numpy', 'scipy', 'rich', 'torch', 'jax', 'matplotlib', 'onnxruntime', 'array_api_compat', 'asyncio'}"
    code = f"""
import sys
from refattn.cli import cli
try:
    cli({arguments})
finally:
    print(*({heavy} & set(sys.modules)), file=sys.stderr)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr.strip()) == (0, "")
    assert result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"refattn {ra.__version__}\n"


def test_without_a_command_the_help_is_shown_and_it_is_an_error() -> None:
    result = run()
    assert result.exit_code == 2 and not result.stdout
    assert {"list", "backends", "check", "verify", "trace"} <= set(cli.commands)
    for command in cli.commands:
        assert command in result.stderr


def test_a_shell_completes_commands_and_mechanisms() -> None:
    def completed(words: str) -> list[str]:
        given = {"_REFATTN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        result = CliRunner().invoke(cli, [], prog_name="refattn", env=given)
        return [line.removeprefix("plain,") for line in result.stdout.split()]

    assert completed("refattn tra") == ["trace", "train"]
    for command in ("trace", "check", "show", "verify", "train", "golden write out", "analyse clusters"):
        assert completed(f"refattn {command} koo") == ["koopman"], command


def test_list() -> None:
    result = run("list")
    assert result.exit_code == 0
    assert result.stdout.split()[:4] == ["name", "title", "forms", "source"]
    for name in ra.list_mechanisms():
        record = ra.mechanism(name)
        for word in (name, record.title, record.source, *record.forms):
            assert word in result.stdout


def test_list_as_json(tmp_path: Path) -> None:
    result = run("list", "--json", "-")
    rows = facts(result.stdout)
    assert [row["name"] for row in rows] == list(ra.list_mechanisms())
    assert set(rows[0]) == {"name", "title", "forms", "source"}
    assert result.stderr == run("list", "--json", tmp_path / "list.json").stdout == run("list").stdout
    assert facts((tmp_path / "list.json").read_text()) == rows


def test_claims_of_sources() -> None:
    result = run("list", "--claims", "koopman", "softmax", "--json", "-")
    rows = facts(result.stdout)
    assert list(dict.fromkeys(row["mechanism"] for row in rows)) == ["koopman", "softmax"]
    assert result.stderr == run("list", "koopman", "softmax", "--claims").stdout
    words = "".join(result.stderr.split())
    for row in rows:
        assert "".join(row["claim"][:30].split()) in words and row["tests"][0].rpartition("::")[2] in words
    assert {row["mechanism"] for row in facts(run("list", "--claims", "--json", "-").stdout)} == {*ra.list_mechanisms()}


def test_backends() -> None:
    result = run("backends")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line[:1].strip()}
    assert {"name", "numpy", "cupy", "torch", "jax", "strict"} <= set(lines)
    assert lines["numpy"].split()[1] == "yes"


# Check


def checking(monkeypatch: pytest.MonkeyPatch, *statuses: str) -> list[Any]:
    """Make the check of every mechanism find these; return what it is called with."""
    calls = []

    def check(mechanism: Any, backend: Any, *, progress: Any, require_all: bool, **more: Any) -> CheckReport:
        calls.append((mechanism.name, backend.name))
        share = {"agrees": 0.25, "disagrees": float("inf"), "not run": None}
        rows = tuple(Row("laws", f"law {n}", status, share[status], "why") for n, status in enumerate(statuses))
        return CheckReport(mechanism.name, backend.name, require_all, tuple(progress(rows)))

    monkeypatch.setattr("refattn.verify.itself.check.check", check)
    return calls


@pytest.mark.parametrize(
    ("statuses", "code", "strict_code"),
    [
        (("agrees",), 0, 0),
        (("agrees", "disagrees"), 1, 1),
        (("agrees", "not run"), 0, 3),
        (("not run",), 3, 3),
        (("disagrees", "not run"), 1, 1),
    ],
)
def test_exit_codes_of_check(
    monkeypatch: pytest.MonkeyPatch, statuses: tuple[str, ...], code: int, strict_code: int
) -> None:
    checking(monkeypatch, *statuses)
    assert run("check", "--jobs", "1").exit_code == code
    assert run("check", "--jobs", "1", "softmax", "--require-all").exit_code == strict_code


def test_check_takes_all_mechanisms_unless_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = checking(monkeypatch, "agrees")
    run("check", "--jobs", "1")
    assert calls == [(name, "numpy") for name in ra.list_mechanisms()]
    calls.clear()
    run("check", "--jobs", "1", "softmax", "softmax", "--backend", "strict")
    assert calls == [("softmax", "strict")]


def test_check_prints_its_rows_and_their_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checking(monkeypatch, "agrees", "disagrees", "not run")
    result = run("check", "--jobs", "1", "--json", tmp_path / "check.json")
    data = facts((tmp_path / "check.json").read_text())
    assert data["exit_code"] == 1
    assert [row["status"] for row in data["checks"][0]["rows"]] == ["agrees", "disagrees", "not run"]
    for row in data["checks"][0]["rows"]:
        assert any(row["name"] in line and row["status"] in line for line in result.stdout.splitlines())
    assert "1 checks agree, 1 disagree, 1 not run" in result.stdout.splitlines()[-1]
    assert "check: 3 of 3 parts" in result.stderr


def test_bad_input_of_check(tmp_path: Path) -> None:
    assert "'relu'" in (line := refused("check", "relu")) and "softmax" in line
    assert "'fortran'" in (line := refused("check", "--backend", "fortran")) and "numpy" in line
    assert "missing" in refused("check", "--json", tmp_path / "missing" / "check.json")


# Verify: what it finds


def test_a_right_implementation_agrees(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = verify(kernels("attend"))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("softmax: agrees: 5 cases run, 0 declined, 0 failed")
    assert "not given" in next(line for line in result.stdout.splitlines() if " lse " in line)
    assert "verify softmax: 5 of 5 cases" in result.stderr


def test_every_dtype_is_run_by_default(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = run("verify", "softmax", "--in-process", "--impl", kernels("with_lse"))
    assert result.exit_code == 0
    assert "15 cases run, 5 declined" in result.stdout and "not given" not in result.stdout
    assert "it takes no dtype=" in result.stdout
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        assert dtype in result.stdout


def test_bfloat16_values_come_in_float32_and_are_told(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    arguments = ("--impl", kernels("told"), "--dtype", "bfloat16", "--in-process")
    assert run("verify", "softmax", *arguments).exit_code == 0


def test_a_wrong_implementation_disagrees(few: tuple[str, ...], kernels: Callable[[str], str], tmp_path: Path) -> None:
    result = verify(kernels("top_left"), "--json", tmp_path / "found.json")
    assert result.exit_code == 1
    data = facts((tmp_path / "found.json").read_text())
    (outcome,) = (outcome for outcome in data["outcomes"] if outcome["status"] == "disagrees")
    (verdict,) = outcome["verdicts"]
    assert (outcome["case"], verdict["tensor"], verdict["agrees"]) == ("causal-tail", "out", False)
    index = f"[{','.join(map(str, verdict['index']))}]"
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("float32") and " out " in line)
    got, needed = (f"{verdict[name]:.9g}" for name in ("got", "expected"))
    for words in ("causal-tail", index, got, needed, verdict["statistic"], "1 disagree"):
        assert words in row
    assert row.split()[3] == ">1000" and verdict["share"] > 1000.0
    assert "  float32, 1 case: out disagrees: causal-tail" in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1].startswith("softmax: disagrees: 5 cases run, 0 declined, 1 failed")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short", "shape"),
        ("wide", "dtype"),
        ("nan", "non-finite"),
        ("none", "out"),
        ("text", "got str, needs an array"),
        ("objects", "got list, needs an array"),
        ("four", "returned a tuple of 4, needs out, (out, lse, max), or a dict"),
        ("raises", "raised RuntimeError: no kernel for this"),
        ("mutates", "changed its inputs: q"),
    ],
)
def test_what_fails_exits_with_1_and_is_named(
    few: tuple[str, ...], kernels: Callable[[str], str], name: str, words: str
) -> None:
    result = verify(kernels(name), "--verbose")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    failed = result.stdout[result.stdout.index("Failed (5 of 5 cases run)") :]
    for case in few:
        assert f"  float32 {case} (" in failed
    assert words in failed


def test_declining_everything_is_no_success(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = verify(kernels("declines"))
    assert result.exit_code == 3
    assert result.stdout.splitlines()[-1] == "softmax: nothing was run: all 5 cases were declined"
    assert "not today" in result.stdout


def test_declining_some_is_counted(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = verify(kernels("declines_masks"))
    assert result.exit_code == 0
    assert "3 cases run, 2 declined, 0 failed" in result.stdout.splitlines()[-1]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["masked", "0", "0", "0", "1"] in rows and ["all", "3", "3", "0", "2"] in rows
    assert ["2", "no", "masks", "float32:", "mask-keys,", "empty-rows"] in rows


def test_gradients(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    assert verify(kernels("Pair"), "--grad").exit_code == 0
    for tensor in ("d_q", "d_k", "d_v"):
        assert f" {tensor} " in verify(kernels("Pair"), "--grad").stdout
    result = verify(kernels("attend"), "--grad")
    assert result.exit_code == 3 and "no gradients" in result.stdout


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("torch", {"library": "torch", "repeat": "repeat_interleave", "axis": "dim"}),
        pytest.param(
            "jax", {"library": "jax.numpy", "repeat": "repeat", "axis": "axis"}, marks=pytest.mark.slow(sampled=False)
        ),
    ],
)
def test_functions_of_torch_and_jax_are_differentiated(
    few: tuple[str, ...], tmp_path: Path, package: str, words: dict[str, str]
) -> None:
    pytest.importorskip(package)
    (tmp_path / "kernels.py").write_text(DIFFERENTIATED.format(**words))
    result = verify(f"{tmp_path / 'kernels.py'}:attend", "--grad")
    assert result.exit_code == 0, result.output
    assert "5 cases run, 0 declined" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("float32")]
    assert {line[1]: line[2] for line in lines} == {"out": "5", "lse": "0", "d_q": "5", "d_k": "5", "d_v": "5"}


def test_what_an_implementation_prints_is_kept_out_of_the_report(
    few: tuple[str, ...], kernels: Callable[[str], str]
) -> None:
    result = verify(kernels("prints"), "--json", "-")
    assert result.exit_code == 0 and "noise" in result.stderr
    assert facts(result.stdout)["exit_code"] == 0


def test_json_says_the_same(few: tuple[str, ...], kernels: Callable[[str], str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    result = verify(kernels("nan"), "--json", file)
    assert result.exit_code == 1
    data = facts(file.read_text())
    assert set(data) >= {"mechanism", "implementation", "grad", "outcomes", "counts", "exit_code"}
    assert (data["mechanism"], data["implementation"], data["grad"]) == ("softmax", kernels("nan"), False)
    assert data["exit_code"] == 1 and data["counts"]["all"] == {"run": 5, "agreed": 0, "failed": 5, "declined": 0}
    assert [outcome["case"] for outcome in data["outcomes"]] == list(few)
    assert data["outcomes"][0]["verdicts"][0]["share"] is None
    plain, piped = verify(kernels("short"), "--json", file), verify(kernels("short"), "--json", "-")
    assert facts(piped.stdout) == facts(file.read_text())
    assert piped.stderr.endswith(plain.stdout)


# Trace


def test_trace_shows_every_equation(tmp_path: Path) -> None:
    result = run("trace", "softmax", "--json", tmp_path / "trace.json")
    assert result.exit_code == 0 and result.stdout.startswith(
        "Softmax attention: the core, case tiny, float64 on numpy"
    )
    data = facts((tmp_path / "trace.json").read_text())
    assert [one["id"] for one in data["forward"]][:2] == ["SM.1", "SM.18"]
    for one in (*data["forward"], *data["backward"]):
        assert f"\n{one['id']}  {re.sub(' {2,}', '   ', one['formula'])}\n" in result.stdout
        assert f"    {one['file']}:{one['line']}: {one['variable']} = " in result.stdout
    piped = run("trace", "softmax", "--json", "-")
    assert facts(piped.stdout) == data and piped.stderr == result.stdout


def test_trace_takes_a_case_a_dtype_and_a_backend() -> None:
    result = run("trace", "softmax", "--case", "causal-tail", "--dtype", "float32", "--backend", "strict")
    assert result.stdout.startswith("Softmax attention: the core, case causal-tail, float32 on strict")
    assert "causal = True" in result.stdout.splitlines()


def test_trace_of_one_equation() -> None:
    result = run("trace", "graph_energy", "--only", "GE.9", "--only", "dGE.q")
    assert result.exit_code == 0
    assert re.findall(r"^(\S+)  ", result.stdout, re.MULTILINE) == ["GE.9", "GE.9[1]", "dGE.q"]
    refused = run("trace", "softmax", "--only", "SM.99")
    assert refused.exit_code == 2 and "--only: got 'SM.99', needs one of those that ran: SM.1, SM.18" in refused.stderr


def test_trace_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("trace", "softmax", "--block")
    assert result.stdout.startswith("Softmax attention: the block, one step, float64 on numpy")
    assert "\nSM.14  " in result.stdout and "\nd_params.w_o (4, 4)\n" in result.stdout
    record = dataclasses.replace(ra.mechanism("softmax"), core=None)
    monkeypatch.setattr("refattn.mechanisms.softmax.record", record)
    assert run("trace", "softmax").stdout == result.stdout
    assert refused("trace", "softmax", "--case", "tiny").startswith("--case: got 'tiny', needs none")


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
        "--dtype: got 'float8', needs one of float64, float32, float16, bfloat16"
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
    assert refused("trace", "softmax") == "--backend: numpy cannot be used: no numbers today"


# Bad input


def test_unknown_names() -> None:
    names = ", ".join(cli.commands)
    assert refused("verfy") == f"command: got 'verfy', needs one of {names}; see refattn --help"
    assert "'relu'" in (line := refused("verify", "relu", "--impl", "a:b")) and "softmax" in line
    line = refused("verify", "softmax", "--impl", "a:b", "--dtype", "float8")
    assert "'float8'" in line and "bfloat16" in line
    for option in ("--outputs", "--seed"):
        assert option in refused("verify", "softmax", "--impl", "a:b", option, "x")
    assert "see refattn --help" in refused("--quiet", "list")
    assert "extra" in refused("list", "extra")


def test_what_is_missing_is_named() -> None:
    assert "--impl" in refused("verify", "softmax")
    assert "MECHANISM" in refused("verify", "--impl", "a:b")
    assert "--json" in refused("list", "--json")


def test_an_implementation_that_cannot_be_loaded(
    kernels: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def attend(:\n")
    (tmp_path / "raising.py").write_text("raise RuntimeError('no\\nGPU')\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "needy.py").write_text("import a_module_that_is_not_there\n")
    for spec, words in {
        "kernels.py": "needs MODULE_OR_FILE:FUNCTION",
        ":attend": "needs MODULE_OR_FILE:FUNCTION",
        "nowhere.py:attend": "there is no file nowhere.py",
        "a_module_that_is_not_there:attend": "No module named 'a_module_that_is_not_there'",
        "broken.py:attend": "SyntaxError",
        "raising.py:attend": "RuntimeError: no GPU",
        "leaving.py:attend": "raised SystemExit: 0",
        "needy.py:attend": "a_module_that_is_not_there",
        kernels("absent"): "has no 'absent'",
        kernels("number"): "number is int, needs a function",
        kernels("Failing"): "OSError: no device",
    }.items():
        line = refused("verify", "softmax", "--in-process", "--impl", spec)
        assert words in line and spec in line.replace("--impl: there is no file nowhere.py", spec)


def test_an_implementation_that_ends_the_program_is_no_success(
    few: tuple[str, ...], kernels: Callable[[str], str]
) -> None:
    assert verify(kernels("leaves")).exit_code in (1, 2)


def test_a_module_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    result = process("verify", "softmax", "--impl", "my_kernels:attend", *SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("softmax: agrees: 1 case")


@pytest.mark.parametrize("place", ["missing/found.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, place: str) -> None:
    (tmp_path / "telling.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()\n{KERNELS}")
    line = refused("verify", "softmax", "--impl", f"{tmp_path / 'telling.py'}:attend", "--json", tmp_path / place)
    assert line.startswith("--json: got ") and str(tmp_path / place) in line
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "words",
    [
        "show softmax --out",
        "check --json",
        "trace softmax --html",
        "trace softmax --safetensors",
        "train softmax --out",
        "analyse flow --out",
        "analyse lyapunov softmax --run",
        "verify softmax --outputs",
        "golden check",
        "golden write",
    ],
)
def test_an_empty_path_is_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no name of the working directory: a variable that is not set gives it."""
    monkeypatch.chdir(tmp_path)
    option = words.split()[-1] if "--" in words else "DIR"
    assert refused(*words.split(), "") == f"{option}: got an empty text, needs a path"
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_too_long_is_no_place(tmp_path: Path) -> None:
    place = tmp_path / ("x" * 300)
    assert refused("golden", "write", place, "growing").endswith(f"cannot be written: File name too long ({place})")
    assert "File name too long" in refused("golden", "check", place)


def test_a_file_is_left_alone_until_there_is_something_to_write(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for file in (old, new):
        refused("verify", "softmax", "--impl", "nowhere.py:attend", "--json", file)
    assert old.read_text() == "{}" and not new.exists()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text("def deep():\n    raise RuntimeError('no GPU')\n\n\ndeep()\n")
    arguments = ("verify", "softmax", "--impl", f"{tmp_path / 'raising.py'}:attend")
    assert "RuntimeError" in refused(*arguments)
    result = run("--debug", *arguments)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and "in deep" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("refattn: error: --impl")


def test_an_unforeseen_error_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("refattn.verify.itself.check.check", fail)
    assert refused("check", "--jobs", "1") == "ZeroDivisionError: division by zero (refattn --debug shows where)"
    assert "Traceback" in run("--debug", "check", "--jobs", "1").stderr


def test_an_interrupt_is_one_line(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = verify(kernels("interrupted"))
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "refattn: interrupted\n")


# As a process


def test_a_reader_that_stops_reading_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = process("list", stdout=writing)
    finally:
        os.close(writing)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "streams", "code"),
    [
        ("list", ">/dev/full", 2),  # what was asked for is lost
        ("--help", ">/dev/full", 2),
        ("--help", "1>&-", 0),  # nobody wants it
        ("--version", "1>&- 2>&-", 0),
        ("nothing", "2>/dev/full", 2),
        ("nothing", "0<&- 1>&- 2>&-", 2),
    ],
)
def test_streams_that_are_full_or_closed(words: str, streams: str, code: int) -> None:
    command = [f'"$0" -m refattn {words} {streams}', sys.executable]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(["sh", "-c", *command], capture_output=True, text=True, timeout=120, env=env)
    full = streams == ">/dev/full"
    assert result.stderr == ("refattn: error: standard output: No space left on device\n" if full else "")
    assert (result.returncode, result.stdout) == (code, "")


def test_progress_that_cannot_be_shown_stops_nothing(kernels: Callable[[str], str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = process("verify", "softmax", "--impl", kernels("attend"), *SMALL, stderr=writing)
    finally:
        os.close(writing)
    assert result.returncode == 0 and ", 0 failed" in result.stdout


def test_a_pipe_that_is_full_and_does_not_block_is_waited_for() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    text, got = b"x" * 200_000, bytearray()

    def read() -> None:
        while part := os.read(reading, 4096):
            got.extend(part)

    reader = threading.Timer(0.05, read)
    reader.start()
    with io.BufferedWriter(streams.Stream(writing, "wb")) as stream:
        stream.write(text)
    reader.join()
    os.close(reading)
    assert got == text and stream.raw.failure is None


def test_help_without_docstrings() -> None:
    """`python -OO` leaves them out."""
    command = [sys.executable, "-OO", "-m", "refattn", "golden", "write", "--help"]
    found = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert found.stdout == run("golden", "write", "--help").stdout


def test_text_that_the_encoding_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}.items():
        monkeypatch.setenv(name, value)
    kernel, page = tmp_path / "käse.py", tmp_path / "käse.html"
    kernel.write_text(
        "import refattn\n\n\ndef attend(q, k, v, **options):\n"
        "    print('d\u00e9j\u00e0')\n    return refattn.Decline('pas \u00e7a \x1b[31m')\n",
        encoding="utf-8",
    )
    result = process("verify", "softmax", "--impl", f"{kernel}:attend", *SMALL, "--html", page)
    assert result.returncode == 3, result.stderr
    assert "pas \\xe7a ?[31m" in result.stdout and "d\\xe9j\\xe0" in result.stderr
    assert "pas ça" in page.read_text(encoding="utf-8")
    assert r"cannot import k\udcc3\udca4se" in process("verify", "softmax", "--impl", "käse:attend.py").stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("plain", [False, True])
def test_on_a_terminal(plain: bool, monkeypatch: pytest.MonkeyPatch, kernels: Callable[[str], str]) -> None:
    import pty

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if plain:
        monkeypatch.setenv("NO_COLOR", "1")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "refattn", "verify", "softmax", "--impl", kernels("attend"), *SMALL],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=theirs,
        stderr=theirs,
    ) as child:
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says the end like this
                break
            if not part:
                break
            seen += part
    os.close(ours)
    assert child.returncode == 0
    text = seen.decode().replace("\r\n", "\n")
    assert ("\x1b" in text) is not plain
    assert bool(re.search(r"verify softmax: (\d+) of \1 cases", text)) is plain
    report = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", text[text.rindex("against") :])
    assert max(map(len, report.splitlines())) <= 100


def test_progress_waits_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Items that come one after the other are passed on as they come."""

    class Coming:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            for n in range(4):
                made.append(n)
                yield n

    made: list[int] = []
    with output.progress("work", "parts") as wrap:
        for n in wrap(Coming()):
            assert made == list(range(n + 1))
    assert "work: 4 of 4 parts" in capsys.readouterr().err
