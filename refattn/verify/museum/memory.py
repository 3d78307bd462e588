"""Faults of memory: layouts, strides, heads and batches that are read in the wrong place, and tiles that are stale."""

from __future__ import annotations

import numpy as np

from refattn.verify.museum.emulator import Array, Flash
from refattn.verify.museum.fault import fault


def _layout(x: Array) -> Array:
    """Return (b, h, n, w) read from the memory of an array that is stored as (b, n, h, w)."""
    return np.ascontiguousarray(np.swapaxes(x, 1, 2)).reshape(x.shape)


@fault("SM.1", "SM.5", "q", "k", "v", link="pytorch/pytorch/issues/181133")
class InputsOfOtherLayout(Flash):
    """q, k and v are stored with tokens before heads, and read with heads before tokens."""

    def given(self, q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array, Array | None]:
        return _layout(q), _layout(k), _layout(v), mask


@fault("SM.1", "q", link="pytorch/pytorch/issues/163597")
class QueriesOfOtherLayout(Flash):
    """q is stored with tokens before heads, and read with heads before tokens."""

    def given(self, q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array, Array | None]:
        return _layout(q), k, v, mask


@fault("SM.5", "out", link="flagos-ai/FlagGems/issues/5235")
class OutputOfOtherLayout(Flash):
    """The output is written with tokens before heads, and read with heads before tokens."""

    def written(self, out: Array, lse: Array) -> tuple[Array, Array]:
        return _layout(out), lse


@fault("SM.5", "v", link="flagos-ai/FlagAttention/issues/45")
class ValuesWithStrideOfKeys(Flash):
    """The rows of v are read with the stride of those of k."""

    def given(self, q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array, Array | None]:
        (b, g, n, e), d = v.shape, k.shape[3]
        at = np.arange(n)[:, None] * d + np.arange(e)[None, :]
        return q, k, v.reshape(b, g, -1)[:, :, at % max(n * e, 1)], mask


@fault("SM.1", "SM.5", "k", "v", link="Dao-AILab/flash-attention/issues/772")
class KeysOfFirstBatch(Flash):
    """The stride between batches overflows to 0: all take the keys and values of the first one."""

    def given(self, q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array, Array | None]:
        return q, np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape), mask


@fault("SM.5", "v", link="Dao-AILab/flash-attention/issues/47")
class ValuesOfNextBatch(Flash):
    """The values are those of another batch."""

    def given(self, q: Array, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array, Array | None]:
        return q, k, np.roll(v, -1, axis=0), mask


@fault("SM.5", "out", link="pytorch/pytorch/issues/139462")
class LaterBatchesZero(Flash):
    """The output of all batches but the first is 0."""

    def written(self, out: Array, lse: Array) -> tuple[Array, Array]:
        first = (np.arange(out.shape[0]) == 0)[:, None, None, None]
        return np.where(first, out, 0.0), lse


@fault("SM.1", "SM.5", "interleaved groups", "grouped heads", link="onnx/onnx/pull/7274")
class GroupsTiled(Flash):
    """Key/value heads are repeated one after the other: query head h takes head h mod g, not floor(h g / heads)."""

    def head_of(self, heads: int, groups: int) -> Array:
        return np.arange(heads) % max(groups, 1)


@fault("SM.1", "SM.5", "grouped heads", link="EricLBuehler/candle-vllm/pull/52")
class GroupsOfFirst(Flash):
    """All query heads take the first key/value head."""

    def head_of(self, heads: int, groups: int) -> Array:
        return np.zeros(heads, int) if groups != heads else np.arange(heads)


@fault("SM.2", "SM.total", "SM.5", link="hw-native-sys/simpler/pull/72", tiles="columns")
class LastTileReadsOn(Flash):
    """The last tile reads on into the next head: its first keys and values are attended, too."""

    def inside(self, columns: Array) -> Array:
        return np.ones(len(columns), bool)

    def masked(self, rows: Array, columns: Array) -> Array:
        return super().masked(rows, columns) | ~super().inside(columns)

    def tile(self, x: Array, start: int) -> Array:
        b, h, n, width = x.shape
        flat = x.reshape(b * h * n, width)
        at = (np.arange(b * h) * n)[:, None] + np.arange(start, start + self.columns)[None, :]
        part = np.where((at < len(flat))[..., None], flat[at % len(flat)], 0.0)
        return part.reshape(b, h, self.columns, width)


@fault("SM.5", "v", link="ggml-org/llama.cpp/pull/26434", tiles="columns")
class StaleValues(Flash):
    """The tile of values is that of the step before: it is read before the new one has come."""

    def values(self, start: int) -> Array:
        return super().values(max(start - self.columns, 0))


@fault("SM.5", "v", link="ggml-org/llama.cpp/pull/13438", tiles="columns")
class ValuesOverwritten(Flash):
    """The tile of values is overwritten by the next one before it is read."""

    def values(self, start: int) -> Array:
        return super().values(start + self.columns if start + self.columns < self.n_k else start)


@fault("SM.1", "k", link="ggml-org/llama.cpp/pull/28358", tiles="columns")
class StaleKeys(Flash):
    """The tile of keys is that of the step before: it is read before the new one has come."""

    def keys(self, start: int) -> Array:
        return super().keys(max(start - self.columns, 0))
