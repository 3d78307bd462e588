"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

A result that is rounded once errs relative to its own value; that is the rule for every equation that is absent here.
What the others are made from stands in `refattn.mechanisms.sizes`. `inputs` holds the arguments of the call and d_out;
`values` the traced equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from refattn.mechanisms import sizes
from refattn.mechanisms.sizes import Given
from refattn.ops.heads import sum_heads
from refattn.ops.masks import existing, where_allowed
from refattn.xp import Array, namespace

Magnitude = Callable[[Given, Given], Array]


def _existing(inputs: Given) -> Given:
    """Return the inputs with 0 for what their lengths leave out."""
    found = dict(inputs)
    for names, lengths in ((("q", "d_out", "d_lse"), "q_lengths"), (("k", "v"), "k_lengths")):
        for name in names if lengths in inputs else ():
            if found.get(name) is not None:
                x = found[name]
                exists = existing(inputs[lengths], x.shape[2], x)
                rows = exists[..., 0] if exists is not None and len(x.shape) == 3 else exists
                found[name] = where_allowed(rows, x, 0.0)
    return found


def _kept(values: Given) -> Array:
    """Return what the values are weighed by."""
    return values["SM.kept"] if "SM.kept" in values else values["SM.4"]


def _lse(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    lse = values["SM.lse"]
    return xp.where(xp.isfinite(lse), xp.abs(xp.where(xp.isfinite(lse), lse, 0.0)) + 1.0, 0.0)


def _total(inputs: Given, values: Given) -> Array:
    terms = inputs["k"].shape[2] + (values["SM.sunk"].shape[3] if "SM.sunk" in values else 0)
    return math.sqrt(max(terms, 1)) * values["SM.total"]


def _d_weights(inputs: Given, values: Given) -> Array:
    if "dSM.kept" in values:  # then it is a product of two numbers
        return namespace(inputs["q"]).abs(values["dSM.4"])
    return sizes.d_weights(inputs, values["dSM.4"])


def _d_total(inputs: Given, values: Given) -> Array:
    # With dropout the inner product is that of the output all the same: do . o = sum of dw w = sum of dy y.
    if "SM.kept" not in values:
        return sizes.d_total(inputs, values["dSM.4"], values["SM.4"], values["SM.5"], values["SM.total"])
    return sizes.d_total(inputs, values["dSM.kept"], values["SM.kept"], values["SM.5"], values["SM.total"])


def _d_exponentials(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    return xp.abs(values["dSM.4"]) / values["SM.total"] + xp.abs(values["dSM.total"])


def _recomputed(inputs: Given, values: Given) -> Array:
    """Return what is missing where weights stand in the backward as they came out of the forward, relative to them.

    Kernels compute the scores once more, and exp(m - lse) from these is no longer of sum 1. An error e of a score and
    another one of the forward change a weight w by w (e' - sum w e); the definition's, with e' = e, has 2 w e^2 less in
    the square: nearly all where a key has nearly all of the weight.
    """
    return sizes.scores(inputs, values["SM.1"]) * namespace(inputs["q"]).sqrt(2.0 * values["SM.4"])


def _d_masked(inputs: Given, values: Given) -> Array:
    return namespace(inputs["q"]).abs(values["dSM.2"]) * (1.0 + _recomputed(inputs, values))


def _d_v(inputs: Given, values: Given) -> Array:
    xp = namespace(inputs["q"])
    kept = _kept(values)
    pairs, rows = xp.matrix_transpose(kept * _recomputed(inputs, values)), xp.matrix_transpose(inputs["d_out"])
    squares = sum_heads(sizes.squares_of(pairs, rows), inputs["v"].shape[1])
    return sizes.d_v(inputs, values["dSM.v"], kept) + xp.sqrt(squares)


def _d_scores(values: Given) -> Array:
    return values["dSM.1"] if "dSM.1" in values else values["dSM.2"]


def _d_capped_scores(inputs: Given, values: Given) -> Array:
    # The slope 1 - tanh^2 is a difference of numbers near 1 where the cap bites.
    return 2.0 * namespace(inputs["q"]).abs(values["dSM.2"])


def _d_scale(inputs: Given, values: Given) -> Array:
    scale = sizes.scale_of(inputs)
    if scale == 0.0:
        products = inputs["q"] @ namespace(inputs["q"]).matrix_transpose(sizes.heads_of(inputs, "k"))
    else:
        products = values["SM.1"] / scale
    return sizes.of_all(values["dSM.scale"], _d_scores(values) * products)


def _summed(value: Array, terms: Array) -> Array:
    """Return the size of a sum of terms over the axes that a value has not, or has with a size of 1."""
    xp = namespace(terms)
    if len(value.shape) == 2:  # of sinks (h, s), from terms (b, h, i, s)
        squares = xp.sum(terms * terms, axis=(0, 2))
    else:
        axes = tuple(n for n, (have, size) in enumerate(zip(value.shape, terms.shape, strict=True)) if have != size)
        squares = xp.sum(terms * terms, axis=axes, keepdims=True) if axes else terms * terms
    count = math.prod(terms.shape) // max(math.prod(value.shape), 1)
    return sizes.of_sum(max(count, 1), value, squares) if count > 1 else xp.abs(value)


def _of(function: Magnitude) -> Magnitude:
    """Return a size as a function of inputs that may hold anything where nothing exists."""
    return lambda inputs, values: function(_existing(inputs), values)


_SIZES: dict[str, Magnitude] = {
    "SM.1": lambda inputs, values: sizes.scores(inputs, values["SM.1"]),
    "SM.total": _total,
    "SM.4": lambda inputs, values: sizes.weights(values["SM.4"], values["SM.lse"][..., None]),
    "SM.5": lambda inputs, values: sizes.out(inputs, values["SM.5"], _kept(values)),
    "SM.lse": _lse,
    "dSM.kept": lambda inputs, values: sizes.d_weights(inputs, values["dSM.kept"]),
    "dSM.keep": lambda inputs, values: _summed(values["dSM.keep"], values["dSM.kept"] * values["SM.4"]),
    "dSM.4": _d_weights,
    "dSM.total": _d_total,
    "dSM.sink": lambda inputs, values: _summed(values["dSM.sink"], values["dSM.total"] * values["SM.sunk"]),
    "dSM.3": _d_exponentials,
    "dSM.2": _d_masked,
    "dSM.bias": lambda inputs, values: _summed(values["dSM.bias"], values["dSM.2"]),
    "dSM.1": _d_capped_scores,
    "dSM.q": lambda inputs, values: sizes.d_q(inputs, values["dSM.q"], _d_scores(values)),
    "dSM.k": lambda inputs, values: sizes.d_k(inputs, values["dSM.k"], _d_scores(values)),
    "dSM.v": _d_v,
    "dSM.scale": _d_scale,
    "dSM.softcap": lambda inputs, values: sizes.of_all(values["dSM.softcap"], values["dSM.2"]),
}

ROUNDING_SCALES: dict[str, Magnitude] = {id: _of(size) for id, size in _SIZES.items()}

STORED: dict[str, Magnitude] = {
    "SM.4": lambda inputs, values: values["SM.4"],
    "SM.kept": lambda inputs, values: values["SM.kept"],
    "dSM.total": _of(lambda inputs, values: sizes.d_total_from_out(inputs, values["SM.5"], values["SM.total"])),
    "dSM.2": lambda inputs, values: values["dSM.2"],
    "dSM.1": lambda inputs, values: values["dSM.1"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: the weights and the adjoint of the scores before
their matrix products, and the output from which it takes the inner product of dSM.total."""
