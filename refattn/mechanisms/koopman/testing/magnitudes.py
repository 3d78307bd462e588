"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

As everywhere, a sum of n terms t errs by sqrt(n) (|sum t| + sqrt(sum t^2)), and what is absent here errs relative to
its own value. Three things are particular:

- A kernel section k(x, k_j) sums products as large as |x| |k_j|, however small it is; x are the queries before.
- A root of psi(x) = t errs as if t had been rounded, with what psi sums there too: the Jacobian makes of that what it
  makes of the error itself.
- A solution of M x = y errs as if M had been rounded: by |M^-1| |M| |x|, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from refattn.mechanisms.families import numbers_of
from refattn.mechanisms.koopman.core import FAMILIES, MEAN
from refattn.mechanisms.koopman.options.fits import LIMITS, Separable
from refattn.mechanisms.koopman.options.perturbation import Pencil
from refattn.ops.heads import repeat_heads
from refattn.ops.solve import identity
from refattn.xp import Array, is_array, max_last, namespace

Given = Mapping[str, Any]
Magnitude = Callable[[Given, Given], Array]


def transposed(x: Array) -> Array:
    return namespace(x).matrix_transpose(x)


def of_product(a: Array, b: Array) -> Array:
    """Return the size of the error of a @ b."""
    xp = namespace(a, b)
    return math.sqrt(max(a.shape[-1], 1)) * (xp.abs(a @ b) + xp.sqrt((a * a) @ (b * b)))


def _rows(value: Array, norms: Array) -> Array:
    """Return the size of the error of inner products (..., j) of a vector with vectors of these norms (..., j)."""
    xp = namespace(value)
    safe = xp.where(norms > 0.0, norms, 1.0)
    finite = xp.where(xp.isfinite(value), xp.abs(value), 0.0)
    return finite + 2.0 * max_last(finite / safe) * norms


def _key_norms(inputs: Given) -> Array:
    keys = repeat_heads(inputs["k"], inputs["q"].shape[1])
    return namespace(keys).sqrt(namespace(keys).sum(keys * keys, axis=-1))  # (b, h, j)


def _points(inputs: Given, values: Any) -> list[Array]:
    """Return the queries q^0 ... q^{r-1} (b, h, i, d) that the update r of this pass starts from."""
    every = [inputs["q"], values.passes("KOOP.4")[0], *values.passes("KOOP.15")]
    return every[: len(every) - 1 - values.from_last]


def _section_at(inputs: Given, x: Array, keys: Array, value: Array) -> Array:
    """Return the size of the error of k(x, k_j) = `value` (..., p, j) for x (..., p, d), keys (..., j, d).

    Beside the product there is a function of |x - k_j|^2, which sums |x|^2 and |k_j|^2.
    """
    xp = namespace(x)
    squares = xp.sum(x * x, axis=-1)[..., :, None] + xp.sum(keys * keys, axis=-1)[..., None, :]
    bandwidth = _largest(inputs, "bandwidth", math.sqrt(x.shape[-1]))
    second = xp.abs(value - x @ transposed(keys)) * squares / (2.0 * bandwidth**2)
    return xp.abs(value) + of_product(x, transposed(keys)) + second


def _scores(inputs: Given, values: Given) -> Array:
    x, keys = _points(inputs, values)[-1], repeat_heads(inputs["k"], inputs["q"].shape[1])
    if inputs.get("similarity", "dot") == "dot":
        return of_product(x, transposed(keys)) / math.sqrt(x.shape[-1])
    return _section_at(inputs, x, keys, values["KOOP.2"])


def _weights(inputs: Given, values: Given) -> Array:
    # What is rounded is the exponent, of the size of the scores.
    xp = namespace(inputs["q"])
    scores = values["KOOP.masked"]
    largest = max_last(xp.where(xp.isfinite(scores), xp.abs(scores), 0.0))
    return values["KOOP.3"] * (2.0 + 2.0 * largest)


def _attended(inputs: Given, values: Given) -> Array:
    return of_product(values["KOOP.3"], repeat_heads(inputs["v"], inputs["q"].shape[1]))


def _gram(inputs: Given, values: Given) -> Array:
    xp, value, norms = namespace(inputs["q"]), values["KOOP.1"], _key_norms(inputs)[:, :, None, :]
    count = norms.shape[-1]
    at_keys = xp.concat([_rows(value[..., :count, :count], norms), xp.abs(value[..., :count, count:])], axis=-1)
    return xp.concat([at_keys, xp.abs(value[..., count:, :])], axis=-2)


def _starts_and_ends(inputs: Given, values: Given) -> tuple[Array, Array, int]:
    """Return x_0 ... x_L (b, h, i, L + 1, d) of an update's transitions, its keys (b, h, 1, j, d), and their number."""
    keys = keys_of(inputs)
    points = namespace(keys).stack(_points(inputs, values), axis=3)
    return points[..., points.shape[3] - values["KOOP.5"].shape[-2] - 1 :, :], keys, keys.shape[-2]


