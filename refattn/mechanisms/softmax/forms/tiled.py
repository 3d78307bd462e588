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
from dataclasses import dataclass

from refattn.mechanisms.softmax.forms.bound import safe_rows
from refattn.ops.heads import group_heads, group_mask
from refattn.ops.masks import Future
from refattn.ops.tiles import Tile, concat, most_rows, plan, run
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
    softcap: float | Array | None
    out: Array  # (b, h, i, e)
    lse: Array  # (b, h, i)
    safe: Array | None  # (b, g, r, i, 1), None where all are


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
    grid = plan(q, k, most_rows(offset))
    q_grouped, mask_grouped = group_heads(q, groups), group_mask(mask, groups)
    safe = safe_rows(q_grouped, k, v, offset, scale, softcap)
    hidden = Future(offset, q)

    def task(tile: Tile) -> tuple[Array, Array]:
        rows_mask = None if mask_grouped is None else tile.of(mask_grouped)
        rows_safe = None if safe is None else tile.of_rows(safe)
        rows, k_heads, v_heads = tile.of_rows(q_grouped), tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...]
        return _forward_rows(
            rows, k_heads, v_heads, rows_safe, rows_mask, hidden, tile.rows, grid.columns, scale, softcap
        )

    parts = run(q, task, grid.rows)
    out = xp.reshape(grid.join_rows([part[0] for part in parts]), (b, h, queries, v.shape[-1]))
    lse = xp.reshape(grid.join_rows([part[1] for part in parts]), (b, h, queries))
    return out, lse, Saved(q, k, v, mask, offset, scale, softcap, out, lse, safe)


def _forward_rows(
    q: Array,
    k: Array,
    v: Array,
    safe: Array | None,
    mask: Array | None,
    hidden: Future,
    rows: tuple[int, int],
    width: int,
    scale: float | Array,
    softcap: float | Array | None,
) -> tuple[Array, Array]:
    """Return (out, lse) of one block of rows: (b, g, r, i, e) and (b, g, r, i). `safe` is None where all rows are."""
    xp = namespace(q)
    total = zeros((*q.shape[:-1], 1), q)  # (b, g, r, i, 1) [SM.6]
    out = zeros((*q.shape[:-1], v.shape[-1]), q)  # (b, g, r, i, e) [SM.8]
    maximum = total if safe is None else xp.where(safe, 0.0, total - math.inf)  # (b, g, r, i, 1) [SM.4]
    ones = xp.ones_like(k[0, 0, 0, :, :1])
    q_scaled = q * scale
    for columns in hidden.blocks(k.shape[-2], rows, width):
        at = slice(*columns)
        masked, _ = _scores(q_scaled, k[..., at, :], softcap)
        allowed = hidden.allowed(mask, rows, columns)
        if allowed is not None:
            masked = xp.where(allowed, masked, -math.inf)  # (b, g, r, i, j) [SM.3]
        if safe is None:
            exponentials = xp.exp(masked)  # (b, g, r, i, j) [SM.5]
        else:
            highest = xp.where(safe, 0.0, xp.maximum(maximum, max_last(masked)))  # (b, g, r, i, 1) [SM.4]
            # A row that has met no key yet has -inf here; 0 in its place keeps -inf - -inf out.
            shift = xp.where(highest == -math.inf, 0.0, highest)
            decay = xp.exp(maximum - shift)
            exponentials = xp.exp(masked - shift)  # (b, g, r, i, j) [SM.5]
            total, out, maximum = total * decay, out * decay, highest
        # A product with ones is a sum, and quicker.
        total = total + exponentials @ ones[at, :]  # (b, g, r, i, 1) [SM.6]
        out = out + exponentials @ v[..., at, :]  # (b, g, r, i, e) [SM.8]
        del masked, exponentials  # the next tile takes their memory, which is in the cache
    alive = total != 0.0
    total = xp.where(alive, total, 1.0)  # (b, g, r, i, 1) [SM.6]
    lse = xp.where(alive, maximum + xp.log(total), -math.inf)[..., 0]  # (b, g, r, i) [SM.9]
    return out / total, lse


