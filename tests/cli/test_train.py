"""``refattn train``: what it prints and where, the folders it takes, its exit codes, and how it says what is wrong."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from refattn.train import data, loop
from refattn.train.folder import of_mechanism
from tests.cli.command import refused, run, terminal
from tests.train.runs import arguments, remains, small, train, write_text


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, with a text in it; the picture would take half of the time."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    monkeypatch.setattr(loop, "plot", mock.Mock())
    return tmp_path


def short(out: str, *more: str, **changes: Any) -> list[str]:
    return arguments("text.txt", Path(out), *more, **changes)


# --- what it prints


def test_scores_and_a_sample_go_to_standard_output(here: Path) -> None:
    result = run(*short("run"))
    assert result.exit_code == 0
    facts = json.loads((here / "run" / "result.json").read_text())
    lines = result.stdout.splitlines()
    assert lines[0] == "bits per byte of 300 held-out bytes"
    for line, name, key in zip(
        lines[1:4],
        (f"model, {facts['parameters']} parameters", "bigram", "gzip -9"),
        ("heldout", "bigram", "gzip"),
        strict=True,
    ):
        assert re.sub(" +", " ", line).startswith(f" {name} {facts[f'{key}_bits']:.3f}")
    assert lines[2].endswith(f"the model has {facts['heldout_bits'] / facts['bigram_bits']:.2f} of it")
    assert re.fullmatch(r"12 steps, 768 tokens, \d+ s, \d+ tokens/s", lines[4])
    assert lines[5:8] == ["run: run", "", "sample:"]
    assert "\n".join(lines[8:]).startswith((here / "run" / "sample.txt").read_bytes()[:5].decode())


def test_progress_is_plain_lines_elsewhere(here: Path) -> None:
    result = run(*short("run"))
    lines = result.stderr.splitlines()
    assert lines[-1] == "scoring the held-out text"
    steps = [
        re.fullmatch(r"step (\d+) of 12: loss (\d\.\d{3}) bits/byte(  held out (.*) bits/byte)?(  \d+ tokens/s)?", line)
        for line in lines[:-1]
    ]
    assert all(steps) and [int(step[1]) for step in steps if step] == [1, 5, 10, 12]
    rows = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        assert step is not None
        row = rows[int(step[1]) - 1]
        assert step[2] == f"{row['loss'] / math.log(2.0):.3f}" and (step[4] or "") == (
            f"{row['heldout_bits']:.3f}" if step[4] else ""
        )
        assert ("heldout_bits" in row) == bool(step[4]) and bool(step[5]) == (row["step"] > 1)
    assert "\x1b" not in result.output


def test_a_sample_gives_no_orders_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that has not learned much says any byte; the file has them as they are."""
    monkeypatch.setattr(
        loop, "generate", lambda *arguments, **options: b"a\x1b[2Jb\x07\tc\x00\nd\xc2\x9be\xff\xc3\xa9\x7f"
    )
    result = run(*short("run"))
    shown = result.stdout.partition("sample:\n")[2]
    assert shown.endswith("a\ufffd[2Jb\ufffd\tc\ufffd\nd\ufffde\ufffd\u00e9\ufffd\n")
    assert Path("run/sample.txt").read_bytes().endswith(b"\x1b[2Jb\x07\tc\x00\nd\xc2\x9be\xff\xc3\xa9\x7f")


def test_a_run_goes_on_from_a_prompt_and_stands_beside_another(here: Path) -> None:
    run(*short("one"))
    run(*short("two", steps=5))
    said = run("sample", "one", "--prompt", "the cat", "--bytes", 6, "--seed", 3)
    assert (said.exit_code, said.stdout[:7], said.stderr) == (0, "the cat", "")
    assert run("sample", "one", "--prompt", "the cat", "--bytes", 6, "--seed", 3).stdout == said.stdout
    assert run("sample", "two", "--prompt", "the cat", "--bytes", 6, "--seed", 3).stdout != said.stdout
    assert run("sample", "one", "--prompt", "the cat", "--bytes", 0).stdout == "the cat\n"
    assert refused("sample", "one", "--prompt", "") == "prompt: got no byte, needs at least one"
    assert refused("sample", ".", "--prompt", "a").startswith("run: got ., needs the folder of a run")
    assert run("plot", "one", "two", "--out", "both.png").exit_code == 0
    assert (here / "both.png").read_bytes()[:4] == b"\x89PNG"
    assert refused("plot", "one", "three", "--out", "x.png").startswith("run: got 'three', needs the folder of a run")


