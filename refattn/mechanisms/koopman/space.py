"""What a chunk of queries sees, as a space of functions: its sections and features of points, see `whitening`.

Letters: b batch, h head, c query of a chunk, l transition, j key, d width, o observable: the coordinates if augmented,
then the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from refattn.mechanisms.koopman.kernel import Kernel
from refattn.mechanisms.koopman.whitening import Whitening
from refattn.xp import Array, namespace


@dataclass(frozen=True)
class Space:
    """What a chunk of queries sees: kernel sections at keys, and the coordinates if augmented."""

    kernel: Kernel
    keys: Array  # (b, h, j, d)
    seen: Array  # (b, h, c, j)
    augment: bool
    whitening: Whitening
    past: Array | None  # (c, o): where the future is hidden, the features that a query sees
    coordinates: Array  # (b, h, o, d): P' = F P

    def sections(self, x: Array) -> Array:
        """(b, h, c, d) -> (b, h, c, o): g(x)."""
        return self.sections_of(x, self.kernel.values(x, self.keys))

    def sections_of(self, x: Array, values: Array) -> Array:
        """Return g(x) for values (b, h, c, j) of the kernel between x and the keys."""
        xp = namespace(x)
        at_keys = xp.where(self.seen, values, 0.0)
        return xp.concat([x, at_keys], axis=-1) if self.augment else at_keys

    def visible(self, features: Array) -> Array:
        """Return features (b, h, c, o) or (b, h, c, l, o) with 0 for those of the future."""
        if self.past is None:
            return features
        past = self.past if len(features.shape) == 4 else self.past[:, None, :]
        return namespace(features).where(past, features, 0.0)

    def features(self, x: Array) -> Array:
        """(b, h, c, d) -> (b, h, c, o): w(x)."""
        return self.visible(self.whitening.features(self.sections(x)))

    def sections_backward(self, x: Array, d_sections: Array) -> tuple[Array, Array, Array, Array]:
        """Return the gradients with respect to x, the keys, the bandwidth and the weight."""
        xp, width = namespace(x), x.shape[-1] if self.augment else 0
        # forward: sections = concat(x, k(x, keys) where seen)
        d_values = xp.where(self.seen, d_sections[..., width:], 0.0)
        d_x, d_keys, d_bandwidth, d_weight = self.kernel.all_backward(x, self.keys, d_values)
        return (d_x + d_sections[..., :width] if self.augment else d_x), d_keys, d_bandwidth, d_weight


def combine(weights: Array, rows: Array) -> Array:
    """(b, h, c, l), (b, h, c, l, d) -> (b, h, c, d)."""
    return (weights[..., None, :] @ rows)[..., 0, :]


def flat_product(x: Array, y: Array) -> Array:
    """(b, h, c, l, o), (b, h, o, d) -> (b, h, c, l, d), as one matrix product a head."""
    xp = namespace(x)
    b, h, c, rows, columns = x.shape
    return xp.reshape(xp.reshape(x, (b, h, c * rows, columns)) @ y, (b, h, c, rows, y.shape[-1]))


def flat_outer(x: Array, y: Array) -> Array:
    """(b, h, c, l, o), (b, h, c, l, p) -> (b, h, o, p), summed over queries and transitions."""
    xp = namespace(x)
    b, h, c, rows, columns = x.shape
    flat = xp.reshape(x, (b, h, c * rows, columns))
    return xp.matrix_transpose(flat) @ xp.reshape(y, (b, h, c * rows, y.shape[-1]))
