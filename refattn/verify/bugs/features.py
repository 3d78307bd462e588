"""A kernel of higher-order attention in plain NumPy: sums of features over chunks of keys, and pairs within a chunk.

It is right for any chunk, causal and not. Each step is a method, so that a fault is a few lines: another step. Arrays
are (b, h, ...) with keys and values repeated for each query head; of its sums the last column is
that of ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from refattn.verify.bugs.emulator import Array, Kernel


def taylor(s: Array, order: int) -> Array:
    """Return the sum of s^r / r! up to an order; 0 below 0."""
    return sum((s**r / math.factorial(r) for r in range(order + 1)), np.zeros_like(s))


class Sums(Kernel):
    """The kernel, with the keys of a chunk."""

    options = frozenset({*"qkv", "order", "alpha", "normaliser", "layer_norm", "norm_eps", "key_mask", "causal"})

    # What is read

    def shown(self, x: Array, mask: Array) -> Array:
        """Return keys or values with 0 where they are padding."""
        return np.where(mask[:, None, :, None], x, 0.0)

    def ones(self, mask: Array | None, like: Array) -> Array:
        """Return the column that counts keys: 1, and 0 for padding."""
        ones = np.ones((*like.shape[:3], 1), like.dtype)
        return ones if mask is None else np.where(mask[:, None, :, None], ones, 0.0)

    def scale_of(self, alpha: float, d: int) -> float:
        return 1.0 / (alpha * math.sqrt(d))

    def normalised(self, x: Array) -> tuple[Array, Array]:
        """Return a vector without its mean, divided by its deviation, and one over that."""
        if not self.norm:
            return x, np.ones_like(x[..., :1])
        centred = x - np.mean(x, axis=-1, keepdims=True)
        r = 1.0 / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + self.eps)
        return centred * r, r

    def offset_of(self, causal: Any, queries: int, keys: int) -> int | None:
        return None if causal is False else 0 if causal == "top_left" else keys - queries

    # The sums

    def feature(self, x: Array, scale: float) -> Array:
        """Return the features of queries (scaled) or keys: their powers, each over the root of its factorial."""
        power, found = np.ones_like(x[..., :1]), []
        for r in range(self.order + 1):
            found.append(power / math.sqrt(math.factorial(r)))
            power = (power[..., :, None] * (x * scale)[..., None, :]).reshape(*x.shape[:-1], x.shape[-1] ** (r + 1))
        return np.concatenate(found, axis=-1)

    def carried(self, state: Array, counts: Array) -> tuple[Array, Array]:
        """Return the sums of features and of values that a chunk gives to the next one."""
        return state, counts

    def polynomial(self, s: Array) -> Array:
        return taylor(s, self.order)

    def inside(self, rows: Array, columns: Array) -> Array:
        """Tell which keys of its own chunk a query may attend."""
        assert self.offset is not None
        return columns[None, :] <= rows[:, None] + self.offset

    def subtracted(self, sums: Array, counts: Array) -> Array:
        """Return the sums of weights: delta is taken from each, in the denominator unless it is plain."""
        less = sums - self.delta * counts
        return np.concatenate([less[..., :-1], sums[..., -1:]], axis=-1) if self.plain else less

    def sums(self) -> tuple[Array, Array]:
        """Return the sums of each query (b, h, i, e + 1) before and the counts of what is subtracted from them."""
        b, h, n_q, _ = self.q.shape
        width, n_k = self.v.shape[-1], self.k.shape[2]
        out = np.zeros((b, h, n_q, width), self.q.dtype)
        counted = np.zeros_like(out)
        features = self.feature(self.q, self.scale)
        state = np.zeros((b, h, features.shape[-1], width), self.q.dtype)
        counts = np.zeros((b, h, 1, width), self.q.dtype)
        for start in range(0, n_k, self.chunk):
            columns = np.arange(start, min(start + self.chunk, n_k))
            keys, values = self.k[:, :, columns], self.v[:, :, columns]
            if self.offset is not None:
                ends = np.arange(n_q) + self.offset
                rows = np.flatnonzero((ends >= start) & ((ends <= columns[-1]) | (columns[-1] == n_k - 1)))
                pairs = self.inside(rows, columns)
                weights = self.polynomial(self.q[:, :, rows] @ np.swapaxes(keys, -1, -2) * self.scale)
                out[:, :, rows] = features[:, :, rows] @ state + np.where(pairs, weights, 0.0) @ values
                counted[:, :, rows] = counts + pairs.astype(out.dtype) @ values
            state = state + np.swapaxes(self.feature(keys, 1.0), -1, -2) @ values
            counts = counts + np.sum(values, axis=2, keepdims=True)
            if columns[-1] < n_k - 1:
                state, counts = self.carried(state, counts)
        return (out, counted) if self.offset is not None else (features @ state, counted + counts)

    # What divides

    def divisor(self, z: Array, attended: Array) -> Array:
        eps = self.normaliser_eps
        if self.normaliser == "add":
            return z + eps
        if self.normaliser == "clamp":
            return np.where(z > eps, z, eps)
        if self.normaliser == "signed":
            return np.where(np.abs(z) > eps, z, np.where(z < 0.0, -eps, eps))
        if self.delta == 1.0 and not self.plain:
            return np.where(np.abs(z) <= 16.0 * float(np.finfo(z.dtype).eps) * attended, np.inf, z)
        return np.where(z == 0.0, 1.0, z)

    def divided(self, numerator: Array, divisor: Array) -> Array:
        return numerator / divisor

    # The backward

    def d_total(self, d_divisor: Array, z: Array) -> Array:
        """Return the gradient of the row sum for that of what divides: 0 where another number stands in its place."""
        if self.normaliser == "clamp":
            return d_divisor * (z > self.normaliser_eps)
        if self.normaliser == "signed":
            return d_divisor * (np.abs(z) > self.normaliser_eps)
        return d_divisor

    def d_key_scores(self, d_scores: Array, without_total: Array) -> Array:
        """Return the gradient of scores that keys have; `without_total` is that without the part of what divides."""
        return d_scores

    def through_norm(self, d_y: Array, y: Array, r: Array) -> Array:
        if not self.norm:
            return d_y
        return r * (d_y - np.mean(d_y, axis=-1, keepdims=True) - y * np.mean(d_y * y, axis=-1, keepdims=True))

    def seen(self, n_q: int, n_k: int, mask: Array | None) -> Array:
        """Tell which pairs may attend."""
        pairs = np.ones((1, 1, n_q, n_k), bool)
        if self.offset is not None:
            pairs = pairs & (np.arange(n_k) <= np.arange(n_q)[:, None] + self.offset)
        return pairs if mask is None else pairs & mask[:, None, None, :]

    def backward(self, out: Array, z: Array, divisor: Array, d_out: Array, mask: Array | None) -> dict[str, Array]:
        """Return the gradients of normalised queries and keys, and of values, of every query head."""
        v, scores = self.v[..., :-1], self.q @ np.swapaxes(self.k, -1, -2) * self.scale
        allowed = self.seen(scores.shape[2], scores.shape[3], mask)
        d_a, d_divisor = d_out / divisor, -np.sum(d_out * out, axis=-1, keepdims=True) / divisor
        weights = np.where(allowed, self.polynomial(scores) - self.delta, 0.0)
        slope = np.where(allowed, taylor(scores, self.order - 1), 0.0)
        of_values = d_a @ np.swapaxes(v, -1, -2)
        d_scores = (of_values + self.d_total(d_divisor, z)) * slope
        d_keys = self.d_key_scores(d_scores, of_values * slope)
        return {
            "q": d_scores @ self.k * self.scale,
            "k": np.swapaxes(d_keys, -1, -2) @ self.q * self.scale,
            "v": np.swapaxes(weights, -1, -2) @ d_a,
        }

    # All of it

    def run(
        self, inputs: Mapping[str, Array], options: Mapping[str, Any], d_out: Array | None, working: Any = np.float64
    ) -> dict[str, Array]:
        """Return out and, where there is an upstream gradient, the gradients, by name."""
        self.known(inputs, options)
        q, k, v = (inputs[name].astype(working) for name in "qkv")
        mask = inputs.get("key_mask")
        self.order, self.norm = options.get("order", 2), options.get("layer_norm", True)
        self.eps = options.get("norm_eps", 1e-5)
        self.normaliser, numbers = options.get("normaliser", "exact"), {}
        if "(" in self.normaliser:
            self.normaliser, _, rest = self.normaliser.rstrip(")").partition("(")
            numbers = dict(part.strip().split("=") for part in rest.split(","))
        self.delta, self.normaliser_eps = float(numbers.get("delta", 0.0)), float(numbers.get("eps", 0.0))
        self.plain = numbers.get("plain") == "True"
        if mask is not None:
            k, v = self.shown(k, mask), self.shown(v, mask)
        (_, heads, n_q, d), groups = q.shape, k.shape[1]
        self.scale = self.scale_of(options.get("alpha", 3.0), d)
        self.offset = self.offset_of(options.get("causal", False), n_q, k.shape[2])
        head = self.head_of(heads, groups)
        with np.errstate(all="ignore"):
            (self.q, r_q), (k_hat, r_k) = self.normalised(q), self.normalised(k)
            self.k, self.v = k_hat[:, head], np.concatenate([v, self.ones(mask, k)], axis=-1)[:, head]
            sums, counts = self.sums()
            less = self.subtracted(sums, counts)
            z = less[..., -1:]
            divisor = self.divisor(z, counts[..., -1:])
            out = self.divided(less[..., :-1], divisor)
            found = {"out": self.store(out)}
            if d_out is not None:
                d = self.backward(out, z, divisor, d_out.astype(working), mask)
                d_k, d_v = self.per_group(d["k"], groups), self.per_group(d["v"], groups)
                if mask is not None:
                    d_k, d_v = self.shown(self.through_norm(d_k, k_hat, r_k), mask), self.shown(d_v, mask)
                else:
                    d_k = self.through_norm(d_k, k_hat, r_k)
                found |= {"d_q": self.through_norm(d["q"], self.q, r_q), "d_k": d_k, "d_v": d_v}
        return found
