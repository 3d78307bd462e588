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
from refattn.mechanisms.wrong import changed, conventions, of_group_gradients, of_masks
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


def _with(words: str, change: Callable[[dict[str, Any], Options], dict[str, Any]]) -> Wrong:
    """Return the core with other arguments."""

    def changes(given: dict[str, Any]) -> dict[str, Any]:
        return change(given, Options.of({name: x for name, x in given.items() if name not in "qkv"}))

    return changed(_core, words, changes)


def _zeroed_keys(given: dict[str, Any], options: Options) -> dict[str, Any]:
    mask = given.get("key_mask")
    return (
        {} if mask is None else {"k": namespace(mask).where(mask[:, None, :, None], given["k"], 0.0), "key_mask": None}
    )


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
    "layer normalisation left out": _with(
        "Leave the layer normalisation out, or put it in where it was left out.",
        lambda given, options: {"layer_norm": not options.layer_norm},
    ),
    "unbiased variance": unbiased_variance,
    "mean not subtracted": root_mean_square,
    "nothing added to the variance": _with("Add nothing to the variance.", lambda given, options: {"norm_eps": 0.0}),
    "alpha left out": _with(
        "Leave alpha out of the scale.",
        lambda given, options: {"alpha": 1.0 if options.alpha != 1.0 else Options.alpha},
    ),
    "scale on queries and keys": _with(
        "Scale queries and keys each by the whole factor.",
        lambda given, options: {"alpha": options.alpha**2 * math.sqrt(given["q"].shape[3])},
    ),
    "scale without the width": _with(
        "Take 1 / alpha for the scale.",
        lambda given, options: {"alpha": options.alpha / math.sqrt(given["q"].shape[3])},
    ),
    "padding by zeroed keys": _with(
        "Mask by zeroing the keys alone: a zeroed key has a score of 0, and a weight of 1.", _zeroed_keys
    ),
    **of_masks(_core, "mask ignored", "mask inverted"),
    **of_masks(_core, "top-left causality", "bottom-right causality", "interleaved groups"),
    "normaliser ignored": no_normaliser,
    "order 2 summed over queries": query_contraction,
}

WRONG = {
    **conventions(READINGS),
    **of_group_gradients(core),
}
