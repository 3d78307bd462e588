"""Plausible wrong readings of higher-order attention: what an implementation computes that follows another convention.

Each has the signature of the core without `form` and returns (out,). Verification has to tell them from the
core. Several are errors that published implementations have, or had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from refattn.mechanisms.higher_order import core
from refattn.mechanisms.higher_order.dense import divisor_of
from refattn.mechanisms.higher_order.options import Exact, Options
from refattn.mechanisms.wrong import conventions, of_group_gradients
from refattn.ops.heads import repeat_heads
from refattn.ops.layer_norm import normalise
from refattn.ops.masks import allowed_pairs, both, causal_offset
from refattn.xp import Array, namespace

Out = tuple[Array]
Wrong = Callable[..., Out]


def _core(q: Array, k: Array, v: Array, **options: Any) -> Out:
    return (core.forward(q, k, v, form="dense", **options)[0],)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    weigh: Callable[[Array], Array],
    given: dict[str, Any],
    normal: Callable[[Array], Array] | None = None,
    count: Callable[[Array], Array] | None = None,
) -> Out:
    """Attend with other weights, another normalisation or another denominator than the core's."""
    xp, options = namespace(q, k, v), Options.of(given)
    heads, (queries, keys) = q.shape[1], (q.shape[2], k.shape[2])
    q_hat, k_hat = ((normal or _normal(options))(x) for x in (q, k))
    scores = q_hat @ xp.matrix_transpose(repeat_heads(k_hat, heads)) * options.scale(q.shape[3])
    mask = given.get("mask")
    if given.get("key_mask") is not None:
        mask = both(mask, given["key_mask"][:, None, None, :])
    offset = causal_offset(given.get("causal", False), queries, keys)
    allowed = allowed_pairs(mask, offset, queries, keys, q)
    weights, counted = (weigh(scores), (count or weigh)(scores))
    if allowed is not None:
        weights, counted = xp.where(allowed, weights, 0.0), xp.where(allowed, counted, 0.0)
    total = xp.sum(counted, axis=-1, keepdims=True)
    attended = xp.sum(
        xp.ones_like(scores) if allowed is None else xp.where(allowed, 1.0, 0.0 * scores), -1, keepdims=True
    )
    return (
        weights @ repeat_heads(v, heads) / divisor_of(total, options.normaliser, attended if options.counts else None),
    )


def _normal(options: Options) -> Callable[[Array], Array]:
    return lambda x: normalise(x, options.norm_eps)[0] if options.layer_norm else x


def _polynomial(order: int, delta: float) -> Callable[[Array], Array]:
    def value(s: Array) -> Array:
        terms = [s**r / math.factorial(r) for r in range(1, order + 1)]
        return sum(terms[1:], terms[0]) + (1.0 - delta) if terms else 0.0 * s + (1.0 - delta)

    return value


