"""The example examples/million_tokens.py: a long sequence piece by piece is the whole, in a state of constant size."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner

import refattn as ra
from refattn import tree

PATH = Path(__file__).parents[2] / "examples" / "million_tokens.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_million_tokens", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_pieces_give_what_the_whole_gives(implementation: str, example: ModuleType) -> None:
    sequence = list(example.pieces(300, 128, 2, 8, "float64"))
    assert [q.shape[2] for q, _, _ in sequence] == [128, 128, 44]
    last, state = example.last_output(iter(sequence), implementation)
    whole = [np.concatenate(arrays, axis=2) for arrays in zip(*sequence, strict=True)]
    expected = ra.higher_order.forward(*whole, causal=True, implementation="dense")[0][:, :, -1:]
    np.testing.assert_allclose(last, expected, rtol=0.0, atol=1e-13 * np.max(np.abs(expected)))
    first = example.last_output(iter(sequence[:1]), implementation)[1]
    sizes = [{name: x.shape for name, x in tree.flatten(s).items()} for s in (first, state)]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_the_command(example: ModuleType) -> None:
    tokens = 1_000_000 if "REFATTN_SLOW_SAMPLE" not in os.environ else 40_000
    result = CliRunner().invoke(example.main, ["--tokens", str(tokens), "--check"])
    assert result.exit_code == 0, result.output
    difference = re.search(r"last outputs differ by (\S+) of the largest", result.output.replace("\n", " "))
    assert difference is not None and float(difference[1]) <= 1e-11
    assert f"chunked: {tokens} tokens in " in result.output
