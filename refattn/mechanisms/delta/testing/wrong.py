"""Plausible wrong readings of the recurrences: functions of the core's arguments that return (out, state).

Those that change a step are written token by token; those that change an argument call the core. What stages of kernels
get wrong, `stages` has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from refattn.mechanisms.delta import core
from refattn.mechanisms.delta.testing.stages import SIZES, STAGES, usual_eps
from refattn.mechanisms.delta.testing.wrong_gradients import WRONG_GRADIENTS
from refattn.mechanisms.wrong import Changed, conventions, gradients, if_given, of_scales, scale_of
from refattn.ops.heads import group_heads, repeat_heads, ungroup_heads
from refattn.ops.unit_norm import unit
from refattn.xp import Array, namespace, zeros

Outputs = tuple[Array, Array]
Reading = Callable[..., Outputs]


def _core(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
    out, saved = core.forward(q, k, v, **options)
    return out, saved.state


# --- readings that change a step


@dataclass(frozen=True)
class _Token:
    """What a token brings: k (b, g, d, 1), v (b, g, 1, e), and gates that broadcast to the state; 1 where absent."""

    k: Array
    v: Array
    predicts: bool
    beta: Any
    a: Any
    log_a: Any
    mu: Any  # None without momentum
    step: Any

    def held(self, state: Array) -> Any:
        """Return what a state holds for the key, 0 where nothing is predicted."""
        return namespace(self.k).matrix_transpose(self.k) @ state if self.predicts else 0.0

    def written(self, decayed: Array, momentum: Any, error: Any) -> tuple[Array, Any]:
        """Return the state and the momentum after an error was written."""
        if self.mu is None:
            return decayed + self.k * (self.beta * error), momentum
        momentum = self.mu * momentum + self.k * (self.step * error)
        return decayed + self.beta * momentum, momentum


def _along(x: Array | None, n: int) -> Any:
    if x is None:
        return 1.0
    return x[:, :, n, None, None] if len(x.shape) == 3 else x[:, :, n, :, None]


Write = Callable[["_Token", Array, Any, Any], tuple[Array, Any]]
"""Of a token, a decayed state, a momentum and an error: the next state and momentum."""


def _step(
    words: str,
    *,
    decay: Callable[[_Token, Array], Array] = lambda t, state: t.a * state,
    asked: Callable[[Array, Array], Array] = lambda state, decayed: decayed,
    error: Callable[[_Token, Any], Any] = lambda t, held: t.v - held,
    write: Write = lambda t, *given: t.written(*given),
    moving: Write | None = None,
    read: Callable[[Array, Array, Array], Array] = lambda state, decayed, new: new,
) -> Reading:
    """Return the recurrence with another step, in words.

    Of the decay of a state; which state is asked, of that before and after the decay; the error of a token, of what is
    held for its key; how it is written, or written with a momentum alone; and which state is read: that before, the
    decayed one or the new one.
    """

    def step(t: _Token, state: Array, momentum: Any) -> tuple[Array, Any, Array]:
        decayed = decay(t, state)
        wrote = write if t.mu is None or moving is None else moving
        new, momentum = wrote(t, decayed, momentum, error(t, t.held(asked(state, decayed))))
        return new, momentum, read(state, decayed, new)

    reading = _stepwise(step)
    reading.__doc__ = words
    return reading


def _stepwise(step: Callable[[_Token, Array, Any], tuple[Array, Any, Array]]) -> Reading:
    """Return the recurrence with another step: of a token, a state and a momentum, the next ones, and what is read."""

    def reading(
        q: Array,
        k: Array,
        v: Array,
        *,
        qk_norm: bool = False,
        norm_eps: float | None = None,
        state: Array | None = None,
        scale: Any = None,
        key_mask: Array | None = None,
        lengths: Any = None,
        chunk: Any = None,
        **gates: Array | None,
    ) -> Outputs:
        xp, (b, g, tokens, e) = namespace(q, k, v), v.shape
        d, heads = q.shape[3], max(q.shape[1], g)
        if key_mask is not None:
            rows = key_mask[:, None, :]
            k, v = (xp.where(rows[..., None], x, 0.0) for x in (k, v))
            gates = {
                name: None if x is None else xp.where(rows if len(x.shape) == 3 else rows[..., None], x, 0.0)
                for name, x in gates.items()
            }
        if qk_norm:
            eps = usual_eps() if norm_eps is None else norm_eps
            q, k = unit(q, eps)[0], unit(k, eps)[0]
        queries, keys = group_heads(repeat_heads(q, heads), g), repeat_heads(k, g)
        factor = 1.0 / math.sqrt(d) if scale is None else scale
        beta, log_a, log_mu = (gates.get(name) for name in ("beta", "log_decay", "log_momentum"))
        moving = log_mu is not None
        first, outs, ends = 0, [zeros((b, g, heads // g, 0, e), v)], []
        for m, length in enumerate([tokens] if lengths is None else lengths):
            start = None if state is None else state if lengths is None else state[m : m + 1, ...]
            zero = zeros((b, g, d, e), v)
            at = zero if start is None else start[:, :, 0, ...] if moving else start
            momentum = None if not moving else zero if start is None else start[:, :, 1, ...]
            for n in range(first, first + length):
                log = _along(log_a, n)
                token = _Token(
                    xp.matrix_transpose(keys[:, :, n : n + 1, :]),
                    v[:, :, n : n + 1, :],
                    beta is not None,
                    _along(beta, n),
                    1.0 if log_a is None else xp.exp(log),
                    None if log_a is None else log,
                    None if log_mu is None else xp.exp(_along(log_mu, n)),
                    _along(gates.get("step"), n),
                )
                at, momentum, read = step(token, at, momentum)
                outs.append((factor * (queries[:, :, :, n, :] @ read))[:, :, :, None, :])
            first += length
            ends.append(at if momentum is None else xp.stack([at, momentum], axis=2))
        return ungroup_heads(xp.concat(outs, axis=3)), xp.concat(ends, axis=0)

    return reading


def _then_decay(t: _Token, state: Array, momentum: Any, error: Any) -> tuple[Array, Any]:
    state, momentum = t.written(state, momentum, error)
    return t.a * state, momentum


def _without_beta(t: _Token, decayed: Array, momentum: Any, error: Any) -> tuple[Array, Any]:
    return replace(t, beta=1.0).written(decayed, momentum, error)


def _logarithm(t: _Token, state: Array) -> Array:
    return state if t.log_a is None else namespace(t.k).where(t.log_a == -math.inf, 0.0, t.log_a) * state


def _columns(t: _Token, state: Array) -> Array:
    turns = state.shape[-2] == state.shape[-1] and not isinstance(t.a, float)
    return (namespace(t.k).matrix_transpose(t.a) if turns else t.a) * state


def _nesterov(t: _Token, decayed: Array, momentum: Any, error: Any) -> tuple[Array, Any]:
    _, momentum = t.written(decayed, momentum, error)
    return decayed + t.beta * (t.mu * momentum + t.k * (t.step * error)), momentum


def _damped(t: _Token, decayed: Array, momentum: Any, error: Any) -> tuple[Array, Any]:
    momentum = t.mu * (momentum + t.k * (t.step * error))
    return decayed + t.beta * momentum, momentum


def _before(t: _Token, decayed: Array, momentum: Any, error: Any) -> tuple[Array, Any]:
    return decayed + t.beta * momentum, t.written(decayed, momentum, error)[1]


def _step_on_state(t: _Token, decayed: Array, momentum: Any, error: Any) -> tuple[Array, Any]:
    momentum = t.mu * momentum + t.k * error
    return decayed + t.beta * t.step * momentum, momentum


def _negated(t: _Token, decayed: Array, momentum: Any, error: Any) -> tuple[Array, Any]:
    state, momentum = t.written(decayed, -momentum, error)
    return state, -momentum


STEPS: dict[str, Reading] = {
    "write, then decay": _step(
        "Predict, write, and let all of it decay.", decay=lambda t, state: state, write=_then_decay
    ),
    "prediction before the decay": _step("Ask the state that has not decayed yet.", asked=lambda state, decayed: state),
    "beta on the prediction alone": _step(
        "Write v - beta p.", error=lambda t, held: t.v - t.beta * held, write=_without_beta
    ),
    "beta on the value alone": _step(
        "Write beta v - p.", error=lambda t, held: t.beta * t.v - held, write=_without_beta
    ),
    "beta in the keys, read and written": _step(
        "Predict with beta k, and write with beta k.", error=lambda t, held: t.v - t.beta * held
    ),
    "read before the token": _step("Read the state of the token before.", read=lambda state, decayed, new: state),
    "read before the write": _step("Read after the decay, before the write.", read=lambda state, decayed, new: decayed),
    "error of the other sign": _step("Write p - v.", error=lambda t, held: held - t.v if t.predicts else t.v),
    "gate not exponentiated": _step("Multiply by the logarithm of the decay.", decay=_logarithm),
    "decay on the axis of values": _step(
        "Let columns of the state decay, where it has as many as rows.", decay=_columns
    ),
    "momentum of Nesterov": _step("Write mu M_n + k u^T.", moving=_nesterov),
    "momentum damps the new write": _step(
        "Let the write of the token itself be damped, too: M = mu (M + k u^T).", moving=_damped
    ),
    "momentum of the token before": _step("Write the momentum of the token before.", moving=_before),
    "momentum as an average": _step(
        "Weigh what is new by 1 - mu.", moving=lambda t, decayed, m, error: t.written(decayed, m, (1.0 - t.mu) * error)
    ),
    "step on the state": _step(
        "Let the step scale the write to the state, not the error that enters the momentum.", moving=_step_on_state
    ),
    "momentum of the other sign": _step(
        "Take the momentum that comes in for that of the gradient, and give that: -M.", moving=_negated
    ),
}


# --- readings that change an argument


def scale_on_keys(q: Array, k: Array, v: Array, *, scale: Any = None, qk_norm: bool = False, **options: Any) -> Outputs:
    """Scale keys as well, those that are normalised too."""
    eps = options.pop("norm_eps", usual_eps())
    q, k = (unit(q, eps)[0], unit(k, eps)[0]) if qk_norm else (q, k)
    return _core(q, k * scale_of({"q": q, "scale": scale}), v, scale=scale, **options)


def _normalised(which: str, by: Callable[[Array, float], Array]) -> Reading:
    """Return the core with queries, keys or both normalised in another way, where they are."""

    def reading(q: Array, k: Array, v: Array, *, qk_norm: bool = False, **options: Any) -> Outputs:
        if not qk_norm:
            return _core(q, k, v, **options)
        eps = options.pop("norm_eps", usual_eps())
        return _core(by(q, eps) if "q" in which else q, by(k, eps) if "k" in which else k, v, **options)

    return reading


def _at_least(x: Array, eps: float) -> Array:
    """Divide by max(norm, eps)."""
    xp = namespace(x)
    norm = xp.sqrt(xp.vecdot(x, x))[..., None]
    return x / xp.where(norm > eps, norm, eps)


def _of_the_mean(x: Array, eps: float) -> Array:
    """Add eps to the mean of the squares."""
    xp = namespace(x)
    return x / xp.sqrt(xp.vecdot(x, x)[..., None] + eps * x.shape[-1])


def _changed(words: str, name: str, change: Callable[[Array], Array | None]) -> Reading:
    """Return the core with another array, where it is given."""
    return if_given(_core, words, name, lambda given: {name: change(given[name])})


def _transposed(state: Array) -> Array:
    return namespace(state).matrix_transpose(state) if state.shape[-1] == state.shape[-2] else state


def _late(log: Array, kept: int) -> Array:
    """Return the gate with zeros for the first token, and from there on that of the token before, or its own."""
    return namespace(log).concat([0.0 * log[:, :, :1], log[:, :, kept : kept + log.shape[2] - 1]], axis=2)


def _unseen(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return inputs with zeros for padding, and no mask."""

    def change(given: dict[str, Any]) -> dict[str, Any]:
        mask = given.get("key_mask")
        if mask is None:
            return {}
        zeroed = {name: namespace(mask).where(mask[:, None, :, None], given[name], 0.0) for name in names}
        return {**zeroed, "key_mask": None}

    return change


