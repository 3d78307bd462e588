"""What the implementations without an array of all scores have in common: their rows, and the way from sums to outputs.

Such an implementation gives for each query the sums of its weights times the values and times 1, side by side: [a_i,
z_i]. A sum that divides with delta still in it ("plain") is that z_i and delta times the number of keys in A(i).

Axes: b batch, h query head, g key/value head, r query head within its group, i query, j key, e width of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.higher_order.dense import divisor_of, through_divisor
from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.mechanisms.higher_order.implementations.state import State
from refattn.mechanisms.higher_order.options import Options
from refattn.ops.heads import ungroup_heads
from refattn.ops.tiles import Tile
from refattn.xp import Array, arange, clip, namespace, sum_wide, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of such an implementation reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    key_mask: Array | None
    offset: int | None
    options: Options
    out: Array  # (b, g, r, i, e)
    total: Array  # (b, g, r, i, 1)
    attended: Array | None = None  # (b, 1, 1, i, 1): the numbers of keys in A(i), if there is no mask of pairs
    mask: Array | None = None  # of pairs, broadcasts to (b, g, r, i, j)
    start: State | None = None  # what came in
    state: State | None = None  # what goes out; in the linear implementation that of all keys
    by_token: bool = False

    @property
    def results(self) -> tuple[Array, Array, Saved]:
        """What a forward returns: (out, normaliser, saved), (b, h, i, e) and (b, h, i)."""
        return ungroup_heads(self.out), ungroup_heads(self.total)[..., 0], self


def gradients_of(joined: Sequence[Array], options: Options) -> dict[str, Any]:
    """Return the gradients of q, k, v, and of alpha and delta if these are learned, for those of grouped heads."""
    d_q = ungroup_heads(joined[0])  # (b, h, i, d) [dHOL.q]
    d_k = joined[1]  # (b, g, j, d) [dHOL.k]
    d_v = joined[2]  # (b, g, j, e) [dHOL.v]
    return {"q": d_q, "k": d_k, "v": d_v, **(gradients_of_numbers(joined[3]) if options.learned else {})}


def forward(sums: Array, attended: Array | None, options: Options) -> tuple[Array, Array]:
    """Return (out, total), (b, g, r, i, e) and (b, g, r, i, 1), for sums (b, g, r, i, e + 1).

    `attended` are the numbers of keys in A(i), (b, 1, 1, i, 1) or of a shape that broadcasts to it, or None where the
    normaliser does not ask for them.
    """
    normaliser = options.normaliser
    numerator = sums[..., :-1]  # (b, g, r, i, e) [HOL.summed]
    counted = sums[..., -1:]
    left = normaliser.delta * attended if normaliser.plain and attended is not None else 0.0
    total = counted + left  # (b, g, r, i, 1) [HOL.5]
    divisor = divisor_of(total, normaliser, attended)  # (b, g, r, i, 1) [HOL.divisor]
    out = numerator / divisor  # (b, g, r, i, e) [HOL.6]
    return out, total


def backward(out: Array, total: Array, attended: Array | None, options: Options, d_out: Array) -> Array:
    """Return the gradient of the sums (b, g, r, i, e + 1) for that of out."""
    xp = namespace(out)
    divisor = divisor_of(total, options.normaliser, attended)
    # forward: out = numerator / divisor
    d_numerator = d_out / divisor  # (b, g, r, i, e) [dHOL.summed]
    d_divisor = -xp.sum(d_out * out, axis=-1, keepdims=True) / divisor  # (b, g, r, i, 1) [dHOL.divisor]
    # forward: divisor = divisor_of(total); total = counted + delta * attended
    d_total = through_divisor(d_divisor, total, options.normaliser)  # (b, g, r, i, 1) [dHOL.5]
    return xp.concat([d_numerator, d_total], axis=-1)


def merge_rows(x: Array) -> Array:
    """(b, g, r, n, d) -> (b, g, r*n, d): the queries of a group one after the other, for a state that they share."""
    b, g, r, n, d = x.shape
    return namespace(x).reshape(x, (b, g, r * n, d))


def split_rows(x: Array, r: int) -> Array:
    """(b, g, r*n, d) -> (b, g, r, n, d): the inverse and the adjoint of `merge_rows`."""
    b, g, n, d = x.shape
    return namespace(x).reshape(x, (b, g, r, n // r, d))


def whole(q: Array, k: Array) -> Tile:
    """Return the tile of all queries and all keys."""
    return Tile(slice(0, q.shape[0]), slice(0, k.shape[1]), (0, q.shape[2]))


def with_ones(v: Array, key_mask: Array | None, tile: Tile) -> Array:
    """Return [v, 1], (b, g, j, e + 1), of a tile, with 0 in place of the 1 where a key is padding, as v has it already.

    A weight times this is what the weight adds to the numerator and to the normaliser.
    """
    own = tile.of(v)
    ones = zeros((*own.shape[:-1], 1), v) + 1.0
    if key_mask is not None:
        ones *= namespace(v).astype(tile.of(key_mask[:, None, :, None]), v.dtype)
    return namespace(v).concat([own, ones], axis=-1)


def keys_attended(key_mask: Array | None, offset: int | None, q: Array, k: Array) -> Array:
    """Return how many keys each query may attend, (b, 1, 1, i, 1)."""
    xp = namespace(q)
    ones = zeros((q.shape[0], 1, k.shape[2], 1), q) + 1.0
    if key_mask is not None:
        ones = ones * xp.astype(key_mask[:, None, :, None], q.dtype)
    return sums_attended(ones, offset, q.shape[2])


def sums_attended(x: Array, offset: int | None, queries: int) -> Array:
    """Return the sum over A(i) of rows x_j (b, g, j, e): (b, g, 1, i, e)."""
    xp = namespace(x)
    if offset is None:
        total = xp.sum(x, axis=2, keepdims=True)
        return xp.broadcast_to(total, (*x.shape[:2], queries, x.shape[3]))[:, :, None, ...]
    up_to = xp.cumulative_sum(x, axis=2, include_initial=True)
    seen = clip(arange(0, queries, x) + (offset + 1), 0, x.shape[2])
    return xp.take(up_to, seen, axis=2)[:, :, None, ...]


def parts_of_numbers(kernel: Kernel, pairs: Iterable[tuple[Array, Array]], d_sums: Array, attended: Array) -> Array:
    """Return parts of the gradients of alpha and delta, (b, g, 1, 2).

    Parameters
    ----------
    kernel
        The kernel.
    pairs
        x+ of queries and of keys, each with its gradient.
    d_sums
        (b, g, r, i, e + 1): gradient of [a_i, z_i].
    attended
        The sum of [v_j, 1] over A(i), of a shape that broadcasts to that of d_sums: -delta times it is in [a_i, z_i];
        where the sum divides with delta still in it, not in z_i.
    """
    xp = namespace(d_sums)
    d_alpha = sum(kernel.part_of_alpha(*pair) for pair in pairs)
    lost = d_sums * attended
    d_delta = -xp.sum(lost[..., :-1] if kernel.options.normaliser.plain else lost, axis=(2, 3, 4))[:, :, None, None]
    return xp.concat([d_alpha, d_delta], axis=-1)


def gradients_of_numbers(parts: Array) -> dict[str, Array]:
    """Return the gradients of alpha and delta for their parts (b, g, 1, 2)."""
    d_alpha = sum_wide(parts[..., 0])  # () [dHOL.alpha]
    d_delta = sum_wide(parts[..., 1])  # () [dHOL.delta]
    return {"alpha": d_alpha, "delta": d_delta}
