"""Plausible wrong readings of softmax attention: what an implementation computes that follows another convention.

Each has the signature of the core without `implementation` and returns (out, lse). Verification has to tell them from
the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from refattn.mechanisms import wrong as readings
from refattn.mechanisms.softmax import core as softmax
from refattn.mechanisms.softmax.testing.placed import PLACED, core
from refattn.mechanisms.softmax.testing.wrong_gradients import WRONG_GRADIENTS
from refattn.mechanisms.wrong import conventions, gradients
from refattn.ops.heads import repeat_heads
from refattn.xp import Array, namespace

Given = dict[str, Any]
Wrong = Callable[..., tuple[Array, Array]]


_changed = partial(readings.Changed, core)
_recomputed = partial(readings.recomputed, core)


def _softcap_after_mask(seen: Given, given: Given) -> Array:
    masked, softcap = seen["SM.2"], given.get("softcap")
    return masked if softcap is None else namespace(masked).where(masked == -math.inf, -softcap, masked)


def _zero_for_masked(seen: Given, given: Given) -> Array:
    masked = seen["SM.2"]
    hides = given.get("mask") is not None and given.get("causal", False) is False
    return namespace(masked).where(masked == -math.inf, 0.0, masked) if hides else masked


def _over_queries(seen: Given, given: Given) -> Array:
    xp, scores = namespace(seen["SM.4"]), seen.get("SM.2", seen["SM.1"])
    if given.get("softcap") is not None or set(given) - {*"qkv", "mask", "causal", "scale"}:
        return seen["SM.4"]
    exponentials = xp.exp(scores)
    total = xp.sum(exponentials, axis=-2, keepdims=True)
    return exponentials / xp.where(total == 0.0, 1.0, total)


def _fewer_in_total(seen: Given, given: Given) -> Array:
    xp, exponentials = namespace(seen["SM.3"]), seen["SM.3"]
    total = seen["SM.total"] - xp.sum(exponentials[..., -3:], axis=-1, keepdims=True)
    return xp.where(total > 0.0, total, seen["SM.total"]) if exponentials.shape[-1] > 3 else seen["SM.total"]


def _without_maximum(seen: Given, given: Given) -> Array:
    """Return lse without the largest score of a key; 0 if there are sinks alone."""
    xp, lse, largest = namespace(seen["SM.lse"]), seen["SM.lse"], seen["SM.largest"]
    known = xp.isfinite(largest)
    return xp.where(xp.isfinite(lse), xp.where(known, lse - xp.where(known, largest, 0.0), 0.0), lse)


def uniform_empty_rows(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Give the mean of all values to a query that may attend nothing."""
    out, lse = core(q, k, v, **options)
    if k.shape[2] == 0:
        return out, lse
    xp = namespace(q, k, v)
    mean = repeat_heads(xp.mean(v, axis=2, keepdims=True), q.shape[1])
    return xp.where(xp.isfinite(lse)[..., None], out, mean), lse


def nan_in_empty_rows(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Divide 0 by 0 for a query that may attend nothing."""
    out, lse = core(q, k, v, **options)
    return namespace(q).where(namespace(q).isfinite(lse)[..., None], out, math.nan), lse


READINGS: dict[str, Wrong] = {
    **readings.of_masks(core),
    **readings.of_scales(core),
    "soft-cap after the mask": _recomputed(
        "Mask first: the soft-cap then lifts -inf to -softcap, and hidden keys are attended a little.",
        {"SM.2": _softcap_after_mask},
    ),
    "soft-cap left out": _changed("Leave the soft-cap out.", lambda given: {"softcap": None}),
    # factor softcap tanh(q . k / softcap) is a soft-cap of factor * softcap on factor q . k.
    "soft-cap before the scale": readings.if_given(
        core,
        "Cap q . k and scale after it, so that scores are bounded by scale * softcap.",
        "softcap",
        lambda given: {"softcap": readings.scale_of(given) * given["softcap"]},
    ),
    "softmax over the queries": _recomputed(
        "Normalise over the queries of a key, not over the keys of a query.", {"SM.4": _over_queries}
    ),
    "masked keys have a score of 0": _recomputed(
        "Multiply the scores by the mask, so that a masked key has a score of 0 and a weight of 1.",
        {"SM.2": _zero_for_masked},
    ),
    "keys missing in the denominator": _recomputed(
        "Leave the last three keys out of the denominator alone.", {"SM.total": _fewer_in_total}
    ),
    "scale of the model's width": readings.usual_scale(
        core,
        "Take 1 / sqrt(heads * width) if no scale is given.",
        lambda given: given["q"].shape[1] * given["q"].shape[3],
    ),
    "empty rows get the mean": uniform_empty_rows,
    "empty rows are NaN": nan_in_empty_rows,
    "lse to base 2": _recomputed(
        "Return the logarithm to base 2.", {"SM.lse": lambda seen, given: seen["SM.lse"] / math.log(2.0)}
    ),
    "lse without the maximum": _recomputed(
        "Return the logarithm of the sum that was divided by, in which the largest score counts 0.",
        {"SM.lse": _without_maximum},
    ),
    **PLACED,
}

WRONG = {
    **conventions(READINGS, ("lse",)),
    **readings.of_group_gradients(softmax),
    **gradients(WRONG_GRADIENTS),
}
