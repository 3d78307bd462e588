"""What a reader of the tour of graph energy attention may set, and what a page of a layer draws on top.

The step is short, so that the flow is seen to move. With longer ones than these, and more of them, the flow is chaotic:
rounding would decide what is shown.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.graph_energy.core import forward
from refattn.mechanisms.graph_energy.system import energy
from refattn.mechanisms.record import Knob, Picture, Tour
from refattn.xp import Array, namespace


def energies(inputs: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the energy before the first step and after every step, which the definition does not compute."""
    flow = {name: knobs[name] for name in ("mu", "kappa", "step", "steps")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step that is too long is what the page shows
        _, saved = forward(*(inputs[name] for name in "qkv"), threshold=f"hard(tau={knobs['tau']!r})", **flow)
    return {f"energy[{t}]" if t else "energy": x for t, x in enumerate(energy(saved)[0, 0])}


TOUR = Tour(
    knobs=(
        Knob("kappa", "coupling strength κ", 1.0, 0.0, 2.0, 0.05),
        Knob("tau", "threshold τ", 0.4, 0.01, 1.0, 0.01),
        Knob("mu", "spring strength μ", 1.0, 0.0, 1.2),
        Knob("step", "step size", 0.1, 0.05, 0.8),
        Knob("steps", "number of steps", 20, 1, 30, 1),
    ),
    beside=energies,
)


def scores(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the score of each node of head 0, before the first step and after each."""
    later = [values[name] for name in values if name.startswith("GE.8")]
    return namespace(values["GE.5"]).stack([values["GE.5"], *later], axis=-1)[0, 0, :, 0, :]


def energies_of_heads(values: Mapping[str, Array], options: Mapping[str, Any]) -> Array:
    """Return the energy of each head, before the first step and after each; ValueError where there is none."""
    given = {name: values[name] for name in ("q", "k", "v")}
    _, saved = forward(**given, **options, implementation="dense")
    return energy(saved)[0, ...]


PICTURES = (
    Picture("matrix", "The graph: links w_ij of head 0.", lambda values, options: values["GE.links"][0, 0, ...]),
    Picture("lines", "The flow: the score x_j of each token of head 0, step by step.", scores),
    Picture("lines", "The energy of each head, step by step.", energies_of_heads),
)
