"""How large a rounding error each equation makes, in units of the unit roundoff: what error budgets are made from.

A result that is rounded once errs relative to its own value; that is the rule for every equation that is absent here.
For a sum of n terms t the size is ``sqrt(n) (|sum t| + sqrt(sum t^2))``, whatever the order of the terms: see
docs/tolerances.md. `inputs` holds the arguments of the call and d_out; `values` the traced equations, those of a token
by the pass that is asked for.

Decays are granted the sum of the logarithms of up to 64 tokens: kernels take them from cumulative sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refattn.mechanisms.record import Magnitude
from refattn.mechanisms.sizes import of_all, of_sum, scale_of
from refattn.ops.heads import group_heads, repeat_heads, sum_heads, ungroup_heads
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


def _key(values: Any) -> Array:
    """Return k' of the token by state head (b, g, 1, d)."""
    n = _at(values)
    return repeat_heads(values["DELTA.unit_k"], _groups(values))[:, :, n : n + 1, :]


def _query(values: Any) -> Array:
    """Return q' of the token by state head (b, g, r, d)."""
    hat, groups = values["DELTA.unit_q"], _groups(values)
    return group_heads(repeat_heads(hat, max(hat.shape[1], groups)), groups)[:, :, :, _at(values), :]


def _masked(inputs: Given, name: str) -> Array:
    """Return an input (b, g, n, ...), 0 where a token is padding."""
    x, mask = inputs[name], inputs.get("key_mask")
    if mask is None:
        return x
    return namespace(x).where(mask[:, None, :] if len(x.shape) == 3 else mask[:, None, :, None], x, 0.0)


def _value(inputs: Given, values: Any) -> Array:
    n = _at(values)
    return _masked(inputs, "v")[:, :, n : n + 1, :]


def _write(inputs: Given, values: Any) -> Array:
    """Return u (b, g, 1, e)."""
    for id in ("DELTA.3", "DELTA.2"):
        if id in values:
            return values[id]
    return _value(inputs, values)


def _decayed(inputs: Given, values: Any) -> Array:
    """Return D (b, g, d, e)."""
    if "DELTA.1" in values:
        return values["DELTA.1"]
    if "DELTA.momentum" in values:
        n = _at(values)
        return values["DELTA.4"] - _masked(inputs, "beta")[:, :, n, None, None] * values["DELTA.momentum"]
    return values["DELTA.4"] - _transposed(_key(values)) * _write(inputs, values)


def _d_out(inputs: Given, values: Any) -> Array:
    """Return do of the token (b, g, r, e)."""
    return group_heads(inputs["d_out"], _groups(values))[:, :, :, _at(values), :]


def _target(values: Any) -> Array:
    """Return the adjoint of what k u^T is added to (b, g, d, e)."""
    return values["dDELTA.momentum"] if "dDELTA.momentum" in values else values["dDELTA.4"]


def _normal(id: str) -> Magnitude:
    def size(inputs: Given, values: Any) -> Array:
        if not inputs.get("qk_norm"):
            return 0.0 * values[id]  # what came in
        return (1.0 + math.sqrt(inputs["q"].shape[-1])) * namespace(inputs["q"]).abs(values[id])

    return size


def _decay(inputs: Given, values: Any) -> Array:
    log = _masked(inputs, "log_decay")
    xp = namespace(log)
    sizes = xp.abs(xp.where(xp.isfinite(log), log, 0.0))
    total = sizes
    for back in range(1, min(WINDOW, log.shape[2])):
        total = total + xp.concat([xp.zeros_like(sizes[:, :, :back]), sizes[:, :, : log.shape[2] - back]], axis=2)
    return values["DELTA.fade"] * (1.0 + total)


def _prediction_terms(inputs: Given, values: Any) -> Array:
    """Return the root of the sum of the squared terms of D^T k (b, g, 1, e)."""
    key, decayed = _key(values), _decayed(inputs, values)
    return namespace(key).sqrt((key * key) @ (decayed * decayed))


def _prediction(inputs: Given, values: Any) -> Array:
    return of_sum(inputs["q"].shape[-1], values["DELTA.predicted"], _prediction_terms(inputs, values) ** 2)


def _read_terms(inputs: Given, values: Any) -> Array:
    """Return the root of the sum of the squared terms of scale S^T q (b, g, r, e)."""
    query, state = _query(values), values["DELTA.4"]
    return scale_of(inputs) * namespace(query).sqrt((query * query) @ (state * state))


