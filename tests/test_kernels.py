"""Kernels side by side: the page is made of what is stored, that is of the adapters as they stand, and it is so."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import refattn as ra
from refattn.verify.run import verify
from tools.kernels import HOME, PAGE, Kernel, joined, listed, page, row, since, stored, verified

KERNELS, ABSENT = listed()
SAMPLE = ("NumPy, the formula", "PyTorch, math", "ONNX Runtime, GroupQueryAttention", "Pallas for GPUs, flash")


def test_the_page_is_of_what_is_stored() -> None:
    assert PAGE.read_text("utf-8") == page(KERNELS, ABSENT, stored())
    assert len(stored()) >= 25 and {*stored()} <= {kernel.name for kernel in KERNELS}


@pytest.mark.parametrize("kernel", [x for x in KERNELS if x.name in stored()], ids=lambda kernel: kernel.name)
def test_what_is_stored_is_of_the_adapter_as_it_stands_and_explained(kernel: Kernel) -> None:
    found = stored()[kernel.name]
    assert found["digest"] == kernel.digest
    failed = any(one["failed"] for one in found["types"].values())
    assert failed == bool(kernel.differs)
    assert sum(one["run"] for one in found["types"].values()) > 0
    adapter = HOME / kernel.adapter.partition(":")[0]
    if adapter.parent == HOME:  # those of examples/ are not of one version
        assert kernel.version in adapter.read_text("utf-8").partition('"""\n\n')[0].replace("\n", " ")


def test_all_that_lies_there_is_run() -> None:
    named = {kernel.adapter.partition(":")[0] for kernel in KERNELS}
    texts = "".join(file.read_text("utf-8") for file in HOME.glob("*.py"))
    helpers = {f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", texts, re.MULTILINE)}
    assert {file.name for file in HOME.glob("*.py")} <= named | helpers
    assert {file.stem for file in (HOME / "requirements").iterdir()} == {kernel.environment for kernel in KERNELS}


def test_a_row_says_what_failed_and_the_worst_of_the_others() -> None:
    def attend(q: Any, k: Any, v: Any, *, causal: Any = False) -> Any:
        return ra.softmax.forward(q, k, v * (1.5 if causal else 1.0), causal=causal)[0]

    record = ra.mechanism("softmax")
    few = record.changed(cases=tuple(map(record.case, ("tiny", "causal", "softcap"))), kernel_sizes=())
    kernel = Kernel("Mine", "numpy_formula.py:attend", "numpy", types=("float32",), differs="It is wrong:")
    found = row(kernel, verify(few, attend, dtypes=["float32"]).to_json(), 1.0)
    one = found["types"]["float32"]
    assert (one["run"], one["declined"], [*one["failed"]]) == (2, 1, ["causal"])
    assert 0 < one["share"] < 1 < one["failed"]["causal"]
    assert found["classes"] == {"plain": [1, 1], "causal": [0, 1]}
    text = page([kernel], [{"name": "theirs", "reason": "no"}], {"Mine": found})
    assert "| Mine | numpy 2.4.6 | 3 | **1 of 2**, >1000, others" in text or "**1 of 2**" in text
    assert "- **Mine**: It is wrong: `causal`." in text and "- **theirs**: no" in text


def test_since_which_version_a_package_is_right() -> None:
    kernel = Kernel("Mine", "numpy_formula.py:attend", "numpy")
    version = kernel.version.split()[1]

    def ran(failed: int, version: str = version) -> dict[str, Any]:
        cases = {f"case{n}": 2.0 for n in range(failed)}
        types = {"float32": {"run": 5, "declined": 0, "share": 0.5, "failed": cases}}
        return {"digest": version, "version": version, "types": types}

    found = ran(0)
    assert since(kernel, found) == f"{version} or before" and since(kernel, ran(1)) == "–"
    found = joined(found, ran(0, "1.10.0"), True)
    assert since(kernel, found) == "1.10.0 or before" and found["digest"] == version
    found = joined(found, ran(0, "99.0"), True)  # later than the one in the table
    found = joined(found, ran(2, "1.9.0"), True)
    assert since(kernel, found) == "1.10.0 (1.9.0: **3 of 5**)"
    # The package has a newer version in the list: the one of before has become another version.
    before = {**ran(1, "1.11.0"), "versions": {version: [5, 5], "1.9.0": [3, 5]}}
    found = joined(before, ran(0), False)
    assert found["versions"] == {"1.9.0": [3, 5], "1.11.0": [4, 5]}
    assert since(kernel, found) == f"{version} (1.11.0: **4 of 5**)"
    # A row from before versions were kept has none.
    old = {name: x for name, x in ran(1).items() if name != "version"}
    assert joined(old, ran(0), False) == ran(0)


def test_another_version_is_installed_in_its_place() -> None:
    for kernel in KERNELS:
        package, version = kernel.version.split()
        other = replace(kernel, other="0.0.1")
        assert other.version == f"{package} 0.0.1" and kernel.installed == kernel.requirements.read_text("utf-8")
        lines = zip(kernel.installed.splitlines(), other.installed.splitlines(), strict=True)
        ((before, after),) = (pair for pair in lines if len({*pair}) == 2)
        assert before.replace(f"=={version}", "==0.0.1") == after


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_it_is_so(name: str, tmp_path: Path) -> None:
    kernel = next(kernel for kernel in KERNELS if kernel.name == name)
    package, version = kernel.version.split()
    try:
        installed = metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        pytest.skip(f"needs {package}")
    if installed != version:
        pytest.skip(f"needs {package} {version}")
    found = row(kernel, verified(kernel, sys.executable, tmp_path, 900.0), 1.0)["types"]
    for dtype, one in stored()[name]["types"].items():
        assert (found[dtype]["run"], found[dtype]["declined"]) == (one["run"], one["declined"])
        assert {*found[dtype]["failed"]} == {*one["failed"]}
