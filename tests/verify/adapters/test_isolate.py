"""Kernels in a process of their own: each way to misbehave is a line of its case, and the rest still runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.verify.adapters.adapter import CallError, LoadError, call
from refattn.verify.adapters.isolate import Isolated
from refattn.verify.outcome import Result
from refattn.verify.run import verify
from tests.cli.command import SMALL, process

RNG = np.random.default_rng(3)
INPUTS = {name: RNG.normal(size=(1, 2, 3, 4)).astype(np.float32) for name in "qkv"}
CASES = ("tiny", "causal-tail", "mask-keys", "softcap", "grouped", "peaked")

# What it does is told by the case that it is called for.
KERNELS = """
import os, sys, time
import numpy as np
import refattn

def attend(q, k, v, *, mask=None, causal=False, softcap=None):
    print("to Python's output")
    os.write(1, b"to the output of C\\n")
    if mask is not None:
        os.abort()
    if causal:
        time.sleep(60.0)
    if softcap is not None:
        print("no such device")
        sys.stdout.flush()
        os._exit(3)
    if q.shape[1] != k.shape[1]:
        raise KeyError("grouped")
    return refattn.softmax.forward(q, k, v)[0]

class Pair:
    def forward(self, q, k, v, **options):
        out, self.saved = refattn.softmax.forward(q, k, v, **options)
        return out, self.saved.lse
    def backward(self, d_out):
        return refattn.softmax.backward(self.saved, d_out)

Pair.forward.roundings = ("SM.1",)

class Drawing(Pair):
    roundings = {"SM.3": "bfloat16"}
    slack, descale, result = "unwritten", "tensor", "float16"
    def forward(self, q, k, v, **options):
        options["keep"] = self.keep("", options["keep"].shape).astype(q.dtype)
        return super().forward(q, k, v, **options)
    def keep(self, case, shape):
        if case == "dropout-much":
            raise OSError("no generator")
        return 2.0 * (np.arange(np.prod(shape)).reshape(shape) % 3 == 0)

def given(q, k, v, *, number, word, dtype):
    assert not q.flags.writeable and (number, word, dtype) == (0.1, "x", "bfloat16")
    return q

def odd(q, k, v, *, what):
    return {"dict": {"lse": q}, "none": None, "generator": (x for x in "ab"), "text": "out", "complex": q + 1j,
            "objects": q.astype(object), "uneven": [q, q[0]], "many": (q, q, q), "nothing": ()}[what]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("isolated") / "kernels.py"
    file.write_text(KERNELS)
    return file


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ra.mechanism("softmax")
    small = dataclasses.replace(record, cases=tuple(record.case(name) for name in CASES), kernel_sizes=())
    monkeypatch.setattr("refattn.mechanisms.softmax.record", small)


def test_hanging_crashing_raising_and_printing_are_a_line_each(few: None, file: Path) -> None:
    arguments = ["--impl", f"{file}:attend", "--dtype", "float32", "--timeout", "1", "--json", "-"]
    found = CliRunner().invoke(cli, ["verify", "softmax", *arguments])
    assert found.exit_code == 1
    outcomes = {outcome["case"]: outcome for outcome in json.loads(found.stdout)["outcomes"]}
    assert {name: outcome["detail"] for name, outcome in outcomes.items()} == {
        "tiny": "",
        "causal-tail": "did not end within 1 s",
        "mask-keys": "ended its process by SIGABRT",
        "softcap": "ended its process with exit code 3; its last words: no such device",
        "grouped": "raised KeyError: 'grouped'",
        "peaked": "",
    }
    assert [outcomes[name]["status"] for name in ("tiny", "peaked")] == ["agrees", "agrees"]
    assert outcomes["causal-tail"]["status"] == "not finished"
    late = "1 of 6 cases did not end within 1 s (--timeout): 1 in float32 (causal-tail)"
    assert late in json.loads(found.stdout)["not_run"]
    said, _, report = found.stderr.partition("against softmax attention")
    assert "to Python's output" in said and "to the output of C" in said and "to the output" not in report[:200]
    alone = CliRunner().invoke(cli, ["verify", "softmax", *arguments, "--case", "grouped"])
    assert 'raise KeyError("grouped")' in alone.stderr  # its traceback