def _starts(inputs: Given, values: Given) -> Array:
    xp, value = namespace(inputs["q"]), values["KOOP.5"]
    points, keys, count = _starts_and_ends(inputs, values)
    at_keys = _section_at(inputs, points[..., :-1, :], keys, value[..., :count])
    return xp.where(value == 0.0, 0.0, xp.concat([at_keys, xp.abs(value[..., count:])], axis=-1))


def _targets(inputs: Given, values: Given) -> Array:
    xp, value, tau = namespace(inputs["q"]), values["KOOP.6"], _tau(inputs)
    points, keys, count = _starts_and_ends(inputs, values)
    starts = values["KOOP.5"]
    at_keys = _section_at(inputs, points[..., 1:, :], keys, (value + tau * starts)[..., :count])
    whole = xp.concat([at_keys, xp.abs(value[..., count:])], axis=-1)
    return xp.where(value == 0.0, 0.0, whole + tau * _starts(inputs, values))


def solved(value: Array, matrix: Array) -> Array:
    """Return |M^-1| |M| |x| for x = `value` (..., n, k), and what its own rounding is relative to."""
    xp = namespace(value)
    return xp.abs(xp.linalg.inv(matrix)) @ (xp.abs(matrix) @ xp.abs(value)) + xp.abs(value)


def _dual(inputs: Given, values: Given) -> Array:
    return transposed(solved(transposed(values["KOOP.7"]), values["KOOP.visible"]))


def fit(found: str, right: str) -> Magnitude:
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


def keys_of(inputs: Given) -> Array:
    return repeat_heads(inputs["k"], inputs["q"].shape[1])[:, :, None, :, :]


def _modes(inputs: Given, values: Given) -> Array:
    keys = keys_of(inputs)
    return of_product(values["KOOP.9"][..., : keys.shape[-2]], keys) + namespace(keys).abs(values["KOOP.10"])


def _lifted(inputs: Given, values: Given) -> Array:
    own = namespace(inputs["q"]).abs(values["KOOP.10"]) + namespace(inputs["q"]).abs(values["KOOP.12"])
    return own + of_product(values["KOOP.11"], values["KOOP.10"])


def _section(inputs: Given, values: Given) -> Array:
    xp, attended = namespace(inputs["q"]), values["KOOP.4"]
    if "KOOP.7" not in values:  # kappa_l(x) = k(x_l, x)
        points = _starts_and_ends(inputs, values)[0][..., :-1, :]
        return _section_at(inputs, points, attended[..., None, :], values["KOOP.13"][..., None])[..., 0]
    dual, keys = values["KOOP.7"][..., : inputs["k"].shape[2]], keys_of(inputs)
    # kappa(q') = N g(q'), where g(q') has errors of its own.
    row = attended[..., None, :]
    at_keys = row @ transposed(keys)
    errors = _section_at(inputs, row, keys, at_keys + _largest(inputs, "weight", 1.0))
    own = xp.sqrt((dual * dual) @ transposed(at_keys * at_keys + errors * errors))[..., 0]
    return xp.abs(values["KOOP.13"]) + own


def _image(inputs: Given, values: Given) -> Array:
    """The size of t, and of what psi sums at the root: psi(x) is wrong by as much, and J^-1 makes of both the same."""
    xp = namespace(inputs["q"])
    attended, root, section = values["KOOP.4"], values["KOOP.15"], values["KOOP.13"][..., None]
    own = xp.abs(values["KOOP.14"]) + xp.abs(attended) * _tau(inputs)
    own = own + of_product(transposed(values["KOOP.12"]), section)[..., 0]
    # kappa(x) is about as much larger than kappa(q') as x is than q'.
    squares = [xp.sum(x * x, axis=-1, keepdims=True) for x in (root, attended)]
    larger = xp.sqrt(squares[0] / xp.where(squares[1] > 0.0, squares[1], 1.0))
    linear, share = _shares(inputs)
    moved = of_product(transposed(values["KOOP.10"]), section)[..., 0] * xp.where(larger > 1.0, larger, 1.0)
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


MAGNITUDES: dict[str, Magnitude] = {
    "KOOP.2": _scores,
    "KOOP.3": _weights,
    "KOOP.4": _attended,
    "KOOP.1": _gram,
    "KOOP.5": _starts,
    "KOOP.6": _targets,
    "KOOP.7": _dual,
    "KOOP.9": fit("KOOP.9", "KOOP.6"),
    "KOOP.10": _modes,
    "KOOP.11": lambda inputs, values: of_product(values["KOOP.9"], transposed(values["KOOP.5"])),
    "KOOP.12": _lifted,
    "KOOP.13": _section,
    "KOOP.14": _image,
}

STORED: dict[str, Magnitude] = {
    "KOOP.3": lambda inputs, values: values["KOOP.3"],
    "KOOP.4": lambda inputs, values: values["KOOP.4"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights, before their product with v, and
what is attended. The fit is computed in float32: in less an operator loses its transitions."""
