"""Commands on a backend whose library is there and finds no device: one line says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from refattn import backends
from refattn.mechanisms import registry
from tests.cli.command import run

WHY = "cupy finds no CUDA device: cudaErrorInsufficientDriver: CUDA driver version is insufficient"
TINY = ["context=8", "width=4", "heads=1", "layers=1", "warmup=1", "batch=2", "score_bytes=300", "steps=2"]
SMALL = [word for each in TINY for word in ("--set", each)]


class CUDARuntimeError(RuntimeError):
    """What CuPy raises at whatever asks for a device, where there is no driver."""


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fails(*_: Any, **__: Any) -> Any:
        raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    cupy, compat = ModuleType("cupy"), ModuleType("array_api_compat.cupy")
    vars(cupy).update(__version__="14.0", ndarray=type("ndarray", (), {}), array=fails, asnumpy=fails)
    runtime = ModuleType("cupy.cuda.runtime")
    vars(runtime).update(getDeviceCount=fails, CUDARuntimeError=CUDARuntimeError)
    cuda = ModuleType("cupy.cuda")
    vars(cuda).update(runtime=runtime, Device=fails, get_current_stream=fails)
    vars(cupy).update(cuda=cuda)
    for module in (cupy, compat):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("array_api_compat.cupy", compat, raising=False)
    yield


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("to be or not to be, " * 50)
    return tmp_path / "text"


def refused(*words: Any) -> str:
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("refattn: error: ").rstrip("\n")


@pytest.mark.usefixtures("no_driver")
def test_every_command_says_why_a_backend_cannot_be_used(text: Path) -> None:
    assert backends.get("cupy").why_unavailable() == WHY
    told = f"backend: cupy cannot be used: {WHY}"
    toml = text.with_name("settings.toml")
    toml.write_text('backend = "cupy"\n')
    train = ("train", "softmax", "--data", text, *SMALL)
    assert refused("trace", "softmax", "--backend", "cupy") == told
    assert refused(*train, "--backend", "cupy") == told
    assert refused(*train, "--set", "backend=cupy") == told
    assert refused(*train, "--config", toml) == told
    assert not (text.parent / "runs").exists()  # nothing was begun
    assert run(*train, "--out", "run").exit_code == 0
    config = text.with_name("run") / "config.json"
    config.write_text(config.read_text().replace('"backend": "numpy"', '"backend": "cupy"'))
    assert refused("sample", "run", "--prompt", "to") == told
    assert refused("train", "softmax", "--resume", "--out", "run", "--steps", "3") == told
    with pytest.raises(ImportError, match=rf"^{told}$"):
        backends.usable("cupy")


@pytest.mark.usefixtures("no_driver")
def test_check_has_one_table_of_a_backend_that_cannot_be_used(tmp_path: Path) -> None:
    result = run("check", "--backend", "cupy", "--json", tmp_path / "report.json")
    assert result.exit_code == 3 and result.stdout.count(WHY[:40]) == 1
    names = registry.list_mechanisms()
    assert [line for line in result.stdout.splitlines() if "nothing was run" in line] == [
        f"{name} on cupy: nothing was run: 0 checks agree, 0 disagree, 1 not run" for name in names
    ]
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert [one["rows"][0]["detail"] for one in checks] == [WHY] * len(names)
