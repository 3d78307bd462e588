"""Error templates: ways in which each equation of a core may be wrong, and what each does to the results of a case.

They are the changes of `refattn.verify.diagnose.changes`. An error that is none of these is in general nearly a sum of
some of them, times numbers, as long as it is an error of the same equation; that is what
`refattn.verify.diagnose.suspects` ranks by.

`reach` tells which results an equation can disturb at all: one that cannot change a result is not to blame for an error
in it, and one whose error would show in a result is not to blame where that result agrees.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import equations, philox
from refattn.golden.storage_types import SCALED, TYPES, has_gradient, spacing
from refattn.mechanisms.record import Case, Mechanism
from refattn.mechanisms.wrong import Call
from refattn.verify.diagnose.changes import Change, kinds
from refattn.verify.diagnose.mutants import core_tags, lower_type
from refattn.verify.outcome import Floats, Truth
from refattn.verify.tolerance.budget import SMALLEST, evaluate, rounded, rows, wide
from refattn.verify.tolerance.quantised import products

LARGE = 1e3
"""What stands for a NaN or an infinity that is not expected, in granted errors; a NaN is thrice that."""

MOST = 1e16
"""The largest error in granted errors: their squares are summed in float32."""

LEAST = 1e-3
"""What an element is granted at least, in roundings of a result's root mean square."""

DISTURBED = 0.1
"""Relative size of a disturbance: far above rounding, and small enough that nothing overflows."""

CHANGED = 1e-9
"""A result is disturbed where it changes by this much of its largest element; rounding alone changes it by 1e-13."""


def changes(mechanism: Mechanism, dtype: str) -> dict[str, dict[str, Change]]:
    """Return by equation of the core and by name what may be wrong with it in a kernel for this storage type.

    A kernel for a format with factors writes bfloat16, and rounds on the way as one for that type does.
    """
    dtype = "bfloat16" if dtype in SCALED else dtype
    return {tag.id: kinds(tag.axes or (), lower_type(mechanism, tag.id, dtype)) for tag in core_tags(mechanism)}


class Templates:
    """The error templates of one case: results as vectors of errors in units of what is granted.

    Parameters
    ----------
    mechanism, case, truth
        The case in one storage type, with the gradients of learned inputs where `truth` has an upstream gradient.
    known
        What may be wrong with each equation, from `changes`.
    """

    def __init__(self, mechanism: Mechanism, case: Case, truth: Truth, known: dict[str, dict[str, Change]]) -> None:
        self.mechanism, self.case, self.truth, self.known = mechanism, case, truth, known
        self.inputs = products(truth.inputs, truth.times)
        self.upstream = None if truth.upstream is None else truth.upstream.astype(np.float64)
        self.further = wide(truth.further)
        self.tensors = _results(mechanism, self.inputs, truth.values)
        self.targets = {name: rounded(truth, name) for name in self.tensors}
        self.size = sum(x.size for x in self.targets.values())
        self._granted = {name: self._granted_of(name) for name in self.tensors}
        self._predicted: dict[str, dict[str, NDArray[np.float32]]] = {}

    def call(self, grad: bool = True, **more: Any) -> Call:
        """Return the call of the case, for a wrong kernel."""
        return Call(self.inputs, self.case.options, self.upstream if grad else None, further=self.further, **more)

    def _granted_of(self, name: str) -> Floats:
        """Return the root mean square error that is granted to each element: at least its row's, with a rounding."""
        value = self.truth.values[name]
        granted = rows(name, self.truth.variance[name])
        if granted.size:
            granted = np.maximum(granted, np.mean(granted, axis=-1, keepdims=True))
        finite = np.where(np.isfinite(value), value, 0.0)
        step = spacing(finite, self.truth.stored[name])
        # Where exact zeros are granted nothing an error keeps its shape.
        least = (
            LEAST * TYPES[self.truth.stored[name]].unit * (float(np.sqrt(np.mean(finite**2))) if finite.any() else 1.0)
        )
        return np.maximum(np.sqrt(granted.reshape(value.shape) + step**2 / 12.0), max(least, SMALLEST))

    @cached_property
    def ran(self) -> dict[str, int]:
        """The equations that run in this case, in order, and how many elements they compute."""
        with equations.trace() as traced:
            evaluate(self.mechanism, self.inputs, self.case.options, self.upstream, further=self.further)
        found: dict[str, int] = {}
        for key, value in traced.items():
            id = key.partition("[")[0]
            found[id] = found.get(id, 0) + value.size
        return found

    def entry(self, name: str) -> str | None:
        """Return the first equation of the forward that an input or option changes: without it the value is another."""
        inputs = {given: x for given, x in self.inputs.items() if given != name}
        options = {given: x for given, x in self.case.options.items() if given != name}
        with equations.trace() as traced:
            evaluate(self.mechanism, self.inputs, self.case.options, None)
        try:
            with equations.trace() as without:
                evaluate(self.mechanism, inputs, options, None)
        except (TypeError, ValueError):  # it cannot be left out
            return None
        changed = (
            key
            for key, x in traced.items()
            if key not in without or not np.array_equal(x, without[key], equal_nan=True)
        )
        return next(changed, "").partition("[")[0] or None

    @cached_property
    def reached(self) -> dict[str, tuple[str, ...]]:
        """By equation, the results that it can disturb."""
        return reach(self.mechanism, self.case, self.inputs, self.upstream)

    def errors(self, name: str, x: NDArray[Any], target: Floats) -> Floats:
        """Return how far a result is from another, as a vector in units of what is granted."""
        x = np.asarray(x, dtype=np.float64)
        finite = np.isfinite(x) & np.isfinite(target)
        error = np.where(finite, np.where(finite, x, 0.0) - np.where(finite, target, 0.0), 0.0) / self._granted[name]
        unexpected = LARGE * (_code(x) - _code(target))
        return np.clip(error + unexpected, -MOST, MOST).reshape(-1)

    def marks(self, name: str, x: NDArray[Any]) -> Floats:
        """Return how far a result of the wrong reference is from the truth, neither of them rounded."""
        return self.errors(name, x, self.truth.values[name])

    def results(self, id: str, change: Change) -> dict[str, Floats] | None:
        """Return the results of the reference with one equation changed; None where it finds none."""
        try:
            with equations.mutate(id, change), np.errstate(all="ignore"):
                return evaluate(self.mechanism, self.inputs, self.case.options, self.upstream, further=self.further)
        except (ArithmeticError, ValueError):
            return None

    def predicted(self, id: str) -> dict[str, NDArray[np.float32]]:
        """Return what each kind of error in an equation does to each result: (kinds, elements)."""
        if id not in self._predicted:
            made = {t: np.zeros((len(self.known[id]), x.size), np.float32) for t, x in self.targets.items()}
            for n, change in enumerate(self.known[id].values() if id in self.ran else ()):
                results = self.results(id, change)
                for name, value in results.items() if results else ():
                    if name in made:
                        made[name][n] = self.marks(name, value)
            self._predicted[id] = made
        return self._predicted[id]


