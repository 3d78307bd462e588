"""Where exp needs no maximum: a bound on the scores of each row.

By Cauchy and Schwarz |s_ij| <= scale |q_i| max_j |k_j|, and a soft-cap bounds the score too. The maximum is over the
keys that the causal mask lets row i attend. The choice is made row by row and reads no other row and no key of the
future, so that what comes later cannot change even the last bit of what came before. An explicit mask is not looked at:
a hidden key of huge norm costs its rows the short cut, and may thereby change their last bits.

Where the largest norms and values of each head are harmless, every row is safe, and no row has to be looked at: this is
the same answer, found sooner.

A row with bound B over n keys and values of size V is safe where n exp(B) max(1, V) stays below a quarter of the
largest float, so that no sum overflows, where B is at most `LARGEST_BOUND`, and where exp(-B) u, with u the smallest
element of the values that is not 0, stays clear of the smallest normal float, so that no product loses digits.
"""

from __future__ import annotations

import math

from refattn.xp import Array, arange, concrete, max_last, namespace, zeros

LARGEST_BOUND = {"float32": 60.0, "float64": 600.0}
"""Up to these scores exp(-s) is far from underflow."""


def safe_rows(
    q: Array,
    k: Array,
    v: Array,
    offset: int | None,
    scale: float | Array,
    softcap: float | Array | None,
) -> Array | None:
    """Tell for each row of q (b, g, r, i, d) whether exp of its scores is safe without a maximum: (b, g, r, i, 1).

    None says that all of them are.
    """
    xp = namespace(q)
    keys = k.shape[-2]
    own, reach = row_norms(q), row_norms(k)  # (b, g, r, i), (b, g, j)
    if 0 not in v.shape:
        size, least = _extremes(v)
        worst = _safe(xp.max(own, axis=(2, 3)), xp.max(reach, axis=2), size, least, keys, scale, softcap)  # (b, g)
        if concrete(xp.all(worst)):
            return None
    facts = (first_largest(reach, 0.0), *(first_largest(x, floor) for x, floor in value_range(v)))
    # How many keys each row may attend, as far as the causal mask goes: it looks at its own past alone.
    if offset is None:
        seen = arange(keys, keys + 1, q)
    else:
        seen = xp.clip(arange(offset + 1, q.shape[3] + offset + 1, q), 0, keys)
    reach, size, least = (xp.take(x, seen, axis=-1)[:, :, None, :] for x in facts)
    return _safe(own, reach, size, -least, keys, scale, softcap)[..., None]


def _safe(
    own: Array,
    reach: Array,
    size: Array,
    least: Array,
    keys: int,
    scale: float | Array,
    softcap: float | Array | None,
) -> Array:
    """Tell where queries and keys of norms `own` and `reach` are safe, for values of sizes from `least` to `size`."""
    xp = namespace(own)
    finfo = xp.finfo(own.dtype)
    known = (own < math.inf) & (reach < math.inf)
    bound = abs(scale) * xp.where(known, own, 0.0) * xp.where(known, reach, 0.0)
    bound = xp.where(known, bound, float(finfo.max))
    if softcap is not None:
        bound = xp.minimum(bound, abs(softcap) + 0.0 * bound)
    largest = LARGEST_BOUND["float64" if finfo.bits == 64 else "float32"]
    growth = xp.exp(xp.minimum(bound, 0.0 * bound + largest))
    no_overflow = xp.maximum(size, 0.0 * growth + 1.0) < float(finfo.max) / 4 / keys / growth
    no_underflow = least >= growth * (float(finfo.smallest_normal) / float(finfo.eps))
    return (bound <= largest) & no_overflow & no_underflow


def _extremes(v: Array) -> tuple[Array, Array]:
    """Return for each head of v (b, g, j, e) the largest size of an element, and the smallest that is not 0."""
    xp = namespace(v)
    size = xp.abs(v)
    least = xp.min(size, axis=(2, 3))
    if concrete(xp.all(least > 0.0)) is not True:
        least = xp.min(xp.where(size == 0.0, math.inf, size), axis=(2, 3))
    return xp.max(size, axis=(2, 3)), least


def value_range(v: Array) -> tuple[tuple[Array, float], tuple[Array, float]]:
    """Return the largest size of the elements of each value v (..., e), and minus the smallest that is not 0.

    Each comes with what stands for no value at all.
    """
    xp = namespace(v)
    size = xp.abs(v)
    return (max_last(size)[..., 0], 0.0), (max_last(xp.where(size == 0.0, -math.inf, -size))[..., 0], -math.inf)


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
    small = concrete((xp.max(x) <= largest) & (xp.min(x) >= -largest)) if 0 not in x.shape else False
    inside = x if small else xp.clip(x, -largest, largest)
    lost = x.shape[-1] * float(finfo.smallest_normal)  # what squares that underflow might have added
    norms = xp.sqrt(xp.vecdot(inside, inside) + lost)
    return xp.where(norms < largest, norms, math.inf)
