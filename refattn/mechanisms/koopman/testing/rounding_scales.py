"""Rounding scales where kernels round more than the dense implementation does, in units of the unit roundoff.

Those of all other equations are measured, see `refattn.instruments.sized`; `values.size` has them. `inputs` holds the
arguments of the call and d_out; `values` the traced equations. Three things are particular:

- A root of psi(x) = t errs as if t had been rounded, with what psi sums there too: the Jacobian makes of that what it
  makes of the error itself. The errors of the iterations that find it do not add up.
- A solution of M x = y errs as if M had been rounded: by |M^-1| |M| |x|, element by element. A fit whose operator is
  limited in its norm or rank errs as the one without limits, however it is found.
- The share b of the perturbation multiplies what others compute first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from refattn.mechanisms.families import numbers_of
from refattn.mechanisms.koopman.core import FAMILIES, MEAN
from refattn.mechanisms.koopman.options.fits import LIMITS, Separable
from refattn.mechanisms.koopman.options.perturbation import Pencil
from refattn.mechanisms.record import RoundingScale
from refattn.ops.solve import identity
from refattn.xp import Array, is_array, max_last, namespace, transpose

Given = Mapping[str, Any]


def of_product(a: Array, b: Array) -> Array:
    """Return the size of the error of a @ b."""
    xp = namespace(a, b)
    return math.sqrt(max(a.shape[-1], 1)) * (xp.abs(a @ b) + xp.sqrt((a * a) @ (b * b)))


def _weights(inputs: Given, values: Given) -> Array:
    # What is rounded is the exponent, of the size of the scores.
    xp = namespace(inputs["q"])
    scores = values["KOOP.masked"]
    largest = max_last(xp.where(xp.isfinite(scores), xp.abs(scores), 0.0))
    return values["KOOP.3"] * (2.0 + 2.0 * largest)


def solved(value: Array, matrix: Array) -> Array:
    """Return |M^-1| |M| |x| for x = `value` (..., n, k), and what its own rounding is relative to."""
    xp = namespace(value)
    return xp.abs(xp.linalg.inv(matrix)) @ (xp.abs(matrix) @ xp.abs(value)) + xp.abs(value)


def fit(found: str, right: str) -> RoundingScale:
    """The size of A, or of its adjoint dY, which solves the same system for another right-hand side."""

    def size(inputs: Given, values: Given) -> Array:
        xp = namespace(inputs["q"])
        z, g, a, y = values["KOOP.8"], values["KOOP.visible"], values[found], values[right]
        separable, given = isinstance(FAMILIES["fit"](inputs.get("fit", "stein")), Separable), _options(inputs)
        if limited(inputs):
            # It solves the same system for another right-hand side: what it errs by is cut, or made smaller, with it.
            ridge = _smallest(given.get("ridge", MEAN))
            ridge = ridge * z.shape[-1] * inputs["k"].shape[2] if given["scale"] == "mean" else ridge
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
        flat = xp.reshape(a, (*a.shape[:-2], rows * columns, 1))
        return xp.reshape(solved(flat, matrix), a.shape)

    return size


def _lifted(inputs: Given, values: Given) -> Array:
    own = namespace(inputs["q"]).abs(values["KOOP.10"]) + namespace(inputs["q"]).abs(values["KOOP.12"])
    return own + of_product(values["KOOP.11"], values["KOOP.10"])


def _image(inputs: Given, values: Given) -> Array:
    """The size of t, and of what psi sums at the root: psi(x) is wrong by as much, and J^-1 makes of both the same."""
    xp = namespace(inputs["q"])
    attended, root, section = values["KOOP.4"], values["KOOP.15"], values["KOOP.13"][..., None]
    own = xp.abs(values["KOOP.14"]) + xp.abs(attended) * _tau(inputs)
    own = own + of_product(transpose(values["KOOP.12"]), section)[..., 0]
    # kappa(x) is about as much larger than kappa(q') as x is than q'.
    squares = [xp.sum(x * x, axis=-1, keepdims=True) for x in (root, attended)]
    larger = xp.sqrt(squares[0] / xp.where(squares[1] > 0.0, squares[1], 1.0))
    linear, share = _shares(inputs)
    moved = of_product(transpose(values["KOOP.10"]), section)[..., 0] * xp.where(larger > 1.0, larger, 1.0)
    return own + linear * xp.abs(root) + share * moved


def _shares(inputs: Given) -> tuple[float, float]:
    """Return how much of x and of phi(x) - tau x psi(x) holds, at most."""
    epsilon, mix = _largest(inputs, "epsilon", MEAN), _largest(inputs, "mix", 1.0)
    kind = FAMILIES["perturbation"](inputs.get("perturbation", "identity"))
    a, b = (replace(kind, mix=mix) if isinstance(kind, Pencil) else kind).shares(epsilon)
    return a + b * _tau(inputs), b


def _tau(inputs: Given) -> float:
    return float(_options(inputs).get("tau", 0.0))


def _options(inputs: Given) -> dict[str, Any]:
    return numbers_of(inputs, FAMILIES)


def limited(inputs: Given) -> bool:
    """Tell whether the fit's operator is limited in its norm or rank."""
    return any(limit in _options(inputs) for limit in LIMITS)


