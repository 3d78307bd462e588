"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

As everywhere, a sum of n terms t errs by sqrt(n) (|sum t| + sqrt(sum t^2)), and what is absent here errs relative to
its own value. Two things are particular:

- A kernel section k(x, k_j) sums products as large as |x| |k_j|, however small it is. Its row tells how large |x| is:
  the size is the largest |k(x, k_j')| / |k_j'| of the row times |k_j|.
- A solution of M x = y errs as if M had been rounded: by |M^-1| |M| |x|, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.solve import identity
from refattn.xp import Array, max_last, namespace

Given = Mapping[str, Any]
Magnitude = Callable[[Given, Given], Array]


def _t(x: Array) -> Array:
    return namespace(x).matrix_transpose(x)


def _product(a: Array, b: Array) -> Array:
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


def _scores(inputs: Given, values: Given) -> Array:
    return _rows(values["KOOP.1"], _key_norms(inputs)[:, :, None, :])


def _weights(inputs: Given, values: Given) -> Array:
    # What is rounded is the exponent, of the size of the scores.
    xp = namespace(inputs["q"])
    scores = values["KOOP.2"]
    largest = max_last(xp.where(xp.isfinite(scores), xp.abs(scores), 0.0))
    return values["KOOP.3"] * (2.0 + 2.0 * largest)


def _attended(inputs: Given, values: Given) -> Array:
    return _product(values["KOOP.3"], repeat_heads(inputs["v"], inputs["q"].shape[1]))


def _between(inputs: Given, values: Given) -> Array:
    return _rows(values["KOOP.5"], _key_norms(inputs)[:, :, None, :])


def _sections(id: str) -> Magnitude:
    def size(inputs: Given, values: Given) -> Array:
        xp, value, norms = namespace(inputs["q"]), values[id], _key_norms(inputs)
        count = norms.shape[-1]
        known = _rows(value[..., :count], norms[:, :, None, None, :])
        return xp.concat([known, xp.abs(value[..., count:])], axis=-1)

    return size


def _solved(value: Array, matrix: Array) -> Array:
    """Return |M^-1| |M| |x| for x = `value` (..., n, k), and what its own rounding is relative to."""
    xp = namespace(value)
    return xp.abs(xp.linalg.inv(matrix)) @ (xp.abs(matrix) @ xp.abs(value)) + xp.abs(value)


def _dual(inputs: Given, values: Given) -> Array:
    return _t(_solved(_t(values["KOOP.9"]), values["KOOP.6"]))


def _fit(found: str, right: str) -> Magnitude:
    """The size of A, or of its adjoint dY, which solves the same system for another right-hand side."""

    def size(inputs: Given, values: Given) -> Array:
        xp = namespace(inputs["q"])
        z, g, a, y = values["KOOP.10"], values["KOOP.6"], values[found], values[right]
        # The ridge that was used, whatever it was scaled by, from the equation itself.
        separable = inputs.get("fit", "stein") == "separable"
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
        return xp.reshape(_solved(flat, matrix), a.shape)

    return size


def _keys(inputs: Given) -> Array:
    return repeat_heads(inputs["k"], inputs["q"].shape[1])[:, :, None, :, :]


def _modes(inputs: Given, values: Given) -> Array:
    keys = _keys(inputs)
    return _product(values["KOOP.11"][..., : keys.shape[-2]], keys) + namespace(keys).abs(values["KOOP.12"])


def _lifted(inputs: Given, values: Given) -> Array:
    own = namespace(inputs["q"]).abs(values["KOOP.12"]) + namespace(inputs["q"]).abs(values["KOOP.14"])
    return own + _product(values["KOOP.13"], values["KOOP.12"])


def _section(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    norms = xp.sqrt(xp.sum(xp.abs(values["KOOP.10"]) * identity(values["KOOP.10"].shape[-1], inputs["q"]), axis=-1))
    return _rows(values["KOOP.15"], norms)


def _image(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    own = xp.abs(values["KOOP.16"]) + xp.abs(values["KOOP.4"]) * float(inputs.get("tau", 0.0))
    return own + _product(_t(values["KOOP.14"]), values["KOOP.15"][..., None])[..., 0]


def _slope(inputs: Given) -> float:
    """How much psi may shrink a distance, about."""
    kind = inputs.get("perturbation", "shift")
    least = {"identity": 1.0, "shift": inputs.get("epsilon", 0.1), "pencil": inputs.get("mix", 1.0)}[kind]
    return min(float(least), 1.0) or 1.0


def _root(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    moved = _product(_t(values["KOOP.12"]), values["KOOP.15"][..., None])[..., 0]
    return xp.abs(values["KOOP.17"]) + (xp.abs(values["KOOP.16"]) + moved) / _slope(inputs)


def _d_image(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    whole = xp.sqrt(xp.sum(values["dKOOP.16"] ** 2, axis=-1, keepdims=True))
    return xp.abs(values["dKOOP.16"]) + whole


def _d_section(inputs: Given, values: Given) -> Array:
    return _product(values["KOOP.14"], values["dKOOP.16"][..., None])[..., 0]


def _d_modes(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    turned = _product(_t(values["KOOP.13"]), values["dKOOP.14"])
    fixed = xp.abs(values["KOOP.15"][..., None] * values["dKOOP.16"][..., None, :])
    return xp.abs(values["dKOOP.12"]) + xp.abs(values["dKOOP.14"]) + turned + fixed


def _d_koopman(inputs: Given, values: Given) -> Array:
    return _product(values["dKOOP.14"], _t(values["KOOP.12"]))


def _d_found(inputs: Given, values: Given) -> Array:
    xp, keys = namespace(inputs["q"]), _keys(inputs)
    through = _product(values["dKOOP.12"], _t(keys))
    beyond = xp.abs(values["dKOOP.11"][..., keys.shape[-2] :])
    seen = xp.where(values["dKOOP.11"] == 0.0, 0.0, 1.0)
    return seen * (xp.concat([through, beyond], axis=-1) + _product(values["dKOOP.13"], values["KOOP.7"]))


def _d_inner(inputs: Given, values: Given) -> Array:
    return _product(values["dKOOP.8"] @ values["KOOP.6"], _t(values["KOOP.11"])) + _product(
        values["dKOOP.8"], values["KOOP.6"] @ _t(values["KOOP.11"])
    )


def _d_dual(inputs: Given, values: Given) -> Array:
    return namespace(inputs["q"]).abs(values["dKOOP.9"]) + _product(values["dKOOP.10"], values["KOOP.7"])


def _d_starts(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    size = xp.abs(values["dKOOP.7"]) + _product(_t(values["dKOOP.13"]), values["KOOP.11"])
    if "KOOP.9" in values:
        through = _t(xp.linalg.solve(values["KOOP.6"], _t(values["dKOOP.9"])))
        size = size + _t(_solved(_t(through), values["KOOP.6"])) + _product(_t(values["dKOOP.10"]), values["KOOP.9"])
    return size


def _d_gram(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    largest = xp.max(xp.abs(values["dKOOP.6"]), axis=(-2, -1), keepdims=True)
    return xp.abs(values["dKOOP.6"]) + 0.25 * xp.where(values["dKOOP.6"] == 0.0, 0.0, largest)


def _d_weights(inputs: Given, values: Given) -> Array:
    return _product(values["dKOOP.4"], _t(repeat_heads(inputs["v"], inputs["q"].shape[1])))


def _d_scores(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = values["KOOP.3"] * values["dKOOP.3"]
    return xp.abs(terms) + values["KOOP.3"] * xp.sum(xp.abs(terms), axis=-1, keepdims=True)


def _d_attended(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.abs(values["dKOOP.4"]) + 0.5 * max_last(xp.abs(values["dKOOP.4"]))


def _of_row(id: str) -> Magnitude:
    """Sums of many parts: the size of a part is about that of the largest of the row."""

    def size(inputs: Given, values: Given) -> Array:
        value = namespace(inputs["q"]).abs(values[id])
        return value + max_last(value)

    return size


def _d_v(inputs: Given, values: Given) -> Array:
    v = inputs["v"]
    size = sum_heads(_product(_t(values["KOOP.3"]), values["dKOOP.4"]), v.shape[1])
    return size + max_last(namespace(v).abs(values["dKOOP.v"]))


def _single(id: str) -> Magnitude:
    """A number that is summed over everything; a factor of 4 for its terms of both signs."""
    return lambda inputs, values: 4.0 * namespace(inputs["q"]).abs(values[id])


MAGNITUDES: dict[str, Magnitude] = {
    "KOOP.1": _scores,
    "KOOP.3": _weights,
    "KOOP.4": _attended,
    "KOOP.5": _between,
    "KOOP.7": _sections("KOOP.7"),
    "KOOP.8": _sections("KOOP.8"),
    "KOOP.9": _dual,
    "KOOP.11": _fit("KOOP.11", "KOOP.8"),
    "KOOP.12": _modes,
    "KOOP.13": lambda inputs, values: _product(values["KOOP.11"], _t(values["KOOP.7"])),
    "KOOP.14": _lifted,
    "KOOP.15": _section,
    "KOOP.16": _image,
    "KOOP.17": _root,
    "dKOOP.16": _d_image,
    "dKOOP.15": _d_section,
    "dKOOP.12": _d_modes,
    "dKOOP.13": _d_koopman,
    "dKOOP.11": _d_found,
    "dKOOP.8": _fit("dKOOP.8", "dKOOP.11"),
    "dKOOP.10": _d_inner,
    "dKOOP.9": _d_dual,
    "dKOOP.7": _d_starts,
    "dKOOP.6": _d_gram,
    "dKOOP.5": _of_row("dKOOP.5"),
    "dKOOP.4": _d_attended,
    "dKOOP.3": _d_weights,
    "dKOOP.1": _d_scores,
    "dKOOP.q": _of_row("dKOOP.q"),
    "dKOOP.k": _of_row("dKOOP.k"),
    "dKOOP.v": _d_v,
    **{f"dKOOP.{name}": _single(f"dKOOP.{name}") for name in ("ridge", "epsilon", "mix", "bandwidth", "weight")},
}

STORED: dict[str, Magnitude] = {
    "KOOP.3": lambda inputs, values: values["KOOP.3"],
    "KOOP.4": lambda inputs, values: values["KOOP.4"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights, before their product with v, and
what is attended. The fit is computed in float32: in less an operator loses its transitions."""
