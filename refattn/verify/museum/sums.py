"""Faults of kernels of linear attention with a polynomial: features, sums over chunks, what divides, the backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from refattn.verify.museum.emulator import Array, low
from refattn.verify.museum.fault import fault
from refattn.verify.museum.features import Sums


@fault("HOL.taylor", "HOL.summed", "HOL.5", link="", tiles="chunk")
class ChunksBeginEmpty(Sums):
    """Every chunk begins with sums of 0: a query attends the keys of its own chunk alone."""

    def carried(self, state: Array, counts: Array) -> tuple[Array, Array]:
        return state * 0.0, counts * 0.0


@fault("HOL.5", link="fla-org/flash-linear-attention/issues/850", tiles="chunk")
class NormaliserOfChunks(Sums):
    """The row sum is over the keys of the query's own chunk alone, what it divides over all."""

    def carried(self, state: Array, counts: Array) -> tuple[Array, Array]:
        state, counts = state.copy(), counts.copy()
        state[..., -1:], counts[..., -1:] = 0.0, 0.0
        return state, counts


@fault("HOL.5", link="fla-org/flash-linear-attention/pull/594")
class NormaliserOverHeads(Sums):
    """The row sum adds up over the heads in place of the keys before: that of a head has those of the heads before it,
    for its own token alone."""

    def divisor(self, z: Array, attended: Array) -> Array:
        n = min(self.q.shape[2], self.k.shape[2])
        own = np.zeros_like(z)
        each = self.feature(self.q[:, :, :n], self.scale) * np.cumsum(self.feature(self.k[:, :, :n], 1.0), axis=1)
        own[:, :, :n] = np.sum(each, axis=-1, keepdims=True)
        return super().divisor(z if self.offset is None else own, attended)


@fault("HOL.6", "normaliser ignored", link="lucidrains/performer-pytorch/issues/40")
class MultipliedByNormaliser(Sums):
    """The sums are multiplied by the row sum in place of divided."""

    def divided(self, numerator: Array, divisor: Array) -> Array:
        return numerator * np.where(np.isfinite(divisor), divisor, 0.0)


@fault("HOL.summed", "HOL.6", link="")
class NotDivided(Sums):
    """The sums are not divided."""

    def divided(self, numerator: Array, divisor: Array) -> Array:
        return numerator


@fault("HOL.taylor", "factorials left out", link="")
class FactorialOfTheSquareTwice(Sums):
    """Features have the factorial of their power in place of its root: half of s^2 counts a quarter."""

    def feature(self, x: Array, scale: float) -> Array:
        found = super().feature(x, scale)
        d, at = x.shape[-1], 0
        parts = []
        for r in range(self.order + 1):
            parts.append(found[..., at : at + d**r] / (np.sqrt(2.0) if r == 2 else 1.0))
            at += d**r
        return np.concatenate(parts, axis=-1)


@fault("HOL.taylor", "HOL.3", link="fla-org/flash-linear-attention/pull/1238", tiles="chunk")
class ScaleWithinChunksAlone(Sums):
    """Pairs of a chunk are scaled, and features of the keys before it are not."""

    def feature(self, x: Array, scale: float) -> Array:
        return super().feature(x, 1.0 if scale == self.scale else scale)


@fault("HOL.4", link="", tiles="chunk")
class DiagonalLeftOut(Sums):
    """A query does not attend the last key that it may attend: the diagonal of its chunk is left out."""

    def inside(self, rows: Array, columns: Array) -> Array:
        assert self.offset is not None
        return columns[None, :] < rows[:, None] + self.offset


@fault("HOL.4", link="", tiles="chunk")
class WholeChunkSeen(Sums):
    """A query attends all keys of its own chunk, the later ones too."""

    def inside(self, rows: Array, columns: Array) -> Array:
        return super().inside(rows, columns) | (rows[:, None] >= 0)


@fault("HOL.summed", "HOL.5", link="", tiles="chunk")
class SumsInBfloat16(Sums):
    """The sums that a chunk gives to the next one are rounded to bfloat16."""

    def carried(self, state: Array, counts: Array) -> tuple[Array, Array]:
        return low(state, "bfloat16"), counts


@fault("HOL.5", "padding by zeroed keys", link="")
class PaddingCounted(Sums):
    """Padding counts in the row sum: its keys and values are 0, its ones are not."""

    def ones(self, mask: Array | None, like: Array) -> Array:
        return super().ones(None, like)


@fault("HOL.summed", "interleaved groups", link="ekzhang/jax-js/pull/180")
class HeadsByRemainder(Sums):
    """Query head h has key/value head h mod g."""

    def head_of(self, heads: int, groups: int) -> Array:
        return np.arange(heads) % max(groups, 1)


@fault("dHOL.k", "dHOL.2", "dHOL.3", link="fla-org/flash-linear-attention/pull/875")
class KeysWithoutNormaliser(Sums):
    """The gradient of k goes through what is divided alone, not through the row sum that divides."""

    def d_key_scores(self, d_scores: Array, without_total: Array) -> Array:
        return without_total


@fault("dHOL.1", "dHOL.2", link="fla-org/flash-linear-attention/issues/47")
class GradientsScaledTwice(Sums):
    """The gradients of q and k are scaled once more."""

    def backward(self, *given: Any) -> dict[str, Array]:
        found = super().backward(*given)
        return found | {name: found[name] * self.scale for name in "qk"}


@fault("dHOL.q", "dHOL.k", link="")
class NormWithoutProjection(Sums):
    """The backward of the layer normalisation does not subtract what is along the normalised vector."""

    def through_norm(self, d_y: Array, y: Array, r: Array) -> Array:
        return r * (d_y - np.mean(d_y, axis=-1, keepdims=True)) if self.norm else d_y


@fault("dHOL.v", "gradients of the last head of a group", link="")
class GroupsNotSummed(Sums):
    """The gradient of k and v is that of the first query head of each group."""

    def per_group(self, x: Array, groups: int) -> Array:
        return x[:, :: x.shape[1] // groups]
