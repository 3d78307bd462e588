"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

A result that is rounded once errs relative to its own value; that is the rule for every equation that is absent here.
What the others are made from stands in `refattn.mechanisms.sizes`. `inputs` holds the arguments of the call and d_out;
`values` the traced equations.
"""

from __future__ import annotations

from collections.abc import Callable

from refattn.mechanisms import sizes
from refattn.mechanisms.sizes import Given
from refattn.xp import Array, namespace

Magnitude = Callable[[Given, Given], Array]


def _lse(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    lse = values["SM.9"]
    return xp.where(xp.isfinite(lse), xp.abs(xp.where(xp.isfinite(lse), lse, 0.0)) + 1.0, 0.0)


def _d_exponentials(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.abs(values["dSM.7"]) / values["SM.6"] + xp.abs(values["dSM.6"])


def _d_scores(values: Given) -> Array:
    return values["dSM.1"] if "dSM.1" in values else values["dSM.3"]


def _d_capped_scores(inputs: Given, values: Given) -> Array:
    # The slope 1 - tanh^2 is a difference of numbers near 1 where the cap bites.
    return 2.0 * namespace(inputs["q"]).abs(values["dSM.3"])


def _d_scale(inputs: Given, values: Given) -> Array:
    return sizes.of_all(values["dSM.scale"], _d_scores(values) * values["SM.1"] / sizes.scale_of(inputs))


MAGNITUDES: dict[str, Magnitude] = {
    "SM.1": lambda inputs, values: sizes.scores(inputs, values["SM.1"]),
    "SM.6": lambda inputs, values: sizes.total(inputs, values["SM.6"]),
    "SM.7": lambda inputs, values: sizes.weights(values["SM.7"], values["SM.9"][..., None]),
    "SM.8": lambda inputs, values: sizes.out(inputs, values["SM.8"], values["SM.7"]),
    "SM.9": _lse,
    "dSM.7": lambda inputs, values: sizes.d_weights(inputs, values["dSM.7"]),
    "dSM.6": lambda inputs, values: sizes.d_total(
        inputs, values["dSM.7"], values["SM.7"], values["SM.8"], values["SM.6"]
    ),
    "dSM.5": _d_exponentials,
    "dSM.1": _d_capped_scores,
    "dSM.q": lambda inputs, values: sizes.d_q(inputs, values["dSM.q"], _d_scores(values)),
    "dSM.k": lambda inputs, values: sizes.d_k(inputs, values["dSM.k"], _d_scores(values)),
    "dSM.v": lambda inputs, values: sizes.d_v(inputs, values["dSM.v"], values["SM.7"]),
    "dSM.scale": _d_scale,
    "dSM.softcap": lambda inputs, values: sizes.of_all(values["dSM.softcap"], values["dSM.3"]),
}

STORED: dict[str, Magnitude] = {
    "SM.7": lambda inputs, values: values["SM.7"],
    "dSM.6": lambda inputs, values: sizes.d_total_from_out(inputs, values["SM.8"], values["SM.6"]),
    "dSM.3": lambda inputs, values: values["dSM.3"],
    "dSM.1": lambda inputs, values: values["dSM.1"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products, and the output from which it takes the inner product of dSM.6."""
