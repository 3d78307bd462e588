"""Plausible wrong backward passes of the recurrences: the output is right, and some gradient is not.

Each has the signature of the core without `implementation`, with `d_out`, and returns gradients by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from refattn.mechanisms.delta import core, dense
from refattn.ops.heads import repeat_heads
from refattn.xp import Array, namespace

Backward = Callable[..., dict[str, Array]]


def _run(q: Array, k: Array, v: Array, options: dict[str, Any]) -> tuple[Array, core.Saved]:
    return core.forward(q, k, v, **options, implementation="recurrent")


def _right(q: Array, k: Array, v: Array, d_out: Array, options: dict[str, Any]) -> dict[str, Array]:
    return core.backward(_run(q, k, v, options)[1], d_out)


def states_of_zero(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Take the state for 0 where the states are made again for the backward."""
    out, saved = _run(q, k, v, options)
    if options.get("state") is None or saved.inner is None:
        return core.backward(saved, d_out)
    fresh = _run(q, k, v, {name: x for name, x in options.items() if name != "state"})[1]
    tokens = [
        replace(a, miss=b.miss, correction=b.correction)
        for a, b in zip(fresh.inner.tokens, saved.inner.tokens, strict=True)
    ]
    return core.backward(replace(saved, inner=replace(saved.inner, tokens=tokens)), d_out)


def no_gradient_of_state(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Give the state that came in no gradient."""
    found = _right(q, k, v, d_out, options)
    return found | {"state": 0.0 * found["state"]}


def state_without_first_decay(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Leave the decay of the first token out of the gradient of the state."""
    found, log = _right(q, k, v, d_out, options), options.get("log_decay")
    if log is None or options.get("lengths") is not None or options.get("key_mask") is not None or not q.shape[2]:
        return found
    a = namespace(q).exp(dense.by_row(log, 0))
    if options.get("log_momentum") is not None:
        return found
    return found | {"state": found["state"] / namespace(q).where(a == 0.0, 1.0, a)}


def decay_without_its_factor(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Give the gradient of the decay for that of its logarithm."""
    found, log = _right(q, k, v, d_out, options), options.get("log_decay")
    if log is None:
        return found
    a = namespace(q).exp(log)
    return found | {"log_decay": found["log_decay"] / namespace(q).where(a == 0.0, 1.0, a)}


def decay_to_base_two(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Leave a logarithm of 2 in the gradient of the decay."""
    found = _right(q, k, v, d_out, options)
    return found | ({"log_decay": found["log_decay"] * math.log(2.0)} if "log_decay" in found else {})


def _changed(change: Callable[[dense.Token], dense.Token]) -> Backward:
    def wrong(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        _, saved = _run(q, k, v, options)
        if saved.inner is None:
            return core.backward(saved, d_out)
        inner = replace(saved.inner, tokens=[change(token) for token in saved.inner.tokens])
        return core.backward(replace(saved, inner=inner), d_out)

    return wrong


def keys_without_prediction(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Let a key have the gradient of its write alone."""
    right = _right(q, k, v, d_out, options)
    wrong = _changed(lambda token: replace(token, faded=0.0 * token.faded))(q, k, v, d_out=d_out, **options)
    return right | {"k": wrong["k"]}


def key_of_one_head(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Keep the gradient of a key of the last state head that it serves alone."""
    found, groups = _right(q, k, v, d_out, options), v.shape[1]
    shared = groups // k.shape[1]
    alone = _right(q, repeat_heads(k, groups), v, d_out, options)["k"]
    return found | {"k": alone[:, shared - 1 :: shared, ...]}


def query_of_the_state_before(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Take the state before the token for the gradient of its query."""
    right = _right(q, k, v, d_out, options)
    wrong = _changed(lambda token: replace(token, state=token.faded))(q, k, v, d_out=d_out, **options)
    return right | {"q": wrong["q"]}


def beta_of_the_write(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Take the write in place of the error for the gradient of beta."""
    right = _right(q, k, v, d_out, options)
    wrong = _changed(lambda token: replace(token, miss=token.correction))(q, k, v, d_out=d_out, **options)
    return right | {name: wrong[name] for name in ("beta", "step") if name in right}


def norm_without_projection(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Let the gradient along a normalised vector be."""
    _, saved = _run(q, k, v, options)
    found = core.backward(saved, d_out)
    if saved.inner is None or saved.inner.q_normal is None:
        return found
    normals = {"q_normal": saved.inner.q_normal, "k_normal": saved.inner.k_normal}
    inner = replace(saved.inner, **{name: (0.0 * y, r) for name, (y, r) in normals.items()})
    wrong = core.backward(replace(saved, inner=inner), d_out)
    return found | {name: wrong[name] for name in ("q", "k")}


WRONG_GRADIENTS: dict[str, Backward] = {
    "states of the second sweep begin at 0": states_of_zero,
    "no gradient of the first state": no_gradient_of_state,
    "first decay left out of the gradient of the state": state_without_first_decay,
    "gradient of the decay for that of its logarithm": decay_without_its_factor,
    "gradient of the decay to base 2": decay_to_base_two,
    "keys without the gradient of the prediction": keys_without_prediction,
    "gradient of the last state head of a key": key_of_one_head,
    "queries with the state before the write": query_of_the_state_before,
    "gradient of beta with the write": beta_of_the_write,
    "normalisation without its projection": norm_without_projection,
}
