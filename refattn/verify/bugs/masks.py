"""Faults of masks and of causality."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from refattn.verify.bugs.emulator import Array, Flash, Place
from refattn.verify.bugs.fault import fault, wrong


def offset_by_heads(x: Array, shape: tuple[int, ...]) -> Array:
    """Return an array of pairs, that of head h in batch b from where it would be if no axis were shared."""
    full = x.reshape((1,) * (4 - x.ndim) + x.shape)
    flat = full.reshape(-1, *full.shape[2:])
    at = np.arange(shape[0] * shape[1]) % max(len(flat), 1)
    return np.broadcast_to(flat[at].reshape(*shape[:2], *flat.shape[1:]), shape)


@wrong(Flash.offset_of, "SM.2", "causal mask", link="jax-ml/jax/issues/19237")
def causal_ignored(self: Flash, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
    """The causal mask is ignored."""
    return None


@wrong(Flash.offset_of, "SM.2", "causal mask", link="google/torchax/issues/39")
def causal_always(self: Flash, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
    """The kernel is causal whether it is asked for or not."""
    return Flash.offset_of(self, True if causal is False else causal, queries, keys, mask)


@wrong(Flash.offset_of, "SM.2", "causal mask", link="RVC-Boss/GPT-SoVITS/issues/965")
def causal_one_too_many(self: Flash, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
    """A query sees one key too many: the next token."""
    offset = Flash.offset_of(self, causal, queries, keys, mask)
    return None if offset is None else offset + 1


@wrong(Flash.offset_of, "SM.2", "a token does not see itself", "causal mask", link="pytorch/tutorials/issues/2250")
def causal_strict(self: Flash, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
    """A query does not see the key of its own token."""
    offset = Flash.offset_of(self, causal, queries, keys, mask)
    return None if offset is None else offset - 1


@wrong(Flash.offset_of, "SM.2", "causal mask", "mask", link="huggingface/transformers/pull/48769")
def causal_ignored_with_mask(self: Flash, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
    """Where a mask is given the causal one is ignored."""
    return Flash.offset_of(self, causal, queries, keys, mask) if mask is None else None


@wrong(Flash.masked, "SM.2", "causal mask", "mask", "mask ignored", link="huggingface/transformers/issues/37807")
def mask_ignored_with_causal(self: Flash, rows: Array, columns: Array) -> Array:
    """In a causal call the mask is ignored."""
    found = Flash.masked(self, rows, columns)
    return found if self.offset is None else np.ones_like(found)


@wrong(Flash.offset_of, "SM.2", "top-left causality", "causal mask", link="huggingface/transformers/pull/30311")
def causal_for_one_query_top_left(self: Flash, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
    """A single query is taken for the first one: it sees the first key alone."""
    offset = Flash.offset_of(self, causal, queries, keys, mask)
    return offset if queries != 1 or offset is None else 0


@wrong(Flash.visible, "SM.2", "causal mask", link="triton-lang/triton/pull/8853", tiles="both")
def causal_first_stage(self: Flash, rows: Array, columns: Array) -> Array:
    """The tiles before the diagonal are not masked, and their number is rounded up: keys of the future are seen."""
    if self.offset is None:
        return Flash.visible(self, rows, columns)
    first = int(rows[0]) // self.rows * self.rows + self.offset
    before = columns < -(-first // self.columns) * self.columns
    return Flash.visible(self, rows, columns) | before


@wrong(Flash.visible, "SM.2", "causal mask", link="Dao-AILab/flash-attention/pull/436", tiles="both")
def causal_in_last_tile_alone(self: Flash, rows: Array, columns: Array) -> Array:
    """The causal mask is applied in the last tile of keys that is visited, where the diagonal crosses two."""
    if self.offset is None:
        return Flash.visible(self, rows, columns)
    last = max(self.starts(int(rows[0]), int(rows[-1]) + 1), default=0)
    return Flash.visible(self, rows, columns) | (columns < last)[None, :]


@wrong(Flash.starts, "SM.2", "SM.total", "SM.5", "causal mask", link="triton-lang/triton/pull/2033", tiles="both")
def causal_loop_without_offset(self: Flash, first: int, last: int) -> Iterable[int]:
    """The loop over keys ends at the last query of the tile, as if there were as many keys as queries."""
    end = self.n_k if self.offset is None else min(self.n_k, last, last + int(np.max(self.offset)))
    return range(0, max(end, 0), self.columns)


@wrong(Flash.starts, "SM.2", "SM.total", "SM.5", "causal mask", link="triton-lang/triton/issues/5660", tiles="both")
def tiles_above_diagonal_skipped(self: Flash, first: int, last: int) -> Iterable[int]:
    """Tiles of keys above the diagonal are skipped where nothing is causal, too."""
    end = min(self.n_k, max(last + int(np.max(self.place)), 0))
    return range(0, end, self.columns)


class _Clamped(Flash):
    """A kernel that clamps its scores after the mask, and visits every key."""

    high = np.inf

    def hidden(self, c: Array, rows: Array, columns: Array) -> Array:
        return np.where(self.inside(columns), np.clip(super().hidden(c, rows, columns), -50.0, self.high), -np.inf)

    def starts(self, first: int, last: int) -> Iterable[int]:
        return range(0, self.n_k, self.columns)


@fault("SM.2", "SM.3", "mask", link="")
class ClampedBelowAfterMask(_Clamped):
    """Scores are clamped from below after the mask, as at -50: hidden keys have a finite score."""


@fault("SM.2", "SM.3", "mask", link="")
class ClampedAfterMask(_Clamped):
    """Scores are clamped on both sides after the mask, as at -50 and 50: hidden keys have a finite score."""

    high = 50.0


@wrong(Flash.masked_score, "SM.2", "mask", link="ml-explore/mlx/issues/2626")
def mask_added(self: Flash, c: Array) -> Array:
    """The mask is added to the scores as 1 and 0: hidden keys have a score that is 1 lower."""
    return c - 1.0


@wrong(Flash.masked_score, "SM.2", "mask", "empty rows", link="huggingface/transformers/issues/10484")
def mask_of_ten_thousand(self: Flash, c: Array) -> Array:
    """The mask adds -10000, not -inf: a query that may attend nothing attends everything."""
    return c - 10000.0


@wrong(Flash.masked_score, "SM.2", "masked keys have a score of 0", "mask", link="Shujun-He/RibonanzaNet/issues/5")
def mask_of_tiny_number(self: Flash, c: Array) -> Array:
    """Hidden scores become -1e-9, which is as good as 0."""
    return np.full_like(c, -1e-9)


@fault("SM.2", "SM.top", "empty rows get the mean", "empty rows", link="microsoft/onnxruntime/pull/28958")
class EmptyRowsMean(Flash):
    """A query that may attend nothing gets the mean of all values: hidden scores are a large finite number."""

    def masked_score(self, c: Array) -> Array:
        return np.full_like(c, -1e30)

    def starts(self, first: int, last: int) -> Iterable[int]:
        return range(0, self.n_k, self.columns)

    def visible(self, rows: Array, columns: Array) -> Array:
        self.causal_here = super().visible(rows, columns)
        return np.ones_like(self.causal_here)

    def hidden(self, c: Array, rows: Array, columns: Array) -> Array:
        hidden = super().hidden(c, rows, columns)
        return np.where(self.causal_here | np.isneginf(hidden), hidden, -1e30)


@wrong(Flash.divided, "SM.total", "SM.4", "empty rows are NaN", "empty rows", link="robertknight/rten/pull/1321")
def empty_rows_nan(self: Flash, acc: Array, total: Array) -> Array:
    """A query that may attend nothing gets 0 divided by 0."""
    return acc / total


@wrong(Flash.mask_of, "SM.2", "mask", link="kohya-ss/musubi-tuner/pull/413")
def mask_of_first_batch(self: Flash, mask: Array, shape: tuple[int, ...]) -> Array:
    """All batches take the mask of the first one."""
    return np.broadcast_to(Flash.mask_of(self, mask, shape)[:1], shape)


@wrong(Flash.mask_of, "SM.2", "mask", link="HKUSTDial/flash-sparse-attention/pull/167")
def mask_of_first_head(self: Flash, mask: Array, shape: tuple[int, ...]) -> Array:
    """All heads take the mask of the first one."""
    return np.broadcast_to(Flash.mask_of(self, mask, shape)[:, :1], shape)


@wrong(Flash.mask_of, "SM.2", "mask", link="pytorch/pytorch/pull/184180")
def mask_offset_by_heads(self: Flash, mask: Array, shape: tuple[int, ...]) -> Array:
    """The mask of head h in batch b is read at b heads + h, as if none of its axes were shared."""
    return offset_by_heads(mask, shape)


@wrong(Flash.masked, "SM.2", "mask", link="vllm-project/vllm-ascend/issues/15503", tiles="columns")
def mask_ends_early(self: Flash, rows: Array, columns: Array) -> Array:
    """The mask is read for the first keys alone, and ignored for the others."""
    return Flash.masked(self, rows, columns) | (columns >= self.columns)


@wrong(Flash.masked, "SM.2", "mask", link="pytorch/pytorch/issues/162588", tiles="columns")
def mask_wraps(self: Flash, rows: Array, columns: Array) -> Array:
    """The index of a key in the mask wraps around: the mask of an earlier tile is read again."""
    return Flash.masked(self, rows, columns % self.columns)


@wrong(Flash.mask_of, "SM.2", "mask", link="microsoft/onnxruntime-genai/pull/1639")
def mask_row_stride(self: Flash, mask: Array, shape: tuple[int, ...]) -> Array:
    """The rows of the mask are read as if they were padded to a multiple of 8 keys."""
    full = np.ascontiguousarray(Flash.mask_of(self, mask, shape))
    stride = -(-shape[3] // 8) * 8
    at = np.arange(shape[2])[:, None] * stride + np.arange(shape[3])[None, :]
    size = max(shape[2] * shape[3], 1)
    return full.reshape(*shape[:2], -1)[:, :, at % size]


@wrong(Flash.mask_of, "SM.2", "mask", link="OpenNMT/OpenNMT-py/pull/2589")
def mask_as_length(self: Flash, mask: Array, shape: tuple[int, ...]) -> Array:
    """A mask of keys is read as a length: as many keys as it leaves are taken from the first one on."""
    counts = np.sum(Flash.mask_of(self, mask, shape), axis=-1, keepdims=True)
    return np.arange(shape[3]) < counts


@wrong(Flash.mask_of, "SM.2", "mask", link="dotnet/TorchSharp/issues/1227")
def mask_transposed(self: Flash, mask: Array, shape: tuple[int, ...]) -> Array:
    """The mask is read with queries and keys exchanged."""
    full = Flash.mask_of(self, mask, shape)
    return np.swapaxes(full, -1, -2) if shape[2] == shape[3] else full


@wrong(Flash.written, "SM.5", "mask", link="vllm-project/vllm-omni/issues/5865")
def rows_of_masked_keys(self: Flash, out: Array, lse: Array) -> tuple[Array, Array]:
    """A mask of keys is applied to the queries, too: the rows of their indices stay 0."""
    if self.mask is None or not np.array_equal(self.mask, np.broadcast_to(self.mask[:, :, :1], self.mask.shape)):
        return out, lse
    kept = np.ones((*out.shape[:3], 1), bool)
    both = min(self.n_q, self.n_k)
    kept[:, :, :both, 0] = self.mask[:, :, 0, :both] if self.n_q else True
    return np.where(kept, out, 0.0), lse
