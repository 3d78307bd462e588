"""The same in tiles: no array of size queries x keys, neither forward, nor backward, nor for the statistics of growth.

A task owns some heads and a block of rows, walks over blocks of keys, and keeps for each row the running maximum, the
running total [GROW.4] and the unnormalised output [GROW.6]. Lines that compute a part of an equation carry its tag, and
their values are tiles. The backward computes the weights again from lse_i = max + log z_i, as exp(m_ij - lse_i), and
takes the inner product of dGROW.4 from the output: sum_j a_ij da_ij = do_i . o_i.

Axes as in the dense form, with the query heads as two axes: g key/value head, r query head within its group.
Source: Rabe and Staats 2021 (arXiv:2112.05682); Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from refattn.ops.masks import Future
from refattn.ops.tiles import Tile, concat, plan, run
from refattn.xp import Array, max_last, namespace, sum_wide, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the tiled form reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    mask: Array | None
    offset: int | None
    scale: float | Array
    out: Array  # (b, h, i, e)
    lse: Array  # (b, h, i), 0 where a query may attend nothing


def forward(
    q: Array, k: Array, v: Array, *, mask: Array | None, offset: int | None, scale: float | Array
) -> tuple[Array, Saved]:
    """Return (out, saved): (b, h, i, e) and what `backward` reads."""
    xp = namespace(q, k, v)
    (b, h, queries, _), groups = q.shape, k.shape[1]
    grid = plan(q, k)
    q_grouped, mask_grouped = _group(q, groups), _group_mask(mask, groups)
    hidden, ones = Future(offset, q), xp.ones_like(k[0, 0, :, :1])

    def task(tile: Tile) -> tuple[Array, Array]:
        rows_mask = None if mask_grouped is None else tile.of(mask_grouped)
        rows, keys, values = tile.of_rows(q_grouped), tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...]
        rows_scaled = rows * scale
        total = zeros((*rows.shape[:-1], 1), rows)  # (b, g, r, i, 1) [GROW.4]
        out = zeros((*rows.shape[:-1], v.shape[-1]), rows)  # (b, g, r, i, e) [GROW.6]
        maximum = total - math.inf
        for columns in hidden.blocks(k.shape[2], tile.rows, grid.columns):
            at = slice(*columns)
            masked = _masked(rows_scaled, keys[..., at, :], hidden.allowed(rows_mask, tile.rows, columns))
            highest = xp.maximum(maximum, max_last(masked))
            # A row that has met no key yet has -inf here; 0 in its place keeps -inf - -inf out.
            shift = xp.where(highest == -math.inf, 0.0, highest)
            decay = xp.exp(maximum - shift)
            exponentials = xp.exp(masked - shift)  # (b, g, r, i, j) [GROW.3]
            # A product with ones is a sum, and quicker.
            total = total * decay + exponentials @ ones[at, :]  # (b, g, r, i, 1) [GROW.4]
            out = out * decay + exponentials @ values[..., at, :]  # (b, g, r, i, e) [GROW.6]
            maximum = highest
            del masked, exponentials  # the next tile takes their memory, which is in the cache
        alive = total != 0.0
        total = xp.where(alive, total, 1.0)  # (b, g, r, i, 1) [GROW.4]
        return out / total, xp.where(alive, maximum + xp.log(total), 0.0)[..., 0]

    parts = run(q, task, grid.rows)
    out = xp.reshape(grid.join_rows([part[0] for part in parts]), (b, h, queries, v.shape[-1]))
    lse = xp.reshape(grid.join_rows([part[1] for part in parts]), (b, h, queries))
    return out, Saved(q, k, v, mask, offset, scale, out, lse)


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v and scale for a given d_out."""
    q, k, v, scale = saved.q, saved.k, saved.v, saved.scale
    xp = namespace(q, k, v)
    grid = plan(q, k)
    length, q_rows = k.shape[2], _group(q, k.shape[1])
    hidden = Future(saved.offset, q)
    scores_of = _scores_backward(saved, d_out, hidden)

    def task(tile: Tile) -> tuple[Array, Array, Array, Array]:
        keys = tile.of(k)[:, :, None, ...]
        starts = range(0, length, grid.columns)
        d_keys = [zeros((*keys.shape[:2], min(grid.columns, length - at), k.shape[-1]), k) for at in starts]
        d_values = [zeros((*keys.shape[:2], min(grid.columns, length - at), v.shape[-1]), v) for at in starts]
        d_q, d_scale = [], []
        for part in grid.rows_of(tile):
            rows = part.of_rows(q_rows)
            d_product = zeros(rows.shape, rows)
            for n, columns in enumerate(hidden.blocks(length, part.rows, grid.columns)):
                d_scores, d_v = scores_of(part, columns)
                d_values[n] = _add_rows(d_values[n], d_v)
                # forward: scores = q @ k^T * scale
                d_product = d_product + d_scores @ keys[..., slice(*columns), :]
                d_k = _sum_group(xp.matrix_transpose(d_scores) @ rows) * scale  # (b, g, j, d) [dGROW.k]
                d_keys[n] = _add_rows(d_keys[n], d_k)
                del d_scores
            d_rows = d_product * scale  # (b, g, r, i, d) [dGROW.q]
            d_scale_part = sum_wide(d_product * rows)  # () [dGROW.scale]
            d_q.append(d_rows)
            d_scale.append(d_scale_part)
        whole = concat(d_q, axis=3), concat(d_keys, axis=2), concat(d_values, axis=2)
        return *whole, sum_wide(xp.stack(d_scale))

    parts = run(q, task, grid.heads)
    d_q, d_k, d_v = (grid.join_heads([part[n] for part in parts]) for n in range(3))
    return {
        "q": xp.reshape(d_q, q.shape),
        "k": d_k,
        "v": d_v,
        "scale": sum_wide(xp.stack([part[3] for part in parts])),
    }


