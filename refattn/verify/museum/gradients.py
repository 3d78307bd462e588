"""Faults of the backward: the output is right, and some gradient is not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.verify.museum.emulator import Array, Flash
from refattn.verify.museum.fault import fault
from refattn.verify.museum.memory import _layout

DELTA = "dSM.total"


@fault("dSM.4", "dSM.v", "d_out", link="Dao-AILab/flash-attention/issues/355")
class UpstreamOfOtherLayout(Flash):
    """The upstream gradient is stored with tokens before heads, and read with heads before tokens."""

    def upstream(self, d_out: Array) -> Array:
        return _layout(d_out)


@fault(DELTA, "dSM.3", link="flagos-ai/FlagAttention/pull/1")
class DeltaOfOtherLayout(Flash):
    """delta, the row sums of d_out * out, is computed as if they were stored with heads before tokens."""

    def delta(self, out: Array, d_out: Array) -> Array:
        return _layout(super().delta(out, d_out))


@fault(DELTA, "dSM.3", link="triton-lang/triton/pull/2020")
class DeltaOfHalfTheRows(Flash):
    """delta, the row sums of d_out * out, is computed for the first half of all rows alone."""

    def delta(self, out: Array, d_out: Array) -> Array:
        found = super().delta(out, d_out)
        at = np.arange(found.size).reshape(found.shape)
        return np.where(at < (found.size + 1) // 2, found, 0.0)


@fault(DELTA, "dSM.3", link="SHI-Labs/NATTEN/issues/347", tiles="rows")
class DeltaWraps(Flash):
    """The index of a row in delta, the row sums of d_out * out, wraps around."""

    def delta(self, out: Array, d_out: Array) -> Array:
        return super().delta(out, d_out)[:, :, np.arange(self.n_q) % self.rows]


@fault(DELTA, "dSM.3", link="Dao-AILab/flash-attention/pull/2481")
class DeltaOfHalfTheWidth(Flash):
    """delta, the row sums of d_out * out, is computed before all of d_out has come: from half of the width."""

    def delta(self, out: Array, d_out: Array) -> Array:
        half = (out.shape[-1] + 1) // 2
        return super().delta(out[..., :half], d_out[..., :half])


@fault(DELTA, "dSM.3", "inner product left out of the backward", link="Dao-AILab/flash-attention/pull/2756")
class DeltaNotThere(Flash):
    """delta, the row sums of d_out * out, is read before it is written: it is 0."""

    def delta(self, out: Array, d_out: Array) -> Array:
        return 0.0 * super().delta(out, d_out)


@fault("dSM.q", link="Dao-AILab/flash-attention/issues/359", tiles="columns")
class QueryGradientOverwritten(Flash):
    """The gradient of q is that of the last tile of keys alone: tiles overwrite each other's."""

    def add_query(self, d_q: Array, rows: Array, part: Array) -> None:
        d_q[:, :, rows] = part


@fault("dSM.q", "gradients without the scale", link="fla-org/flash-linear-attention/issues/47")
class QueryGradientWithoutScale(Flash):
    """The gradient of q is not scaled."""

    def scale_of_query(self) -> float:
        return 1.0


@fault("dSM.k", "gradients without the scale", link="Dao-AILab/flash-attention/issues/2651")
class KeyGradientWithoutScale(Flash):
    """The gradient of k is not scaled."""

    def scale_of_key(self) -> float:
        return 1.0


@fault("dSM.k", "dSM.v", "gradients of the last head of a group", link="marin-community/levanter/pull/449")
class GroupGradientOverwritten(Flash):
    """The gradients of k and v are those of the last query head of a group: they are not summed."""

    def per_group(self, d_x: Array, groups: int) -> Array:
        times = d_x.shape[1] // max(groups, 1)
        return d_x[:, times - 1 :: times] if times else d_x


@fault("dSM.k", "dSM.v", link="fla-org/flash-linear-attention/pull/384")
class GroupGradientOfQueryHead(Flash):
    """The gradients of k and v of head g are those of query head g alone."""

    def per_group(self, d_x: Array, groups: int) -> Array:
        return d_x[:, :groups]


