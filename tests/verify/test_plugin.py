"""The pytest plugin: a user's test runs on every case, says in one line what is wrong, and skips what is declined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import refattn as ra
from refattn.verify.plugin import GoldenCase

TESTS = """
import numpy as np
import pytest
import refattn as ra

def attend(q, k, v, *, mask=None, causal=False, scale=None, **options):
    if options or mask is not None:
        return ra.Decline("no options")
    return ra.softmax.forward(q, k, v, causal=causal, scale=scale)[0] * q.dtype.type(FACTOR)

@pytest.mark.golden("softmax", dtypes=["float32", "float16"], cases=["tiny", "causal", "softcap"])
def test_mine(golden_case):
    assert golden_case.inputs["q"].dtype == golden_case.dtype
    golden_case.check(attend)
"""


def run(text: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_user.py").write_text(text)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", "--rootdir", str(folder)]
    call = [sys.executable, "-m", "pytest", *options, *more, *loaded(), str(folder)]
    return subprocess.run(call, capture_output=True, text=True, env=environment())


def environment() -> dict[str, str]:
    """The environment of a process that imports this refattn."""
    return {**os.environ, "PYTHONPATH": str(Path(str(ra.__file__)).parents[1])}


def loaded() -> list[str]:
    """What loads the plugin where refattn is not installed."""
    from importlib.metadata import entry_points

    installed = any(entry.value == "refattn.verify.plugin" for entry in entry_points(group="pytest11"))
    return [] if installed else ["-p", "refattn.verify.plugin"]


def test_honest_and_wrong(tmp_path: Path) -> None:
    found = run(TESTS.replace("FACTOR", "1.0"), tmp_path)
    assert found.returncode == 0 and "4 passed, 2 skipped" in found.stdout and "no options" in found.stdout
    found = run(TESTS.replace("FACTOR", "1.01"), tmp_path)
    assert found.returncode == 1 and "4 failed, 2 skipped" in found.stdout
    line = next(line for line in found.stdout.splitlines() if line.startswith("softmax-causal-float32: out["))
    assert "needs" in line and "of the allowed error" in line
    suspect = line.partition("; suspect: ")[2]
    # A larger output is as good as a smaller sum of exponentials.
    larger, smaller = (
        "SM.5" in suspect and ": scaled by 1.01: 0." in suspect,
        "SM.total: scaled by 0.9901: 0." in suspect,
    )
    assert larger or smaller, suspect


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('"hardmax"', "got 'hardmax', needs one of softmax"),
        ('"softmax", cases=["none"]', "case: got 'none', needs one of tiny"),
        ('"softmax", cases=["causl"]', "case: got 'causl' (did you mean causal?), needs one of tiny"),
        ('"softmax", cases="causal"', "cases: got 'causal', needs a list of names"),
        ('"softmax", dtypes=["int8"]', "dtypes: got int8, needs some of float64"),
        ('"softmax", dtype=["int8"]', "got dtype (did you mean dtypes?), needs dtypes and cases alone"),
    ],
)
def test_what_is_unknown_is_told(marker: str, message: str, tmp_path: Path) -> None:
    start, _, rest = TESTS.partition('"softmax", dtypes')
    found = run(f"{start}{marker}{rest.partition(']')[2].partition(']')[2]}", tmp_path)
    assert found.returncode and "Traceback" not in found.stdout and "plugin.py" not in found.stdout
    (line,) = (line for line in found.stdout.splitlines() if line.startswith("test_user.py::test_mine: golden: "))
    assert message in line and "During handling" not in found.stdout


NAMED = """
import pytest

@pytest.mark.parametrize("golden_case", ["softmax-causal", "delta-tiny-bfloat16", "softmax-causl"], indirect=True)
def test_named(golden_case):
    assert str(golden_case) in ("softmax-causal-float32", "delta-tiny-bfloat16")
"""


def test_the_fixture_is_listed_and_takes_names(tmp_path: Path) -> None:
    found = run(NAMED, tmp_path)
    assert "2 passed" in found.stdout and "1 error" in found.stdout
    assert "golden_case: case: got 'causl' (did you mean causal?)" in found.stdout
    assert "During handling" not in found.stdout
    direct = run(NAMED.replace(", indirect=True", ""), tmp_path)
    assert "test_user.py::test_named: golden_case: got names of cases, needs indirect=True" in direct.stdout
    listed = run(NAMED, tmp_path, "--fixtures")
    assert "golden_case -- " in listed.stdout and "A designed case of a mechanism in a storage type" in listed.stdout


def test_a_case_tells_what_it_is() -> None:
    case = GoldenCase("softmax", "softcap", "bfloat16")
    assert str(case) == "softmax-softcap-bfloat16" and case.options == {"softcap": 5.0}
    outcome = case.check(lambda q, k, v, dtype, softcap: ra.softmax.forward(q, k, v, softcap=softcap)[0])
    assert outcome.status == "agrees" and [verdict.tensor for verdict in outcome.verdicts] == ["out"]
    with pytest.raises(pytest.fail.Exception, match="softmax-softcap-bfloat16: raised RuntimeError: no kernel"):
        case.check(_fails)


HANGS = """
import os
import refattn as ra

def crashes(q, k, v, *, causal=False):
    if causal:
        os._exit(7)
    return ra.softmax.forward(q, k, v)[0]

def declines(q, k, v):
    return ra.Decline("nothing yet")

class Products:
    def forward(self, q, k, v, **options):
        rounded = [x.view("uint32") // 8192 * 8192 for x in (q, k, v)]
        return ra.softmax.forward(*(x.view("float32") for x in rounded), **options)[0]
"""

USES = """
import pytest
import theirs

@pytest.mark.xfail
@pytest.mark.golden("softmax", cases=["tiny", "causal"])
def test_crash(golden_case):
    golden_case.check(theirs.crashes)

@pytest.mark.golden("softmax", cases=["tiny", "causal"])
def test_nothing(golden_case):
    golden_case.check("theirs:declines")

@pytest.mark.golden("softmax", cases=["tiny", "causal"])
def test_declared(golden_case):
    golden_case.check(theirs.Products, rounding=["q=bfloat16", "k=bfloat16", "v=bfloat16"])
"""


def test_a_kernel_has_its_own_process_and_nothing_run_is_red(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(HANGS)
    found = run(USES, tmp_path)
    assert "2 passed, 2 skipped, 1 xfailed, 1 xpassed" in found.stdout
    assert "FAILED test_user.py::test_nothing: nothing was run: every case was declined" in found.stdout
    assert found.returncode == 1


def _fails(q: object, k: object, v: object, dtype: str, **options: object) -> None:
    raise RuntimeError("no kernel")


def test_a_mechanism_that_is_mistyped_is_said_in_a_line(tmp_path: Path) -> None:
    found = run('import pytest\n@pytest.mark.golden("softmaxx")\ndef test_x(golden_case):\n    pass\n', tmp_path)
    text = found.stdout + found.stderr
    assert (
        "golden: mechanism: got 'softmaxx' (did you mean softmax?), needs one of softmax" in text
        and "pluggy" not in text
    )
    assert len(text.splitlines()) < 20
