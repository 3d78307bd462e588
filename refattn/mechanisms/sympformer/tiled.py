"""The force in strips of rows: the same equations, with memory linear in the number of tokens.

A task owns some heads and walks over strips of their rows, each with all keys that the rows may attend. What a key j
brings along, u_j, needs the whole row j. Where attention is causal all of these are rows of this strip or of one before
it, so one walk does; otherwise a first walk finds every u. The backward walks from the last strip to the first: when it
comes to a strip, all rows that attend its tokens have already told what they ask of them. It computes the scores again,
and with lse_i = t_i + log r_i

    ds_ij = w_ij (dw_ij - do_i . o_i + dc_i) = w_ij (dw_ij - 2 u_i du_i + dlog_z_i).

A walk goes in waves of a few strips, which are tasks themselves where there is only one of the heads: each tells its u
and waits, with its scores, for those of the others.

Lines that compute a part of an equation carry its tag. Axes as in the dense implementation, with the query heads as two
axes: g key/value head, r query head within its group; i and j are the rows and columns of a strip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from refattn.mechanisms.sympformer.dense import counts, masses, push_of
from refattn.ops.heads import group_heads, sum_group, ungroup_heads
from refattn.ops.masks import allowed_in_tile
from refattn.ops.tiles import Plan, Tile, plan, run
from refattn.xp import Array, matmul, namespace, zeros

WAVE = 2
"""Strips of a wave: enough for several workers, and few, since it is their scores that fill the memory."""


@dataclass(frozen=True)
class Saved:
    """What the backward of the tiled implementation reads."""

    q: Array  # (b, h, i, d)
    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)
    offset: int | None
    scale: float
    lse: Array  # (b, g, r, i, 1)
    log_z: Array  # (b, g, r, i, 1)
    push: Array  # (b, g, r, i, 1)
    out: Array  # (b, g, r, i, e)


def forward(
    q: Array, k: Array, v: Array, kinetic: Array, *, offset: int | None, scale: float
) -> tuple[Array, Array, Saved]:
    """Return (out, log_z, saved): (b, h, i, e), (b, h, i) and what `backward` reads."""
    xp, grid, groups = namespace(q, k, v), plan(q, k), k.shape[1]
    queries, energies = group_heads(q, groups), group_heads(kinetic, groups)

    def task(tile: Tile) -> tuple[Array, ...]:
        keys, values = tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...]
        lses, logs, pushes, outs = [], [], [], []

        def scored(strip: _Strip) -> tuple[Array, ...]:
            return _scored(strip.part.of_rows(queries), keys, strip, offset, scale)

        def pushed(each: tuple[_Strip, tuple[Array, ...]]) -> Array:
            strip, (exponentials, total, _, log_z) = each
            return _pushed(exponentials, total, log_z, known, values, strip)

        waves = _waves(grid, tile, offset, k.shape[2])
        for wave in waves:
            found = _longest_first(q, scored, wave)
            for strip, (_, _, lse, log_z) in zip(wave, found, strict=True):
                lses.append(lse)
                logs.append(log_z)
                pushes.append(push_of(strip.part.of_rows(energies), log_z))
            if offset is not None:
                known = xp.concat(pushes, axis=3)
                outs += _longest_first(q, pushed, list(zip(wave, found, strict=True)))
        if offset is None:
            known = xp.concat(pushes, axis=3)
            for wave in waves:
                outs += run(q, lambda strip: pushed((strip, scored(strip))), wave)
        return tuple(xp.concat(parts, axis=3) for parts in (outs, lses, logs, pushes))

    out, lse, log_z, push = _each(q, task, grid)
    saved = Saved(q, k, v, offset, scale, lse, log_z, push, out)
    return ungroup_heads(out), ungroup_heads(log_z)[..., 0], saved


@dataclass(frozen=True)
class _Strip:
    """Rows of a tile, and the columns that they may attend."""

    part: Tile
    columns: int

    @property
    def rows(self) -> tuple[int, int]:
        return self.part.rows


def _waves(grid: Plan, tile: Tile, offset: int | None, keys: int) -> list[list[_Strip]]:
    """Return the strips of a tile, wave by wave."""
    strips = [_Strip(part, keys if offset is None else part.rows[1] + offset) for part in grid.rows_of(tile)]
    return [strips[n : n + WAVE] for n in range(0, len(strips), WAVE)]


def _each(like: Array, task: Callable[[Tile], tuple[Array, ...]], grid: Plan) -> list[Array]:
    """Return the results of a task for all heads; where there is only one, its strips are the tasks of the pool."""
    return list(task(grid.heads[0])) if len(grid.heads) == 1 else grid.from_heads(task, like)


def _longest_first(like: Array, task: Callable[[Any], Any], wave: Sequence[Any]) -> list[Any]:
    """Return the results of a task for all strips of a wave; later ones have more columns, and begin first."""
    return run(like, task, wave[::-1])[::-1]


def _scored(q: Array, k: Array, strip: _Strip, offset: int | None, scale: float) -> tuple[Array, Array, Array, Array]:
    """Return (exponentials, total, lse, log_z) of a strip."""
    n = counts(offset, strip.rows, strip.columns, q)
    exponentials, total, maximum, log_z = masses(_scores(q, k, strip, offset, scale), n)
    return exponentials, total, maximum + namespace(q).log(total), log_z


def _scores(q: Array, k: Array, strip: _Strip, offset: int | None, scale: float) -> Array:
    xp = namespace(q)
    scores = (q * scale) @ xp.matrix_transpose(k[..., : strip.columns, :])  # (b, g, r, i, j) [SYMP.unmasked]
    allowed = allowed_in_tile(None, offset, strip.rows, (0, strip.columns), q)
    if allowed is None:
        return scores
    masked = xp.where(allowed, scores, -math.inf)  # (b, g, r, i, j) [SYMP.5]
    return masked


def _factor(push: Array, strip: _Strip) -> Array:
    """Return 1 + (u_i + u_j) / 2 of a strip, (b, g, r, i, j), from the u of all rows that are known."""
    half = 0.5 * push
    return (1.0 + half[..., slice(*strip.rows), :]) + namespace(push).matrix_transpose(half[..., : strip.columns, :])


def _pushed(exponentials: Array, total: Array, log_z: Array, push: Array, v: Array, strip: _Strip) -> Array:
    """Return the output of a strip."""
    factor = _factor(push, strip)
    factor *= exponentials
    out = namespace(v).exp(log_z) / total * (factor @ v[..., : strip.columns, :])  # (b, g, r, i, e) [SYMP.12]
    return out


def backward(saved: Saved, d_out: Array, d_log_z: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v and kinetic for given d_out and d_log_z."""
    q, k, v, offset, groups = saved.q, saved.k, saved.v, saved.offset, saved.k.shape[1]
    xp, grid = namespace(q, k, v), plan(saved.q, saved.k)
    d_given = zeros(saved.lse.shape, q) if d_log_z is None else group_heads(d_log_z[..., None], groups)
    queries, d_outs = group_heads(q, groups), group_heads(d_out, groups)

    def task(tile: Tile) -> tuple[Array, ...]:
        keys, values, push = tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...], tile.of(saved.push)
        waves = _waves(grid, tile, offset, k.shape[2])
        blocks = [part.rows for part in grid.rows_of(tile)]
        asked = [zeros(push.shape, q)]
        d_queries: list[Array] = []
        d_keys: list[Array | None] = [None] * len(blocks)
        d_values: list[Array | None] = [None] * len(blocks)

        def tell(parts: Iterable[Array]) -> None:
            for part in parts:
                d_push = asked[0] + part  # (b, g, r, i, 1) [dSYMP.10]
                asked[0] = d_push

        def pulled_of(strip: _Strip) -> tuple[Array, ...]:
            """Return weights, da * weights, the gradient of the sum, and what a strip asks of every u."""
            masked = _scores(strip.part.of_rows(queries), keys, strip, offset, saved.scale)
            weights = xp.exp(masked - strip.part.of_rows(saved.lse))  # (b, g, r, i, j) [SYMP.6]
            # forward: out = exp(log_z) * sum
            d_sum = xp.exp(strip.part.of_rows(saved.log_z)) * strip.part.of_rows(d_outs)
            # forward: sum = pairs @ v
            d_pairs = d_sum @ xp.matrix_transpose(values[..., : strip.columns, :])  # (b, g, r, i, j) [dSYMP.11]
            d_pairs *= weights
            # forward: pairs = weights * (1 + (push_i + push_j) / 2)
            as_key = _placed(xp.matrix_transpose(xp.sum(d_pairs, axis=-2, keepdims=True)), 0, push)
            as_query = _placed(xp.sum(d_pairs, axis=-1, keepdims=True), strip.rows[0], push)
            return weights, d_pairs, d_sum, 0.5 * (as_query + as_key)

        def turned_of(each: tuple[_Strip, tuple[Array, ...]]) -> tuple[Array, Array, Array]:
            """Return the gradient of the scores of a strip, pairs, and the gradient of the queries."""
            strip, (weights, pulled, _, _) = each
            part = strip.part
            # forward: push = kinetic * inverse * inverse; inverse = exp(-log_z)
            turned = part.of_rows(d_given) - 2.0 * part.of_rows(saved.push) * asked[0][..., slice(*strip.rows), :]
            factor = _factor(push, strip)
            # forward: weights = exp(masked - lse)
            pulled *= factor
            factor *= weights
            weights *= turned
            weights += pulled
            d_masked = weights  # (b, g, r, i, j) [dSYMP.6-dSYMP.5]
            # forward: scores = q @ k^T * scale
            d_q_rows = d_masked @ keys[..., : strip.columns, :] * saved.scale  # (b, g, r, i, d) [dSYMP.q]
            return d_masked, factor, d_q_rows

        def walked(wave: list[_Strip]) -> None:
            """Take a wave; what it has kept ends with it."""
            found = _longest_first(q, pulled_of, wave)
            if offset is not None:
                tell(each[3] for each in found)
            turned = _longest_first(q, turned_of, list(zip(wave, found, strict=True)))
            d_queries[:0] = [each[2] for each in turned]

            def columns_of(block: tuple[int, int]) -> tuple[Array, Array]:
                """Return what the wave adds to the gradients of some keys and values."""
                d_k_block, d_v_block = None, None
                for strip, (_, _, d_sum, _), (d_masked, pairs, _) in zip(wave, found, turned, strict=True):
                    if strip.columns > block[0]:
                        at = slice(block[0], min(block[1], strip.columns))
                        # forward: sum = pairs @ v
                        more = sum_group(matmul(xp.matrix_transpose(pairs[..., at]), d_sum))
                        d_v_block = _plus(d_v_block, more)
                        # forward: scores = q @ k^T * scale
                        more = sum_group(matmul(xp.matrix_transpose(d_masked[..., at]), strip.part.of_rows(queries)))
                        d_k_block = _plus(d_k_block, more * saved.scale)
                return d_k_block, d_v_block

            below = [block for block in blocks if block[0] < wave[-1].columns]
            for at, (d_k_block, d_v_block) in enumerate(run(q, columns_of, below)):
                d_keys[at] = _plus(d_keys[at], d_k_block)
                d_values[at] = _plus(d_values[at], d_v_block)

        if offset is None:
            for wave in waves:
                tell(run(q, lambda strip: pulled_of(strip)[3], wave))
        for wave in reversed(waves):
            walked(wave)
        return xp.concat(d_queries, axis=3), xp.concat(d_keys, axis=2), xp.concat(d_values, axis=2), asked[0]

    d_q, d_k, d_v, d_push = _each(q, task, grid)
    inverse = xp.exp(-saved.log_z)
    d_kinetic = ungroup_heads(d_push * inverse * inverse)  # (b, h, i, 1) [dSYMP.kinetic]
    return {"q": ungroup_heads(d_q), "k": d_k, "v": d_v, "kinetic": d_kinetic}


def _placed(part: Array, first: int, like: Array) -> Array:
    """Return an array of the shape of `like` with `part` in its rows from `first` on, the last axis but one, else 0."""
    before = zeros((*part.shape[:-2], first, 1), part)
    after = zeros((*part.shape[:-2], like.shape[-2] - first - part.shape[-2], 1), part)
    return namespace(part).concat([before, part, after], axis=-2)


def _plus(x: Array | None, more: Array) -> Array:
    return more if x is None else x + more
