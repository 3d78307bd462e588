"""Faults of parts that are merged by their lse, and of lse itself."""

from __future__ import annotations

import math

import numpy as np

from refattn.verify.bugs.emulator import Array, Flash
from refattn.verify.bugs.fault import fault, wrong


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


@wrong(Split.weights, "SM.5", "SM.lse", link="vllm-project/vllm/pull/28840", tiles="columns")
def merged_with_powers_of2(self: Split, lses: Array, top: Array) -> Array:
    """Parts whose lse is natural are merged as if it were to base 2."""
    return np.exp2(lses - top)


@fault("SM.5", "SM.lse", link="SHI-Labs/NATTEN/pull/202", tiles="columns")
class MergedWithoutMaximum(Split):
    """Parts are merged by exp(lse), without a maximum: large scores overflow."""

    def merged(self, outs: Array, lses: Array) -> tuple[Array, Array, Array]:
        if len(lses) == 1:
            return super().merged(outs, lses)
        wide = lses.astype(np.float64)
        weights = np.where(wide > 88.7, np.inf, np.exp(np.minimum(wide, 88.7))).astype(lses.dtype)
        total, acc = np.sum(weights, axis=0), np.sum(weights * outs, axis=0)
        return np.where(total > 0.0, np.zeros_like(total), -np.inf).astype(lses.dtype), total, acc


@wrong(Split.part_lse, "SM.total", "SM.5", "SM.lse", link="ROCm/aiter/pull/3641", tiles="columns")
def empty_part_counts(self: Split, top: Array, total: Array) -> Array:
    """A part of which nothing may be attended counts with an lse of 0."""
    return np.where(total > 0.0, Split.part_lse(self, top, total), 0.0)


@wrong(Split.part_out, "SM.total", "SM.5", "SM.lse", link="ROCm/aiter/pull/4420", tiles="columns")
def empty_part_is_nan(self: Split, acc: Array, total: Array) -> Array:
    """A part of which nothing may be attended is 0 divided by 0, and makes all of the row NaN."""
    return acc / total


@wrong(Split.merged, "SM.total", "SM.5", link="ROCm/vllm/pull/22", tiles="columns")
def parts_left_out(self: Split, outs: Array, lses: Array) -> tuple[Array, Array, Array]:
    """Only the first two parts are merged."""
    return Split.merged(self, outs[:2], lses[:2])


@wrong(Split.weights, "SM.5", link="Dao-AILab/flash-attention/pull/2388", tiles="columns")
def parts_of_next_row(self: Split, lses: Array, top: Array) -> Array:
    """The lse of the parts are read at the wrong stride: a row's parts are weighted by those of the next row."""
    other = np.roll(lses, -1, axis=-2)
    return np.exp(other - self.shift(np.max(other, axis=0)))


@wrong(Flash.lse_given, "SM.lse", "lse to base 2", "lse", link="flashinfer-ai/flashinfer/issues/4485")
def lse_to_base2(self: Flash, lse: Array) -> Array:
    """lse is to base 2."""
    return lse / math.log(2.0)


@wrong(Flash.lse_given, "SM.lse", "lse", link="pytorch/pytorch/issues/181645")
def lse_times_ln2(self: Flash, lse: Array) -> Array:
    """lse is natural, and multiplied by ln 2 once more."""
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


@wrong(Flash.lse_given, "SM.lse", "lse", link="meta-pytorch/attention-gym/issues/37")
def lse_of_zeros(self: Flash, lse: Array) -> Array:
    """lse is never written: it is 0."""
    return np.zeros_like(lse)


@wrong(Flash.lse_given, "SM.lse", "lse", link="ROCm/aiter/pull/3334")
def lse_of_centred_keys(self: Flash, lse: Array) -> Array:
    """The mean of the keys is subtracted before the scores, and lse is that of what remains."""
    mean = np.mean(self.k, axis=2, keepdims=True) if self.n_k else np.zeros_like(self.k[:, :, :1])
    shift = self.scaled(self.q @ np.swapaxes(mean, -1, -2))[..., 0] if self.n_k else 0.0
    return lse - shift


@wrong(Flash.lse_given, "SM.lse", "lse", link="Dao-AILab/flash-attention/issues/648")
def lse_of_other_heads(self: Flash, lse: Array) -> Array:
    """The heads of lse are in another order: with grouped heads, group by group of positions."""
    heads, groups = self.plane
    return lse[:, np.argsort(np.arange(heads) % max(min(heads, groups), 1), kind="stable")]


@wrong(Flash.lse_given, "SM.lse", "lse", link="feifeibear/long-context-attention/issues/122")
def lse_with_padded_stride(self: Flash, lse: Array) -> Array:
    """lse is written with rows of a multiple of 32, and read without the padding."""
    padded = np.pad(lse, ((0, 0), (0, 0), (0, -self.n_q % 32)))
    return padded.reshape(-1)[: lse.size].reshape(lse.shape)
