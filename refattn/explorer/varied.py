"""The same run with other inputs: what the page shows where its reader turns a knob.

A knob is the vector of one token, multiplied by a number, or a number among the options. All values of all equations
are computed beforehand, for each setting of one knob at a time, so that what is shown is what the library computes.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import backends
from refattn.mechanisms.record import Mechanism
from refattn.verify.traced import Run, Traced, record

TIMES = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
"""What the vector of a token is multiplied by."""

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
"""What a number is multiplied by."""

NUMBERS = 3
"""At most so many numbers have a knob."""


@dataclass(frozen=True)
class Knob:
    """Settings of one input, and what each comes to.

    Attributes
    ----------
    label
        What is set, in words.
    settings
        The numbers that it may be set to.
    here
        The index of the setting that the run has.
    runs
        The run with each setting.
    """

    label: str
    settings: tuple[float, ...]
    here: int
    runs: tuple[Traced, ...]


def knobs(mechanism: Mechanism, run: Run, found: Traced) -> Iterator[Knob]:
    """Yield the knobs of a run; settings with which the mechanism raises, or takes another way, are left out."""
    backend = backends.get("numpy")
    for name in [name for name in run.arguments if name in ("q", "k", "v", "x")]:
        others: dict[float, Traced | None] = {}
        for times in TIMES:
            arguments = {**run.arguments, name: _last_token_times(run.arguments[name], times)}
            others[times] = _attempt(mechanism, run, backend, arguments)
        token = run.arguments[name].shape[-2] - 1
        yield from _knob(f"{name} of token {token}, times", others, 1.0, found)
    for name, number in _numbers(mechanism, run):
        whole = isinstance(number, int)
        settings = range(number + 5) if whole else [share * number for share in SHARES]
        others = {float(at): _with_option(mechanism, run, backend, name, at) for at in settings}
        yield from _knob(name, others, float(number), found)


def _knob(label: str, others: dict[float, Traced | None], here: float, found: Traced) -> Iterator[Knob]:
    """Yield a knob where the run itself is one of at least three settings."""
    names = [step.id for step in found.steps]
    kept = {at: other for at, other in others.items() if other and [step.id for step in other.steps] == names}
    if here in kept and len(kept) >= 3 and _same(kept[here], found):
        settings = sorted(kept)
        yield Knob(label, tuple(settings), settings.index(here), tuple(kept[at] for at in settings))


def _same(a: Traced, b: Traced) -> bool:
    return all(
        x.value.shape == y.value.shape and np.allclose(x.value, y.value, rtol=1e-9, atol=1e-12, equal_nan=True)
        for x, y in zip(a.steps, b.steps, strict=True)
    )


def _last_token_times(x: NDArray[Any], times: float) -> NDArray[Any]:
    copy = np.array(x)
    copy[..., -1, :] *= times
    return copy


def _numbers(mechanism: Mechanism, run: Run) -> list[tuple[str, Any]]:
    """Return the numbers among the options of a definition or a core, by their own names."""
    if run.again is None:
        return []
    options = {**mechanism.defaults, **run.options}
    forward = getattr(mechanism.definition, "forward", None)
    if run.about[1] == "definition" and forward is not None:
        names = inspect.signature(forward).parameters
        chosen = {name: options.get(name, one.default) for name, one in names.items() if one.default is not one.empty}
        return _picked(mechanism, {name: x for name, x in chosen.items() if type(x) in (int, float)})
    given = mechanism.numbers(options) | options
    numbers = {name: x for name, x in given.items() if isinstance(x, (int, float)) and not isinstance(x, bool) and x}
    if mechanism.defaults.get("scale", 0.0) is None and "scale" not in numbers:
        numbers["scale"] = 1.0 / math.sqrt(run.arguments["q"].shape[-1])
    return _picked(mechanism, numbers)


def _picked(mechanism: Mechanism, numbers: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the first of some numbers, those before all others that a reader of the tour may set."""
    picked = [knob.name for knob in mechanism.tour.knobs] if mechanism.tour is not None else []
    return sorted(numbers.items(), key=lambda one: one[0] not in picked)[:NUMBERS]


def _with_option(mechanism: Mechanism, run: Run, backend: backends.Backend, name: str, number: float) -> Traced | None:
    assert run.again is not None
    own = mechanism.with_numbers(run.options, {name: number})
    try:
        other = run.again(**own)
    except (ValueError, ArithmeticError):
        return None
    return _attempt(mechanism, other, backend, run.arguments) if other.about == run.about else None


def _attempt(
    mechanism: Mechanism, run: Run, backend: backends.Backend, arguments: dict[str, NDArray[Any]]
) -> Traced | None:
    """Run, or return None where the mechanism has no answer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            return record(mechanism, run, backend, arguments)
    except (ValueError, ArithmeticError, RuntimeWarning):
        return None
