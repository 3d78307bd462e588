"""Softmax attention in tiles: the same equations without an array of size queries x keys.

A task owns some heads and a block of rows, walks over blocks of keys, and keeps for each row the running maximum
[SM.top], the running total [SM.total] and the unnormalised output [SM.5]. Lines that compute a part of an equation
carry its tag; their values are tiles. The backward computes the exponentials again from lse:

    exp(m_ij - lse_i) = u_ij / z_i = w_ij

so that forward and backward hold tiles and outputs alone. Memory is linear in the lengths. Because the division comes
last, values beyond the largest float divided by the number of keys may overflow here, and not in the dense
implementation.

Rows whose scores are provably small (see `bound`) take 0 for their maximum, and where all rows of a block are such rows
no maximum is computed. A row gives the same bits whether or not its neighbours need theirs. Calls with a window, a
bias, sinks, lengths or dropout compute the maximum of every row, and so does CuPy.

Of the sums of the backward two come from the output: sum_j dw_ij w_ij = do_i . o_i, with dropout and sinks as well, and
dsink_s = sum_i exp(sink_s - lse_i) (dlse_i - do_i . o_i).

Axes as in the dense implementation, with the query heads as two axes: g key/value head, r query head within its group.
Source: Rabe and Staats 2021 (arXiv:2112.05682); Dao et al. 2022 (arXiv:2205.14135), algorithms 1 and 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from refattn.mechanisms.softmax.implementations.bound import safe_rows
from refattn.ops.heads import group_heads, group_mask, sum_group, ungroup_heads
from refattn.ops.masks import Band, existing, part_of, where_allowed
from refattn.ops.tiles import PlaneSum, Tile, concat, most_rows, plan
from refattn.xp import Array, backend, matmul, max_last, namespace, sum_wide, sum_wide_to, zeros

Span = tuple[int, int]


@dataclass(frozen=True)
class Pairs:
    """What belongs to pairs of a query and a key, as tiles read it.

    Attributes
    ----------
    band
        The window, the causal mask and the lengths.
    mask, bias, keep
        (b, g, r, i, j), each axis of its own size or 1; None where there is none.
    scale, softcap
        Of the scores.
    batch
        The batch elements of a tile.
    """

    band: Band
    mask: Array | None
    bias: Array | None
    keep: Array | None
    scale: float | Array
    softcap: float | Array | None
    batch: slice

    def of(self, tile: Tile) -> Pairs:
        """Return those of a tile's batch and heads."""
        if self.mask is None and self.bias is None and self.keep is None and not self.band.each:
            return self  # every tile reads the same
        mask, bias, keep = (None if x is None else tile.of(x) for x in (self.mask, self.bias, self.keep))
        return replace(self, mask=mask, bias=bias, keep=keep, batch=tile.batch)


