"""How large a rounding error each equation of the backward makes: the other half of `magnitudes`."""

from __future__ import annotations

from typing import Any

from refattn.mechanisms.koopman.testing.magnitudes import (
    Given,
    Magnitude,
    fit,
    keys_of,
    limited,
    of_product,
    solved,
    transposed,
)
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, max_last, namespace


def _d_image(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    whole = xp.sqrt(xp.sum(values["dKOOP.14"] ** 2, axis=-1, keepdims=True))
    return xp.abs(values["dKOOP.14"]) + whole


def _d_section(inputs: Given, values: Given) -> Array:
    return of_product(values["KOOP.12"], values["dKOOP.14"][..., None])[..., 0]


def _d_modes(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    turned = of_product(transposed(values["KOOP.11"]), values["dKOOP.12"])
    fixed = xp.abs(values["KOOP.13"][..., None] * values["dKOOP.14"][..., None, :])
    return xp.abs(values["dKOOP.10"]) + xp.abs(values["dKOOP.12"]) + turned + fixed


def _d_koopman(inputs: Given, values: Given) -> Array:
    return of_product(values["dKOOP.12"], transposed(values["KOOP.10"]))


def _d_found(inputs: Given, values: Given) -> Array:
    xp, keys = namespace(inputs["q"]), keys_of(inputs)
    through = of_product(values["dKOOP.10"], transposed(keys))
    beyond = xp.abs(values["dKOOP.9"][..., keys.shape[-2] :])
    seen = xp.where(values["dKOOP.9"] == 0.0, 0.0, 1.0)
    return seen * (xp.concat([through, beyond], axis=-1) + of_product(values["dKOOP.11"], values["KOOP.5"]))


def _d_inner(inputs: Given, values: Given) -> Array:
    return of_product(values["dKOOP.6"] @ values["KOOP.visible"], transposed(values["KOOP.9"])) + of_product(
        values["dKOOP.6"], values["KOOP.visible"] @ transposed(values["KOOP.9"])
    )


def _d_dual(inputs: Given, values: Given) -> Array:
    return namespace(inputs["q"]).abs(values["dKOOP.7"]) + of_product(values["dKOOP.8"], values["KOOP.5"])


def _d_starts(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    size = xp.abs(values["dKOOP.5"]) + of_product(transposed(values["dKOOP.11"]), values["KOOP.9"])
    if "KOOP.7" in values:
        through = transposed(xp.linalg.solve(values["KOOP.visible"], transposed(values["dKOOP.7"])))
        size = (
            size
            + transposed(solved(transposed(through), values["KOOP.visible"]))
            + of_product(transposed(values["dKOOP.8"]), values["KOOP.7"])
        )
    return size


def _d_gram(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    largest = xp.max(xp.abs(values["dKOOP.visible"]), axis=(-2, -1), keepdims=True)
    return xp.abs(values["dKOOP.visible"]) + 0.25 * xp.where(values["dKOOP.visible"] == 0.0, 0.0, largest)


def _d_weights(inputs: Given, values: Given) -> Array:
    return of_product(values["dKOOP.4"], transposed(repeat_heads(inputs["v"], inputs["q"].shape[1])))


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
    size = sum_heads(of_product(transposed(values["KOOP.3"]), values["dKOOP.4"]), v.shape[1])
    return size + max_last(namespace(v).abs(values["dKOOP.v"]))


def _single(id: str) -> Magnitude:
    """A number that is summed over everything; a factor of 4 for its terms of both signs."""
    return lambda inputs, values: 4.0 * namespace(inputs["q"]).abs(values[id])


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


ADJOINTS: dict[str, Magnitude] = {
    "dKOOP.14": _d_image,
    "dKOOP.13": _d_section,
    "dKOOP.10": _d_modes,
    "dKOOP.11": _d_koopman,
    "dKOOP.9": _d_found,
    "dKOOP.6": fit("dKOOP.6", "dKOOP.9"),
    "dKOOP.8": _d_inner,
    "dKOOP.7": _d_dual,
    "dKOOP.5": _d_starts,
    "dKOOP.visible": _d_gram,
    "dKOOP.1": _of_row("dKOOP.1"),
    "dKOOP.4": _d_attended,
    "dKOOP.3": _d_weights,
    "dKOOP.2": _d_scores,
    "dKOOP.q": _of_row("dKOOP.q"),
    "dKOOP.k": _of_row("dKOOP.k"),
    "dKOOP.v": _d_v,
    "dKOOP.ridge": _d_ridge,
    **{f"dKOOP.{name}": _single(f"dKOOP.{name}") for name in ("epsilon", "mix", "bandwidth", "weight")},
}
