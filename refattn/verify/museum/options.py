"""Faults of windows, offsets, biases, sinks, lengths and dropout, and of keys and values in pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from refattn.verify.museum.emulator import Array, Flash, Place
from refattn.verify.museum.fault import fault
from refattn.verify.museum.masks import offset_by_heads
from refattn.verify.museum.splits import Split

PAGE = 16
"""Keys of a page."""


def _moved(window: Any, left: int, right: int) -> Any:
    return tuple(None if bound is None else max(bound + by, 0) for bound, by in zip(window, (left, right), strict=True))


@fault("SM.2", "window", "window one wider", link="huggingface/transformers/issues/39408")
class WindowOneMoreLeft(Flash):
    """The window has one key too many on its left side."""

    def window_of(self, window: Any, queries: int, keys: int) -> Any:
        return _moved(window, 1, 0)


@fault("SM.2", "window", "left bound of the window excluded", link="sgl-project/sglang/pull/32087")
class WindowOneLessLeft(Flash):
    """The window has one key too few on its left side."""

    def near(self, rows: Array, columns: Array) -> Array:
        assert self.window is not None
        (left, _), at = self.window, rows[:, None] + self.place
        found = super().near(rows, columns)
        return found if left is None else found & (columns > at - left)


@fault("SM.2", "window", "window one wider", link="ModelTC/LightLLM/pull/1311")
class WindowOneMoreRight(Flash):
    """The window has one key too many on its right side."""

    def window_of(self, window: Any, queries: int, keys: int) -> Any:
        return _moved(window, 0, 1)


@fault("SM.2", "window", "window left out", link="proger/hippogriff/issues/7")
class WindowIgnored(Flash):
    """The window is ignored."""

    def window_of(self, window: Any, queries: int, keys: int) -> Any:
        return None


@fault("SM.2", "window", "window left out", link="EricLBuehler/mistral.rs/issues/2094")
class WindowIgnoredForOneQuery(Flash):
    """The window is ignored where there is one query, in decoding."""

    def window_of(self, window: Any, queries: int, keys: int) -> Any:
        return None if queries == 1 else window


@fault("SM.2", "window", "window aligned top left", link="Dao-AILab/flash-attention/issues/2199")
class WindowTopLeft(Flash):
    """The window is aligned at the first key."""

    def near(self, rows: Array, columns: Array) -> Array:
        place, self.place = self.place, 0
        found = super().near(rows, columns)
        self.place = place
        return found


@fault("SM.2", "SM.total", "SM.5", "window", link="vllm-project/vllm/pull/49588", tiles="columns")
class WindowStartsAtTile(Flash):
    """The loop over keys begins at the first whole tile of the window: the part of a tile before it is left out."""

    def starts(self, first: int, last: int) -> Iterable[int]:
        found = super().starts(first, last)
        if self.window is None or self.window[0] is None:
            return found
        begin = first + int(np.min(self.place)) - self.window[0]
        return (start for start in found if start >= begin or begin <= 0)


@fault("SM.2", "causal mask", "offset", link="triton-lang/triton/pull/2033")
class CausalOffsetNegated(Flash):
    """The offset of the causal mask has the wrong sign: queries minus keys, not keys minus queries."""

    def place_of(self, offset: Any, causal: Any, queries: int, keys: int) -> Place:
        found = super().place_of(offset, causal, queries, keys)
        return found if offset is not None else -found


@fault("SM.2", "offset", "offset ignored", "causal mask", link="vllm-project/vllm/pull/945")
class OffsetIgnored(Flash):
    """An offset that is given is ignored: the last query stands at the last key."""

    def place_of(self, offset: Any, causal: Any, queries: int, keys: int) -> Place:
        return super().place_of(None, causal, queries, keys)


@fault("SM.2", "causal mask", "grouped heads", link="Dao-AILab/flash-attention/pull/2528")
class CausalOfPackedRows(Flash):
    """Query heads of a group are packed as rows, and a packed row's index is taken for that of its query."""

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        found = super().offset_of(causal, queries, keys, mask)
        heads, groups = self.plane
        if found is None or heads == groups:
            return found
        return found + (np.arange(heads) % (heads // groups) * queries)[None, :, None, None]


@fault("SM.2", "causal mask", "grouped heads", link="flashinfer-ai/flashinfer/pull/1148")
class CausalRowsDivided(Flash):
    """Rows are taken for packed query heads of a group, and their index is divided by the size of the group."""

    def visible(self, rows: Array, columns: Array) -> Array:
        heads, groups = self.plane
        return super().visible(rows // max(heads // max(groups, 1), 1), columns)


@fault("SM.2", "SM.total", "SM.5", "causal mask", link="flagos-ai/FlagAttention/issues/25", tiles="both")
class LastDiagonalTileSkipped(Flash):
    """The loop over keys ends one key early: a tile that begins on the last row's diagonal is left out."""

    def starts(self, first: int, last: int) -> Iterable[int]:
        found = super().starts(first, last)
        if self.offset is None:
            return found
        end = last - 1 + int(np.max(self.offset))
        return (start for start in found if start < end)


@fault("SM.biased", "bias", link="microsoft/onnxruntime/pull/28963")
class BiasOffsetByHeads(Flash):
    """The bias of head h in batch b is read at b heads + h, as if none of its axes were shared."""

    def bias_of(self, bias: Array, shape: tuple[int, ...]) -> Array:
        return offset_by_heads(bias, shape)


@fault("SM.biased", "bias", "bias ignored", link="HKUSTDial/flash-sparse-attention/pull/190")
class BiasOfFirstQuery(Flash):
    """All queries take the bias of the first one: its row stride is 0."""

    def bias_of(self, bias: Array, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(super().bias_of(bias, shape)[:, :, :1], shape)


@fault("SM.biased", "bias", "bias scaled with the scores", link="HKUSTDial/flash-sparse-attention/pull/199")
class BiasScaled(Flash):
    """The bias is added before the scale, and is scaled with the scores."""

    def biased(self, c: Array, rows: Array, columns: Array) -> Array:
        return c if self.bias is None else c + self.scale * self.of_tile(self.bias, rows, columns)


@fault("SM.biased", "bias", "bias ignored", link="Dao-AILab/flash-attention/issues/907")
class BiasIgnored(Flash):
    """The bias is ignored."""

    def biased(self, c: Array, rows: Array, columns: Array) -> Array:
        return c


@fault("SM.biased", "bias", link="flagos-ai/FlagAttention/pull/5", tiles="columns")
class BiasWraps(Flash):
    """The index of a key in the bias wraps around: that of an earlier tile is read again."""

    def biased(self, c: Array, rows: Array, columns: Array) -> Array:
        return super().biased(c, rows, columns % self.columns)


@fault("SM.sunk", "SM.total", "sink", "sink counted twice", link="ROCm/rocm-libraries/issues/12227")
class SinkTwice(Flash):
    """The sinks are counted twice."""

    def sinks_of(self, sink: Array, heads: int) -> Array:
        return np.asarray(super().sinks_of(sink, heads) + np.log(2.0), sink.dtype)


@fault("SM.sunk", "SM.total", "sink", "sink counted twice", link="ROCm/rocm-libraries/issues/12227", tiles="columns")
class SinkInEachPart(Split):
    """Each part of the keys counts the sinks, and so they are counted as often as there are parts."""

    def with_sinks(self, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
        count = len(list(self.starts(int(rows[0]), int(rows[-1]) + 1)))
        sink = self.sink
        if sink is not None:
            self.sink = sink + np.log(max(count, 1)).astype(sink.dtype)
        found = super().with_sinks(top, total, acc, rows)
        self.sink = sink
        return found


@fault("SM.sunk", "SM.total", "sink", "sink ignored", link="kekzl/imp/pull/1346")
class SinkIgnored(Flash):
    """The sinks are ignored."""

    def with_sinks(self, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
        return top, total, acc


@fault("SM.sunk", "sink", "sink scaled", link="ROCm/rocm-libraries/issues/12227")
class SinkScaled(Flash):
    """The sinks are scaled as the scores are."""

    def with_sinks(self, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
        sink = self.sink
        self.sink = None if sink is None else sink * self.scale
        found = super().with_sinks(top, total, acc, rows)
        self.sink = sink
        return found


@fault("SM.2", "k_lengths", "beyond the lengths", link="Dao-AILab/flash-attention/pull/2333")
class LengthOfNextSequence(Flash):
    """The length of a sequence is that of the next one."""

    def lengths_of(self, lengths: Array, size: int) -> Array:
        return np.roll(lengths, -1)


@fault("SM.2", "k_lengths", "key lengths ignored", link="Tencent-Hunyuan/HunyuanVideo/pull/310")
class LengthsIgnored(Flash):
    """The lengths are ignored: zeros are attended where there is nothing."""

    def exist(self, rows: Array, columns: Array) -> Array:
        return np.ones((1, 1, len(rows), len(columns)), bool)


@fault("SM.2", "k_lengths", "a length is the last index", link="vllm-project/vllm/pull/945")
class LengthOneMore(Flash):
    """A sequence has one key more than its length says."""

    def exist(self, rows: Array, columns: Array) -> Array:
        return super().exist(rows, np.maximum(columns - 1, 0))


@fault("SM.kept", "dropout", "dropout not scaled", link="intel/torch-xpu-ops/pull/3766")
class DropoutNotScaled(Flash):
    """What dropout keeps is not divided by the part that it keeps."""

    def keep_of(self, keep: Array, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to((keep != 0).astype(keep.dtype), shape)


@fault("SM.kept", "dropout", link="intel/torch-xpu-ops/pull/3766")
class DropoutMultiplied(Flash):
    """What dropout keeps is multiplied by the part that it keeps, not divided."""

    def keep_of(self, keep: Array, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(np.where(keep != 0, 1.0 / np.where(keep != 0, keep, 1.0), 0.0), shape)


@fault("SM.kept", "dropout", "dropout left out", link="Dao-AILab/flash-attention/issues/1251")
class DropoutIgnored(Flash):
    """Dropout is left out."""

    def dropped(self, p: Array, rows: Array, start: int) -> Array:
        return p


@fault("SM.kept", "dropout", link="pytorch/pytorch/pull/197563", tiles="columns")
class DropoutOfFirstTile(Flash):
    """Every tile of keys draws the dropout of the first one."""

    def dropped(self, p: Array, rows: Array, start: int) -> Array:
        return super().dropped(p, rows, 0)


class _Pages(Flash):
    """Keys and values in pages: subclasses say which pages are read."""

    def pages(self, count: int) -> Array:
        raise NotImplementedError

    def given(self, q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array, Array | None]:
        n = k.shape[2]
        count = -(-n // PAGE)
        at = np.arange(n)
        at = np.minimum(self.pages(count)[at // PAGE] * PAGE + at % PAGE, n - 1) if n else at
        return q, k[:, :, at], v[:, :, at], mask


@fault("SM.1", "SM.5", "k", "v", link="hw-native-sys/pypto/pull/470")
class SecondPageIsFirst(_Pages):
    """The second of two pages of 16 keys and values is read where the first one is."""

    def pages(self, count: int) -> Array:
        at = np.arange(count)
        return np.where(at == 1, 0, at)


@fault("SM.1", "SM.5", "k", "v", link="microsoft/onnxruntime/pull/32391")
class AllPagesFirst(_Pages):
    """All pages of 16 keys and values are the first one."""

    def pages(self, count: int) -> Array:
        return np.zeros(count, int)


@fault("SM.1", "SM.5", "k", "v", link="hw-native-sys/pypto/pull/470")
class PagesExchanged(_Pages):
    """Pages of 16 keys and values are read in pairs, in the wrong order."""

    def pages(self, count: int) -> Array:
        at = np.arange(count) ^ 1
        return np.minimum(at, count - 1)


@fault("SM.5", "v", link="triton-lang/triton/pull/5800")
class ValuesTransposedInBlocks(Flash):
    """The values are transposed in blocks of 8 x 8."""

    def given(self, q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array, Array | None]:
        n, e = v.shape[2] // 8 * 8, v.shape[3] // 8 * 8
        blocks = v[:, :, :n, :e].reshape(*v.shape[:2], n // 8, 8, e // 8, 8)
        changed = v.copy()
        changed[:, :, :n, :e] = np.swapaxes(blocks, 3, 5).reshape(*v.shape[:2], n, e)
        return q, k, changed, mask


@fault("dSM.bias", "bias", link="HKUSTDial/flash-sparse-attention/pull/193")
class BiasGradientNotSummed(Flash):
    """The gradient of a bias that is shared is that of the last head or query that shares it: it is not summed."""

    def as_given(self, x: Array, shape: tuple[int, ...]) -> Array:
        wide = (1,) * (4 - len(shape)) + tuple(shape)
        return x[tuple(slice(-1, None) if size == 1 else slice(None) for size in wide)].reshape(shape)


@fault("dSM.sink", "sink", link="NVIDIA/cudnn-frontend/issues/676")
class SinkGradientNegated(Flash):
    """The gradient of the sinks has the wrong sign."""

    def d_sinks(self, lse: Array, delta: Array) -> Array:
        return -super().d_sinks(lse, delta)


@fault("dSM.sink", "sink", link="ISEEKYAN/Megatron-LM/pull/205")
class SinkGradientLost(Flash):
    """The gradient of the sinks is 0."""

    def d_sinks(self, lse: Array, delta: Array) -> Array:
        return 0.0 * super().d_sinks(lse, delta)


@fault("dSM.k", "dSM.v", link="flagos-ai/FlagGems/pull/3607", tiles="both")
class BackwardStartsLate(Flash):
    """The loop of the backward over queries begins at the tile of its keys, whatever the two lengths are."""

    def add_key(self, d_x: Array, start: int, part: Array) -> None:
        if self.offset is None or self.first >= start // self.rows * self.rows:
            super().add_key(d_x, start, part)

    def recomputed(self, rows: Array, start: int, lse: Array) -> Array:
        self.first = int(rows[0])
        return super().recomputed(rows, start, lse)


@fault("dSM.k", "scale", "gradients without the scale", link="Dao-AILab/flash-attention/issues/2651")
class KeyGradientOfOtherScale(Flash):
    """The gradient of k has the factor 1/sqrt(d), whatever scale is given."""

    def scale_of_key(self) -> float:
        return self.scale_of(None, self.q.shape[-1])


@fault("dSM.q", link="Dao-AILab/flash-attention/pull/2333", tiles="columns")
class QueryGradientOfOddTilesLost(Flash):
    """The gradient of q loses what every second tile of keys adds."""

    def add_query(self, d_q: Array, rows: Array, part: Array) -> None:
        if self.at // self.columns % 2 == 0:
            super().add_query(d_q, rows, part)

    def recomputed(self, rows: Array, start: int, lse: Array) -> Array:
        self.at = start
        return super().recomputed(rows, start, lse)


@fault("dSM.q", link="", tiles="columns")
class QueryGradientWithoutTail(QueryGradientOfOddTilesLost):
    """The gradient of q loses what a last tile of keys adds that is not full."""

    def add_query(self, d_q: Array, rows: Array, part: Array) -> None:
        if self.at == 0 or self.at + self.columns <= self.n_k:
            Flash.add_query(self, d_q, rows, part)


@fault("dSM.k", "dSM.v", link="", tiles="rows")
class KeyGradientsWithoutTail(Flash):
    """The gradients of k and v lose what a last tile of queries adds that is not full."""

    def backward(self, out: Array, lse: Array, d_out: Array, groups: int) -> dict[str, Array]:
        full = max(self.n_q // self.rows, 1) * self.rows
        less = np.where(np.arange(self.n_q)[:, None] < full, d_out, 0.0)
        lost = super().backward(out, lse, less, groups)
        return super().backward(out, lse, d_out, groups) | {name: lost[name] for name in ("d_k", "d_v")}
