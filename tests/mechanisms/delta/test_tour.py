"""What the pictures of the tour of the gated delta rule say: arrows lead from answers to values, as the numbers do."""

from __future__ import annotations

import re

import pytest

import refattn as ra
from refattn.explorer.tour import build
from tests.explorer.test_tours import engine, settings

MARKS = "(title) => of.marks(of.mechanism.forward.find((card) => card.title === title), 780, 400)"


def test_arrows_lead_from_the_answer_to_the_value_and_to_what_is_remembered() -> None:
    mechanism = ra.mechanism("delta")
    with engine(mechanism, build.data(mechanism)) as ask:
        for knobs, follow in settings(mechanism, 4):
            ask(f"(of.set({knobs!r}, {follow}), Object.assign(of.state, {{ t: 3, at: 3 }}), 0)".replace("True", "true"))
            marks = {
                title: {one["key"]: one["set"] for one in ask(f"({MARKS})({title!r})") if not isinstance(one, str)}
                for title in ("Ask", "See what is missing", "Decide how much to change", "Write")
            }

            def ends(title: str, key: str, marks: dict[str, dict[str, dict[str, str]]] = marks) -> list[float]:
                return [float(x) for x in re.findall(r"-?[\d.]+", marks[title][key]["d"])[:4]]

            answer, miss = ends("Ask", "sum"), ends("See what is missing", "change")
            ring, dot = marks["See what is missing"]["ring.3"], marks["Write"]["dot.3"]
            assert answer[2:] == pytest.approx(miss[:2], abs=0.1)
            assert miss[2:] == pytest.approx([ring["cx"], ring["cy"]], abs=0.1)
            part = ends("Decide how much to change", "change")
            assert part[2] - part[0] == pytest.approx(knobs["beta"] * (miss[2] - miss[0]), abs=0.1)
            written = ends("Write", "push.3")
            assert written[:2] == pytest.approx(miss[:2], abs=0.1)
            assert written[2:] == pytest.approx([dot["cx"], dot["cy"]], abs=0.1)
