"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

A result that is rounded once errs relative to its own value; that is the rule for every equation that is absent here.
For a sum of n terms t the size is ``sqrt(n) (|sum t| + sqrt(sum t^2))``, whatever the order of the terms: see
docs/tolerances.md. `inputs` holds the arguments of the call and d_out; `values` the traced equations.

Implementations with features are what this attention is for. They sum over keys first and over C(d + p, p) features
then, so that the numerator and the normaliser do not err together; both, and T_p itself, are granted what such a sum
may err by, up to `FEATURES` of them: who has more computes the polynomial of the score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.higher_order.dense import taylor
from refattn.mechanisms.higher_order.options import Options
from refattn.mechanisms.record import Magnitude
from refattn.mechanisms.sizes import of_all, of_sum, squares_of
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, namespace

Given = Mapping[str, Any]

FEATURES = 4096


def _heads(inputs: Given, x: Array) -> Array:
    return repeat_heads(x, inputs["q"].shape[1])


def _masked_v(inputs: Given) -> Array:
    """Return the values, repeated, and 0 where a key is padding."""
    v = inputs["v"]
    mask = inputs.get("key_mask")
    return _heads(inputs, v if mask is None else namespace(v).where(mask[:, None, :, None], v, 0.0))


def _transposed(x: Array) -> Array:
    return namespace(x).matrix_transpose(x)


def _scale(inputs: Given) -> float:
    return Options.of(inputs).scale(inputs["q"].shape[-1])


def _order(inputs: Given) -> int:
    return Options.of(inputs).order


def _normal(name: str, id: str) -> Magnitude:
    def size(inputs: Given, values: Given) -> Array:
        x, xp = inputs[name], namespace(inputs[name])
        if not Options.of(inputs).layer_norm:
            return 0.0 * values[id]  # what came in
        mask = inputs.get("key_mask") if name == "k" else None
        x = x if mask is None else xp.where(mask[:, None, :, None], x, 0.0)
        d = x.shape[-1]
        mean = xp.mean(x, axis=-1, keepdims=True)
        squares = xp.sum(x * x, axis=-1, keepdims=True)
        centred = squares - d * mean * mean
        inverse = 1.0 / xp.sqrt(xp.maximum(centred, 0.0 * centred) / d + Options.of(inputs).norm_eps)
        # The mean is subtracted from numbers of the size of x; r has the rounding of a sum of d squares.
        return (of_sum(d, mean, squares / d**2) + xp.abs(x - mean)) * inverse + math.sqrt(d) * xp.abs(values[id])

    return size


def _scores(inputs: Given, values: Given) -> Array:
    squares = squares_of(values["HOL.1"], _heads(inputs, values["HOL.2"])) * _scale(inputs) ** 2
    return of_sum(inputs["q"].shape[-1], values["HOL.3"], squares)


def _features(inputs: Given) -> int:
    d, p = inputs["q"].shape[-1], _order(inputs)
    return min(math.comb(d + p, p), FEATURES)


def _values(inputs: Given, values: Given) -> Array:
    return math.sqrt(_features(inputs)) * taylor(namespace(inputs["q"]).abs(values["HOL.3"]), _order(inputs))


def _numerator(inputs: Given, values: Given) -> Array:
    squares = squares_of(values["HOL.4"], _transposed(_masked_v(inputs)))
    return of_sum(inputs["k"].shape[2] + _features(inputs), values["HOL.summed"], squares)


def _total(inputs: Given, values: Given) -> Array:
    terms, normaliser = values["HOL.4"], Options.of(inputs).normaliser
    if normaliser.plain:
        terms = namespace(terms).where(terms == 0.0, 0.0, terms + normaliser.delta)
    squares = namespace(terms).sum(terms * terms, axis=-1, keepdims=True)
    return of_sum(inputs["k"].shape[2] + _features(inputs), values["HOL.5"], squares)


