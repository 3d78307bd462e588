"""What importing and using refattn loads: nothing that the call does not need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
    script = (
        f"{code}\nimport sys\nprint('loaded', *sorted({{n.partition('.')[0] for n in sys.modules}} & set({HEAVY})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split()[1:])


ATTEND = """
import numpy as np
import refattn as ra
x = np.ones((1, 1, 4, 2))
out, saved = ra.softmax.forward(x, x, x, form={form!r})
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


@pytest.mark.parametrize("form", ["dense", "tiled"])
def test_attention_on_numpy_loads_no_other_library(form: str) -> None:
    # The tiled form asks threadpoolctl to hold BLAS to one thread for each worker.
    assert loaded(ATTEND.format(form=form)) <= {"numpy", "array_api_compat", "threadpoolctl"}
