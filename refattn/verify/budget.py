"""Error budgets: how far an honest implementation in a given dtype may be from the truth, element by element.

The truth is the dense form in float64. A budget is not a number that somebody chose: every equation of the dense form
is disturbed, many times, by random errors of the size of its rounding (unit roundoff times the size of the terms that
it sums, as the record tells), forward and backward, and the root mean square of what this does to an output is the
noise that any implementation with such roundings has to be granted. A last rounding to the storage type comes on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import counter, equations
from refattn.golden.inputs import make, make_upstream
from refattn.golden.storage import TYPES, round_to, spacing
from refattn.mechanisms.record import Case, Mechanism

Floats = NDArray[np.float64]

DRAWS = 16
"""Disturbed runs per case: the noise is known to about 1/sqrt(2 * 16), that is 18 %."""


@dataclass(frozen=True)
class Truth:
    """One case in one storage type.

    Attributes
    ----------
    inputs
        The arrays that an implementation is given.
    upstream
        Gradient with respect to `out`; None where no gradients are asked.
    values
        Outputs ("out", "lse", ...) and gradients ("d_q", ...) in float64.
    variance
        By the same names, the square of the error that is granted, per element and against the rounded truth.
    stored
        By the same names, the type that a result is stored in.
    """

    inputs: dict[str, NDArray[Any]]
    upstream: NDArray[Any] | None
    values: dict[str, Floats]
    variance: dict[str, Floats]
    stored: dict[str, str]


def evaluate(
    mechanism: Mechanism, inputs: Mapping[str, Any], options: Mapping[str, Any], upstream: Any, form: str = "dense"
) -> dict[str, Any]:
    """Run a core; return its outputs and, where an upstream gradient is given, its gradients, by name."""
    assert mechanism.core is not None
    out, saved = mechanism.core.forward(**inputs, **options, form=form)
    values = {"out": out, **{name: getattr(saved, name) for name in mechanism.outputs}}
    if upstream is not None:
        values |= {f"d_{name}": g for name, g in mechanism.core.backward(saved, upstream).items()}
    return values


def wide(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays in float64; masks as they are."""
    return {name: x if x.dtype == np.bool_ else x.astype(np.float64) for name, x in arrays.items()}


def truth(
    mechanism: Mechanism, case: Case, dtype: str, *, grad: bool, seed: int = 0, roundings: tuple[str, ...] = ()
) -> Truth:
    """Return inputs, true results and error budget of a case in a storage type.

    `roundings` are equations that the implementation declares to round to the storage type, beside the record's.
    """
    inputs = make(mechanism.name, case, dtype, seed=seed)
    exact = wide(inputs)
    shape = evaluate(mechanism, exact, case.options, None)["out"].shape
    upstream = make_upstream(mechanism.name, case, "out", shape, dtype, seed=seed) if grad else None
    exact_upstream = None if upstream is None else upstream.astype(np.float64)
    with equations.trace() as traced:
        values = evaluate(mechanism, exact, case.options, exact_upstream)
    noise = _noise(mechanism, case, dtype, exact, exact_upstream, traced, values, roundings, seed)
    stored = {name: "float32" if name in mechanism.outputs and dtype != "float64" else dtype for name in values}
    variance = {}
    for name, value in values.items():
        # Against the rounded truth an honest result is off by one spacing where the noise, of mean size 0.8 sigma,
        # carries it over a rounding boundary, and by the noise itself where that is larger.
        variance[name] = noise[name] ** 2 + 0.8 * noise[name] * spacing(value, stored[name])
        # In float64 the truth has errors of the same size as the result that is judged.
        variance[name] *= 2.0 if dtype == "float64" else 1.0
    return Truth(inputs, upstream, values, variance, stored)


def _noise(
    mechanism: Mechanism,
    case: Case,
    dtype: str,
    inputs: Mapping[str, Any],
    upstream: Any,
    traced: equations.Trace,
    values: Mapping[str, Floats],
    roundings: tuple[str, ...],
    seed: int,
) -> dict[str, Floats]:
    """Return the root mean square of what rounding errors in every equation do to each result."""
    computed = TYPES["float64" if dtype == "float64" else "float32"].unit
    storage = TYPES[dtype].unit if dtype in ("float16", "bfloat16") else 0.0
    if unknown := [id for id in roundings if id not in mechanism.equations]:
        raise ValueError(f"roundings: got {', '.join(unknown)}, needs ids of {mechanism.name}")
    given = {**inputs, **case.options, "d_out": upstream}
    sizes = {}
    for id, value in traced.items():
        own = np.where(np.isfinite(value), np.abs(value), 0.0)
        sizes[id] = computed * (mechanism.magnitudes[id](given, traced) if id in mechanism.magnitudes else own)
        if storage and (id in mechanism.stored or id in roundings):
            size = mechanism.stored[id](given, traced) if id in mechanism.stored else own
            sizes[id] = np.hypot(sizes[id], storage * size)
    squares = {name: np.zeros(value.shape) for name, value in values.items()}
    for draw in range(DRAWS):

        def disturb(id: str, name: str, value: Floats, draw: int = draw) -> Floats:
            chance = counter.uniform(value.shape, seed=seed, purpose=f"budget.{id}", step=draw)
            return value + (2.0 * chance - 1.0) * sizes[id]

        with equations.apply(disturb):
            disturbed = evaluate(mechanism, inputs, case.options, upstream)
        for name, value in values.items():
            with np.errstate(invalid="ignore"):  # -inf minus -inf: an output that is not finite has no noise
                difference = disturbed[name] - value
            squares[name] += np.where(np.isfinite(value), difference, 0.0) ** 2
    return {name: np.sqrt(square / DRAWS) for name, square in squares.items()}


def rounded(truth: Truth, name: str) -> Floats:
    """Return the true result as the storage type holds it."""
    return round_to(truth.values[name], truth.stored[name])
