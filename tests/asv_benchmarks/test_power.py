"""What is planted takes as much longer as is said, and rounds are counted as they are."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from asv_benchmarks import power
from asv_benchmarks.compare import WORKING_TREE, check_out


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
