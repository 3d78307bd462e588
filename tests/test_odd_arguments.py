"""Odd arguments of functions and commands: one line that names what was got and what is needed."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refattn as ra
from refattn import graph_energy
from refattn.analysis.diagram import diagram_of
from refattn.analysis.graph_flow import GraphFlow
from refattn.golden.tensors import encode
from refattn.mechanisms.record import Input
from refattn.train.settings import read_toml
from refattn.verify import in_python
from tests.cli.command import run

X = np.ones((1, 2, 3, 4))
OTHERS = ra.softmax.forward(X, X, X)[1]
FLOW = GraphFlow(np.asarray([[0.0, 1.0], [1.0, 0.0]]), intrinsic="anchor")
CALLS: list[tuple[str, Any]] = [
    ("weights: got a number that is not finite", lambda: graph_energy.sparse_graph(np.full((2, 2), math.nan))),
    ("weights: got a number that is not finite", lambda: graph_energy.sparse_graph(np.full((2, 2), math.inf))),
    *(
        (r"saved: got Saved of .*softmax\.core, needs what the forward of graph energy", lambda call=call: call(OTHERS))
        for call in (graph_energy.energy, graph_energy.residual, graph_energy.steps_taken, graph_energy.longest_step)
    ),
    ("order: got 4294967296, needs at most 1000000", lambda: ra.higher_order.forward(X, X, X, order=2**32)),
    ("flow: got 'x', needs a GraphFlow", lambda: diagram_of("x", "mu", 0.0, 1.0)),  # type: ignore[arg-type]
    (
        "casual: is no argument of softmax.forward .did you mean causal",
        lambda: ra.softmax.forward(X, X, X, casual=True),  # type: ignore[call-arg]
    ),
    (
        "q, k, v; the others by name",
        lambda: ra.softmax.forward(X, X, X, np.ones((3, 3), bool)),  # type: ignore[call-arg]
    ),
    ("beta: is no argument of sympformer.forward", lambda: ra.sympformer.forward(X, X, X, beta=1.0)),  # type: ignore[call-arg]
    ("dout: is no argument of softmax.backward .did you mean d_out", lambda: ra.softmax.backward(OTHERS, dout=X)),  # type: ignore[call-arg]
    ("dtype: is no argument of verify .did you mean dtypes", lambda: ra.verify("softmax", len, dtype="fp32")),  # type: ignore[call-arg]
    ("float8.*nvfp4 .did you mean float32", lambda: ra.verify("softmax", len, dtypes=("fp32",))),
    ("window: got -1, needs a tuple", lambda: ra.softmax.forward(X, X, X, window=-1)),  # type: ignore[arg-type]
    ("low: got nan", lambda: diagram_of(FLOW, "mu", math.nan, 1.0)),
    ("high: got 'x'", lambda: diagram_of(FLOW, "mu", 0.0, "x")),  # type: ignore[arg-type]
    ("starts: got 0", lambda: diagram_of(FLOW, "mu", 0.0, 1.0, starts=0)),
    ("seed: got -1", lambda: diagram_of(FLOW, "mu", 0.0, 1.0, seed=-1)),
    (r"shape\[1\]: got -1", lambda: Input((2, -1))),
    ("shape: got 3, needs a list", lambda: Input(3)),  # type: ignore[arg-type]
    ("design: got 3, needs a text", lambda: Input((2,), 3)),  # type: ignore[arg-type]
    ("numbers.scale: got 'x', needs a number", lambda: Input((2,), numbers={"scale": "x"})),  # type: ignore[dict-item]
    ("x: type: got 'float7', needs one of float64", lambda: encode({"x": ("float7", X)})),
    ("x: got list, needs an array", lambda: encode({"x": ("float64", [1.0])})),  # type: ignore[dict-item]
    ("about.a: got 3, needs a text", lambda: encode({"x": ("float64", X)}, {"a": 3})),  # type: ignore[dict-item]
]


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'foward' .did you mean forward"):
        _ = ra.softmax.foward  # type: ignore[attr-defined]
    assert not hasattr(ra.delta, "__wrapped__")
    assert inspect.getdoc(ra.verify) == inspect.getdoc(in_python.verify)


@pytest.mark.parametrize(("said", "call"), CALLS)
def test_functions(said: str, call: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        call()


SEED = "1" * 80
COMMANDS: list[tuple[str, tuple[str, ...]]] = [
    ("--timeout: got 'nan', needs seconds above 0", ("verify", "softmax", "--impl", "x:y", "--timeout", "nan")),
    ("--timeout: got '0', needs seconds above 0", ("verify", "softmax", "--impl", "x:y", "--timeout", "0")),
    ("--timeout: got 'x', needs seconds above 0", ("verify", "softmax", "--impl", "x:y", "--timeout", "x")),
    ("got no vectors, needs the folder of a set", ("golden", "show", "nosuch")),
    ("got no vectors, needs the folder of a set", ("golden", "check", "nosuch")),
    *(
        (f"{SEED} is not in the range", ("analyse", what, "--seed", SEED))
        for what in ("flow", "equilibria", "spectrum")
    ),
]


@pytest.mark.parametrize(("said", "words"), COMMANDS)
def test_commands(said: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize(
    ("text", "said"), [("steps = " + "[" * 5000, "is no TOML"), (".".join("a" * 5000) + " = 1", "a: got dict, needs a")]
)
def test_settings_that_are_nested_too_deeply(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"odd\.toml: {said}"):
        read_toml(file)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("run")
    result = run("sample", tmp_path / "run", "--prompt", "x")
    assert result.exit_code == 2
    assert result.stderr == f"refattn: error: {tmp_path}/run: Too many levels of symbolic links\n"


def test_a_full_disk_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = run("golden", "write", tmp_path / "set", "growing")
    assert result.exit_code == 2 and "No space left on device" in result.stderr and "None" not in result.stderr


def test_an_input_can_still_be_changed() -> None:
    assert dataclasses.replace(Input((1, 2)), shape=(3,)).shape == (3,)