@dataclass(frozen=True)
class Saved:
    """What the backward of the tiled implementation reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    pairs: Pairs
    sink: Array | None  # (h, s)
    q_lengths: Array | None  # (b,)
    out: Array  # (b, h, i, e)
    lse: Array  # (b, h, i)
    safe: Array | bool | None  # (b, g, r, i, 1), None where all are, False where none is
    most: int  # rows of a tile

    @property
    def largest(self) -> Array:
        """Return the largest score of each query, (b, h, i)."""
        return _largest(self)


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None,
    first: int | Array | None,
    last: int | Array | None,
    q_lengths: Array | None,
    k_lengths: Array | None,
    bias: Array | None,
    sink: Array | None,
    keep: Array | None,
    scale: float | Array,
    softcap: float | Array | None,
) -> tuple[Array, Array, Saved]:
    """Return (out, lse, saved): (b, h, i, e), (b, h, i) and what `backward` reads."""
    xp = namespace(q, k, v)
    (b, h, queries, _), groups = q.shape, k.shape[1]
    most = most_rows(last if first is None else 0)
    grid = plan(q, k, most)
    q_grouped = group_heads(q, groups)
    safe: Array | bool | None = False
    plain = all(x is None for x in (first, q_lengths, k_lengths, bias, sink, keep))
    # Where the host waits for what it looks at, the maximum of every row is there sooner than which rows are safe.
    if not backend(q).waits and plain and (last is None or isinstance(last, int)):
        safe = safe_rows(q_grouped, k, v, last, scale, softcap)
    mask, bias, keep = (group_mask(x, groups) for x in (mask, bias, keep))
    pairs = Pairs(Band(first, last, q_lengths, k_lengths, q), mask, bias, keep, scale, softcap, slice(None))
    sinks = None if sink is None else _sinks(sink, q_lengths, q, groups)

    def task(tile: Tile) -> tuple[Array, Array]:
        rows_safe = safe if safe is None or safe is False else tile.of_rows(safe)
        rows_sinks = None if sinks is None else tile.of_rows(sinks)
        rows, k_heads, v_heads = tile.of_rows(q_grouped), tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...]
        return _forward_rows(rows, k_heads, v_heads, rows_safe, rows_sinks, pairs.of(tile), tile.rows, grid.columns)

    outs, sums = grid.from_rows(task, q)
    out, lse = xp.reshape(outs, (b, h, queries, v.shape[-1])), xp.reshape(sums, (b, h, queries))
    return out, lse, Saved(q, k, v, pairs, sink, q_lengths, out, lse, safe, most)


def _sinks(sink: Array, q_lengths: Array | None, q: Array, groups: int) -> Array:
    """Return the sinks (h, s) of each query, (b, g, r, i, s), -inf for a query that does not exist."""
    xp, exists = namespace(q), existing(q_lengths, q.shape[2], q)
    sinks = where_allowed(exists, sink[None, :, None, :], -math.inf)
    return group_heads(xp.broadcast_to(sinks, (*q.shape[:3], sink.shape[1])), groups)


def _forward_rows(
    q: Array,
    k: Array,
    v: Array,
    safe: Array | bool | None,
    sinks: Array | None,
    pairs: Pairs,
    rows: Span,
    width: int,
) -> tuple[Array, Array]:
    """Return (out, lse) of one block of rows: (b, g, r, i, e) and (b, g, r, i).

    `safe` is None where all rows are, and False where none is.
    """
    xp = namespace(q)
    total = zeros((*q.shape[:-1], 1), q)  # (b, g, r, i, 1) [SM.total]
    out = zeros((*q.shape[:-1], v.shape[-1]), q)  # (b, g, r, i, e) [SM.5]
    maximum = 0.0 * total if safe is None else _where(safe, 0.0, total - math.inf)  # (b, g, r, i, 1) [SM.top]
    ones = xp.ones_like(k[0, 0, 0, :, :1])
    q_scaled = q * pairs.scale
    for columns in pairs.band.blocks(k.shape[-2], rows, width):
        at = slice(*columns)
        scores, _ = _scores(q_scaled, k[..., at, :], pairs, rows, columns)
        allowed = pairs.band.allowed(pairs.mask, rows, columns, pairs.batch)
        if safe is None:
            exponentials = _only(allowed, xp.exp(scores))  # (b, g, r, i, j) [SM.3]
        else:
            masked = where_allowed(allowed, scores, -math.inf)  # (b, g, r, i, j) [SM.2]
            highest = _where(safe, 0.0, xp.maximum(maximum, max_last(masked)))  # (b, g, r, i, 1) [SM.top]
            # A row that has met no key yet has -inf here; 0 in its place keeps -inf - -inf out.
            shift = xp.where(highest == -math.inf, 0.0, highest)
            decay = xp.exp(maximum - shift)
            exponentials = xp.exp(masked - shift)  # (b, g, r, i, j) [SM.3]
            total, out, maximum = total * decay, out * decay, highest
            del masked
        del scores  # the next tile takes its memory, which is in the cache, as it takes that of all that goes here
        # A product with ones is a sum, and quicker.
        total += exponentials @ ones[at, :]  # (b, g, r, i, 1) [SM.total]
        if pairs.keep is not None:
            exponentials = exponentials * part_of(pairs.keep, rows, columns)
        out += exponentials @ v[..., at, :]  # (b, g, r, i, e) [SM.5]
        del exponentials
    if sinks is not None:
        highest = xp.maximum(maximum, max_last(sinks))  # (b, g, r, i, 1) [SM.top]
        shift = xp.where(highest == -math.inf, 0.0, highest)
        decay = xp.exp(maximum - shift)
        of_sinks = xp.exp(sinks - shift)  # (b, g, r, i, s) [SM.sunk]
        total, out, maximum = total * decay + xp.sum(of_sinks, axis=-1, keepdims=True), out * decay, highest
    alive = total != 0.0
    total = xp.where(alive, total, 1.0)  # (b, g, r, i, 1) [SM.total]
    lse = xp.where(alive, maximum + xp.log(total), -math.inf)[..., 0]  # (b, g, r, i) [SM.lse]
    return out / total, lse


def backward(saved: Saved, d_out: Array, d_lse: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v, scale and what there is of softcap, bias, sink, keep, for d_out and d_lse."""
    q, k, v, pairs = saved.q, saved.k, saved.v, saved.pairs
    xp = namespace(q, k, v)
    groups = k.shape[1]
    grid = plan(q, k, saved.most)
    alive = saved.lse != -math.inf
    # forward: out = weights @ v; lse = log of the total. Together they pull on every score of row i by -inner_i w_ij.
    inner = xp.vecdot(d_out, saved.out)  # (b, h, i)
    if d_lse is not None:
        inner = inner - xp.where(alive, d_lse, 0.0)
    lse = xp.where(alive, saved.lse, 0.0)
    none_safe = saved.safe is False
    rows_safe = None if none_safe else saved.safe
    grouped = [*(group_heads(x, groups) for x in (q, d_out, lse[..., None], inner[..., None])), rows_safe]

    others: dict[tuple[int, int], dict[str, Any]] = {}

    def task(tile: Tile) -> tuple[Array, Array, Array]:
        k_heads, v_heads = tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...]
        blocks = [(part.rows, [None if x is None else part.of_rows(x) for x in grouped]) for part in grid.rows_of(tile)]
        found = _backward_heads(k_heads, v_heads, pairs.of(tile), none_safe, blocks, grid.columns)
        others[tile.batch.start, tile.heads.start] = found
        return found.pop("product"), found.pop("k"), found.pop("v")

    d_products, d_k, d_v = grid.from_heads(task, q)
    parts = [others[tile.batch.start, tile.heads.start] for tile in grid.heads]
    # forward: scores = q @ k^T * scale
    d_product = xp.reshape(d_products, q.shape)
    d_scale = sum_wide(xp.vecdot(d_product, q))  # () [dSM.scale]
    d_product *= pairs.scale  # in its own memory, which is that of all queries
    d_q = d_product  # (b, h, i, d) [dSM.q]
    gradients = {"q": d_q, "k": d_k, "v": d_v, "scale": d_scale}
    if pairs.softcap is not None:
        gradients["softcap"] = sum_wide(xp.stack([part["softcap"] for part in parts]))
    for name, x in (("bias", pairs.bias), ("keep", pairs.keep)):
        if x is not None:
            gradients[name] = ungroup_heads(grid.join_sums([part[name] for part in parts], x))
    if saved.sink is not None:
        # forward: total = ... + sum(exp(sinks - maximum))
        sinks = xp.where(alive[..., None], saved.sink[None, :, None, :] - lse[..., None], -math.inf)  # (b, h, i, s)
        pull = -inner[..., None] * xp.exp(sinks)  # (b, h, i, s)
        gradients["sink"] = sum_wide_to(pull, (1, q.shape[1], 1, sinks.shape[3]))[0, :, 0, :]
    return gradients


