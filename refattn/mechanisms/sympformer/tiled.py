"""The force in strips of rows: the same equations, with memory linear in the number of tokens.

A task owns some heads and walks over strips of their rows, each with all keys that the rows may attend. What a key j
brings along, u_j, needs the whole row j. Where attention is causal all of these are rows of this strip or of one before
it, so one walk does; otherwise a first walk finds every u. The backward walks from the last strip to the first: when it
comes to a strip, all rows that attend its tokens have already told what they ask of them. It computes the scores again,
and with lse_i = t_i + log r_i

    ds_ij = w_ij (dw_ij - do_i . o_i + dc_i),   dc_i = 0 where c is clipped.

Lines that compute a part of an equation carry its tag. Axes as in the dense form, with the query heads as two axes: g
key/value head, r query head within its group; i and j are the rows and columns of a strip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refattn.mechanisms.sympformer.dense import BOUND, counts
from refattn.ops.masks import allowed_pairs
from refattn.ops.tiles import Plan, Tile, plan, run
from refattn.xp import Array, max_last, namespace, zeros


@dataclass(frozen=True)
class Saved:
    """What the backward of the tiled form reads."""

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
    queries, energies = _group(q, groups), _group(kinetic, groups)

    def task(tile: Tile) -> tuple[Array, ...]:
        parts = list(zip(grid.rows_of(tile), _strips(grid, tile, offset, k.shape[2]), strict=True))
        keys, values = tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...]
        lses, bounded, pushes, outs = [], [], [], []
        for part, strip in parts:
            exponentials, total, lse, log_z = _scored(part.of_rows(queries), keys, strip, offset, scale)
            push = part.of_rows(energies) * xp.exp(-2.0 * log_z)  # (b, g, r, i, 1) [SYMP.8]
            lses.append(lse)
            bounded.append(log_z)
            pushes.append(push)
            if offset is not None:
                outs.append(_pushed(exponentials, total, log_z, xp.concat(pushes, axis=3), values, strip))
        pushed = xp.concat(pushes, axis=3)
        if offset is None:
            for part, strip in parts:
                exponentials, total, _, log_z = _scored(part.of_rows(queries), keys, strip, offset, scale)
                outs.append(_pushed(exponentials, total, log_z, pushed, values, strip))
        return xp.concat(outs, axis=3), xp.concat(lses, axis=3), xp.concat(bounded, axis=3), pushed

    tasks = run(q, task, grid.heads)
    out, lse, log_z, push = (grid.join_heads([found[n] for found in tasks]) for n in range(4))
    saved = Saved(q, k, v, offset, scale, lse, log_z, push, out)
    return _ungroup(out), _ungroup(log_z)[..., 0], saved


@dataclass(frozen=True)
class _Strip:
    """Rows of a tile, and the columns that they may attend."""

    rows: tuple[int, int]
    columns: int


def _strips(grid: Plan, tile: Tile, offset: int | None, keys: int) -> list[_Strip]:
    return [_Strip(part.rows, keys if offset is None else part.rows[1] + offset) for part in grid.rows_of(tile)]


def _scored(q: Array, k: Array, strip: _Strip, offset: int | None, scale: float) -> tuple[Array, Array, Array, Array]:
    """Return (exponentials, total, lse, log_z) of a strip."""
    xp = namespace(q)
    masked = _scores(q, k, strip, offset, scale)
    maximum = max_last(masked)  # (b, g, r, i, 1) [SYMP.3]
    exponentials = xp.exp(masked - maximum)  # (b, g, r, i, j) [SYMP.4]
    total = xp.sum(exponentials, axis=-1, keepdims=True)  # (b, g, r, i, 1) [SYMP.5]
    n = counts(offset, strip.rows, strip.columns, q)
    log_z = xp.clip(maximum + xp.log(total / n), -BOUND, BOUND)  # (b, g, r, i, 1) [SYMP.7]
    return exponentials, total, maximum + xp.log(total), log_z


def _scores(q: Array, k: Array, strip: _Strip, offset: int | None, scale: float) -> Array:
    xp = namespace(q)
    scores = (q * scale) @ xp.matrix_transpose(k[..., : strip.columns, :])  # (b, g, r, i, j) [SYMP.1]
    allowed = allowed_pairs(None, offset, strip.rows, (0, strip.columns), q)
    if allowed is None:
        return scores
    masked = xp.where(allowed, scores, -math.inf)  # (b, g, r, i, j) [SYMP.2]
    return masked


def _factor(push: Array, strip: _Strip) -> Array:
    """Return 1 + (u_i + u_j) / 2 of a strip, (b, g, r, i, j), from the u of all rows that are known."""
    half = 0.5 * push
    return (1.0 + half[..., slice(*strip.rows), :]) + namespace(push).matrix_transpose(half[..., : strip.columns, :])


def _pushed(exponentials: Array, total: Array, log_z: Array, push: Array, v: Array, strip: _Strip) -> Array:
    """Return the output of a strip."""
    factor = _factor(push, strip)
    factor *= exponentials
    out = namespace(v).exp(log_z) / total * (factor @ v[..., : strip.columns, :])  # (b, g, r, i, e) [SYMP.10]
    return out


def backward(saved: Saved, d_out: Array, d_log_z: Array | None) -> dict[str, Array]:
    """Return the gradients of q, k, v and kinetic for given d_out and d_log_z."""
    q, k, v, offset, groups = saved.q, saved.k, saved.v, saved.offset, saved.k.shape[1]
    xp, grid = namespace(q, k, v), plan(saved.q, saved.k)
    along = xp.sum(_group(d_out, groups) * saved.out, axis=-1, keepdims=True)
    n = counts(offset, (0, q.shape[2]), k.shape[2], q)
    free = xp.abs(saved.lse - xp.log(n)) < BOUND
    # forward: out = exp(log_z) * sum
    d_sum = xp.exp(saved.log_z) * _group(d_out, groups)
    d_given = zeros(along.shape, q) if d_log_z is None else _group(d_log_z[..., None], groups)
    queries = _group(q, groups)

    def task(tile: Tile) -> tuple[Array, ...]:
        parts = list(zip(grid.rows_of(tile), _strips(grid, tile, offset, k.shape[2]), strict=True))
        keys, values, push = tile.of(k)[:, :, None, ...], tile.of(v)[:, :, None, ...], tile.of(saved.push)
        d_keys, d_values, d_push = _Rows(tile.of(k)), _Rows(tile.of(v)), _Rows(push)
        d_queries: list[Array] = []

        def pulled_of(part: Tile, strip: _Strip) -> tuple[Array, Array]:
            """Return (weights, da * weights) of a strip, and add what they ask of every u."""
            masked = _scores(part.of_rows(queries), keys, strip, offset, saved.scale)
            weights = xp.exp(masked - part.of_rows(saved.lse))  # (b, g, r, i, j) [SYMP.6]
            # forward: sum = pairs @ v
            d_pairs = part.of_rows(d_sum) @ xp.matrix_transpose(
                values[..., : strip.columns, :]
            )  # (b, g, r, i, j) [dSYMP.9]
            return weights, d_pairs * weights

        def ask(pulled: Array, strip: _Strip) -> None:
            # forward: pairs = weights * (1 + (push_i + push_j) / 2)
            d_push.add(0.5 * xp.matrix_transpose(xp.sum(pulled, axis=-2, keepdims=True)), 0)
            d_push.add(0.5 * xp.sum(pulled, axis=-1, keepdims=True), strip.rows[0])

        if offset is None:
            for part, strip in parts:
                ask(pulled_of(part, strip)[1], strip)
        for part, strip in reversed(parts):
            weights, pulled = pulled_of(part, strip)
            if offset is not None:
                ask(pulled, strip)
            d_own = d_push.value[..., slice(*strip.rows), :]  # (b, g, r, i, 1) [dSYMP.8]
            # forward: push = kinetic * exp(-2 log_z)
            turned = part.of_rows(d_given) - 2.0 * part.of_rows(saved.push) * d_own
            bound = xp.where(part.of_rows(free), turned, -part.of_rows(along))
            factor = _factor(push, strip)
            # forward: weights = exp(masked - lse)
            d_masked = pulled * factor + weights * bound  # (b, g, r, i, j) [dSYMP.6-dSYMP.2]
            factor *= weights
            d_values.add(xp.sum(xp.matrix_transpose(factor) @ part.of_rows(d_sum), axis=2), 0)
            # forward: scores = q @ k^T * scale
            d_q_rows = d_masked @ keys[..., : strip.columns, :] * saved.scale  # (b, g, r, i, d) [dSYMP.q]
            d_queries.insert(0, d_q_rows)
            d_keys.add(xp.sum(xp.matrix_transpose(d_masked) @ part.of_rows(queries), axis=2) * saved.scale, 0)
        return xp.concat(d_queries, axis=3), d_keys.value, d_values.value, d_push.value

    tasks = run(q, task, grid.heads)
    d_q, d_k, d_v, d_push = (grid.join_heads([found[n] for found in tasks]) for n in range(4))
    d_kinetic = _ungroup(d_push * xp.exp(-2.0 * saved.log_z))  # (b, h, i, 1) [dSYMP.kinetic]
    return {"q": _ungroup(d_q), "k": d_k, "v": d_v, "kinetic": d_kinetic}


class _Rows:
    """A sum of arrays that each cover some rows of it, the last axis but one; no array is written to."""

    def __init__(self, like: Array) -> None:
        self.value = namespace(like).zeros_like(like)

    def add(self, part: Array, first: int) -> None:
        """Add `part` to the rows from `first` on."""
        value, last = self.value, first + part.shape[-2]
        middle = value[..., first:last, :] + part
        if middle.shape == value.shape:
            self.value = middle
        else:
            self.value = namespace(value).concat([value[..., :first, :], middle, value[..., last:, :]], axis=-2)


def _group(x: Array, groups: int) -> Array:
    """(b, h, ...) -> (b, g, r, ...): query heads beside the others of their key/value head."""
    b, h, *rest = x.shape
    return namespace(x).reshape(x, (b, groups, h // groups, *rest))


def _ungroup(x: Array) -> Array:
    """(b, g, r, ...) -> (b, h, ...)."""
    b, g, r, *rest = x.shape
    return namespace(x).reshape(x, (b, g * r, *rest))
