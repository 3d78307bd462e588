"""What a type checker knows of a user's program: mypy and pyright find the wrong calls, and only these."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import refattn as ra

PROGRAM = """
import numpy as np
import refattn as ra
from refattn.verify import Isolated, check, locate, verify_case

q = np.ones((1, 2, 8, 4))


def attend(q, k, v, *, causal=False):
    return ra.softmax.forward(q, k, v, causal=causal)[0]


out, saved = ra.softmax.forward(q, q, q, causal=True, scale=0.5, window=(4, 0))
gradients = ra.softmax.backward(saved, np.ones_like(out))
print(gradients["q"].shape, saved.lse.shape, saved.implementation.upper())
ra.softmax.forward(q, q, q, causl=True)  # wrong
ra.softmax.forward(q, q)  # wrong
ra.softmax.forward(q, q, q, causal="middle")  # wrong
ra.softmx.forward(q, q, q)  # wrong
ra.softmax.backward(None, out)  # wrong
saved.lze  # wrong
ra.higher_order.forward(q, q, q, order=2, normaliser="signed")
ra.higher_order.forward(q, q, q, order="two")  # wrong
ra.koopman.forward(q, q, q, kernel=ra.koopman.Rbf(bandwidth=2.0))
ra.koopman.Rbf(bandwith=2.0)  # wrong
ra.sympformer.forward(q, q, q), ra.graph_energy.forward(q, q, q), ra.growing.forward(q, q, q)
ra.delta.forward(q, q, q, log_decay=-q[..., 0])
ra.delta.forward(q, q, q, decay=-q[..., 0])  # wrong

report = ra.verify("softmax", attend, dtypes=["float32"], grad=True)
if not report.passed:
    report.raise_if_failed()
if report and report.suspects is not None:
    print(report.suspects.ranked[0].kind.upper(), report.outcomes[0].verdicts[0].share + 1.0)
report.to_html("report.html")
report.pased  # wrong
ra.verify("softmax", attend, dtype=["float32"])  # wrong
ra.verify(3, attend)  # wrong
ra.assert_close("softmax", q, q, q, out, gradients, d_out=out, causal=True)
ra.assert_close("softmax", q, q, q)  # wrong
ra.explore("softmax", q, q, q, causal=True).to_html("page.html")
ra.explore("softmax", q, q)  # wrong

record = ra.mechanism("softmax")
print(record.case("tiny").options, record.cases[0].name.upper(), record.nmae)  # wrong
case = verify_case(record, attend, record.case("tiny"), "float32")
print(case.status.upper(), check(record).passed, locate(record, report).passed)
verify_case("softmax", attend, record.case("tiny"), "float32")  # wrong
with ra.trace() as t:
    print(t["SM.1"], t.passes("SM.1"), t.pass_("SM.1"))  # wrong
with Isolated("mine.py:attend") as kernel:
    ra.verify(record, kernel)
ra.Decline("no options"), ra.Context(causal=True), ra.tangent, ra.bridges, ra.list_mechanisms()[0].upper()
ra.Decline(reason=3)  # wrong
"""

WRONG = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]


def found_by_mypy(file: Path) -> list[int]:
    """Return the lines of the errors of mypy."""
    call = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--output", "json", "--cache-dir", str(file.parent)]
    found = run([*call, "--follow-imports", "silent", "--ignore-missing-imports", str(file)], file)
    rows = [json.loads(line) for line in found.splitlines()]
    return [row["line"] for row in rows if row["severity"] == "error" and Path(row["file"]).name == file.name]


def found_by_pyright(file: Path) -> list[int]:
    """Return the lines of the errors of pyright."""
    call = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(file)]
    found = json.loads(run(call, file))
    return [row["range"]["start"]["line"] + 1 for row in found["generalDiagnostics"] if row["severity"] == "error"]


def run(call: list[str], file: Path) -> str:
    root = str(Path(str(ra.__file__)).parents[1])
    place = {"MYPYPATH": root, "PYTHONPATH": root}
    return subprocess.run(call, capture_output=True, text=True, cwd=file.parent, env={**os.environ, **place}).stdout


@pytest.mark.parametrize(
    "checker",
    [pytest.param(found_by_mypy, id="mypy"), pytest.param(found_by_pyright, id="pyright")],
)
def test_wrong_calls_are_found_and_right_ones_pass(checker: Any, tmp_path: Path) -> None:
    name = checker.__name__.rpartition("_")[2]
    if importlib.util.find_spec(name) is None:
        pytest.skip(f'{name} is not installed: pip install "refattn[dev]"')
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    if name == "pyright":
        (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(Path(ra.__file__).parents[1])]}))
    found = checker(file)
    lines = PROGRAM.splitlines()
    missed = [lines[n - 1] for n in WRONG if n not in found]
    false = [lines[n - 1] for n in sorted({*found} - {*WRONG})]
    assert (missed, false) == ([], [])
