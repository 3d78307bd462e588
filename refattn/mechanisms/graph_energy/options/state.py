"""What flows: a score of each token, once or for every prefix, a distribution of each query, or the values.

A state says where its scores start, how they become what query i reads of token j (GE.10), and by which weight the best
token of a row that was emptied is found::

    [GE.of_token]  u_ij = w_ij phi(y_j)             rank a_ij x_j
    [GE.of_prefix]  u_ij = w_ij phi(y_ji)           rank a_ij x_ji
    [GE.of_query]  u_ij = phi(y_ji) if i may attend j, else 0       rank x_ji
    [GE.of_feature]  o_i = y_i                      the scores are the output; there is no u, z, p

with phi(y) = max(y, 0), and w_i the softmax of m_i over the j with phi > 0: a_ij may round to 0 for all of these.
Backwards::

    [dGE.of_token]  dm_ij = w_ij (dw_ij - sum_l w_il dw_il), dw_ij = du_ij phi(y_j),  dphi_j = sum_i du_ij w_ij
    [dGE.of_prefix]  dm_ij = w_ij (dw_ij - sum_l w_il dw_il), dw_ij = du_ij phi(y_ji),  dphi_ji = du_ij w_ij
    [dGE.of_query]  dphi_ji = du_ij if i may attend j, else 0
    [dGE.of_feature]  dy_i = do_i

In "query" and "prefix" node j exists in channel c, m_jc = 1, if query c may attend it; a pull needs both its ends. So
where scores are causal channel c is the flow of "token" on the tokens up to c alone, and nothing later acts on it. On a
symmetric graph whose link w_ij depends on nothing after i and j, such as "causal_mirror", it goes down the energy of
this prefix, which no token after c changes::

    E_c = sum_(j <= c) F(x_jc; b_j) + kappa/2 sum_(i, j <= c) w_ij G(x_jc - x_ic)

One score of each token for all queries cannot have that: a symmetric link pulls at its earlier token, too, and what an
earlier query reads would depend on the later one.

Where scores start, b (GE.5); with a jitter the first x is b + m jitter.

::

    [GE.own_score]  b_j = sigmoid(s_jj)         state "token": how well a token matches itself
    [GE.own_scores]  b_jc = sigmoid(s_jj)       state "prefix": the same for every query c
    [GE.attention]  b_jc = a_cj                 state "query": the attention of query c
    [GE.features]  b_jc = v_jc                  state "feature": the values themselves
    [GE.started]  b_j = what the caller gives   state "token"; its gradient is summed over what it was broadcast to

Backwards: ds_jj += db_j b_j (1 - b_j), in "prefix" for each c; da_cj += db_jc; dv = db.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from refattn.mechanisms.graph_energy.forces import Number
from refattn.ops.heads import repeat_heads, sum_heads
from refattn.ops.masks import where_allowed
from refattn.ops.softmax import softmax_and_sums, softmax_backward
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

    def forward(self, matches: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c); `own` (j, j) tells whether i = j."""
        xp = namespace(matches)
        to_itself = xp.sum(xp.where(own, matches, 0.0), axis=-1, keepdims=True)  # (b, h, j, 1): s_jj
        return 0.5 + 0.5 * xp.tanh(0.5 * to_itself)

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return parts of the gradients of matches, of attention and of v, which has `groups` heads."""
        return namespace(start).where(own, d_start * start * (1.0 - start), 0.0), None, None


class AtOwnScoreForAll(AtOwnScore):
    """b_jc = sigmoid(s_jj): where each token starts is the same for every query c."""

    def forward(self, matches: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c)."""
        return super().forward(matches, attention, v, own) + zeros((matches.shape[2],), matches)

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return parts of the gradients of matches, of attention and of v."""
        summed = namespace(start).sum(d_start, axis=-1, keepdims=True)  # (b, h, j, 1)
        return super().backward(start[..., :1], own, summed, groups)


class AtAttention:
    """b_jc = a_cj: what flows is the attention distribution of each query."""

    def forward(self, matches: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c)."""
        return namespace(matches).matrix_transpose(attention)

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return parts of the gradients of matches, of attention and of v."""
        return None, namespace(d_start).matrix_transpose(d_start), None


class AtValues:
    """b_jc = v_jc: what flows are the values, which are the output in the end."""

    def forward(self, matches: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c)."""
        return repeat_heads(v, matches.shape[1])

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return parts of the gradients of matches, of attention and of v."""
        return None, None, sum_heads(d_start, groups)


@dataclass(frozen=True)
class AtGiven:
    """b_j as it was given: a learned start, for nodes that are keys and meet no query of their own."""

    at: Array

    def forward(self, matches: Array, attention: Any, v: Array, own: Array) -> Array:
        """Return b (b, h, j, c)."""
        return self.at[..., None] + zeros((*matches.shape[:2], matches.shape[3], 1), matches)

    def backward(self, start: Array, own: Array, d_start: Array, groups: int) -> Parts:
        """Return nothing: it is an input of its own."""
        return None, None, None


Starts = AtOwnScore | AtAttention | AtValues | AtGiven


class State:
    """What flows."""

    name: ClassVar[str]
    coupling: ClassVar[str] = "sin"
    """What the coupling is if it is not given."""
    signed: ClassVar[bool] = False
    """Whether a threshold compares |x| if that is not said."""
    weighs: ClassVar[bool] = True
    """Whether scores weigh values; otherwise they are the output."""
    per_query: ClassVar[bool] = False
    """Whether each query has scores of its own, which flow by themselves."""
    starts: ClassVar[Starts]

    def channels(self, queries: int, width: int) -> int:
        """Return how many scores a node has."""
        raise NotImplementedError

    def usual_tau(self, allowed: Array | None, start: Array) -> Number:
        """Return what tau is if it is not given."""
        raise NotImplementedError

    def visible(self, allowed: Array | None, like: Array) -> Array | None:
        """Return m (..., j, c) as numbers, or None if every node exists."""
        return None

    def near(
        self, masked: Any, rows: Array, allowed: Array | None, dropped: Array | None
    ) -> tuple[Array, Array, Array]:
        """Return by what phi(y) is multiplied in u and du/dphi, (b, h, i, j), and whether i reads a token (b, h, i, 1).

        phi(y) comes in as `rows` (b, h, c, j). The first is 0 where this is 0; the second is the same, but with x as
        `dropped` (b, h, c, j) it is 0 only where x is not above 0.
        """
        raise NotImplementedError

    def backward(self, near: Array, passed: Array, rows: Array, d_parts: Array) -> tuple[Array | None, Array]:
        """Return a part of the gradient of the masked matches, if any, and that of phi(y) as (b, h, j, c)."""
        raise NotImplementedError

    def rank(self, attention: Any, x: Array) -> Array:
        """Return by what the best token of a row is found, (b, h, i, j)."""
        raise NotImplementedError


class Token(State):
    """A score of each token, the same for all queries: with equal scores it is softmax attention."""

    name, starts = "token", AtOwnScore()

    def channels(self, queries: int, width: int) -> int:
        """Return 1."""
        return 1

    def usual_tau(self, allowed: Array | None, start: Array) -> Number:
        """Return 0.4: scores are between 0 and 1, and 1/2 for a token that matches itself neither well nor badly."""
        return 0.4

    def near(
        self, masked: Any, rows: Array, allowed: Array | None, dropped: Array | None
    ) -> tuple[Array, Array, Array]:
        """Return w, du/dphi, and whether there is a j to read."""
        xp = namespace(rows)
        near, top, total = softmax_and_sums(xp.where(rows != 0.0, masked, -math.inf))  # NaN propagates
        filled = top != -math.inf
        if dropped is None:
            return near, near, filled
        others = xp.where(filled & (dropped > 0.0), masked, -math.inf)
        return near, xp.exp(others - xp.where(filled, top, 0.0)) / total, filled

    def backward(self, near: Array, passed: Array, rows: Array, d_parts: Array) -> tuple[Array | None, Array]:
        """Return the gradient through w, and sum_i du_ij w_ij."""
        return softmax_backward(near, d_parts * rows), namespace(near).sum(d_parts * passed, axis=2)[..., None]

    def rank(self, attention: Any, x: Array) -> Array:
        """Return a_ij x_j."""
        return attention * namespace(x).matrix_transpose(x)


class Prefix(Token):
    """A score of each token for every query, on the graph of what the query may attend; causal with an energy."""

    name, starts, per_query = "prefix", AtOwnScoreForAll(), True

    def channels(self, queries: int, width: int) -> int:
        """Return the number of queries."""
        return queries

    def visible(self, allowed: Array | None, like: Array) -> Array | None:
        """Return 1 if query c may attend j, else 0."""
        return _seen(allowed, like)

    def backward(self, near: Array, passed: Array, rows: Array, d_parts: Array) -> tuple[Array | None, Array]:
        """Return the gradient through w, and du_ij w_ij."""
        return softmax_backward(near, d_parts * rows), namespace(near).matrix_transpose(d_parts * passed)


class Query(State):
    """A distribution of each query: attention itself flows, and may be causal with an energy."""

    name, starts, per_query = "query", AtAttention(), True

    def channels(self, queries: int, width: int) -> int:
        """Return the number of queries."""
        return queries

    def usual_tau(self, allowed: Array | None, start: Array) -> Number:
        """Return a quarter of the mean weight: no row can be emptied by it."""
        if allowed is None:
            return 0.25 / max(start.shape[2], 1)
        xp = namespace(start)
        seen = xp.sum(xp.astype(allowed, start.dtype), axis=-1, keepdims=True)
        return 0.25 / xp.matrix_transpose(xp.where(seen > 0.0, seen, 1.0))

    def visible(self, allowed: Array | None, like: Array) -> Array | None:
        """Return 1 if query c may attend j, else 0."""
        return _seen(allowed, like)

    def near(
        self, masked: Any, rows: Array, allowed: Array | None, dropped: Array | None
    ) -> tuple[Array, Array, Array]:
        """Return 1 where i may attend j, else 0, twice, and whether some phi(y_ji) is not 0 there."""
        xp = namespace(rows)
        near = where_allowed(allowed, xp.ones_like(masked), 0.0)
        return near, near, xp.any(near * rows != 0.0, axis=-1, keepdims=True)

    def backward(self, near: Array, passed: Array, rows: Array, d_parts: Array) -> tuple[Array | None, Array]:
        """Return nothing, and du_ij where i may attend j."""
        return None, namespace(near).matrix_transpose(d_parts * passed)

    def rank(self, attention: Any, x: Array) -> Array:
        """Return x_ji."""
        return namespace(x).matrix_transpose(x)


class Feature(State):
    """The values themselves: diffusion of features on the graph of attention."""

    name, starts = "feature", AtValues()
    coupling, signed, weighs = "tanh", True, False

    def channels(self, queries: int, width: int) -> int:
        """Return the width of a value."""
        return width

    def usual_tau(self, allowed: Array | None, start: Array) -> Number:
        """Return 0: all are kept."""
        return 0.0


def _seen(allowed: Array | None, like: Array) -> Array | None:
    xp = namespace(like)
    return None if allowed is None else xp.astype(xp.matrix_transpose(allowed), like.dtype)


STATES: dict[str, State] = {"token": Token(), "prefix": Prefix(), "query": Query(), "feature": Feature()}