@fault("dSM.k", "dSM.v", link="XunhaoLai/native-sparse-attention-triton/issues/27")
class GroupGradientInterleaved(Flash):
    """The gradients of k and v are summed over other query heads than those that share them: h mod g."""

    def per_group(self, d_x: Array, groups: int) -> Array:
        found = np.zeros((d_x.shape[0], groups, *d_x.shape[2:]), d_x.dtype)
        for head in range(d_x.shape[1]):
            found[:, head % groups] += d_x[:, head]
        return found


@fault("dSM.4", link="lucidrains/flash-attention-jax/pull/15")
class WeightGradientOfWidthOfKeys(Flash):
    """The gradient of the weights sums over as many columns of v as q and k have."""

    def d_weights(self, d_out: Array, v: Array) -> Array:
        d = self.q.shape[-1]
        return super().d_weights(d_out[..., :d], v[..., :d])


@fault("dSM.v", link="Dao-AILab/flash-attention/issues/2552")
class ValueGradientColumns(Flash):
    """The second half of the columns of v's gradient is stored in the wrong place."""

    def backward(self, out: Array, lse: Array, d_out: Array, groups: int) -> dict[str, Array]:
        found = super().backward(out, lse, d_out, groups)
        d_v = found["d_v"].copy()
        half = d_v.shape[-1] // 2
        d_v[..., half:] = np.roll(d_v[..., half:], 1, axis=-1)
        return found | {"d_v": d_v}


@fault("dSM.2", "dSM.v", "inner product over masked keys", link="ai-bond/flash-attention-v100/pull/13")
class BackwardNotCausal(Flash):
    """The backward does not know of the causal mask."""

    def recomputed(self, rows: Array, start: int, lse: Array) -> Array:
        offset, self.offset = self.offset, None
        found = super().recomputed(rows, start, lse)
        self.offset = offset
        return found

    def visits(self, rows: Array, start: int) -> bool:
        return True


@fault("dSM.2", "dSM.v", link="meta-pytorch/attention-gym/pull/200")
class BackwardLseOfOtherBase(Flash):
    """The backward takes the natural lse for one to base 2."""

    def lse_read(self, lse: Array) -> Array:
        return lse * math.log(2.0)


@fault("dSM.k", "dSM.v", link="pytorch/pytorch/issues/153799", tiles="rows")
class PaddedRowsNaN(Flash):
    """The queries that pad the last tile have an lse of -inf, and make the gradients of k and v NaN."""

    def backward(self, out: Array, lse: Array, d_out: Array, groups: int) -> dict[str, Array]:
        found = super().backward(out, lse, d_out, groups)
        if self.n_q % self.rows == 0:
            return found
        return found | {name: np.full_like(found[name], np.nan) for name in ("d_k", "d_v")}


@fault("dSM.1", "soft-cap left out of the backward", link="MinghuasLab/flash-attention-npu/pull/73")
class SoftcapWithoutSlope(Flash):
    """The slope of the soft-cap is left out of the backward."""

    def slope(self, rows: Array, start: int) -> Any:
        return 1.0


@fault("dSM.1", "slope at the capped score", link="Dao-AILab/flash-attention/pull/1033")
class SlopeOfCappedScore(Flash):
    """The slope of the soft-cap is 1 - c^2 with the capped score, which is not divided by the soft-cap."""

    def slope(self, rows: Array, start: int) -> Any:
        if self.softcap is None:
            return 1.0
        c = self.capped(self.scaled(self.product(self.q[:, :, rows], self.keys(start))))
        return 1.0 - c * c


@fault("dSM.1", link="openxla/tokamax/pull/1121")
class SlopeOfMaskedScore(Flash):
    """The slope of the soft-cap is taken of masked scores: 0 times infinity is NaN."""

    def slope(self, rows: Array, start: int) -> Any:
        if self.softcap is None:
            return 1.0
        c = self.scores(rows, start)
        columns = np.arange(start, start + self.columns)
        return np.where(self.inside(columns), 1.0 - (c / self.softcap) ** 2, 0.0)
