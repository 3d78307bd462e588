"""Faults of windows, offsets, biases, sinks, lengths and dropout, and of keys and values in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from refattn.verify.bugs.emulator import Array, Flash, Inputs, Place
from refattn.verify.bugs.fault import wrong
from refattn.verify.bugs.masks import offset_by_heads
from refattn.verify.bugs.splits import Split

PAGE = 16
"""Keys of a page."""

OVERFLOWS = 88.7
"""exp of more is no number of float32."""


def _moved(window: Any, left: int, right: int) -> Any:
    return tuple(None if bound is None else max(bound + by, 0) for bound, by in zip(window, (left, right), strict=True))


@wrong(Flash.window_of, "SM.2", "window", "window one wider", link="huggingface/transformers/issues/39408")
def window_one_more_left(self: Flash, window: Any, queries: int, keys: int) -> Any:
    """The window has one key too many on its left side."""
    return _moved(window, 1, 0)


@wrong(Flash.near, "SM.2", "window", link="pytorch/executorch/pull/21857", tiles="rows")
def window_of_first_query(self: Flash, rows: Array, columns: Array) -> Array:
    """All queries of a chunk have the left bound of its first one: later ones see keys that are too far back."""
    assert self.window is not None
    window = self.window
    self.window = (None, window[1])
    right = Flash.near(self, rows, columns)
    self.window = (window[0], None)
    left = Flash.near(self, 0 * rows + rows[0] // self.rows * self.rows, columns)
    self.window = window
    return left & right


@wrong(Flash.window_of, "SM.2", "window", "window one wider", link="ModelTC/LightLLM/pull/1311")
def window_one_more_right(self: Flash, window: Any, queries: int, keys: int) -> Any:
    """The window has one key too many on its right side."""
    return _moved(window, 0, 1)


@wrong(Flash.window_of, "SM.2", "window", "window left out", link="EricLBuehler/mistral.rs/issues/2094")
def window_ignored_for_one_query(self: Flash, window: Any, queries: int, keys: int) -> Any:
    """The window is ignored where there is one query, in decoding."""
    return None if queries == 1 else window


@wrong(Flash.starts, "SM.2", "SM.total", "SM.5", "window", link="vllm-project/vllm/pull/49588", tiles="columns")
def window_starts_at_tile(self: Flash, first: int, last: int) -> Iterable[int]:
    """The loop over keys begins at the first whole tile of the window: the part of a tile before it is left out."""
    found = Flash.starts(self, first, last)
    if self.window is None or self.window[0] is None:
        return found
    begin = first + int(np.min(self.place)) - self.window[0]
    return (start for start in found if start >= begin or begin <= 0)


@wrong(Flash.place_of, "SM.2", "causal mask", "offset", link="triton-lang/triton/pull/2033")
def causal_offset_negated(self: Flash, offset: Any, causal: Any, queries: int, keys: int) -> Place:
    """The offset of the causal mask has the wrong sign: queries minus keys, not keys minus queries."""
    found = Flash.place_of(self, offset, causal, queries, keys)
    return found if offset is not None else -found


@wrong(Flash.offset_of, "SM.2", "causal mask", "grouped heads", link="Dao-AILab/flash-attention/pull/2528")
def causal_of_packed_rows(self: Flash, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
    """Query heads of a group are packed as rows, and a packed row's index is taken for that of its query."""
    found = Flash.offset_of(self, causal, queries, keys, mask)
    heads, groups = self.plane
    if found is None or heads == groups:
        return found
    return found + (np.arange(heads) % (heads // groups) * queries)[None, :, None, None]


@wrong(Flash.visible, "SM.2", "causal mask", "grouped heads", link="flashinfer-ai/flashinfer/pull/1148")
def causal_rows_divided(self: Flash, rows: Array, columns: Array) -> Array:
    """Rows are taken for packed query heads of a group, and their index is divided by the size of the group."""
    heads, groups = self.plane
    return Flash.visible(self, rows // max(heads // max(groups, 1), 1), columns)


@wrong(Flash.starts, "SM.2", "SM.total", "SM.5", "causal mask", link="flagos-ai/FlagAttention/issues/25", tiles="both")
def last_diagonal_tile_skipped(self: Flash, first: int, last: int) -> Iterable[int]:
    """The loop over keys ends one key early: a tile that begins on the last row's diagonal is left out."""
    found = Flash.starts(self, first, last)
    if self.offset is None:
        return found
    end = last - 1 + int(np.max(self.offset))
    return (start for start in found if start < end)


@wrong(Flash.bias_of, "SM.biased", "bias", link="microsoft/onnxruntime/pull/28963")
def bias_offset_by_heads(self: Flash, bias: Array, shape: tuple[int, ...]) -> Array:
    """The bias of head h in batch b is read at b heads + h, as if none of its axes were shared."""
    return offset_by_heads(bias, shape)


@wrong(Flash.bias_of, "SM.biased", "bias", "bias ignored", link="HKUSTDial/flash-sparse-attention/pull/190")
def bias_of_first_query(self: Flash, bias: Array, shape: tuple[int, ...]) -> Array:
    """All queries take the bias of the first one: its row stride is 0."""
    return np.broadcast_to(Flash.bias_of(self, bias, shape)[:, :, :1], shape)


@wrong(Flash.biased, "SM.biased", "bias", link="flagos-ai/FlagAttention/pull/5", tiles="columns")
def bias_wraps(self: Flash, c: Array, rows: Array, columns: Array) -> Array:
    """The index of a key in the bias wraps around: that of an earlier tile is read again."""
    return Flash.biased(self, c, rows, columns % self.columns)


@wrong(
    Split.with_sinks,
    "SM.sunk",
    "SM.total",
    "sink",
    "sink counted twice",
    link="ROCm/rocm-libraries/issues/12227",
    tiles="columns",
)
def sink_in_each_part(self: Split, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
    """Each part of the keys counts the sinks, and so they are counted as often as there are parts."""
    count = len(list(self.starts(int(rows[0]), int(rows[-1]) + 1)))
    sink = self.sink
    if sink is not None:
        self.sink = sink + np.log(max(count, 1)).astype(sink.dtype)
    found = Split.with_sinks(self, top, total, acc, rows)
    self.sink = sink
    return found


@wrong(Flash.with_sinks, "SM.sunk", "SM.total", "sink", "sink ignored", link="kekzl/imp/pull/1346")
def sink_ignored(self: Flash, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
    """The sinks are ignored."""
    return top, total, acc


@wrong(Flash.with_sinks, "SM.sunk", "sink", "sink scaled", link="ROCm/rocm-libraries/issues/12227")
def sink_scaled(self: Flash, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
    """The sinks are scaled as the scores are."""
    sink = self.sink
    self.sink = None if sink is None else sink * self.scale
    found = Flash.with_sinks(self, top, total, acc, rows)
    self.sink = sink
    return found


@wrong(Flash.with_sinks, "SM.sunk", "SM.top", "sink", link="Dao-AILab/flash-attention/pull/2752")
def sink_not_in_maximum(self: Flash, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
    """The sinks are not in the maximum: one far above the scores overflows."""
    if self.sink is None:
        return top, total, acc
    sinks = self.sink[:, None, :].astype(np.float64) - self.shift(top)
    with np.errstate(over="ignore"):
        added = np.where(sinks > OVERFLOWS, np.inf, np.exp(np.minimum(sinks, OVERFLOWS)))
    return top, total + np.sum(added, axis=-1, keepdims=True).astype(total.dtype), acc


@wrong(Flash.with_sinks, "SM.sunk", "SM.total", "sink", link="kyegomez/AttentionIsOFFByOne/issues/5")
def sink_before_maximum(self: Flash, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
    """The exponentials of the sinks are added to the sum as they are, not relative to the maximum of the scores."""
    if self.sink is None:
        return top, total, acc
    added = np.sum(np.exp(np.minimum(self.sink, OVERFLOWS)), axis=-1)[:, None, None]
    return top, total + added.astype(total.dtype), acc


@wrong(Flash.lengths_of, "SM.2", "k_lengths", "beyond the lengths", link="Dao-AILab/flash-attention/pull/2333")
def length_of_next_sequence(self: Flash, lengths: Array, size: int) -> Array:
    """The length of a sequence is that of the next one."""
    return np.roll(lengths, -1)


@wrong(Flash.exist, "SM.2", "k_lengths", "key lengths ignored", link="Tencent-Hunyuan/HunyuanVideo/pull/310")
def lengths_ignored(self: Flash, rows: Array, columns: Array) -> Array:
    """The lengths are ignored: zeros are attended where there is nothing."""
    return np.ones((1, 1, len(rows), len(columns)), bool)


@wrong(Flash.exist, "SM.2", "k_lengths", "a length is the last index", link="vllm-project/vllm/pull/945")
def length_one_more(self: Flash, rows: Array, columns: Array) -> Array:
    """A sequence has one key more than its length says."""
    return Flash.exist(self, rows, np.maximum(columns - 1, 0))


@wrong(Flash.keep_of, "SM.kept", "dropout", link="intel/torch-xpu-ops/pull/3766")
def dropout_multiplied(self: Flash, keep: Array, shape: tuple[int, ...]) -> Array:
    """What dropout keeps is multiplied by the part that it keeps, not divided."""
    return np.broadcast_to(np.where(keep != 0, 1.0 / np.where(keep != 0, keep, 1.0), 0.0), shape)


@wrong(Flash.dropped, "SM.kept", "dropout", link="pytorch/pytorch/pull/197563", tiles="columns")
def dropout_of_first_tile(self: Flash, p: Array, rows: Array, start: int) -> Array:
    """Every tile of keys draws the dropout of the first one."""
    return Flash.dropped(self, p, rows, 0)


def _paged(q: Array, k: Array, v: Array, pages: Callable[[Array], Array]) -> Inputs:
    """Return keys and values in pages, read where a function of the numbers of the pages says."""
    n = k.shape[2]
    at = np.arange(n)
    at = np.minimum(pages(np.arange(-(-n // PAGE)))[at // PAGE] * PAGE + at % PAGE, n - 1) if n else at
    return q, k[:, :, at], v[:, :, at]


@wrong(Flash.given, "SM.1", "SM.5", "k", "v", link="hw-native-sys/pypto/pull/470")
def second_page_is_first(self: Flash, q: Array, k: Array, v: Array) -> Inputs:
    """The second of two pages of 16 keys and values is read where the first one is."""
    return _paged(q, k, v, lambda page: np.where(page == 1, 0, page))


@wrong(Flash.given, "SM.1", "SM.5", "k", "v", link="microsoft/onnxruntime/pull/32391")
def all_pages_first(self: Flash, q: Array, k: Array, v: Array) -> Inputs:
    """All pages of 16 keys and values are the first one."""
    return _paged(q, k, v, lambda page: 0 * page)


@wrong(Flash.given, "SM.1", "SM.5", "k", "v", link="hw-native-sys/pypto/pull/470")
def pages_exchanged(self: Flash, q: Array, k: Array, v: Array) -> Inputs:
    """Pages of 16 keys and values are read in pairs, in the wrong order."""
    return _paged(q, k, v, lambda page: np.minimum(page ^ 1, len(page) - 1))


@wrong(Flash.given, "SM.5", "v", link="triton-lang/triton/pull/5800")
def values_transposed_in_blocks(self: Flash, q: Array, k: Array, v: Array) -> Inputs:
    """The values are transposed in blocks of 8 x 8."""
    n, e = v.shape[2] // 8 * 8, v.shape[3] // 8 * 8
    blocks = v[:, :, :n, :e].reshape(*v.shape[:2], n // 8, 8, e // 8, 8)
    changed = v.copy()
    changed[:, :, :n, :e] = np.swapaxes(blocks, 3, 5).reshape(*v.shape[:2], n, e)
    return q, k, changed


@wrong(Flash.as_given, "dSM.bias", "bias", link="HKUSTDial/flash-sparse-attention/pull/193")
def bias_gradient_not_summed(self: Flash, x: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of a bias that is shared is that of the last head or query that shares it: it is not summed."""
    wide = (1,) * (4 - len(shape)) + tuple(shape)
    return x[tuple(slice(-1, None) if size == 1 else slice(None) for size in wide)].reshape(shape)


@wrong(Flash.d_sinks, "dSM.sink", "sink", link="NVIDIA/cudnn-frontend/issues/676")
def sink_gradient_negated(self: Flash, lse: Array, delta: Array) -> Array:
    """The gradient of the sinks has the wrong sign."""
    return -Flash.d_sinks(self, lse, delta)


@wrong(Flash.d_sinks, "dSM.sink", "sink", link="ISEEKYAN/Megatron-LM/pull/205")
def sink_gradient_lost(self: Flash, lse: Array, delta: Array) -> Array:
    """The gradient of the sinks is 0."""
    return 0.0 * Flash.d_sinks(self, lse, delta)


@wrong(Flash.d_sinks, "dSM.sink", "sink", link="Dao-AILab/flash-attention/pull/2706")
def sink_gradient_without_lse(self: Flash, lse: Array, delta: Array) -> Array:
    """The gradient of the sinks has no part of the gradient of lse."""
    if self.d_lse is None:
        return Flash.d_sinks(self, lse, delta)
    return Flash.d_sinks(self, lse, delta + np.where(np.isneginf(lse), 0.0, self.d_lse[..., None]))


@wrong(Flash.add_key, "dSM.k", "dSM.v", link="flagos-ai/FlagGems/pull/3607", tiles="both")
def backward_starts_late(self: Flash, d_x: Array, rows: Array, start: int, part: Array) -> None:
    """The loop of the backward over queries begins at the tile of its keys, whatever the two lengths are."""
    if self.offset is None or rows[0] >= start // self.rows * self.rows:
        Flash.add_key(self, d_x, rows, start, part)


@wrong(
    Flash.scale_of_key, "dSM.k", "scale", "gradients without the scale", link="Dao-AILab/flash-attention/issues/2651"
)
def key_gradient_of_other_scale(self: Flash) -> float:
    """The gradient of k has the factor 1/sqrt(d), whatever scale is given."""
    return self.scale_of(None, self.q.shape[-1])


@wrong(Flash.add_query, "dSM.q", link="Dao-AILab/flash-attention/pull/2333", tiles="columns")
def query_gradient_of_odd_tiles_lost(self: Flash, d_q: Array, rows: Array, start: int, part: Array) -> None:
    """The gradient of q loses what every second tile of keys adds."""
    if start // self.columns % 2 == 0:
        Flash.add_query(self, d_q, rows, start, part)


@wrong(Flash.add_query, "dSM.q", link="", tiles="columns")
def query_gradient_without_tail(self: Flash, d_q: Array, rows: Array, start: int, part: Array) -> None:
    """The gradient of q loses what a last tile of keys adds that is not full."""
    if start == 0 or start + self.columns <= self.n_k:
        Flash.add_query(self, d_q, rows, start, part)


@wrong(Flash.add_key, "dSM.k", "dSM.v", link="", tiles="rows")
def key_gradients_without_tail(self: Flash, d_x: Array, rows: Array, start: int, part: Array) -> None:
    """The gradients of k and v lose what a last tile of queries adds that is not full."""
    if rows[0] == 0 or len(rows) == self.rows:
        Flash.add_key(self, d_x, rows, start, part)
