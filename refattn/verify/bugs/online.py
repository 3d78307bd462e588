"""Faults of the online softmax: the running maximum, the sum, and the accumulator."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from refattn.verify.bugs.emulator import Array, Flash, low
from refattn.verify.bugs.fault import fault, wrong


@wrong(Flash.accumulated, "SM.5", link="microsoft/TileFusion/pull/31", tiles="columns")
def accumulator_not_rescaled(self: Flash, acc: Array, decay: Array, p: Array, v: Array) -> Array:
    """The accumulator is not rescaled when the running maximum moves."""
    return acc + self.store(p) @ v


@wrong(Flash.accumulated, "SM.5", link="Dao-AILab/flash-attention/issues/991", tiles="columns")
def accumulator_rescaled_inversely(self: Flash, acc: Array, decay: Array, p: Array, v: Array) -> Array:
    """The accumulator is divided by the factor that it has to be multiplied by when the running maximum moves."""
    return np.where(decay > 0.0, acc / np.where(decay > 0.0, decay, 1.0), 0.0) + self.store(p) @ v


@wrong(Flash.summed, "SM.total", link="microsoft/TileFusion/pull/31", tiles="columns")
def sum_not_rescaled(self: Flash, total: Array, decay: Array, p: Array) -> Array:
    """The sum of the exponentials is not rescaled when the running maximum moves."""
    return total + np.sum(p, axis=-1, keepdims=True)


@wrong(Flash.decay, "SM.top", "SM.3", "SM.total", "SM.5", link="Dao-AILab/flash-attention/pull/2174", tiles="columns")
def maximum_overwritten_first(self: Flash, old: Array, new: Array) -> Array:
    """The running maximum is overwritten before the old one is used: neither sum nor accumulator is rescaled."""
    return np.ones_like(old)


@fault("SM.top", "SM.3", "SM.total", "SM.5", link="meta-pytorch/MSLK/pull/242", tiles="columns")
class SkippedRescale(Flash):
    """Where the maximum moves by little the rescaling is skipped, but the exponentials are relative to the new one."""

    def maximum(self, top: Array, s: Array) -> Array:
        new = super().maximum(top, s)
        return np.where(np.isneginf(top) | (new - top > 8.0 * np.log(2.0)), new, top)

    def powers(self, s: Array, old: Array, new: Array) -> Array:
        return self.exp(s - self.shift(super().maximum(old, s)))


@fault("SM.top", "SM.3", "SM.total", link="kaist-ina/Trinity-AE/issues/2")
class NoMaximum(Flash):
    """No maximum is subtracted: large scores overflow."""

    def top_at_first(self) -> float:
        return 0.0

    def maximum(self, top: Array, s: Array) -> Array:
        return top

    def exp(self, x: Array) -> Array:
        return np.where(x > 88.7, np.inf, np.exp(np.minimum(x, 88.7))).astype(x.dtype)


@fault("SM.top", "SM.3", "SM.total", link="HabanaAI/vllm-fork/issues/275")
class ConstantMaximum(NoMaximum):
    """A constant, 10, is subtracted in place of the maximum: large scores overflow."""

    def top_at_first(self) -> float:
        return 10.0


@wrong(Flash.shift, "SM.top", "SM.3", "SM.total", "SM.5", link="ROCm/aiter/pull/5364", tiles="columns")
def maximum_of_nothing(self: Flash, top: Array) -> Array:
    """Where all keys so far are hidden, -inf is subtracted from -inf: a tile without a visible key makes rows NaN."""
    return top


@wrong(Flash.begins, "SM.total", "SM.5", "SM.2", link="", tiles="columns")
def last_tile_moved_back(self: Flash, start: int) -> int:
    """A last tile of keys that is not full is moved back until it is, as lax.dynamic_slice does: keys count twice."""
    return min(start, max(self.n_k - self.columns, 0))


@wrong(Flash.inside, "SM.2", "SM.total", "SM.5", link="zml/zml/pull/563", tiles="columns")
def padding_of_last_tile(self: Flash, columns: Array) -> Array:
    """The keys that pad the last tile are not hidden: they count with a score of 0."""
    return np.ones(len(columns), bool)


@fault("SM.2", "SM.total", "SM.5", link="", tiles="columns")
class PaddingOfSmoothedKeys(Flash):
    """The mean of k is subtracted from the keys, not from those that pad the last tile: these count with a score of
    q . mean(k).
    """

    def keys(self, start: int) -> Array:
        found, mean = super().keys(start), np.mean(self.k, axis=2, keepdims=True)
        return np.where(self.exists(start)[:, None], found, mean)

    def exists(self, start: int) -> Array:
        """Tell which keys of a tile are no padding."""
        return np.arange(start, start + self.columns) < self.n_k

    def inside(self, columns: Array) -> Array:
        return np.ones(len(columns), bool)


@wrong(Flash.attend, "SM.total", link="pytorch/pytorch/issues/159247", tiles="columns")
def padding_in_the_sum(self: Flash, rows: Array) -> tuple[Array, Array, Array]:
    """The keys that pad the last tile are in the sum of the exponentials, with an exponential of 1."""
    top, total, acc = Flash.attend(self, rows)
    return top, total + float(-self.n_k % self.columns) * np.exp(-self.shift(top)), acc


@wrong(Flash.starts, "SM.total", "SM.5", "SM.2", link="jax-ml/jax/issues/27224", tiles="columns")
def last_tile_dropped(self: Flash, first: int, last: int) -> Iterable[int]:
    """The number of tiles of keys is rounded down: a last tile that is not full is left out."""
    return (start for start in Flash.starts(self, first, last) if start + self.columns <= self.n_k)


@wrong(Flash.written, "SM.5", "SM.lse", link="OpenNLPLab/lightning-attention/pull/28", tiles="rows")
def last_rows_not_written(self: Flash, out: Array, lse: Array) -> tuple[Array, Array]:
    """The number of tiles of queries is rounded down: the rows of a last tile that is not full stay 0."""
    full = self.n_q // self.rows * self.rows
    kept = (np.arange(self.n_q) < full)[:, None]
    return np.where(kept, out, 0.0), np.where(kept, lse, 0.0)


@fault("SM.5", link="flashinfer-ai/flashinfer/pull/5029", tiles="rows")
class AccumulatorNotReset(Flash):
    """The accumulator is not set to 0 between two tiles of queries."""

    def forward(self) -> tuple[Array, Array]:
        self.left: Array | None = None
        return super().forward()

    def attend(self, rows: Array) -> tuple[Array, Array, Array]:
        top, total, acc = super().attend(rows)
        if self.left is not None:
            acc = acc + self.left[:, :, : len(rows)]
        self.left = acc
        return top, total, acc


@wrong(Flash.summed, "SM.total", "SM.4", link="sonos/tract/pull/2586")
def sum_in_half(self: Flash, total: Array, decay: Array, p: Array) -> Array:
    """The sum of the exponentials is kept in float16."""
    return low(Flash.summed(self, total, decay, p), "float16")


@wrong(Flash.accumulated, "SM.5", link="ggml-org/llama.cpp/pull/24389")
def accumulator_in_half(self: Flash, acc: Array, decay: Array, p: Array, v: Array) -> Array:
    """The accumulator is kept in float16."""
    return low(Flash.accumulated(self, acc, decay, p, v), "float16")


@wrong(Flash.product, "SM.1", link="philipturner/metal-flash-attention/issues/8")
def scores_in_half(self: Flash, q: Array, k: Array) -> Array:
    """The inner products of queries and keys are kept in float16."""
    return low(Flash.product(self, q, k), "float16")


@wrong(
    Flash.forward,
    "SM.4",
    "SM.3",
    "softmax over the queries",
    link="labmlai/annotated_deep_learning_paper_implementations/issues/146",
)
def softmax_over_queries(self: Flash) -> tuple[Array, Array]:
    """The softmax is over the queries of a key, not over the keys of a query."""
    _, lse = Flash.forward(self)
    rows, columns = np.arange(self.n_q), np.arange(self.n_k)
    c = self.capped(self.scaled(self.product(self.q, self.k)))
    s = self.hidden(self.biased(c, rows, columns), rows, columns)
    p = np.exp(s)
    total = np.sum(p, axis=-2, keepdims=True)
    return p / np.where(total > 0.0, total, 1.0) @ self.v, lse
