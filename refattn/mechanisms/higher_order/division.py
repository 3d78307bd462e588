"""From sums over keys to outputs: what the forms without an array of all scores share.

Such a form gives for each query the sums of its weights times the values and times 1, side by side: [a_i, z_i]. For the
plain denominator, delta times the number of keys in A(i) is added to z_i, which the weights lack.
"""

from __future__ import annotations

from refattn.mechanisms.higher_order.options import Options
from refattn.mechanisms.higher_order.taylor import divisor_of, divisor_slope
from refattn.xp import Array, namespace


def forward(sums: Array, keys: Array | None, options: Options) -> tuple[Array, Array]:
    """Return (out, total), (b, g, r, i, e) and (b, g, r, i, 1), for sums (b, g, r, i, e + 1).

    `keys` are the numbers of keys in A(i), (b, 1, 1, i, 1) or of a shape that broadcasts to it, or None where they are
    not needed.
    """
    numerator = sums[..., :-1]  # (b, g, r, i, e) [HOL.6]
    counted = sums[..., -1:]
    total = counted if keys is None else counted + options.delta * keys  # (b, g, r, i, 1) [HOL.7]
    divisor = divisor_of(total, options)  # (b, g, r, i, 1) [HOL.8]
    out = numerator / divisor  # (b, g, r, i, e) [HOL.9]
    return out, total


def backward(out: Array, total: Array, options: Options, d_out: Array) -> Array:
    """Return the gradient of the sums (b, g, r, i, e + 1) for that of out."""
    xp = namespace(out)
    divisor = divisor_of(total, options)
    # forward: out = numerator / divisor
    d_numerator = d_out / divisor  # (b, g, r, i, e) [dHOL.6]
    d_divisor = -xp.sum(d_out * out, axis=-1, keepdims=True) / divisor  # (b, g, r, i, 1) [dHOL.8]
    # forward: divisor = divisor_of(total); total = counted + delta * keys
    d_total = d_divisor * divisor_slope(total, options)  # (b, g, r, i, 1) [dHOL.7]
    return xp.concat([d_numerator, d_total], axis=-1)
