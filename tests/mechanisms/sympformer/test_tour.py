"""What the pictures of the tour of SympFormer say: kick, damping and drift are moves of the same particle."""

from __future__ import annotations

import re

import pytest

import refattn as ra
from refattn.explorer.tour import build
from tests.explorer.test_tours import engine, settings

MARKS = "(title) => of.marks(of.mechanism.forward.find((card) => card.title === title), 780, 400)"


def test_kick_damping_and_drift_follow_from_each_other() -> None:
    mechanism = ra.mechanism("sympformer")
    with engine(mechanism, build.data(mechanism)) as ask:
        for knobs, follow in settings(mechanism, 4):
            ask(f"(of.set({knobs!r}, {follow}), Object.assign(of.state, {{ t: 0, at: 0 }}), 0)")
            marks = {
                title: {one["key"]: one["set"] for one in ask(f"({MARKS})({title!r})") if not isinstance(one, str)}
                for title in ("Push", "Kick", "Damp", "Drift")
            }

            def ends(title: str, key: str, marks: dict[str, dict[str, dict[str, str]]] = marks) -> list[float]:
                return [float(x) for x in re.findall(r"-?[\d.]+", marks[title][key]["d"])[:4]]

            def way(title: str, key: str) -> list[float]:
                x, y, to, at = ends(title, key)
                return [to - x, at - y]

            kicked, left = way("Kick", "was"), ask("Math.exp(-of.values.damping(0))")
            assert way("Kick", "force") == pytest.approx(kicked, abs=0.1)  # all rest before the first layer
            assert kicked == pytest.approx([knobs["h_y"] * x for x in way("Push", "force")], abs=0.5)
            assert way("Damp", "was") == kicked
            assert way("Damp", f"momentum.{follow}") == pytest.approx([left * x for x in kicked], abs=0.1)
            ring, dot = marks["Drift"][f"ring.{follow}"], marks["Drift"][f"dot.{follow}"]
            assert ends("Drift", f"way.{follow}") == pytest.approx(
                [ring["cx"], ring["cy"], dot["cx"], dot["cy"]], abs=0.1
            )
            before = marks["Damp"][f"dot.{follow}"]
            assert [ring["cx"], ring["cy"]] == pytest.approx([before["cx"], before["cy"]], abs=0.1)
            x, y = way("Drift", f"way.{follow}")
            assert x * kicked[1] == pytest.approx(y * kicked[0], abs=1.0 + 0.1 * abs(x * kicked[1]))
