"""Plausible wrong backward passes of softmax attention: the output is right, and some gradient is not.

Each has the signature of the core without `implementation`, with `d_out`, and returns gradients by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refattn import equations
from refattn.mechanisms.softmax import core
from refattn.mechanisms.wrong import scale_of
from refattn.ops.heads import repeat_heads
from refattn.xp import Array, namespace

Backward = Callable[..., dict[str, Array]]


def _right(q: Array, k: Array, v: Array, d_out: Array, options: dict[str, Any]) -> tuple[dict[str, Array], float]:
    """Return the right gradients, and the scale."""
    _, saved = core.forward(q, k, v, **options)
    return core.backward(saved, d_out), scale_of({**options, "q": q})


def no_scale(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Leave the scale out of the gradients of q and k."""
    gradients, scale = _right(q, k, v, d_out, options)
    of_scaled = [_right(*scaled, v, d_out, options | {"scale": 1.0})[0] for scaled in ((q * scale, k), (q, k * scale))]
    return gradients | {"q": of_scaled[0]["q"], "k": of_scaled[1]["k"]}


def scale_twice(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Take the gradient of k from a q that was scaled already, and scale it."""
    gradients, scale = _right(q, k, v, d_out, options)
    return gradients | {"k": gradients["k"] * scale}


Seen = dict[str, Array]


def _equation(words: str, id: str, change: Callable[[Seen, Any], Array]) -> Backward:
    """Return gradients of q and k with another value of an equation: of those before it, and the soft-cap."""

    def wrong(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        right, seen = _right(q, k, v, d_out, options)[0], Seen()

        def hook(ran: str, name: str, value: Array) -> Array:
            seen[ran] = value
            return change(seen, options.get("softcap")) if ran == id else value

        with equations.apply(hook):
            found = _right(q, k, v, d_out, options)[0]
        return right | {name: found[name] for name in "qk"}

    wrong.__doc__ = words
    return wrong


def _over_masked(seen: Seen, softcap: Any) -> Array:
    """Return dz_i with the weights that masked keys would have in the sum."""
    scores = next(seen[id] for id in ("SM.biased", "SM.capped", "SM.1") if id in seen)
    xp = namespace(scores)
    weights = xp.exp(scores - seen["SM.top"]) / seen["SM.total"]
    return -xp.sum(weights * seen["dSM.4"], axis=-1, keepdims=True) / seen["SM.total"]


def _slope_of_capped(seen: Seen, softcap: Any) -> Array:
    return seen["dSM.2"] * (1.0 - namespace(seen["dSM.2"]).tanh(seen["SM.capped"] / softcap) ** 2)


def _of(name: str, change: Callable[[Array, Array, dict[str, Any]], Array]) -> Backward:
    """Return the right gradients but for one, of an argument that is given: a function of it, d_out and the options."""

    def wrong(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        _, saved = core.forward(q, k, v, **options)
        gradients = core.backward(saved, d_out)
        if name not in gradients:
            return gradients
        return gradients | {name: change(gradients[name], d_out, {**options, "q": q, "k": k, "v": v})}

    return wrong


def _without(option: str, names: tuple[str, ...]) -> Backward:
    """Return gradients some of which are those of a call without an option."""

    def wrong(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
        _, saved = core.forward(q, k, v, **options)
        gradients = core.backward(saved, d_out)
        if options.get(option) is None:
            return gradients
        _, other = core.forward(q, k, v, **{n: x for n, x in options.items() if n != option})
        found = core.backward(other, d_out)
        return gradients | {name: found[name] for name in names if name in found}

    return wrong


def _last_alone(name: str, axis: int) -> Backward:
    """Take the last batch element, or the last query, alone for the sum over them."""

    def change(gradient: Array, d_out: Array, given: dict[str, Any]) -> Array:
        shape = (1,) * (4 - len(given[name].shape)) + tuple(given[name].shape)
        if name != "sink" and shape[axis] != 1:
            return gradient
        xp = namespace(d_out)
        at = xp.reshape(xp.arange(d_out.shape[axis]), tuple(-1 if n == axis else 1 for n in range(4)))
        only = xp.where(at == d_out.shape[axis] - 1, d_out, xp.zeros_like(d_out))
        options = {n: x for n, x in given.items() if n not in "qkv"}
        _, saved = core.forward(given["q"], given["k"], given["v"], **options)
        return core.backward(saved, only)[name]

    return _of(name, change)


def _behind_softcap(gradient: Array, d_out: Array, given: dict[str, Any]) -> Array:
    """Pull the gradient of a bias for each pair through the soft-cap, which comes before it."""
    softcap, q, k = given.get("softcap"), given["q"], given["k"]
    if softcap is None or tuple(gradient.shape) != (*q.shape[:3], k.shape[2]):
        return gradient
    xp = namespace(q)
    scores = q @ xp.matrix_transpose(repeat_heads(k, q.shape[1])) * scale_of(given)
    return gradient * (1.0 - xp.tanh(scores / softcap) ** 2)


def sink_left_out_of_inner(q: Array, k: Array, v: Array, *, d_out: Array, **options: Any) -> dict[str, Array]:
    """Take the inner product with weights that sum to 1 without the sink."""
    out, saved = core.forward(q, k, v, **options)
    gradients = core.backward(saved, d_out)
    if options.get("sink") is None or options.get("softcap") is not None or k.shape[2] == 0:
        return gradients
    xp = namespace(q)
    _, alone = core.forward(q, k, v, **{**options, "sink": None})
    known = xp.isfinite(alone.lse) & xp.isfinite(saved.lse)
    share = xp.exp(xp.where(known, alone.lse, 0.0) - xp.where(known, saved.lse, 0.0))  # of the keys
    inner = xp.sum(xp.where(known[..., None], d_out * out, 0.0), axis=-1)
    more = xp.astype(inner / share - inner, q.dtype)[..., None]
    # The core with the keys for its values gives sum_j w_ij k_j, and its backward sum_i w_ij times what comes in.
    mean, weighing = core.forward(q, k, k, **{**options, "keep": None})
    scale = scale_of({**options, "q": q})
    exists = xp.where(known[..., None], q, 0.0)
    d_k = core.backward(weighing, exists * more)["v"]
    return gradients | {"q": gradients["q"] - scale * more * mean, "k": gradients["k"] - scale * d_k}


WRONG_GRADIENTS: dict[str, Backward] = {
    "gradient of the sink of the other sign": _of("sink", lambda d, _, given: -d),
    "gradient of the sink averaged over the batch": _of("sink", lambda d, d_out, _: d / max(d_out.shape[0], 1)),
    "gradient of the sink left 0": _of("sink", lambda d, _, given: 0.0 * d),
    "gradient of the bias scaled": _of("bias", lambda d, _, given: d * scale_of(given)),
    "gradient of the sink of one query": _last_alone("sink", 2),
    "gradient of the sink without dropout": _without("keep", ("sink",)),
    "gradient of the bias of one batch element": _last_alone("bias", 0),
    "gradient of the bias behind the soft-cap": _of("bias", _behind_softcap),
    "inner product without the sink": sink_left_out_of_inner,
    "gradient of v without dropout": _without("keep", ("v",)),
    "gradient of the scores without dropout": _without("keep", ("q", "k")),
    "gradients without the sink": _without("sink", ("q", "k")),
    "gradients without the scale": no_scale,
    "gradient of k scaled twice": scale_twice,
    "inner product left out of the backward": _equation(
        "Take the softmax for a function of each score alone.", "dSM.total", lambda seen, _: 0.0 * seen["dSM.total"]
    ),
    "inner product over masked keys": _equation(
        "Sum the inner product over masked keys, too.", "dSM.total", _over_masked
    ),
    "soft-cap left out of the backward": _equation(
        "Leave the slope of the soft-cap out.", "dSM.1", lambda seen, _: seen["dSM.2"]
    ),
    "slope at the capped score": _equation(
        "Take the slope of the soft-cap at the score that was capped already.", "dSM.1", _slope_of_capped
    ),
}
