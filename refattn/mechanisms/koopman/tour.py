"""What a reader of the tour of Koopman attention may set, and points of one plane among which a query makes a path."""

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Knob, Tour


def run(definition: Any, inputs: Mapping[str, Any], knobs: Mapping[str, Any], follow: int) -> None:
    """Call the definition with the query that is followed alone: queries do not meet."""
    q, k, v = inputs["q"][None, None, follow : follow + 1], inputs["k"][None, None], inputs["v"][None, None]
    out, saved = definition.forward(q, k, v, **knobs)
    definition.backward(saved, out - inputs["target"])


TOUR = Tour(
    knobs=(
        Knob("updates", "updates", 4, 2, 6, 1),
        Knob("ridge", "ridge (how loose the fit)", 0.1, 0.01, 3.0),
        Knob("epsilon", "epsilon (look two moves ahead)", 0.1, 0.0, 1.0),
    ),
    words={
        "q": [[-0.1, -0.6], [2.0, 1.0], [-1.1, -0.9], [-0.1, 1.3], [1.8, -1.0]],
        "k": [[1.4, -1.7], [2.3, -1.9], [0.7, 1.7], [-0.4, -0.1], [2.5, 1.5]],
        "v": [[0.6, -1.9], [1.4, -2.2], [1.1, 1.2], [-0.6, 0.2], [2.3, 0.5]],
        "target": [-0.6, -1.2],
    },
    run=run,
)
