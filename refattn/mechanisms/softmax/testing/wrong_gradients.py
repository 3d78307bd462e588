"""Plausible wrong backward passes of softmax attention: the output is right, and some gradient is not.

Each gives the gradients that are others, of the right ones, of all arguments and of what was saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refattn import equations
from refattn.mechanisms.softmax import core
from refattn.mechanisms.wrong import GradientChange, Gradients, gradients_of, scale_of
from refattn.ops.heads import repeat_heads
from refattn.xp import Array, namespace

Given = dict[str, Any]
Seen = dict[str, Array]


def _of(name: str, change: Callable[[Array, Given], Array]) -> GradientChange:
    """Return another gradient of an argument that is given: a function of the right one and of all arguments."""
    return lambda right, given, _: {name: change(right[name], given)} if name in right else {}


def _without(option: str, *names: str) -> GradientChange:
    """Return gradients as they are without an option, where it is given."""

    def change(right: Gradients, given: Given, _: Any) -> Gradients:
        found = right if given.get(option) is None else gradients_of(core, {**given, option: None})[0]
        return {name: found[name] for name in names if name in found}

    return change


def _last_alone(name: str, axis: int) -> GradientChange:
    """Take the last batch element, or the last query, alone for the sum over them."""

    def change(gradient: Array, given: Given) -> Array:
        d_out = given["d_out"]
        shape = (1,) * (4 - len(given[name].shape)) + tuple(given[name].shape)
        if name != "sink" and shape[axis] != 1:
            return gradient
        xp = namespace(d_out)
        at = xp.reshape(xp.arange(d_out.shape[axis]), tuple(-1 if n == axis else 1 for n in range(4)))
        only = xp.where(at == d_out.shape[axis] - 1, d_out, xp.zeros_like(d_out))
        return gradients_of(core, {**given, "d_out": only})[0][name]

    return _of(name, change)


def _equation(id: str, change: Callable[[Seen, Any], Array]) -> GradientChange:
    """Return gradients of q and k with another value of an equation: of those before it, and the soft-cap."""

    def changed(right: Gradients, given: Given, _: Any) -> Gradients:
        seen = Seen()

        def hook(ran: str, name: str, value: Array) -> Array:
            seen[ran] = value
            return change(seen, given.get("softcap")) if ran == id else value

        with equations.apply(hook):
            found = gradients_of(core, given)[0]
        return {name: found[name] for name in "qk"}

    return changed


def _over_masked(seen: Seen, softcap: Any) -> Array:
    """Return dz_i with the weights that masked keys would have in the sum."""
    scores = next(seen[id] for id in ("SM.biased", "SM.capped", "SM.1") if id in seen)
    xp = namespace(scores)
    weights = xp.exp(scores - seen["SM.top"]) / seen["SM.total"]
    return -xp.sum(weights * seen["dSM.4"], axis=-1, keepdims=True) / seen["SM.total"]


def _slope_of_capped(seen: Seen, softcap: Any) -> Array:
    return seen["dSM.2"] * (1.0 - namespace(seen["dSM.2"]).tanh(seen["SM.capped"] / softcap) ** 2)


def _behind_softcap(gradient: Array, given: Given) -> Array:
    """Pull the gradient of a bias for each pair through the soft-cap, which comes before it."""
    softcap, q, k = given.get("softcap"), given["q"], given["k"]
    if softcap is None or tuple(gradient.shape) != (*q.shape[:3], k.shape[2]):
        return gradient
    xp = namespace(q)
    scores = q @ xp.matrix_transpose(repeat_heads(k, q.shape[1])) * scale_of(given)
    return gradient * (1.0 - xp.tanh(scores / softcap) ** 2)


def _not_scaled(right: Gradients, given: Given, _: Any) -> Gradients:
    """Leave the scale out of the gradients of q and k."""
    scale = scale_of(given)
    return {n: gradients_of(core, {**given, "scale": 1.0, n: given[n] * scale})[0][n] for n in "qk"}


def _sink_left_out_of_inner(right: Gradients, given: Given, saved: Any) -> Gradients:
    """Take the inner product with weights that sum to 1 without the sink."""
    q, k, d_out = given["q"], given["k"], given["d_out"]
    if given.get("sink") is None or given.get("softcap") is not None or k.shape[2] == 0:
        return {}
    xp, call = namespace(q), {name: x for name, x in given.items() if name != "d_out"}
    out, alone = core.forward(**call)[0], core.forward(**{**call, "sink": None})[1]
    known = xp.isfinite(alone.lse) & xp.isfinite(saved.lse)
    share = xp.exp(xp.where(known, alone.lse, 0.0) - xp.where(known, saved.lse, 0.0))  # of the keys
    inner = xp.sum(xp.where(known[..., None], d_out * out, 0.0), axis=-1)
    more = xp.astype(inner / share - inner, q.dtype)[..., None]
    # The core with the keys for its values gives sum_j w_ij k_j, and its backward sum_i w_ij times what comes in.
    mean, weighing = core.forward(**{**call, "v": k, "keep": None})
    d_k = core.backward(weighing, xp.where(known[..., None], q, 0.0) * more)["v"]
    scale = scale_of(given)
    return {"q": right["q"] - scale * more * mean, "k": right["k"] - scale * d_k}


WRONG_GRADIENTS: dict[str, GradientChange] = {
    "gradient of the sink of the other sign": _of("sink", lambda d, given: -d),
    "gradient of the sink averaged over the batch": _of("sink", lambda d, given: d / max(given["q"].shape[0], 1)),
    "gradient of the sink left 0": _of("sink", lambda d, given: 0.0 * d),
    "gradient of the bias scaled": _of("bias", lambda d, given: d * scale_of(given)),
    "gradient of the sink of one query": _last_alone("sink", 2),
    "gradient of the sink without dropout": _without("keep", "sink"),
    "gradient of the bias of one batch element": _last_alone("bias", 0),
    "gradient of the bias behind the soft-cap": _of("bias", _behind_softcap),
    "inner product without the sink": _sink_left_out_of_inner,
    "gradient of v without dropout": _without("keep", "v"),
    "gradient of the scores without dropout": _without("keep", "q", "k"),
    "gradients without the sink": _without("sink", "q", "k"),
    "gradients without the scale": _not_scaled,
    # From a q that was scaled already.
    "gradient of k scaled twice": _of("k", lambda d, given: d * scale_of(given)),
    # As if the softmax were a function of each score alone.
    "inner product left out of the backward": _equation("dSM.total", lambda seen, _: 0.0 * seen["dSM.total"]),
    "inner product over masked keys": _equation("dSM.total", _over_masked),
    "soft-cap left out of the backward": _equation("dSM.1", lambda seen, _: seen["dSM.2"]),
    "slope at the capped score": _equation("dSM.1", _slope_of_capped),
}
