"""Where scores start, b (GE.5); with a jitter the first x is b + m jitter.

::

    [GE.own_score]  b_j = sigmoid(s_jj)         state "token": how well a token matches itself
    [GE.own_scores]  b_jc = sigmoid(s_jj)       state "prefix": the same for every query c
    [GE.attention]  b_jc = a_cj                 state "query": the attention of query c
    [GE.features]  b_jc = v_jc                  state "feature": the values themselves
    [GE.started]  b_j = what the caller gives   state "token"; its gradient is summed over what it was broadcast to

Backwards: ds_jj += db_j b_j (1 - b_j), in "prefix" for each c; da_cj += db_jc; dv = db.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn.ops.heads import repeat_heads, sum_heads
from refattn.xp import Array, namespace, zeros

Parts = tuple[Array | None, Array | None, Array | None]


@dataclass(frozen=True)
class Start:
    """Where scores start.

    Attributes
    ----------
    at
        In state "token", an array that broadcasts to (b, h, n), in place of the sigmoid of s_jj.
    jitter
        Broadcastable to the scores (b, h, n, c): what is added to where scores start, but not to the anchor; a constant
        of the backward. Draws of `refattn.philox.normal`, which a seed fixes, take scores off an unstable rest.
    """

    at: Array | None = None
    jitter: Array | None = None


class AtOwnScore:
    """b_j = sigmoid(s_jj): a score between 0 and 1 that needs no weights of its own."""

    def forward(self, scores: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c); `own` (j, j) tells whether i = j."""
        xp = namespace(scores)
        to_itself = xp.sum(xp.where(own, scores, 0.0), axis=-1, keepdims=True)  # (b, h, j, 1): s_jj
        return 0.5 + 0.5 * xp.tanh(0.5 * to_itself)

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return parts of the gradients of scores, of attention and of v, which has `groups` heads."""
        return namespace(start).where(own, d_start * start * (1.0 - start), 0.0), None, None


class AtOwnScoreForAll(AtOwnScore):
    """b_jc = sigmoid(s_jj): where each token starts is the same for every query c."""

    def forward(self, scores: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c)."""
        return super().forward(scores, attention, v, own) + zeros((scores.shape[2],), scores)

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return parts of the gradients of scores, of attention and of v."""
        summed = namespace(start).sum(d_start, axis=-1, keepdims=True)  # (b, h, j, 1)
        return super().backward(start[..., :1], own, summed, groups)


class AtAttention:
    """b_jc = a_cj: what flows is the attention distribution of each query."""

    def forward(self, scores: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c)."""
        return namespace(scores).matrix_transpose(attention)

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return parts of the gradients of scores, of attention and of v."""
        return None, namespace(d_start).matrix_transpose(d_start), None


class AtValues:
    """b_jc = v_jc: what flows are the values, which are the output in the end."""

    def forward(self, scores: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c)."""
        return repeat_heads(v, scores.shape[1])

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return parts of the gradients of scores, of attention and of v."""
        return None, None, sum_heads(d_start, groups)


@dataclass(frozen=True)
class AtGiven:
    """b_j as it was given: a learned start, for nodes that are keys and meet no query of their own."""

    at: Array

    def forward(self, scores: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c)."""
        return self.at[..., None] + zeros((*scores.shape[:2], scores.shape[3], 1), scores)

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return nothing: it is an input of its own."""
        return None, None, None


Starts = AtOwnScore | AtAttention | AtValues | AtGiven
