"""The graph a second time, in scalar loops: the part of `loops` that goes from queries and keys to links and a start.

The adjoint of a softmax is taken from its full Jacobian.
"""

from __future__ import annotations

import math

import numpy as np

from refattn.mechanisms.graph_energy.testing.flow_loops import Flow, Values


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.zeros(len(scores))
    if np.max(scores, initial=-math.inf) > -math.inf:
        top = max(scores)
        total = math.fsum(math.exp(s - top) for s in scores)
        for j, s in enumerate(scores):
            weights[j] = math.exp(s - top) / total
    return weights


def softmax_adjoint(weights: np.ndarray, d_weights: np.ndarray) -> np.ndarray:
    jacobian = np.diag(weights) - np.outer(weights, weights)
    return np.asarray(jacobian.T @ d_weights)


def sigmoid(s: float) -> float:
    power = math.exp(-abs(s))
    return (1.0 if s >= 0.0 else power) / (1.0 + power)


class Graph(Flow):
    """The links of one head, and where its scores start."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    bias: np.ndarray
    start: np.ndarray | None
    allowed: np.ndarray  # (i, j)
    masked: bool
    rows: int
    scale: float
    feature: bool
    query: bool

    def link(self) -> None:
        """Compute the graph: GE.1 to GE.5, GE.masked and GE.links."""
        rows, n, value = self.rows, self.n, self.value
        products = [[self.scale * math.fsum(self.q[i] * self.k[j]) for j in range(n)] for i in range(rows)]
        scores = np.array(products).reshape(rows, n) + self.bias
        value["GE.1"] = scores
        masked = np.where(self.allowed, value["GE.1"], -math.inf)
        if self.masked:
            value["GE.masked"] = masked
        a = np.array([softmax(masked[i]) for i in range(rows)]).reshape(rows, n)
        value["GE.2"] = a
        over_keys = self.o["graph_scores"] == "kk"
        if over_keys or self.o["symmetrise"] == "kernel":
            mutual = np.full((n, n), -math.inf)
            for i in range(n):
                for j in range(n):
                    if over_keys:
                        if self.allowed[:, i].any() and self.allowed[:, j].any():
                            mutual[i, j] = self.scale * math.fsum(self.k[i] * self.k[j])
                    elif self.allowed[i, j] and self.allowed[j, i]:
                        mutual[i, j] = (scores[i, j] + scores[j, i]) / 2.0
            value["GE.3"] = mutual
            value["GE.4"] = np.array([softmax(mutual[i]) for i in range(n)]).reshape(n, n)
        links = value["GE.4"] if over_keys else a
        w = np.zeros((n, n))
        for i in range(n):
            for j in range(n):
                if i != j:
                    w[i, j] = {
                        "kernel": lambda i, j: value["GE.4"][i, j],
                        "none": lambda i, j: links[i, j],
                        "mean": lambda i, j: (links[i, j] + links[j, i]) / 2.0,
                        "min": lambda i, j: min(links[i, j], links[j, i]),
                        "causal_mirror": lambda i, j: links[max(i, j), min(i, j)],
                    }[self.o["symmetrise"]](i, j)
        value["GE.links"] = self.w = w
        if self.feature:
            b = self.v.copy()
        elif self.query:
            b = a.T.copy()
        elif self.start is not None:
            b = np.array(self.start, dtype=float).reshape(n, 1)
        else:
            b = np.array([sigmoid(scores[j, j]) for j in range(n)]).reshape(n, 1)
        value["GE.5"] = self.b = b

    def link_adjoint(self, grad: Values, d_a: np.ndarray) -> None:
        rows, n, way, over_keys = self.rows, self.n, self.o["symmetrise"], self.o["graph_scores"] == "kk"
        a = self.value["GE.2"]
        links, d_links = (self.value["GE.4"], np.zeros((n, n))) if over_keys else (a, d_a)
        d_s = np.zeros((rows, n))
        if over_keys or way == "kernel":
            grad["dGE.4"], grad["dGE.3"] = np.zeros((n, n)), np.zeros((n, n))
        for i in range(n):
            for j in range(n):
                if i == j:
                    continue
                d = grad["dGE.links"][i, j]
                if way == "kernel":
                    grad["dGE.4"][i, j] = d
                elif way == "none":
                    d_links[i, j] += d
                elif way == "mean":
                    d_links[i, j] += d / 2.0
                    d_links[j, i] += d / 2.0
                elif way == "causal_mirror":
                    d_links[max(i, j), min(i, j)] += d
                elif links[i, j] == links[j, i]:
                    d_links[i, j] += d / 2.0
                    d_links[j, i] += d / 2.0
                else:
                    d_links[(i, j) if links[i, j] < links[j, i] else (j, i)] += d
        if over_keys and way != "kernel":
            grad["dGE.4"] = d_links
        if over_keys or way == "kernel":
            for i in range(n):
                grad["dGE.3"][i] = softmax_adjoint(self.value["GE.4"][i], grad["dGE.4"][i])
        if way == "kernel" and not over_keys:
            d_s += (grad["dGE.3"] + grad["dGE.3"].T) / 2.0
        if self.query:
            d_a += grad["dGE.5"].T
        grad["dGE.2"] = d_a
        grad["dGE.masked"] = np.array([softmax_adjoint(a[i], d_a[i]) for i in range(rows)]).reshape(rows, n)
        d_s += grad["dGE.masked"]
        if self.start is not None:
            grad["dGE.start"] = grad["dGE.5"][:, 0]
        elif not self.feature and not self.query:
            for j in range(n):
                d_s[j, j] += grad["dGE.5"][j, 0] * self.b[j, 0] * (1.0 - self.b[j, 0])
        grad["dGE.1"] = d_s
        grad["dGE.q"], grad["dGE.k"] = self.scale * d_s @ self.k, self.scale * d_s.T @ self.q
        d_scale = sum(d_s[i, j] * float(self.q[i] @ self.k[j]) for i in range(rows) for j in range(n))
        if over_keys:
            d_r = grad["dGE.3"]
            grad["dGE.k"] = grad["dGE.k"] + self.scale * (d_r @ self.k + d_r.T @ self.k)
            d_scale += sum(d_r[i, j] * float(self.k[i] @ self.k[j]) for i in range(n) for j in range(n))
        grad["dGE.scale"] = np.asarray(d_scale)