def test_progress_is_a_bar_on_a_terminal() -> None:
    code, written = terminal(*short("run", steps=30, score_every=30), COLUMNS="120")
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)
    assert "\x1b[" in written and "━" in plain  # it draws over itself
    left = r"train .*\d+/30 loss \d\.\d{3} bits/byte  +\d+ tokens/s \d:\d\d:\d\d"  # the last is the time left
    assert re.search(left, plain)
    assert re.search(r"30/30 loss \d\.\d{3} bits/byte  held out \d\.\d{3} bits/byte  \d+ tokens/s 0:00:00", plain)
    assert "scoring the held-out text" in plain


# --- folders


def test_runs_without_a_folder_get_one_each(here: Path) -> None:
    words = [word for word in short("-") if word not in ("--out", "-")]
    for _ in range(3):
        assert run(*words).exit_code == 0
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["softmax", "softmax-2", "softmax-3"]
    assert remains(here / "runs" / "softmax") == remains(here / "runs" / "softmax-3")


@pytest.mark.parametrize(
    ("there", "new", "last"),
    [
        ([], "softmax", "softmax"),
        (["softmax"], "softmax-2", "softmax"),
        (["softmax", "softmax-2"], "softmax-3", "softmax-2"),
        (["softmax-2"], "softmax-3", "softmax-2"),  # one that was removed leaves a gap
        (["softmax-9", "softmax-10"], "softmax-11", "softmax-10"),
        (["softmax-old", "softmax2", "softmax-0", "softmax-x1"], "softmax", "softmax"),
    ],
)
def test_which_folder(here: Path, there: list[str], new: str, last: str) -> None:
    for name in there:
        (here / "runs" / name).mkdir(parents=True)
    assert of_mechanism("softmax", False) == Path("runs", new)
    assert of_mechanism("softmax", True) == Path("runs", last)


# --- what is wrong


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--set", "widht=3"], "setting: got 'widht' (did you mean width?), needs one of context, width, heads"),
        (["--set", "steps"], "--set: got 'steps', needs NAME=VALUE"),
        (["--steps", "0"], "steps: got 0, needs a whole number of at least 1"),
        (["--set", f"steps={10**30}"], f"steps: got {10**30}, needs at most 2147483648"),
        (["--steps", "many"], "invalid value for '--steps': 'many' is not a valid integer; see refattn train --help"),
        (["--steps", "3", "--set", "steps=4"], "steps: got --steps and --set steps=..., needs one of them"),
        (
            ["--data", "none.txt"],
            "data: got 'none.txt': No such file or directory; needs 'stdlib', 'repeats', a file or a folder",
        ),
        (["--data", "tiny.txt"], "data: got 9 bytes in the train part of 'tiny.txt', needs at least 129 for a context"),
        (["--backend", "abacus"], "backend: got 'abacus', needs one of numpy"),
        (["--set", "device=abacus"], "device: got abacus, numpy has cpu"),
        (["--out", "text.txt"], "out: got text.txt, but text.txt is a file; needs a folder"),
        (["--out", "text.txt/run"], "out: got text.txt/run, but text.txt"),
        (["--out", "."], "out: . holds files that are no run; needs a new or an empty folder"),
        (
            ["--data", ".", "--set", "context=4"],
            "out: runs/softmax lies in the folder of the text, ., so the run would",
        ),
        (
            ["--out", "broken"],
            "broken/config.json: is no configuration of a run that this version reads (is no JSON, or cut off: ",
        ),
        (["--out", "broken", "--resume"], "broken/config.json: is no configuration of a run that this version reads ("),
        (["--out", "odd"], "odd/config.json: is no regular file"),
        (["--out", "odd", "--resume"], "odd/config.json: is no regular file"),
    ],
)
def test_every_problem_is_one_line(here: Path, words: list[str], problem: str) -> None:
    (here / "tiny.txt").write_text("ten bytes!")
    (here / "broken").mkdir()
    (here / "broken" / "config.json").write_text("no")
    (here / "odd" / "config.json").mkdir(parents=True)
    before = sorted(here.rglob("*"))
    given = [] if "--data" in words else ["--data", "text.txt"]
    given += [] if "tiny.txt" in words or "context=4" in words else ["--set", "context=16"]
    assert refused("train", "softmax", *given, *words).startswith(problem)
    assert sorted(here.rglob("*")) == before