def test_outputs_gradients_and_declared_roundings_come_back(file: Path) -> None:
    record = ra.mechanism("softmax")
    small = dataclasses.replace(record, cases=(record.case("grouped"),))
    with Isolated(f"{file}:Pair") as kernel:
        assert kernel.adapter.roundings == ("SM.1",) and kernel.adapter.device is None  # it names none
        report = verify(small, kernel, dtypes=["float64", "float32"], grad=True)
    assert [outcome.status for outcome in report.outcomes] == ["agrees", "agrees"]
    assert [v.tensor for v in report.outcomes[0].verdicts] == ["out", "lse", "d_q", "d_k", "d_v"]


def test_what_it_says_of_itself_comes_over_and_so_does_its_dropout(file: Path) -> None:
    record = ra.mechanism("softmax")
    small = dataclasses.replace(record, cases=(record.case("dropout-half"), record.case("dropout-much")))
    with Isolated(f"{file}:Drawing") as kernel:
        assert kernel.adapter.roundings == {"SM.3": "bfloat16"}
        told = kernel.adapter
        assert (told.slack, told.descale, told.result) == ("unwritten", "tensor", "float16")
        report = verify(small, kernel, dtypes=["float32"])
        assert "no generator" in kernel.said
    assert [outcome.status for outcome in report.outcomes] == ["agrees", "raises"]
    assert report.outcomes[1].detail == "keep raised OSError: no generator"


def test_what_it_is_given_and_what_is_no_result(file: Path) -> None:
    with Isolated(f"{file}:given") as kernel:
        found = call(kernel, INPUTS, {"number": 0.1, "word": "x"}, "bfloat16")
        assert isinstance(found, Result) and found.dtypes == {"out": "float32"}
        np.testing.assert_array_equal(found.tensors["out"], INPUTS["q"])
        with pytest.raises(CallError, match="raised AssertionError"):
            call(kernel, INPUTS, {"number": 0.2, "word": "x"}, "bfloat16")
    with Isolated(f"{file}:odd") as kernel:
        for what in ("dict", "none", "generator", "text", "complex", "objects", "uneven", "many", "nothing"):
            with pytest.raises(CallError, match="needs an array|returned"):
                call(kernel, INPUTS, {"what": what}, "float32")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import os; os._exit(0)", "loading it: ended its process with exit code 0; it said nothing"),
        ("import time; time.sleep(60.0)", "loading it: did not end within 0.5 s"),
        ("def attend(:", "raised SyntaxError"),
    ],
)
def test_what_cannot_be_loaded_is_said(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "kernel.py").write_text(source)
    with pytest.raises(LoadError, match=words) as raised:
        # A busy machine may take longer than half a second to start a process that ends by itself.
        Isolated(f"{tmp_path / 'kernel.py'}:attend", loading=0.5 if "0.5 s" in words else 60.0)
    assert str(raised.value).startswith("--impl ")


def test_what_cannot_be_started_again_fails_its_cases(tmp_path: Path) -> None:
    source = "import pathlib, sys\npathlib.Path(__file__).with_suffix('.mark').mkdir()\n"
    (tmp_path / "once.py").write_text(source + "\ndef attend(q, k, v):\n    import os; os._exit(5)\n")
    with Isolated(f"{tmp_path / 'once.py'}:attend") as kernel:
        with pytest.raises(CallError, match="exit code 5; it said nothing"):
            call(kernel, INPUTS, {}, "float32")
        for _ in range(2):
            with pytest.raises(CallError, match="cannot be started again: .*FileExistsError"):
                call(kernel, INPUTS, {}, "float32")


# What each does, and the line of its case; "" where it does its work all the same.
TROUBLES = {
    "fork": ("os.fork()", ""),
    "fork and exit": ("if os.fork() == 0: sys.exit(3)", ""),
    "leave a process that holds every descriptor": (
        "subprocess.Popen(['sleep', '321.5'], close_fds=False)\nif os.fork() == 0: time.sleep(321.5)",
        "",
    ),
    "leave one and end": (
        "subprocess.Popen(['sleep', '321.5'], start_new_session=True)\nos._exit(4)",
        "ended its process with exit code 4",
    ),
    "sys.exit": ("sys.exit(0)", "raised SystemExit: 0"),
    "interrupt": ("raise KeyboardInterrupt", "raised KeyboardInterrupt:"),
    "base": ("raise Base", "raised Base: a Base without a text"),
    "os._exit": ("os._exit(0)", "ended its process with exit code 0; it said nothing"),
    "close": ("os.closerange(3, 4096)", "its last words: it closed a descriptor that was not its own"),
    "close all": ("os.closerange(0, 4096)", "ended its process with exit code 1"),
    "close the streams": ("sys.stdout.close(); sys.stderr.close()", ""),
    "close descriptors 1 and 2": ("os.closerange(1, 3)", ""),
    "write everywhere": (
        "[os.write(n, b'stray') for n in range(3, 64) if is_open(n)]",
        "wrote to the pipe of its answers: b'stray",
    ),
    "print": ("while True: os.write(1, bytes(1 << 16))", "did not end within"),
    "large": ("return np.broadcast_to(q[0, 0, 0, 0], (1 << 40,))", "returned 4398046511104 bytes, needs at most"),
    "list": ("attend.intermediates = [q]", "intermediates: got list, needs a dict of arrays"),
    "array": ("attend.intermediates = q", "intermediates: got ndarray, needs a dict of arrays"),
    "numbers": ("attend.intermediates = {1: q}", "intermediates: got a dict with names that are no text"),
    "text": ("attend.intermediates = {'SM.1': 'x'}", "SM.1: got str, needs an array"),
}

