"""Faults of memory: layouts, strides, heads and batches that are read in the wrong place, and tiles that are stale."""

from __future__ import annotations

import numpy as np

from refattn.verify.bugs.emulator import Array, Flash, Inputs
from refattn.verify.bugs.fault import fault, wrong


def _layout(x: Array) -> Array:
    """Return (b, h, n, w) read from the memory of an array that is stored as (b, n, h, w)."""
    return np.ascontiguousarray(np.swapaxes(x, 1, 2)).reshape(x.shape)


@wrong(Flash.given, "SM.1", "SM.5", "q", "k", "v", link="pytorch/pytorch/issues/181133")
def inputs_of_other_layout(self: Flash, q: Array, k: Array, v: Array) -> Inputs:
    """q, k and v are stored with tokens before heads, and read with heads before tokens."""
    return _layout(q), _layout(k), _layout(v)


@wrong(Flash.given, "SM.1", "q", link="pytorch/pytorch/issues/163597")
def queries_of_other_layout(self: Flash, q: Array, k: Array, v: Array) -> Inputs:
    """q is stored with tokens before heads, and read with heads before tokens."""
    return _layout(q), k, v


@wrong(Flash.written, "SM.5", "out", link="flagos-ai/FlagGems/issues/5235")
def output_of_other_layout(self: Flash, out: Array, lse: Array) -> tuple[Array, Array]:
    """The output is written with tokens before heads, and read with heads before tokens."""
    return _layout(out), lse


@wrong(Flash.given, "SM.5", "v", link="flagos-ai/FlagAttention/issues/45")
def values_with_stride_of_keys(self: Flash, q: Array, k: Array, v: Array) -> Inputs:
    """The rows of v are read with the stride of those of k."""
    (b, g, n, e), d = v.shape, k.shape[3]
    at = np.arange(n)[:, None] * d + np.arange(e)[None, :]
    return q, k, v.reshape(b, g, -1)[:, :, at % max(n * e, 1)]


@wrong(Flash.given, "SM.1", "SM.5", "k", "v", link="Dao-AILab/flash-attention/issues/772")
def keys_of_first_batch(self: Flash, q: Array, k: Array, v: Array) -> Inputs:
    """The stride between batches overflows to 0: all take the keys and values of the first one."""
    return q, np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape)


@wrong(Flash.given, "SM.5", "v", link="Dao-AILab/flash-attention/issues/47")
def values_of_next_batch(self: Flash, q: Array, k: Array, v: Array) -> Inputs:
    """The values are those of another batch."""
    return q, k, np.roll(v, -1, axis=0)


@wrong(Flash.written, "SM.5", "out", link="pytorch/pytorch/issues/139462")
def later_batches_zero(self: Flash, out: Array, lse: Array) -> tuple[Array, Array]:
    """The output of all batches but the first is 0."""
    first = (np.arange(out.shape[0]) == 0)[:, None, None, None]
    return np.where(first, out, 0.0), lse


@wrong(Flash.head_of, "SM.1", "SM.5", "interleaved groups", "grouped heads", link="onnx/onnx/pull/7274")
def groups_tiled(self: Flash, heads: int, groups: int) -> Array:
    """Key/value heads are repeated one after the other: query head h takes head h mod g, not floor(h g / heads)."""
    return np.arange(heads) % max(groups, 1)


@wrong(Flash.head_of, "SM.1", "SM.5", "grouped heads", link="EricLBuehler/candle-vllm/pull/52")
def groups_of_first(self: Flash, heads: int, groups: int) -> Array:
    """All query heads take the first key/value head."""
    return np.zeros(heads, int) if groups != heads else np.arange(heads)


@fault("SM.2", "SM.total", "SM.5", link="hw-native-sys/simpler/pull/72", tiles="columns")
class LastTileReadsOn(Flash):
    """The last tile reads on into the next head: its first keys and values are attended, too."""

    def inside(self, columns: Array) -> Array:
        return np.ones(len(columns), bool)

    def tile(self, x: Array, start: int) -> Array:
        b, h, n, width = x.shape
        flat = x.reshape(b * h * n, width)
        at = (np.arange(b * h) * n)[:, None] + np.arange(start, start + self.columns)[None, :]
        part = np.where((at < len(flat))[..., None], flat[at % len(flat)], 0.0)
        return part.reshape(b, h, self.columns, width)


@wrong(Flash.values, "SM.5", "v", link="ggml-org/llama.cpp/pull/26434", tiles="columns")
def stale_values(self: Flash, start: int) -> Array:
    """The tile of values is that of the step before: it is read before the new one has come."""
    return Flash.values(self, max(start - self.columns, 0))


@wrong(Flash.values, "SM.5", "v", link="ggml-org/llama.cpp/pull/13438", tiles="columns")
def values_overwritten(self: Flash, start: int) -> Array:
    """The tile of values is overwritten by the next one before it is read."""
    return Flash.values(self, start + self.columns if start + self.columns < self.n_k else start)


@wrong(Flash.keys, "SM.1", "k", link="ggml-org/llama.cpp/pull/28358", tiles="columns")
def stale_keys(self: Flash, start: int) -> Array:
    """The tile of keys is that of the step before: it is read before the new one has come."""
    return Flash.keys(self, max(start - self.columns, 0))
