"""Graph energy attention a second time: scalar loops, sharing nothing with the other files.

The flow, whose adjoint is taken from an explicit Jacobian where the other files use sums over pairs, stands in
`flow_loops`. The adjoint of a softmax is taken from its full Jacobian, too. Values come back by the ids of the
docstrings. Slow on purpose; for small sizes.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium): the equation of a node; and the
sources that the other files name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.mechanisms.graph_energy.flow_loops import Flow, Values


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.zeros(len(scores))
    if np.max(scores, initial=-math.inf) > -math.inf:
        top = max(scores)
        total = math.fsum(math.exp(s - top) for s in scores)
        for j, s in enumerate(scores):
            weights[j] = math.exp(s - top) / total
    return weights


def _softmax_adjoint(weights: np.ndarray, d_weights: np.ndarray) -> np.ndarray:
    jacobian = np.diag(weights) - np.outer(weights, weights)
    return np.asarray(jacobian.T @ d_weights)


class _Head(Flow):
    """One head: what its tokens may attend, and every number of the call."""

    def __init__(self, q: Any, k: Any, v: Any, bias: Any, allowed: Any, masked: bool, options: dict[str, Any]) -> None:
        self.bias = bias
        self.q, self.k, self.v, self.allowed, self.masked = q, k, v, allowed, masked
        self.n = len(q)
        known = {"state": "token", "coupling": None, "intrinsic": "anchor", "mu": 1.0, "kappa": 1.0, "tau": None}
        known |= {"step": None, "steps": 10, "integrator": "euler", "symmetrise": None, "scale": None, "kind": "hard"}
        known |= {"signed": None, "straight_through": False, "empty": "argmax", "causal": False, "coefficients": None}
        self.o = {**known, **options}
        feature, query = self.o["state"] == "feature", self.o["state"] == "query"
        self.feature, self.query = feature, query
        if self.o["coupling"] is None:
            self.o["coupling"] = "tanh" if feature else "sin"
        if self.o["symmetrise"] is None:
            causal = self.o["causal"] is not False
            self.o["symmetrise"] = ("causal_mirror" if causal else "min") if query else ("none" if causal else "kernel")
        if self.o["signed"] is None:
            self.o["signed"] = feature
        self.scale = 1.0 / math.sqrt(q.shape[1]) if self.o["scale"] is None else float(self.o["scale"])
        self.mu, self.kappa = float(self.o["mu"]), float(self.o["kappa"])
        self.a = [] if self.o["coefficients"] is None else [float(a) for a in self.o["coefficients"]]
        self.choose()
        self.value: Values = {}

    def run(self) -> None:
        n, value = self.n, self.value
        products = [[self.scale * math.fsum(self.q[i] * self.k[j]) for j in range(n)] for i in range(n)]
        scores = np.array(products).reshape(n, n) + self.bias
        value["GE.1"] = scores.reshape(n, n)
        masked = np.where(self.allowed, value["GE.1"], -math.inf)
        if self.masked:
            value["GE.2"] = masked
        a = np.array([_softmax(masked[i]) for i in range(n)]).reshape(n, n)
        value["GE.3"] = a
        if self.o["symmetrise"] == "kernel":
            mutual = np.full((n, n), -math.inf)
            for i in range(n):
                for j in range(n):
                    if self.allowed[i, j] and self.allowed[j, i]:
                        mutual[i, j] = (scores[i, j] + scores[j, i]) / 2.0
            value["GE.4"] = mutual
            value["GE.5"] = np.array([_softmax(mutual[i]) for i in range(n)]).reshape(n, n)
        w = np.zeros((n, n))
        for i in range(n):
            for j in range(n):
                if i != j:
                    w[i, j] = {
                        "kernel": lambda i, j: value["GE.5"][i, j],
                        "none": lambda i, j: a[i, j],
                        "mean": lambda i, j: (a[i, j] + a[j, i]) / 2.0,
                        "min": lambda i, j: min(a[i, j], a[j, i]),
                        "causal_mirror": lambda i, j: a[max(i, j), min(i, j)],
                    }[self.o["symmetrise"]](i, j)
        value["GE.6"] = self.w = w
        if self.feature:
            b = self.v.copy()
        elif self.query:
            b = a.T.copy()
        else:
            b = np.array([1.0 / (1.0 + math.exp(-scores[j, j])) for j in range(n)]).reshape(n, 1)
        value["GE.7"] = self.b = b
        self.m = self.allowed.T.astype(float) if self.query else np.ones(b.shape)
        self.flow()
        self._read()

    def _tau(self, c: int) -> float:
        if self.o["tau"] is not None:
            return float(self.o["tau"])
        if self.feature:
            return 0.0
        return 0.25 / max(int(np.sum(self.allowed[c])), 1) if self.query else 0.4

    def _read(self) -> None:
        n, x, value = self.n, self.x, self.value
        y = np.zeros(x.shape)
        for j in range(n):
            for c in range(x.shape[1]):
                size, tau = abs(x[j, c]) if self.o["signed"] else x[j, c], self._tau(c)
                if self.o["kind"] == "hard":
                    y[j, c] = x[j, c] if size >= tau else 0.0
                elif size > tau:
                    y[j, c] = math.copysign(size - tau, x[j, c]) if self.o["signed"] else size - tau
        value["GE.12"] = self.y = y
        if self.feature:
            self.out = np.where(self.allowed.any(axis=1)[:, None], y, 0.0)
            return
        value["GE.13"], value["GE.14"], value["GE.15"] = np.zeros((n, n)), np.ones((n, 1)), np.zeros((n, n))
        self.filled = [False] * n
        for i in range(n):
            for j in range(n):
                score = max(y[j, i if self.query else 0], 0.0)
                value["GE.13"][i, j] = (
                    (score if self.allowed[i, j] else 0.0) if self.query else value["GE.3"][i, j] * score
                )
            total = math.fsum(value["GE.13"][i])
            self.filled[i] = total > 0.0
            if self.filled[i]:
                value["GE.14"][i, 0] = total
                value["GE.15"][i] = value["GE.13"][i] / total
            elif self.o["empty"] == "dense":
                value["GE.15"][i] = value["GE.3"][i]
            elif self.o["empty"] == "argmax" and self.allowed[i].any():
                ranks = [x[j, i] if self.query else value["GE.3"][i, j] * x[j, 0] for j in range(n)]
                best = max((j for j in range(n) if self.allowed[i, j]), key=lambda j: (ranks[j], -j))
                value["GE.15"][i, best] = 1.0
        self.out = value["GE.16"] = value["GE.15"] @ self.v

    def adjoint(self, d_out: np.ndarray) -> Values:
        n, value, grad = self.n, self.value, {}
        d_a = np.zeros((n, n))
        d_y = np.zeros(self.y.shape)
        if self.feature:
            d_y += np.where(self.allowed.any(axis=1)[:, None], d_out, 0.0)
        else:
            grad["dGE.v"] = value["GE.15"].T @ d_out
            grad["dGE.15"] = d_out @ self.v.T
            grad["dGE.14"], grad["dGE.13"] = np.zeros((n, 1)), np.zeros((n, n))
            for i in range(n):
                if not self.filled[i]:
                    d_a[i] += grad["dGE.15"][i] if self.o["empty"] == "dense" else 0.0
                    continue
                u, z = value["GE.13"][i], value["GE.14"][i, 0]
                grad["dGE.14"][i, 0] = -math.fsum(grad["dGE.15"][i] * u) / z**2
                grad["dGE.13"][i] = grad["dGE.15"][i] / z + grad["dGE.14"][i, 0]
                for j in range(n):
                    c = i if self.query else 0
                    positive = self.x[j, c] > 0.0 if self.o["straight_through"] else self.y[j, c] > 0.0
                    slope = 1.0 if self.query else value["GE.3"][i, j]
                    d_y[j, c] += grad["dGE.13"][i, j] * slope * positive * bool(self.allowed[i, j])
                    if not self.query:
                        d_a[i, j] += grad["dGE.13"][i, j] * max(self.y[j, 0], 0.0)
        grad["dGE.12"] = d_y
        d_x, d_tau = np.zeros(d_y.shape), 0.0
        for j in range(n):
            for c in range(self.b.shape[1]):
                size, tau = abs(self.x[j, c]) if self.o["signed"] else self.x[j, c], self._tau(c)
                keeps = size >= tau if self.o["kind"] == "hard" else size > tau
                d_x[j, c] = d_y[j, c] if keeps or self.o["straight_through"] else 0.0
                if self.o["kind"] == "soft" and keeps:
                    d_tau -= d_y[j, c] * (math.copysign(1.0, self.x[j, c]) if self.o["signed"] else 1.0)
        if self.o["tau"] is not None:
            grad["dGE.tau"] = np.asarray(d_tau)
        self.flow_adjoint(grad, d_x)
        self._graph_adjoint(grad, d_a)
        return grad

    def _graph_adjoint(self, grad: Values, d_a: np.ndarray) -> None:
        n, a, way = self.n, self.value["GE.3"], self.o["symmetrise"]
        d_s = np.zeros((n, n))
        if way == "kernel":
            grad["dGE.5"], grad["dGE.4"] = np.zeros((n, n)), np.zeros((n, n))
        for i in range(n):
            for j in range(n):
                if i == j:
                    continue
                d = grad["dGE.6"][i, j]
                if way == "kernel":
                    grad["dGE.5"][i, j] = d
                elif way == "none":
                    d_a[i, j] += d
                elif way == "mean":
                    d_a[i, j] += d / 2.0
                    d_a[j, i] += d / 2.0
                elif way == "causal_mirror":
                    d_a[max(i, j), min(i, j)] += d
                elif a[i, j] == a[j, i]:
                    d_a[i, j] += d / 2.0
                    d_a[j, i] += d / 2.0
                else:
                    d_a[(i, j) if a[i, j] < a[j, i] else (j, i)] += d
        if way == "kernel":
            for i in range(n):
                grad["dGE.4"][i] = _softmax_adjoint(self.value["GE.5"][i], grad["dGE.5"][i])
            d_s += (grad["dGE.4"] + grad["dGE.4"].T) / 2.0
        if self.query:
            d_a += grad["dGE.7"].T
        grad["dGE.3"] = d_a
        grad["dGE.2"] = np.array([_softmax_adjoint(a[i], d_a[i]) for i in range(n)]).reshape(n, n)
        d_s += grad["dGE.2"]
        if not self.feature and not self.query:
            for j in range(n):
                d_s[j, j] += grad["dGE.7"][j, 0] * self.b[j, 0] * (1.0 - self.b[j, 0])
        grad["dGE.1"] = d_s
        grad["dGE.q"], grad["dGE.k"] = self.scale * d_s @ self.k, self.scale * d_s.T @ self.q
        grad["dGE.scale"] = np.asarray(
            sum(d_s[i, j] * float(self.q[i] @ self.k[j]) for i in range(n) for j in range(n))
        )


def _heads(q: Any, k: Any, v: Any, mask: Any, options: dict[str, Any]) -> list[list[_Head]]:
    batch, heads, n, _ = q.shape
    groups = k.shape[1]
    allowed = (
        np.ones((batch, heads, n, n), dtype=np.bool_) if mask is None else np.broadcast_to(mask, (batch, heads, n, n))
    )
    causal = options.get("causal", False) is not False
    if causal:
        allowed = allowed & np.array([[j <= i for j in range(n)] for i in range(n)], dtype=np.bool_).reshape(n, n)
    masked = mask is not None or (causal and n > 1)
    given = options.get("bias")
    bias = np.broadcast_to(np.zeros((1, 1)) if given is None else given, (batch, heads, n, n))
    found = []
    for b in range(batch):
        row = []
        for h in range(heads):
            own = q[b, h], k[b, h * groups // heads], v[b, h * groups // heads], bias[b, h]
            row.append(_Head(*own, allowed[b, h], masked, options))
        for head in row:
            head.run()
        found.append(row)
    return found


def _gathered(parts: list[list[Values]]) -> Values:
    return {id: np.array([[part[id] for part in row] for row in parts]) for id in parts[0][0]}


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: np.ndarray | None = None, **options: Any) -> Values:
    """Return the value of every equation of the forward, by id."""
    return _gathered([[head.value for head in row] for row in _heads(q, k, v, mask, options)])


def backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, *, mask: np.ndarray | None = None, **options: Any
) -> Values:
    """Return the value of every equation of the backward, by id."""
    heads = _heads(q, k, v, mask, options)
    grad = _gathered([[head.adjoint(d_out[b, h]) for h, head in enumerate(row)] for b, row in enumerate(heads)])
    for id in ("dGE.k", "dGE.v"):
        if id in grad:
            batch, count, n, width = grad[id].shape
            groups = k.shape[1]
            grad[id] = grad[id].reshape(batch, groups, count // groups, n, width).sum(axis=2)
    if options.get("bias") is not None:
        shape = np.shape(options["bias"])
        whole = grad["dGE.1"].sum(axis=tuple(range(4 - len(shape))))
        grad["dGE.bias"] = whole.sum(axis=tuple(n for n, m in enumerate(shape) if m == 1), keepdims=True)
    if "dGE.coefficients" in grad:
        grad["dGE.coefficients"] = grad["dGE.coefficients"].sum(axis=(0, 1))
    for id in ("dGE.scale", "dGE.mu", "dGE.kappa", "dGE.step", "dGE.tau"):
        if id in grad:
            grad[id] = np.asarray(grad[id].sum())
    return grad
