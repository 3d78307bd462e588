"""The tours compute what the definitions do, and every card, picture and sentence can be made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from guests import hopfield, power

from refattn.explorer.tour import build

MiniRacer: Any = pytest.importorskip("py_mini_racer", reason="mini-racer is not installed").MiniRacer

SETTINGS = [
    (hopfield.record, {"beta": 0.7, "updates": 4}, 3),
    (hopfield.record, {"beta": 2.9, "updates": 1}, 0),
    (hopfield.record, {"beta": 0.05, "updates": 8}, 4),
    (power.record, {"p": 2}, 3),
    (power.record, {"p": 6}, 1),
]

CARDS = """
(() => {
  const texts = [], of_ = of.mechanism;
  for (const side of ["forward", "backward"]) {
    of.state.side = side;
    for (const card of of_[side]) {
      texts.push(typeof card.say === "function" ? card.say() : card.say);
      const [name, ...at] = card.pick();
      texts.push(String(spelled(of, name, at)));
      texts.push(of.drawing(card, 600, 300));
      const known = /^\\w+(\\[i\\]|\\[,i\\]|\\[ii\\])?(\\+1|\\.first|\\.last)?$/;
      texts.push(card.show.flat().every((entry) => known.test(entry)) ? "columns" : "undefined");
    }
    texts.push(of_.picture(600, 300, false), of_.picture(300, 120, true), of_.caption(), of_.label());
  }
  return texts;
})()
"""


@pytest.mark.parametrize(("record", "knobs", "follow"), SETTINGS)
def test_a_tour_computes_what_the_definition_does(record: Any, knobs: dict[str, Any], follow: int) -> None:
    words = build.sentence(record.tour)
    python = {id: build._plain(x) for id, x in build.values(record, words, knobs, follow).items()}
    javascript = MiniRacer()
    try:
        javascript.eval(build.script(record) + f"const of = new Numbers({build.data(record)}, write);")
        asked = f"(of.set({json.dumps(knobs)}, {follow}), of.compare({json.dumps(python)}))"
        found = json.loads(str(javascript.eval(f"JSON.stringify({asked})")))
        texts = json.loads(str(javascript.eval(f"JSON.stringify({CARDS})")))
    finally:
        javascript.close()
    assert found["worst"] is not None and found["worst"] < 1e-9, found
    assert found["numbers"] > 100 and {id.partition("[")[0] for id in found["ids"]} == {*record.equations} - {
        id for id in record.equations if id.startswith(("MHA", "dMHA"))
    } - {"dHOP.fixed", "POW.state", "dPOW.state"}
    assert all(text and "NaN" not in text and "undefined" not in text for text in texts)
