"""Plausible wrong readings of the recurrences: functions of the core's arguments that return (out, state).

Those that change a step replace values of equations while the core runs; the others change an argument or an output.
What stages of kernels get wrong, `stages` has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from refattn import equations
from refattn.mechanisms.delta import core
from refattn.mechanisms.delta.dense import by_row
from refattn.mechanisms.delta.options import GATES, hidden
from refattn.mechanisms.delta.testing.stages import SIZES, STAGES, usual_eps
from refattn.mechanisms.delta.testing.wrong_gradients import WRONG_GRADIENTS
from refattn.mechanisms.wrong import (
    Changed,
    conventions,
    gradients,
    if_given,
    of_scales,
    other_gradients,
    other_outputs,
    scale_of,
)
from refattn.ops.heads import group_heads, repeat_heads
from refattn.ops.unit_norm import unit
from refattn.xp import Array, namespace, zeros

Outputs = tuple[Array, Array]
Reading = Callable[..., Outputs]
Given = dict[str, Any]


def _core(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
    out, saved = core.forward(q, k, v, **options)
    return out, saved.state


# --- readings that change a step


class _Token(dict[str, Any]):
    """The values of the equations of a token, by id, while the core runs token by token.

    Keys and values are rows, (b, g, 1, d) and (b, g, 1, e), states (b, g, d, e); what is padding holds 0.
    """

    def __init__(self, given: Given) -> None:
        given, mask = {name: x for name, x in given.items() if x is not None}, given.get("key_mask")
        shown = {n: hidden(x, mask) for n, x in given.items() if n in ("v", *GATES)} if mask is not None else {}
        self.given = {**given, **shown}
        self.n, self.moving = -1, "log_momentum" in given
        self.firsts = [0, *accumulate(given.get("lengths", ()))]

    def next(self) -> None:
        """Go to the next token: set the state and the momentum before it."""
        self.n += 1
        state, v = self.given.get("state"), self.given["v"]
        if self.n not in self.firsts:
            self.before, self.momentum = self["DELTA.4"], self.get("DELTA.momentum")
        elif state is None:
            self.before = self.momentum = zeros((v.shape[0], v.shape[1], self.given["k"].shape[3], v.shape[3]), v)
        else:
            # Of empty sequences and the one that begins behind them, the last.
            number = len(self.firsts) - 1 - self.firsts[::-1].index(self.n)
            start = state[number : number + 1, ...] if "lengths" in self.given else state
            self.before, self.momentum = (start[:, :, 0, ...], start[:, :, 1, ...]) if self.moving else (start, None)

    def gate(self, name: str) -> Any:
        """Return a gate, to be multiplied with a state; 1 where it is absent."""
        return by_row(self.given[name], self.n) if name in self.given else 1.0

    @property
    def decay(self) -> Any:
        """a: what is kept of the state; 1 where no decay is given."""
        return namespace(self.value).exp(self.gate("log_decay")) if "log_decay" in self.given else 1.0

    @property
    def mu(self) -> Array:
        """What is kept of the momentum."""
        return namespace(self.value).exp(self.gate("log_momentum"))

    @property
    def value(self) -> Array:
        return self.given["v"][:, :, self.n : self.n + 1, :]

    @property
    def key(self) -> Array:
        return repeat_heads(self["DELTA.unit_k"], self.given["v"].shape[1])[:, :, self.n : self.n + 1, :]

    def write(self, row: Array) -> Array:
        """Return what a row adds to the state."""
        return namespace(row).matrix_transpose(self.key) * row

    def read(self, state: Array) -> Array:
        """Return what the query reads from a state."""
        groups, queries = state.shape[1], self["DELTA.unit_q"]
        queries = group_heads(repeat_heads(queries, max(queries.shape[1], groups)), groups)
        return scale_of(self.given) * (queries[:, :, :, self.n, :] @ state)


Changes = Mapping[str, Callable[[_Token], Array]]


def _stepwise(changes: Changes, needed: str = "") -> Reading:
    """Return the core with other values of some equations, by id: each a function of those of the token up to it.

    Calls that do not give the `needed` gate are right.
    """

    def reading(q: Array, k: Array, v: Array, **options: Any) -> Outputs:
        if needed and options.get(needed) is None:
            return _core(q, k, v, **options)
        token = _Token({"q": q, "k": k, "v": v, **options})

        def hook(id: str, name: str, value: Array) -> Array:
            if id == "DELTA.1":
                token.next()
            token[id] = value
            if id in changes:
                token[id] = changes[id](token)
            return token[id]

        # A decay of 1 in place of none: DELTA.1 runs for every token.
        decay = options.get("log_decay")
        decay = zeros(v.shape[:3], v) if decay is None else decay
        with equations.apply(hook):
            return _core(q, k, v, **{**options, "log_decay": decay, "implementation": "recurrent"})

    return reading


def _logarithm(t: _Token) -> Array:
    log = t.gate("log_decay")
    return t["DELTA.1"] if isinstance(log, float) else namespace(log).where(log == -math.inf, 0.0, log) * t.before


def _columns(t: _Token) -> Array:
    a = t.decay
    turns = t.before.shape[-2] == t.before.shape[-1] and not isinstance(a, float)
    return (namespace(a).matrix_transpose(a) if turns else a) * t.before


WHOLE: Changes = {
    "DELTA.3": lambda t: t["DELTA.3"] if t.moving else t["DELTA.2"],
    "DELTA.4": lambda t: t["DELTA.1"] + t["DELTA.momentum"] if t.moving else t["DELTA.4"],
}
"""What is written is not multiplied by beta."""

_moving = partial(_stepwise, needed="log_momentum")

STEPS: dict[str, Reading] = {
    "write, then decay": _stepwise({"DELTA.1": lambda t: t.before, "DELTA.4": lambda t: t.decay * t["DELTA.4"]}),
    "prediction before the decay": _stepwise({"DELTA.predicted": lambda t: t.key @ t.before}),
    "beta on the prediction alone": _stepwise(
        {"DELTA.2": lambda t: t.value - t.gate("beta") * t["DELTA.predicted"], **WHOLE}
    ),
    "beta on the value alone": _stepwise(
        {"DELTA.2": lambda t: t.gate("beta") * t.value - t["DELTA.predicted"], **WHOLE}
    ),
    "beta in the keys, read and written": _stepwise(
        {"DELTA.2": lambda t: t.value - t.gate("beta") * t["DELTA.predicted"]}
    ),
    "read before the token": _stepwise({"DELTA.5": lambda t: t.read(t.before)}),
    "read before the write": _stepwise({"DELTA.5": lambda t: t.read(t["DELTA.1"])}),
    "error of the other sign": _stepwise({"DELTA.2": lambda t: -t["DELTA.2"]}),
    "gate not exponentiated": _stepwise({"DELTA.1": _logarithm}),
    "decay on the axis of values": _stepwise({"DELTA.1": _columns}),  # where the state is square
    "momentum of Nesterov": _moving(
        {"DELTA.4": lambda t: t["DELTA.1"] + t.gate("beta") * (t.mu * t["DELTA.momentum"] + t.write(t["DELTA.3"]))}
    ),
    "momentum damps the new write": _moving({"DELTA.momentum": lambda t: t.mu * (t.momentum + t.write(t["DELTA.3"]))}),
    "momentum of the token before": _moving({"DELTA.4": lambda t: t["DELTA.1"] + t.gate("beta") * t.momentum}),
    "momentum as an average": _moving(
        {"DELTA.momentum": lambda t: t.mu * t.momentum + t.write((1.0 - t.mu) * t["DELTA.3"])}
    ),
    "step on the state": _moving(
        {
            "DELTA.momentum": lambda t: t.mu * t.momentum + t.write(t["DELTA.2"]),
            "DELTA.4": lambda t: t["DELTA.1"] + t.gate("beta") * t.gate("step") * t["DELTA.momentum"],
        }
    ),
    # That of the gradient, -M, comes in and goes out.
    "momentum of the other sign": _moving(
        {
            "DELTA.momentum": lambda t: t.mu * t.momentum - t.write(t["DELTA.3"]),
            "DELTA.4": lambda t: t["DELTA.1"] - t.gate("beta") * t["DELTA.momentum"],
        }
    ),
}


# --- readings that change an argument


def _scaled_keys(given: Given) -> Given:
    """Scale keys as well, those that are normalised too."""
    normal = _normalised(given, "qk", lambda x, eps: unit(x, eps)[0])
    return {**normal, "k": {**given, **normal}["k"] * scale_of(given)}


def _normalised(given: Given, names: str, by: Callable[[Array, float], Array]) -> Given:
    """Return queries, keys or both normalised in another way, where they are."""
    if not given.get("qk_norm"):
        return {}
    return {"qk_norm": False, **{name: by(given[name], given.get("norm_eps", usual_eps())) for name in names}}


def _with_norm(names: str, by: Callable[[Array, float], Array]) -> Changed:
    return Changed(_core, lambda given: _normalised(given, names, by))


def _at_least(x: Array, eps: float) -> Array:
    """Divide by max(norm, eps)."""
    xp = namespace(x)
    norm = xp.sqrt(xp.vecdot(x, x))[..., None]
    return x / xp.where(norm > eps, norm, eps)


def _of_the_mean(x: Array, eps: float) -> Array:
    """Add eps to the mean of the squares."""
    xp = namespace(x)
    return x / xp.sqrt(xp.vecdot(x, x)[..., None] + eps * x.shape[-1])


def _changed(name: str, change: Callable[[Array], Array | None]) -> Reading:
    """Return the core with another array, where it is given."""
    return if_given(_core, name, lambda given: {name: change(given[name])})


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
    "scale on keys too": Changed(_core, _scaled_keys),
    "norm_eps as the least norm": _with_norm("qk", _at_least),
    "norm_eps on the mean": _with_norm("qk", _of_the_mean),
    "queries alone normalised": _with_norm("q", lambda x, eps: unit(x, eps)[0]),
    "keys alone normalised": _with_norm("k", lambda x, eps: unit(x, eps)[0]),
    "gate to base 2": _changed("log_decay", lambda x: x * math.log(2.0)),
    "gate one token late": _changed("log_decay", lambda x: _late(x, 0)),
    "first token does not decay": _changed("log_decay", lambda x: _late(x, 1)),
    "beta through a sigmoid again": _changed("beta", lambda x: 1.0 / (1.0 + namespace(x).exp(-x))),
    "half of beta": _changed("beta", lambda x: 0.5 * x),
    "state in ignored": _changed("state", lambda x: None),
    # States as (value, key), where that fits.
    "state in transposed": _changed("state", _transposed),
    "state out transposed": other_outputs(_core, lambda right, given: (right[0], _transposed(right[1]))),
    "queries tiled": queries_tiled,
    # State head x has key head x mod f.
    "keys tiled": Changed(_core, lambda given: {"k": _tiled(given["k"], given["v"].shape[1])}),
    "mask of values alone": Changed(_core, _unseen("v")),
    "masked tokens decay": Changed(_core, _unseen("v", "k")),
}

WRONG = {
    **conventions(READINGS, ("state",)),
    **conventions(STAGES, ("state",), SIZES),
    **gradients({name: other_gradients(core, change) for name, change in WRONG_GRADIENTS.items()}),
}
