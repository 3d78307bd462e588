"""Commands as tests run them, and a kernel that they are given."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from refattn.cli import cli
from tests.processes import ROOT

SMALL = ("--shape", "b=1,h=2,nq=3,nk=4,d=4", "--dtype", "float32")

# Softmax attention in plain NumPy, right and wrong in many ways: a user's file.
KERNELS = """
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
    return ((weights @ v) / np.where(total == 0.0, 1.0, total)).astype(dtype)


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


def interrupted(q, k, v, **options):
    raise KeyboardInterrupt
"""


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


def terminal(*arguments: object, **environment: str) -> tuple[int, str]:
    """Run a command whose output and errors go to a terminal; return its exit code and what is shown there."""
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    env |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"} | environment
    command = [sys.executable, "-m", "refattn", *map(str, arguments)]
    with subprocess.Popen(command, env=env, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # Linux says the end like this
            while part := os.read(ours, 65536):
                seen += part
    os.close(ours)
    return child.returncode, seen.decode("utf-8", "replace").replace("\r\n", "\n")


def facts(text: str) -> Any:
    """Read JSON as other languages do: without NaN and Infinity."""

    def refuse(token: str) -> None:
        raise AssertionError(token)

    return json.loads(text, parse_constant=refuse)
