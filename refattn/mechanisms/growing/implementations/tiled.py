"""The contraction of the functional gradient in tiles: no array of size queries x keys.

A task owns some heads and walks over blocks of rows and blocks of keys. For each tile it computes the weights again
from the lse of the tiled implementation of softmax attention, w_ij = exp(m_ij - lse_i), and takes the inner product of
ds from the output: sum_l w_il do_i . v_l = do_i . o_i. Lines that compute a tile of an equation carry its tag.

Axes as in the definition, with the query heads as two axes: g key/value head, r query head within its group.
"""

from __future__ import annotations

import math

from refattn.mechanisms.softmax.implementations.tiled import Saved
from refattn.ops.heads import group_heads
from refattn.ops.masks import part_of
from refattn.ops.tiles import Tile, plan, run
from refattn.xp import Array, namespace, sum_wide, zeros


def contract(saved: Saved, d_out: Array, x: Array, total: bool) -> tuple[Array, Array]:
    """Return N of each sequence (b, h, in, in), or their sum (h, in, in), for tokens x (b, n, in); and |ds|^2."""
    xp, all_pairs = namespace(x), saved.pairs
    q, k, v, softcap, groups = saved.q, saved.k, saved.v, all_pairs.softcap, saved.k.shape[1]
    grid = plan(q, k)
    band = all_pairs.band
    inner = xp.vecdot(d_out, saved.out)[..., None]
    lse = xp.where(saved.lse != -math.inf, saved.lse, 0.0)[..., None]
    q_rows, d_out_rows, lse_rows, inner_rows = (
        group_heads(y, groups) for y in (q * all_pairs.scale, d_out, lse, inner)
    )
    tokens = x[:, None, None, :, :]

    def functional_gradient(tile: Tile, columns: tuple[int, int]) -> Array:
        """Return ds of some rows and columns."""
        at = slice(*columns)
        pairs = all_pairs.of(tile)
        keys, values = tile.of(k)[:, :, None, at, :], tile.of(v)[:, :, None, at, :]
        scores = tile.of_rows(q_rows) @ xp.matrix_transpose(keys)  # (b, g, r, i, j) [SM.1]
        tanh = None if softcap is None else xp.tanh(scores / softcap)
        masked = scores if tanh is None else softcap * tanh  # (b, g, r, i, j) [SM.capped]
        if pairs.bias is not None:
            masked = masked + part_of(pairs.bias, tile.rows, columns)  # (b, g, r, i, j) [SM.biased]
        allowed = band.allowed(pairs.mask, tile.rows, columns, pairs.batch)
        if allowed is not None:
            masked = xp.where(allowed, masked, -math.inf)  # (b, g, r, i, j) [SM.2]
        weights = xp.exp(masked - tile.of_rows(lse_rows))  # (b, g, r, i, j) [SM.4]
        d_weights = tile.of_rows(d_out_rows) @ xp.matrix_transpose(values)  # (b, g, r, i, j) [dSM.4]
        if pairs.keep is not None:
            d_weights = d_weights * part_of(pairs.keep, tile.rows, columns)
        g = weights * (d_weights - tile.of_rows(inner_rows))  # (b, g, r, i, j) [GROW.functional_gradient]
        return g if tanh is None else g * (1.0 - tanh * tanh)

    def task(tile: Tile) -> tuple[Array, Array]:
        found, square = zeros((1, 1, 1, x.shape[-1], x.shape[-1]), x), zeros((), x)
        for part in grid.rows_of(tile):
            own = part.of(tokens)
            pulled = zeros((1, 1, 1, part.rows[1] - part.rows[0], x.shape[-1]), x)
            for columns in band.blocks(k.shape[2], part.rows, grid.columns):
                g = xp.astype(functional_gradient(part, columns), x.dtype, copy=False)
                pulled = pulled + g @ own[..., slice(*columns), :]
                square = square + sum_wide(g * g)
            found = found + xp.matrix_transpose(own[..., slice(*part.rows), :]) @ pulled
        return found, square

    parts = run(q, task, grid.heads)
    square = sum_wide(xp.stack([part[1] for part in parts]))
    each = xp.reshape(grid.join_heads([part[0] for part in parts]), (*q.shape[:2], x.shape[-1], x.shape[-1]))
    return xp.sum(each, axis=0) if total else each, square
