"""Rounding scales where kernels round more than the dense implementation does, in units of the unit roundoff.

Those of all other equations are measured, see `refattn.instruments.sized`. `inputs` holds the arguments of the call and
d_out; `values` the traced equations.

- A solution of M x = y errs as if M had been rounded: by |M^-1| |M| |x|, element by element. A fit whose operator is
  limited in its norm or rank errs as the one without limits, however it is found.
- A root errs as its equation does, by what is measured there. The errors of the iterations that find it do not add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.koopman.core import FAMILIES, MEAN
from refattn.mechanisms.koopman.options.fits import LIMITS, Separable
from refattn.mechanisms.option_kinds import numbers_of
from refattn.mechanisms.record import RoundingScale
from refattn.mechanisms.rounding_sizes import of_exponents
from refattn.ops.solve import identity
from refattn.xp import Array, namespace

Given = Mapping[str, Any]


def _weights(inputs: Given, values: Given) -> Array:
    return of_exponents(values["KOOP.3"], values["KOOP.masked"])


def _fit(found: str, right: str) -> RoundingScale:
    """The size of A, or of its adjoint dY, which solves the same system for another right-hand side."""

    def size(inputs: Given, values: Given) -> Array:
        xp, options = namespace(inputs["q"]), numbers_of(inputs, FAMILIES)
        z, g, a, y = values["KOOP.8"], values["KOOP.visible"], values[found], values[right]
        separable = isinstance(FAMILIES["fit"](inputs.get("fit", "stein")), Separable)
        if any(limit in options for limit in LIMITS):
            # It solves the same system for another right-hand side: what it errs by is cut, or made smaller, with it.
            ridge = xp.min(xp.asarray(options.get("ridge", MEAN)))
            ridge = ridge * z.shape[-1] * inputs["k"].shape[2] if options["scale"] == "mean" else ridge
        else:
            # The ridge that was used, whatever it was scaled by, from the equation itself.
            factor = a @ g if separable else a
            total = xp.sum(factor * factor, axis=(-2, -1), keepdims=True)
            ridge = xp.sum(factor * (y - z @ a @ g), axis=(-2, -1), keepdims=True) / xp.where(total > 0.0, total, 1.0)
            ridge = xp.where(ridge > 0.0, ridge, 1.0)
        rows, columns = a.shape[-2:]
        z = z + ridge * identity(rows, z) if separable else z
        matrix = z[..., :, None, :, None] * g[..., None, :, None, :]
        matrix = xp.reshape(matrix, (*matrix.shape[:-4], rows * columns, rows * columns))
        matrix = matrix if separable else matrix + ridge * identity(rows * columns, z)
        flat = xp.abs(xp.reshape(a, (*a.shape[:-2], rows * columns, 1)))
        return xp.reshape(xp.abs(xp.linalg.inv(matrix)) @ (xp.abs(matrix) @ flat) + flat, a.shape)

    return size


ROUNDING_SCALES: dict[str, RoundingScale | None] = {
    "KOOP.3": _weights,
    "KOOP.9": _fit("KOOP.9", "KOOP.6"),
    "KOOP.15": None,
    "dKOOP.6": _fit("dKOOP.6", "dKOOP.9"),
}

STORED = dict.fromkeys(("KOOP.3", "KOOP.4"))
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights, before their product with v, and
what is attended. The fit is computed in float32: in less an operator loses its transitions."""
