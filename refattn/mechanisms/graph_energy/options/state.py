"""What flows: a score of each token, a distribution of each query, or the values.

A state says where its scores start, how they become what query i reads of token j (GE.10), and by which weight the best
token of a row that was emptied is found::

    [GE.of_token]  u_ij = a_ij phi(y_j)             rank a_ij x_j
    [GE.of_query]  u_ij = phi(y_ji) if i may attend j, else 0       rank x_ji
    [GE.of_feature]  o_i = y_i                      the scores are the output; there is no u, z, p

with phi(y) = max(y, 0). Backwards::

    [dGE.of_token]  da_ij = du_ij phi(y_j),  dphi_j = sum_i du_ij a_ij
    [dGE.of_query]  dphi_ji = du_ij if i may attend j, else 0
    [dGE.of_feature]  dy_i = do_i

In "query" node j exists in channel c, m_jc = 1, if query c may attend it; a pull needs both its ends.
"""

from __future__ import annotations

from typing import Any, ClassVar

from refattn.mechanisms.graph_energy.forces import Number
from refattn.mechanisms.graph_energy.options.start import AtAttention, AtOwnScore, AtValues, Starts
from refattn.ops.masks import where_allowed
from refattn.xp import Array, namespace, zeros


class State:
    """What flows."""

    name: ClassVar[str]
    coupling: ClassVar[str] = "sin"
    """What the coupling is if it is not given."""
    signed: ClassVar[bool] = False
    """Whether a threshold compares |x| if that is not said."""
    weighs: ClassVar[bool] = True
    """Whether scores weigh values; otherwise they are the output."""
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

    def parts(self, attention: Any, rows: Array, allowed: Array | None) -> Array:
        """Return u (b, h, i, j) for phi(y) as (b, h, c, j)."""
        raise NotImplementedError

    def parts_backward(self, attention: Any, rows: Array, allowed: Array | None, d_parts: Array) -> tuple[Any, Array]:
        """Return a part of the gradient of attention, and that of phi(y) as (b, h, j, c)."""
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

    def parts(self, attention: Any, rows: Array, allowed: Array | None) -> Array:
        """Return a_ij phi(y_j)."""
        return attention * rows

    def parts_backward(self, attention: Any, rows: Array, allowed: Array | None, d_parts: Array) -> tuple[Any, Array]:
        """Return du_ij phi(y_j), and sum_i du_ij a_ij."""
        d_rows = namespace(rows).sum(d_parts * attention, axis=2)[..., None]  # (b, h, j, c)
        return d_parts * rows, d_rows

    def rank(self, attention: Any, x: Array) -> Array:
        """Return a_ij x_j."""
        return attention * namespace(x).matrix_transpose(x)


class Query(State):
    """A distribution of each query: attention itself flows, and may be causal with an energy."""

    name, starts = "query", AtAttention()

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
        xp = namespace(like)
        return None if allowed is None else xp.astype(xp.matrix_transpose(allowed), like.dtype)

    def parts(self, attention: Any, rows: Array, allowed: Array | None) -> Array:
        """Return phi(y_ji)."""
        return where_allowed(allowed, rows, 0.0)

    def parts_backward(self, attention: Any, rows: Array, allowed: Array | None, d_parts: Array) -> tuple[Any, Array]:
        """Return 0, and du_ij."""
        d_rows = namespace(rows).matrix_transpose(where_allowed(allowed, d_parts, 0.0))  # (b, h, j, c)
        return zeros(attention.shape, d_parts), d_rows

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


STATES: dict[str, State] = {"token": Token(), "query": Query(), "feature": Feature()}
