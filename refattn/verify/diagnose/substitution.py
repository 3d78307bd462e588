"""Where a kernel leaves the reference, from values of its own: what it gives for some of the equations.

Its values are put into the reference, each in place of the equation that it is named after, forward and backward. What
the reference then computes for an equation follows from the values that the kernel gave before, and is compared
with what it gave for this one. The first that differs by more than rounding is wrong, or something between it and
those before; which equations these are is found by disturbing all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from refattn import equations, philox
from refattn.golden.storage_types import TYPES, round_to, spacing
from refattn.mechanisms.record import Mechanism
from refattn.verify.diagnose.changes import Change
from refattn.verify.diagnose.error_templates import Templates, differ, disturbances
from refattn.verify.diagnose.mutants import core_tags
from refattn.verify.outcome import Departure, Floats, Result, Truth
from refattn.verify.tolerance.budget import DRAWS, SIGMA, disturbance, evaluate, finite, kernel_sizes, unit_of
from refattn.verify.tolerance.compare import compare

Values = dict[str, Floats]

CLEAR = 10.0
"""A share of the allowed error that is surely a mistake: what rounding does to a single step is known less well than
what all steps together do to a result."""


def departure(templates: Templates, result: Result, dtype: str) -> Departure | None:
    """Return the first of the values of a kernel that does not follow from those before it.

    Parameters
    ----------
    templates
        The case.
    result
        What was returned: equations by their ids (a second pass as ``SM.3[1]``) beside outputs and gradients.
    dtype
        The storage type of the case.

    Returns
    -------
    Departure
        None where nothing departs, or no equation was given.
    """
    with equations.trace() as traced:
        evaluate(templates.mechanism, templates.inputs, templates.case.options, templates.upstream)
    tensors = result.tensors
    given = {key: tensors[key].astype(np.float64) for key in traced if key in tensors}
    if not given:
        return None
    types = {key: _held(given[key], result.dtypes[key], dtype) for key in given}
    usable = {key: x for key, x in given.items() if x.shape == traced[key].shape}
    found = _computed(templates, usable)
    noise = _noise(templates, usable, types, found, dtype)
    verdicts = []
    for key in found:
        if key not in given and key not in tensors:
            continue
        value = given[key] if key in given else tensors[key]
        stored = types[key] if key in given else templates.truth.stored[key]
        error = noise[key]
        variance = error**2 + 0.8 * error * spacing(finite(found[key]), stored)
        variance *= 2.0 if dtype == "float64" else 1.0
        # A bias is not judged: a constant that was rounded once, in one of many equations, makes one.
        local = Truth({}, None, {key: found[key]}, {key: variance}, {key: math.inf}, {key: stored})
        verdicts.append(compare(key, value, stored, local))
    departed = [verdict for verdict in verdicts if not verdict.agrees]
    if not departed:
        return None
    clear = next((verdict for verdict in departed if verdict.share > CLEAR), departed[0])
    return Departure(templates.case.name, (*given,), clear, tuple(_between(templates, usable, clear.tensor)))


def earliest(mechanism: Mechanism, found: Iterable[Departure | None]) -> Departure | None:
    """Return the departure that comes first in the order of computation."""
    ids = [tag.id for tag in core_tags(mechanism)]
    forward = [id for id in ids if not id.startswith("d")]
    order = [*forward, "out", *mechanism.outputs, *(id for id in ids if id not in forward)]

    def place(one: Departure) -> int:
        id = one.verdict.tensor.partition("[")[0]
        return order.index(id) if id in order else len(order)

    return min((one for one in found if one), key=place, default=None)


def _held(x: Floats, declared: str, dtype: str) -> str:
    """Return the type that values are of: that of the case where it holds them all, whatever they came in."""
    return dtype if np.array_equal(round_to(x, dtype), x, equal_nan=True) else declared


def _computed(
    templates: Templates, given: Mapping[str, Floats], change: Callable[[str, Any], Any] | None = None
) -> Values:
    """Return, in order, what follows for every equation and result from the values given; `change` disturbs it."""
    found: Values = {}
    passes: dict[str, int] = {}

    def hook(id: str, name: str, value: Any) -> Any:
        number = passes.get(id, 0)
        passes[id] = number + 1
        key = f"{id}[{number}]" if number else id
        found[key] = value if change is None else change(key, value)
        return given.get(key, found[key])

    with equations.apply(hook), np.errstate(all="ignore"):
        results = evaluate(templates.mechanism, templates.inputs, templates.case.options, templates.upstream)
    outputs = {name: x for name, x in results.items() if not name.startswith("d_")}
    forward = {key: x for key, x in found.items() if not key.startswith("d")}
    backward = {key: x for key, x in found.items() if key.startswith("d")}
    return forward | outputs | backward | {name: x for name, x in results.items() if name not in outputs}


def _noise(
    templates: Templates, given: Mapping[str, Floats], types: Mapping[str, str], found: Values, dtype: str
) -> Values:
    """Return the root mean square of what rounding does to each value, computed from the values given before it."""
    arguments = {**templates.inputs, **templates.case.options, "d_out": templates.upstream}
    steps = {key: x for key, x in found.items() if "." in key}
    sizes = kernel_sizes(templates.mechanism, arguments, steps, dtype)
    unit = unit_of(dtype)
    squares = {key: np.zeros(x.shape) for key, x in found.items()}
    for draw in range(DRAWS):
        rounded = {
            key: x * (1.0 + SIGMA * TYPES[types[key]].unit * _signs(key, x.shape, draw)) for key, x in given.items()
        }
        disturbed = _computed(templates, rounded, functools.partial(_disturbed, disturbance(sizes, unit, draw)))
        for key, x in found.items():
            squares[key] += np.where(np.isfinite(x), finite(disturbed[key]) - finite(x), 0.0) ** 2 / DRAWS
    return {key: np.sqrt(square) for key, square in squares.items()}


def _disturbed(rounding: equations.Hook, key: str, value: Any) -> Any:
    return rounding(key, "", value)


def _signs(key: str, shape: tuple[int, ...], draw: int) -> Floats:
    """Return +1 or -1 for every element of a value that was stored."""
    return np.where(philox.uniform(shape, seed=0, purpose=f"substitution.{key}", step=draw) < 0.5, -1.0, 1.0)


def _between(templates: Templates, given: Mapping[str, Floats], key: str) -> list[str]:
    """Return the equations that compute a value from those given before it: its own one among them.

    Not those that a value before it depends on, which is right, where there are others.
    """
    exact = _computed(templates, given)
    before = [name for name in list(exact)[: list(exact).index(key)] if name in given]
    able, alone = [], []
    for tag in core_tags(templates.mechanism):
        disturbed = [_computed(templates, given, _only(tag.id, change)) for change in disturbances(tag.id)]
        changed = [name for name in (*before, key) if any(differ(one[name], exact[name]) for one in disturbed)]
        able += [tag.id] if key in changed else []
        alone += [tag.id] if changed == [key] else []
    return alone or able


def _only(id: str, change: Change) -> Callable[[str, Any], Any]:
    """Return the change of one equation alone."""
    return lambda key, value: change(value) if key.partition("[")[0] == id else value
