"""A core as a function of host arrays, and the error that rounding may cause there.

Allowed errors are derived. What rounding does to a result is measured on the dense implementation in float64: the value
of every equation is disturbed by random errors of the size of its rounding, forward and backward, as for the budgets of
foreign kernels (`refattn.verify.tolerance.budget`). The largest root mean square of the effect on an element of a
result is its noise. Two sides of an equality have this noise each, and `ELEMENT` times the root of the sum of their
squares is allowed. The noise is linear in the unit roundoff, hence measured once in units of it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn import backends, equations
from refattn.golden.storage_types import TYPES, has_gradient
from refattn.mechanisms.record import Mechanism
from refattn.verify.tolerance.budget import disturbance, finite, rounding_sizes
from refattn.verify.tolerance.compare import ELEMENT

Values = dict[str, NDArray[Any]]

DRAWS = 4
"""Disturbed runs for each noise; the largest over a tensor is known well from few."""


@dataclass(frozen=True)
class Core:
    """One implementation of a core on a backend in a dtype, as a function of host arrays; NumPy is given read-only
    ones.

    `known` holds the noises that were measured; cores of one mechanism may share it.
    """

    mechanism: Mechanism
    implementation: str
    backend: backends.Backend
    dtype: str
    known: dict[bytes, dict[str, float]] = field(default_factory=dict)

    def __call__(self, inputs: Values, options: Mapping[str, Any], upstream: Values) -> Values:
        """Return outputs ("out", "lse", ...) and gradients ("d_q", ...) on the host.

        `upstream` holds the gradients of outputs by the names that the backward gives them: "d_out", "d_lse", ...
        """
        values, saved = self.forward(inputs, options)
        return values | self.backward(saved, upstream)

    def forward(self, inputs: Values, options: Mapping[str, Any]) -> tuple[Values, Any]:
        """Return the outputs and what the backward reads."""
        assert self.mechanism.core is not None
        out, saved = self.mechanism.core.forward(**self._given(inputs), **options, implementation=self.implementation)
        outputs = {"out": out, **{name: getattr(saved, name) for name in self.mechanism.outputs}}
        return {name: self.backend.to_numpy(x) for name, x in outputs.items()}, saved

    def backward(self, saved: Any, upstream: Values) -> Values:
        """Return the gradients."""
        assert self.mechanism.core is not None
        gradients = self.mechanism.core.backward(saved, **self._given(upstream))
        return {f"d_{name}": self.backend.to_numpy(x) for name, x in gradients.items()}

    def noise(self, inputs: Values, options: Mapping[str, Any], upstream: Values) -> dict[str, float]:
        """Return the noise of every result, and of every equation by id, in this dtype."""
        arrays = {**inputs, **upstream}
        text = repr((sorted(options.items()), [(name, x.shape) for name, x in arrays.items()]))
        key = sha256(text.encode() + b"".join(x.tobytes() for x in arrays.values())).digest()
        if key not in self.known:
            self.known[key] = _measure(self.mechanism, inputs, options, upstream)
        return {name: TYPES[self.dtype].unit * x for name, x in self.known[key].items()}

    def _given(self, arrays: Values) -> dict[str, Any]:
        typed = {name: x.astype(self.dtype) if has_gradient(x) else x for name, x in arrays.items()}
        return {name: on_backend(self.backend, x) for name, x in typed.items()}


def on_backend(backend: backends.Backend, x: NDArray[Any]) -> Any:
    """Return a copy of a host array as an array of a backend; NumPy's is read-only."""
    fresh = np.array(x)
    fresh.flags.writeable = backend.name != "numpy"
    return backend.from_numpy(fresh)


def on_device(backend: backends.Backend, device: str) -> backends.Backend:
    """Return a backend that puts arrays on a device."""
    placed = copy.copy(backend)
    placed.from_numpy = functools.partial(backend.from_numpy, device=device)  # type: ignore[method-assign]
    return placed


def _measure(mechanism: Mechanism, inputs: Values, options: Mapping[str, Any], upstream: Values) -> dict[str, float]:
    """Return the noise of the dense implementation in units of the unit roundoff."""
    dense = host(mechanism)
    unit = TYPES["float32"].unit  # large against the rounding of the measurement itself, small enough to be linear
    with equations.trace() as traced:
        exact = dense(inputs, options, upstream)
    exact |= traced
    sizes = rounding_sizes(mechanism, {**inputs, **options, **upstream}, traced, unit)
    squares = {name: np.zeros(value.shape) for name, value in exact.items()}
    for draw in range(DRAWS):
        with equations.trace() as disturbed, equations.apply(disturbance(sizes, unit, draw)):
            results = dense(inputs, options, upstream)
        for name, value in (results | dict(disturbed)).items():
            squares[name] += (finite(value) - finite(exact[name])) ** 2
    return {name: math.sqrt(float(np.max(x, initial=0.0)) / DRAWS) / unit for name, x in squares.items()}


def host(mechanism: Mechanism) -> Core:
    """Return the definition: the dense implementation on NumPy in float64."""
    return Core(mechanism, mechanism.implementations[0], backends.get("numpy"), "float64")


def used_share(got: Values, expected: Values, *noises: Mapping[str, float]) -> float:
    """Return the largest used share of the allowed error; where one noise is given, both sides have it."""
    noises = noises if len(noises) > 1 else noises * 2
    worst = 0.0
    for name, wanted in expected.items():
        a, b = got[name].astype(np.float64), wanted.astype(np.float64)
        if a.shape != b.shape or not np.array_equal(_strange(a), _strange(b)):
            return math.inf
        error = float(np.max(np.abs(finite(a) - finite(b)), initial=0.0))
        allowed = ELEMENT * math.hypot(*(noise[name] for noise in noises))
        if error > 0.0:
            worst = max(worst, error / allowed if allowed > 0.0 else math.inf)
    return worst


def first_beyond(shares: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest share, and what it is of: where shares are beyond 1, the first of them in their order.

    What is wrong in one equation is wrong in those after it, and often more so.
    """
    worst = max(shares, key=shares.__getitem__)
    wrong = [name for name, share in shares.items() if not share <= 1.0]
    if len(wrong) > 1:
        return shares[worst], f"{wrong[0]}, the first of {len(wrong)} that differ"
    return shares[worst], worst


def _strange(x: NDArray[Any]) -> NDArray[Any]:
    """Return x with 0 in place of what is finite, and NaN, which equals nothing, where it is NaN."""
    return np.where(np.isfinite(x), 0.0, x)


def same_bits(a: Values, b: Values) -> float:
    """Return 0 where all arrays of `a` have the bits of those in `b`, otherwise infinity."""
    same = all(x.dtype == b[n].dtype and x.shape == b[n].shape and x.tobytes() == b[n].tobytes() for n, x in a.items())
    return 0.0 if same else math.inf
