"""Graph energy attention a second time: one number after the other, sharing nothing with the other files.

The forward is written in scalars (`refattn.mechanisms.scalar_autodiff`), whose adjoints come from the chain rule alone,
where the other files have formulas. Values come back by the ids of the docstrings. Slow on purpose; for small sizes.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium): the equation of a node; and the
sources that the other files name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.mechanisms.graph_energy.options import coupling_of, graph_of, integrator_of, start_of, threshold_of
from refattn.mechanisms.scalar_autodiff import Scalar, copies, copy, dot, scalars, slopes, softmax, sweep, total, values

Values = dict[str, np.ndarray]

FORCES: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "sin": (math.sin, math.cos),
    "tanh": (math.tanh, lambda x: 1.0 / math.cosh(x) ** 2),
    "identity": (lambda x: x, lambda x: 1.0),
    "arctan": (math.atan, lambda x: 1.0 / (1.0 + x * x)),
    "sinh": (math.sinh, math.cosh),
    "cubic": (lambda x: x - x**3 / 6.0, lambda x: 1.0 - x * x / 2.0),
}
"""g and g'."""

METHODS: dict[str, tuple[list[list[float]], list[float]]] = {
    "euler": ([[]], [1.0]),
    "heun": ([[], [1.0]], [0.5, 0.5]),
    "rk4": ([[], [0.5], [0.0, 0.5], [0.0, 0.0, 1.0]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
}

USUAL = {"state": "token", "intrinsic": "anchor", "mu": 1.0, "kappa": 1.0, "step": 1.0 / 3.0, "steps": 10}


class _Head:
    """One head: what its tokens may attend, and every number of the call, by id."""

    def __init__(self, leaves: dict[str, Any], allowed: Any, jitter: Any, options: dict[str, Any]) -> None:
        self.leaves, self.allowed, self.jitter, self.o = leaves, allowed, jitter, options
        self.threshold, self.links, self.integrator = threshold_of(options), graph_of(options), integrator_of(options)
        self.kind, self.coupling = type(self.threshold).__name__, coupling_of(options)
        self.rows, self.n = allowed.shape
        self.feature, self.query = options["state"] == "feature", options["state"] == "query"
        self.prefix = options["state"] == "prefix"
        self.own = self.query or self.prefix  # each query has scores of its own
        self.signed = self.feature if self.threshold.signed is None else self.threshold.signed
        self.value: dict[str, Any] = {}
        self.link()
        self.flow()
        self.read()

    # --- the graph

    def link(self) -> None:
        rows, n, value, leaves = self.rows, self.n, self.value, self.leaves
        q, k, scale, causal = leaves["q"], leaves["k"], leaves["scale"][()], self.o.get("causal", False) is not False
        matches = self.matrix((rows, n), lambda i, j: scale * dot(q[i], k[j]))
        if "bias" in leaves:
            matches = self.matrix((rows, n), lambda i, j: matches[i, j] + leaves["bias"][i, j])
        masked = self.matrix((rows, n), lambda i, j: copy(matches[i, j]) if self.allowed[i, j] else Scalar(-math.inf))
        a = self.by_row(masked)
        value |= {"GE.1": matches, "GE.masked": masked, "GE.2": a}
        kind = "CausalMirror" if causal else "Min"
        if not self.query:
            kind = "Kernel" if not causal else "CausalMirror" if self.prefix else "Directed"
        kind = kind if self.links is None else type(self.links).__name__
        over_keys, links, seen = getattr(self.links, "over", "tokens") == "keys", a, np.any(self.allowed, axis=0)
        if over_keys or kind == "Kernel":

            def alike(i: int, j: int) -> Scalar:
                if not (seen[i] and seen[j] if over_keys else self.allowed[i, j] and self.allowed[j, i]):
                    return Scalar(-math.inf)
                return scale * dot(k[i], k[j]) if over_keys else 0.5 * (matches[i, j] + matches[j, i])

            value["GE.3"] = self.matrix((n, n), alike)
            value["GE.4"] = links = self.by_row(value["GE.3"])
        made: dict[str, Callable[[int, int], Scalar]] = {
            "Mean": lambda i, j: 0.5 * (links[i, j] + links[j, i]),
            "Min": lambda i, j: _least(links[i, j], links[j, i]),
            "CausalMirror": lambda i, j: copy(links[max(i, j), min(i, j)]),
        }
        of = made.get(kind, lambda i, j: copy(links[i, j]))
        value["GE.links"] = self.matrix((n, n), lambda i, j: Scalar(0.0) if i == j else of(i, j))
        if self.feature:
            begin = copies(leaves["v"])
        elif self.query:
            begin = copies(a.T)
        elif "start" in leaves:
            begin = copies(leaves["start"])[:, None]
        else:
            begin = self.matrix((n, rows if self.prefix else 1), lambda j, c: _sigmoid(matches[j, j]))
        value["GE.5"] = begin

    def by_row(self, matches: Any) -> Any:
        """Return the softmax of each row."""
        rows = [softmax(row) for row in matches]
        return self.matrix(matches.shape, lambda i, j: rows[i][j])

    @staticmethod
    def matrix(shape: tuple[int, int], of: Callable[[int, int], Any]) -> Any:
        """Return an array of scalars by row and column."""
        found = np.empty(shape, dtype=object)
        for i, j in np.ndindex(shape):
            found[i, j] = of(i, j)
        return found

    # --- the flow

    def flow(self) -> None:
        """Move the scores from their start to their end, one channel after the other: each is a system of its own."""
        begin = self.value["GE.5"]
        self.m = self.allowed.T.astype(float) if self.own else np.ones(begin.shape)
        self.x, passes = np.empty(begin.shape, dtype=object), dict[str, list[Any]]()
        for c in range(begin.shape[1]):
            ways: dict[str, list[Any]] = {"GE.point": [], "GE.6": [], "GE.7": [], "GE.8": []}
            x = [b + self.m[j, c] * self.jitter[j, c] for j, b in enumerate(begin[:, c])]
            for _ in range(self.o["steps"]):
                x = self.step(x, c, ways)
                if self.kind == "Proximal":
                    least = self.leaves["step"][()] * self.tau(c)
                    x = [self.less(z, least) if self.size(z) > least.value else Scalar(0.0) for z in x]
                ways["GE.8"].append(x)
            self.x[:, c] = x
            for id, columns in ways.items():
                passes.setdefault(id, []).append(columns)
        for id, channels in passes.items():
            for at in range(len(channels[0])):
                self.value[f"{id}[{at}]" if at else id] = np.array([way[at] for way in channels], dtype=object).T

    def step(self, x: list[Scalar], c: int, ways: dict[str, list[Any]]) -> list[Scalar]:
        h, rates = self.leaves["step"][()], list[list[Scalar]]()
        stages, weights = METHODS[self.integrator]
        for row in stages:
            point = [
                total((z, *(alpha * (h * r[j]) for alpha, r in zip(row, rates, strict=True)))) for j, z in enumerate(x)
            ]
            rates.append(self.rate(point, c, ways))
        return [
            total((z, *(beta * (h * r[j]) for beta, r in zip(weights, rates, strict=True)))) for j, z in enumerate(x)
        ]

    def rate(self, y: list[Scalar], c: int, ways: dict[str, list[Any]]) -> list[Scalar]:
        """Return the rate of each node at a point."""
        links, pulls, rates = self.value["GE.links"], list[Scalar](), list[Scalar]()
        for i in range(self.n):
            there = [j for j in range(self.n) if j != i and self.m[i, c] * self.m[j, c]]
            pulls.append(dot([links[i, j] for j in there], [self.couple(y[j], y[i]) for j in there]))
            own = self.alone(y[i], self.value["GE.5"][i, c], self.leaves["mu"][i])
            rates.append(self.m[i, c] * own + self.leaves["kappa"][()] * pulls[i])
        for id, x in (("GE.point", y), ("GE.6", pulls), ("GE.7", rates)):
            ways[id].append(x)
        return rates

    def couple(self, there: Scalar, here: Scalar) -> Scalar:
        """Return g(there - here)."""
        x = there.value - here.value
        if isinstance(self.coupling, str):
            force, slope = (function(x) for function in FORCES[self.coupling])
            return Scalar(force, ((there, slope), (here, -slope)))
        powers = [(a, 2 * n + 1) for n, a in enumerate(self.leaves["coefficients"])]
        slope = sum(a.value * n * x ** (n - 1) for a, n in powers)
        parts = ((there, slope), (here, -slope), *((a, x**n) for a, n in powers))
        return Scalar(sum(a.value * x**n for a, n in powers), parts)

    def alone(self, x: Scalar, b: Scalar, mu: Scalar) -> Scalar:
        """Return f(x; b)."""
        if self.o["intrinsic"] == "anchor":
            return mu * (b - x)
        return mu * x - x * x * x + b if self.o["intrinsic"] == "double_well" else Scalar(0.0)

    # --- the threshold and the readout

    def tau(self, c: int) -> Scalar:
        """Return the threshold of a channel."""
        if "tau" in self.leaves:
            return self.leaves["tau"][()]
        usual = 0.0 if self.feature else 0.4
        return Scalar(0.25 / max(int(np.sum(self.allowed[c])), 1) if self.query else usual)

    def size(self, x: Scalar) -> float:
        """Return what is compared with a threshold."""
        return abs(x.value) if self.signed else x.value

    def less(self, x: Scalar, by: Scalar) -> Scalar:
        """Return what is left of a score from which a threshold is subtracted."""
        return x - (math.copysign(1.0, x.value) if self.signed else 1.0) * by

    def kept(self, x: Scalar, tau: Scalar) -> Scalar:
        """Return what a threshold leaves of a score."""
        if self.kind == "Soft":
            return self.less(x, tau) if self.size(x) > tau.value else Scalar(0.0)
        if self.kind == "Proximal" or self.size(x) >= tau.value:
            return copy(x)
        return Scalar(0.0, ((x, 1.0),) if self.threshold.straight_through else ())

    def read(self) -> None:
        rows, n, x, value, a = self.rows, self.n, self.x, self.value, self.value["GE.2"]
        through, seen = getattr(self.threshold, "straight_through", False), np.any(self.allowed, axis=1)
        y = value["GE.9"] = self.matrix(x.shape, lambda j, c: self.kept(x[j, c], self.tau(c)))
        if self.feature:
            self.out = self.matrix(y.shape, lambda i, c: copy(y[i, c]) if seen[i] else Scalar(0.0))
            return

        def positive(j: int, c: int) -> Scalar:
            passes = (x if through else y)[j, c].value > 0.0
            return Scalar(max(y[j, c].value, 0.0), ((y[j, c], 1.0),) if passes else ())

        phi = self.matrix(y.shape, positive)

        masked, own = value["GE.masked"], range(rows) if self.own else [0] * rows
        reads = [[j for j in range(n) if self.allowed[i, j] and phi[j, own[i]].value > 0.0] for i in range(rows)]
        near = [
            softmax([s if j in read else Scalar(-math.inf) for j, s in enumerate(masked[i])])
            for i, read in enumerate(reads)
        ]

        def part(i: int, j: int) -> Scalar:
            if j in reads[i]:
                return copy(phi[j, i]) if self.query else near[i][j] * phi[j, own[i]]
            if through and reads[i] and self.allowed[i, j] and x[j, own[i]].value > 0.0:  # 0, but not its derivative
                whole = math.fsum(math.exp(masked[i, l].value - masked[i, j].value) for l in reads[i])
                return Scalar(0.0, ((phi[j, own[i]], 1.0 if self.query else 1.0 / whole),))
            return Scalar(0.0)

        u = value["GE.10"] = self.matrix((rows, n), part)
        filled = [len(read) > 0 for read in reads]
        z = value["GE.11"] = self.matrix((rows, 1), lambda i, _: total(u[i]) if filled[i] else Scalar(1.0))

        def weight(i: int, j: int) -> Scalar:
            if filled[i]:
                return u[i, j] / z[i, 0]
            if self.threshold.empty == "dense":
                return copy(a[i, j])
            return Scalar(self.threshold.empty == "argmax" and seen[i] and j == self.best(i))

        p = value["GE.12"] = self.matrix((rows, n), weight)
        v = self.leaves["v"]
        self.out = value["GE.13"] = self.matrix((rows, v.shape[1]), lambda i, e: dot(p[i], v[:, e]))

    def best(self, i: int) -> int:
        """Return the first of the tokens that a row without scores goes to."""
        a, x = values(self.value["GE.2"][i]), values(self.x[:, i if self.own else 0])
        ranks = a if self.kind == "Proximal" else x if self.query else a * x
        return int(np.argmax(np.where(self.allowed[i], ranks, -math.inf)))


def _sigmoid(s: Scalar) -> Scalar:
    power = math.exp(-abs(s.value))
    found = (1.0 if s.value >= 0.0 else power) / (1.0 + power)
    return Scalar(found, ((s, found * (1.0 - found)),))


def _least(x: Scalar, y: Scalar) -> Scalar:
    """Return the smaller number; of two that are equal each has half of the derivative."""
    both = 0.5 * (x.value == y.value)
    return Scalar(min(x.value, y.value), ((x, float(x.value < y.value) + both), (y, float(y.value < x.value) + both)))


def _run(q: Any, k: Any, v: Any, mask: Any, options: dict[str, Any]) -> tuple[Values, Values, Any]:
    """Return the scalars of every equation by id, those that have a gradient by name, and the output."""
    o = {**USUAL, **{name: x for name, x in options.items() if x is not None}}
    (batch, heads, rows, width), (groups, n), start = q.shape, k.shape[1:3], start_of(o)
    given = {"q": q, "k": k, "v": v, "scale": o.get("scale", 1.0 / math.sqrt(width)), "bias": o.get("bias")}
    given |= {**{name: o[name] for name in ("mu", "kappa", "step")}, "tau": threshold_of(o).tau, "start": start.at}
    given["coefficients"] = getattr(coupling_of(o), "coefficients", None)
    leaves = {name: scalars(x) for name, x in given.items() if x is not None}
    plane = (batch, heads, rows, n)
    allowed: Any = np.ones(plane, dtype=np.bool_) if mask is None else np.broadcast_to(mask, plane)
    causal = o.get("causal", False) is not False
    if causal:
        allowed = allowed & np.tri(rows, n, dtype=np.bool_)
    channels = {"token": 1, "prefix": rows, "query": rows, "feature": v.shape[3]}[o["state"]]
    jitter = np.broadcast_to(0.0 if start.jitter is None else start.jitter, (batch, heads, n, channels))
    shapes, parts = {"bias": plane, "start": (batch, heads, n)}, dict[str, Any]()
    for at in np.ndindex(batch, heads):
        b, h = at
        own = {name: leaves[name][b, h if name == "q" else h * groups // heads] for name in "qkv"}
        own |= {name: np.broadcast_to(leaves[name], shapes[name])[at] for name in shapes if name in leaves}
        mu = leaves["mu"]
        own["mu"] = np.broadcast_to(mu if mu.ndim == 0 else mu[h], (n,))
        head = _Head({**leaves, **own}, allowed[at], jitter[at], o)
        for id, x in (*head.value.items(), ("out", head.out)):
            parts.setdefault(id, np.empty((batch, heads, *x.shape), dtype=object))[at] = x
    out = parts.pop("out")
    return parts, leaves, out


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None, **options: Any) -> Values:
    """Return the value of every equation of the forward, by id."""
    found = {id: values(x) for id, x in _run(q, k, v, mask, options)[0].items()}
    if mask is None and (options.get("causal", False) is False or k.shape[2] < 2):
        del found["GE.masked"]  # nothing is hidden
    return found


def backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, *, mask: np.ndarray | None = None, **options: Any
) -> Values:
    """Return the value of every equation of the backward, by id: passes are counted from the last one on."""
    parts, leaves, out = _run(q, k, v, mask, options)
    sweep(out, d_out)
    passes: dict[str, list[Any]] = {}
    for id, x in parts.items():
        passes.setdefault(id.partition("[")[0], []).append(x)
    grad = {f"d{id}[{at}]" if at else f"d{id}": slopes(x) for id, xs in passes.items() for at, x in enumerate(xs[::-1])}
    grad.pop("dGE.13", None)
    unused = ("v",) if options.get("state") == "feature" else ()
    return grad | {f"dGE.{name}": slopes(x) for name, x in leaves.items() if name not in unused}