def state_turned_out(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
    """Give the state as (value, key), where that fits."""
    out, last = _core(q, k, v, **options)
    return out, _transposed(last)


def _tiled(x: Array, heads: int) -> Array:
    """Return heads 0, 1, ..., 0, 1, ... in place of 0, 0, ..., 1, 1, ..."""
    return x if x.shape[1] == 0 else namespace(x).concat([x] * (heads // x.shape[1]), axis=1)


def queries_tiled(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
    """Let output head o read state head o mod g, or with query head o mod h."""
    heads, groups = max(q.shape[1], v.shape[1]), v.shape[1]
    if q.shape[1] < groups:
        return _core(_tiled(q, heads), k, v, **options)
    shared = heads // groups
    xp = namespace(q)
    order = [a + r * groups for a in range(groups) for r in range(shared)]
    moved = xp.concat([q[:, a : a + 1, ...] for a in order], axis=1)
    out, last = _core(moved, k, v, **options)
    back = [order.index(o) for o in range(heads)]
    return xp.concat([out[:, a : a + 1, ...] for a in back], axis=1), last


READINGS: dict[str, Reading] = {
    **STEPS,
    **of_scales(_core),
    "scale on keys too": scale_on_keys,
    "norm_eps as the least norm": _normalised("qk", _at_least),
    "norm_eps on the mean": _normalised("qk", _of_the_mean),
    "queries alone normalised": _normalised("q", lambda x, eps: unit(x, eps)[0]),
    "keys alone normalised": _normalised("k", lambda x, eps: unit(x, eps)[0]),
    "gate to base 2": _changed("Take the gate for a power of 2.", "log_decay", lambda x: x * math.log(2.0)),
    "gate one token late": _changed("Decay by the gate of the token before.", "log_decay", lambda x: _late(x, 0)),
    "first token does not decay": _changed("Keep the first state whole.", "log_decay", lambda x: _late(x, 1)),
    "beta through a sigmoid again": _changed(
        "Take beta for what a sigmoid is still to be taken of.", "beta", lambda x: 1.0 / (1.0 + namespace(x).exp(-x))
    ),
    "half of beta": _changed("Write half.", "beta", lambda x: 0.5 * x),
    "state in ignored": _changed("Begin with 0.", "state", lambda x: None),
    "state in transposed": _changed(
        "Take the state that comes in as (value, key), where that fits.", "state", _transposed
    ),
    "state out transposed": state_turned_out,
    "queries tiled": queries_tiled,
    "keys tiled": Changed(
        _core, "Give state head x key head x mod f.", lambda given: {"k": _tiled(given["k"], given["v"].shape[1])}
    ),
    "mask of values alone": Changed(_core, "Let padding have values of 0, and do all else.", _unseen("v")),
    "masked tokens decay": Changed(
        _core, "Write nothing for padding, and let the state decay there.", _unseen("v", "k")
    ),
}

WRONG = {
    **conventions(READINGS, ("state",)),
    **conventions(STAGES, ("state",), SIZES),
    **gradients(WRONG_GRADIENTS),
}
