"""The flow a second time, in scalar loops: the part of `loops` that moves the scores.

One channel of one head at a time is a small system of ordinary differential equations with an explicit Jacobian J; the
adjoint of a stage is J^T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Values = dict[str, np.ndarray]
Scalar = Callable[[float], float]

FORCES: dict[str, tuple[Scalar, Scalar]] = {
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
    "implicit_midpoint": ([[]], [1.0]),
    "discrete_gradient": ([[]], [1.0]),
}

WAYS: dict[str, list[tuple[float, float]]] = {
    "implicit_midpoint": [(0.5, 1.0)],
    "discrete_gradient": [(0.5 + 0.5 * t, 0.5 * w) for t, w in zip(*np.polynomial.legendre.leggauss(20), strict=True)],
}
"""Where between x and x' an implicit method takes its rates, and their weights."""


def intrinsic(name: str, mu: float, x: float, b: float) -> tuple[float, float, float, float]:
    """Return f and its derivatives with respect to x, b and mu."""
    if name == "anchor":
        return -mu * (x - b), -mu, mu, -(x - b)
    if name == "double_well":
        return mu * x - x**3 + b, mu - 3.0 * x**2, 1.0, x
    return 0.0, 0.0, 0.0, 0.0


class Flow:
    """The scores of one head, from their start b on the links w to their end x, and back."""

    o: dict[str, Any]  # the options
    value: Values
    mu: list[float]  # (j)
    kappa: float
    a: list[float]  # the coefficients of a polynomial
    n: int
    w: np.ndarray  # (i, j)
    b: np.ndarray  # (j, c)
    m: np.ndarray  # (j, c): 1 where node j exists in channel c, else 0

    def tau_of(self, c: int) -> float:
        """Return the threshold of a channel."""
        raise NotImplementedError

    def choose(self) -> None:
        """Look up g and g'."""
        self.g, self.slope = FORCES.get(self.o["coupling"], (self._polynomial, self._polynomial_slope))

    def _polynomial(self, x: float) -> float:
        return sum(a * x ** (2 * n + 1) for n, a in enumerate(self.a))

    def _polynomial_slope(self, x: float) -> float:
        return sum(a * (2 * n + 1) * x ** (2 * n) for n, a in enumerate(self.a))

    def _rate(self, y: np.ndarray, c: int) -> tuple[np.ndarray, np.ndarray]:
        coupled, rate = np.zeros(self.n), np.zeros(self.n)
        for i in range(self.n):
            for j in range(self.n):
                coupled[i] += self.m[i, c] * self.m[j, c] * self.w[i, j] * self.g(y[j] - y[i])
            force = intrinsic(self.o["intrinsic"], self.mu[i], y[i], self.b[i, c])[0]
            rate[i] = self.m[i, c] * force + self.kappa * coupled[i]
        return coupled, rate

    def _jacobian(self, y: np.ndarray, c: int) -> np.ndarray:
        jacobian = np.zeros((self.n, self.n))
        for i in range(self.n):
            jacobian[i, i] += self.m[i, c] * intrinsic(self.o["intrinsic"], self.mu[i], y[i], self.b[i, c])[1]
            for j in range(self.n):
                edge = self.kappa * self.m[i, c] * self.m[j, c] * self.w[i, j] * self.slope(y[j] - y[i])
                jacobian[i, j] += edge
                jacobian[i, i] -= edge
        return jacobian

    def _mean_rate(self, x: np.ndarray, after: np.ndarray, c: int) -> tuple[np.ndarray, np.ndarray]:
        way = WAYS[self.o["integrator"]]
        parts = [(weight, self._rate(x + t * (after - x), c)) for t, weight in way]
        return tuple(np.sum([w * part[n] for w, part in parts], axis=0) for n in (0, 1))

    def _matrix(self, x: np.ndarray, after: np.ndarray, c: int) -> np.ndarray:
        """Return the derivative of x' - x - h v with respect to x'."""
        parts = [w * t * self._jacobian(x + t * (after - x), c) for t, w in WAYS[self.o["integrator"]]]
        return np.asarray(np.eye(self.n) - self.h[c] * sum(parts))

    def _end(self, x: np.ndarray, c: int) -> np.ndarray:
        after = x
        for _ in range(60):
            residual = after - x - self.h[c] * self._mean_rate(x, after, c)[1]
            change = np.linalg.solve(self._matrix(x, after, c), residual)
            after = after - change
            if np.max(np.abs(change), initial=0.0) < 1e-15:
                break
        return after

    def _put(self, id: str, at: int, c: int, x: np.ndarray, shape: tuple[int, ...]) -> None:
        self.value.setdefault(f"{id}[{at}]" if at else id, np.zeros(shape))[:, c] = x

    def flow(self) -> None:
        stages, weights = METHODS[self.o["integrator"]]
        channels = self.b.shape[1]
        self.x = self.b.copy()
        if self.o["jitter"] is not None:
            self.x = self.x + self.m * self.o["jitter"]
        self.h = [float(self.o["step"])] * channels
        self.points = np.zeros((self.o["steps"], len(weights), self.n, channels))
        self.rates, self.pulls = np.zeros(self.points.shape), np.zeros(self.points.shape)
        self.ends = np.zeros((self.o["steps"], 2, self.n, channels))
        self.after = np.zeros((self.o["steps"], self.n, channels))
        way = WAYS.get(self.o["integrator"])
        for at in range(self.o["steps"]):
            for c in range(channels):
                x = self.x[:, c].copy()
                for s, row in enumerate(stages):
                    y = x + self.h[c] * sum(
                        (row[r] * self.rates[at, r, :, c] for r in range(len(row))), np.zeros(self.n)
                    )
                    if way is None:
                        coupled, rate = self._rate(y, c)
                    else:
                        end = self._end(x, c)
                        self.ends[at, 0, :, c], self.ends[at, 1, :, c] = x, end
                        coupled, rate = self._mean_rate(x, end, c)
                        y = (x + end) / 2.0 if len(way) == 1 else x
                    self.points[at, s, :, c], self.pulls[at, s, :, c], self.rates[at, s, :, c] = y, coupled, rate
                    for id, z in (("GE.point", y), ("GE.6", coupled), ("GE.7", rate)):
                        self._put(id, at * len(weights) + s, c, z, self.b.shape)
                after = x + self.h[c] * sum(weights[r] * self.rates[at, r, :, c] for r in range(len(weights)))
                if self.o["kind"] == "proximal":
                    after = np.array([self._shrunk(z, self.h[c] * self.tau_of(c)) for z in after])
                    self.after[at, :, c] = after
                self.x[:, c] = after
                self._put("GE.8", at, c, after, self.b.shape)

    def _shrunk(self, x: float, least: float) -> float:
        if (abs(x) if self.o["signed"] else x) <= least:
            return 0.0
        return math.copysign(abs(x) - least, x) if self.o["signed"] else x - least

    def flow_adjoint(self, grad: Values, d_x: np.ndarray, d_tau: float) -> None:
        n, steps = self.n, self.o["steps"]
        stages, weights = METHODS[self.o["integrator"]]
        count = len(weights)
        d_w, d_b = np.zeros((n, n)), np.zeros(self.b.shape)
        d_mu = np.zeros(n)
        d_kappa = d_h = 0.0
        d_a = np.zeros(len(self.a))
        forward, self.value = self.value, {}
        way = WAYS.get(self.o["integrator"])
        for c in range(self.b.shape[1]):
            lam = d_x[:, c].copy()
            for back, at in enumerate(reversed(range(steps))):
                self._put("dGE.8", back, c, lam, self.b.shape)
                if self.o["kind"] == "proximal":
                    for j in range(n):
                        if self.after[at, j, c] == 0.0:
                            lam[j] = 0.0
                        push = lam[j] * math.copysign(1.0, self.after[at, j, c])
                        d_tau -= self.h[c] * push
                        d_h -= self.tau_of(c) * push
                below = [np.zeros(n) for _ in weights]
                for order, s in enumerate(reversed(range(count))):
                    inner = weights[s] * lam
                    for later in range(s + 1, count):
                        inner = inner + stages[later][s] * below[later]
                    points = [(self.points[at, s, :, c], 1.0)]
                    if way is not None:
                        x, end = self.ends[at, :, :, c]
                        inner = np.linalg.solve(self._matrix(x, end, c).T, inner)
                        points = [(x + t * (end - x), weight) for t, weight in way]
                    d_v = self.h[c] * inner
                    d_h += float(inner @ self.rates[at, s, :, c])
                    d_kappa += float(self.pulls[at, s, :, c] @ d_v)
                    for y, weight in points:
                        below[s] += weight * (self._jacobian(y, c).T @ d_v)
                        for i in range(n):
                            _, _, by_b, by_mu = intrinsic(self.o["intrinsic"], self.mu[i], y[i], self.b[i, c])
                            d_b[i, c] += weight * self.m[i, c] * by_b * d_v[i]
                            d_mu[i] += weight * self.m[i, c] * by_mu * d_v[i]
                            for j in range(n):
                                edge = weight * self.kappa * self.m[i, c] * self.m[j, c] * d_v[i]
                                for m in range(len(self.a)):
                                    d_a[m] += edge * self.w[i, j] * (y[j] - y[i]) ** (2 * m + 1)
                                d_w[i, j] += edge * self.g(y[j] - y[i])
                    for id, z in (("dGE.7", d_v), ("dGE.6", self.kappa * d_v), ("dGE.point", below[s])):
                        self._put(id, back * count + order, c, z, self.b.shape)
                lam = lam + sum(below)
            d_b[:, c] += lam
        grad |= self.value
        self.value = forward
        grad |= {"dGE.links": d_w, "dGE.5": d_b, "dGE.mu": d_mu, "dGE.kappa": np.asarray(d_kappa)}
        grad["dGE.step"] = np.asarray(d_h)
        if self.o["tau"] is not None:
            grad["dGE.tau"] = np.asarray(d_tau)
        if self.a:
            grad["dGE.coefficients"] = d_a
