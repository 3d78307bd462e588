"""Faults of parts that are merged by their lse, and of lse itself."""

from __future__ import annotations

import math

import numpy as np

from refattn.verify.museum.emulator import Array, Flash
from refattn.verify.museum.fault import fault


class Split(Flash):
    """Each tile of keys is attended apart, and the outputs are merged by their lse."""

    def attend(self, rows: Array) -> tuple[Array, Array, Array]:
        outs, lses = [], []
        for start in self.starts(int(rows[0]), int(rows[-1]) + 1):
            top, total, acc = self.empty(rows)
            s = self.scores(rows, start)
            new = self.maximum(top, s)
            p = self.powers(s, top, new)
            total = self.summed(total, np.ones_like(total), p)
            acc = self.accumulated(acc, np.ones_like(total), self.dropped(p, rows, start), self.values(start))
            outs.append(self.part_out(acc, total))
            lses.append(self.part_lse(new, total))
        if not outs:
            return self.empty(rows)
        return self.merged(np.stack(outs), np.stack(lses))

    def part_out(self, acc: Array, total: Array) -> Array:
        return acc / np.where(total > 0.0, total, 1.0)

    def part_lse(self, top: Array, total: Array) -> Array:
        return self.lse_of(top, total)

    def merged(self, outs: Array, lses: Array) -> tuple[Array, Array, Array]:
        """Return the maximum, the sum and the accumulator of the parts together."""
        top = np.max(lses, axis=0)
        weights = self.weights(lses, self.shift(top))
        return top, np.sum(weights, axis=0), np.sum(weights * outs, axis=0)

    def weights(self, lses: Array, top: Array) -> Array:
        return np.exp(lses - top)


@fault("SM.5", "SM.lse", link="sgl-project/sglang/issues/40903", tiles="columns")
class MergedInBase2(Split):
    """Parts whose lse is to base 2 are merged as if it were natural."""

    def weights(self, lses: Array, top: Array) -> Array:
        return np.exp((lses - top) / math.log(2.0))

    def merged(self, outs: Array, lses: Array) -> tuple[Array, Array, Array]:
        _, total, acc = super().merged(outs, lses)
        top = np.max(lses, axis=0)
        right = np.sum(np.exp(lses - self.shift(top)), axis=0)  # lse is merged elsewhere, and right
        return top, right, acc / np.where(total > 0.0, total, 1.0) * right


@fault("SM.5", "SM.lse", link="vllm-project/vllm/pull/28840", tiles="columns")
class MergedWithPowersOf2(Split):
    """Parts whose lse is natural are merged as if it were to base 2."""

    def weights(self, lses: Array, top: Array) -> Array:
        return np.exp2(lses - top)


@fault("SM.total", "SM.5", "SM.lse", link="ROCm/aiter/pull/3641", tiles="columns")
class EmptyPartCounts(Split):
    """A part of which nothing may be attended counts with an lse of 0."""

    def part_lse(self, top: Array, total: Array) -> Array:
        return np.where(total > 0.0, super().part_lse(top, total), 0.0)


@fault("SM.total", "SM.5", "SM.lse", link="ROCm/aiter/pull/4420", tiles="columns")
class EmptyPartIsNaN(Split):
    """A part of which nothing may be attended is 0 divided by 0, and makes all of the row NaN."""

    def part_out(self, acc: Array, total: Array) -> Array:
        return acc / total


@fault("SM.total", "SM.5", link="ROCm/vllm/pull/22", tiles="columns")
class PartsLeftOut(Split):
    """Only the first two parts are merged."""

    def merged(self, outs: Array, lses: Array) -> tuple[Array, Array, Array]:
        return super().merged(outs[:2], lses[:2])


@fault("SM.5", link="Dao-AILab/flash-attention/pull/2388", tiles="columns")
class PartsOfNextRow(Split):
    """The lse of the parts are read at the wrong stride: a row's parts are weighted by those of the next row."""

    def weights(self, lses: Array, top: Array) -> Array:
        other = np.roll(lses, -1, axis=-2)
        return np.exp(other - self.shift(np.max(other, axis=0)))


@fault("SM.lse", "lse to base 2", "lse", link="flashinfer-ai/flashinfer/issues/4485")
class LseToBase2(Flash):
    """lse is to base 2."""

    def lse_given(self, lse: Array) -> Array:
        return lse / math.log(2.0)


@fault("SM.lse", "lse", link="pytorch/pytorch/issues/181645")
class LseTimesLn2(Flash):
    """lse is natural, and multiplied by ln 2 once more."""

    def lse_given(self, lse: Array) -> Array:
        return lse * math.log(2.0)


@fault("SM.lse", "lse without the maximum", "lse", link="Dao-AILab/flash-attention/issues/404")
class LseWithoutMaximum(Flash):
    """lse is the logarithm of the sum alone, without the maximum."""

    def forward(self) -> tuple[Array, Array]:
        self.logs = np.full((*self.q.shape[:3], 1), -np.inf, self.q.dtype)
        return super().forward()

    def attend(self, rows: Array) -> tuple[Array, Array, Array]:
        top, total, acc = super().attend(rows)
        self.logs[:, :, rows] = np.where(total > 0.0, np.log(np.where(total > 0.0, total, 1.0)), -np.inf)
        return top, total, acc

    def lse_given(self, lse: Array) -> Array:
        return self.logs[..., 0]


@fault("SM.lse", "lse", link="meta-pytorch/attention-gym/issues/37")
class LseOfZeros(Flash):
    """lse is never written: it is 0."""

    def lse_given(self, lse: Array) -> Array:
        return np.zeros_like(lse)


@fault("SM.lse", "lse", link="ROCm/aiter/pull/3334")
class LseOfCentredKeys(Flash):
    """The mean of the keys is subtracted before the scores, and lse is that of what remains."""

    def lse_given(self, lse: Array) -> Array:
        mean = np.mean(self.k, axis=2, keepdims=True) if self.n_k else np.zeros_like(self.k[:, :, :1])
        shift = self.scaled(self.q @ np.swapaxes(mean, -1, -2))[..., 0] if self.n_k else 0.0
        return lse - shift


@fault("SM.lse", "lse", link="Dao-AILab/flash-attention/issues/648")
class LseOfOtherHeads(Flash):
    """The heads of lse are in another order: with grouped heads, group by group of positions."""

    def lse_given(self, lse: Array) -> Array:
        head = np.argsort(np.arange(self.q.shape[1]) % max(len(set(self.groups)), 1), kind="stable")
        return lse[:, head]

    def head_of(self, heads: int, groups: int) -> Array:
        self.groups = super().head_of(heads, groups)
        return self.groups


@fault("SM.lse", "lse", link="feifeibear/long-context-attention/issues/122")
class LseWithPaddedStride(Flash):
    """lse is written with rows of a multiple of 32, and read without the padding."""

    def lse_given(self, lse: Array) -> Array:
        padded = np.pad(lse, ((0, 0), (0, 0), (0, -self.n_q % 32)))
        return padded.reshape(-1)[: lse.size].reshape(lse.shape)
