"""Softmax attention in tiles: the same equations without an array of size queries x keys.

A task owns some heads and a block of rows, walks over blocks of keys, and keeps for each row the running maximum
[SM.4], the running total [SM.6] and the unnormalised output [SM.8]. Lines that compute a part of an equation carry its
tag; their values are tiles. The backward computes the exponentials again from lse:

    exp(m_ij - lse_i) = p_ij / z_i = w_ij

so that forward and backward hold tiles and outputs alone. Memory is linear in the lengths. Because the division comes
last, values beyond the largest float divided by the number of keys may overflow here, and not in the dense form.

Rows whose scores are provably small (see `bound`) take 0 for their maximum, and where all rows of a block are such rows
no maximum is computed. A row gives the same bits whether or not its neighbours need theirs.

Axes as in the dense form, with the query heads as two axes: g key/value head, r query head within its group.
Source: Rabe and Staats 2021 (arXiv:2112.05682); Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from refattn.mechanisms.softmax.bound import first_largest, row_norms, safe_rows, value_range
from refattn.ops.masks import allowed_pairs
from refattn.ops.tiles import Tile, plan, run
from refattn.xp import Array, concrete, max_last, namespace, sum_wide, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the tiled form reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    mask: Array | None
    offset: int | None
    scale: float | Array
    softcap: float | Array | None
    out: Array  # (b, h, i, e)
    lse: Array  # (b, h, i)


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None,
    offset: int | None,
    scale: float | Array,
    softcap: float | Array | None,
) -> tuple[Array, Array, Saved]:
    """Return (out, lse, saved): (b, h, i, e), (b, h, i) and what `backward` reads."""
    xp = namespace(q, k, v)
    (b, h, queries, _), groups = q.shape, k.shape[1]
    grid = plan(q, k)
    q_grouped, mask_grouped = _group(q, groups), _group_mask(mask, groups)
    facts = ((row_norms(k), 0.0), *zip(value_range(v), (0.0, -math.inf), strict=True))
    norms, sizes, least = (first_largest(x, floor)[:, :, None, None, :] for x, floor in facts)  # (b, g, 1, 1, j + 1)

    def task(tile: Tile) -> tuple[Array, Array]:
        rows_mask = None if mask_grouped is None else tile.of(mask_grouped)
        rows, k_heads, v_heads = tile.of_rows(q_grouped), tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...]
        largest = tile.of(norms), tile.of(sizes), tile.of(least)
        safe = safe_rows(rows, *largest, offset, tile.rows, scale, softcap)
        return _forward_rows(rows, k_heads, v_heads, safe, rows_mask, offset, tile.rows, grid.columns, scale, softcap)

    parts = run(q, task, grid.rows)
    out = xp.reshape(grid.join_rows([part[0] for part in parts]), (b, h, queries, v.shape[-1]))
    lse = xp.reshape(grid.join_rows([part[1] for part in parts]), (b, h, queries))
    return out, lse, Saved(q, k, v, mask, offset, scale, softcap, out, lse)


def _forward_rows(
    q: Array,
    k: Array,
    v: Array,
    safe: Array,
    mask: Array | None,
    offset: int | None,
    rows: tuple[int, int],
    width: int,
    scale: float | Array,
    softcap: float | Array | None,
) -> tuple[Array, Array]:
    """Return (out, lse) of one block of rows: (b, g, r, i, e) and (b, g, r, i)."""
    xp = namespace(q)
    all_safe = concrete(xp.all(safe)) is True
    maximum = xp.where(safe, 0.0, zeros(safe.shape, q) - math.inf)  # (b, g, r, i, 1) [SM.4]
    total = zeros(safe.shape, q)  # (b, g, r, i, 1) [SM.6]
    out = zeros((*q.shape[:-1], v.shape[-1]), q)  # (b, g, r, i, e) [SM.8]
    for columns in _column_blocks(k.shape[-2], rows, offset, width):
        keys = k[..., slice(*columns), :]
        masked, _ = _masked_scores(q, keys, mask, offset, rows, columns, scale, softcap)
        if all_safe:
            exponentials = xp.exp(masked)  # (b, g, r, i, j) [SM.5]
        else:
            highest = xp.where(safe, 0.0, xp.maximum(maximum, max_last(masked)))  # (b, g, r, i, 1) [SM.4]
            # A row that has met no key yet has -inf here; 0 in its place keeps -inf - -inf out.
            shift = xp.where(highest == -math.inf, 0.0, highest)
            decay = xp.exp(maximum - shift)
            exponentials = xp.exp(masked - shift)  # (b, g, r, i, j) [SM.5]
            total, out, maximum = total * decay, out * decay, highest
        total = total + xp.sum(exponentials, axis=-1, keepdims=True)  # (b, g, r, i, 1) [SM.6]
        out = out + exponentials @ v[..., slice(*columns), :]  # (b, g, r, i, e) [SM.8]
    alive = total != 0.0
    total = xp.where(alive, total, 1.0)  # (b, g, r, i, 1) [SM.6]
    lse = xp.where(alive, maximum + xp.log(total), -math.inf)[..., 0]  # (b, g, r, i) [SM.9]
    return out / total, lse


def backward(saved: Saved, d_out: Array, d_lse: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v, scale and, where there is one, softcap for given d_out and d_lse."""
    q, k, v = saved.q, saved.k, saved.v
    xp = namespace(q, k, v)
    groups = k.shape[1]
    grid = plan(q, k)
    alive = saved.lse != -math.inf
    # forward: out = weights @ v; lse = log of the total. Together they pull on every score of row i by -inner_i w_ij.
    inner = xp.sum(d_out * saved.out, axis=-1)  # (b, h, i)
    if d_lse is not None:
        inner = inner - xp.where(alive, d_lse, 0.0)
    grouped = [_group(x, groups) for x in (q, d_out, xp.where(alive, saved.lse, 0.0)[..., None], inner[..., None])]
    mask_grouped = _group_mask(saved.mask, groups)

    def task(tile: Tile) -> dict[str, Array]:
        heads_mask = None if mask_grouped is None else tile.of(mask_grouped)
        k_heads, v_heads = tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...]
        blocks = [(part.rows, [part.of_rows(x) for x in grouped]) for part in grid.rows_of(tile)]
        return _backward_heads(saved, k_heads, v_heads, heads_mask, blocks, grid.columns)

    parts = run(q, task, grid.heads)
    gradients = {
        "q": xp.reshape(grid.join_heads([part["q"] for part in parts]), q.shape),
        "k": grid.join_heads([part["k"] for part in parts]),
        "v": grid.join_heads([part["v"] for part in parts]),
    }
    for name in ("scale", "softcap"):
        if name in parts[0]:
            gradients[name] = sum_wide(xp.stack([part[name] for part in parts]))
    return gradients