def _smallest(value: Any) -> float:
    return float(namespace(value).min(value)) if is_array(value) else float(value)


def _largest(inputs: Given, name: str, usual: float) -> float:
    value = _options(inputs).get(name)
    return usual if value is None else float(namespace(value).max(value)) if is_array(value) else float(value)


def _d_modes(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    turned = of_product(transpose(values["KOOP.11"]), values["dKOOP.12"])
    fixed = xp.abs(values["KOOP.13"][..., None] * values["dKOOP.14"][..., None, :])
    return xp.abs(values["dKOOP.10"]) + xp.abs(values["dKOOP.12"]) + turned + fixed


def _d_koopman(inputs: Given, values: Given) -> Array:
    return of_product(values["dKOOP.12"], transpose(values["KOOP.10"]))


def _d_inner(inputs: Given, values: Given) -> Array:
    return of_product(values["dKOOP.6"] @ values["KOOP.visible"], transpose(values["KOOP.9"])) + of_product(
        values["dKOOP.6"], values["KOOP.visible"] @ transpose(values["KOOP.9"])
    )


def _d_dual(inputs: Given, values: Given) -> Array:
    return namespace(inputs["q"]).abs(values["dKOOP.7"]) + of_product(values["dKOOP.8"], values["KOOP.5"])


def _d_gram(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    largest = xp.max(xp.abs(values["dKOOP.visible"]), axis=(-2, -1), keepdims=True)
    return xp.abs(values["dKOOP.visible"]) + 0.25 * xp.where(values["dKOOP.visible"] == 0.0, 0.0, largest)


def _d_attended(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.abs(values["dKOOP.4"]) + 0.5 * max_last(xp.abs(values["dKOOP.4"]))


def _of_row(id: str) -> RoundingScale:
    """Sums of many parts: the size of a part is about that of the largest of the row."""

    def size(inputs: Given, values: Given) -> Array:
        value = namespace(inputs["q"]).abs(values[id])
        return value + max_last(value)

    return size


def _single(id: str, times: float) -> RoundingScale:
    """As often its own value: a number that is summed over everything has a factor of 4 for its terms of both signs."""
    return lambda inputs, values: times * abs(values[id])


def _d_ridge(inputs: Given, values: Any) -> Array:
    """Where the norm alone decides the operator, nothing depends on the ridge: terms of both signs add up to 0."""
    xp, value = namespace(inputs["q"]), values["dKOOP.ridge"]
    size = 4.0 * xp.abs(value)
    if not limited(inputs):
        return size
    adjoints, found = reversed(values.passes("dKOOP.6")), values.passes("KOOP.9")
    terms = [d * (a @ values["KOOP.visible"]) for d, a in zip(adjoints, found, strict=True)]
    whole = xp.stack([xp.sqrt(xp.sum(x * x)) for x in terms])
    return size + xp.reshape(whole, (-1, *(1,) * (len(value.shape) - 1)))


ROUNDING_SCALES: dict[str, RoundingScale] = {
    "KOOP.3": _weights,
    "KOOP.9": fit("KOOP.9", "KOOP.6"),
    "KOOP.12": _lifted,
    "KOOP.14": _image,
    "KOOP.15": _single("KOOP.15", 1.0),
    "dKOOP.15": _single("dKOOP.15", 1.0),
    "dKOOP.10": _d_modes,
    "dKOOP.11": _d_koopman,
    "dKOOP.6": fit("dKOOP.6", "dKOOP.9"),
    "dKOOP.8": _d_inner,
    "dKOOP.7": _d_dual,
    "dKOOP.visible": _d_gram,
    "dKOOP.4": _d_attended,
    **{id: _of_row(id) for id in ("dKOOP.1", "dKOOP.q", "dKOOP.k")},
    "dKOOP.ridge": _d_ridge,
    **{id: _single(id, 4.0) for id in ("dKOOP.epsilon", "dKOOP.mix", "dKOOP.bandwidth", "dKOOP.weight")},
}

STORED = dict.fromkeys(("KOOP.3", "KOOP.4"))
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights, before their product with v, and
what is attended. The fit is computed in float32: in less an operator loses its transitions."""
