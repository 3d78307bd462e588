"""Plausible wrong backward passes of the recurrences: the output is right, and some gradient is not.

Each gives the gradients that are others, of the right ones, of all arguments and of what was saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from refattn.mechanisms.delta import core, dense
from refattn.mechanisms.wrong import GradientChange, Gradients, gradients_of
from refattn.ops.heads import repeat_heads
from refattn.xp import Array, namespace

Given = dict[str, Any]


def _run(given: Given, **other: Any) -> tuple[Gradients, Any]:
    """Return the gradients of the call with some other arguments, token by token, and what was saved."""
    return gradients_of(core, {**given, **other, "implementation": "recurrent"})


def _otherwise_saved(names: tuple[str, ...], change: Callable[[dense.Saved, Given], dense.Saved]) -> GradientChange:
    """Return some gradients of a backward that reads what `change` makes of what the forward saved."""

    def changed(right: Gradients, given: Given, _: Any) -> Gradients:
        _, saved = _run(given)
        if saved.inner is None:
            return {}
        found = core.backward(replace(saved, inner=change(saved.inner, given)), given["d_out"])
        return {name: found[name] for name in names or found if name in right}

    return changed


def _tokens(*names: str, **fields: Callable[[dense.Token], Array]) -> GradientChange:
    """Return some gradients of a backward that reads other fields of every token."""
    return _otherwise_saved(
        names,
        lambda inner, given: replace(
            inner, tokens=[replace(t, **{name: field(t) for name, field in fields.items()}) for t in inner.tokens]
        ),
    )


def _states_of_zero(inner: dense.Saved, given: Given) -> dense.Saved:
    if given.get("state") is None:
        return inner
    fresh = _run(given, state=None)[1].inner.tokens
    pairs = zip(fresh, inner.tokens, strict=True)
    return replace(inner, tokens=[replace(a, miss=b.miss, correction=b.correction) for a, b in pairs])


def _without_projection(inner: dense.Saved, given: Given) -> dense.Saved:
    if inner.q_normal is None or inner.k_normal is None:
        return inner
    (q_hat, q_r), (k_hat, k_r) = inner.q_normal, inner.k_normal
    return replace(inner, q_normal=(0.0 * q_hat, q_r), k_normal=(0.0 * k_hat, k_r))


def _without_first_decay(right: Gradients, given: Given, _: Any) -> Gradients:
    log = given.get("log_decay")
    others = any(given.get(name) is not None for name in ("lengths", "key_mask", "log_momentum"))
    if log is None or others or not log.shape[2]:
        return {}
    a = namespace(log).exp(dense.by_row(log, 0))
    return {"state": right["state"] / namespace(a).where(a == 0.0, 1.0, a)}


def _of_decay(right: Gradients, given: Given, _: Any) -> Gradients:
    if "log_decay" not in right:
        return {}
    a = namespace(given["q"]).exp(given["log_decay"])
    return {"log_decay": right["log_decay"] / namespace(a).where(a == 0.0, 1.0, a)}


def _of_one_head(right: Gradients, given: Given, _: Any) -> Gradients:
    groups = given["v"].shape[1]
    shared = groups // given["k"].shape[1]
    return {"k": _run(given, k=repeat_heads(given["k"], groups))[0]["k"][:, shared - 1 :: shared, ...]}


WRONG_GRADIENTS: dict[str, GradientChange] = {
    "states of the second sweep begin at 0": _otherwise_saved((), _states_of_zero),
    "no gradient of the first state": lambda right, *_: {"state": 0.0 * right["state"]},
    "first decay left out of the gradient of the state": _without_first_decay,
    "gradient of the decay for that of its logarithm": _of_decay,
    "gradient of the decay to base 2": lambda right, *_: {
        name: right[name] * math.log(2.0) for name in ("log_decay",) if name in right
    },
    "keys without the gradient of the prediction": _tokens("k", faded=lambda token: 0.0 * token.faded),
    "gradient of the last state head of a key": _of_one_head,
    "queries with the state before the write": _tokens("q", state=lambda token: token.faded),
    "gradient of beta with the write": _tokens("beta", "step", miss=lambda token: token.correction),
    "normalisation without its projection": _otherwise_saved(("q", "k"), _without_projection),
}
