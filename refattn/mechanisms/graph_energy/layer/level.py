"""One level of a hierarchy: which tokens are its nodes, and which of these a token reads.

Of n tokens node j of a level is the last of the s from s j on, and without causality the last of all where fewer are
left. Token i reads, with a window of w nodes::

    causal      j <= c, j > c - w    with c = (i + 1) div s - 1, the last node that is no later than i
    otherwise   |j - c| < w          with c = i div s, the node that stands for i
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.xp import Array, arange, namespace


@dataclass(frozen=True)
class Level:
    """Every `every`-th of n tokens; `window` None means that a token reads all of them, or all earlier ones."""

    n: int
    every: int
    window: int | None
    causal: bool

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return self.n // self.every if self.causal else -(-self.n // self.every)

    def positions(self, like: Array) -> Array:
        """Return which tokens are nodes, (j)."""
        last = arange(1, self.count + 1, like) * self.every - 1
        return namespace(like).where(last < self.n, last, self.n - 1)

    def read(self, tokens: Array, nodes: Array) -> Array:
        """Tell which tokens read which nodes, for their numbers; those that are none read nothing."""
        xp, there = namespace(tokens), (tokens < self.n) & (nodes >= 0) & (nodes < self.count)
        home = self.home(tokens)
        if self.causal:
            there = there & (nodes <= home)
        return there if self.window is None else there & (xp.abs(nodes - home) < self.window)

    def home(self, tokens: Array) -> Array:
        """Return the node c that stands for each token: -1 where there is none."""
        return (tokens + 1) // self.every - 1 if self.causal else tokens // self.every

    def first(self) -> int:
        """Return the first token that reads a node."""
        return self.every - 1 if self.causal else 0

    def take(self, x: Array, axis: int) -> Array:
        """Return what the nodes have of what tokens have."""
        return x if self.every == 1 else namespace(x).take(x, self.positions(x), axis=axis)

    def spread(self, x: Array, axis: int) -> Array:
        """Return what tokens have, 0 where they are no nodes: the adjoint of `take`."""
        if self.every == 1:
            return x
        xp, tokens = namespace(x), arange(0, self.n, x)
        node = tokens // self.every
        node = xp.where(node < self.count, node, self.count - 1)
        shape = tuple(self.n if at == axis else 1 for at in range(len(x.shape)))
        here = xp.reshape(xp.take(self.positions(x), node) == tokens, shape)
        return xp.where(here, xp.take(x, node, axis=axis), 0.0)


def levels_of(n: int, stride: int, most: int, window: int | None, causal: bool) -> tuple[Level, ...]:
    """Return the levels of n tokens, at most `most`; but the first, those that have a node."""
    every = [Level(n, stride**at, window, causal) for at in range(most)]
    return (every[0], *(level for level in every[1:] if level.count))