def backward(saved: Saved, d_out: Array, d_lse: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v, scale and, where there is one, softcap for given d_out and d_lse."""
    q, k, v = saved.q, saved.k, saved.v
    xp = namespace(q, k, v)
    groups = k.shape[1]
    grid = plan(q, k, most_rows(saved.offset))
    alive = saved.lse != -math.inf
    # forward: out = weights @ v; lse = log of the total. Together they pull on every score of row i by -inner_i w_ij.
    inner = xp.vecdot(d_out, saved.out)  # (b, h, i)
    if d_lse is not None:
        inner = inner - xp.where(alive, d_lse, 0.0)
    lse = xp.where(alive, saved.lse, 0.0)
    grouped = [*(group_heads(x, groups) for x in (q, d_out, lse[..., None], inner[..., None])), saved.safe]
    mask_grouped = group_mask(saved.mask, groups)
    hidden = Future(saved.offset, q)

    def task(tile: Tile) -> dict[str, Array]:
        heads_mask = None if mask_grouped is None else tile.of(mask_grouped)
        k_heads, v_heads = tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...]
        blocks = [(part.rows, [None if x is None else part.of_rows(x) for x in grouped]) for part in grid.rows_of(tile)]
        return _backward_heads(saved, tile.of(grouped[0]), k_heads, v_heads, heads_mask, hidden, blocks, grid.columns)

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
    q_heads: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    hidden: Future,
    blocks: list[tuple[tuple[int, int], list[Array]]],
    width: int,
) -> dict[str, Array]:
    """Return the gradients of all rows and columns of some heads; these heads' k and v belong to this task alone.

    What is subtracted from each row is one more column of a product: [x, -c] @ [y, 1]^T = x @ y^T - c. For lse only
    rows with small scores do so: a product with another column may round in another way, and scores of 1e9 that are
    rounded otherwise than in the forward have nothing to do with its lse.
    """
    xp = namespace(k)
    scale, softcap = saved.scale, saved.softcap
    keys = k.shape[-2]
    starts = range(0, keys, width)
    d_k = [zeros((k.shape[0], k.shape[1], min(s + width, keys) - s, k.shape[-1]), k) for s in starts]
    d_v = [zeros((v.shape[0], v.shape[1], min(s + width, keys) - s, v.shape[-1]), v) for s in starts]
    d_rows, d_softcap = [], []
    ones = xp.ones_like(k[..., :1])
    k_ones, v_ones = xp.concat([k, ones], axis=-1), xp.concat([v, ones], axis=-1)
    for rows, (q, d_out, lse, inner, safe) in blocks:
        q_scaled = q * scale
        q_lse, d_out_inner = xp.concat([q_scaled, -lse], axis=-1), xp.concat([d_out, -inner], axis=-1)
        d_product = zeros(q.shape, q)
        for columns in hidden.blocks(keys, rows, width):
            n, at = columns[0] // width, slice(*columns)
            ratio = None
            if softcap is None and safe is None:
                shifted = q_lse @ xp.matrix_transpose(k_ones[..., at, :])  # (b, g, r, i, j) [SM.1-SM.3]
            else:
                capped, ratio = _scores(q_scaled, k[..., at, :], softcap)
                shifted = capped - lse  # (b, g, r, i, j) [SM.1-SM.3]
                if softcap is None:
                    carried = q_lse @ xp.matrix_transpose(k_ones[..., at, :])  # (b, g, r, i, j) [SM.1-SM.3]
                    shifted = xp.where(safe, carried, shifted)  # (b, g, r, i, j) [SM.1-SM.3]
            allowed = hidden.allowed(mask, rows, columns)
            if allowed is not None:
                shifted = xp.where(allowed, shifted, -math.inf)  # (b, g, r, i, j) [SM.1-SM.3]
            weights = xp.exp(shifted)  # (b, g, r, i, j) [SM.7]
            del shifted  # its memory, which is in the cache, serves again
            size = columns[1] - columns[0]
            # forward: out = weights @ v
            d_v_tile = _sum_group(xp.matrix_transpose(weights) @ d_out)  # (b, g, j, e) [dSM.v]
            d_v[n] = _add_rows(d_v[n], d_v_tile, size)
            # forward: weights = exp(masked - lse)
            d_scores = weights * (d_out_inner @ xp.matrix_transpose(v_ones[..., at, :]))  # (b, g, r, i, j) [dSM.3]
            if ratio is not None:
                # forward: capped = softcap * tanh(ratio), ratio = scores / softcap
                tanh = xp.tanh(ratio)
                slope = 1.0 - tanh * tanh
                d_softcap_part = sum_wide(d_scores * (tanh - ratio * slope))  # () [dSM.softcap]
                d_softcap.append(d_softcap_part)
                d_scores = d_scores * slope  # (b, g, r, i, j) [dSM.1]
            # forward: scores = q @ k^T * scale
            d_product += d_scores @ k[..., at, :]
            d_k_tile = _sum_group(xp.matrix_transpose(d_scores) @ q_scaled)  # (b, g, j, d) [dSM.k]
            d_k[n] = _add_rows(d_k[n], d_k_tile, size)
            del weights, d_scores
        d_rows.append(d_product)
    d_products = concat(d_rows, axis=3)
    d_q = d_products * scale  # (b, g, r, i, d) [dSM.q]
    d_scale = sum_wide(xp.vecdot(d_products, q_heads))  # () [dSM.scale]
    gradients = {"q": d_q, "k": concat(d_k, axis=2), "v": concat(d_v, axis=2), "scale": d_scale}
    if softcap is not None:
        gradients["softcap"] = sum_wide(xp.stack(d_softcap))
    return gradients


def _scores(q_scaled: Array, k: Array, softcap: float | Array | None) -> tuple[Array, Array | None]:
    """Return the scores of one tile, capped, and the argument of the cap's tanh where there is one."""
    xp = namespace(k)
    scores = q_scaled @ xp.matrix_transpose(k)  # (b, g, r, i, j) [SM.1]
    if softcap is None:
        return scores, None
    ratio = scores / softcap
    capped = softcap * xp.tanh(ratio)  # (b, g, r, i, j) [SM.2]
    return capped, ratio


def _sum_group(x: Array) -> Array:
    """Add up what the query heads of a group give: (b, g, r, j, d) -> (b, g, j, d)."""
    return x[:, :, 0, ...] if x.shape[2] == 1 else namespace(x).sum(x, axis=2)


def _add_rows(x: Array, first: Array, size: int) -> Array:
    """Return x (b, g, j, d), which nobody else reads, with `first` added to its first `size` rows."""
    if size == x.shape[2]:
        x += first
        return x
    return namespace(x).concat([x[:, :, :size, :] + first, x[:, :, size:, :]], axis=2)
