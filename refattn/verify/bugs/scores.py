"""Faults of the scores: the scale, the soft-cap, and the width that is summed over."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from refattn.verify.bugs.emulator import Array, Flash
from refattn.verify.bugs.fault import fault, wrong

LOG2E = math.log2(math.e)


@wrong(Flash.scale_of, "SM.1", "scale", link="bo-ke/llm-internal-medicine/pull/47")
def scale_ignored(self: Flash, scale: float | None, d: int) -> float:
    """A scale that is given is ignored: 1/sqrt(d) is taken."""
    return 1.0 / math.sqrt(d)


@wrong(Flash.scale_of, "SM.1", "scale", link="SKaiNET-developers/SKaiNET/issues/860")
def scale_of_zero(self: Flash, scale: float | None, d: int) -> float:
    """Where no scale is given it is 0: all keys weigh the same."""
    return 0.0 if scale is None else scale


@wrong(Flash.scale_of, "SM.1", "scale", link="NVIDIA/cudnn-frontend/pull/493")
def scale_of_padded_width(self: Flash, scale: float | None, d: int) -> float:
    """The scale is that of the padded width, the next power of two."""
    return 1.0 / math.sqrt(1 << (d - 1).bit_length()) if scale is None else scale


@wrong(Flash.scale_of, "SM.1", "scale", link="bytedance-iaas/sglang/pull/485")
def scale_of_aligned_width(self: Flash, scale: float | None, d: int) -> float:
    """The scale is that of the padded width, a multiple of 32."""
    return 1.0 / math.sqrt(-(-d // 32) * 32) if scale is None else scale


@wrong(Flash.scale_of, "SM.1", "scale", link="vllm-project/vllm-ascend/pull/1958")
def scale_of_wide_width(self: Flash, scale: float | None, d: int) -> float:
    """The scale is that of the padded width, 128."""
    return 1.0 / math.sqrt(max(d, 128)) if scale is None else scale


@wrong(Flash.exp, "SM.3", "SM.1", link="meta-pytorch/segment-anything-fast/pull/71")
def no_log2e(self: Flash, x: Array) -> Array:
    """Exponentials are powers of 2, and log2(e) is not in the scores: base 2 in place of e."""
    return np.exp2(x)


@wrong(Flash.capped, "SM.capped", "soft-cap", link="Dao-AILab/flash-attention/pull/2402")
def softcap_times_score(self: Flash, s: Array) -> Array:
    """The tanh of the soft-cap is multiplied by the score, not by the soft-cap."""
    return s if self.softcap is None else s * np.tanh(s / self.softcap)


@wrong(Flash.capped, "SM.capped", "soft-cap", link="sgl-project/sgl-kernel-xpu/pull/491")
def softcap_of_base2(self: Flash, s: Array) -> Array:
    """The soft-cap is applied to scores that log2(e) is already in."""
    return s if self.softcap is None else self.softcap * np.tanh(s * LOG2E / self.softcap) / LOG2E


@wrong(Flash.capped, "SM.capped", "soft-cap", link="Dao-AILab/flash-attention/issues/1181")
def softcap_inside_tanh(self: Flash, s: Array) -> Array:
    """The score is multiplied by the soft-cap inside the tanh, and by nothing outside."""
    return s if self.softcap is None else np.tanh(s * self.softcap)


@fault("SM.2", "SM.capped", "soft-cap after the mask", "soft-cap", link="Dao-AILab/flash-attention/pull/1025")
class SoftcapAfterMask(Flash):
    """The soft-cap comes after the mask: hidden keys are attended a little."""

    def hidden(self, c: Array, rows: Array, columns: Array) -> Array:
        hidden = super().hidden(c, rows, columns)
        if self.softcap is None:
            return hidden
        return np.where(self.inside(columns), np.where(np.isneginf(hidden), -self.softcap, hidden), -np.inf)

    def starts(self, first: int, last: int) -> Iterable[int]:
        return super().starts(first, last) if self.softcap is None else range(0, self.n_k, self.columns)


@wrong(Flash.product, "SM.1", link="triton-lang/triton/issues/621")
def width_of_power_of_two(self: Flash, q: Array, k: Array) -> Array:
    """Only a power of two of the width is read: the rest of q and k is left out of the scores."""
    d = 1 << (q.shape[-1].bit_length() - 1)
    return Flash.product(self, q[..., :d], k[..., :d])


@wrong(Flash.product, "SM.1", link="TheTom/llama-cpp-turboquant/pull/3")
def widths_out_of_step(self: Flash, q: Array, k: Array) -> Array:
    """The width of k is read in another order than that of q."""
    d = k.shape[-1]
    return Flash.product(self, q, k[..., np.r_[0:d:2, 1:d:2]])


@wrong(Flash.written, "SM.5", link="triton-lang/triton/pull/623")
def columns_of_power_of_two(self: Flash, out: Array, lse: Array) -> tuple[Array, Array]:
    """Only a power of two of the columns of the output is written: the others stay 0."""
    e = 1 << (out.shape[-1].bit_length() - 1)
    return np.where(np.arange(out.shape[-1]) < e, out, 0.0), lse


@wrong(Flash.written, "SM.5", link="Dao-AILab/flash-attention/pull/2553")
def columns_out_of_order(self: Flash, out: Array, lse: Array) -> tuple[Array, Array]:
    """The columns of the output are stored in another order: pairs of neighbours are taken apart."""
    e = out.shape[-1]
    return out[..., np.r_[0:e:2, 1:e:2]], lse
