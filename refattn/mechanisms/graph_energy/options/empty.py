"""What a row gets whose scores are all below the threshold: its weights p (GE.12) where it reads no token.

::

    [GE.best]  p_ij = 1 at the largest rank, else 0         as "argmax": something is attended, and nothing is divided
    [GE.usual]  p_ij = a_ij                                 as "dense": softmax attention
    [GE.nothing]  p_ij = 0                                  as "zero"; "error" raises

Backwards da_ij += dp_ij for "dense"; the others are constants.
"""

from __future__ import annotations

from typing import Any

from refattn.ops.masks import largest_of_rows
from refattn.xp import Array, namespace, zeros


class Emptied:
    """What an emptied row gets: here nothing, the token reads 0."""

    def forward(self, threshold: Any, state: Any, attention: Any, x: Array, allowed: Array | None) -> Array:
        """Return p (b, h, i, j)."""
        return zeros(attention.shape, x)

    def backward(self, filled: Array, d_weights: Array) -> Array | None:
        """Return what p adds to the gradient of attention."""
        return None


class Best(Emptied):
    """All weight on the token with the largest rank; a row that may attend nothing gets 0."""

    def forward(self, threshold: Any, state: Any, attention: Any, x: Array, allowed: Array | None) -> Array:
        """Return p (b, h, i, j)."""
        return largest_of_rows(threshold.rank(state, attention, x), allowed)


class Usual(Emptied):
    """Its attention."""

    def forward(self, threshold: Any, state: Any, attention: Any, x: Array, allowed: Array | None) -> Array:
        """Return p (b, h, i, j)."""
        found: Array = attention
        return found

    def backward(self, filled: Array, d_weights: Array) -> Array | None:
        """Return what p adds to the gradient of attention."""
        found: Array = namespace(filled).where(filled, 0.0, d_weights)
        return found


EMPTIED: dict[str, Emptied] = {"argmax": Best(), "dense": Usual(), "zero": Emptied(), "error": Emptied()}
