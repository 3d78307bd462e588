"""The recurrences a second time: scalar loops over numbers, which share nothing with the rest.

A state head is followed alone, with the key head and the query heads that are its neighbours; every number of it is
written down by itself. The backward is the chain rule of these scalar statements, each undone in turn. Values come back
by the ids of the docstring of `dense`, an equation of several tokens by its passes: backward from the last token on.
Slow on purpose; for small sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]
Floats = np.ndarray


def _put(value: Values, id: str, at: int, shape: tuple[int, ...], where: tuple[Any, ...], x: Any) -> None:
    """Write part of pass `at` of an equation."""
    value.setdefault(f"{id}[{at}]" if at else id, np.zeros(shape))[where] = x


def _unit(x: Floats, eps: float) -> tuple[list[float], float]:
    """Return a vector divided by the root of its squared length with eps, and that factor."""
    squared = math.fsum(a * a for a in x) + eps
    r = 1.0 / math.sqrt(squared) if squared else 0.0
    return [a * r for a in x], r


def _masked(key_mask: Floats | None, *arrays: Floats | None) -> list[Floats | None]:
    """Return copies in float64, 0 where a token is padding."""
    found: list[Floats | None] = []
    for x in arrays:
        copy = None if x is None else np.array(x, dtype=np.float64)
        if copy is not None and key_mask is not None:
            for b, n in np.argwhere(~key_mask):
                copy[b, :, n] = 0.0
        found.append(copy)
    return found


class _Run:
    """One call: all values of the forward, and what the backward needs of them."""

    def __init__(
        self,
        q: Floats,
        k: Floats,
        v: Floats,
        *,
        beta: Floats | None = None,
        log_decay: Floats | None = None,
        log_momentum: Floats | None = None,
        step: Floats | None = None,
        state: Floats | None = None,
        scale: float | None = None,
        qk_norm: bool = False,
        norm_eps: Any = None,
        key_mask: Floats | None = None,
        lengths: Sequence[int] | None = None,
        chunk: Any = None,
    ) -> None:
        self.q = np.array(q, dtype=np.float64)
        self.k, self.v, self.beta, self.log_decay, self.log_mu, self.step = _masked(
            key_mask, k, v, beta, log_decay, log_momentum, step
        )
        self.scale = scale if scale is not None else 1.0 / math.sqrt(q.shape[3])
        self.norm, self.eps = qk_norm, 1e-6 if norm_eps is None else norm_eps
        assert self.k is not None and self.v is not None
        self.h, self.f, self.g = q.shape[1], k.shape[1], v.shape[1]
        self.heads, self.tokens, self.d, self.e = max(self.h, self.g), q.shape[2], q.shape[3], v.shape[3]
        self.shared = self.heads // self.g
        self.starts = [0]
        for length in lengths or [self.tokens]:
            self.starts.append(self.starts[-1] + length)
        self.packed, self.state = lengths is not None, state
        self.value: Values = {}
        if self.tokens:
            self._forward()

    def ends(self) -> list[tuple[int, int, int]]:
        """Return (number, first token, token after the last) of the sequences."""
        return [(m, a, b) for m, (a, b) in enumerate(zip(self.starts, self.starts[1:], strict=False))]

    def own(self, b: int, m: int) -> int:
        """Return where the state of sequence m of batch element b stands."""
        return m if self.packed else b

    def a(self, b: int, g: int, n: int, x: int) -> float:
        """Return what is kept of row x of the state."""
        if self.log_decay is None:
            return 1.0
        log = self.log_decay[b, g, n] if self.log_decay.ndim == 3 else self.log_decay[b, g, n, x]
        return math.exp(log)

    def _forward(self) -> None:
        value, d, e = self.value, self.d, self.e
        value["DELTA.unit_q"], value["DELTA.unit_k"] = self.q.copy(), self.k.copy()  # type: ignore[union-attr]
        if self.norm:
            for id in ("DELTA.unit_q", "DELTA.unit_k"):
                for at in np.ndindex(*value[id].shape[:3]):
                    value[id][at] = _unit(value[id][at], self.eps)[0]
        if self.log_decay is not None:
            value["DELTA.fade"] = np.vectorize(math.exp, otypes=[float])(self.log_decay)
        self.S: dict[Any, Any] = {}
        self.D: dict[Any, Any] = {}
        self.M: dict[Any, Any] = {}
        self.error: dict[Any, Any] = {}
        self.write: dict[Any, Any] = {}
        for b, g, (m, first, stop) in (
            (b, g, end) for b in range(len(self.q)) for g in range(self.g) for end in self.ends()
        ):
            moving = self.log_mu is not None
            start = None if self.state is None else self.state[self.own(b, m), g]
            zero = [[0.0] * e for _ in range(d)]
            S = zero if start is None else [[float(y) for y in row] for row in (start[0] if moving else start)]
            M = zero if start is None or not moving else [[float(y) for y in row] for row in start[1]]
            self.S[b, g, m, first - 1], self.M[b, g, m, first - 1] = S, M
            for n in range(first, stop):
                S, M = self._token(b, g, n, S, M)
                self.S[b, g, m, n], self.M[b, g, m, n] = S, M

    def _token(self, b: int, g: int, n: int, S: Any, M: Any) -> tuple[Any, Any]:
        d, e, matrix = self.d, self.e, (len(self.q), self.g, self.d, self.e)
        row = (len(self.q), self.g, 1, self.e)
        key = self.value["DELTA.unit_k"][b, g * self.f // self.g, n]
        D = [[self.a(b, g, n, x) * S[x][y] for y in range(e)] for x in range(d)]
        v = self.v[b, g, n]  # type: ignore[index]
        if self.log_decay is not None:
            _put(self.value, "DELTA.1", n, matrix, (b, g), D)
        if self.beta is None:
            error = [float(v[y]) for y in range(e)]
        else:
            held = [math.fsum(D[x][y] * key[x] for x in range(d)) for y in range(e)]
            error = [v[y] - held[y] for y in range(e)]
            _put(self.value, "DELTA.predicted", n, row, (b, g, 0), held)
            _put(self.value, "DELTA.2", n, row, (b, g, 0), error)
        rate = self.rate(b, g, n)
        write = error if rate is None else [rate * error[y] for y in range(e)]
        if rate is not None:
            _put(self.value, "DELTA.3", n, row, (b, g, 0), write)
        if self.log_mu is None:
            S = [[D[x][y] + key[x] * write[y] for y in range(e)] for x in range(d)]
        else:
            mu, beta = math.exp(self.log_mu[b, g, n]), self.beta[b, g, n]  # type: ignore[index]
            M = [[mu * M[x][y] + key[x] * write[y] for y in range(e)] for x in range(d)]
            S = [[D[x][y] + beta * M[x][y] for y in range(e)] for x in range(d)]
            _put(self.value, "DELTA.momentum", n, matrix, (b, g), M)
        _put(self.value, "DELTA.4", n, matrix, (b, g), S)
        for r in range(self.shared):
            query = self.value["DELTA.unit_q"][b, (g * self.shared + r) * self.h // self.heads, n]
            out = [self.scale * math.fsum(S[x][y] * query[x] for x in range(d)) for y in range(e)]
            _put(self.value, "DELTA.5", n, (len(self.q), self.g, self.shared, e), (b, g, r), out)
        self.D[b, g, n], self.error[b, g, n], self.write[b, g, n] = D, error, write
        return S, M

    def rate(self, b: int, g: int, n: int) -> float | None:
        """Return the factor of the error, None where there is none."""
        by = self.beta if self.log_mu is None else self.step
        return None if by is None else float(by[b, g, n])


def forward(q: Floats, k: Floats, v: Floats, **options: Any) -> Values:
    """Return the value of every equation of the forward, by id."""
    return _Run(q, k, v, **options).value


def backward(q: Floats, k: Floats, v: Floats, d_out: Floats, d_state: Floats | None = None, **options: Any) -> Values:
    """Return the value of every equation of the backward, by id."""
    run = _Run(q, k, v, **options)
    if not run.tokens:
        return {}
    batch, d, e = len(q), run.d, run.e
    moving = run.log_mu is not None
    grad: Values = {f"dDELTA.{name}": np.zeros(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    gates = {"beta": run.beta, "log_decay": run.log_decay, "log_momentum": run.log_mu, "step": run.step}
    grad |= {f"dDELTA.{name}": np.zeros(x.shape) for name, x in gates.items() if x is not None}
    own = len(run.starts) - 1 if run.packed else batch
    grad["dDELTA.state"] = np.zeros((own, run.g, 2, d, e) if moving else (own, run.g, d, e))
    terms: list[float] = []
    heads = ((b, g, end) for b in range(batch) for g in range(run.g) for end in reversed(run.ends()))
    for b, g, (m, first, stop) in heads:
        come = np.zeros(grad["dDELTA.state"].shape[2:]) if d_state is None else np.array(d_state[run.own(b, m), g])
        S, M = (come[0].copy(), come[1].copy()) if moving else (come.copy(), np.zeros((d, e)))
        for n in range(stop - 1, first - 1, -1):
            _undo(run, grad, terms, d_out, b, g, m, n, S, M)
        grad["dDELTA.state"][run.own(b, m), g] = [S, M] if moving else S
    grad["dDELTA.scale"] = np.asarray(math.fsum(terms))
    for name, x, f in (("q", run.q, run.h), ("k", run.k, run.f)):
        for b, head, n in np.ndindex(batch, f, run.tokens):
            through = grad[_key(f"dDELTA.unit_{name}", run.tokens - 1 - n)][b, head, 0]
            grad[f"dDELTA.{name}"][b, head, n] = through
            if run.norm:  # the Jacobian of x r: r (1 - x' x'^T)
                hat, r = _unit(x[b, head, n], run.eps)  # type: ignore[index]
                grad[f"dDELTA.{name}"][b, head, n] = [
                    math.fsum(r * ((i == j) - hat[i] * hat[j]) * through[j] for j in range(d)) for i in range(d)
                ]
    return grad


def _key(id: str, at: int) -> str:
    return f"{id}[{at}]" if at else id


def _undo(
    run: _Run, grad: Values, terms: list[float], d_out: Floats, b: int, g: int, m: int, n: int, S: Floats, M: Floats
) -> None:
    """Take token n back: S and M, the adjoints of the state and the momentum after it, become those before it."""
    batch, d, e, at = len(run.q), run.d, run.e, run.tokens - 1 - n
    matrix, row = (batch, run.g, d, e), (batch, run.g, 1, e)
    f, key = g * run.f // run.g, run.value["DELTA.unit_k"][b, g * run.f // run.g, n]
    after, before, moved = run.S[b, g, m, n], run.S[b, g, m, n - 1], run.log_mu is not None
    by_key = [0.0] * d
    for r in range(run.shared):
        o = g * run.shared + r
        h = o * run.h // run.heads
        query, d_o = run.value["DELTA.unit_q"][b, h, n], d_out[b, o, n]
        by_query = [math.fsum(after[x][y] * d_o[y] for y in range(e)) for x in range(d)]
        terms += [query[x] * by_query[x] for x in range(d)]
        known = grad.setdefault(_key("dDELTA.unit_q", at), np.zeros((batch, run.h, 1, d)))
        for x in range(d):
            known[b, h, 0, x] += run.scale * by_query[x]
            for y in range(e):
                S[x, y] += run.scale * query[x] * d_o[y]
    _put(grad, "dDELTA.4", at, matrix, (b, g), S)
    target = S  # the adjoint of what k u^T is added to
    if moved:
        beta, mu = run.beta[b, g, n], math.exp(run.log_mu[b, g, n])  # type: ignore[index]
        now, last = run.M[b, g, m, n], run.M[b, g, m, n - 1]
        grad["dDELTA.beta"][b, g, n] = math.fsum(S[x, y] * now[x][y] for x in range(d) for y in range(e))
        M += beta * S
        _put(grad, "dDELTA.momentum", at, matrix, (b, g), M)
        grad["dDELTA.log_momentum"][b, g, n] = mu * math.fsum(M[x, y] * last[x][y] for x in range(d) for y in range(e))
        target = M
    write, error, rate = run.write[b, g, n], run.error[b, g, n], run.rate(b, g, n)
    d_write = [math.fsum(target[x, y] * key[x] for x in range(d)) for y in range(e)]
    for x in range(d):
        by_key[x] += math.fsum(target[x, y] * write[y] for y in range(e))
    _put(grad, "dDELTA.3", at, row, (b, g, 0), d_write)
    d_error = d_write if rate is None else [rate * z for z in d_write]
    if rate is not None:
        _put(grad, "dDELTA.2", at, row, (b, g, 0), d_error)
        grad["dDELTA.step" if moved else "dDELTA.beta"][b, g, n] = math.fsum(
            x * y for x, y in zip(d_write, error, strict=True)
        )
    grad["dDELTA.v"][b, g, n] = d_error
    if moved:
        M *= mu
    if run.beta is not None:
        _put(grad, "dDELTA.predicted", at, row, (b, g, 0), [-z for z in d_error])
        for x in range(d):
            by_key[x] -= math.fsum(run.D[b, g, n][x][y] * d_error[y] for y in range(e))
            for y in range(e):
                S[x, y] -= key[x] * d_error[y]
        _put(grad, "dDELTA.1", at, matrix, (b, g), S)
    grad.setdefault(_key("dDELTA.unit_k", at), np.zeros((batch, run.f, 1, d)))[b, f, 0] += by_key
    for x in range(d):
        a = run.a(b, g, n, x)
        if run.log_decay is not None:
            by_row = math.fsum(S[x, y] * a * before[x][y] for y in range(e))
            where = (b, g, n) if run.log_decay.ndim == 3 else (b, g, n, x)
            grad["dDELTA.log_decay"][where] += by_row
        S[x] *= a
