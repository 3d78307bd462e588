"""What a comparison is: a small declaration, one file of `asv_benchmarks/comparisons` each.

A side is a factory, written as text "module:function", since it is called in a process of its own. The factory gets the
parameters of a point and makes everything that is not to be timed; it returns the callable that is timed, which waits
until its work is done. It raises NotImplementedError or ImportError where it cannot run, and the report says why.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asv_benchmarks import comparisons
from asv_benchmarks.sides import Plan

Point = Mapping[str, Any]
"""The parameters of one row: text, numbers and flags, which the factories get by name."""


def _always() -> None:
    return None


@dataclass(frozen=True)
class Side:
    """One of the things that are compared.

    Attributes
    ----------
    label
        What the report calls it.
    target
        "module:function" of its factory.
    ours
        Whether it is refattn: reported are the ratios of these sides to the others.
    env
        Environment variables of its process.
    bound
        Whether it does a part of the work and nothing else, so that its results are none: they are not compared.
    why_not
        Says why it cannot run on this machine, or None where it can.
    """

    label: str
    target: str
    ours: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    bound: bool = False
    why_not: Callable[[], str | None] = _always


@dataclass(frozen=True)
class Comparison:
    """Sides, and the points at which they are compared.

    Attributes
    ----------
    name, title
        The name of its file and of its report, and what it is in words.
    text
        What is compared, for the head of the report.
    sides
        At least one of ours and one peer.
    grid
        The points.
    quick
        Tells whether a point belongs to the quick run too.
    threads
        Numbers of threads that every point is run with; None leaves each library as it is.
    plan
        How long each point is timed.
    agree
        How much the results of a side may differ from those of the first one, relative to the largest element of each
        array, so that what is timed is known to be the same; None: not compared.
    work, unit
        How much is done in one call at a point, and of what ("tokens"), for the rates in the report.
    """

    name: str
    title: str
    text: str
    sides: tuple[Side, ...]
    grid: tuple[Point, ...]
    quick: Callable[[Point], bool] = lambda point: True
    threads: tuple[int | None, ...] = (1, None)
    plan: Plan = Plan()
    agree: float | None = None
    work: Callable[[Point], float] | None = None
    unit: str = "calls"

    def __post_init__(self) -> None:
        labels = [side.label for side in self.sides]
        if len(set(labels)) < len(labels):
            raise ValueError(f"sides: got the labels {', '.join(labels)}, needs different ones")
        if len({side.ours for side in self.sides}) < 2:
            raise ValueError("sides: needs at least one that is ours and one that is not")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The ratios that are reported, by label: each of ours to each peer."""
        ours = [side.label for side in self.sides if side.ours]
        peers = [side.label for side in self.sides if not side.ours]
        return [(a, b) for a in ours for b in peers]


def describe(point: Point) -> str:
    """Return a point in words: texts and true flags by themselves, other values with their name."""
    words = []
    for name, value in point.items():
        if isinstance(value, bool):
            words += [name] if value else []
        else:
            words.append(value if isinstance(value, str) else f"{name}={value}")
    return " ".join(words)


def names() -> list[str]:
    """Return the names of all comparisons."""
    return sorted(module.name for module in pkgutil.iter_modules(comparisons.__path__))


def load(name: str) -> Comparison:
    """Return the comparison of this name: `COMPARISON` of its file."""
    if name not in names():
        raise ValueError(f"comparison: got {name!r}, needs one of {', '.join(names())}")
    found: Comparison = importlib.import_module(f"{comparisons.__name__}.{name}").COMPARISON
    return found
