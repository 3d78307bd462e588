"""Rounding scales where kernels round more than the dense implementation does, in units of the unit roundoff.

Those of all other equations are measured, see `refattn.instruments.sized`; `values.size` has them. `inputs` holds the
arguments of the call and d_out; `values` the traced equations, those of a token by the pass that is asked for.

Kernels work in chunks of tokens. Decays are granted the sum of the logarithms of up to 64 tokens, for kernels take them
from cumulative sums, and the state and its adjoint what the tokens of a chunk add up to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import RoundingScale
from refattn.mechanisms.rounding_sizes import scale_of
from refattn.ops.heads import group_heads, repeat_heads
from refattn.xp import Array, namespace

Given = Mapping[str, Any]

WINDOW = 64
"""Tokens of a chunk of a kernel."""


def _transposed(x: Array) -> Array:
    return namespace(x).matrix_transpose(x)


def _at(values: Any) -> int:
    """Return the token of a pass."""
    return int(values["DELTA.unit_q"].shape[2]) - 1 - values.from_last


def _groups(values: Any) -> int:
    return int(values["DELTA.4"].shape[1])


def _masked(inputs: Given, name: str) -> Array:
    """Return an input (b, g, n, ...), 0 where a token is padding."""
    x, mask = inputs[name], inputs.get("key_mask")
    if mask is None:
        return x
    return namespace(x).where(mask[:, None, :] if len(x.shape) == 3 else mask[:, None, :, None], x, 0.0)


def _decay(inputs: Given, values: Any) -> Array:
    log = _masked(inputs, "log_decay")
    xp = namespace(log)
    sizes = xp.abs(xp.where(xp.isfinite(log), log, 0.0))
    total = sizes
    for back in range(1, min(WINDOW, log.shape[2])):
        total = total + xp.concat([xp.zeros_like(sizes[:, :, :back]), sizes[:, :, : log.shape[2] - back]], axis=2)
    return values["DELTA.fade"] * (1.0 + total)


def _kept(inputs: Given, first: int, stop: int, *, after: bool) -> Any:
    """Return what is kept between the tokens first to stop - 1 and the last, or with `after` the first, of them.

    It is (b, g, m, 1), or (b, g, m, d) with channels; 1 without a decay.
    """
    if "log_decay" not in inputs:
        return 1.0
    log = _masked(inputs, "log_decay")[:, :, first:stop, ...]
    log = log if len(log.shape) == 4 else log[..., None]
    xp = namespace(log)
    inner = xp.concat([xp.zeros_like(log[:, :, :1, :]), log[:, :, 1:, :]], axis=2)
    if after:
        return xp.exp(xp.cumulative_sum(inner, axis=2))
    inner = xp.concat([log[:, :, 1:, :], xp.zeros_like(log[:, :, :1, :])], axis=2)
    return xp.exp(xp.flip(xp.cumulative_sum(xp.flip(inner, axis=2), axis=2), axis=2))


def _writes(inputs: Given, values: Any, first: int, stop: int) -> Array:
    """Return u of some tokens (b, g, m, e)."""
    for id in ("DELTA.3", "DELTA.2"):
        if id in values:
            return namespace(inputs["q"]).concat(values.passes(id)[first:stop], axis=2)
    return _masked(inputs, "v")[:, :, first:stop, :]


def _state(inputs: Given, values: Any) -> Array:
    """The writes of a chunk are added up, and what they take from each other is not small where a key comes again."""
    xp, n = namespace(inputs["q"]), _at(values)
    if "DELTA.momentum" in values:
        return xp.zeros_like(values["DELTA.4"])
    first = max(n + 1 - WINDOW, 0)
    keys = repeat_heads(values["DELTA.unit_k"], _groups(values))[:, :, first : n + 1, :]
    keys = keys * _kept(inputs, first, n + 1, after=False)
    return xp.sqrt(_transposed(keys * keys) @ _writes(inputs, values, first, n + 1) ** 2)


def _later(inputs: Given, values: Any) -> Array:
    """Return the root of the sum of the squares of what tokens to come add to the adjoint of the state."""
    xp, n, groups = namespace(inputs["q"]), _at(values), _groups(values)
    hat = values["DELTA.unit_q"]
    tokens = hat.shape[2]
    stop = min(n + WINDOW, tokens)
    kept = _kept(inputs, n, stop, after=True)
    queries = group_heads(repeat_heads(hat, max(hat.shape[1], groups)), groups)[:, :, :, n:stop, :]
    d_out = group_heads(inputs["d_out"], groups)[:, :, :, n:stop, :]
    scaled = queries * (kept if isinstance(kept, float) else kept[:, :, None, ...]) * scale_of(inputs)
    squares = xp.sum(_transposed(scaled**2) @ d_out**2, axis=2)
    if "dDELTA.predicted" in values:
        keys = repeat_heads(values["DELTA.unit_k"], groups)[:, :, n:stop, :] * kept
        d_predictions = xp.concat(values.passes("dDELTA.predicted")[tokens - stop : tokens - n][::-1], axis=2)
        squares = squares + _transposed(keys * keys) @ d_predictions**2
    return xp.sqrt(squares)


def _d_state(inputs: Given, values: Any) -> Array:
    # Once for the sum, and once for the system that its terms are solutions of.
    return 2.0 * _later(inputs, values)


def _d_log_decay(inputs: Given, values: Any) -> Array:
    """Return the root of the sum of the squares of what cancels in a sum over a token and all that come after it.

    With R_n, W_n and L_n for what the read, the write and the lookup of a token are in it, the gradient is the sum over
    m >= n of R_m - W_m - L_m: kernels take it as the reversed sum of q dq - k dk, which needs no state. At the first
    token of a sequence that begins at 0 all of it cancels.
    """
    xp, groups = namespace(inputs["q"]), _groups(values)
    hat, log = values["DELTA.unit_q"], inputs["log_decay"]
    queries = group_heads(repeat_heads(hat, max(hat.shape[1], groups)), groups) * scale_of(inputs)  # (b, g, r, n, d)
    d_out, keys = group_heads(inputs["d_out"], groups), repeat_heads(values["DELTA.unit_k"], groups)
    states, d_states = values.passes("DELTA.4"), values.passes("dDELTA.4")[::-1]
    d_predictions = values.passes("dDELTA.predicted")[::-1]
    terms = []
    for n, faded in enumerate(values.passes("DELTA.1")):  # (b, g, d, e)
        read = xp.matmul(states[n][:, :, None, ...] ** 2, d_out[:, :, :, n, :, None] ** 2)[..., 0]  # (b, g, r, d)
        square = xp.sum(queries[:, :, :, n, :] ** 2 * read, axis=2)
        square = square + xp.sum((d_states[n] * (states[n] - faded)) ** 2, axis=-1)
        if d_predictions:
            square = square + (keys[:, :, n, :] ** 2) * (d_predictions[n] ** 2 @ _transposed(faded**2))[:, :, 0, :]
        terms.append(square)
    squares = xp.stack(terms, axis=2)  # (b, g, n, d)
    squares = squares if len(log.shape) == 4 else xp.sum(squares, axis=-1)
    ends = itertools.accumulate(inputs.get("lengths") or (log.shape[2],))
    sums, first = [], 0
    for end in ends:
        sums.append(xp.flip(xp.cumulative_sum(xp.flip(squares[:, :, first:end, ...], axis=2), axis=2), axis=2))
        first = end
    return xp.sqrt(xp.concat(sums, axis=2))


ROUNDING_SCALES: dict[str, RoundingScale | None] = {"DELTA.fade": _decay}

FURTHER: dict[str, RoundingScale] = {
    "DELTA.4": _state,
    "dDELTA.4": _d_state,
    "dDELTA.1": _d_state,
    "dDELTA.log_decay": _d_log_decay,
}


def _terms(id: str) -> RoundingScale:
    """Return the root of the sum of the squared terms of a sum over the width, from the size of its error."""

    def size(inputs: Given, values: Any) -> Array:
        sums = values.size(id) / math.sqrt(max(inputs["q"].shape[-1], 1))
        return sums - namespace(sums).minimum(sums, namespace(sums).abs(values[id]))

    return size


def _stored_error(inputs: Given, values: Any) -> Array:
    n = _at(values)
    return namespace(inputs["q"]).hypot(_masked(inputs, "v")[:, :, n : n + 1, :], values["DELTA.predicted"])


STORED: dict[str, RoundingScale | None] = {
    **dict.fromkeys(("DELTA.unit_q", "DELTA.unit_k", "DELTA.3", "dDELTA.predicted")),
    **{id: _terms(id) for id in ("DELTA.predicted", "DELTA.5", "dDELTA.3")},
    "DELTA.2": _stored_error,
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: what enters matrix products, and the parts of
the prediction and of the read that chunks add up. Not the state: a kernel that keeps it in such a type loses what it
learns once the state is close to what it is taught."""
