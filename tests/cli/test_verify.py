"""`refattn verify`: what it finds, prints and exits with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refattn.cli.verify import KERNEL, NEEDS, WITHOUT
from refattn.verify import run
from tests.cli.command import facts, refused, verify
from tests.cli.command import run as command


def test_a_right_implementation_agrees(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    result = verify(kernels("attend"))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("softmax: agrees: 5 cases run, 0 declined, 0 failed")
    assert "not given" in next(line for line in result.stdout.splitlines() if " lse " in line)
    assert "verify softmax: 5 of 5 cases" in result.stderr


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


VALUES = {"--large": ["64"], "--shape": ["n=4"], "--jobs": ["2"], "--timeout": ["1"], "--limit": ["1"], "--seed": ["1"]}
FLAGS = ("--in-process", "--require-all", "--memory", "--bitwise", "--tangent", "--hessian", "--quick")


def words(*options: str) -> list[str]:
    return [word for name in options for word in (name, *([] if name in FLAGS else VALUES.get(name, ["x"])))]


def test_options_that_need_or_exclude_others() -> None:
    assert refused("verify", "softmax").startswith("got no kernel, needs one of --impl, --exec and")
    assert refused("verify", "softmax", *words("--impl", "--exec")).startswith("got --impl and --exec, needs one of")
    for name, needed in NEEDS.items():
        for other in set(KERNEL) - set(needed):
            told = f"{name}: needs {' or '.join(needed)} beside it, got {other}"
            assert refused("verify", "softmax", *words(other, name)) == told
    for name, others in WITHOUT.items():
        for other in set(others) - {name}:
            line = refused("verify", "softmax", *words("--impl", name, other))
            assert line in (f"{name}: cannot be combined with {other}", f"{other}: cannot be combined with {name}")
    line = refused("verify", "softmax", *words("--impl", "--bitwise", "--shape", "--cases", "--inputs"))
    assert line == "--bitwise: cannot be combined with --shape, --cases or --inputs"


def test_a_type_that_is_none_is_answered_with_those_that_are_meant() -> None:
    for given, meant in (("float8", "float8_e4m3fn or float8_e5m2"), ("fp8_e5m2", "float8_e5m2"), ("bf16", "bfloat16")):
        line = refused("verify", "softmax", "--impl", "x:y", "--dtype", given)
        assert line.startswith(f"--dtype: got {given!r}, needs one of float64, ") and line.endswith(f"mean {meant}?)")


def test_designed_cases_have_a_limit_but_for_those_that_are_named_or_required(
    few: tuple[str, ...], kernels: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = SimpleNamespace(times=[])
    plain = run.verify

    def timed(*arguments: Any, limit: float | None, **named: Any) -> Any:
        given.times.append(limit)
        return plain(*arguments, limit=limit, **named)

    monkeypatch.setattr(run, "verify", timed)
    words = ("verify", "softmax", "--impl", kernels("declines"), "--dtype", "float32")
    assert command(*words).exit_code == command(*words, "--limit", "5").exit_code == 3
    assert given.times == [None, 5.0]  # a script's standard error is no terminal
    terminal = SimpleNamespace(**{**vars(sys), "stderr": SimpleNamespace(isatty=lambda: True)})
    monkeypatch.setattr(sys.modules["refattn.cli.verify"], "sys", terminal)
    for more in ((), ("--quick",), ("--limit", "0"), ("--require-all",), ("--case", "tiny"), ("--in-process",)):
        assert command(*words, *more).exit_code == 3
    assert given.times[2:] == [60.0, 60.0, None, None, None, None]


def test_some_cases_by_name(kernels: Callable[[str], str]) -> None:
    given = (kernels("attend"), "--dtype", "float32")
    result = verify(*given, "--case", "causal,tiny", "--case", "sink-tiles")
    assert result.exit_code == 0 and "2 cases run, 1 declined, 0 failed" in result.stdout.splitlines()[-1]
    assert "verify softmax: 3 of 3 cases" in result.stderr
    named = verify(*given, "--case", "tile-33", "--tangent")  # no case of golden vectors
    assert "returned no t_out" in named.stdout or "declined" in named.stdout
    line = refused("verify", "softmax", "--impl", kernels("attend"), "--case", "causl")
    assert line.startswith("--case: got 'causl', needs a case of softmax, such as causal")


def test_what_failed_is_run_first_the_next_time(
    few: tuple[str, ...], kernels: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = tmp_path / "logs.py"
    kernel.write_text(
        "from kernels import attend\n"
        "def logs(q, k, v, **options):\n"
        f"    with open({str(tmp_path / 'log')!r}, 'a') as file:\n"
        "        file.write('causal ' if 'causal' in options else '. ')\n"
        "    return attend(q, k, v, **options)[..., 'causal' in options :]\n"
    )
    kernels("attend")
    monkeypatch.syspath_prepend(str(tmp_path))
    orders = []
    for _ in range(2):
        (tmp_path / "log").write_text("")
        result = verify(f"{kernel}:logs", "--in-process", "--dtype", "float32")
        assert result.exit_code == 1 and "wrong shape (float32 out, case causal-tail)" in result.stdout
        orders.append((tmp_path / "log").read_text().split()[:5])
    assert (orders[0].index("causal"), orders[1].index("causal")) == (1, 0)
    kernel.write_text(kernel.read_text().replace("[..., 'causal' in options :]", ""))
    assert [*(tmp_path / "cache/refattn/failed").iterdir()]
    assert verify(f"{kernel}:logs", "--dtype", "float32").exit_code == 0
    assert not [*(tmp_path / "cache/refattn/failed").iterdir()]


def test_an_option_that_is_passed_on_is_told_as_such(few: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "thin.py").write_text(
        "import refattn\n"
        "def plain(q, k, v, *, causal=False):\n    return refattn.softmax.forward(q, k, v, causal=causal)[0]\n"
        "def attend(q, k, v, **options):\n    return plain(q, k, v, **options)\n"
    )
    result = verify(f"{tmp_path / 'thin.py'}:attend", "--dtype", "float32")
    assert result.exit_code == 1
    told = "it takes mask and passes it on to what takes none: decline it, if mask is not None: return refattn.Decline"
    assert told in " ".join(result.stdout.split())


def test_a_quick_run_has_every_feature(kernels: Callable[[str], str]) -> None:
    result = verify(kernels("attend"), "--dtype", "float32", "--quick")
    assert result.exit_code == 0 and "softmax: agrees: " in result.stdout
    assert int(result.stderr.rpartition("verify softmax: ")[2].split()[0]) < 30


def test_gradients_of_a_kernel_that_has_none(few: tuple[str, ...], kernels: Callable[[str], str]) -> None:
    """Its outputs are judged: that is said, and no size is offered as the remedy."""
    result = verify(kernels("attend"), "--grad")
    assert result.exit_code == 3 and "supports" not in result.stdout
    assert "softmax: no gradient was judged: all" in result.stdout.splitlines()[-1]