def _read(inputs: Given, values: Any) -> Array:
    return of_sum(inputs["q"].shape[-1], values["DELTA.5"], _read_terms(inputs, values) ** 2)


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
    state = xp.abs(values["DELTA.4"])
    if "DELTA.momentum" in values:
        return state + xp.abs(values["DELTA.4"] - _decayed(inputs, values))
    first = max(n + 1 - WINDOW, 0)
    keys = repeat_heads(values["DELTA.unit_k"], _groups(values))[:, :, first : n + 1, :]
    keys = keys * _kept(inputs, first, n + 1, after=False)
    return state + xp.sqrt(_transposed(keys * keys) @ _writes(inputs, values, first, n + 1) ** 2)


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


def _d_query(inputs: Given, values: Any) -> Array:
    state, d_out = values["DELTA.4"], _d_out(inputs, values)
    squares = ungroup_heads(((d_out * d_out) @ _transposed(state * state))[:, :, :, None, :])
    shared = max(_groups(values) // inputs["q"].shape[1], 1)
    squares = sum_heads(squares, inputs["q"].shape[1]) * scale_of(inputs) ** 2
    return of_sum(inputs["v"].shape[-1] * shared, values["dDELTA.unit_q"], squares)


def _d_key(inputs: Given, values: Any) -> Array:
    write, target = _write(inputs, values), _target(values)
    squares = (write * write) @ _transposed(target * target)
    if "dDELTA.predicted" in values:
        decayed = _decayed(inputs, values)
        squares = squares + values["dDELTA.predicted"] ** 2 @ _transposed(decayed * decayed)
    terms = 2 * inputs["v"].shape[-1] * (_groups(values) // inputs["k"].shape[1])
    return of_sum(terms, values["dDELTA.unit_k"], sum_heads(squares, inputs["k"].shape[1]))


def _d_write_terms(inputs: Given, values: Any) -> Array:
    key, target = _key(values), _target(values)
    return namespace(key).sqrt((key * key) @ (target * target))


def _d_write(inputs: Given, values: Any) -> Array:
    return of_sum(inputs["q"].shape[-1], values["dDELTA.3"], _d_write_terms(inputs, values) ** 2)


def _d_read(inputs: Given, values: Any) -> Array:
    return of_sum(_query(values).shape[2] + 1, values["dDELTA.4"], _later(inputs, values) ** 2)


def _d_decayed(inputs: Given, values: Any) -> Array:
    # Once for the sum, and once for the system that its terms are solutions of.
    return namespace(inputs["q"]).abs(values["dDELTA.1"]) + 2.0 * _later(inputs, values)


def _d_normal(name: str, hat: str, d_hat: str) -> Magnitude:
    def size(inputs: Given, values: Any) -> Array:
        id = f"dDELTA.{name}"
        if not inputs.get("qk_norm"):
            return 0.0 * values[id]
        xp, d = namespace(inputs["q"]), inputs["q"].shape[-1]
        x = _masked(inputs, "k") if name == "k" else inputs["q"]
        squared = xp.sum(x * x, axis=-1, keepdims=True) + inputs.get("norm_eps", 1e-6)
        inverse = 1.0 / xp.sqrt(xp.where(squared == 0.0, 1.0, squared))
        g = xp.concat(values.passes(d_hat)[::-1], axis=2)
        norm = xp.sqrt(xp.sum(g * g, axis=-1, keepdims=True))
        # dx = r (g - y (y . g)): two parts that may cancel.
        return math.sqrt(d) * inverse * (xp.abs(g) + xp.abs(values[hat]) * norm)

    return size


def _errors(inputs: Given, values: Any) -> Array:
    """Return e of all tokens (b, g, n, e)."""
    if "DELTA.2" not in values:
        return _masked(inputs, "v")
    return namespace(inputs["q"]).concat(values.passes("DELTA.2"), axis=2)


def _d_rate(id: str) -> Magnitude:
    def size(inputs: Given, values: Any) -> Array:
        xp = namespace(inputs["q"])
        terms = xp.concat(values.passes("dDELTA.3")[::-1], axis=2) * _errors(inputs, values)
        return of_sum(inputs["v"].shape[-1], values[id], xp.sum(terms * terms, axis=-1))

    return size


def _d_beta(inputs: Given, values: Any) -> Array:
    if "DELTA.momentum" not in values:
        return _d_rate("dDELTA.beta")(inputs, values)
    xp = namespace(inputs["q"])
    terms = xp.stack(values.passes("dDELTA.4")[::-1], axis=2) * xp.stack(values.passes("DELTA.momentum"), axis=2)
    return of_sum(math.prod(terms.shape[-2:]), values["dDELTA.beta"], xp.sum(terms * terms, axis=(-2, -1)))


def _d_log_decay(inputs: Given, values: Any) -> Array:
    xp = namespace(inputs["q"])
    adjoints = values.passes("dDELTA.1" if "dDELTA.1" in values else "dDELTA.4")[::-1]
    terms = xp.stack(adjoints, axis=2) * xp.stack(values.passes("DELTA.1"), axis=2)
    value = values["dDELTA.log_decay"]
    axes = (-1,) if len(value.shape) == 4 else (-2, -1)
    count = math.prod(terms.shape[axis] for axis in axes)
    return of_sum(count, value, xp.sum(terms * terms, axis=axes))


def _d_log_momentum(inputs: Given, values: Any) -> Array:
    xp = namespace(inputs["q"])
    moved = xp.stack(values.passes("dDELTA.momentum")[::-1], axis=2)
    after = xp.stack(values.passes("DELTA.momentum"), axis=2)
    mu = xp.exp(_masked(inputs, "log_momentum"))[..., None, None]
    keys = repeat_heads(values["DELTA.unit_k"], after.shape[1])[..., None]
    writes = xp.concat(values.passes("DELTA.3" if "DELTA.3" in values else "DELTA.2"), axis=2)[:, :, :, None, :]
    before = after - keys * writes  # mu M of the token before
    terms = xp.where(mu == 0.0, 0.0, moved * before)
    return of_sum(math.prod(terms.shape[-2:]), values["dDELTA.log_momentum"], xp.sum(terms * terms, axis=(-2, -1)))


def _d_scale(inputs: Given, values: Any) -> Array:
    xp = namespace(inputs["q"])
    d_q = xp.concat(values.passes("dDELTA.unit_q")[::-1], axis=2) / scale_of(inputs)
    return of_all(values["dDELTA.scale"], d_q * values["DELTA.unit_q"])


ROUNDING_SCALES: dict[str, Magnitude] = {
    "DELTA.unit_q": _normal("DELTA.unit_q"),
    "DELTA.unit_k": _normal("DELTA.unit_k"),
    "DELTA.fade": _decay,
    "DELTA.predicted": _prediction,
    "DELTA.4": _state,
    "DELTA.5": _read,
    "dDELTA.4": _d_read,
    "dDELTA.unit_q": _d_query,
    "dDELTA.3": _d_write,
    "dDELTA.1": _d_decayed,
    "dDELTA.unit_k": _d_key,
    "dDELTA.q": _d_normal("q", "DELTA.unit_q", "dDELTA.unit_q"),
    "dDELTA.k": _d_normal("k", "DELTA.unit_k", "dDELTA.unit_k"),
    "dDELTA.beta": _d_beta,
    "dDELTA.step": _d_rate("dDELTA.step"),
    "dDELTA.log_decay": _d_log_decay,
    "dDELTA.log_momentum": _d_log_momentum,
    "dDELTA.scale": _d_scale,
}


def _stored_error(inputs: Given, values: Any) -> Array:
    return namespace(inputs["q"]).hypot(_value(inputs, values), values["DELTA.predicted"])


STORED: dict[str, Magnitude] = {
    "DELTA.unit_q": lambda inputs, values: values["DELTA.unit_q"],
    "DELTA.unit_k": lambda inputs, values: values["DELTA.unit_k"],
    "DELTA.predicted": _prediction_terms,
    "DELTA.2": _stored_error,
    "DELTA.3": lambda inputs, values: values["DELTA.3"],
    "DELTA.5": _read_terms,
    "dDELTA.3": _d_write_terms,
    "dDELTA.predicted": lambda inputs, values: values["dDELTA.predicted"],
}
"""What a kernel in float16 or bfloat16 rounds to that type on the way: what enters matrix products, and the parts of
the prediction and of the read that chunks add up. Not the state: a kernel that keeps it in such a type loses what it
learns once the state is close to what it is taught."""
