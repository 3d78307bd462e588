"""Levels of tokens a second time: one head after the other, token by token, with levels as lists of tokens.

Adjoints are derivatives by their definition: a value gets the increment ih with h = 1e-60, everything after it is
computed again in complex numbers, and the imaginary part of the loss over h is the derivative. Values come back by the
ids of the docstring of `refattn.mechanisms.graph_energy.layer.hierarchy`. Slow on purpose; for small sizes.

Source: that of levels; complex steps: Squire, Trapp 1998 (SIAM Review 40, 110).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from refattn.mechanisms.graph_energy.testing.flow_loops import Values
from refattn.mechanisms.graph_energy.testing.given import threshold_of

H = 1e-60
"""Increment of a value."""

See = Callable[[str, int, np.ndarray], np.ndarray]
"""What every value goes through on its way: (id, level, value) -> the value to go on with."""


class _Levels:
    """The levels of one sequence: which tokens are their nodes, and which of these a token reads."""

    def __init__(self, n: int, tokens: Any, o: dict[str, Any]) -> None:
        self.o, self.tokens, self.nodes = o, tokens, list[list[int]]()
        for level in range(o["levels"]):
            every = o["stride"] ** level
            nodes = [*range(every - 1, n, every)]
            if not o["causal"] and n % every:
                nodes.append(n - 1)
            if nodes or not level:
                self.nodes.append(nodes)

    def read(self, level: int, i: int) -> list[int]:
        """Return the nodes that token i reads, by their places in the level."""
        nodes, window = self.nodes[level], self.o["window"]
        if self.o["causal"]:
            past = [place for place, j in enumerate(nodes) if j <= i]
            found = past[max(len(past) - window, 0) :]
        else:
            found = [place for place in range(len(nodes)) if abs(place - i // self.o["stride"] ** level) < window]
        return [place for place in found if self.tokens[i] and self.tokens[nodes[place]]]

    def omega(self, logits: np.ndarray, n: int) -> np.ndarray:
        """Return how much each level counts for each token, (i, levels)."""
        found = np.zeros((n, len(self.nodes)), logits.dtype)
        for i in range(n):
            there = [level for level, nodes in enumerate(self.nodes) if not self.o["causal"] or nodes[0] <= i]
            found[i, there] = _softmax(logits[there])
        return found

    def stage(self, q: np.ndarray, k: np.ndarray, values: np.ndarray, level: int) -> np.ndarray:
        """Return what every token reads of a level: the scores of its nodes flow on their own graph."""
        o, nodes = self.o, self.nodes[level]
        count = len(nodes)
        s = q @ k.T / math.sqrt(q.shape[1])
        begin = np.asarray([1.0 / (1.0 + np.exp(-s[j, j])) for j in nodes])
        links = np.zeros((count, count))
        for row, i in enumerate(nodes):
            near = self.read(level, i)
            if not o["causal"]:
                near = [place for place in near if row in self.read(level, nodes[place])]
            own = [s[i, nodes[p]] if o["causal"] else 0.5 * (s[i, nodes[p]] + s[nodes[p], i]) for p in near]
            links[row, near] = _softmax(np.asarray(own))
            links[row, row] = 0.0
        x = begin
        for _ in range(o["steps"]):
            pull = [math.fsum(links[i, j] * math.sin(x[j] - x[i]) for j in range(count)) for i in range(count)]
            x = x + o["step"] * (begin - x + np.asarray(pull))
        threshold = threshold_of(o)
        tau = threshold.tau if threshold.tau is not None else 0.4
        kept = np.where(x >= tau, x - (tau if type(threshold).__name__ == "Soft" else 0.0), 0.0)
        out = np.zeros((len(q), values.shape[1]), values.dtype)
        for i in range(len(q)):
            near = self.read(level, i)
            if not near:
                continue
            attention = _softmax(np.asarray([s[i, nodes[place]] for place in near]))
            parts = attention * kept[near]
            if not np.any(parts):  # the largest of what there was
                parts = np.eye(len(near))[int(np.argmax(attention * x[near]))]
            out[i] = (parts / np.sum(parts)) @ values[near]
        return out


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - np.max(scores.real, initial=-1e300))
    return powers / np.sum(powers)


def _head(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, omega: np.ndarray, levels: _Levels, stages: list[Any], see: See
) -> np.ndarray:
    """Return the output of one head; `stages` keeps what tokens read of each node, which no value changes."""
    below, out = v, np.zeros(v.shape)
    for level, nodes in enumerate(levels.nodes):
        if len(stages) == level:
            stages.append(levels.stage(q, k, np.eye(len(nodes)), level))
        values = see("GE.level_values", level, below[nodes])
        below = see("GE.level_reads", level, stages[level] @ values)
        out = out + omega[:, level, None] * below
    return out


def _run(q: Any, k: Any, v: Any, d_out: Any, options: dict[str, Any]) -> tuple[Values, Values]:
    o: dict[str, Any] = {"levels": 3, "stride": 4, "window": 16, "causal": False, "step": 1.0 / 3.0, "steps": 10}
    o |= {"key_mask": np.ones((q.shape[0], q.shape[2]), bool), **options}
    if (
        unknown := set(o)
        - {"levels", "stride", "window", "causal", "step", "steps", "key_mask", "threshold"}
        - {"level_logits"}
    ):
        raise NotImplementedError(f"{sorted(unknown)[0]}: not in these loops")
    (batch, heads, n, _), groups = q.shape, k.shape[1]
    logits = o.pop("level_logits", np.zeros(o["levels"]))
    own = [_Levels(n, o["key_mask"][b], o) for b in range(batch)]
    omega, count = own[0].omega(logits, n), len(own[0].nodes)
    value, grad = Values(), Values()
    value["GE.level_weights"], value["GE.mixed"] = omega, np.zeros((batch, heads, n, v.shape[3]))
    grad["dGE.level_weights"], grad["dGE.level_logits"] = np.zeros(omega.shape), np.zeros(logits.shape)
    for b, h in np.ndindex(batch, heads):
        group, stages, seen = h * groups // heads, list[Any](), dict[tuple[str, int], np.ndarray]()
        arrays = q[b, h], k[b, group], v[b, group]

        def slope(weights: np.ndarray, see: See, arrays: Any = arrays, stages: Any = stages, at: Any = (b, h)) -> float:
            moved = _head(arrays[0], arrays[1], arrays[2], weights, own[at[0]], stages, see)
            return float(np.sum(moved * d_out[at]).imag / H)

        def keep(id: str, level: int, x: np.ndarray, seen: Any = seen) -> np.ndarray:
            seen[id, level] = x
            return x

        value["GE.mixed"][b, h] = _head(*arrays, omega, own[b], stages, keep)
        for (id, level), x in seen.items():
            _put(value, _name(id, level), (batch, heads), (b, h), x)
        if d_out is None:
            continue
        for (id, level), x in seen.items():
            found = np.zeros(x.shape)
            for place in np.ndindex(x.shape):
                found[place] = slope(omega, _moved(id, level, place))
            _put(grad, _name(f"d{id}", count - 1 - level), (batch, heads), (b, h), found)
        for place in np.ndindex(omega.shape):
            grad["dGE.level_weights"][place] += slope(omega + 1j * H * _unit(omega.shape, place), _same)
        for at in range(len(logits)):
            turned = own[b].omega(logits + 1j * H * _unit(logits.shape, (at,)), n)
            grad["dGE.level_logits"][at] += slope(turned, _same)
    return value, grad


def _same(id: str, level: int, x: np.ndarray) -> np.ndarray:
    return x


def _moved(id: str, level: int, place: tuple[int, ...]) -> See:
    """Return what gives one element of a value its increment."""
    return lambda own, at, x: x + 1j * H * _unit(x.shape, place) if (own, at) == (id, level) else x


def _unit(shape: tuple[int, ...], place: tuple[int, ...]) -> np.ndarray:
    found = np.zeros(shape)
    found[place] = 1.0
    return found


def _put(into: Values, id: str, outer: tuple[int, int], at: tuple[int, int], x: np.ndarray) -> None:
    into.setdefault(id, np.zeros(outer + x.shape))[at] = x


def _name(id: str, number: int) -> str:
    return f"{id}[{number}]" if number else id


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Values:
    """Return the value of every equation of the forward, by id."""
    return _run(q, k, v, None, options)[0]


def backward(q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, **options: Any) -> Values:
    """Return the value of every adjoint, by id."""
    return _run(q, k, v, d_out, options)[1]