def _backward_heads(
    saved: Saved,
    k: Array,
    v: Array,
    mask: Array | None,
    blocks: list[tuple[tuple[int, int], list[Array]]],
    width: int,
) -> dict[str, Array]:
    """Return the gradients of all rows and columns of some heads; these heads' k and v belong to this task alone."""
    xp = namespace(k)
    scale, softcap, offset = saved.scale, saved.softcap, saved.offset
    keys = k.shape[-2]
    starts = range(0, keys, width)
    d_k = [zeros((k.shape[0], k.shape[1], min(s + width, keys) - s, k.shape[-1]), k) for s in starts]
    d_v = [zeros((v.shape[0], v.shape[1], min(s + width, keys) - s, v.shape[-1]), v) for s in starts]
    d_q, d_scale, d_softcap = [], [], []
    for rows, (q, d_out, lse, inner) in blocks:
        d_product = zeros(q.shape, q)
        for columns in _column_blocks(keys, rows, offset, width):
            at = columns[0] // width
            k_tile, v_tile = k[..., slice(*columns), :], v[..., slice(*columns), :]
            masked, ratio = _masked_scores(q, k_tile, mask, offset, rows, columns, scale, softcap)
            weights = xp.exp(masked - lse)  # (b, g, r, i, j) [SM.7]
            size = columns[1] - columns[0]
            # forward: out = weights @ v
            d_v_tile = xp.sum(xp.matrix_transpose(weights) @ d_out, axis=2)  # (b, g, j, e) [dSM.v]
            d_v[at] = _add_rows(d_v[at], d_v_tile, size)
            d_weights = d_out @ xp.matrix_transpose(v_tile)  # (b, g, r, i, j) [dSM.7]
            # forward: weights = exp(masked - lse)
            d_scores = weights * (d_weights - inner)  # (b, g, r, i, j) [dSM.6-dSM.3]
            if ratio is not None:
                # forward: capped = softcap * tanh(ratio), ratio = scores / softcap
                tanh = xp.tanh(ratio)
                slope = 1.0 - tanh * tanh
                d_softcap_part = sum_wide(d_scores * (tanh - ratio * slope))  # () [dSM.softcap]
                d_softcap.append(d_softcap_part)
                d_scores = d_scores * slope  # (b, g, r, i, j) [dSM.1]
            # forward: scores = q @ k^T * scale
            d_product = d_product + d_scores @ k_tile
            d_k_tile = xp.sum(xp.matrix_transpose(d_scores) @ q, axis=2) * scale  # (b, g, j, d) [dSM.k]
            d_k[at] = _add_rows(d_k[at], d_k_tile, size)
        d_q_rows = d_product * scale  # (b, g, r, i, d) [dSM.q]
        d_scale_part = sum_wide(d_product * q)  # () [dSM.scale]
        d_q.append(d_q_rows)
        d_scale.append(d_scale_part)
    gradients = {"q": xp.concat(d_q, axis=3), "k": xp.concat(d_k, axis=2), "v": xp.concat(d_v, axis=2)}
    gradients["scale"] = sum_wide(xp.stack(d_scale))
    if softcap is not None:
        gradients["softcap"] = sum_wide(xp.stack(d_softcap))
    return gradients


