"""``refattn analyse equilibria`` and ``bifurcation``: the table, the picture, the data, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli import command


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


run = partial(command.run, "analyse")


def facts(study: str, folder: str | None = None) -> Any:
    path = Path(folder or f"analysis/{study}")
    assert (path / f"{study}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((path / f"{study}.json").read_text())


def test_equilibria_of_a_triangle() -> None:
    result = run("equilibria", "--graph", "complete:3", "--starts", "60")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()[1:4]]
    assert rows == [
        ["stable", "0", "0.000000", "1", "3.000000"],
        ["unstable", "1", "4.000000", "3", "-3.000000"],
        ["unstable", "2", "4.500000", "2", "-1.500000"],
    ]
    assert "6 isolated equilibria found, 1 of them stable\n60 starts, of which 0 led nowhere" in result.stdout
    data = facts("equilibria")
    assert [one["label"] for one in data["isolated"]] == ["stable", *["unstable"] * 5]
    assert data["coupling"] == "sin" and data["graph"] == [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    assert result.stdout.endswith("analysis/equilibria/equilibria.png\nanalysis/equilibria/equilibria.json\n")


def test_a_graph_of_a_file_with_wells_of_its_own(here: Path) -> None:
    (here / "links").write_text("0 1 0.02\n1 2 0.02\n")
    words = (
        "--graph",
        "links",
        "--coupling",
        "tanh",
        "--intrinsic",
        "double_well",
        "--b",
        "0.02,0,-0.02",
        "--mu",
        "0.5",
    )
    first, second = (run("equilibria", *words, "--starts", "100", "--out", out) for out in ("first", "second"))
    assert first.exit_code == second.exit_code == 0
    data = facts("equilibria", "first")
    assert (data["b"], data["mu"]) == ([0.02, 0.0, -0.02], 0.5) and data["stable"] == 8
    assert data == facts("equilibria", "second")
    assert (here / "first/equilibria.png").read_bytes() == (here / "second/equilibria.png").read_bytes()


def test_bifurcations_of_two_wells() -> None:
    result = run("bifurcation", "--starts", "60")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1] == ["0.333333333", "subcritical", "pitchfork", "2", "-0.5774", "0.5774", "0.0000", "no"]
    assert lines[2] == ["0.500000000", "supercritical", "pitchfork", "1", "0.0000", "0.0000", "0.0000", "no"]
    assert lines[5] == ["equilibria", "(stable)", "9", "(4)", "9", "(4)", "5", "(2)", "3", "(2)", "3", "(2)"]
    data = facts("bifurcation")
    assert (data["parameter"], data["range"]) == ("kappa", [0.0, 0.7])
    assert [one["article"] for one in data["bifurcations"]] == [False] * 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("equilibria --graph ring:3", "graph: got 'ring:3', needs path:N, cycle:N, star:N, complete:N or a file"),
        ("equilibria --coupling cos", "coupling: got 'cos', needs one of sin, tanh"),
        ("equilibria --intrinsic wells", "intrinsic: got 'wells', needs one of anchor, none, double_well"),
        ("equilibria --b 1,2", "b: got shape (2,), needs a number or (9,), one for each node"),
        ("equilibria --mu x", "mu: got 'x', needs a finite number"),
        ("bifurcation --kappa 1", "mu, kappa, b: got mu 1, kappa 1, b 0, needs one range LOW:HIGH and numbers"),
        ("bifurcation --kappa 0:1 --mu 0:1", "mu, kappa, b: got mu 0:1, kappa 0:1, b 0, needs one range"),
        ("bifurcation --kappa 1:0", "kappa: got the range 1.0:0.0, needs a lower and a higher number"),
        ("bifurcation --intrinsic none", 'intrinsic: got "none", whose equilibria come in lines'),
        ("orbits", "command: got 'orbits', needs one of"),
    ],
)
def test_what_is_refused(words: str, message: str, here: Path) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"refattn: error: {message}") and len(result.stderr.splitlines()) == 1
    assert not (here / "analysis").exists()


def test_bifurcations_of_a_block_that_was_trained(tmp_path: Path) -> None:
    """From one text to another."""
    small = {"width": 8, "heads": 2, "layers": 2, "context": 8, "steps": 2, "warmup": 1, "batch": 1, "score_bytes": 64}
    words = [word for name, value in {**small, "sample_bytes": 0}.items() for word in ("--set", f"{name}={value}")]
    trained = command.run("train", "graph_energy", "--out", tmp_path / "run", *words)
    assert trained.exit_code == 0, trained.output
    own = ["--run", str(tmp_path / "run"), "--starts", "4", "--text", "abc"]
    assert run("bifurcation", *own, "--towards", "bcd", "--layer", "1").exit_code == 0
    line = facts("bifurcation")
    assert (line["parameter"], line["range"], len(line["branches"])) == ("t", [0.0, 1.0], 1)
    for wrong, problem in {
        "--towards a": "--text: got 1 ",
        "--layer 2": "--layer: got 2",
        "--head 2": "head: ",
    }.items():
        assert problem in run("bifurcation", *own, *wrong.split()).stderr


def test_equilibria_that_are_not_alone_are_told() -> None:
    assert run("equilibria", "--graph", "cycle:4", "--starts", "60", "--out", "there").exit_code == 0
    data = facts("equilibria", "there")
    assert data["degenerate"] and all(one["zero"] for one in data["degenerate"])


def test_bifurcations_over_mu() -> None:
    words = ("--graph", "path:1", "--mu=-0.5:1", "--b", "0.1", "--starts", "20")
    assert run("bifurcation", *words).exit_code == 0
    (found,) = facts("bifurcation")["bifurcations"]
    assert found["kind"] == "fold" and found["article"] and abs(found["at"] - 3.0 * 0.05 ** (2.0 / 3.0)) < 1e-9
