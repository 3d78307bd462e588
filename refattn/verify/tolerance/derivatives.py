"""Truth and budget of derivatives along a direction: of a forward, and of its gradients.

The truth is the definition on arrays that carry a tangent, in float64: ``t_out``, the derivative of `out` where all
arrays move along the direction, and ``h_q``, ..., the derivatives of the gradients ``d_q``, ..., that is the product of
the second derivative of <out, d_out> with the direction. Their budgets are measured as those of gradients are: every
operation of the definition is disturbed by random errors of the size of its rounding (`refattn.instruments.rounded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn import philox
from refattn.golden.inputs import make_upstream
from refattn.golden.storage_types import TYPES, has_gradient, stored
from refattn.instruments.dual import Tangents, tangents
from refattn.instruments.rounded import rounded
from refattn.mechanisms.record import Case, Mechanism
from refattn.verify.outcome import Truth
from refattn.verify.tolerance.budget import DRAWS, evaluate, finite, granted, unit_of, wide

DTYPES = ("float64", "float32")
"""Those that derivatives are judged in: what a kernel rounds to a storage type on the way the budget does not know."""

UNIT = 2.0**-40
"""The unit roundoff that is measured with: large beside that of float64, and small for checks inside a mechanism. What
rounding does is linear in it."""


def with_derivatives(
    truth: Truth, mechanism: Mechanism, case: Case, dtype: str, asked: tuple[str, ...], seed: int = 0
) -> Truth:
    """Return the truth of a case with that of its derivatives: "tangent", "hessian" or both."""
    along = {
        name: stored(philox.normal(x.shape, seed=seed, purpose=f"along.{mechanism.name}.{case.name}.{name}"), dtype)
        for name, x in truth.inputs.items()
        if has_gradient(x)
    }
    inputs, moved, upstream = wide(truth.inputs), wide(along), None
    if "hessian" in asked:
        shape = truth.values["out"].shape
        upstream = wide({"": stored(make_upstream(mechanism.name, case, "out", shape, dtype, seed=seed), dtype)})[""]

    def run(instrument: Tangents) -> dict[str, Any]:
        given = {name: instrument.array(x, moved.get(name)) for name, x in inputs.items()}
        found = evaluate(mechanism, given, case.options, None if upstream is None else instrument.array(upstream))
        return _named(mechanism, found, asked)

    with tangents() as exact:
        values = run(exact)
    with rounded(0.0, seed, 0) as still:
        base = run(still)
    errors: dict[str, list[Any]] = {name: [] for name in values}
    for draw in range(DRAWS):
        with rounded(UNIT, seed, draw) as erring:
            for name, disturbed in run(erring).items():
                errors[name].append((finite(disturbed) - finite(base[name])) * unit_of(dtype) / UNIT)
    types = {name: dtype for name in values}
    variance, bias = granted(values, {name: np.stack(draws) for name, draws in errors.items()}, types, dtype)
    # What is below the smallest normal number may be flushed to 0, and then meets arrays of the size of these.
    # The largest numbers there are stand in rows that do not exist.
    sizes = [np.abs(np.asarray(x, dtype=np.float64)) for x in inputs.values()]
    flushed = 2.0 ** TYPES[dtype].lowest * max(1.0, *(np.max(x, initial=0.0, where=x < 1e30) for x in sizes)) ** 2
    variance = {name: x + flushed**2 for name, x in variance.items()}
    return truth.beside(values=values, variance=variance, bias=bias, stored=types, along=along)


def _named(mechanism: Mechanism, found: Mapping[str, Any], asked: tuple[str, ...]) -> dict[str, Any]:
    outputs = ("out", *mechanism.outputs)
    named = {f"t_{n}": found[n].tangent for n in outputs} if "tangent" in asked else {}
    if "hessian" in asked:
        named |= {f"h_{n[2:]}": x.tangent for n, x in found.items() if n.startswith("d_")}
    return named
