"""Where numbers stopped being finite: the first equation of a step whose value has a NaN or an infinity."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from refattn import backends, equations, tree
from refattn.mechanisms.record import Unsupported
from refattn.model import Params, network, pointer
from refattn.xp import Array, all_finite, concrete, is_floating, namespace

T = TypeVar("T")


class DivergedError(Exception):
    """The numbers of a run stopped being finite, or a block found no result; the message says which, and where."""


class _FoundError(Exception):
    """Ends the run of a step at the equation that was looked for."""


def watched(params: Params, compute: Callable[[], T], problem: Callable[[T], str | None]) -> T:
    """Return what a computation with a model returns; DivergedError where that is not finite or none, with the cause.

    `problem` says in words what of the result is not finite, or None.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # an overflow is told with its cause
            result = compute()
        what = problem(result)
    except Unsupported:  # nothing to do with numbers
        raise
    except ArithmeticError as error:  # a block that has no result for such numbers
        raise DivergedError(str(error)) from error
    except ValueError as error:
        if "not finite" not in str(error):  # a block refuses what is not finite, and other things
            raise
        what = "what a block is given"
    if what is not None:
        raise DivergedError(f"{what} is not finite; {first_not_finite(params, compute)}")
    return result


def first_not_finite(params: Params, compute: Callable[[], object]) -> str:
    """Run a computation with a model again, equation by equation, and return in words what is first not finite.

    An equation whose formula speaks of -inf, such as a mask, may have it.
    """
    modules = (*params.config.record.equation_modules, *params.config.record.extra_modules, network, pointer)
    # A remark stands beside a formula, some spaces away.
    formulas = {id: text.split("  ")[0] for module in modules for id, text in equations.declared(module).items()}
    passes: dict[str, int] = {}

    def hook(id: str, name: str, value: Array) -> Array:
        if not is_floating(value):
            return value
        xp = namespace(value)
        n = passes[id] = passes.get(id, -1) + 1
        infinite = xp.isinf(value)
        wrong = xp.isnan(value) | (infinite & (value > 0.0) if "-inf" in formulas.get(id, "") else infinite)
        if concrete(xp.any(wrong)):
            kind = "NaN" if concrete(xp.any(xp.isnan(value))) else "infinity"
            where = f"{id}[{n}]" if n else id
            raise _FoundError(f"first: {where} ({name}, {_place(modules, id)}): {kind} in {formulas.get(id, name)}")
        return value

    try:
        with equations.apply(hook), backends.use_workers(1), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            compute()
    except _FoundError as found:
        return str(found)
    except ValueError as error:  # a block that was given numbers that are not finite
        return f"first: {error}"
    return "every equation is, so a sum of them or the update is not"


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
    return parameter_not_finite(params)


def parameter_not_finite(params: Params) -> str | None:
    """Return the name of the first parameter that is not finite, or None."""
    leaves = tree.flatten(params)
    if all_finite(*leaves.values()) is not False:
        return None
    return next(name for name, leaf in leaves.items() if not all_finite(leaf))