def exponential(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Attend by the exponential itself: softmax attention."""
    return _attend(q, k, v, namespace(q).exp, given)


def exponential_normaliser(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Divide by the sum of exponentials, as the paper's formula for the normaliser reads."""
    options = Options.of(given)
    return _attend(q, k, v, _polynomial(options.order, options.normaliser.delta), given, count=namespace(q).exp)


def missing_factorials(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Sum the powers without their factorials, as who takes equation 3 of the paper, the square alone, for a term."""
    options = Options.of(given)

    def powers(s: Array) -> Array:
        return sum((s**r for r in range(1, options.order + 1)), 0.0 * s) + (1.0 - options.normaliser.delta)

    return _attend(q, k, v, powers, given)


def one_order_less(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Leave the highest power out."""
    options = Options.of(given)
    return _attend(q, k, v, _polynomial(max(options.order - 1, 0), options.normaliser.delta), given)


def element_squares(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Take x_a^2 for the features of order 2, without the products of different elements."""
    if Options.of(given).order != 2:
        return _core(q, k, v, **given)
    options, xp = Options.of(given), namespace(q)
    scale = options.scale(q.shape[3])
    q_hat, k_hat = _normal(options)(q), repeat_heads(_normal(options)(k), q.shape[1])
    squares = (q_hat * q_hat) @ xp.matrix_transpose(k_hat * k_hat) * (0.5 * scale * scale)
    return _attend(q, k, v, lambda s: 1.0 - options.normaliser.delta + s + squares, given)


def subtracted(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Subtract the 1 always, as the author's code does."""
    options = Options.of(given)
    return _attend(q, k, v, _polynomial(options.order, 1.0), given)


def never_subtracted(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Subtract nothing, whatever was asked."""
    return _attend(q, k, v, _polynomial(Options.of(given).order, 0.0), given)


def other_denominator(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Subtract in the numerator alone where both were asked, and the other way round."""
    options = Options.of(given)
    delta = options.normaliser.delta if options.normaliser.plain else 0.0
    return _attend(
        q, k, v, _polynomial(options.order, options.normaliser.delta), given, count=_polynomial(options.order, delta)
    )


def no_layer_norm(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Leave the layer normalisation out, or put it in where it was left out."""
    given = {**given, "layer_norm": not Options.of(given).layer_norm}
    return _core(q, k, v, **given)


def unbiased_variance(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Divide by d - 1 in the variance."""
    options = Options.of(given)
    xp, d = namespace(q), q.shape[3]
    if not options.layer_norm:
        return _core(q, k, v, **given)

    def normal(x: Array) -> Array:
        centred = x - xp.mean(x, axis=-1, keepdims=True)
        return centred / xp.sqrt(xp.sum(centred * centred, axis=-1, keepdims=True) / (d - 1) + options.norm_eps)

    return _attend(q, k, v, _polynomial(options.order, options.normaliser.delta), given, normal)


def root_mean_square(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Divide by the root mean square and leave the mean where it is."""
    options = Options.of(given)
    xp = namespace(q)
    if not options.layer_norm:
        return _core(q, k, v, **given)

    def normal(x: Array) -> Array:
        return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + options.norm_eps)

    return _attend(q, k, v, _polynomial(options.order, options.normaliser.delta), given, normal)


def no_norm_eps(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Add nothing to the variance."""
    return _core(q, k, v, **{**given, "norm_eps": 0.0})


def alpha_of_one(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Leave alpha out of the scale."""
    return _core(q, k, v, **{**given, "alpha": 1.0 if Options.of(given).alpha != 1.0 else Options.alpha})


def scale_on_both(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Scale queries and keys each by the whole factor."""
    options = Options.of(given)
    return _core(q, k, v, **{**given, "alpha": options.alpha**2 * math.sqrt(q.shape[3])})


def no_width_in_scale(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Take 1 / alpha for the scale."""
    return _core(q, k, v, **{**given, "alpha": Options.of(given).alpha / math.sqrt(q.shape[3])})


def zeroed_keys(q: Array, k: Array, v: Array, *, key_mask: Array | None = None, **given: Any) -> Out:
    """Mask by zeroing the keys alone: a zeroed key has a score of 0, and a weight of 1."""
    if key_mask is None:
        return _core(q, k, v, **given)
    return _core(q, namespace(k).where(key_mask[:, None, :, None], k, 0.0), v, **given)


def ignored_mask(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, key_mask: Array | None = None, **given: Any
) -> Out:
    """Let every query attend what is hidden, and padding."""
    return _core(q, k, v, **given)


def inverted_mask(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, key_mask: Array | None = None, **given: Any
) -> Out:
    """Take True for "hidden"."""
    other = {name: ~x for name, x in (("mask", mask), ("key_mask", key_mask)) if x is not None}
    return _core(q, k, v, **given, **other)


def top_left_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **given: Any) -> Out:
    """Align the causal mask at the first key, whatever was asked."""
    return _core(q, k, v, causal="top_left" if causal else False, **given)


def bottom_right_causality(q: Array, k: Array, v: Array, *, causal: Any = False, **given: Any) -> Out:
    """Align the causal mask at the last key, whatever was asked."""
    return _core(q, k, v, causal="bottom_right" if causal else False, **given)


def interleaved_groups(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Give query head h the key/value head h mod g, not floor(h g / h_total)."""
    xp = namespace(q, k, v)
    times = q.shape[1] // max(k.shape[1], 1)
    return _core(q, xp.concat([k] * times, axis=1), xp.concat([v] * times, axis=1), **given)


def no_normaliser(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Divide by the sum as it is, whatever normaliser was asked."""
    options = Options.of(given)
    exact = {**given, "normaliser": Exact(options.normaliser.delta)}
    delta = 0.0 if options.normaliser.plain else options.normaliser.delta
    return _attend(
        q, k, v, _polynomial(options.order, options.normaliser.delta), exact, count=_polynomial(options.order, delta)
    )


def query_contraction(q: Array, k: Array, v: Array, **given: Any) -> Out:
    """Sum the squared scores of order 2 over the queries and keep the key, as the author's code does."""
    if Options.of(given).order != 2 or q.shape[2] != k.shape[2] or given.get("causal", False) is not False:
        return _core(q, k, v, **given)
    options, xp = Options.of(given), namespace(q)
    heads = q.shape[1]
    q_hat, k_hat = _normal(options)(q), repeat_heads(_normal(options)(k), heads)
    scores = q_hat @ xp.matrix_transpose(k_hat) * options.scale(q.shape[3])
    out, saved = core.forward(q, k, v, form="dense", **given)
    divisor = divisor_of(saved.normaliser[..., None], options.normaliser, None)
    values = repeat_heads(v, heads)
    right = (scores * scores) @ values
    wrong = xp.matrix_transpose(xp.sum(scores * scores, axis=-2, keepdims=True)) * values
    return (out + 0.5 * (wrong - right) / divisor,)


READINGS: dict[str, Wrong] = {
    "the exponential itself": exponential,
    "a sum of exponentials divides": exponential_normaliser,
    "factorials left out": missing_factorials,
    "highest order left out": one_order_less,
    "squares of elements for order 2": element_squares,
    "1 always subtracted": subtracted,
    "nothing subtracted": never_subtracted,
    "subtracted in one sum alone": other_denominator,
    "layer normalisation left out": no_layer_norm,
    "unbiased variance": unbiased_variance,
    "mean not subtracted": root_mean_square,
    "nothing added to the variance": no_norm_eps,
    "alpha left out": alpha_of_one,
    "scale on queries and keys": scale_on_both,
    "scale without the width": no_width_in_scale,
    "padding by zeroed keys": zeroed_keys,
    "mask ignored": ignored_mask,
    "mask inverted": inverted_mask,
    "top-left causality": top_left_causality,
    "bottom-right causality": bottom_right_causality,
    "interleaved groups": interleaved_groups,
    "normaliser ignored": no_normaliser,
    "order 2 summed over queries": query_contraction,
}

WRONG = {
    **conventions(READINGS),
    **of_group_gradients(core),
}