TROUBLE = """
import os, subprocess, sys, time
import numpy as np

class Base(BaseException):
    def __str__(self):
        raise ValueError

def is_open(n):
    try:
        return bool(os.fstat(n))
    except OSError:
        return False

def attend(q, k, v, *, code):
    attend.intermediates = None
    space = dict(globals(), q=q)
    body = "def do():\\n" + "\\n".join("    " + line for line in code.split("\\n"))
    exec(body, space)
    found = space["do"]()
    return q if found is None else found
"""


def sleepers() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"321.5" in (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found


def test_trouble_is_a_line_of_its_case_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    found = {}
    with Isolated(f"{tmp_path / 'trouble.py'}:attend", seconds=5.0) as kernel:
        for name, (code, _) in TROUBLES.items():
            kernel.seconds = 0.5 if name == "print" else 30.0
            try:
                result = call(kernel, INPUTS, {"code": code}, "float32")
                assert isinstance(result, Result)
                np.testing.assert_array_equal(result.tensors["out"], INPUTS["q"])
                found[name] = ""
            except CallError as error:
                found[name] = str(error)
            if name == "close descriptors 1 and 2":
                assert "it closed its standard output and standard error, opened again" in kernel.said
        assert len(kernel.said) <= 4000
    assert not {name: got for name, got in found.items() if bool(got) != bool(TROUBLES[name][1])}
    assert not {name: got for name, got in found.items() if TROUBLES[name][1] not in got}
    assert not sleepers()


def test_a_kernel_in_this_process_that_closes_the_streams_loses_no_report(tmp_path: Path) -> None:
    """Nor if a file of its own takes their place."""
    (tmp_path / "closes.py").write_text(
        "import os\nimport refattn\n\ndef attend(q, k, v, **options):\n    os.closerange(1, 3)\n"
        "    return refattn.softmax.forward(q, k, v, **options)[0]\n\ndef takes(q, k, v, **options):\n"
        "    os.close(1)\n    os.open('own', os.O_CREAT | 1)\n    return refattn.softmax.forward(q, k, v)[0]\n"
    )
    said = "it closed its standard output and standard error, opened again; what it printed meanwhile is lost"
    for name in ("attend", "takes"):
        kernel = f"{tmp_path / 'closes.py'}:{name}"
        result = process("verify", "softmax", "--impl", kernel, "--in-process", *SMALL, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert "softmax: agrees: 1 case run" in result.stdout and (name == "takes" or said in result.stderr)


def test_a_tensor_without_numbers_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "meta.py").write_text(
        "import torch\ntorch.set_default_device('meta')\n\ndef attend(q, k, v):\n    return torch.tensor(q)\n\n"
        "def given(q, k, v):\n    return q\n\ngiven.framework = 'torch'\n"
    )
    for name, what in (("attend", "out"), ("given", "q")):
        with Isolated(f"{tmp_path / 'meta.py'}:{name}") as kernel, pytest.raises(CallError) as raised:
            call(kernel, INPUTS, {}, "float32")
        assert str(raised.value) == (
            f'{what}: got a tensor on the device "meta", which has no numbers; '
            'does the kernel call torch.set_default_device("meta")?'
        )


def test_bad_usage() -> None:
    def refused(*arguments: Any) -> str:
        found = CliRunner().invoke(cli, ["verify", "softmax", *arguments])
        assert found.exit_code == 2
        return found.stderr

    assert "needs seconds above 0" in refused("--impl", "a:b", "--timeout", "0")
    assert "got 'SM.1,SM.77', needs some of products, q, k, v, exponent and ids such as SM.1" in refused(
        "--impl", "a:b", "--rounding", "SM.1,SM.77"
    )
