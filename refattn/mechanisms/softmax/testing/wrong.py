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
from refattn.mechanisms.wrong import Outputs, conventions, gradients
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


def _mean_in_empty_rows(right: Outputs, given: Given) -> Outputs:
    """Give the mean of all values to a query that may attend nothing."""
    (out, lse), v = right, given["v"]
    if v.shape[2] == 0:
        return right
    xp = namespace(v)
    mean = repeat_heads(xp.mean(v, axis=2, keepdims=True), given["q"].shape[1])
    return xp.where(xp.isfinite(lse)[..., None], out, mean), lse


def _nan_in_empty_rows(right: Outputs, given: Given) -> Outputs:
    """Divide 0 by 0 for a query that may attend nothing."""
    (out, lse), xp = right, namespace(given["q"])
    return xp.where(xp.isfinite(lse)[..., None], out, math.nan), lse


READINGS: dict[str, Wrong] = {
    **readings.of_masks(core),
    **readings.of_scales(core),
    # -inf becomes -softcap, and hidden keys are attended a little.
    "soft-cap after the mask": _recomputed({"SM.2": _softcap_after_mask}),
    "soft-cap left out": _changed(lambda given: {"softcap": None}),
    # factor softcap tanh(q . k / softcap) is a soft-cap of factor * softcap on factor q . k.
    "soft-cap before the scale": readings.if_given(
        core, "softcap", lambda given: {"softcap": readings.scale_of(given) * given["softcap"]}
    ),
    "softmax over the queries": _recomputed({"SM.4": _over_queries}),
    # The scores are multiplied by the mask: a weight of 1.
    "masked keys have a score of 0": _recomputed({"SM.2": _zero_for_masked}),
    "keys missing in the denominator": _recomputed({"SM.total": _fewer_in_total}),  # the last three
    "scale of the model's width": readings.usual_scale(core, lambda given: given["q"].shape[1] * given["q"].shape[3]),
    "empty rows get the mean": readings.other_outputs(core, _mean_in_empty_rows),
    "empty rows are NaN": readings.other_outputs(core, _nan_in_empty_rows),
    "lse to base 2": _recomputed({"SM.lse": lambda seen, given: seen["SM.lse"] / math.log(2.0)}),
    # The logarithm of the sum that was divided by, in which the largest score counts 0.
    "lse without the maximum": _recomputed({"SM.lse": _without_maximum}),
    **PLACED,
}

WRONG = {
    **conventions(READINGS, ("lse",)),
    **readings.of_group_gradients(softmax),
    **gradients({name: readings.other_gradients(softmax, change) for name, change in WRONG_GRADIENTS.items()}),
}
