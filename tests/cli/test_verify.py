"""`refattn verify`: what it finds, prints and exits with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import facts, run, verify


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


def test_what_an_implementation_prints_is_kept_out_of_the_report(
    few: tuple[str, ...], kernels: Callable[[str], str]
) -> None:
    result = verify(kernels("prints"), "--json", "-")
    assert result.exit_code == 0 and "noise" in result.stderr
    assert facts(result.stdout)["exit_code"] == 0
