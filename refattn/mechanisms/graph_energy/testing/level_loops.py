"""Levels of tokens a second time: one head after the other, token by token, with levels as lists of tokens.

What every token reads of a node is a number; the rest is written in scalars (`refattn.mechanisms.scalar_autodiff`),
whose adjoints come from the chain rule. Values come back by the ids of the docstring of
`refattn.mechanisms.graph_energy.layer.hierarchy`. Slow on purpose; for small sizes.

Source: that of levels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.mechanisms.graph_energy.testing.given import threshold_of
from refattn.mechanisms.scalar_autodiff import copies, dot, scalars, slopes, softmax, sweep, values

Values = dict[str, np.ndarray]

USUAL = {"levels": 3, "stride": 4, "window": 16, "causal": False, "step": 1.0 / 3.0, "steps": 10}


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

    def omega(self, logits: Any, n: int) -> Any:
        """Return how much each level counts for each token, (i, levels)."""
        found = scalars(np.zeros((n, len(self.nodes))))
        for i in range(n):
            there = [level for level, nodes in enumerate(self.nodes) if not self.o["causal"] or nodes[0] <= i]
            found[i, there] = softmax(logits[there])
        return found

    def stage(self, q: np.ndarray, k: np.ndarray, level: int) -> np.ndarray:
        """Return how much every token reads of each node of a level: the scores of nodes flow on their own graph."""
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
        out = np.zeros((len(q), count))
        for i in range(len(q)):
            near = self.read(level, i)
            if not near:
                continue
            scores = np.asarray([s[i, nodes[place]] for place in near])
            if np.any(kept[near]):
                parts = _softmax(np.where(kept[near] > 0.0, scores, -math.inf)) * kept[near]
            else:  # the largest of what there was
                parts = np.eye(len(near))[int(np.argmax(_softmax(scores) * x[near]))]
            out[i, near] = parts / np.sum(parts)
        return out


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - np.max(scores, initial=-1e300))
    return powers / np.sum(powers)


def _run(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Return the level logits, how much levels count, and by level the values, what is read, and the output so far."""
    o: dict[str, Any] = {**USUAL, "key_mask": np.ones((q.shape[0], q.shape[2]), bool), **options}
    logits = scalars(o.pop("level_logits", np.zeros(o["levels"])))
    if unknown := set(o) - {*USUAL, "key_mask", "threshold"}:
        raise NotImplementedError(f"{sorted(unknown)[0]}: not in these loops")
    (batch, heads, n, _), (groups, _, width), v = q.shape, v.shape[1:], scalars(v)
    own = [_Levels(n, o["key_mask"][b], o) for b in range(batch)]
    omega, found = own[0].omega(logits, n), list[dict[str, Any]]()
    for level, nodes in enumerate(own[0].nodes):
        at = {
            id: np.empty((batch, heads, size, width), dtype=object)
            for id, size in (("values", len(nodes)), ("reads", n))
        }
        at["mixed"] = np.empty(at["reads"].shape, dtype=object)
        for b, h in np.ndindex(batch, heads):
            group = h * groups // heads
            weights = own[b].stage(q[b, h], k[b, group], level)
            at["values"][b, h] = copies((found[-1]["reads"][b, h] if found else v[b, group])[nodes])
            for i, e in np.ndindex(n, width):
                at["reads"][b, h, i, e] = dot(weights[i], at["values"][b, h, :, e])
                reads = [*(below["reads"][b, h, i, e] for below in found), at["reads"][b, h, i, e]]
                at["mixed"][b, h, i, e] = dot(omega[i, : level + 1], reads)
        found.append(at)
    return logits, omega, found


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Values:
    """Return the value of every equation of the forward, by id."""
    _, omega, levels = _run(q, k, v, options)
    value = {"GE.level_weights": values(omega), "GE.mixed": values(levels[-1]["mixed"])}
    for id in ("values", "reads"):
        value |= {f"GE.level_{id}[{n}]" if n else f"GE.level_{id}": values(at[id]) for n, at in enumerate(levels)}
    return value


def backward(q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, **options: Any) -> Values:
    """Return the value of every adjoint, by id: levels are counted from the last one on."""
    logits, omega, levels = _run(q, k, v, options)
    sweep(levels[-1]["mixed"], d_out)
    grad = {"dGE.level_weights": slopes(omega), "dGE.level_logits": slopes(logits)}
    for id in ("values", "reads"):
        back = enumerate(reversed(levels))
        grad |= {f"dGE.level_{id}[{n}]" if n else f"dGE.level_{id}": slopes(at[id]) for n, at in back}
    return grad
