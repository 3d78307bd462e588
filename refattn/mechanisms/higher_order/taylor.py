"""The polynomial in place of the exponential, and what divides the sums of its values.

    T_p(s) = sum_{r=0}^{p} s^r / r!,   T_p' = T_{p-1},   T_{-1} = 0

For even p it is above 0 everywhere: its smallest value, where T_{p-1} vanishes, is s^p / p! there. For odd p it is
negative below the root of T_p.

Source: Mercat 2020, equation 2; the policies are those of published implementations (see `options`).
"""

from __future__ import annotations

from refattn.mechanisms.higher_order.options import Options
from refattn.ops.layer_norm import Saved as Normalised
from refattn.ops.layer_norm import layer_norm_backward_x, layer_norm_forward
from refattn.xp import Array, namespace


def taylor(s: Array, order: int) -> Array:
    """Return T_p(s) for p = order >= -1, by Horner's rule."""
    xp = namespace(s)
    if order < 0:
        return xp.zeros_like(s)
    value = xp.ones_like(s)
    for r in range(order, 0, -1):
        value = 1.0 + value * s / r
    return value


def divisor_of(total: Array, options: Options) -> Array:
    """Return what divides the numerators, for the row sums z."""
    xp = namespace(total)
    zero = xp.zeros_like(total)
    if options.policy == "add":
        return total + options.eps
    if options.policy == "clamp":
        return xp.maximum(total, zero + options.eps)
    if options.policy == "signed":
        return xp.where(total < 0.0, -1.0, zero + 1.0) * xp.maximum(xp.abs(total), zero + options.eps)
    return xp.where(total == 0.0, zero + 1.0, total)


def divisor_slope(total: Array, options: Options) -> Array:
    """Return the derivative of `divisor_of`: 1, or 0 where the policy replaces the sum."""
    xp = namespace(total)
    if options.policy == "add":
        return xp.ones_like(total)
    if options.policy == "clamp":
        kept = total > options.eps
    elif options.policy == "signed":
        kept = xp.abs(total) > options.eps
    else:
        kept = total != 0.0
    return xp.astype(kept, total.dtype)


def normalise(x: Array, options: Options) -> tuple[Array, Normalised | None]:
    """Return x (..., d) as it enters the scores, with mean 0 and variance 1 unless `layer_norm` is off."""
    if not options.layer_norm:
        return x, None
    return layer_norm_forward(x, eps=options.norm_eps)


def normalise_backward(saved: Normalised | None, d_normal: Array) -> Array:
    """Return the gradient of x for that of `normalise`."""
    return d_normal if saved is None else layer_norm_backward_x(saved, d_normal)