def _results(mechanism: Mechanism, inputs: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return the names of the results of a case, of some values: outputs, gradients of arrays and those of options."""
    learned = dict.fromkeys([*(name for name, x in inputs.items() if has_gradient(x)), *mechanism.differentiable])
    return [name for name in ("out", *mechanism.outputs, *(f"d_{name}" for name in learned)) if name in values]


def _code(x: Floats) -> Floats:
    return np.select([np.isnan(x), np.isposinf(x), np.isneginf(x)], [3.0, 1.0, -1.0], 0.0)


def reach(
    mechanism: Mechanism, case: Case, inputs: Mapping[str, NDArray[Any]], upstream: NDArray[Any] | None
) -> dict[str, tuple[str, ...]]:
    """Return by equation of the core the results that change when it is disturbed; () for one that does not run.

    `inputs` and `upstream` are those of the case, in float64. The gradients of learned inputs and of options are among
    the results where there is an upstream gradient.
    """

    def run(id: str, change: Change) -> dict[str, Any]:
        with equations.mutate(id, change), np.errstate(all="ignore"):
            try:
                return evaluate(mechanism, inputs, case.options, upstream)
            except (ArithmeticError, ValueError):  # it finds no result: nothing is as it was
                return {name: np.full_like(x, np.nan) for name, x in exact.items()}

    exact = evaluate(mechanism, inputs, case.options, upstream)
    names, found = _results(mechanism, inputs, exact), {}
    for tag in core_tags(mechanism):
        disturbed = [run(tag.id, change) for change in disturbances(tag.id)]
        found[tag.id] = tuple(name for name in names if any(differ(one[name], exact[name]) for one in disturbed))
    return found


def disturbances(id: str) -> tuple[Change, ...]:
    """Return what is done to an equation: a random change of every element, all signs flipped, and all zeroed.

    One alone could be something that does not matter, such as a factor of what is normalised afterwards. What is 0
    throughout is made something else.
    """

    def random(x: NDArray[Any]) -> NDArray[Any]:
        return DISTURBED * philox.normal(x.shape, seed=0, purpose=f"reach.{id}")

    return (
        lambda x: x * (1.0 + random(x)) if np.any(x) else random(x),
        lambda x: -x,
        lambda x: x * 0.0,
    )


def differ(got: Any, expected: Any) -> bool:
    """Tell whether a result has changed by more than rounding."""
    size = float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0))
    return not np.allclose(got, expected, rtol=0.0, atol=CHANGED * size, equal_nan=True)
