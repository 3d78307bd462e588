"""What a reader of the tour of the gated delta rule may set, and notes for the memory: one of them corrects another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Knob, Tour
from refattn.xp import namespace

ANN, BOB, CLEO = [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]  # of length 1; Cleo is like both


def arguments(inputs: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the definition: beta and log_decay are the same for all tokens."""
    q = inputs["q"]
    gates = {name: namespace(q).full(q.shape[:3], knobs[name]) for name in ("beta", "log_decay")}
    return {"q": q, "k": knobs["length"] * inputs["k"], "v": inputs["v"], **gates}


TOUR = Tour(
    knobs=(
        Knob("beta", "how firmly to write (β, learning rate)", 0.9, 0.0, 1.0, 0.05),
        Knob("log_decay", "fading (log decay)", -0.05, -1.0, 0.0, 0.05),
        Knob("length", "length of keys (norm)", 1.0, 0.5, 1.6, 0.05),
    ),
    words={
        "tokens": ["Ann tea", "Bob milk", "Cleo juice", "Bob water", "Ann coffee"],
        "follow": 4,
        "q": [[math.sqrt(2.0) * x for x in ANN]] * 5,  # every token asks about Ann; sqrt(2) undoes the scale
        "k": [ANN, BOB, CLEO, BOB, ANN],
        "v": [[0.8, 0.2], [-0.5, 0.3], [-0.7, 0.9], [-0.4, -0.6], [0.9, -0.7]],  # how warm, how sweet
        "target": [0.5, 0.7],
    },
    arguments=arguments,
    table={},  # tokens are notes, not words
)
