"""Graph energy attention a second time: scalar loops, sharing nothing with the other files.

The flow, whose adjoint is taken from an explicit Jacobian where the other files use sums over pairs, stands in
`flow_loops`, and the graph in `graph_loops`. Values come back by the ids of the
docstrings. Slow on purpose; for small sizes.

Source: F. Preetham 2023 (Graph Dynamical Systems and Odd Analytic Coupling, Medium): the equation of a node; and the
sources that the other files name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.mechanisms.graph_energy.testing.flow_loops import Values
from refattn.mechanisms.graph_energy.testing.given import coupling_of, graph_of, integrator_of, start_of, threshold_of
from refattn.mechanisms.graph_energy.testing.graph_loops import Graph

SYMMETRISE = {
    "Kernel": "kernel",
    "Mean": "mean",
    "Min": "min",
    "Directed": "none",
    "CausalMirror": "causal_mirror",
}
"""The links by the names of their classes."""


class _Head(Graph):
    """One head: what its tokens may attend, and every number of the call."""

    def __init__(
        self, q: Any, k: Any, v: Any, bias: Any, start: Any, allowed: Any, masked: bool, options: dict[str, Any]
    ) -> None:
        self.bias, self.start = bias, start
        self.q, self.k, self.v, self.allowed, self.masked = q, k, v, allowed, masked
        self.rows, self.n = len(q), len(k)
        known = {"state": "token", "intrinsic": "anchor", "mu": 1.0, "kappa": 1.0, "step": 1.0 / 3.0, "steps": 10}
        known |= {"scale": None, "causal": False, "jitter": None}
        threshold, coupling, links = threshold_of(options), coupling_of(options), graph_of(options)
        known |= {name: getattr(threshold, name) for name in ("tau", "signed", "empty")}
        known |= {"kind": type(threshold).__name__.lower(), "integrator": integrator_of(options)}
        known |= {"straight_through": getattr(threshold, "straight_through", False)}
        known |= {"symmetrise": None if links is None else SYMMETRISE[type(links).__name__]}
        known |= {"graph_scores": "kk" if getattr(links, "over", "tokens") == "keys" else "qk"}
        taken = ("threshold", "coupling", "graph", "integrator")
        self.o = {**known, **{name: x for name, x in options.items() if name not in taken}}
        self.o["coupling"] = coupling if isinstance(coupling, str) else "polynomial"
        self.o["coefficients"] = getattr(coupling, "coefficients", None)
        feature, query = self.o["state"] == "feature", self.o["state"] == "query"
        self.feature, self.query = feature, query
        if self.o["symmetrise"] is None:
            causal = self.o["causal"] is not False
            self.o["symmetrise"] = ("causal_mirror" if causal else "min") if query else ("none" if causal else "kernel")
        if self.o["signed"] is None:
            self.o["signed"] = feature
        self.scale = 1.0 / math.sqrt(q.shape[1]) if self.o["scale"] is None else float(self.o["scale"])
        self.mu: list[float] = [float(mu) for mu in np.broadcast_to(self.o["mu"], (self.n,))]
        self.kappa = float(self.o["kappa"])
        self.a = [] if self.o["coefficients"] is None else [float(a) for a in self.o["coefficients"]]
        self.choose()
        self.value: Values = {}

    def run(self) -> None:
        self.link()
        self.m = self.allowed.T.astype(float) if self.query else np.ones(self.b.shape)
        self.flow()
        self._read()

    def tau_of(self, c: int) -> float:
        """Return the threshold of a channel."""
        if self.o["tau"] is not None:
            return float(self.o["tau"])
        if self.feature:
            return 0.0
        return 0.25 / max(int(np.sum(self.allowed[c])), 1) if self.query else 0.4

    def _read(self) -> None:
        rows, n, x, value = self.rows, self.n, self.x, self.value
        y = np.zeros(x.shape)
        for j in range(n):
            for c in range(x.shape[1]):
                size, tau = abs(x[j, c]) if self.o["signed"] else x[j, c], self.tau_of(c)
                if self.o["kind"] == "proximal":
                    y[j, c] = x[j, c]
                elif self.o["kind"] == "hard":
                    y[j, c] = x[j, c] if size >= tau else 0.0
                elif size > tau:
                    y[j, c] = math.copysign(size - tau, x[j, c]) if self.o["signed"] else size - tau
        value["GE.9"] = self.y = y
        if self.feature:
            self.out = np.where(np.any(self.allowed, axis=1, keepdims=True), y, 0.0)
            return
        value["GE.10"], value["GE.11"], value["GE.12"] = np.zeros((rows, n)), np.ones((rows, 1)), np.zeros((rows, n))
        self.filled = [False] * rows
        for i in range(rows):
            for j in range(n):
                score = max(y[j, i if self.query else 0], 0.0)
                value["GE.10"][i, j] = (
                    (score if self.allowed[i, j] else 0.0) if self.query else value["GE.2"][i, j] * score
                )
            total = math.fsum(value["GE.10"][i])
            self.filled[i] = total > 0.0
            if self.filled[i]:
                value["GE.11"][i, 0] = total
                value["GE.12"][i] = value["GE.10"][i] / total
            elif self.o["empty"] == "dense":
                value["GE.12"][i] = value["GE.2"][i]
            elif self.o["empty"] == "argmax" and self.allowed[i].any():
                ranks = [x[j, i] if self.query else value["GE.2"][i, j] * x[j, 0] for j in range(n)]
                if self.o["kind"] == "proximal":
                    ranks = list(value["GE.2"][i])
                best = max((j for j in range(n) if self.allowed[i, j]), key=lambda j: (ranks[j], -j))
                value["GE.12"][i, best] = 1.0
        self.out = value["GE.13"] = value["GE.12"] @ self.v

    def adjoint(self, d_out: np.ndarray) -> Values:
        rows, n, value, grad = self.rows, self.n, self.value, {}
        d_a = np.zeros((rows, n))
        d_y = np.zeros(self.y.shape)
        if self.feature:
            d_y += np.where(np.any(self.allowed, axis=1, keepdims=True), d_out, 0.0)
        else:
            grad["dGE.v"] = value["GE.12"].T @ d_out
            grad["dGE.12"] = d_out @ self.v.T
            grad["dGE.11"], grad["dGE.10"] = np.zeros((rows, 1)), np.zeros((rows, n))
            for i in range(rows):
                if not self.filled[i]:
                    d_a[i] += grad["dGE.12"][i] if self.o["empty"] == "dense" else 0.0
                    continue
                u, z = value["GE.10"][i], value["GE.11"][i, 0]
                grad["dGE.11"][i, 0] = -math.fsum(grad["dGE.12"][i] * u) / z**2
                grad["dGE.10"][i] = grad["dGE.12"][i] / z + grad["dGE.11"][i, 0]
                for j in range(n):
                    c = i if self.query else 0
                    positive = self.x[j, c] > 0.0 if self.o["straight_through"] else self.y[j, c] > 0.0
                    slope = 1.0 if self.query else value["GE.2"][i, j]
                    d_y[j, c] += grad["dGE.10"][i, j] * slope * positive * bool(self.allowed[i, j])
                    if not self.query:
                        d_a[i, j] += grad["dGE.10"][i, j] * max(self.y[j, 0], 0.0)
        grad["dGE.9"] = d_y
        d_x, d_tau = np.zeros(d_y.shape), 0.0
        for j in range(n):
            for c in range(self.b.shape[1]):
                size, tau = abs(self.x[j, c]) if self.o["signed"] else self.x[j, c], self.tau_of(c)
                keeps = size >= tau if self.o["kind"] == "hard" else size > tau or self.o["kind"] == "proximal"
                d_x[j, c] = d_y[j, c] if keeps or self.o["straight_through"] else 0.0
                if self.o["kind"] == "soft" and keeps:
                    d_tau -= d_y[j, c] * (math.copysign(1.0, self.x[j, c]) if self.o["signed"] else 1.0)
        self.flow_adjoint(grad, d_x, d_tau)
        self.link_adjoint(grad, d_a)
        return grad


def _heads(q: Any, k: Any, v: Any, mask: Any, options: dict[str, Any]) -> list[list[_Head]]:
    batch, heads, rows, _ = q.shape
    groups, n = k.shape[1:3]
    plane = (batch, heads, rows, n)
    allowed: Any = np.ones(plane, dtype=np.bool_) if mask is None else np.broadcast_to(mask, plane)
    causal = options.get("causal", False) is not False
    if causal:
        allowed = allowed & np.array([[j <= i for j in range(n)] for i in range(n)], dtype=np.bool_).reshape(n, n)
    masked = mask is not None or (causal and n > 1)
    given = options.get("bias")
    bias = np.broadcast_to(np.zeros((1, 1)) if given is None else given, plane)
    started = start_of(options)
    begins, moved = started.at, started.jitter
    starts: Any = None if begins is None else np.broadcast_to(begins, (batch, heads, n))
    found = []
    for b in range(batch):
        row = []
        for h in range(heads):
            own = q[b, h], k[b, h * groups // heads], v[b, h * groups // heads], bias[b, h]
            start = None if starts is None else starts[b, h]
            mu = options.get("mu", 1.0)
            of_head = options if np.ndim(mu) == 0 else {**options, "mu": mu[h]}
            if moved is not None:
                of_head = {**of_head, "jitter": np.broadcast_to(moved, (batch, heads, n, np.shape(moved)[-1]))[b, h]}
            row.append(_Head(*own, start, allowed[b, h], masked, of_head))
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
    for name, id, given in (("bias", "dGE.1", options.get("bias")), ("start", "dGE.start", start_of(options).at)):
        if given is not None:
            shape = np.shape(given)
            whole = grad[id].sum(axis=tuple(range(grad[id].ndim - len(shape))))
            grad[f"dGE.{name}"] = whole.sum(axis=tuple(n for n, m in enumerate(shape) if m == 1), keepdims=True)
    if "dGE.coefficients" in grad:
        grad["dGE.coefficients"] = grad["dGE.coefficients"].sum(axis=(0, 1))
    of_mu = grad["dGE.mu"].sum(axis=0)  # (h, j)
    grad["dGE.mu"] = (np.asarray(of_mu.sum()), of_mu.reshape(len(of_mu), -1).sum(axis=1), of_mu)[
        np.ndim(options.get("mu", 1.0))
    ]
    for id in ("dGE.scale", "dGE.kappa", "dGE.step", "dGE.tau"):
        if id in grad:
            grad[id] = np.asarray(grad[id].sum())
    return grad
