"""A flash kernel of softmax attention in plain NumPy: keys in tiles with an online maximum, and a recomputing backward.

It is right for any sizes of its tiles. Each step is a method, so that a fault is a few lines: another step. Arrays are
(b, h, ...) with keys and values repeated for each query head, and tiles of keys are padded with zeros to their full
size, as they are in a kernel's memory. A place is where query 0 stands among the keys: a whole number, or
(b, 1, 1, 1) where sequences differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refattn.golden.storage_types import round_to

Array = NDArray[Any]
Inputs = tuple[Array, Array, Array]
Place = Any
Round = Callable[[Array], Array]


def _as_is(x: Array) -> Array:
    return x


def low(x: Array, dtype: str) -> Array:
    """Return an array whose values are rounded to a shorter type."""
    return np.asarray(round_to(x.astype(np.float64), dtype), x.dtype)


class Unknown(ValueError):  # noqa: N818
    """An option that the emulator does not have."""


def _existing(x: Array, lengths: Array | None) -> Array:
    """Return an array with zeros in place of what does not exist, which may be anything."""
    return x if lengths is None else np.where(np.arange(x.shape[2])[:, None] < lengths[:, None, None, None], x, 0.0)


class Kernel:
    """What the emulators share: sizes of tiles, the storage type, and heads that share others.

    Parameters
    ----------
    rows, columns
        Queries and keys of a tile. A kernel that goes over tokens in chunks has as many in a chunk as there are rows.
    store
        Rounds to the storage type: what goes into a product of weights, and results.
    """

    options: frozenset[str]
    """What a call may have."""

    def __init__(self, rows: int = 64, columns: int = 64, store: Round = _as_is) -> None:
        self.rows, self.chunk, self.columns, self.store = rows, rows, columns, store

    def run(
        self, inputs: Mapping[str, Array], options: Mapping[str, Any], d_out: Array | None, working: Any = np.float64
    ) -> dict[str, Array]:
        """Return outputs and, where there is an upstream gradient, the gradients, by name."""
        raise NotImplementedError

    def known(self, *given: Iterable[str]) -> None:
        """Raise `Unknown` where a call has something else than the options."""
        if unknown := sorted({*itertools.chain(*given)} - self.options):
            raise Unknown(f"the emulator has no {', '.join(unknown)}")

    def head_of(self, heads: int, groups: int) -> Array:
        """Return the key/value head of each query head."""
        return np.arange(heads) // max(heads // max(groups, 1), 1)

    def per_group(self, d_x: Array, groups: int) -> Array:
        """Sum the gradient of keys or values over the query heads that share them."""
        found = np.zeros((d_x.shape[0], groups, *d_x.shape[2:]), d_x.dtype)
        for head, group in enumerate(self.head_of(d_x.shape[1], groups)):
            found[:, group] += d_x[:, head]
        return found


class Flash(Kernel):
    """The kernel, with its tile sizes."""

    options = frozenset("q k v mask causal scale softcap window offset bias sink keep q_lengths k_lengths".split())

    d_lse: Array | None = None
    """The gradient of lse, (b, h, i); None where none is asked."""

    # What is read

    def given(self, q: Array, k: Array, v: Array) -> Inputs:
        """Return the inputs as the kernel reads them."""
        return q, k, v

    def scale_of(self, scale: float | None, d: int) -> float:
        """Return the factor of the scores."""
        return 1.0 / math.sqrt(d) if scale is None else scale

    def offset_of(self, causal: Any, queries: int, keys: int, mask: Array | None) -> Place:
        """Return the causal offset: query i may attend key j where j <= i + offset; None without a causal mask."""
        return None if causal is False else self.place

    def mask_of(self, mask: Array, shape: tuple[int, ...]) -> Array:
        """Return the mask for every batch, head, query and key."""
        return np.broadcast_to(mask, shape)

    def bias_of(self, bias: Array, shape: tuple[int, ...]) -> Array:
        """Return the bias of every batch, head, query and key."""
        return np.broadcast_to(bias, shape)

    def keep_of(self, keep: Array, shape: tuple[int, ...]) -> Array:
        """Return the factors of dropout for every batch, head, query and key."""
        return np.broadcast_to(keep, shape)

    def sinks_of(self, sink: Array, heads: int) -> Array:
        """Return the sinks of every query head, (h, s)."""
        return sink.reshape(heads, -1)

    def lengths_of(self, lengths: Array, size: int) -> Array:
        """Return how many queries or keys of each sequence exist."""
        return lengths

    def window_of(self, window: Any, queries: int, keys: int) -> Any:
        """Return how many keys to the left and to the right of its own place a query may attend."""
        return window

    def place_of(self, offset: Any, causal: Any, queries: int, keys: int) -> Place:
        """Return where query 0 stands among the keys: those that exist end together unless it is told otherwise."""
        if offset is not None:
            return offset if isinstance(offset, int) else np.asarray(offset)[:, None, None, None]
        if causal == "top_left":
            return 0
        if self.q_lengths is None and self.k_lengths is None:
            return keys - queries
        last_key = keys if self.k_lengths is None else self.k_lengths
        last_query = queries if self.q_lengths is None else self.q_lengths
        return np.asarray(last_key - last_query)[:, None, None, None]

    # The loop over tiles

    def starts(self, first: int, last: int) -> Iterable[int]:
        """Return where the tiles of keys begin that the queries from `first` to before `last` visit."""
        end = self.n_k if self.offset is None else min(self.n_k, max(last + int(np.max(self.offset)), 0))
        return range(0, end, self.columns)

    def begins(self, start: int) -> int:
        """Return where a tile of keys is read from."""
        return start

    def tile(self, x: Array, start: int) -> Array:
        """Return a tile of keys or values, padded with zeros."""
        part = x[:, :, start : start + self.columns]
        pad = self.columns - part.shape[2]
        return np.pad(part, ((0, 0), (0, 0), (0, pad), (0, 0))) if pad else part

    def keys(self, start: int) -> Array:
        return self.tile(self.k, start)

    def values(self, start: int) -> Array:
        return self.tile(self.v, start)

    def inside(self, columns: Array) -> Array:
        """Tell which columns of a tile are keys, and no padding."""
        return columns < self.n_k

    def visible(self, rows: Array, columns: Array) -> Array:
        """Tell which keys the causal mask leaves to which queries."""
        if self.offset is None:
            return np.ones((len(rows), len(columns)), bool)
        return columns[None, :] <= rows[:, None] + self.offset

    def near(self, rows: Array, columns: Array) -> Array:
        """Tell which keys the window leaves to which queries."""
        assert self.window is not None
        (left, right), at = self.window, rows[:, None] + self.place
        pairs = np.ones(np.broadcast_shapes(at.shape, (1, len(columns))), bool)
        pairs = pairs if left is None else pairs & (columns >= at - left)
        return pairs if right is None else pairs & (columns <= at + right)

    def exist(self, rows: Array, columns: Array) -> Array:
        """Tell which pairs are of a query and a key that exist."""
        pairs = np.ones((1, 1, len(rows), len(columns)), bool)
        if self.q_lengths is not None:
            pairs = pairs & (rows[:, None] < self.q_lengths[:, None, None, None])
        if self.k_lengths is not None:
            pairs = pairs & (columns < self.k_lengths[:, None, None, None])
        return pairs

    def allowed(self, rows: Array, columns: Array) -> Array:
        """Tell which pairs of a tile may attend if no mask is given: (rows, columns), or (b, h, rows, columns)."""
        pairs = self.inside(columns)[None, :] & self.visible(rows, columns)
        if self.window is not None:
            pairs = pairs & self.near(rows, columns)
        if self.q_lengths is not None or self.k_lengths is not None:
            pairs = pairs & self.exist(rows, columns)
        return pairs

    def masked(self, rows: Array, columns: Array) -> Array:
        """Return the mask of a tile; it hides no padding."""
        assert self.mask is not None
        return self.of_tile(self.mask, rows, columns) | (columns >= self.n_k)

    def of_tile(self, x: Array, rows: Array, columns: Array) -> Array:
        """Return the part of an array of pairs that belongs to a tile; the last key's where there is none."""
        return x[:, :, rows[:, None], np.minimum(columns, self.n_k - 1)[None, :]]

    # Scores

    def matmul(self, a: Array, b: Array) -> Array:
        """Return a product of matrices."""
        return a @ b

    def product(self, q: Array, k: Array) -> Array:
        return self.matmul(q, np.swapaxes(k, -1, -2))

    def scaled(self, product: Array) -> Array:
        return product * self.scale

    def capped(self, s: Array) -> Array:
        return s if self.softcap is None else self.softcap * np.tanh(s / self.softcap)

    def biased(self, c: Array, rows: Array, columns: Array) -> Array:
        return c if self.bias is None else c + self.of_tile(self.bias, rows, columns)

    def masked_score(self, c: Array) -> Array:
        """Return what the scores become that the mask hides."""
        return np.full_like(c, -np.inf)

    def hidden(self, c: Array, rows: Array, columns: Array) -> Array:
        """Return the scores with -inf where a pair may not attend."""
        if self.mask is not None:
            c = np.where(self.masked(rows, columns), c, self.masked_score(c))
        return np.where(self.allowed(rows, columns), c, -np.inf)

    def scores(self, rows: Array, start: int) -> Array:
        """Return the scores of a tile, capped, biased and masked."""
        columns = np.arange(start, start + self.columns)
        c = self.capped(self.scaled(self.product(self.q[:, :, rows], self.keys(start))))
        return self.hidden(self.biased(c, rows, columns), rows, columns)

    # The online softmax

    def top_at_first(self) -> float:
        return -np.inf

    def maximum(self, top: Array, s: Array) -> Array:
        """Return the running maximum after a tile."""
        return np.maximum(top, np.max(s, axis=-1, keepdims=True))

    def shift(self, top: Array) -> Array:
        """Return what is subtracted: the maximum, or 0 where all is hidden so far."""
        return np.where(np.isneginf(top), 0.0, top).astype(top.dtype)

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def decay(self, old: Array, new: Array) -> Array:
        """Return the factor of what was summed relative to the old maximum."""
        return self.exp(old - self.shift(new))

    def powers(self, s: Array, old: Array, new: Array) -> Array:
        return self.exp(s - self.shift(new))

    def summed(self, total: Array, decay: Array, p: Array) -> Array:
        return total * decay + np.sum(p, axis=-1, keepdims=True)

    def accumulated(self, acc: Array, decay: Array, p: Array, v: Array) -> Array:
        return acc * decay + self.matmul(self.stored_weights(p), v)

    def stored_weights(self, p: Array) -> Array:
        """Return weights, or their gradients, as they go into a product."""
        return self.store(p)

    def stored_scores(self, d_s: Array) -> Array:
        """Return the gradients of the scores, which are not scaled yet, as they go into products."""
        return self.stored_weights(d_s)

    def dropped(self, p: Array, rows: Array, start: int) -> Array:
        """Return the exponentials, or weights, after dropout."""
        return p if self.keep is None else p * self.of_tile(self.keep, rows, np.arange(start, start + self.columns))

    def with_sinks(self, top: Array, total: Array, acc: Array, rows: Array) -> tuple[Array, Array, Array]:
        """Add the sinks, which have no value, to the sum."""
        if self.sink is None:
            return top, total, acc
        sinks = np.broadcast_to(self.sink[:, None, :], (*top.shape[:3], self.sink.shape[1]))
        if self.q_lengths is not None:
            sinks = np.where(rows[:, None] < self.q_lengths[:, None, None, None], sinks, -np.inf)
        new = np.maximum(top, np.max(sinks, axis=-1, keepdims=True))
        decay = np.where(np.isneginf(top), 0.0, np.exp(top - self.shift(new))).astype(top.dtype)
        added = np.sum(np.exp(sinks - self.shift(new)), axis=-1, keepdims=True)
        return new, total * decay + added, acc * decay

    def empty(self, rows: Array) -> tuple[Array, Array, Array]:
        """Return the running maximum, sum and accumulator that a tile of queries begins with."""
        shape, like = (*self.q.shape[:2], len(rows)), self.q.dtype
        return (
            np.full((*shape, 1), self.top_at_first(), like),
            np.zeros((*shape, 1), like),
            np.zeros((*shape, self.v.shape[-1]), like),
        )

    def attend(self, rows: Array) -> tuple[Array, Array, Array]:
        """Return the maximum, sum and accumulator of a tile of queries."""
        top, total, acc = self.empty(rows)
        for start in map(self.begins, self.starts(int(rows[0]), int(rows[-1]) + 1)):
            s = self.scores(rows, start)
            new = self.maximum(top, s)
            p, decay = self.powers(s, top, new), self.decay(top, new)
            total = self.summed(total, decay, p)
            acc = self.accumulated(acc, decay, self.dropped(p, rows, start), self.values(start))
            top = new
        return top, total, acc

    def divided(self, acc: Array, total: Array) -> Array:
        """Return the output: 0 where nothing may be attended."""
        return acc / np.where(total > 0.0, total, 1.0)

    def lse_of(self, top: Array, total: Array) -> Array:
        return np.where(total > 0.0, self.shift(top) + np.log(np.where(total > 0.0, total, 1.0)), -np.inf)

    def query_tiles(self) -> Iterable[Array]:
        return (np.arange(i, min(i + self.rows, self.n_q)) for i in range(0, self.n_q, self.rows))

    def forward(self) -> tuple[Array, Array]:
        """Return (out, lse): (b, h, i, e) and (b, h, i, 1)."""
        out = np.zeros((*self.q.shape[:3], self.v.shape[-1]), self.q.dtype)
        lse = np.full((*self.q.shape[:3], 1), -np.inf, self.q.dtype)
        for rows in self.query_tiles():
            top, total, acc = self.with_sinks(*self.attend(rows), rows)
            out[:, :, rows], lse[:, :, rows] = self.divided(acc, total), self.lse_of(top, total)
        return out, lse

    def written(self, out: Array, lse: Array) -> tuple[Array, Array]:
        """Return the results as the kernel stores them."""
        return out, lse

    def lse_given(self, lse: Array) -> Array:
        """Return lse as its caller gets it; the backward has its own."""
        return lse

    # The backward, from out and lse

    def upstream(self, d_out: Array) -> Array:
        """Return the upstream gradient as the kernel reads it."""
        return d_out

    def delta(self, out: Array, d_out: Array) -> Array:
        return np.sum(out * d_out, axis=-1, keepdims=True)

    def lse_read(self, lse: Array) -> Array:
        """Return lse as the backward reads it."""
        return lse

    def recomputed(self, rows: Array, start: int, lse: Array) -> Array:
        """Return the weights of a tile."""
        s = self.scores(rows, start)
        return np.where(np.isneginf(lse), 0.0, self.exp(s - self.shift(lse))).astype(s.dtype)

    def d_weights(self, d_out: Array, v: Array) -> Array:
        return self.matmul(d_out, np.swapaxes(v, -1, -2))

    def d_scores(self, p: Array, d_p: Array, delta: Array) -> Array:
        return p * (d_p - delta)

    def slope(self, rows: Array, start: int) -> Any:
        """Return the slope of the soft-cap in a tile."""
        if self.softcap is None:
            return 1.0
        tanh = np.tanh(self.scaled(self.product(self.q[:, :, rows], self.keys(start))) / self.softcap)
        return 1.0 - tanh * tanh

    def visits(self, rows: Array, start: int) -> bool:
        """Tell whether the backward has to look at a tile."""
        return start in self.starts(int(rows[0]), int(rows[-1]) + 1)

    def add_query(self, d_q: Array, rows: Array, start: int, part: Array) -> None:
        d_q[:, :, rows] += part

    def add_key(self, d_x: Array, rows: Array, start: int, part: Array) -> None:
        """Add to the gradient of keys or values."""
        end = min(start + self.columns, self.n_k)
        d_x[:, :, start:end] += part[:, :, : end - start]

    def scale_of_query(self) -> float:
        return self.scale

    def scale_of_key(self) -> float:
        return self.scale

    def backward(self, out: Array, lse: Array, d_out: Array, groups: int) -> dict[str, Array]:
        """Return the gradients of q, k and v."""
        d_out, lse = self.upstream(d_out), self.lse_read(lse)
        if self.q_lengths is not None:
            d_out = np.where(np.arange(self.n_q)[:, None] < self.q_lengths[:, None, None, None], d_out, 0.0)
        delta = self.delta(out, d_out)
        if self.d_lse is not None:
            delta = delta - np.where(np.isneginf(lse), 0.0, self.d_lse[..., None])
        found = {name: np.zeros((*lse.shape[:3], self.n_k), lse.dtype) for name in self.pairs}
        d_q, d_k, d_v = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)
        for start in range(0, self.n_k, self.columns):
            for rows in self.query_tiles():
                if not self.visits(rows, start):
                    continue
                at = self.begins(start)
                p = self.recomputed(rows, at, lse[:, :, rows])
                y, columns = self.dropped(p, rows, at), np.arange(at, min(at + self.columns, self.n_k))
                weights = np.swapaxes(self.stored_weights(y), -1, -2)
                self.add_key(d_v, rows, at, self.matmul(weights, d_out[:, :, rows]))
                d_y = self.d_weights(d_out[:, :, rows], self.values(at))
                d_c = self.d_scores(p, self.dropped(d_y, rows, at), delta[:, :, rows])
                for name, pair in (("d_bias", d_c), ("d_keep", d_y * p)):
                    if name in found:
                        found[name][:, :, rows[:, None], columns] += pair[..., : len(columns)]
                d_s = self.stored_scores(d_c * self.slope(rows, at))
                self.add_query(d_q, rows, at, self.matmul(d_s, self.keys(at)) * self.scale_of_query())
                of_keys = self.matmul(np.swapaxes(d_s, -1, -2), self.q[:, :, rows])
                self.add_key(d_k, rows, at, of_keys * self.scale_of_key())
        found = {name: self.as_given(x, self.pairs[name]) for name, x in found.items()}
        if self.sink is not None:
            found["d_sink"] = self.d_sinks(lse, delta).reshape(self.sink_shape)
        return found | {"d_q": d_q, "d_k": self.per_group(d_k, groups), "d_v": self.per_group(d_v, groups)}

    def as_given(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Sum the gradient of an array of pairs over the axes that it was broadcast along."""
        wide = (1,) * (4 - len(shape)) + tuple(shape)
        axes = tuple(axis for axis, size in enumerate(wide) if size == 1)
        return np.sum(x, axis=axes, keepdims=True).reshape(shape)

    def d_sinks(self, lse: Array, delta: Array) -> Array:
        assert self.sink is not None
        weights = np.where(np.isneginf(lse), 0.0, np.exp(self.sink[:, None, :] - self.shift(lse)))
        return -np.sum(weights * delta, axis=(0, 2))

    # All of it

    def run(
        self, inputs: Mapping[str, Array], options: Mapping[str, Any], d_out: Array | None, working: Any = np.float64
    ) -> dict[str, Array]:
        """Return out, lse and, where there is an upstream gradient, the gradients, by name.

        Parameters
        ----------
        inputs, options, d_out
            Those of a case.
        working
            The type that it computes in.

        Raises
        ------
        Unknown
            Where a case has an option that it does not have.
        """
        self.known(inputs, options)
        q, k, v = (inputs[name].astype(working) for name in "qkv")
        self.q_lengths, self.k_lengths = (
            self.lengths_of(inputs[name], x.shape[2]) if name in inputs else None
            for name, x in (("q_lengths", q), ("k_lengths", k))
        )
        q, k, v = _existing(q, self.q_lengths), _existing(k, self.k_lengths), _existing(v, self.k_lengths)
        q, k, v = self.given(q, k, v)
        mask = inputs.get("mask")
        (_, heads, self.n_q, d), groups, self.n_k = q.shape, k.shape[1], k.shape[2]
        shape, self.plane = (*q.shape[:2], self.n_q, self.n_k), (heads, groups)
        head = self.head_of(heads, groups)
        self.q, self.k, self.v = q, k[:, head], v[:, head]
        self.scale = self.scale_of(options.get("scale"), d)
        self.softcap = options.get("softcap")
        causal, offset = options.get("causal", False), options.get("offset", inputs.get("offset"))
        self.placed = offset is not None
        self.place = self.place_of(offset, causal, self.n_q, self.n_k)
        self.offset = self.offset_of(causal, self.n_q, self.n_k, mask)
        window = options.get("window")
        self.window = None if window is None else self.window_of(window, self.n_q, self.n_k)
        self.mask = None if mask is None else self.mask_of(mask, shape)
        self.bias, self.keep = (
            of(inputs[name].astype(working), shape) if name in inputs else None
            for name, of in (("bias", self.bias_of), ("keep", self.keep_of))
        )
        floating = (name for name in ("bias", "keep") if name in inputs and inputs[name].dtype.kind == "f")
        self.pairs = {f"d_{name}": inputs[name].shape for name in floating}
        sink = inputs.get("sink")
        self.sink = None if sink is None else self.sinks_of(sink.astype(working), heads)
        self.sink_shape = None if sink is None else sink.shape
        with np.errstate(all="ignore"):
            out, lse = self.forward()
            out, lse = self.written(self.store(out), lse)
            found = {"out": out, "lse": self.lse_given(lse[..., 0])}
            if d_out is not None:
                found |= self.backward(out, lse, d_out.astype(working), groups)
        return found
