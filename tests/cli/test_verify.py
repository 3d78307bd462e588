"""`refattn verify`: what it finds, prints and exits with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import facts, run, verify

# Softmax attention written for torch or JAX, which differentiate it.
DIFFERENTIATED = """
import numpy as np
import {library} as np_like


def attend(q, k, v, *, mask=None, causal=False, scale=None):
    q, k, v = (np_like.asarray(x) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    k, v = (np_like.{repeat}(x, q.shape[1] // x.shape[1], {axis}=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    n, m = scores.shape[2:]
    allowed = np_like.asarray(np.tri(n, m, m - n if causal else m, dtype=bool))
    allowed = allowed if mask is None else allowed & np_like.asarray(np.asarray(mask))
    weights = np_like.where(allowed, np_like.exp(np_like.where(allowed, scores, 0.0)), 0.0)
    total = weights.sum(-1)[..., None]
    return (weights @ v) / np_like.where(total == 0.0, 1.0, total)
"""


def test_a_right_implementation_agrees(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = verify(kernels("attend"))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("softmax: agrees: 5 cases run, 0 declined, 0 failed")
    assert "not given" in next(line for line in result.stdout.splitlines() if " lse " in line)
    assert "verify softmax: 5 of 5 cases" in result.stderr


def test_every_dtype_is_run_by_default(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = run("verify", "softmax", "--in-process", "--impl", kernels("with_lse"))
    assert result.exit_code == 0
    assert "15 cases run, 5 declined" in result.stdout and "not given" not in result.stdout
    assert "it takes no dtype=" in result.stdout
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        assert dtype in result.stdout


def test_a_wrong_implementation_disagrees(few: tuple[str, ...], kernels: Callable[[str], str], tmp_path: Path) -> None:
    result = verify(kernels("top_left"), "--json", tmp_path / "found.json")
    assert result.exit_code == 1
    data = facts((tmp_path / "found.json").read_text())
    (outcome,) = (outcome for outcome in data["outcomes"] if outcome["status"] == "disagrees")
    (verdict,) = outcome["verdicts"]
    assert (outcome["case"], verdict["tensor"], verdict["agrees"]) == ("causal-tail", "out", False)
    index = f"[{','.join(map(str, verdict['index']))}]"
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("float32") and " out " in line)
    got, needed = (f"{verdict[name]:.9g}" for name in ("got", "expected"))
    for words in ("causal-tail", index, got, needed, verdict["statistic"], "1 disagree"):
        assert words in row
    assert row.split()[3] == ">1000" and verdict["share"] > 1000.0
    assert "  float32, 1 case: out disagrees: causal-tail" in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1].startswith("softmax: disagrees: 5 cases run, 0 declined, 1 failed")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short", "shape"),
        ("wide", "dtype"),
        ("nan", "non-finite"),
        ("none", "out"),
        ("text", "got str, needs an array"),
        ("objects", "got list, needs an array"),
        ("four", "returned a tuple of 4, needs out, (out, lse, max), or a dict"),
        ("raises", "raised RuntimeError: no kernel for this"),
        ("mutates", "changed its inputs: q"),
    ],
)
def test_what_fails_exits_with_1_and_is_named(
    few: tuple[str, ...], kernels: Callable[[str], str], name: str, words: str
) -> None:
    result = verify(kernels(name), "--verbose")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    failed = result.stdout[result.stdout.index("Failed (5 of 5 cases run)") :]
    for case in few:
        assert f"  float32 {case} (" in failed
    assert words in failed


def test_declining_everything_is_no_success(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = verify(kernels("declines"))
    assert result.exit_code == 3
    assert result.stdout.splitlines()[-1] == "softmax: nothing was run: all 5 cases were declined"
    assert "not today" in result.stdout


def test_declining_some_is_counted(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = verify(kernels("declines_masks"))
    assert result.exit_code == 0
    assert "3 cases run, 2 declined, 0 failed" in result.stdout.splitlines()[-1]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["masked", "0", "0", "0", "1"] in rows and ["all", "3", "3", "0", "2"] in rows
    assert ["2", "no", "masks", "float32:", "mask-keys,", "empty-rows"] in rows


def test_gradients(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    assert verify(kernels("Pair"), "--grad").exit_code == 0
    for tensor in ("d_q", "d_k", "d_v"):
        assert f" {tensor} " in verify(kernels("Pair"), "--grad").stdout
    result = verify(kernels("attend"), "--grad")
    assert result.exit_code == 3 and "no gradients" in result.stdout


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("torch", {"library": "torch", "repeat": "repeat_interleave", "axis": "dim"}),
        pytest.param(
            "jax", {"library": "jax.numpy", "repeat": "repeat", "axis": "axis"}, marks=pytest.mark.slow(sampled=False)
        ),
    ],
)
def test_functions_of_torch_and_jax_are_differentiated(
    few: tuple[str, ...], tmp_path: Path, package: str, words: dict[str, str]
) -> None:
    pytest.importorskip(package)
    (tmp_path / "kernels.py").write_text(DIFFERENTIATED.format(**words))
    result = verify(f"{tmp_path / 'kernels.py'}:attend", "--grad")
    assert result.exit_code == 0, result.output
    assert "5 cases run, 0 declined" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("float32")]
    assert {line[1]: line[2] for line in lines} == {"out": "5", "lse": "0", "d_q": "5", "d_k": "5", "d_v": "5"}


def test_what_an_implementation_prints_is_kept_out_of_the_report(
    few: tuple[str, ...], kernels: Callable[[str], str]
) -> None:
    result = verify(kernels("prints"), "--json", "-")
    assert result.exit_code == 0 and "noise" in result.stderr
    assert facts(result.stdout)["exit_code"] == 0


@pytest.mark.slow
def test_json_says_the_same(few: tuple[str, ...], kernels: Callable[[str], str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    result = verify(kernels("nan"), "--json", file)
    assert result.exit_code == 1
    data = facts(file.read_text())
    assert set(data) >= {"mechanism", "implementation", "grad", "outcomes", "counts", "exit_code"}
    assert (data["mechanism"], data["implementation"], data["grad"]) == ("softmax", kernels("nan"), False)
    assert data["exit_code"] == 1 and data["counts"]["all"] == {"run": 5, "agreed": 0, "failed": 5, "declined": 0}
    assert [outcome["case"] for outcome in data["outcomes"]] == list(few)
    assert data["outcomes"][0]["verdicts"][0]["share"] is None
    plain, piped = verify(kernels("short"), "--json", file), verify(kernels("short"), "--json", "-")
    assert facts(piped.stdout) == facts(file.read_text())
    assert piped.stderr.endswith(plain.stdout)
