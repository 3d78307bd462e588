"""What a user begins with: adapters that run, JUnit's XML, and the action of a workflow."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn.cli import cli
from refattn.cli.init_adapter import ADAPTERS
from refattn.verify import Isolated, Program, load, verify, verify_case
from refattn.verify.outcome import CheckReport, Row
from refattn.verify.report.junit import junit

RECORD = ra.mechanism("softmax")
RECORD = replace(RECORD, cases=tuple(RECORD.case(name) for name in ("tiny", "grouped", "causal-tail", "empty-rows")))
ROOT = Path(__file__).parents[2]


COMPILES = ("jax", "pallas")  # for each case, which takes seconds
LIBRARY = {"pallas": "jax"}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k in COMPILES else k for k in ADAPTERS if k != "fla"]
)
def test_a_template_runs_and_agrees(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli, ["verify", "softmax", "--init", kind])
    (path,) = tmp_path.iterdir()
    assert found.exit_code == 0 and path.name in found.stdout and "MECHANISM" not in path.read_text()
    assert CliRunner().invoke(cli, ["verify", "softmax", "--init", kind]).exit_code == 2  # nothing is overwritten
    if kind == "c":
        if not (compiler := shutil.which("cc")):
            pytest.skip("there is no compiler")
        subprocess.run([compiler, "-Wall", "-Werror", "-o", "attend", path, "-lm"], check=True)
        kernel: Any = Program("./attend", ("out", "lse"), 10.0)
        declined = 1  # a mask
    else:
        if not importlib.util.find_spec(
            LIBRARY.get(kind, kind)
        ):  # an import of Triton here would be too early to interpret it
            pytest.skip(f"needs {kind}")
        interpreted = kind in ("triton", "pallas")
        spec, declined = f"{path}:{'Attend' if kind == 'numpy' else 'attend'}", int(interpreted)  # a mask
        kernel = Isolated(spec) if interpreted else load(spec)
        request.addfinalizer(getattr(kernel, "close", int))
    report = verify(RECORD, kernel, dtypes=["float32"], grad=kind != "c")
    expected = {"run": 4 - declined, "agreed": 4 - declined, "failed": 0, "declined": declined}
    assert report.counts()["all"] == expected, [each.detail for each in report.outcomes]


@pytest.mark.parametrize("name", ["growing", "delta", "higher_order", "graph_energy", "koopman", "sympformer"])
def test_a_template_agrees_with_its_own_mechanism_or_there_is_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("torch", "jax", "triton", "c") if name != "growing" else ():  # attention is no other mechanism
        found = CliRunner().invoke(cli, ["verify", name, "--init", kind])
        assert found.exit_code == 2 and f"in which there is no kernel of {name}" in found.stderr
    found = CliRunner().invoke(cli, ["verify", name, "--init", "numpy"])
    if name in ("koopman", "sympformer"):  # whose designed cases have options that the definition does not have
        assert found.exit_code == 2 and f"refattn show {name} prints it" in found.stderr and not [*tmp_path.iterdir()]
        return
    assert found.exit_code == 0 and f"refattn verify {name} --impl attend_numpy.py:Attend" in found.stdout
    record = ra.mechanism(name)
    few = record.changed(cases=record.cases[:24], kernel_sizes=())
    report = verify(few, load("attend_numpy.py:Attend"), dtypes=["float64", "float16"], grad=True)
    counts = report.counts()["all"]
    assert counts["agreed"] == counts["run"] > 3, [one.detail for one in report.failed]


def test_the_template_of_fla_is_of_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli, ["verify", "softmax", "--init", "fla"])
    assert found.exit_code == 2 and "--init: got fla for softmax, needs delta" in found.output
    assert CliRunner().invoke(cli, ["verify", "delta", "--init", "fla"]).exit_code == 0
    compile((tmp_path / "attend_fla.py").read_text(), "attend_fla.py", "exec")
    if not all(map(importlib.util.find_spec, ("fla", "torch", "triton"))):
        pytest.skip("needs fla-core and triton")
    record = ra.mechanism("delta")
    with Isolated(f"{tmp_path}/attend_fla.py:attend", 300.0, 300.0) as kernel:
        assert verify_case(record, kernel, record.case("tiny"), "float32", grad=True).status == "agrees"


@pytest.mark.parametrize(
    "has",
    [
        "if q.dtype == 'float64': raise ValueError('no')",
        pytest.param("q = q.astype('float32')", marks=pytest.mark.slow),
    ],
)
def test_float64_is_left_out_where_it_is_not_there(has: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refattn.mechanisms.softmax.record", replace(RECORD, kernel_sizes=()))
    path = tmp_path / "kernel.py"
    path.write_text(
        f"import refattn as ra\ndef attend(q, k, v):\n    {has}\n    k, v = k.astype(q.dtype), v.astype(q.dtype)\n"
        "    return ra.softmax.forward(q, k, v)[0]\n"
    )
    call = ["verify", "softmax", "--impl", f"{path}:attend", "--in-process"]
    found = CliRunner().invoke(cli, call)
    assert "float64 was left out, which it does not have" in found.stdout and "--dtype float64" in found.stdout
    assert CliRunner().invoke(cli, [*call, "--dtype", "float64"]).exit_code == 1


def test_junit_has_a_test_for_each_case() -> None:
    def attend(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        return ra.softmax.forward(q, k, v)[0]

    suite = ElementTree.fromstring(junit(verify(RECORD, attend, dtypes=["float32"])))[0]
    assert dict(suite.attrib) == {
        "name": "refattn verify softmax",
        "tests": "4",
        "failures": "1",
        "skipped": "1",
        "errors": "0",
    }
    tests = {(one.get("classname"), one.get("name")): [child.tag for child in one] for one in suite}
    assert tests["refattn.softmax.float32", "causal-tail"] == ["failure"]
    assert tests["refattn.softmax.float32", "empty-rows"] == ["skipped"]
    assert "of the allowed error" in str(suite.find("testcase/failure").get("message"))  # type: ignore[union-attr]
    rows = (
        Row("properties", "causal", "not run", None, "declined: \x1b[31m"),
        Row("properties", "rows", "disagrees", 2.0, "no"),
    )
    suite = ElementTree.fromstring(junit(CheckReport("softmax", "mine", False, rows)))[0]
    assert (suite.get("failures"), suite.get("skipped")) == ("1", "1")
    suite = ElementTree.fromstring(junit(CheckReport("softmax", "mine", False, rows[:1])))[0]
    assert suite.get("failures") == "1"  # nothing was run


def test_the_action_gives_the_command_what_it_was_given(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / ".github/actions/verify/action.yml").read_text())
    step = action["runs"]["steps"][-1]
    program = tmp_path / "refattn"
    program.write_text('#!/bin/sh\nfor x in "$@"; do echo "<$x>"; done\nexit 3\n')
    program.chmod(0o755)
    given = {name: str(each.get("default", "")) for name, each in action["inputs"].items()}
    given |= {"impl": "my kernel.py:attend; false", "dtypes": "float32 bfloat16", "args": "--grad --seed 7"}
    env = {name: given[value.removeprefix("${{ inputs.").removesuffix(" }}")] for name, value in step["env"].items()}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary"}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    found = subprocess.run(shell, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert found.returncode == 3 and (tmp_path / "output").read_text() == "exit-code=3\n"
    wanted = ["verify", "softmax", "--grad", "--seed", "7", "--dtype", "float32", "--dtype", "bfloat16"]
    wanted += ["--impl", "my kernel.py:attend; false", "--junit", "report.xml", "--json", "report.json"]
    assert found.stdout.split("\n")[:-1] == [f"<{x}>" for x in (*wanted, "--html", "report.html")]
    summary = (tmp_path / "summary").read_text()
    assert summary == (tmp_path / "comment.md").read_text()
    assert summary.startswith("### refattn verify softmax: exit code 3\n\n```text\n<verify>\n<softmax>\n")
    files = {f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
    assert {each["value"] for name, each in action["outputs"].items() if name != "exit-code"} <= files


@pytest.mark.parametrize("mechanism", ["softmax", "delta"])
def test_benchmarks_of_ones_own_kernel(mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A right kernel, a wrong one, one that raises and one of another shape each have their number."""
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli, ["verify", mechanism, "--init", "asv"])
    assert found.exit_code == 0 and "asv run ALL" in found.stdout
    again = CliRunner().invoke(cli, ["verify", mechanism, "--init", "asv"])
    assert again.exit_code == 2 and "needs a folder without it" in again.stderr
    settings = json.loads(Path("asv.conf.json").read_text("utf-8"))
    assert "{wheel_file} " in settings["install_command"][0]
    names: dict[str, Any] = {"__name__": "attention"}
    exec(Path("benchmarks/attention.py").read_text("utf-8").replace("n=256", "n=64"), names)
    forward = ra.mechanism(mechanism).core.forward  # type: ignore[union-attr]
    benchmark, shape = names["Kernel"](), names["SHAPES"][0]
    names["kernel"] = lambda **given: forward(**given)[0]
    benchmark.setup(shape)
    benchmark.time_forward(shape)
    assert 0.0 < benchmark.track_share(shape) <= 1.0
    names["kernel"] = lambda **given: 1.1 * forward(**given)[0]
    assert 1.0 < benchmark.track_share(shape) <= 1e6
    for wrong in (
        lambda **given: 1 / 0,
        lambda **given: forward(**given)[0][:, :1],
        lambda **given: np.nan * given["v"],
    ):
        names["kernel"] = wrong
        assert benchmark.track_share(shape) == 1e6


@pytest.mark.parametrize(
    ("place", "needed"),
    [
        (None, f"refattn=={ra.__version__}"),
        ('{"url": "file:///a/refattn", "dir_info": {}}', "file:///a/refattn"),
        ('{"url": "https://b/c", "vcs_info": {"vcs": "git", "commit_id": "d0"}}', "git+https://b/c@d0"),
    ],
)
def test_benchmarks_install_refattn_from_where_it_came(
    place: str | None, needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    installed = SimpleNamespace(version=ra.__version__, read_text=lambda name: place)
    monkeypatch.setattr("refattn.cli.init_adapter.metadata.distribution", lambda name: installed)
    assert CliRunner().invoke(cli, ["verify", "softmax", "--init", "asv"]).exit_code == 0
    assert f"{{wheel_file}} {needed}" in json.loads(Path("asv.conf.json").read_text("utf-8"))["install_command"][0]


def test_the_hook_of_pre_commit_runs_the_command() -> None:
    yaml = pytest.importorskip("yaml")
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("refattn-verify", "python", False)
    name, *words = hook["entry"].split()
    assert name in entry_points(group="console_scripts").names and words == ["verify"]
