"""Higher-order attention in tiles: the same equations without an array of size queries x keys.

A task owns some heads and a block of rows and adds up, over blocks of keys, the sums [a_i, z_i]. Nothing has to be
subtracted or rescaled on the way, for no weight is an exponential. The backward computes the weights again, so that
memory is linear in the lengths; the work is not.

Axes as in the dense implementation, with the query heads as two axes: g key/value head, r query head within its group.
"""

from __future__ import annotations

from refattn import equations
from refattn.mechanisms.higher_order.implementations import common, pairs
from refattn.mechanisms.higher_order.implementations.common import Saved, whole, with_ones
from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.mechanisms.higher_order.options import Options
from refattn.ops.heads import group_heads, group_mask
from refattn.ops.masks import Band
from refattn.ops.tiles import Tile, most_rows, plan
from refattn.xp import Array, namespace, zeros


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None = None,
    key_mask: Array | None,
    offset: int | None,
    options: Options,
) -> tuple[Array, Array, Saved]:
    """Return (out, normaliser, saved): (b, h, i, e), (b, h, i) and what `backward` reads."""
    grid = plan(q, k, most_rows(offset))
    kernel = Kernel(options, q.shape[3])
    queries, keys, values = group_heads(q, k.shape[1]), kernel.lift(k)[0], with_ones(v, key_mask, whole(q, k))
    mask, band = group_mask(mask, k.shape[1]), _band(q, offset)

    def task(tile: Tile) -> tuple[Array, Array]:
        rows, tile_keys, tile_values = kernel.lift(tile.of_rows(queries))[0], tile.of(keys), tile.of(values)
        own = None if mask is None else tile.of(mask)
        sums = zeros((*rows.shape[:-1], values.shape[-1]), rows)
        for columns in band.blocks(k.shape[2], tile.rows, grid.columns):
            at = slice(*columns)
            allowed = _allowed(band, own, tile.rows, columns, rows)
            sums += pairs.forward(kernel, rows, tile_keys[..., at, :], tile_values[..., at, :], allowed)
        counts = None
        if options.normaliser.counts:
            counts = _attended(tile_values[..., -1:], own, band, tile.rows, grid.columns)
        return equations.active(common).forward(sums, counts, options)

    out, total = grid.from_rows(task, q)
    return Saved(q, k, v, key_mask, offset, options, out, total, mask=mask).results


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, and of alpha and delta where these are learned, for given d_out."""
    q, k, v, offset, options = saved.q, saved.k, saved.v, saved.offset, saved.options
    xp = namespace(q, k, v)
    grid = plan(q, k, most_rows(offset))
    kernel = Kernel(options, q.shape[3])
    queries, d_out_rows = group_heads(q, k.shape[1]), group_heads(d_out, k.shape[1])
    length, width, band = k.shape[2], grid.columns, _band(q, offset)
    if offset is not None:
        width = min(width, grid.rows[0].rows[1])  # blocks as wide as they are high compute the least above the diagonal

    def task(tile: Tile) -> tuple[Array, ...]:
        own = None if saved.mask is None else tile.of(saved.mask)
        (keys, k_normal), values = kernel.lift(tile.of(k)), with_ones(v, saved.key_mask, tile)
        blocks = [(start, min(start + width, length)) for start in range(0, length, width)]
        d_keys = [xp.zeros_like(keys[..., a:b, :]) for a, b in blocks]
        d_values = [xp.zeros_like(values[..., a:b, :]) for a, b in blocks]
        d_queries, numbers = [], 0.0
        for part in grid.rows_of(tile):
            rows, q_normal = kernel.lift(part.of_rows(queries))
            out, total, d_part_out = (part.of_rows(x) for x in (saved.out, saved.total, d_out_rows))
            counts = None
            if options.normaliser.counts:
                counts = _attended(values[..., -1:], own, band, part.rows, width)
            d_sums = equations.active(common).backward(out, total, counts, options, d_part_out)
            d_rows = zeros(rows.shape, rows)
            # The last block may reach beyond what the rows see: it is taken whole, so that its gradients add up.
            seen = len(list(band.blocks(length, part.rows, width)))
            for n, columns in enumerate(blocks[:seen]):
                at = slice(*columns)
                allowed = _allowed(band, own, part.rows, columns, rows)
                d_part, d_tile_keys, d_tile_values = pairs.backward(
                    kernel, rows, keys[..., at, :], values[..., at, :], allowed, d_sums
                )
                d_rows += d_part
                d_keys[n] += d_tile_keys
                d_values[n] += d_tile_values
            d_queries.append(kernel.lift_backward(q_normal, d_rows))
            if options.learned:
                sums = _attended(values, own, band, part.rows, width)
                numbers += common.parts_of_numbers(kernel, ((rows, d_rows),), d_sums, sums)
        d_tile_keys = xp.concat(d_keys, axis=2)
        found = xp.concat(d_queries, axis=3), kernel.lift_backward(k_normal, d_tile_keys)
        if not options.learned:
            return *found, xp.concat(d_values, axis=2)[..., :-1]
        d_alpha = kernel.part_of_alpha(keys, d_tile_keys)
        numbers += xp.concat([d_alpha, xp.zeros_like(d_alpha)], axis=-1)
        return *found, xp.concat(d_values, axis=2)[..., :-1], numbers

    return equations.active(common).gradients_of(grid.from_heads(task, q), options)


def _band(q: Array, offset: int | None) -> Band:
    """Return which pairs a causal mask of this offset leaves."""
    return Band(None, offset, None, None, q)


def _allowed(
    band: Band, mask: Array | None, rows: tuple[int, int], columns: tuple[int, int], like: Array
) -> Array | None:
    """Return 1 where a row may attend a column and 0 elsewhere, as numbers: products with them are quick."""
    allowed = band.allowed(mask, rows, columns)
    return None if allowed is None else namespace(like).astype(allowed, like.dtype)


def _attended(values: Array, mask: Array | None, band: Band, rows: tuple[int, int], width: int) -> Array:
    """Return the sum over the keys that each row may attend of values (b, g, j, e): (b, g, 1 or r, i, e)."""
    if mask is None:
        return common.sums_attended(values, band.last, rows[1])[..., slice(*rows), :]
    total = 0.0
    for columns in band.blocks(values.shape[2], rows, width):
        total = total + _allowed(band, mask, rows, columns, values) @ values[:, :, None, slice(*columns), :]
    return total
