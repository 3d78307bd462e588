"""Faults of the backward: the output is right, and some gradient is not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from refattn.verify.bugs.emulator import Array, Flash, low
from refattn.verify.bugs.fault import fault, wrong
from refattn.verify.bugs.memory import _layout

DELTA = "dSM.total"


@wrong(Flash.upstream, "dSM.4", "dSM.v", "d_out", link="Dao-AILab/flash-attention/issues/355")
def upstream_of_other_layout(self: Flash, d_out: Array) -> Array:
    """The upstream gradient is stored with tokens before heads, and read with heads before tokens."""
    return _layout(d_out)


@wrong(Flash.delta, DELTA, "dSM.3", link="flagos-ai/FlagAttention/pull/1")
def delta_of_other_layout(self: Flash, out: Array, d_out: Array) -> Array:
    """delta, the row sums of d_out * out, is computed as if they were stored with heads before tokens."""
    return _layout(Flash.delta(self, out, d_out))


@wrong(Flash.delta, DELTA, "dSM.3", link="triton-lang/triton/pull/2020")
def delta_of_half_the_rows(self: Flash, out: Array, d_out: Array) -> Array:
    """delta, the row sums of d_out * out, is computed for the first half of all rows alone."""
    found = Flash.delta(self, out, d_out)
    at = np.arange(found.size).reshape(found.shape)
    return np.where(at < (found.size + 1) // 2, found, 0.0)


@wrong(Flash.delta, DELTA, "dSM.3", link="SHI-Labs/NATTEN/issues/347", tiles="rows")
def delta_wraps(self: Flash, out: Array, d_out: Array) -> Array:
    """The index of a row in delta, the row sums of d_out * out, wraps around."""
    return Flash.delta(self, out, d_out)[:, :, np.arange(self.n_q) % self.rows]


@wrong(Flash.delta, DELTA, "dSM.3", link="Dao-AILab/flash-attention/pull/2481")
def delta_of_half_the_width(self: Flash, out: Array, d_out: Array) -> Array:
    """delta, the row sums of d_out * out, is computed before all of d_out has come: from half of the width."""
    half = (out.shape[-1] + 1) // 2
    return Flash.delta(self, out[..., :half], d_out[..., :half])


@wrong(
    Flash.delta, DELTA, "dSM.3", "inner product left out of the backward", link="Dao-AILab/flash-attention/pull/2756"
)
def delta_not_there(self: Flash, out: Array, d_out: Array) -> Array:
    """delta, the row sums of d_out * out, is read before it is written: it is 0."""
    return 0.0 * Flash.delta(self, out, d_out)


@wrong(Flash.add_query, "dSM.q", link="Dao-AILab/flash-attention/issues/359", tiles="columns")
def query_gradient_overwritten(self: Flash, d_q: Array, rows: Array, start: int, part: Array) -> None:
    """The gradient of q is that of the last tile of keys alone: tiles overwrite each other's."""
    d_q[:, :, rows] = part


@wrong(Flash.scale_of_query, "dSM.q", "gradients without the scale", link="fla-org/flash-linear-attention/issues/47")
def query_gradient_without_scale(self: Flash) -> float:
    """The gradient of q is not scaled."""
    return 1.0


@wrong(Flash.scale_of_key, "dSM.k", "gradients without the scale", link="Dao-AILab/flash-attention/issues/2651")
def key_gradient_without_scale(self: Flash) -> float:
    """The gradient of k is not scaled."""
    return 1.0


@wrong(
    Flash.per_group, "dSM.k", "dSM.v", "gradients of the last head of a group", link="marin-community/levanter/pull/449"
)
def group_gradient_overwritten(self: Flash, d_x: Array, groups: int) -> Array:
    """The gradients of k and v are those of the last query head of a group: they are not summed."""
    times = d_x.shape[1] // max(groups, 1)
    return d_x[:, times - 1 :: times] if times else d_x


@wrong(Flash.per_group, "dSM.k", "dSM.v", link="")
def group_gradient_of_first_head(self: Flash, d_x: Array, groups: int) -> Array:
    """The gradients of k and v are those of the first query head of a group alone."""
    times = d_x.shape[1] // max(groups, 1)
    return d_x[:, ::times] if times else d_x


@wrong(Flash.per_group, "dSM.k", "dSM.v", link="fla-org/flash-linear-attention/pull/384")
def group_gradient_of_query_head(self: Flash, d_x: Array, groups: int) -> Array:
    """The gradients of k and v of head g are those of query head g alone."""
    return d_x[:, :groups]