def _backward_heads(
    k: Array,
    v: Array,
    pairs: Pairs,
    none_safe: bool,
    blocks: list[tuple[Span, list[Any]]],
    width: int,
) -> dict[str, Any]:
    """Return the gradients of all rows and columns of some heads; these heads' k and v belong to this task alone.

    "product" is that of q without the scale.

    What is subtracted from each row is one more column of a product: [x, -c] @ [y, 1]^T = x @ y^T - c. For lse only
    rows with small scores do so: a product with another column may round in another way, and scores of 1e9 that are
    rounded otherwise than in the forward have nothing to do with its lse.
    """
    xp = namespace(k)
    scale, softcap, keep = pairs.scale, pairs.softcap, pairs.keep
    keys = k.shape[-2]
    starts = range(0, keys, width)
    d_k = [zeros((k.shape[0], k.shape[1], min(s + width, keys) - s, k.shape[-1]), k) for s in starts]
    d_v = [zeros((v.shape[0], v.shape[1], min(s + width, keys) - s, v.shape[-1]), v) for s in starts]
    d_rows, d_softcap = [], []
    d_bias, d_keep = (None if x is None else PlaneSum(x, blocks[-1][0][1], keys, width) for x in (pairs.bias, keep))
    ones = xp.ones_like(k[..., :1])
    k_ones, v_ones = xp.concat([k, ones], axis=-1), xp.concat([v, ones], axis=-1)
    for rows, (q, d_out, lse, inner, safe) in blocks:
        q_scaled = q * scale
        q_lse, d_out_inner = xp.concat([q_scaled, -lse], axis=-1), xp.concat([d_out, -inner], axis=-1)
        d_product = zeros(q.shape, q)
        for columns in pairs.band.blocks(keys, rows, width):
            n, at = columns[0] // width, slice(*columns)
            ratio = None
            if softcap is None and safe is None and not none_safe:
                shifted = q_lse @ xp.matrix_transpose(k_ones[..., at, :])  # (b, g, r, i, j) [SM.1-SM.2]
            else:
                scores, ratio = _scores(q_scaled, k[..., at, :], pairs, rows, columns)
                shifted = scores - lse  # (b, g, r, i, j) [SM.1-SM.2]
                if softcap is None and not none_safe:
                    carried = q_lse @ xp.matrix_transpose(k_ones[..., at, :])  # (b, g, r, i, j) [SM.1-SM.2]
                    shifted = xp.where(safe, carried, shifted)  # (b, g, r, i, j) [SM.1-SM.2]
            allowed = pairs.band.allowed(pairs.mask, rows, columns, pairs.batch)
            if safe is None and not none_safe:
                weights = _weights(allowed, shifted)  # (b, g, r, i, j) [SM.4]
            else:
                weights = xp.exp(where_allowed(allowed, shifted, -math.inf))  # (b, g, r, i, j) [SM.4]
            del shifted  # its memory, which is in the cache, serves again
            size = columns[1] - columns[0]
            # forward: out = kept @ v
            if keep is None:
                d_v_tile = sum_group(matmul(xp.matrix_transpose(weights), d_out))  # (b, g, j, e) [dSM.v]
                d_v[n] = _add_rows(d_v[n], d_v_tile, size)
                del d_v_tile  # so that the next product fits where the scores were
                # forward: weights = exp(masked - lse)
                d_scores = weights * (d_out_inner @ xp.matrix_transpose(v_ones[..., at, :]))  # (b, g, r, i, j) [dSM.2]
            else:
                factor = part_of(keep, rows, columns)
                kept = factor * weights  # (b, g, r, i, j) [SM.kept]
                d_v_tile = sum_group(matmul(xp.matrix_transpose(kept), d_out))  # (b, g, j, e) [dSM.v]
                d_v[n] = _add_rows(d_v[n], d_v_tile, size)
                d_kept = d_out @ xp.matrix_transpose(v[..., at, :])  # (b, g, r, i, j) [dSM.kept]
                assert d_keep is not None
                d_keep.add(rows, columns, d_kept * weights)
                d_scores = weights * (factor * d_kept - inner)  # (b, g, r, i, j) [dSM.2]
            if d_bias is not None:
                d_bias.add(rows, columns, d_scores)
            if ratio is not None:
                # forward: capped = softcap * tanh(ratio), ratio = scores / softcap
                tanh = xp.tanh(ratio)
                slope = 1.0 - tanh * tanh
                d_softcap_part = sum_wide(d_scores * (tanh - ratio * slope))  # () [dSM.softcap]
                d_softcap.append(d_softcap_part)
                d_scores = d_scores * slope  # (b, g, r, i, j) [dSM.1]
            # forward: scores = q @ k^T * scale
            d_product += d_scores @ k[..., at, :]
            d_k_tile = sum_group(matmul(xp.matrix_transpose(d_scores), q_scaled))  # (b, g, j, d) [dSM.k]
            d_k[n] = _add_rows(d_k[n], d_k_tile, size)
            del weights, d_scores, d_k_tile
        d_rows.append(d_product)
    gradients = {"product": concat(d_rows, axis=3), "k": concat(d_k, axis=2), "v": concat(d_v, axis=2)}
    if softcap is not None:
        gradients["softcap"] = sum_wide(xp.stack(d_softcap)) if d_softcap else zeros((), k)
    sums = {"bias": d_bias, "keep": d_keep}
    return {**gradients, **{name: x.whole([rows for rows, _ in blocks]) for name, x in sums.items() if x is not None}}