def test_settings_of_a_file(here: Path) -> None:
    (here / "run.toml").write_text(
        'data = "text.txt"\nsteps = 9\nbatch = 2\nsample_bytes = 0\nscore_bytes = 64\n'
        "[model]\ncontext = 8\nwidth = 8\nheads = 1\nlayers = 1\n[block]\nscale = 0.5\nsoftcap = 4.0\n"
    )
    words = ["train", "softmax", "--config", "run.toml", "--steps", 2, "--set", "block.softcap=3.0", "--out", "run"]
    found = run(*words)
    assert found.exit_code == 0, found.output
    stored = json.loads(Path("run", "config.json").read_text(encoding="utf-8"))["settings"]
    assert (stored["steps"], stored["batch"], stored["context"]) == (2, 2, 8)
    assert stored["block"] == {"scale": 0.5, "softcap": 3.0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("steps =", "run.toml: is no TOML (Invalid value"),
        ("block = 3", "run.toml: block: got 3, needs a table"),
        ("[bloc]\nscale = 1.0", "run.toml: bloc: got dict, needs a value; tables are block, growth, model"),
        ("width = 8\n[model]\nwidth = 8", "run.toml: model.width: got 8, which is none or is there twice"),
        ("widht = 3", "setting: got 'widht' (did you mean width?)"),
    ],
)
def test_a_file_that_holds_no_settings(here: Path, text: str, problem: str) -> None:
    (here / "run.toml").write_text(text)
    assert refused("train", "softmax", "--config", "run.toml", "--data", "text.txt").startswith(problem)
    assert refused("train", "softmax", "--config", "none.toml") == "none.toml: No such file or directory"


def test_numbers_that_are_not_finite_end_with_1() -> None:
    words = short("run", learning_rate=1e30, warmup=0)
    result = run(*words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.match(
        r"refattn: error: step 2: .* first: [A-Z]+\.\w+.*the state after step 1 is saved$",
        result.stderr.splitlines()[-1],
    )


def test_sigterm_saves_the_step_and_has_its_own_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = data.batch

    def batch(*positional: Any, **options: Any) -> Any:
        if options["step"] == 6:
            signal.raise_signal(signal.SIGTERM)
        return original(*positional, **options)

    monkeypatch.setattr(data, "batch", batch)
    result = run(*short("run"))
    assert result.exit_code == 143
    assert result.stderr.splitlines()[-1] == "stopped after step 6 of 12; go on with --resume --out run"


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(here: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Once: 130 after the step; twice: 130 at once."""
    original = data.batch

    def batch(*positional: Any, **options: Any) -> Any:
        if options["step"] == 6:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return original(*positional, **options)

    monkeypatch.setattr(data, "batch", batch)
    result = run(*short("run"))
    assert (result.exit_code, result.stdout) == (130, "")
    lines = result.stderr.splitlines()
    assert "interrupted: the step is finished and saved; once more stops at once" in lines
    monkeypatch.setattr(data, "batch", original)
    if times == 1:
        assert lines[-1] == "stopped after step 6 of 12; go on with --resume --out run"
    else:
        assert lines[-1] == "refattn: interrupted"
    result = run("train", "softmax", "--out", "run", "--resume")
    assert result.stderr.startswith(f"going on after step {6 if times == 1 else 4} of 12\n")
    assert remains(here / "run") == remains(train(small("text.txt"), here / "whole").folder)


def test_grow(here: Path) -> None:
    """Steps or "auto", on the command line as in --set; the widths are told on the way and stand in the result."""
    words = [word if word != "softmax" else "growing" for word in short("run", "--grow", "3,7")]
    words += ["--set", "growth.sequences=8", "--set", "growth.most=1", "--set", "block.head_width=2"]
    result = run(*words)
    assert result.exit_code == 0
    assert re.search(
        r"^step 3: widths \[3\], loss [\d.]+ to [\d.]+ bits/byte at amplitude ", result.stderr, re.MULTILINE
    )
    assert json.loads((here / "run" / "result.json").read_text())["widths"] == [4]
    stored = json.loads((here / "run" / "config.json").read_text())["settings"]
    assert (stored["grow"], stored["growth"]) == ([3, 7], {"sequences": 8, "most": 1})
    assert run("train", "growing", "--out", "run", "--resume").exit_code == 0
    assert refused("train", "softmax", "--grow", "auto").startswith("grow: got 'auto', but softmax does not grow")
    assert refused("train", "growing", "--grow", "3,x").startswith("grow: got '3,x', needs null, \"auto\" or a list")
    twice = ("train", "growing", "--grow", "auto", "--set", "grow=[3]")
    assert refused(*twice) == "grow: got --grow and --set grow=..., needs one of them"
