"""The numbers of a block: learned ones stay positive, or between 0 and 1, because a map of the line makes them.

    positive    s = log(1 + e^r)        ds/dr = 1 / (1 + e^-r)
    unit        s = 1 / (1 + e^-r)      ds/dr = s (1 - s)

Every number is an array of one element, so that learned and fixed ones are computed with alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from refattn.xp import Array, device, namespace, sum_wide

Numbers = dict[str, Array]


def raw(kind: str, value: float) -> float:
    """Return the r of a number."""
    if kind == "positive":
        return math.log(math.expm1(value)) if value < 30.0 else value
    return math.log(value / (1.0 - value))


def number(value: float, like: Array) -> Array:
    """Return a number as an array of one element."""
    return namespace(like).full((1,), value, dtype=like.dtype, device=device(like))


def numbers_forward(kinds: Mapping[str, tuple[str, float, bool]], learned: Mapping[str, Array], like: Array) -> Numbers:
    """Return all numbers by name: those in `learned` from their r, the others as they start."""
    xp, found = namespace(like), {}
    for name, (kind, value, _) in kinds.items():
        if name not in learned:
            found[name] = number(value, like)
        elif kind == "positive":
            found[name] = xp.logaddexp(learned[name], xp.zeros_like(learned[name]))
        else:
            found[name] = _sigmoid(learned[name])
    return found


def numbers_backward(
    kinds: Mapping[str, tuple[str, float, bool]], learned: Mapping[str, Array], d_numbers: Numbers
) -> dict[str, Array]:
    """Return the gradients of every r in `learned`."""
    found = {}
    for name, r in learned.items():
        s = _sigmoid(r)
        # forward: log(1 + e^r), or s
        found[name] = d_numbers[name] * (s if kinds[name][0] == "positive" else s * (1.0 - s))
    return found


def dot(a: Array, b: Array) -> Array:
    """Return the sum of a * b as an array of one element."""
    return namespace(a, b).reshape(sum_wide(a * b), (1,))


def _sigmoid(r: Array) -> Array:
    xp = namespace(r)
    return 1.0 / (1.0 + xp.exp(-r))