def _largest(saved: Saved) -> Array:
    """Return the largest score of each query that it may attend, (b, h, i); -inf where there is none."""
    xp, q, k, groups = namespace(saved.q), saved.q, saved.k, saved.k.shape[1]
    grid = plan(q, k, saved.most)
    q_grouped = group_heads(q * saved.pairs.scale, groups)

    def task(tile: Tile) -> tuple[Array]:
        pairs, rows, keys = saved.pairs.of(tile), tile.of_rows(q_grouped), tile.of(k)[:, :, None, ...]
        found = zeros((*rows.shape[:-1], 1), q) - math.inf
        for columns in pairs.band.blocks(k.shape[2], tile.rows, grid.columns):
            scores, _ = _scores(rows, keys[..., slice(*columns), :], pairs, tile.rows, columns)
            allowed = pairs.band.allowed(pairs.mask, tile.rows, columns, pairs.batch)
            found = xp.maximum(found, max_last(where_allowed(allowed, scores, -math.inf)))
        return (found[..., 0],)

    return xp.reshape(grid.from_rows(task, q)[0], q.shape[:3])


def _scores(q_scaled: Array, k: Array, pairs: Pairs, rows: Span, columns: Span) -> tuple[Array, Array | None]:
    """Return the scores of one tile, capped and biased, and the argument of the cap's tanh where there is one."""
    xp, softcap, ratio = namespace(k), pairs.softcap, None
    scores = q_scaled @ xp.matrix_transpose(k)  # (b, g, r, i, j) [SM.1]
    if softcap is not None:
        ratio = scores / softcap
        scores = softcap * xp.tanh(ratio)  # (b, g, r, i, j) [SM.capped]
    if pairs.bias is not None:
        scores = scores + part_of(pairs.bias, rows, columns)  # (b, g, r, i, j) [SM.biased]
    return scores, ratio


