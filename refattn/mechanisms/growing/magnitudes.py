"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

A result that is rounded once errs relative to its own value; that is the rule for every equation that is absent here.
What the others are made from stands in `refattn.mechanisms.sizes`. `inputs` holds the arguments of the call and d_out;
`values` the traced equations.
"""

from __future__ import annotations

from collections.abc import Callable

from refattn.mechanisms import sizes
from refattn.mechanisms.sizes import Given
from refattn.xp import Array, max_last, namespace

Magnitude = Callable[[Given, Given], Array]


def _weights(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    top = max_last(values.get("GROW.2", values["GROW.1"]))
    return sizes.weights(values["GROW.5"], xp.where(xp.isfinite(top), top, 0.0) + xp.log(values["GROW.4"]))


def _d_scores(inputs: Given, values: Given) -> Array:
    # A difference of two numbers that may be nearly equal.
    xp = namespace(inputs["q"])
    return values["GROW.5"] * (xp.abs(values["dGROW.5"]) + xp.abs(values["GROW.4"] * values["dGROW.4"]))


def _d_scale(inputs: Given, values: Given) -> Array:
    products = inputs["q"] @ namespace(inputs["q"]).matrix_transpose(sizes.heads_of(inputs, "k"))
    return sizes.of_all(values["dGROW.scale"], values["dGROW.1"] * products)


MAGNITUDES: dict[str, Magnitude] = {
    "GROW.1": lambda inputs, values: sizes.scores(inputs, values["GROW.1"]),
    "GROW.4": lambda inputs, values: sizes.total(inputs, values["GROW.4"]),
    "GROW.5": _weights,
    "GROW.6": lambda inputs, values: sizes.out(inputs, values["GROW.6"], values["GROW.5"]),
    "dGROW.5": lambda inputs, values: sizes.d_weights(inputs, values["dGROW.5"]),
    "dGROW.4": lambda inputs, values: sizes.d_total(
        inputs, values["dGROW.5"], values["GROW.5"], values["GROW.6"], values["GROW.4"]
    ),
    "dGROW.1": _d_scores,
    "dGROW.q": lambda inputs, values: sizes.d_q(inputs, values["dGROW.q"], values["dGROW.1"]),
    "dGROW.k": lambda inputs, values: sizes.d_k(inputs, values["dGROW.k"], values["dGROW.1"]),
    "dGROW.v": lambda inputs, values: sizes.d_v(inputs, values["dGROW.v"], values["GROW.5"]),
    "dGROW.scale": _d_scale,
}

STORED: dict[str, Magnitude] = {
    "GROW.5": lambda inputs, values: values["GROW.5"],
    "dGROW.4": lambda inputs, values: sizes.d_total_from_out(inputs, values["GROW.6"], values["GROW.4"]),
    "dGROW.1": lambda inputs, values: values["dGROW.1"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products, and the output from which it takes the inner product of dGROW.4."""
