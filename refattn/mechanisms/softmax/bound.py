"""Where exp needs no maximum: a bound on the scores of each row.

By Cauchy and Schwarz |s_ij| <= scale |q_i| max_j |k_j|, and a soft-cap bounds the score too. The maximum is over the
keys that the causal mask lets row i attend. The choice is made row by row and reads no other row and no key of the
future, so that what comes later cannot change even the last bit of what came before. An explicit mask is not looked at:
a hidden key of huge norm costs its rows the short cut, and may thereby change their last bits.

A row with bound B over n keys and values of size V is safe where n exp(B) max(1, V) stays below a quarter of the
largest float, so that no sum overflows, where B is at most `LARGEST_BOUND`, and where exp(-B) u, with u the smallest
element of the values that is not 0, stays clear of the smallest normal float, so that no product loses digits.
"""

from __future__ import annotations

import math

from refattn.xp import Array, arange, max_last, namespace, zeros

LARGEST_BOUND = {"float32": 60.0, "float64": 600.0}
"""Up to these scores exp(-s) is far from underflow."""


def safe_rows(
    q: Array,
    norms: Array,
    sizes: Array,
    least: Array,
    offset: int | None,
    rows: tuple[int, int],
    scale: float | Array,
    softcap: float | Array | None,
) -> Array:
    """Tell for each row (b, g, r, i, 1) whether exp of its scores is safe without a maximum.

    `norms`, `sizes` and `least` (b, g, 1, 1, j + 1) are the `first_largest` of the norms of the keys and of what
    `value_range` tells of the values.
    """
    xp = namespace(q)
    keys = norms.shape[-1] - 1
    # How many keys each row may attend, as far as the causal mask goes: it looks at its own past alone.
    if offset is None:
        seen = arange(keys, keys + 1, q)
    else:
        seen = xp.clip(arange(rows[0] + offset + 1, rows[1] + offset + 1, q), 0, keys)
    reach, size, smallest = (xp.take(x, seen, axis=-1)[..., 0, :, None] for x in (norms, sizes, least))
    own, smallest = row_norms(q)[..., None], -smallest
    finfo = xp.finfo(q.dtype)
    known = (own < math.inf) & (reach < math.inf)
    bound = abs(scale) * xp.where(known, own, 0.0) * xp.where(known, reach, 0.0)
    bound = xp.where(known, bound, float(finfo.max))
    if softcap is not None:
        bound = xp.minimum(bound, abs(softcap) + 0.0 * bound)
    largest = LARGEST_BOUND["float64" if finfo.bits == 64 else "float32"]
    growth = xp.exp(xp.minimum(bound, 0.0 * bound + largest))
    no_overflow = xp.maximum(size, 0.0 * growth + 1.0) < float(finfo.max) / 4 / keys / growth
    no_underflow = smallest >= growth * (float(finfo.smallest_normal) / float(finfo.eps))
    return (bound <= largest) & no_overflow & no_underflow


def value_range(v: Array) -> tuple[Array, Array]:
    """Return the largest size of the elements of each value v (..., e), and minus the smallest that is not 0."""
    xp = namespace(v)
    size = xp.abs(v)
    return max_last(size)[..., 0], max_last(xp.where(size == 0.0, -math.inf, -size))[..., 0]


def first_largest(x: Array, floor: float) -> Array:
    """Return the largest of `floor` and the first c elements of x (..., j), for c from 0 to j."""
    xp = namespace(x)
    found = xp.concat([zeros((*x.shape[:-1], 1), x) + floor, x], axis=-1)
    reach = 1  # an entry is the largest of this many
    while reach < found.shape[-1]:
        later = xp.maximum(found[..., reach:], found[..., :-reach])
        found = xp.concat([found[..., :reach], later], axis=-1)
        reach *= 2
    return found


def row_norms(x: Array) -> Array:
    """Return the norm of each row of x (..., d), or more; infinite where a square might overflow."""
    xp = namespace(x)
    finfo = xp.finfo(x.dtype)
    largest = math.sqrt(float(finfo.max) / x.shape[-1]) / 2
    outside = xp.max(xp.abs(x), axis=-1) > largest
    inside = xp.clip(x, -largest, largest)
    lost = x.shape[-1] * float(finfo.smallest_normal)  # what squares that underflow might have added
    return xp.where(outside, math.inf, xp.sqrt(xp.sum(inside * inside, axis=-1) + lost))