def _only(allowed: Array | None, x: Array) -> Array:
    """Return finite x, and 0 where it is not allowed; None allows all.

    A product is quicker than a choice between two numbers, most of all where the next one cannot be foreseen.
    """
    return x if allowed is None else x * namespace(x).astype(allowed, x.dtype)


def _weights(allowed: Array | None, shifted: Array) -> Array:
    """Return exp(shifted), and 0 where it is not allowed.

    No weight is above 1 by more than rounding: what the bound is for is hidden, and must not overflow.
    """
    xp = namespace(shifted)
    if allowed is None:
        return xp.exp(shifted)
    return _only(allowed, xp.exp(xp.minimum(shifted, xp.ones_like(shifted[..., :1]))))


def _where(safe: Array | bool, x: Array | float, otherwise: Array) -> Array:
    """Return x where rows are safe, False for none of them."""
    return otherwise if isinstance(safe, bool) else namespace(otherwise).where(safe, x, otherwise)


def _add_rows(x: Array, first: Array, size: int) -> Array:
    """Return x (b, g, j, d), which nobody else reads, with `first` added to its first `size` rows."""
    if size == x.shape[2]:
        x += first
        return x
    return namespace(x).concat([x[:, :, :size, :] + first, x[:, :, size:, :]], axis=2)
