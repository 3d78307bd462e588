"""Where numbers stopped being finite: the first equation of a step whose value has a NaN or an infinity."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

from refattn import backends, equations, tree
from refattn.model import Params, network
from refattn.train.step import loss_and_gradients
from refattn.xp import Array, all_finite, concrete, namespace


class _FoundError(Exception):
    """Ends the run of a step at the equation that was looked for."""


def first_not_finite(params: Params, inputs: Array, targets: Array, accumulate: int = 1) -> str:
    """Run the step again, equation by equation, and return in words which value is the first that is not finite.

    An equation whose formula speaks of -inf, such as a mask, may have it.
    """
    modules = (*params.config.record.tagged, network)
    formulas = {id: text for module in modules for id, text in equations.declared(module).items()}
    passes: dict[str, int] = {}

    def hook(id: str, name: str, value: Array) -> Array:
        xp = namespace(value)
        n = passes[id] = passes.get(id, -1) + 1
        wrong = xp.isnan(value) | (xp.isinf(value) if "-inf" not in formulas.get(id, "") else value > 1.0e300)
        if concrete(xp.any(wrong)):
            kind = "NaN" if concrete(xp.any(xp.isnan(value))) else "infinity"
            where = f"{id}[{n}]" if n else id
            raise _FoundError(f"{where} ({name}, {_place(modules, id)}): {kind} in {formulas.get(id, name)!r}")
        return value

    try:
        with equations.apply(hook), backends.use_workers(1):
            loss_and_gradients(params, inputs, targets, accumulate)
    except _FoundError as found:
        return str(found)
    except ValueError as error:  # a block that was given numbers that are not finite
        return str(error)
    return "no equation, so a sum of them or the update"


def _place(modules: tuple[ModuleType, ...], id: str) -> str:
    for module in modules:
        for tag in equations.tags(module):
            if tag.id == id and tag.claims:
                return f"{Path(str(module.__file__)).name}:{tag.line}"
    return "?"


def not_finite(loss: float, norm: float, params: Params) -> str | None:
    """Return in words which of these is not finite after a step, or None."""
    if not math.isfinite(loss):
        return "the loss"
    if not math.isfinite(norm):
        return "the norm of the gradients"
    return next((name for name, leaf in tree.flatten(params).items() if all_finite(leaf) is False), None)
