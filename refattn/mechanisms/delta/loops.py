"""The recurrences a second time: scalar loops over numbers, which share nothing with the rest.

A state head is followed alone, with the key head and the query heads that are its neighbours. The backward is the chain
rule of the statements of a token, each undone in turn. Values come back
by the ids of the docstring of `dense`, an equation of several tokens by its passes: backward from the last token on.
Slow on purpose; for small sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]
Floats = np.ndarray
GATES = ("beta", "log_decay", "log_momentum", "step")


def _unit(x: Floats, eps: float) -> tuple[Floats, float]:
    """Return a vector divided by the root of its squared length with eps, and that factor."""
    squared = math.fsum(a * a for a in x) + eps
    r = 1.0 / math.sqrt(squared) if squared else 0.0
    return np.array([a * r for a in x]), r


def _asked(S: Floats, key: Floats) -> Floats:
    """Return S^T k: what a state answers to a key."""
    return np.array([math.fsum(S[x, y] * key[x] for x in range(len(key))) for y in range(S.shape[1])])


def _turned(S: Floats, row: Floats) -> Floats:
    """Return S u."""
    return np.array([math.fsum(S[x, y] * row[y] for y in range(len(row))) for x in range(len(S))])


def _total(a: Floats, b: Floats) -> float:
    """Return the sum of all a * b."""
    return math.fsum(x * y for x, y in zip(a.flat, b.flat, strict=True))


def _hidden(x: Floats | None, key_mask: Floats | None) -> Floats | None:
    """Return a copy in float64, 0 where a token is padding."""
    if x is None:
        return None
    copy = np.array(x, dtype=np.float64)
    for b, n in () if key_mask is None else np.argwhere(~key_mask):
        copy[b, :, n] = 0.0
    return copy


class _Token(SimpleNamespace):
    """What a token of a state head is given, what its forward makes of it, and by id what is `said` of it."""

    def run(self, S: Floats, M: Floats) -> tuple[Floats, Floats]:
        """Take the token: return the state and its momentum after it."""
        self.S_before, self.M_before, self.D, self.said = S, M, S, {}
        if self.log_decay is not None:
            self.D = self.said["DELTA.1"] = np.array([a * row for a, row in zip(self.a, S, strict=True)])
        self.error = self.v
        if self.beta is not None:
            held = _asked(self.D, self.k)
            self.error = self.v - held
            self.said |= {"DELTA.predicted": held[None], "DELTA.2": self.error[None]}
        self.write = self.error
        if self.rate is not None:
            self.write = self.rate * self.error
            self.said["DELTA.3"] = self.write[None]
        written = np.array([x * self.write for x in self.k])
        self.M, self.S = M, self.D + written
        if self.moving:
            self.M = self.said["DELTA.momentum"] = self.mu * M + written
            self.S = self.D + self.beta * self.M
        self.said["DELTA.4"] = self.S
        self.said["DELTA.5"] = np.array([self.scale * _asked(self.S, query) for query in self.q])
        return self.S, self.M

    def undo(self, d_out: Floats, S: Floats, M: Floats) -> tuple[Floats, Floats]:
        """Take it back: return the adjoints of the state and the momentum before it for those after it."""
        read = [_turned(self.S, row) for row in d_out]
        self.said = {}
        d: dict[str, Any] = {"scale": math.fsum(_total(x, y) for x, y in zip(self.q, read, strict=True))}
        self.d_q = [self.scale * x for x in read]
        for query, row in zip(self.q, d_out, strict=True):
            S = S + np.array([self.scale * x * row for x in query])
        self.said["dDELTA.4"] = target = S  # the adjoint of what k u^T is added to
        if self.moving:
            M = self.said["dDELTA.momentum"] = target = M + self.beta * S
            d |= {"beta": _total(S, self.M), "log_momentum": self.mu * _total(M, self.M_before)}
        d_write = _asked(target, self.k)
        self.d_k = _turned(target, self.write)
        self.said["dDELTA.3"] = d_write[None]
        d["v"] = d_write
        if self.rate is not None:
            d |= {"v": self.rate * d_write, "step" if self.moving else "beta": _total(d_write, self.error)}
            self.said["dDELTA.2"] = d["v"][None]
        if self.beta is not None:
            self.said["dDELTA.predicted"] = -d["v"][None]
            self.d_k = self.d_k - _turned(self.D, d["v"])
            self.said["dDELTA.1"] = S = S - np.array([x * d["v"] for x in self.k])
        if self.log_decay is not None:
            rows = np.array([a * _total(x, y) for a, x, y in zip(self.a, S, self.S_before, strict=True)])
            d["log_decay"] = rows if self.log_decay.ndim else math.fsum(rows)
        self.d = d
        return np.array([a * row for a, row in zip(self.a, S, strict=True)]), self.mu * M


class _Run:
    """One call: the values of its forward by id, and the tokens of each state head."""

    def __init__(
        self,
        q: Floats,
        k: Floats,
        v: Floats,
        *,
        state: Floats | None = None,
        scale: float | None = None,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        key_mask: Floats | None = None,
        lengths: Sequence[int] | None = None,
        chunk: Any = None,
        **gates: Floats | None,
    ) -> None:
        self.given = {"q": np.array(q, dtype=np.float64)}
        own = {name: _hidden(x, key_mask) for name, x in {"k": k, "v": v, **gates}.items()}
        self.given |= {name: x for name, x in own.items() if x is not None}
        self.batch, self.h, self.tokens, self.d = q.shape
        self.f, self.g, self.e = k.shape[1], v.shape[1], v.shape[3]
        self.outs = max(self.h, self.g)
        self.moving, self.norm, self.eps = "log_momentum" in self.given, qk_norm, norm_eps
        self.scale = scale if scale is not None else 1.0 / math.sqrt(self.d)
        self.packed, ends = lengths is not None, np.cumsum([0, *(lengths or [self.tokens])])
        self.spans = list(enumerate(zip(ends[:-1], ends[1:], strict=True)))
        self.units = {name: self.given[name].copy() for name in "qk"}
        for x in self.units.values() if qk_norm else ():
            for at in np.ndindex(*x.shape[:3]):
                x[at] = _unit(x[at], norm_eps)[0]
        shape = (len(self.spans) if self.packed else self.batch, self.g, 2, self.d, self.e)
        self.states = np.zeros(shape)
        if state is not None:
            self.states[:, :, : 2 if self.moving else 1] = state if self.moving else state[:, :, None]
        places = product(range(self.batch), range(self.g))
        self.heads = {(b, g): [self.token(b, g, n) for n in range(self.tokens)] for b, g in places}
        self.value: Values = {}
        for (b, g), tokens in self.heads.items():
            for m, (first, stop) in self.spans:
                S, M = self.states[m if self.packed else b, g]
                for token in tokens[first:stop]:
                    S, M = token.run(S, M)
        if self.tokens:
            self.value = {f"DELTA.unit_{name}": x for name, x in self.units.items()} | self.said(range(self.tokens))
            if "log_decay" in self.given:
                self.value["DELTA.fade"] = np.vectorize(math.exp, otypes=[float])(self.given["log_decay"])

    def queries(self, g: int) -> list[int]:
        """Return the query heads of the outputs of a state head."""
        return [o * self.h // self.outs for o in self.outputs(g)]

    def outputs(self, g: int) -> range:
        """Return the outputs that read a state head."""
        return range(g * self.outs // self.g, (g + 1) * self.outs // self.g)

    def token(self, b: int, g: int, n: int) -> _Token:
        """Return what a token of a state head is given."""
        gates = {name: self.given[name][b, g, n] if name in self.given else None for name in GATES}
        log_decay, log_mu = gates["log_decay"], gates["log_momentum"]
        return _Token(
            q=[self.units["q"][b, h, n] for h in self.queries(g)],
            k=self.units["k"][b, g * self.f // self.g, n],
            v=self.given["v"][b, g, n],
            a=[
                1.0 if log_decay is None else math.exp(x)
                for x in np.broadcast_to(0.0 if log_decay is None else log_decay, self.d)
            ],
            mu=0.0 if log_mu is None else math.exp(log_mu),
            rate=gates["step" if self.moving else "beta"],
            beta=gates["beta"],
            log_decay=log_decay,
            moving=self.moving,
            scale=self.scale,
        )

    def said(self, order: Sequence[int]) -> Values:
        """Return what the tokens of all state heads say, by id: one pass for each token, in an order."""
        found: Values = {}
        for at, n in enumerate(order):
            for id in self.heads[0, 0][n].said:
                every = [[self.heads[b, g][n].said[id] for g in range(self.g)] for b in range(self.batch)]
                found[f"{id}[{at}]" if at else id] = np.array(every)
        return found


def forward(q: Floats, k: Floats, v: Floats, **options: Any) -> Values:
    """Return the value of every equation of the forward, by id."""
    return _Run(q, k, v, **options).value


def backward(q: Floats, k: Floats, v: Floats, d_out: Floats, d_state: Floats | None = None, **options: Any) -> Values:
    """Return the value of every equation of the backward, by id."""
    run = _Run(q, k, v, **options)
    if not run.tokens:
        return {}
    grad: Values = {f"dDELTA.{name}": np.zeros(x.shape) for name, x in run.given.items()}
    d_states, units = np.zeros(run.states.shape), {name: np.zeros(x.shape) for name, x in run.units.items()}
    if d_state is not None:
        d_states[:, :, : 2 if run.moving else 1] = d_state if run.moving else d_state[:, :, None]
    terms: list[float] = []
    for (b, g), tokens in run.heads.items():
        for m, (first, stop) in run.spans:
            S, M = d_states[m if run.packed else b, g]
            for n in range(stop - 1, first - 1, -1):
                token = tokens[n]
                S, M = token.undo(d_out[b, run.outputs(g), n], S, M)
                terms.append(token.d.pop("scale"))
                for name, x in token.d.items():
                    grad[f"dDELTA.{name}"][b, g, n] = x
                units["k"][b, g * run.f // run.g, n] += token.d_k
                for h, d_q in zip(run.queries(g), token.d_q, strict=True):
                    units["q"][b, h, n] += d_q
            d_states[m if run.packed else b, g] = S, M
    grad |= run.said(range(run.tokens)[::-1])
    grad["dDELTA.state"] = d_states if run.moving else d_states[:, :, 0]
    grad["dDELTA.scale"] = np.asarray(math.fsum(terms))
    for name, d_unit in units.items():
        for at, n in enumerate(range(run.tokens)[::-1]):
            grad[f"dDELTA.unit_{name}[{at}]" if at else f"dDELTA.unit_{name}"] = d_unit[:, :, n : n + 1]
        grad[f"dDELTA.{name}"] = d_unit.copy()
        for where in np.ndindex(*d_unit.shape[:3]) if run.norm else ():  # the Jacobian of x r: r (1 - x' x'^T)
            hat, r = _unit(run.given[name][where], run.eps)
            grad[f"dDELTA.{name}"][where] = r * (d_unit[where] - hat * _total(hat, d_unit[where]))
    return grad
