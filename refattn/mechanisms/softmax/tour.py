"""What a reader of the tour of softmax attention may set."""

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Knob, Tour


def arguments(inputs: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the definition: the queries are as many times as long as the knob says."""
    q = knobs["sharpness"] * inputs["q"]
    return {"q": q, "k": inputs["k"], "v": inputs["v"], "causal": knobs["causal"]}


TOUR = Tour(
    knobs=(
        Knob("sharpness", "query times (1 / temperature), larger is sharper", 1.0, 0.0, 5.0),
        Knob("causal", "hide what comes later (causal)", False),
    ),
    arguments=arguments,
)