def _masked_scores(
    q: Array,
    k: Array,
    mask: Array | None,
    offset: int | None,
    rows: tuple[int, int],
    columns: tuple[int, int],
    scale: float | Array,
    softcap: float | Array | None,
) -> tuple[Array, Array | None]:
    """Return the masked scores of one tile and, with a soft-cap, the argument of its tanh."""
    xp = namespace(q)
    scores = q @ xp.matrix_transpose(k) * scale  # (b, g, r, i, j) [SM.1]
    ratio = None if softcap is None else scores / softcap
    if ratio is not None:
        scores = softcap * xp.tanh(ratio)  # (b, g, r, i, j) [SM.2]
    allowed = allowed_pairs(mask, offset, rows, columns, q)
    if allowed is not None:
        scores = xp.where(allowed, scores, -math.inf)  # (b, g, r, i, j) [SM.3]
    return scores, ratio


def _column_blocks(keys: int, rows: tuple[int, int], offset: int | None, width: int) -> Iterator[tuple[int, int]]:
    """Yield the blocks of keys that some of the rows may attend."""
    stop = keys if offset is None else min(max(rows[1] + offset, 0), keys)
    for start in range(0, stop, width):
        yield start, min(start + width, stop)


def _group(x: Array, groups: int) -> Array:
    """(b, h, ...) -> (b, g, r, ...): query heads beside the others of their key/value head."""
    b, h, *rest = x.shape
    return namespace(x).reshape(x, (b, groups, h // groups, *rest))


def _group_mask(mask: Array | None, groups: int) -> Array | None:
    """Group the heads of a mask; an axis of size 1 stays one."""
    if mask is None:
        return None
    return mask[:, None, ...] if mask.shape[1] == 1 else _group(mask, groups)


def _add_rows(x: Array, first: Array, size: int) -> Array:
    """Return x (b, g, j, d) with `first` added to its first `size` rows."""
    if size == x.shape[2]:
        return x + first
    return namespace(x).concat([x[:, :, :size, :] + first, x[:, :, size:, :]], axis=2)
