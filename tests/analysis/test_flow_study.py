"""The study of flows, and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refattn.analysis import particles
from refattn.analysis.flow import SHARES, Flow, study
from refattn.analysis.particles import Damping
from tests.cli.command import run
from tests.rows import holds

PAGE = Path(__file__).parents[2] / "docs" / "analysis.md"


@pytest.fixture(scope="module")
def linear() -> Flow:
    return study("linear", particles=30)


def test_momentum_reaches_low_energies_of_linear_attention_first(linear: Flow) -> None:
    slow, fast = linear.courses["classical"], linear.courses["accelerated"]
    assert slow.energy[0] == fast.energy[0]
    assert np.all(np.diff(slow.energy) < 0.0)
    assert np.all(np.diff(fast.total) < 0.0)
    assert np.all(fast.total >= fast.energy)
    assert slow.reached[0.5] is not None
    assert fast.reached[0.5] is not None
    assert slow.reached[0.5] < fast.reached[0.5]  # at rest at first
    assert fast.reached[0.03] is not None
    assert slow.reached[0.03] is None or slow.reached[0.03] > 2.0 * fast.reached[0.03]
    page = (PAGE.parent / "mechanisms" / "sympformer.md").read_text(encoding="utf-8")
    assert "such a motion reaches low energies sooner than one along the force" in " ".join(page.split())
    # Explicit steps of size 0.1 follow the flows.
    for course in (slow, fast):
        for share in SHARES:
            time, calls = course.reached[share], course.calls[share]
            if time is not None and calls is not None:
                assert calls == pytest.approx(time / linear.step, rel=0.1, abs=3.0)


def test_only_linear_attention_keeps_an_elliptical_law(linear: Flow) -> None:
    assert all(course.turned < 1e-9 for course in linear.courses.values())
    bent = study("exponential", particles=30, end=10.0)
    assert all(course.turned > 1e-3 for course in bent.courses.values())


def test_an_energy_that_is_not_reached() -> None:
    found = study("linear", particles=10, end=0.5)
    assert found.courses["accelerated"].reached[0.01] is None
    assert "not yet" in found.text()


def test_the_command(tmp_path: Path) -> None:
    words = ["analyse", "flow", "--system", "exponential", "--particles", "12", "--end", "4", "--out", str(tmp_path)]
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "accelerated, time" in done.output
    facts = json.loads((tmp_path / "flow.json").read_text())
    assert facts["system"] == "exponential"
    assert len(facts["accelerated"]["energy"]) == len(facts["times"])
    assert (tmp_path / "flow.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--c-log", "-1", "got -1.0, needs a finite number from 0"),
        ("--c-log", "1e300", "got 1e+300, needs at most 26928.3 where the end is 40"),
        ("--c-lin", "16777216", "got 16777216.0, needs at most 2500 where the end is 40"),
        ("--end", "inf", "got inf, needs a finite number"),
        ("--end", "1e-300", "got 1e-300, needs a time from 1e-06 to 1e+06"),
        ("--step", "inf", "got inf, needs a finite number"),
        ("--step", "1e-300", "got 1e-300, needs at least 0.0004: at most 100000 up to the end"),
    ],
)
def test_flows_that_would_not_end_are_refused(option: str, value: str, message: str, tmp_path: Path) -> None:
    done = run("analyse", "flow", option, value, "--out", str(tmp_path))
    assert done.exit_code == 2
    assert f"{option}: {message}" in done.output


def test_a_solution_that_takes_too_many_slopes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(particles, "EVALUATIONS", 50)
    with pytest.raises(ValueError, match="times: got 0 to 4, needs an earlier end: stiff, stopped at"):
        study(particles=5, end=4.0)


def test_momentum_gains_little_in_a_potential_with_curvature() -> None:
    """It is behind at three of four shares of the energy, and an eighth sooner at the last one."""
    slow, fast = (study("exponential").courses[name].reached.values() for name in ("classical", "accelerated"))
    ratios = [b / a for a, b in zip(slow, fast, strict=True) if a is not None and b is not None]
    assert len(ratios) == 4 and min(ratios[:3]) > 1.0 and ratios[3] == pytest.approx(7 / 8, abs=0.02)
    said = "earlier with it; in a potential with curvature the lowest alone, by an eighth of the time"
    assert holds("sympformer", "momentum is worth it where") == f"as said: linear attention reaches low energies {said}"


def test_the_page_says_when_the_flows_reach_an_energy() -> None:
    ends = (", without momentum |", ", accelerated |")
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if any(end in line for end in ends)]
    said = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows}
    words = {"linear": "linear attention", "exponential": "softmax attention in a potential"}
    kinds = {"classical": "without momentum", "accelerated": "accelerated"}
    wanted = {}
    for system, attention in words.items():
        for name, course in study(system).courses.items():
            times = course.reached.values()
            wanted[f"{attention}, {kinds[name]}"] = ["later than 40" if t is None else f"{t:.2g}" for t in times]
    rounded = {name: [x if "later" in x else f"{float(x):.2g}" for x in cells] for name, cells in said.items()}
    assert rounded == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"system": "cubic"}, "system: got 'cubic', needs one of linear, exponential"),
        ({"particles": 2}, "particles: got 2, needs more than 2"),
        ({"end": 0.0}, "end: got 0.0, needs more than 0"),
        ({"step": float("nan")}, "step: got nan, needs more than 0"),
    ],
)
def test_wrong_calls(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study(**given)
    with pytest.raises(ValueError, match="c_log: got -1.0, needs a finite number from 0"):
        Damping(-1.0)
