"""The package examples/guests: from a folder outside of the checkout every command works on its mechanisms."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn.mechanisms import registry
from tests.cli.command import run

GUESTS = Path(__file__).parents[2] / "examples" / "guests"

NAMES = ("hopfield", "power")

KERNELS = """
from guests import hopfield, power


def completed(q, k, v, **options):
    return hopfield.forward(q, k, v, **options)[0]


def once_more(q, k, v, *, updates=2, **options):
    return hopfield.forward(q, k, v, updates=updates + 1, **options)[0]


def raised(q, k, v, **options):
    return power.forward(q, k, v, **options)[0]


def raised_higher(q, k, v, *, p=2, **options):
    return power.forward(q, k, v, p=p + 2, **options)[0]
"""

SMALL = {"width": 8, "heads": 2, "layers": 1, "context": 8, "batch": 2, "sample_bytes": 4, "score_bytes": 64}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the package, as if it was installed, and with what its metadata says."""
    shutil.copytree(GUESTS / "src", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    groups = tomllib.loads((GUESTS / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "refattn_guests-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: refattn-guests\nVersion: 0.1.0\n")
    lines = [f"{name} = {value}" for name, value in groups["refattn.mechanisms"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[refattn.mechanisms]", *lines, ""]))
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("guests", "kernels")]:
        del sys.modules[name]


def done(*words: Any) -> str:
    result = run(*words)
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result.stdout


def test_they_are_listed_by_their_names() -> None:
    assert registry.declared() == NAMES
    printed = done("list")
    assert "Modern Hopfield attention" in printed and "Power attention" in printed and "dense, chunked" in printed
    claims = {row["mechanism"] for row in json.loads(done("list", *NAMES, "--claims", "--json", "-"))}
    assert claims == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_sees_definition_trace_and_tour(name: str) -> None:
    own: dict[str, Any] = {}
    exec(done("show", name), own)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 5, 4))
    core: Any = ra.mechanism(name).core
    (out, given), (expected, saved) = own["forward"](q, k, v), core.forward(q, k, v)
    np.testing.assert_allclose(out, expected, rtol=1e-13)
    gradients = own["backward"](given, v)
    for name_of, x in core.backward(saved, v).items():
        np.testing.assert_allclose(gradients[name_of], x, rtol=1e-12, atol=1e-14)
    assert f"guests/{name}/definition.py:" in done("trace", name)
    done("trace", name, "--html", "tour.html")
    assert "These are all values, and no tour" not in Path("tour.html").read_text(encoding="utf-8")
    done("trace", name, "--block", "--set", "updates=3" if name == "hopfield" else "p=4", "--json", "block.json")
    ran = [step["id"] for step in json.loads(Path("block.json").read_text(encoding="utf-8"))["forward"]]
    assert "MHA.output" in ran and (name == "power" or "HOP.3[2]" in ran)


@pytest.mark.parametrize(("name", "right", "wrong", "says"), [
    ("hopfield", "completed", "once_more", "one update more"),
    ("power", "raised", "raised_higher", "the next power"),
])  # fmt: skip
def test_a_kernel_is_verified(name: str, right: str, wrong: str, says: str) -> None:
    call = ("verify", name, "--dtype", "float32", "--quick", "--impl")
    done(*call, f"kernels:{right}")
    result = run(*call, f"kernels:{wrong}")
    assert result.exit_code == 1 and says in result.stdout


def test_an_adapter_of_a_definition_gives_the_gradients_of_its_options() -> None:
    done("verify", "hopfield", "--init", "numpy")
    result = run("verify", "hopfield", "--impl", "attend_numpy.py:Attend", "--grad", "--quick", "--dtype", "float16")
    assert result.exit_code == 0 and " 0 declined" in result.stdout and "d_beta" in result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_its_golden_vectors_are_frozen(name: str) -> None:
    printed = done("golden", "check", f"guests/{name}/golden", name, "-j", 1)
    assert "all agree" in printed and "no vector" not in printed
    Path("results").mkdir()
    result = run("verify", name, "--outputs", "results")
    assert result.exit_code == 3 and "there is no file" in result.stdout


@pytest.mark.parametrize(("name", "option"), [("hopfield", "updates=3"), ("power", "p=4")])
def test_a_model_of_it_is_trained(name: str, option: str) -> None:
    sets = [word for key, x in SMALL.items() for word in ("--set", f"{key}={x}")]
    done("train", name, "--steps", 1, "--data", "repeats", "--set", f"block.{option}", *sets)
    stored = json.loads(Path("runs", name, "config.json").read_text(encoding="utf-8"))["settings"]
    assert stored["mechanism"] == name and stored["block"] == {option[:-2]: int(option[-1])}
    assert done("sample", f"runs/{name}", "--prompt", "a", "--bytes", 2, "--mechanism", name).startswith("a")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_certifies_itself(name: str) -> None:
    rows = json.loads(done("check", name, "--json", "-"))["checks"][0]["rows"]
    assert {row["status"] for row in rows if row["section"] == "vectors"} == {"agrees"}


@pytest.mark.slow
def test_it_is_installed_and_passes_its_own_tests(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone, site = here / "clone", here / "site"
    shutil.copytree(GUESTS, clone, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(clone)], check=True)
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{Path(ra.__file__).parents[1]}"}
    away = here / "away"
    away.mkdir()
    listed = subprocess.run(
        [sys.executable, "-m", "refattn", "list", "--json", "-"], env=env, cwd=away, check=True, stdout=subprocess.PIPE
    )
    assert [row["name"] for row in json.loads(listed.stdout)][-2:] == [*NAMES]
    for name in NAMES:
        assert (site / "guests" / name / "golden" / "manifest.json").is_file()
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(clone / "tests")]
    subprocess.run(tests, env=env, cwd=away, check=True)
