"""``refattn golden``: sets are written, checked and shown, and what is no whole set has its exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import equations
from refattn.golden import tensors, vectors
from refattn.verify import onnx_export
from refattn.verify.selfcheck.samples import shrunk
from tests.cli.command import run
from tests.thinned import thinned
from tests.verify.test_freeze import written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("golden") / "set").folder


def test_a_set_agrees_or_its_worst_case_is_told(folder: Path) -> None:
    found = run("golden", "check", str(folder), "--json", "-")
    assert found.exit_code == 0 and json.loads(found.stdout)["failed"] == []
    assert "golden vectors: 3 cases: all agree" in found.stderr
    with equations.apply(lambda id, name, value: value * 1.001 if id == "SM.1" else value):
        found = run("golden", "check", str(folder))
    assert found.exit_code == 1 and "3 disagree" in found.stdout and "softmax/tiny" in found.stdout


def test_cases_and_arrays_are_shown(folder: Path) -> None:
    found = run("golden", "show", str(folder))
    assert found.exit_code == 0 and "softmax/mask-full" in found.stdout and "sha256" in found.stdout
    found = run("golden", "show", str(folder), "--case", "softmax/mask-full")
    assert found.exit_code == 0 and "bool/mask" in found.stdout and "equations/SM.1" in found.stdout
    found = run("golden", "show", str(folder), "--case", "softmax/none")
    assert found.exit_code == 2 and "needs one of softmax/tiny, softmax/mask-full" in found.stderr


@pytest.mark.parametrize("command", ["check", "show"])
def test_exit_codes_of_what_is_no_set(command: str, folder: Path, tmp_path: Path) -> None:
    assert run("golden", command, str(tmp_path / "none")).exit_code == 2
    assert run("golden", command, str(tmp_path)).exit_code == 3
    (tmp_path / "manifest.json").write_text("{")
    found = run("golden", command, str(tmp_path))
    assert found.exit_code == 2 and "refattn: error:" in found.stderr


def test_a_folder_is_not_written_over(folder: Path, tmp_path: Path) -> None:
    before = (folder / "manifest.json").read_bytes()
    for args in ([str(folder)], [str(folder), "softmax", "--size", "big"], [str(folder), "hardmax"]):
        assert run("golden", "write", *args).exit_code == 2
    (tmp_path / "letter.txt").write_text("mine")
    assert run("golden", "write", str(tmp_path), "softmax", "--replace").exit_code == 2
    assert (folder / "manifest.json").read_bytes() == before and (tmp_path / "letter.txt").exists()


# --- sets whose sums are right


def forged(folder: Path, copy: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """A set with the entry and the arrays of its first case changed, and all sums made anew."""
    shutil.copytree(folder, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    entry = manifest["cases"][0]
    arrays = tensors.decode((copy / entry["file"]).read_bytes())
    change(entry, arrays)
    data = tensors.encode(arrays)
    (copy / entry["file"]).write_bytes(data)
    entry |= {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    manifest["sha256"] = vectors._of_all(manifest["cases"])
    manifest["manifest_sha256"] = vectors._of_manifest(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def _input_of_float32(entry: dict[str, Any], arrays: dict[str, Any]) -> None:
    kind, x = arrays["float32/q"]
    arrays["float32/q"] = kind, x * np.float32(2.0)


def _budgets(entry: dict[str, Any], arrays: dict[str, Any]) -> None:
    for name in [name for name in arrays if name.startswith("granted/float32")]:
        arrays[name] = arrays[name][0], arrays[name][1] + np.float32(1e6)


FORGED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "nothing": (lambda entry, arrays: None, ""),
    "noise": (lambda entry, arrays: entry["results"]["out"].update(noise=1e6), "results.out.noise"),
    "noise of an equation": (
        lambda entry, arrays: entry["equations"]["SM.1"].update(noise=1e6),
        "equations.SM.1.noise",
    ),
    "what derivations differ by": (
        lambda entry, arrays: entry["equations"]["SM.1"].update(differs=1.5),
        "equations.SM.1.differs",
    ),
    "kind": (lambda entry, arrays: entry.update(kind="odd"), "kind: "),
    "bias": (lambda entry, arrays: entry["results"]["out"]["bias"].update(float32=1e6), "results.out.bias"),
    "stored": (lambda entry, arrays: entry["results"]["out"]["stored"].update(float32="float16"), "results.out.stored"),
    "budgets": (_budgets, "granted/float32/"),
    "inputs": (_input_of_float32, "float32/q: the generator gives other numbers"),
    "options": (lambda entry, arrays: entry["options"].update(scale=2.0), "options: "),
    "design": (lambda entry, arrays: entry["inputs"]["q"].update(seed=1), "inputs: "),
}


@pytest.mark.parametrize("how", thinned([*FORGED], 3))
def test_what_the_package_says_otherwise_is_a_failed_check(how: str, folder: Path, tmp_path: Path) -> None:
    change, where = FORGED[how]
    found = run("golden", "check", str(forged(folder, tmp_path / "set", change)), "--json", "-")
    failed = json.loads(found.stdout)["failed"]
    assert found.exit_code == (1 if where else 0) and len(failed) == bool(where), found.stderr
    assert not where or (failed[0]["where"].startswith(where) and failed[0]["share"] is None)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda manifest: manifest["limits"].update(element=1e9), "limits: got"),
        (lambda manifest: manifest["conventions"].update(causal="none"), "conventions: got"),
        (lambda manifest: manifest["mechanisms"]["softmax"]["defaults"].update(scale=2.0), "softmax.defaults: got"),
        (lambda manifest: manifest["mechanisms"]["softmax"]["outputs"].append("x"), "softmax.outputs: got"),
    ],
)
def test_what_a_set_says_of_all_its_cases_is_what_the_package_says(
    change: Callable[[dict[str, Any]], object], where: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "set")
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    manifest["manifest_sha256"] = vectors._of_manifest(manifest)
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    found = run("golden", "check", str(tmp_path / "set"))
    assert found.exit_code == 2 and where in found.stderr


def test_what_is_no_format_or_has_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    for words, said in (
        (("there", "softmax", "--format", "onnx"), "needs a new or empty folder"),
        (("x", "higher_order", "--format", "onnx"), "--format onnx: "),
        (("x", "softmax", "--format", "npz"), "--format: got 'npz', needs one of safetensors, onnx"),
    ):
        found = run("golden", "write", str(tmp_path / words[0]), *words[1:])
        assert found.exit_code == 2 and said in found.stderr, found.stderr


def test_models_have_data_that_runtimes_agree_with(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    record = ra.mechanism("softmax")
    cases = {name: shrunk(record.case(name)) for name in ("causal-tail", "mask-full", "softcap", "sink")}
    models, sets, left = onnx_export.write_onnx(tmp_path, [(record, case) for case in cases.values()])
    assert (models, sets) == (6, 6) and [*left] == ["the operator has no option sink"]
    assert list(onnx_export.checked(tmp_path, cases, record)) == []
    places = sorted(file.parent for file in tmp_path.glob("*/test_data_set_0/output_0.pb"))
    assert len(places) == 6 and all((place.parent / "model.onnx").is_file() for place in places)
    file = next(tmp_path.glob("attention_float32*softcap*")) / "model.onnx"
    model = onnx.load(str(file))
    next(one for one in model.graph.node[0].attribute if one.name == "softcap").f = 0.5
    file.write_bytes(model.SerializeToString())
    wrong = list(onnx_export.checked(tmp_path, cases, record))
    assert [runtime for _, runtime, _ in wrong] == ["onnxruntime", "onnx reference"]
    assert all("case softcap: out" in told for *_, told in wrong)
