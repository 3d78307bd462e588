"""The commands that pages and examples show run: from a wheel, in a folder with the files that a reader would have."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import refattn as ra
from tests.test_docs import commands

ROOT = Path(__file__).parents[2]

MINE = """
import refattn as ra


def attend(q, k, v, *, dtype=None, descale=None, **options):
    if descale is not None:
        return ra.Decline("no factors")
    out, saved = ra.softmax.forward(q, k, v, **options)
    return out
"""

READS = ("verify", "trace", "show", "list", "golden", "backends")
WORKS = ("check", "train", "sample", "plot", "analyse")
"""What takes long; a training is run for two steps on a short text."""

CALLED = """
import numpy as np


def function(q, k, v, *, is_causal=False, sm_scale=None):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if sm_scale is None else sm_scale)
    if is_causal:
        scores = np.where(np.tril(np.ones(scores.shape[2:], bool)), scores, -np.inf)
    largest = np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    sums = np.sum(weights, axis=-1, keepdims=True)
    return (weights / sums @ v).swapaxes(1, 2), (largest + np.log(sums))[..., 0]
"""
"""What `--call` is shown with: batch, token, head, width, and a causal mask from the top left."""

NEEDS = (
    *"--exec --outputs --init MECHANISM NAME FILE DIR ... [ vectors frozen > \\ =mine: docs/studies STUDY".split(),
    *("HOST", "tcp:", "preset", "--set block.coupling=mine", "--grow 200"),
)
"""What is no whole command, runs on what a reader has written before, or is there a second time."""


def of_pages() -> list[str]:
    """Return the commands of pages that run on their own, once each."""
    # those of packages that have to be installed run in test_wild.py
    lines = dict.fromkeys(found.text.strip() for found in commands() if not found.page.endswith("wild.md"))
    known = [x for x in lines if x.split()[0] in (*READS, *WORKS)]
    whole = [x for x in known if re.fullmatch(r"backends|list.*|golden check|check -v.*|\w+ [a-z].*", x)]
    bare = ("golden write", "analyse lyapunov", "analyse clusters")  # their names alone
    return [x for x in whole if x not in bare and not any(word in x for word in NEEDS)]


def shortened(words: list[str]) -> list[str]:
    """Return a training of two steps on a short text, or of one more where it goes on; other commands as they are."""
    if words[0] != "train":
        return words
    steps = "3" if "--resume" in words and "--steps" in words else "2"
    if "--steps" in words:
        words[words.index("--steps") + 1] = steps
    elif "--resume" not in words:
        words += ["--steps", steps]
    return words if {"--data", "--resume"} & {*words} else [*words, "--data", "my_text.txt"]


def of_examples() -> list[str]:
    """Return the commands that examples show in their docstrings."""
    texts = (file.read_text(encoding="utf-8") for file in sorted((ROOT / "examples").glob("*.py")))
    shown = [line for text in texts for line in re.findall(r"^ *refattn (verify .*?)(?:  +#.*)?$", text, re.M)]
    return list(dict.fromkeys(shown))


def needed(command: str) -> list[str]:
    """Return the libraries that a command needs."""
    told = command.replace("onnx_", "onnxruntime").replace("ring.py:ring", "torch").replace(".onnx", " onnxruntime")
    return [name for name in ("torch", "jax", "onnxruntime") if name in told]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a wheel of this tree is installed in: whoever installs it has nothing else of the tree."""
    tree, target = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("site")
    for name in ("refattn", "backends"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    install = [sys.executable, "-m", "pip", "install", *options, str(tree)]
    subprocess.run(install, check=True, capture_output=True, text=True, cwd=target.parent)
    where = [sys.executable, "-c", "import refattn; print(refattn.__file__)"]
    env = {**os.environ, "PYTHONPATH": str(target)}
    found = subprocess.run(where, check=True, capture_output=True, text=True, env=env, cwd=target.parent)
    assert Path(found.stdout.strip()) == target / "refattn" / "__init__.py"
    return target


def run(command: str, folder: Path, wheel: Path) -> subprocess.CompletedProcess[str]:
    for library in needed(command):
        pytest.importorskip(library)
    words = shortened([part.strip("'\"") for part in re.findall(r"'[^']*'|\"[^\"]*\"|\S+", command)])
    if words[0] == "verify" and "--dtype" not in words and "--large" not in words:
        words += ["--dtype", "float32"]  # four types take four times as long
    env = {**os.environ, "PYTHONPATH": f"{wheel}:{folder}"}
    if "--mesh" in words:
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    call = [sys.executable, "-m", "refattn", *words]
    return subprocess.run(call, capture_output=True, text=True, cwd=folder, env=env, timeout=1500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A folder with the examples, a kernel, and cases and arrays of the reader's own."""
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "examples", place / "examples")
    for name in ("mine.py", "faulty.py"):
        (place / name).write_text(MINE, encoding="utf-8")
    (place / "package").mkdir()
    (place / "package" / "module.py").write_text(CALLED, encoding="utf-8")
    shutil.copy(ROOT / "examples" / "torch_ring.py", place / "ring.py")
    (place / "shapes.json").write_text('["h=2,n=9,d=8", {"h": 4, "g": 2, "nq": 3, "nk": 7, "d": 8, "causal": true}]')
    begin = [sys.executable, "-m", "refattn", "verify", "softmax", "--init", "triton"]
    subprocess.run(begin, check=True, capture_output=True, cwd=place, env={**os.environ, "PYTHONPATH": str(wheel)})
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 12, 8)).astype(np.float32)
    np.savez(place / "captured.npz", q=q, k=k, v=v)
    np.savez(place / "dump.npz", q=q, k=k, v=v, out=ra.softmax.forward(q, k, v)[0])
    (place / "my_text.txt").write_text("a text that somebody has written\n" * 400)
    (place / "links.txt").write_text("0 1\n1 2\n2 0\n")
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        from tests.verify.adapters.test_onnx_model import model  # what is in it needs both

        model(place / "attn.onnx", {name: [None] * 4 for name in "qkv"})
    for name in ("softmax", "delta", "graph_energy", "koopman"):
        found = run(f"train {name} --out runs/{name} --set context=32", place, wheel)
        assert found.returncode == 0, found.stderr
    return place


@pytest.mark.slow
@pytest.mark.parametrize("command", of_examples())
def test_the_commands_of_examples_run(command: str, folder: Path, wheel: Path) -> None:
    """Some libraries differ in cases that the head of their file names, or decline gradients on a CPU."""
    found = run(command, folder, wheel)
    assert found.returncode in (0, 1, 3) and "refattn: error" not in found.stderr, found.stdout[-500:] + found.stderr


@pytest.mark.parametrize(
    "command", [pytest.param(x, marks=pytest.mark.slow(sampled=x.split()[0] in READS)) for x in of_pages()]
)
def test_the_commands_of_pages_run(command: str, folder: Path, wheel: Path) -> None:
    for name, here in (
        ("captured.safetensors", "captured.npz"),
        ("dump.safetensors", "dump.npz"),
        ("mine.py:ring", "ring.py:ring"),
    ):
        command = command.replace(name, here)
    found = run(command, folder, wheel)
    assert found.returncode in (0, 1, 3) and "refattn: error" not in found.stderr, found.stdout[-500:] + found.stderr


def test_there_are_commands() -> None:
    assert len(of_examples()) > 15 and len(of_pages()) > 60
