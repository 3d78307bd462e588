"""Faults of kernels of linear attention with a polynomial: features, sums over chunks, what divides, the backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.verify.bugs.emulator import Array, low
from refattn.verify.bugs.fault import wrong
from refattn.verify.bugs.features import Sums


@wrong(Sums.carried, "HOL.taylor", "HOL.summed", "HOL.5", link="", tiles="chunk")
def chunks_begin_empty(self: Sums, state: Array, counts: Array) -> tuple[Array, Array]:
    """Every chunk begins with sums of 0: a query attends the keys of its own chunk alone."""
    return state * 0.0, counts * 0.0


@wrong(Sums.carried, "HOL.5", link="fla-org/flash-linear-attention/issues/850", tiles="chunk")
def normaliser_of_chunks(self: Sums, state: Array, counts: Array) -> tuple[Array, Array]:
    """The row sum is over the keys of the query's own chunk alone, what it divides over all."""
    state, counts = state.copy(), counts.copy()
    state[..., -1:], counts[..., -1:] = 0.0, 0.0
    return state, counts


@wrong(Sums.divisor, "HOL.5", link="fla-org/flash-linear-attention/pull/594")
def normaliser_over_heads(self: Sums, z: Array, attended: Array) -> Array:
    """The row sum adds up over the heads in place of the keys before: that of a head has those of the heads before it,
    for its own token alone."""
    n = min(self.q.shape[2], self.k.shape[2])
    own = np.zeros_like(z)
    each = self.feature(self.q[:, :, :n], self.scale) * np.cumsum(self.feature(self.k[:, :, :n], 1.0), axis=1)
    own[:, :, :n] = np.sum(each, axis=-1, keepdims=True)
    return Sums.divisor(self, z if self.offset is None else own, attended)


@wrong(Sums.divided, "HOL.6", "normaliser ignored", link="lucidrains/performer-pytorch/issues/40")
def multiplied_by_normaliser(self: Sums, numerator: Array, divisor: Array) -> Array:
    """The sums are multiplied by the row sum in place of divided."""
    return numerator * np.where(np.isfinite(divisor), divisor, 0.0)


@wrong(Sums.divided, "HOL.summed", "HOL.6", link="")
def not_divided(self: Sums, numerator: Array, divisor: Array) -> Array:
    """The sums are not divided."""
    return numerator


@wrong(Sums.feature, "HOL.taylor", "factorials left out", link="")
def factorial_of_the_square_twice(self: Sums, x: Array, scale: float) -> Array:
    """Features have the factorial of their power in place of its root: half of s^2 counts a quarter."""
    found = Sums.feature(self, x, scale)
    d, at = x.shape[-1], 0
    parts = []
    for r in range(self.order + 1):
        parts.append(found[..., at : at + d**r] / (np.sqrt(2.0) if r == 2 else 1.0))
        at += d**r
    return np.concatenate(parts, axis=-1)


@wrong(Sums.feature, "HOL.taylor", "HOL.3", link="fla-org/flash-linear-attention/pull/1238", tiles="chunk")
def scale_within_chunks_alone(self: Sums, x: Array, scale: float) -> Array:
    """Pairs of a chunk are scaled, and features of the keys before it are not."""
    return Sums.feature(self, x, 1.0 if scale == self.scale else scale)


@wrong(Sums.inside, "HOL.4", link="", tiles="chunk")
def diagonal_left_out(self: Sums, rows: Array, columns: Array) -> Array:
    """A query does not attend the last key that it may attend: the diagonal of its chunk is left out."""
    assert self.offset is not None
    return columns[None, :] < rows[:, None] + self.offset


@wrong(Sums.inside, "HOL.4", link="", tiles="chunk")
def whole_chunk_seen(self: Sums, rows: Array, columns: Array) -> Array:
    """A query attends all keys of its own chunk, the later ones too."""
    return Sums.inside(self, rows, columns) | (rows[:, None] >= 0)


@wrong(Sums.carried, "HOL.summed", "HOL.5", link="", tiles="chunk")
def sums_in_bfloat16(self: Sums, state: Array, counts: Array) -> tuple[Array, Array]:
    """The sums that a chunk gives to the next one are rounded to bfloat16."""
    return low(state, "bfloat16"), counts


@wrong(Sums.ones, "HOL.5", "padding by zeroed keys", link="")
def padding_counted(self: Sums, mask: Array | None, like: Array) -> Array:
    """Padding counts in the row sum: its keys and values are 0, its ones are not."""
    return Sums.ones(self, None, like)


@wrong(Sums.head_of, "HOL.summed", "interleaved groups", link="ekzhang/jax-js/pull/180")
def heads_by_remainder(self: Sums, heads: int, groups: int) -> Array:
    """Query head h has key/value head h mod g."""
    return np.arange(heads) % max(groups, 1)


@wrong(Sums.d_key_scores, "dHOL.k", "dHOL.2", "dHOL.3", link="fla-org/flash-linear-attention/pull/875")
def keys_without_normaliser(self: Sums, d_scores: Array, without_total: Array) -> Array:
    """The gradient of k goes through what is divided alone, not through the row sum that divides."""
    return without_total


@wrong(Sums.backward, "dHOL.1", "dHOL.2", link="fla-org/flash-linear-attention/issues/47")
def gradients_scaled_twice(self: Sums, *given: Any) -> dict[str, Array]:
    """The gradients of q and k are scaled once more."""
    found = Sums.backward(self, *given)
    return found | {name: found[name] * self.scale for name in "qk"}


@wrong(Sums.through_norm, "dHOL.q", "dHOL.k", link="")
def norm_without_projection(self: Sums, d_y: Array, y: Array, r: Array) -> Array:
    """The backward of the layer normalisation does not subtract what is along the normalised vector."""
    return r * (d_y - np.mean(d_y, axis=-1, keepdims=True)) if self.norm else d_y


@wrong(Sums.per_group, "dHOL.v", "gradients of the last head of a group", link="")
def groups_not_summed(self: Sums, x: Array, groups: int) -> Array:
    """The gradient of k and v is that of the first query head of each group."""
    return x[:, :: x.shape[1] // groups]
