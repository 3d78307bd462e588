"""What a reader of the tour of graph energy attention may set.

The step is short, so that the flow is seen to move. With longer ones than these, and more of them, the flow is chaotic:
rounding would decide what is shown.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.graph_energy.core import forward
from refattn.mechanisms.graph_energy.system import energy
from refattn.mechanisms.record import Knob, Tour


def energies(inputs: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the energy before the first step and after every step, which the definition does not compute."""
    flow = {name: knobs[name] for name in ("kappa", "step", "steps")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step that is too long is what the page shows
        _, saved = forward(*(inputs[name] for name in "qkv"), threshold=f"hard(tau={knobs['tau']!r})", **flow)
    return {f"energy[{t}]" if t else "energy": x for t, x in enumerate(energy(saved)[0, 0])}


TOUR = Tour(
    knobs=(
        Knob("kappa", "pull κ", 1.0, 0.0, 2.0, 0.05),
        Knob("tau", "threshold τ", 0.4, 0.01, 1.0, 0.01),
        Knob("step", "length h of a step", 0.1, 0.05, 0.8),
        Knob("steps", "number of steps", 20, 1, 30, 1),
    ),
    beside=energies,
)
