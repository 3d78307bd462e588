"""Faults of the scores: the scale, the soft-cap, and the width that is summed over."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from refattn.verify.museum.emulator import Array, Flash
from refattn.verify.museum.fault import fault

LOG2E = math.log2(math.e)


@fault("SM.1", "scale left out", "scale", link="google/torchax/issues/39")
class ScaleLeftOut(Flash):
    """The scores are not scaled at all."""

    def scale_of(self, scale: float | None, d: int) -> float:
        return 1.0


@fault("SM.1", "scale", link="bo-ke/llm-internal-medicine/pull/47")
class ScaleIgnored(Flash):
    """A scale that is given is ignored: 1/sqrt(d) is taken."""

    def scale_of(self, scale: float | None, d: int) -> float:
        return 1.0 / math.sqrt(d)


@fault("SM.1", "scale", link="SKaiNET-developers/SKaiNET/issues/860")
class ScaleOfZero(Flash):
    """Where no scale is given it is 0: all keys weigh the same."""

    def scale_of(self, scale: float | None, d: int) -> float:
        return 0.0 if scale is None else scale


@fault("SM.1", "scale", link="NVIDIA/cudnn-frontend/pull/493")
class ScaleOfPaddedWidth(Flash):
    """The scale is that of the padded width, the next power of two."""

    def scale_of(self, scale: float | None, d: int) -> float:
        return 1.0 / math.sqrt(1 << (d - 1).bit_length()) if scale is None else scale


@fault("SM.1", "scale", link="bytedance-iaas/sglang/pull/485")
class ScaleOfAlignedWidth(Flash):
    """The scale is that of the padded width, a multiple of 32."""

    def scale_of(self, scale: float | None, d: int) -> float:
        return 1.0 / math.sqrt(-(-d // 32) * 32) if scale is None else scale


@fault("SM.1", "scale", link="vllm-project/vllm-ascend/pull/1958")
class ScaleOfWideWidth(Flash):
    """The scale is that of the padded width, 128."""

    def scale_of(self, scale: float | None, d: int) -> float:
        return 1.0 / math.sqrt(max(d, 128)) if scale is None else scale


@fault("SM.1", "scale of the model's width", "scale", link="karpathy/ng-video-lecture/pull/6")
class ScaleOfModelWidth(Flash):
    """The scale is that of all heads together, 1/sqrt(heads d)."""

    def scale_of(self, scale: float | None, d: int) -> float:
        return 1.0 / math.sqrt(d * self.heads) if scale is None else scale

    def given(self, q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array, Array | None]:
        self.heads = q.shape[1]
        return q, k, v, mask


@fault("SM.3", "SM.1", link="meta-pytorch/segment-anything-fast/pull/71")
class NoLog2e(Flash):
    """Exponentials are powers of 2, and log2(e) is not in the scores: base 2 in place of e."""

    def exp(self, x: Array) -> Array:
        return np.exp2(x)


@fault("SM.capped", "soft-cap left out", "soft-cap", link="sgl-project/sglang/issues/33915")
class SoftcapDropped(Flash):
    """The soft-cap is dropped on the way to the kernel."""

    def capped(self, s: Array) -> Array:
        return s

    def slope(self, rows: Array, start: int) -> float:
        return 1.0


@fault("SM.capped", "soft-cap", link="Dao-AILab/flash-attention/pull/2402")
class SoftcapTimesScore(Flash):
    """The tanh of the soft-cap is multiplied by the score, not by the soft-cap."""

    def capped(self, s: Array) -> Array:
        return s if self.softcap is None else s * np.tanh(s / self.softcap)


@fault("SM.capped", "soft-cap", link="sgl-project/sgl-kernel-xpu/pull/491")
class SoftcapOfBase2(Flash):
    """The soft-cap is applied to scores that log2(e) is already in."""

    def capped(self, s: Array) -> Array:
        return s if self.softcap is None else self.softcap * np.tanh(s * LOG2E / self.softcap) / LOG2E


@fault("SM.capped", "soft-cap", link="Dao-AILab/flash-attention/issues/1181")
class SoftcapInsideTanh(Flash):
    """The score is multiplied by the soft-cap inside the tanh, and by nothing outside."""

    def capped(self, s: Array) -> Array:
        return s if self.softcap is None else np.tanh(s * self.softcap)


@fault("SM.2", "SM.capped", "soft-cap after the mask", "soft-cap", link="Dao-AILab/flash-attention/pull/1025")
class SoftcapAfterMask(Flash):
    """The soft-cap comes after the mask: hidden keys are attended a little."""

    def hidden(self, c: Array, allowed: Array) -> Array:
        return super().hidden(c, allowed) if self.softcap is None else np.where(allowed, c, -self.softcap)

    def allowed(self, rows: Array, columns: Array) -> Array:
        if self.softcap is not None:
            self.real = super().inside(columns)
        return super().allowed(rows, columns)

    def scores(self, rows: Array, start: int) -> Array:
        s = super().scores(rows, start)
        return s if self.softcap is None else np.where(self.real, s, -np.inf)

    def starts(self, first: int, last: int) -> Iterable[int]:
        return super().starts(first, last) if self.softcap is None else range(0, self.n_k, self.columns)


@fault("SM.1", link="triton-lang/triton/issues/621")
class WidthOfPowerOfTwo(Flash):
    """Only a power of two of the width is read: the rest of q and k is left out of the scores."""

    def product(self, q: Array, k: Array) -> Array:
        d = 1 << (q.shape[-1].bit_length() - 1)
        return super().product(q[..., :d], k[..., :d])


@fault("SM.1", link="TheTom/llama-cpp-turboquant/pull/3")
class WidthsOutOfStep(Flash):
    """The width of k is read in another order than that of q."""

    def product(self, q: Array, k: Array) -> Array:
        d = k.shape[-1]
        return super().product(q, k[..., np.r_[0:d:2, 1:d:2]])


@fault("SM.5", link="triton-lang/triton/pull/623")
class ColumnsOfPowerOfTwo(Flash):
    """Only a power of two of the columns of the output is written: the others stay 0."""

    def written(self, out: Array, lse: Array) -> tuple[Array, Array]:
        e = 1 << (out.shape[-1].bit_length() - 1)
        return np.where(np.arange(out.shape[-1]) < e, out, 0.0), lse


@fault("SM.5", link="Dao-AILab/flash-attention/pull/2553")
class ColumnsOutOfOrder(Flash):
    """The columns of the output are stored in another order: pairs of neighbours are taken apart."""

    def written(self, out: Array, lse: Array) -> tuple[Array, Array]:
        e = out.shape[-1]
        return out[..., np.r_[0:e:2, 1:e:2]], lse
