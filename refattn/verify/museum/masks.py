"""Faults of masks and of causality."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from refattn.verify.museum.emulator import Array, Flash, Place
from refattn.verify.museum.fault import fault


def offset_by_heads(x: Array, shape: tuple[int, ...]) -> Array:
    """Return an array of pairs, that of head h in batch b from where it would be if no axis were shared."""
    full = x.reshape((1,) * (4 - x.ndim) + x.shape)
    flat = full.reshape(-1, *full.shape[2:])
    at = np.arange(shape[0] * shape[1]) % max(len(flat), 1)
    return np.broadcast_to(flat[at].reshape(*shape[:2], *flat.shape[1:]), shape)


@fault("SM.2", "causal mask", link="jax-ml/jax/issues/19237")
class CausalIgnored(Flash):
    """The causal mask is ignored."""

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        return None


@fault("SM.2", "causal mask", link="google/torchax/issues/39")
class CausalAlways(Flash):
    """The kernel is causal whether it is asked for or not."""

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        return super().offset_of(True if causal is False else causal, queries, keys, mask)


@fault("SM.2", "top-left causality", "causal mask", link="tinygrad/tinygrad/pull/15949")
class CausalTopLeft(Flash):
    """The causal mask is aligned at the first key: the keys of the past are not seen."""

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        return None if causal is False else self.place if self.placed else 0


@fault("SM.2", "bottom-right causality", "causal mask", link="ml-explore/mlx/issues/2835")
class CausalBottomRight(Flash):
    """The causal mask is aligned at the last key where the first one was asked for."""

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        return None if causal is False else self.place if self.placed else self.place_of(None, True, queries, keys)


@fault("SM.2", "causal mask", link="RVC-Boss/GPT-SoVITS/issues/965")
class CausalOneTooMany(Flash):
    """A query sees one key too many: the next token."""

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        offset = super().offset_of(causal, queries, keys, mask)
        return None if offset is None else offset + 1


@fault("SM.2", "a token does not see itself", "causal mask", link="pytorch/tutorials/issues/2250")
class CausalStrict(Flash):
    """A query does not see the key of its own token."""

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        offset = super().offset_of(causal, queries, keys, mask)
        return None if offset is None else offset - 1


@fault("SM.2", "causal mask", "mask", link="huggingface/transformers/pull/48769")
class CausalIgnoredWithMask(Flash):
    """Where a mask is given the causal one is ignored."""

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        return super().offset_of(causal, queries, keys, mask) if mask is None else None


@fault("SM.2", "causal mask", "mask", "mask ignored", link="huggingface/transformers/issues/37807")
class MaskIgnoredWithCausal(Flash):
    """In a causal call the mask is ignored."""

    def masked(self, rows: Array, columns: Array) -> Array:
        found = super().masked(rows, columns)
        return found if self.offset is None else np.ones_like(found)


@fault("SM.2", "top-left causality", "causal mask", link="huggingface/transformers/pull/30311")
class CausalForOneQueryTopLeft(Flash):
    """A single query is taken for the first one: it sees the first key alone."""

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        offset = super().offset_of(causal, queries, keys, mask)
        return offset if queries != 1 or offset is None else 0


@fault("SM.2", "causal mask", link="triton-lang/triton/pull/8853", tiles="both")
class CausalFirstStage(Flash):
    """The tiles before the diagonal are not masked, and their number is rounded up: keys of the future are seen."""

    def visible(self, rows: Array, columns: Array) -> Array:
        if self.offset is None:
            return super().visible(rows, columns)
        first = int(rows[0]) // self.rows * self.rows + self.offset
        before = columns < -(-first // self.columns) * self.columns
        return super().visible(rows, columns) | before


@fault("SM.2", "causal mask", link="Dao-AILab/flash-attention/pull/436", tiles="both")
class CausalInLastTileAlone(Flash):
    """The causal mask is applied in the last tile of keys that is visited, where the diagonal crosses two."""

    def visible(self, rows: Array, columns: Array) -> Array:
        if self.offset is None:
            return super().visible(rows, columns)
        last = max(self.starts(int(rows[0]), int(rows[-1]) + 1), default=0)
        return super().visible(rows, columns) | (columns < last)[None, :]


@fault("SM.2", "SM.total", "SM.5", "causal mask", link="triton-lang/triton/pull/2033", tiles="both")
class CausalLoopWithoutOffset(Flash):
    """The loop over keys ends at the last query of the tile, as if there were as many keys as queries."""

    def starts(self, first: int, last: int) -> Iterable[int]:
        end = self.n_k if self.offset is None else min(self.n_k, last, last + int(np.max(self.offset)))
        return range(0, max(end, 0), self.columns)


@fault("SM.2", "mask ignored", "mask", link="pacman100/LLM-Workshop/issues/1")
class MaskIgnored(Flash):
    """The mask is ignored."""

    def masked(self, rows: Array, columns: Array) -> Array:
        return np.ones_like(super().masked(rows, columns))


@fault("SM.2", "mask inverted", "mask", link="rasbt/LLMs-from-scratch/issues/1061")
class MaskInverted(Flash):
    """True in a mask is taken for "may not attend"."""

    def masked(self, rows: Array, columns: Array) -> Array:
        return ~super().masked(rows, columns)


class _Soft(Flash):
    """A mask that is no -inf: subclasses say what a hidden score becomes."""

    def masked(self, rows: Array, columns: Array) -> Array:
        self.mask_here = super().masked(rows, columns)
        return np.ones_like(self.mask_here)

    def hidden(self, c: Array, allowed: Array) -> Array:
        if self.mask is None:
            return super().hidden(c, allowed)
        return super().hidden(np.where(self.mask_here, c, self.instead(c)), allowed)

    def instead(self, c: Array) -> Array:
        raise NotImplementedError


@fault("SM.2", "mask", link="ml-explore/mlx/issues/2626")
class MaskAdded(_Soft):
    """The mask is added to the scores as 1 and 0: hidden keys have a score that is 1 lower."""

    def instead(self, c: Array) -> Array:
        return c - 1.0


@fault("SM.2", "mask", "empty rows", link="huggingface/transformers/issues/10484")
class MaskOfTenThousand(_Soft):
    """The mask adds -10000, not -inf: a query that may attend nothing attends everything."""

    def instead(self, c: Array) -> Array:
        return c - 10000.0


@fault("SM.2", "masked keys have a score of 0", "mask", link="Shujun-He/RibonanzaNet/issues/5")
class MaskOfTinyNumber(_Soft):
    """Hidden scores become -1e-9, which is as good as 0."""

    def instead(self, c: Array) -> Array:
        return np.full_like(c, -1e-9)


@fault("SM.2", "SM.top", "empty rows get the mean", "empty rows", link="microsoft/onnxruntime/pull/28958")
class EmptyRowsMean(_Soft):
    """A query that may attend nothing gets the mean of all values: hidden scores are a large finite number."""

    def instead(self, c: Array) -> Array:
        return np.full_like(c, -1e30)

    def starts(self, first: int, last: int) -> Iterable[int]:
        return range(0, self.n_k, self.columns)

    def visible(self, rows: Array, columns: Array) -> Array:
        self.causal_here = super().visible(rows, columns)
        return np.ones_like(self.causal_here)

    def hidden(self, c: Array, allowed: Array) -> Array:
        return super().hidden(np.where(self.causal_here, c, -1e30), allowed)


@fault("SM.total", "SM.4", "empty rows are NaN", "empty rows", link="robertknight/rten/pull/1321")
class EmptyRowsNaN(Flash):
    """A query that may attend nothing gets 0 divided by 0."""

    def divided(self, acc: Array, total: Array) -> Array:
        return acc / total


@fault("SM.2", "mask", link="kohya-ss/musubi-tuner/pull/413")
class MaskOfFirstBatch(Flash):
    """All batches take the mask of the first one."""

    def mask_of(self, mask: Array, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(super().mask_of(mask, shape)[:1], shape)


@fault("SM.2", "mask", link="HKUSTDial/flash-sparse-attention/pull/167")
class MaskOfFirstHead(Flash):
    """All heads take the mask of the first one."""

    def mask_of(self, mask: Array, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(super().mask_of(mask, shape)[:, :1], shape)


@fault("SM.2", "mask", link="pytorch/pytorch/pull/184180")
class MaskOffsetByHeads(Flash):
    """The mask of head h in batch b is read at b heads + h, as if none of its axes were shared."""

    def mask_of(self, mask: Array, shape: tuple[int, ...]) -> Array:
        return offset_by_heads(mask, shape)


@fault("SM.2", "mask", link="vllm-project/vllm-ascend/issues/15503", tiles="columns")
class MaskEndsEarly(Flash):
    """The mask is read for the first keys alone, and ignored for the others."""

    def masked(self, rows: Array, columns: Array) -> Array:
        return super().masked(rows, columns) | (columns >= self.columns)


@fault("SM.2", "mask", link="pytorch/pytorch/issues/162588", tiles="columns")
class MaskWraps(Flash):
    """The index of a key in the mask wraps around: the mask of an earlier tile is read again."""

    def masked(self, rows: Array, columns: Array) -> Array:
        return super().masked(rows, columns % self.columns)


@fault("SM.2", "mask", link="microsoft/onnxruntime-genai/pull/1639")
class MaskRowStride(Flash):
    """The rows of the mask are read as if they were padded to a multiple of 8 keys."""

    def mask_of(self, mask: Array, shape: tuple[int, ...]) -> Array:
        full = np.ascontiguousarray(super().mask_of(mask, shape))
        stride = -(-shape[3] // 8) * 8
        at = np.arange(shape[2])[:, None] * stride + np.arange(shape[3])[None, :]
        size = max(shape[2] * shape[3], 1)
        return full.reshape(*shape[:2], -1)[:, :, at % size]


@fault("SM.2", "mask", link="OpenNMT/OpenNMT-py/pull/2589")
class MaskAsLength(Flash):
    """A mask of keys is read as a length: as many keys as it leaves are taken from the first one on."""

    def mask_of(self, mask: Array, shape: tuple[int, ...]) -> Array:
        counts = np.sum(super().mask_of(mask, shape), axis=-1, keepdims=True)
        return np.arange(shape[3]) < counts


@fault("SM.2", "mask", link="dotnet/TorchSharp/issues/1227")
class MaskTransposed(Flash):
    """The mask is read with queries and keys exchanged."""

    def mask_of(self, mask: Array, shape: tuple[int, ...]) -> Array:
        full = super().mask_of(mask, shape)
        return np.swapaxes(full, -1, -2) if shape[2] == shape[3] else full


@fault("SM.5", "mask", link="vllm-project/vllm-omni/issues/5865")
class RowsOfMaskedKeys(Flash):
    """A mask of keys is applied to the queries, too: the rows of their indices stay 0."""

    def written(self, out: Array, lse: Array) -> tuple[Array, Array]:
        if self.mask is None or not np.array_equal(self.mask, np.broadcast_to(self.mask[:, :, :1], self.mask.shape)):
            return out, lse
        kept = np.ones((*out.shape[:3], 1), bool)
        both = min(self.n_q, self.n_k)
        kept[:, :, :both, 0] = self.mask[:, :, 0, :both] if self.n_q else True
        return np.where(kept, out, 0.0), lse
