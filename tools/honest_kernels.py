"""Honest kernels of softmax attention: what verification must never reject.

They are the flash kernel of `refattn.verify.bugs.emulator` in float32 with other legitimate choices: keys in tiles with
an online maximum, in either order, or in parts that are merged by their lse; the scale folded into q or not,
exponentials to base 2, weights rounded to the storage type before their products, products of short operands or with
wide sums; the backward from the stored output. Each of these is a legitimate way to be slightly off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from refattn.golden.storage_types import round_to, spacing
from refattn.verify.bugs.emulator import Array, Flash, low
from refattn.verify.bugs.splits import Split

F = np.float32


class FusedScale(Flash):
    """q is scaled before its products."""

    def product(self, q: Array, k: Array) -> Array:
        return super().product(q * F(self.scale), k)

    def scaled(self, product: Array) -> Array:
        return product


class Base2(Flash):
    """Exponentials are powers of 2."""

    def exp(self, x: Array) -> Array:
        return np.exp2(x * F(math.log2(math.e)))


class Unrounded(Flash):
    """Weights and their gradients are not rounded to the storage type before their products."""

    def stored_weights(self, p: Array) -> Array:
        return p


class FromTheEnd(Flash):
    """Tiles of keys come from the last to the first."""

    def starts(self, first: int, last: int) -> Any:
        return [*super().starts(first, last)][::-1]


class KeysReversed(FromTheEnd):
    """All keys are summed from the last to the first, and outputs are multiplied by 1 / sum."""

    def summed(self, total: Array, decay: Array, p: Array) -> Array:
        return super().summed(total, decay, np.ascontiguousarray(p[..., ::-1]))

    def accumulated(self, acc: Array, decay: Array, p: Array, v: Array) -> Array:
        return super().accumulated(acc, decay, p[..., ::-1], v[:, :, ::-1])

    def divided(self, acc: Array, total: Array) -> Array:
        return acc * (F(1.0) / np.where(total > 0.0, total, F(1.0)))


class Sequential(Unrounded):
    """One term is added after the other."""

    def matmul(self, a: Array, b: Array) -> Array:
        out = np.zeros((*a.shape[:-1], b.shape[-1]), F)
        for n in range(a.shape[-1]):
            out += a[..., :, n : n + 1] * b[..., n : n + 1, :]
        return out

    def summed(self, total: Array, decay: Array, p: Array) -> Array:
        return total * decay + np.add.accumulate(p, axis=-1)[..., -1:]


class Wide(Flash):
    """Products are summed in float64."""

    def matmul(self, a: Array, b: Array) -> Array:
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(F)


class Tf32(Unrounded):
    """Three products of operands of 11 bits, as matrix units make a float32 product of them."""

    def matmul(self, a: Array, b: Array) -> Array:
        def split(x: Array) -> tuple[Array, Array]:
            wide = x.astype(np.float64)
            step = spacing(wide, "float32") * 2.0**13
            high = np.rint(wide / step) * step
            return high.astype(F), (np.rint((wide - high) / step * 2.0**11) * step * 2.0**-11).astype(F)

        (a1, a2), (b1, b2) = split(a), split(b)
        return a2 @ b1 + a1 @ b2 + a1 @ b1


class Halves(Flash):
    """The first half of the terms of a product is summed, and then the second."""

    def matmul(self, a: Array, b: Array) -> Array:
        half = a.shape[-1] // 2
        return a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :]


class Transposed(Flash):
    """Products are those of the transposed operands; delta is of weights and their gradients, not of the output."""

    def matmul(self, a: Array, b: Array) -> Array:
        b, a = (np.ascontiguousarray(np.swapaxes(x, -1, -2)) for x in (b, a))
        return np.swapaxes(b @ a, -1, -2)

    def lse_read(self, lse: Array) -> Array:
        self.lse = lse
        return lse

    def delta(self, out: Array, d_out: Array) -> Array:
        found = np.zeros_like(self.lse)
        for rows in self.query_tiles():
            for start in self.starts(int(rows[0]), int(rows[-1]) + 1):
                p = self.dropped(self.recomputed(rows, start, self.lse[:, :, rows]), rows, start)
                d_p = self.d_weights(d_out[:, :, rows], self.values(start))
                found[:, :, rows] += np.sum(p * d_p, axis=-1, keepdims=True)
        return found


class SplitToBase2(Base2, Unrounded, Split):
    """Parts of keys, with powers of 2."""


@dataclass(frozen=True)
class Kernel:
    """A kernel and how many keys a tile, or of how many parts one, has."""

    name: str
    kind: type[Flash] = Flash
    tile: int | None = None
    parts: int = 1

    def columns(self, keys: int) -> int:
        """Return how many keys a tile has."""
        return max(self.tile or -(-keys // self.parts), 1)


KERNELS = (
    Kernel("plain", Unrounded),
    Kernel("rounded weights"),
    Kernel("chunks of 8", tile=8),
    Kernel("chunks of 16 from the end", FromTheEnd, tile=16),
    Kernel("fused scale", FusedScale, tile=32),
    Kernel("base 2", type("FusedBase2", (FusedScale, Base2), {}), tile=24),
    Kernel("sequential sums", Sequential),
    Kernel("wide sums", Wide, tile=16),
    Kernel("products of TF32", Tf32),
    Kernel("sums of two halves", Halves),
    Kernel("transposed products", Transposed),
    Kernel("parts merged by lse", Split, parts=3),
    Kernel("parts to base 2, merged by lse", SplitToBase2, parts=4),
    Kernel("keys reversed", KeysReversed),
)


def run(kernel: Kernel, dtype: str, inputs: dict[str, Array], upstream: Array, **options: Any) -> dict[str, Array]:
    """Return out, lse and the gradients of the floating inputs as the kernel stores them (bfloat16 held in float32)."""
    queries, keys = inputs["q"].shape[2], inputs["k"].shape[2]
    flash = kernel.kind(max(queries, 1), kernel.columns(keys), partial(low, dtype=dtype))
    found = flash.run(inputs, options, upstream, F)
    return {name: x if name == "lse" else round_to(x.astype(np.float64), dtype).astype(F) for name, x in found.items()}