def contract(saved: Saved, d_out: Array, x: Array, total: bool) -> tuple[Array, Array]:
    """Return x^T g x of each sequence (b, h, in, in), or their sum (h, in, in), for tokens x (b, n, in); and |g|^2."""
    xp = namespace(x)
    q, k = saved.q, saved.k
    grid = plan(q, k)
    hidden = Future(saved.offset, q)
    scores_of = _scores_backward(saved, d_out, hidden)
    tokens = x[:, None, None, :, :]

    def task(tile: Tile) -> tuple[Array, Array]:
        found, square = zeros((1, 1, 1, x.shape[-1], x.shape[-1]), x), zeros((), x)
        for part in grid.rows_of(tile):
            own = part.of(tokens)
            contracted = zeros((1, 1, 1, part.rows[1] - part.rows[0], x.shape[-1]), x)
            for columns in hidden.blocks(k.shape[2], part.rows, grid.columns):
                d_scores, _ = scores_of(part, columns)
                d_scores = xp.astype(d_scores, x.dtype, copy=False)
                contracted = contracted + d_scores @ own[..., slice(*columns), :]
                square = square + sum_wide(d_scores * d_scores)
            found = found + xp.matrix_transpose(own[..., slice(*part.rows), :]) @ contracted
        return found, square

    parts = run(q, task, grid.heads)
    square = sum_wide(xp.stack([part[1] for part in parts]))
    each = xp.reshape(grid.join_heads([part[0] for part in parts]), (*q.shape[:2], x.shape[-1], x.shape[-1]))
    return xp.sum(each, axis=0) if total else each, square


def _scores_backward(
    saved: Saved, d_out: Array, hidden: Future
) -> Callable[[Tile, tuple[int, int]], tuple[Array, Array]]:
    """Return a function that gives, for a tile of rows and some columns, the tile of dGROW.1 and its part of dv."""
    xp = namespace(d_out)
    groups = saved.k.shape[1]
    # forward: total = sum(exponentials): sum_j a_ij da_ij = do_i . o_i
    inner = xp.vecdot(d_out, saved.out)[..., None]
    scaled = saved.q * saved.scale
    q_rows, d_rows, lse_rows, inner_rows = (_group(x, groups) for x in (scaled, d_out, saved.lse[..., None], inner))
    mask_grouped = _group_mask(saved.mask, groups)

    def scores_of(tile: Tile, columns: tuple[int, int]) -> tuple[Array, Array]:
        at = slice(*columns)
        rows_mask = None if mask_grouped is None else tile.of(mask_grouped)
        keys, values = tile.of(saved.k)[:, :, None, at, :], tile.of(saved.v)[:, :, None, at, :]
        d_out_rows = tile.of_rows(d_rows)
        masked = _masked(tile.of_rows(q_rows), keys, hidden.allowed(rows_mask, tile.rows, columns))
        weights = xp.exp(masked - tile.of_rows(lse_rows))  # (b, g, r, i, j) [GROW.5]
        # forward: out = weights @ v
        d_v = _sum_group(xp.matrix_transpose(weights) @ d_out_rows)  # (b, g, j, e) [dGROW.v]
        d_weights = d_out_rows @ xp.matrix_transpose(values)  # (b, g, r, i, j) [dGROW.5]
        # forward: weights = exponentials / total
        d_scores = weights * (d_weights - tile.of_rows(inner_rows))  # (b, g, r, i, j) [dGROW.1]
        return d_scores, d_v

    return scores_of


def _masked(q_scaled: Array, k: Array, allowed: Array | None) -> Array:
    """Return the masked scores of one tile."""
    xp = namespace(k)
    scores = q_scaled @ xp.matrix_transpose(k)  # (b, g, r, i, j) [GROW.1]
    if allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)  # (b, g, r, i, j) [GROW.2]
    return scores


def _sum_group(x: Array) -> Array:
    """Add up what the query heads of a group give: (b, g, r, j, d) -> (b, g, j, d)."""
    return x[:, :, 0, ...] if x.shape[2] == 1 else namespace(x).sum(x, axis=2)


def _group(x: Array, groups: int) -> Array:
    """(b, h, ...) -> (b, g, r, ...): query heads beside the others of their key/value head."""
    b, h, *rest = x.shape
    return namespace(x).reshape(x, (b, groups, h // groups, *rest))


def _group_mask(mask: Array | None, groups: int) -> Array | None:
    """Group the heads of a mask; an axis of size 1 stays one."""
    if mask is None:
        return None
    return mask[:, None, ...] if mask.shape[1] == 1 else _group(mask, groups)


def _add_rows(x: Array, first: Array) -> Array:
    """Return x (b, g, j, d), which nobody else reads, with `first` added to its first rows, as many as that has."""
    size = first.shape[2]
    if size == x.shape[2]:
        x += first
        return x
    return namespace(x).concat([x[:, :, :size, :] + first, x[:, :, size:, :]], axis=2)
