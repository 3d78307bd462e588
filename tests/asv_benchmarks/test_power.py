"""What is planted takes as much longer as is said, and rounds are counted as they are."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from asv_benchmarks import power, power_of_counts
from asv_benchmarks.compare import WORKING_TREE, check_out
from asv_benchmarks.counter import longer
from asv_benchmarks.sides import ROOT


def row(size: float, compare: str, changes: bool, number: int = 0, target: str = "t(1)") -> power.Row:
    return {"round": number, "target": target, "size": size, "values": [], "compare": compare, "changes": changes}


def test_what_is_planted_takes_so_much_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the call and reading it move."""
    home = check_out(WORKING_TREE, tmp_path / "home")
    power.plant(home, 0.2)
    for file, *functions in power.TARGETS.values():
        text = (home / file).read_text()
        assert all(f"\n{name} = _planted({name})\n" in text and f"\ndef {name}(" in text for name in functions)
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-3
        return now[0]

    def work() -> str:
        now[0] += 10.0
        return "done"

    monkeypatch.setattr(time, "process_time", clock)
    known: dict[str, object] = {"work": work}
    exec(power.PLANTED.format(longer=1.2) + "work = _planted(work)", known)
    assert known["work"]() == "done" and now[0] == pytest.approx(12.0, abs=0.02)  # type: ignore[operator]


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"core.Core.time_both('softmax.tiled', 1024, 64, {n})" for n in range(2)]
    monkeypatch.setattr(power, "TARGETS", {r"64, 0": ("f",), r"64, 1": ("g",)})
    monkeypatch.setattr(power, "check_out", lambda version, folder: folder)
    monkeypatch.setattr(power, "plant", lambda home, size: None)
    monkeypatch.setattr(power, "draw", lambda rows: None)
    for name, file in (("FILE", "power.json"), ("PAGE", "page.md")):
        monkeypatch.setattr(power, name, tmp_path / file)
    power.PAGE.write_text("before\n<!-- power: begin -->old<!-- power: end -->\nafter")
    stored = [row(0.2, "slower", True, 0, names[0])]
    power.FILE.write_text(json.dumps({"machine": {}, "rows": stored}))
    asked: list[tuple[str, int]] = []

    def ask(expression: str, homes: object, number: int) -> list[power.Row]:
        asked.append((expression, number))
        return [row(0.2, "", False, number, names[int(expression[-1])])]

    monkeypatch.setattr(power, "ask", ask)
    done = CliRunner().invoke(power.main, ["--rounds", "2"])
    assert done.exit_code == 0, done.output
    assert asked == [("64, 1", 0), ("64, 0", 1), ("64, 1", 1)]
    page = power.PAGE.read_text()
    assert "old" not in page and "1 of 2 |" in page and page.endswith("-->\nafter")


# --- of counts


def counted(counts: list[float], *planted: tuple[int, float, float]) -> power.Row:
    keys = ("target", "size", "count")
    return {"counts": counts, "planted": [dict(zip(keys, one, strict=True)) for one in planted]}


def test_what_runs_nothing_is_all_that_differs_between_rounds(tmp_path: Path) -> None:
    home, texts = check_out(WORKING_TREE, tmp_path / "home"), []
    for number in (1, 2):
        home = power_of_counts.disguised(home, number)
        texts.append((home / "refattn" / "mechanisms" / "delta" / "core.py").read_text())
    assert not (tmp_path / "home").exists() and len(list(tmp_path.iterdir())) == 1
    original = (ROOT / "refattn" / "mechanisms" / "delta" / "core.py").read_text()
    assert all(text.startswith(original) and text.count("_planted") == 1 for text in texts) and texts[0] != texts[1]


def test_a_loop_is_planted_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("itertools.repeat", lambda what, times: map(seen.append, ["loop"] * times))
    assert longer(lambda: list(seen), 3)() == ["loop"] * 3


def test_each_number_is_compared_with_two_rounds_before() -> None:
    none, small, large = (power_of_counts.SIZES[n] for n in (0, 1, 3))
    many = [1e6] * len(power_of_counts.TARGETS)
    odd, chance = [1e6, 1.02e6, *many[2:]], [*many[:2], 1.006e6, *many[3:]]
    rows = [
        counted(many),
        counted(odd, (0, none, 1.004e6), (0, small, 1.009e6)),
        counted(chance, (0, none, 1.004e6), (0, small, 1.01e6)),
        counted(odd, (1, large, 1.021e6)),
        counted(many),
    ]
    told = list(power_of_counts.answers(rows))
    assert [one for one in told if one[2]] == [
        (1, 0.0, "more instructions"),
        (0, small, "more instructions"),
        (0, small, "more instructions"),
    ]
    lines = power_of_counts.table(rows)
    assert lines[2].endswith("| 1,000,000 | 0 of 4 | 0 of 2 | 2 of 2 | 0 of 0 | 0 of 0 |")
    assert lines[3].endswith("| 1,000,000 | 1 of 4 | 0 of 0 | 0 of 0 | 0 of 0 | 0 of 1 |")


def test_the_page_has_the_table_of_what_is_stored() -> None:
    rows = json.loads(power_of_counts.FILE.read_text(encoding="utf-8"))["rows"]
    begin, end = power_of_counts.MARKS
    inner = power.PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    assert inner.strip().splitlines() == power_of_counts.table(rows)
