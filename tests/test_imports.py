"""What importing and using refattn loads: nothing that the call does not need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import python

HEAVY = (
    "array_api_compat",
    "array_api_strict",
    "click",
    "cupy",
    "hypothesis",
    "jax",
    "matplotlib",
    "numpy",
    "onnxruntime",
    "rich",
    "safetensors",
    "scipy",
    "threadpoolctl",
    "torch",
)


def loaded(code: str) -> set[str]:
    """The heavy packages that are loaded after `code` ran in a fresh interpreter."""
    names = f"{{n.partition('.')[0] for n in sys.modules}} & set({HEAVY})"
    lines = python("-c", f"{code}\nimport sys\nprint('loaded', *({names}))").splitlines()
    return set(next(line for line in lines if line.startswith("loaded")).split()[1:])


ATTEND = """
import numpy as np
import refattn as ra
x = np.ones((1, 1, 4, 2))
out, saved = ra.softmax.forward(x, x, x, implementation={implementation!r})
ra.softmax.backward(saved, out)
"""


def test_the_package_loads_nothing() -> None:
    assert loaded("import refattn") == set()


def test_verification_loads_nothing_before_it_is_asked() -> None:
    assert loaded("import refattn.verify") == set()
    assert not loaded("import refattn.verify.plugin") & {"numpy", "rich", "safetensors", "scipy"}
    assert "rich" not in loaded("from refattn.verify import verify")


def test_names_load_nothing() -> None:
    assert loaded("import refattn\nassert refattn.list_mechanisms() and dir(refattn)") <= {"numpy"}


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
def test_attention_on_numpy_loads_no_other_library(implementation: str) -> None:
    # The tiled implementation asks threadpoolctl to hold BLAS to one thread for each worker.
    assert loaded(ATTEND.format(implementation=implementation)) <= {"numpy", "array_api_compat", "threadpoolctl"}


@pytest.mark.parametrize("words", ["--help", "--version", "verify --help", "check --help", "trace --help"])
def test_help_loads_nothing_heavy(words: str) -> None:
    code = f"from refattn.cli import cli\ntry:\n    cli({words.split()})\nexcept SystemExit:\n    pass"
    assert loaded(code) == {"click"}


def test_a_room_loads_nothing_that_only_tools_read() -> None:
    ours = "[n for n in sys.modules if '.testing' in n or n.endswith(('loops', 'pictures'))]"
    assert python("-c", f"import sys\nimport refattn as ra\nra.softmax, ra.delta, ra.koopman\nprint({ours})") == "[]"


def test_a_verification_that_agrees_loads_no_other_kind_of_run(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("import refattn as ra\nattend = lambda q, k, v: ra.softmax.forward(q, k, v)[0]\n")
    words = ["verify", "softmax", "--impl", f"{tmp_path / 'k.py'}:attend", "--shape", "n=4,d=4", "--dtype", "float32"]
    run = f"import sys\nfrom refattn.cli import cli\ntry:\n    cli({words})\nexcept SystemExit:\n    pass"
    others = ("diagnose", "bugs", "large", "memory", "bitwise", "shrink", "freeze", "parallel", "questions")
    said = python("-c", f"{run}\nprint([n for n in sys.modules if n.split('.')[-1] in {others}])")
    assert said.splitlines()[-1] == "[]"