def _d_divisor(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    terms = inputs["d_out"] * values["HOL.6"]
    # Kernels take o with the errors that it has by then.
    inherited = inputs["d_out"] * _numerator(inputs, values) / values["HOL.divisor"]
    squares = xp.sum(terms * terms, axis=-1, keepdims=True)
    inner = of_sum(inputs["v"].shape[-1], xp.sum(terms, axis=-1, keepdims=True), squares)
    over_width = xp.sqrt(xp.sum(inherited * inherited, axis=-1, keepdims=True))
    return (inner + over_width) / xp.abs(values["HOL.divisor"])


def _d_values(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    v = _masked_v(inputs)
    squares = squares_of(values["dHOL.summed"], v) + values["dHOL.5"] ** 2
    size = of_sum(inputs["v"].shape[-1] + 1, values["dHOL.taylor"], squares)
    return xp.where(values["dHOL.taylor"] == 0.0, 0.0, size)


def _d_scores(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    slope = taylor(xp.abs(values["HOL.3"]), _order(inputs) - 1)
    return math.sqrt(inputs["q"].shape[-1]) * xp.abs(values["dHOL.taylor"]) * slope


def _d_q_hat(inputs: Given, values: Given) -> Array:
    squares = squares_of(values["dHOL.3"], _transposed(_heads(inputs, values["HOL.2"]))) * _scale(inputs) ** 2
    return of_sum(inputs["k"].shape[2], values["dHOL.1"], squares)


def _d_k_hat(inputs: Given, values: Given) -> Array:
    return _per_key(inputs, values["dHOL.2"], values["dHOL.3"], values["HOL.1"], _scale(inputs))


def _d_v(inputs: Given, values: Given) -> Array:
    return _per_key(inputs, values["dHOL.v"], values["HOL.4"], values["dHOL.summed"], 1.0, _features(inputs))


def _per_key(inputs: Given, value: Array, pairs: Array, rows: Array, factor: float, more: int = 0) -> Array:
    """Return the size for a sum over the queries of all heads that share a key/value head."""
    squares = sum_heads(squares_of(_transposed(pairs), _transposed(rows)), inputs["k"].shape[1])
    terms = rows.shape[2] * rows.shape[1] // max(inputs["k"].shape[1], 1)
    return of_sum(terms + more, value, squares * factor**2)


def _d_normal(name: str, hat: str, d_hat: str) -> Magnitude:
    def size(inputs: Given, values: Given) -> Array:
        if not Options.of(inputs).layer_norm:
            return 0.0 * values[d_hat]
        x, xp = inputs[name], namespace(inputs[name])
        mask = inputs.get("key_mask") if name == "k" else None
        x = x if mask is None else xp.where(mask[:, None, :, None], x, 0.0)
        d = x.shape[-1]
        centred = x - xp.mean(x, axis=-1, keepdims=True)
        inverse = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + Options.of(inputs).norm_eps)
        # r errs as the numbers do that the mean is subtracted from, in units of their spread.
        spread = 1.0 + inverse * xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True))
        # dx = r (g - mean g - n mean(g n)): three parts that may cancel.
        g, n = values[d_hat], xp.abs(values[hat])
        norm = xp.sqrt(xp.sum(g * g, axis=-1, keepdims=True))
        return inverse * spread * (xp.abs(g) * math.sqrt(d) + norm / math.sqrt(d) + n * norm)

    return size


def _d_alpha(inputs: Given, values: Given) -> Array:
    terms = values["dHOL.3"] * values["HOL.3"] / Options.of(inputs).alpha
    return of_all(values["dHOL.alpha"], terms)


def _d_delta(inputs: Given, values: Given) -> Array:
    return of_all(values["dHOL.delta"], values["dHOL.taylor"])


ROUNDING_SCALES: dict[str, Magnitude] = {
    "HOL.1": _normal("q", "HOL.1"),
    "HOL.2": _normal("k", "HOL.2"),
    "HOL.3": _scores,
    "HOL.taylor": _values,
    "HOL.summed": _numerator,
    "HOL.5": _total,
    "dHOL.divisor": _d_divisor,
    "dHOL.taylor": _d_values,
    "dHOL.3": _d_scores,
    "dHOL.1": _d_q_hat,
    "dHOL.2": _d_k_hat,
    "dHOL.v": _d_v,
    "dHOL.q": _d_normal("q", "HOL.1", "dHOL.1"),
    "dHOL.k": _d_normal("k", "HOL.2", "dHOL.2"),
    "dHOL.alpha": _d_alpha,
    "dHOL.delta": _d_delta,
}


def _d_divisor_from_out(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    inner = xp.sum(xp.abs(inputs["d_out"] * values["HOL.6"]), axis=-1, keepdims=True)
    return inner / xp.abs(values["HOL.divisor"])


STORED: dict[str, Magnitude] = {
    "HOL.1": lambda inputs, values: values["HOL.1"],
    "HOL.2": lambda inputs, values: values["HOL.2"],
    "HOL.4": lambda inputs, values: values["HOL.4"],
    "dHOL.summed": lambda inputs, values: values["dHOL.summed"],
    "dHOL.divisor": _d_divisor_from_out,
    "dHOL.3": lambda inputs, values: values["dHOL.3"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: what enters matrix products (the normalised
queries and keys, the weights, the adjoints of the numerator and of the scores), and the output whose inner product
dHOL.divisor is."""
