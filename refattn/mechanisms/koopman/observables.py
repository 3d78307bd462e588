"""The observables of the operator: kernel sections at the keys that a query sees, and, augmented, the coordinates.

The span of the observables is the space W that the operator acts on. What is not seen has the value 0 everywhere.

Letters: b batch, h head, i query, j key, l point, d coordinate, o observable: keys, then coordinates if augmented.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.koopman.kernel import Kernel
from refattn.ops.solve import identity
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class Observables:
    """The observables of every query, and their Gram matrix once it is known.

    Attributes
    ----------
    kernel
        k.
    keys
        (b, h, 1, j, d).
    seen
        (b, h, i, j), boolean: whether the key is one that the query sees.
    augment
        Whether the coordinate functions are observables too.
    """

    kernel: Kernel
    keys: Array
    seen: Array
    augment: bool

    def values(self, x: Array) -> Array:
        """(b, h, i, l, d) -> (b, h, i, l, o)."""
        xp = namespace(x)
        at_keys = xp.where(self.seen[:, :, :, None, :], self.kernel.values(x, self.keys), 0.0)
        return xp.concat([at_keys, x], axis=-1) if self.augment else at_keys

    def values_backward(self, x: Array, d_values: Array) -> tuple[Array, Array]:
        """Return the gradients with respect to x and the keys."""
        count = self.keys.shape[-2]
        # forward: values = concat(k(x, keys) where seen, x)
        d_at_keys = self.seen_part(d_values[..., :count])
        d_x, d_keys = self.kernel.backward(x, self.keys, d_at_keys)
        return (d_x + d_values[..., count:] if self.augment else d_x), d_keys

    def numbers_backward(self, x: Array, d_values: Array) -> tuple[Array, Array]:
        """Return the gradients with respect to the kernel's bandwidth and weight."""
        d_at_keys = self.seen_part(d_values[..., : self.keys.shape[-2]])
        return self.kernel.numbers_backward(x, self.keys, d_at_keys)

    def seen_part(self, x: Array) -> Array:
        """Return x (b, h, i, l, j) with 0 at keys that are not seen."""
        return namespace(x).where(self.seen[:, :, :, None, :], x, 0.0)

    def seen_observables(self, x: Array) -> Array:
        """Return x (b, h, i, l, o) with 0 at observables that are not seen."""
        if not self.augment:
            return self.seen_part(x)
        count = self.keys.shape[-2]
        return namespace(x).concat([self.seen_part(x[..., :count]), x[..., count:]], axis=-1)

    def coordinates(self) -> Array:
        """Return P (b, h, 1, o, d), the inner products of the observables with the coordinate functions."""
        if not self.augment:
            return self.keys
        xp, width = namespace(self.keys), self.keys.shape[-1]
        own = identity(width, self.keys) / self.kernel.linear_part() + zeros((*self.keys.shape[:3], 1, 1), self.keys)
        return xp.concat([self.keys, own], axis=-2)

    def gram(self, between: Array, jitter: Array) -> Array:
        """Return G (b, h, i, o, o) for k(K, K) (b, h, j, j) and the jitter (b, h, i, 1) of each query.

        A key that is not seen has a row and a column of the identity.
        """
        xp, seen = namespace(between), self.seen
        pairs = seen[..., :, None] & seen[..., None, :]
        g = xp.where(pairs, between[:, :, None, :, :], 0.0)
        own = xp.where(seen, 0.0 * jitter, 1.0) + jitter
        g = g + own[..., None] * identity(seen.shape[-1], between)
        if not self.augment:
            return g
        width = self.keys.shape[-1]
        beside = xp.where(seen[..., None], self.keys, 0.0)  # (b, h, i, j, d)
        corner = (1.0 / self.kernel.linear_part() + jitter[..., None]) * identity(width, between)
        upper = xp.concat([g, beside], axis=-1)
        return xp.concat([upper, xp.concat([xp.matrix_transpose(beside), corner], axis=-1)], axis=-2)

    def gram_backward(self, d_gram: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients with respect to k(K, K), the jitter, the keys and 1 / `linear_part` of `gram`."""
        xp, seen, count = namespace(d_gram), self.seen, self.keys.shape[-2]
        # forward: G = k(K, K) where both are seen, + (1 where not seen + jitter) I
        diagonal = xp.sum(d_gram * identity(d_gram.shape[-1], d_gram), axis=-1)  # (b, h, i, o)
        d_jitter = xp.sum(diagonal, axis=-1, keepdims=True)
        pairs = seen[..., :, None] & seen[..., None, :]
        d_between = xp.sum(xp.where(pairs, d_gram[..., :count, :count], 0.0), axis=2)
        if not self.augment:
            return d_between, d_jitter, xp.zeros_like(self.keys), xp.sum(d_jitter) * 0.0
        # forward: G = [[G, keys], [keys^T, I / linear_part]]
        beside = d_gram[..., :count, count:] + xp.matrix_transpose(d_gram[..., count:, :count])
        d_keys = xp.sum(xp.where(seen[..., None], beside, 0.0), axis=2, keepdims=True)
        return d_between, d_jitter, d_keys, xp.sum(diagonal[..., count:])
