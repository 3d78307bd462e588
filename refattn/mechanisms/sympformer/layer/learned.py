"""What the learned numbers of a block have come to, as the trainer writes them down: steps, damping, xi and others."""

from __future__ import annotations

from refattn.mechanisms.sympformer.integrators import rotation
from refattn.mechanisms.sympformer.integrators.four_calls import Doubled
from refattn.mechanisms.sympformer.params import Layer, Params
from refattn.xp import Array


def learned(params: Params) -> dict[str, Array]:
    """Return the learned numbers of a block by name, each an array of one element; xi itself, not its share."""
    known = params.config.numbers()
    if not params.numbers:
        return {}
    numbers = {
        name: number.value(params.numbers.get(name), next(iter(params.numbers.values())))
        for name, number in known.items()
    }
    found = {name: numbers[name] for name in params.numbers}
    if "xi" in found and isinstance(params.config.integrator, Doubled):
        found["xi"] = rotation.xi_of(Layer(None, params, numbers, True))[0]
    return found
