"""What a reader of the tour of SympFormer may set, and words as particles: how they start, and how they are matched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Knob, Tour
from refattn.xp import namespace


def run(definition: Any, inputs: Mapping[str, Any], knobs: Mapping[str, Any], follow: int) -> None:
    """Call the definition once for each layer, all with the same weights; matrices other than w_q are the identity."""
    x = inputs["start"][None]
    xp, m = namespace(x), x.shape[2]
    p, t, same, ones = xp.zeros_like(x), xp.ones(1), xp.eye(m), xp.ones(m)
    weights = {"gain": ones, "gain_p": ones, "w_q": inputs["match"] * same, "w_k": same, "w_v": same, "w_o": same}
    numbers = {name: xp.full(1, knobs[name]) for name in ("h_x", "h_y", "c_log")}
    numbers["c_lin"] = xp.full(1, inputs["c_lin"])
    layers = []
    for _ in range(knobs["layers"]):
        (x, p), saved = definition.forward(x, p, t, w_b=same, **weights, **numbers)
        t = t + numbers["h_x"]
        layers.append(saved)
    d_x, d_p = xp.zeros_like(x), xp.zeros_like(p)
    d_x[0, follow] = x[0, follow] - inputs["target"]
    for saved in reversed(layers):
        gradients = definition.backward(saved, d_x, d_p)
        d_x, d_p = gradients["x"], gradients["p"]


TOUR = Tour(
    knobs=(
        Knob("layers", "layers", 6, 1, 8, 1),
        Knob("h_y", "kick (h_y)", 1.0, 0.2, 2.0, 0.05),
        Knob("c_log", "friction (c_log)", 1.0, 0.0, 4.0, 0.05),
        Knob("h_x", "drift (h_x)", 0.25, 0.05, 0.5, 0.01),
    ),
    given={  # three elements: of two, the normalisation would leave only signs
        "start": [[0.5, 1.6, -1.5], [-1.9, 0.7, 0.3], [-1.0, 2.0, -0.7], [2.2, -0.8, -0.2], [-0.1, -1.2, 1.0]],
        "match": 0.4,
        "c_lin": 0.0001,
        "target": [0.3, 3.8, -2.9],
    },
    instead="the definition moves tokens with momenta through layers, and a call of the core is one force, of their "
    "q, k and v alone",
    run=run,
)