@wrong(Flash.per_group, "dSM.k", "dSM.v", link="XunhaoLai/native-sparse-attention-triton/issues/27")
def group_gradient_interleaved(self: Flash, d_x: Array, groups: int) -> Array:
    """The gradients of k and v are summed over other query heads than those that share them: h mod g."""
    found = np.zeros((d_x.shape[0], groups, *d_x.shape[2:]), d_x.dtype)
    for head in range(d_x.shape[1]):
        found[:, head % groups] += d_x[:, head]
    return found


@wrong(Flash.stored_scores, "dSM.2", "dSM.1", link="")
def scaled_gradient_in_half(self: Flash, d_s: Array) -> Array:
    """The gradient of the scores is rounded to float16 after it is scaled: a small one to a subnormal number."""
    return low(d_s * self.scale, "float16") / (self.scale or 1.0)


@wrong(Flash.d_weights, "dSM.4", link="lucidrains/flash-attention-jax/pull/15")
def weight_gradient_of_width_of_keys(self: Flash, d_out: Array, v: Array) -> Array:
    """The gradient of the weights sums over as many columns of v as q and k have."""
    d = self.q.shape[-1]
    return Flash.d_weights(self, d_out[..., :d], v[..., :d])


@wrong(Flash.backward, "dSM.v", link="Dao-AILab/flash-attention/issues/2552")
def value_gradient_columns(self: Flash, out: Array, lse: Array, d_out: Array, groups: int) -> dict[str, Array]:
    """The second half of the columns of v's gradient is stored in the wrong place."""
    found = Flash.backward(self, out, lse, d_out, groups)
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


@wrong(Flash.lse_read, "dSM.2", "dSM.v", link="meta-pytorch/attention-gym/pull/200")
def backward_lse_of_other_base(self: Flash, lse: Array) -> Array:
    """The backward takes the natural lse for one to base 2."""
    return lse * math.log(2.0)


@wrong(Flash.backward, "dSM.k", "dSM.v", link="pytorch/pytorch/issues/153799", tiles="rows")
def padded_rows_nan(self: Flash, out: Array, lse: Array, d_out: Array, groups: int) -> dict[str, Array]:
    """The queries that pad the last tile have an lse of -inf, and make the gradients of k and v NaN."""
    found = Flash.backward(self, out, lse, d_out, groups)
    if self.n_q % self.rows == 0:
        return found
    return found | {name: np.full_like(found[name], np.nan) for name in ("d_k", "d_v")}


@wrong(Flash.slope, "dSM.1", "soft-cap left out of the backward", link="MinghuasLab/flash-attention-npu/pull/73")
def softcap_without_slope(self: Flash, rows: Array, start: int) -> Any:
    """The slope of the soft-cap is left out of the backward."""
    return 1.0


@wrong(Flash.slope, "dSM.1", "slope at the capped score", link="Dao-AILab/flash-attention/pull/1033")
def slope_of_capped_score(self: Flash, rows: Array, start: int) -> Any:
    """The slope of the soft-cap is 1 - c^2 with the capped score, which is not divided by the soft-cap."""
    if self.softcap is None:
        return 1.0
    c = self.capped(self.scaled(self.product(self.q[:, :, rows], self.keys(start))))
    return 1.0 - c * c


@wrong(Flash.slope, "dSM.1", link="openxla/tokamax/pull/1121")
def slope_of_masked_score(self: Flash, rows: Array, start: int) -> Any:
    """The slope of the soft-cap is taken of masked scores: 0 times infinity is NaN."""
    if self.softcap is None:
        return 1.0
    c = self.scores(rows, start)
    columns = np.arange(start, start + self.columns)
    return np.where(self.inside(columns), 1.0 - (c / self.softcap) ** 2, 0.0)


@fault("dSM.2", "dSM.v", "sink", link="NVIDIA/cudnn-frontend/pull/421")
class BackwardWithoutSinks(Flash):
    """The backward computes the weights from an lse that does not have the sinks."""

    def forward(self) -> tuple[Array, Array]:
        self.of_keys = np.full((*self.q.shape[:3], 1), -np.inf, self.q.dtype)
        return super().forward()

    def with_sinks(self, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
        self.of_keys[:, :, rows] = self.lse_of(top, total)
        return super().with_sinks(top, total, acc, rows)

    def recomputed(self, rows: Array, start: int, lse: Array) -> Array:
        return super().recomputed(rows, start, self.of_keys[:, :, rows])


@fault("dSM.4", "dSM.2", "k", "v", link="huggingface/diffusers/issues/14265", tiles="columns")
class RingOfFirstStep(Flash):
    """The backward of a ring reads the keys and values of its first step in all steps."""

    goes_back = False

    def keys(self, start: int) -> Array:
        return super().keys(0 if self.goes_back else start)

    def values(self, start: int) -> Array:
        return super().values(0 if self.goes_back else start)

    def backward(self, *given: Any) -> dict[str, Array]:
        self.goes_back = True
        return super().backward(*given)
