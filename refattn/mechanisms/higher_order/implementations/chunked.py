"""Higher-order attention in linear time, causal: a state goes along, and chunks of tokens read it and are folded in.

A chunk of queries sees the keys before its own chunk through the state, all at once, and those of its own chunk pair by
pair (see `pairs`)::

    [a_i, z_i] = read(state, q_i) + sum over j <= i of the chunk of w_ij [v_j, 1],    then state = fold(state, chunk)

Everything heavy is a matrix product, as in the tiled implementation, and work and memory are linear in the length, as
in the recurrent one. The backward goes over the chunks twice: forward in time, where the states are made once more and
give the gradients of the queries that read them, then back in time, where R, the gradient with respect to the state, is
summed up and gives those of the keys and values. States are not kept, and not recovered by subtraction either, which
would lose digits.

Token by token no chunk is needed, and no pair: each key is folded in before its query reads. That is the recurrent
implementation, which takes its own schedule and is the same code.

A state may come in: what other keys, all of them earlier, have left. Then the state after the last key goes out in
`Saved`, and its gradient may come in and that of the first state goes out: a sequence in two parts is the whole.

Source: the state of Katharopoulos et al. 2020 (arXiv:2006.16236), equations 16 to 20, in chunks as in Hua et al. 2022
(arXiv:2202.10447).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refattn import equations
from refattn.mechanisms.higher_order.implementations import common, pairs
from refattn.mechanisms.higher_order.implementations.common import (
    Saved,
    keys_attended,
    merge_rows,
    split_rows,
    with_ones,
)
from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.mechanisms.higher_order.implementations.schedule import Chunk, Schedule, causal_schedule, past, plan
from refattn.mechanisms.higher_order.implementations.state import (
    Running,
    State,
    about_adjoint,
    centred_gradient,
    fold_backward,
    of_heads,
    read,
    read_adjoint,
    read_backward,
    recentred,
    settled,
    whole_gradient,
)
from refattn.mechanisms.higher_order.options import Options
from refattn.ops.heads import group_heads
from refattn.ops.tiles import Tile
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class _Heads:
    """What one task owns, and the chunks that it takes."""

    kernel: Kernel
    schedule: Schedule
    past: Array  # 1 where a query of a chunk may attend a key of it, 0 elsewhere
    queries: Array  # (b, g, r, i, d): q+
    keys: Array  # (b, g, j, d): k+
    values: Array  # (b, g, j, e + 1): [v, 1]

    def of_queries(self, rows: Chunk) -> Array:
        return self.queries[..., slice(*rows), :]

    def of_keys(self, columns: Chunk) -> tuple[Array, Array]:
        return self.keys[..., slice(*columns), :], self.values[..., slice(*columns), :]

    def allowed(self, rows: Chunk, columns: Chunk) -> Array:
        return self.past[: rows[1] - rows[0], : columns[1] - columns[0]]


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    key_mask: Array | None,
    offset: int | None,
    options: Options,
    state: State | None = None,
    by_token: bool = False,
) -> tuple[Array, Array, Saved]:
    """Return (out, normaliser, saved): (b, h, i, e), (b, h, i) and what `backward` reads, with the state that goes out.

    `state` holds keys before all of k, which every query may attend. `by_token` is the recurrent implementation.
    """
    assert offset is not None
    kernel = Kernel(options, q.shape[3])
    grid, size = plan(kernel, q, k)
    size = 1 if by_token else size
    schedule = causal_schedule(q.shape[2], k.shape[2], offset, size, by_token)
    queries, allowed = group_heads(q, k.shape[1]), past(size, q)
    attended = None
    if options.normaliser.counts:
        attended = keys_attended(key_mask, offset, q, k)
        attended = attended if state is None else attended + state.values[:, :1, None, :, -1:]

    def task(tile: Tile) -> tuple[Array, ...]:
        lifted = kernel.lift(tile.of(queries))[0], kernel.lift(tile.of(k))[0]
        heads = _Heads(kernel, schedule, allowed, *lifted, with_ones(v, key_mask, tile))
        sums, last = _sums(heads, None if state is None else of_heads(state, tile))
        counts = None if attended is None else tile.of(attended)
        results = equations.active(common).forward(sums, counts, options)
        return results if state is None or last is None else (*results, last.products, last.values)

    joined = grid.from_heads(task, q)
    out, total = joined[:2]
    last = None if state is None else State(joined[2], joined[3], state.settings)
    saved = Saved(q, k, v, key_mask, offset, options, out, total, attended, None, state, last, by_token)
    return saved.results


def backward(saved: Saved, d_out: Array, d_state: State | None = None) -> dict[str, Any]:
    """Return the gradients of q, k, v, and of alpha and delta where these are learned, and of a state that came in.

    `d_state` is the gradient with respect to the state that went out.
    """
    q, k, v, options = saved.q, saved.k, saved.v, saved.options
    assert saved.offset is not None
    kernel = Kernel(options, q.shape[3])
    grid, size = plan(kernel, q, k)
    size = 1 if saved.by_token else size
    schedule = causal_schedule(q.shape[2], k.shape[2], saved.offset, size, saved.by_token)
    queries, d_out_rows, allowed = group_heads(q, k.shape[1]), group_heads(d_out, k.shape[1]), past(size, q)

    def task(tile: Tile) -> tuple[Array, ...]:
        (rows, q_normal), (keys, k_normal) = kernel.lift(tile.of(queries)), kernel.lift(tile.of(k))
        heads = _Heads(kernel, schedule, allowed, rows, keys, with_ones(v, saved.key_mask, tile))
        out, total, d_tile_out = (tile.of(x) for x in (saved.out, saved.total, d_out_rows))
        counts = None if saved.attended is None else tile.of(saved.attended)
        d_sums = equations.active(common).backward(out, total, counts, options, d_tile_out)
        start = None if saved.start is None else of_heads(saved.start, tile)
        d_read, centres = _forward_in_time(heads, start, d_sums)
        d_last = None
        if saved.state is not None and d_state is not None:
            d_last = centred_gradient(of_heads(saved.state, tile), of_heads(d_state, tile), centres[-1])
        d_rows, d_keys, d_values, d_first = _back_in_time(heads, d_last, d_sums, d_read, centres)
        d_q, d_k = kernel.lift_backward(q_normal, d_rows), kernel.lift_backward(k_normal, d_keys)
        d_inputs: tuple[Array, ...] = d_q, d_k, d_values[..., :-1]
        if options.learned:
            sums = common.sums_attended(heads.values, saved.offset, q.shape[2])
            sums = sums if start is None else sums + start.values[:, :, None, ...]
            d_inputs += (common.parts_of_numbers(kernel, ((rows, d_rows), (keys, d_keys)), d_sums, sums),)
        if start is None or d_first is None:
            return d_inputs
        d_start = whole_gradient(start, d_first)
        return *d_inputs, d_start.products, d_start.values

    joined = grid.from_heads(task, q)
    gradients: dict[str, Any] = equations.active(common).gradients_of(joined, options)
    if saved.start is not None:
        gradients["state"] = State(joined[-2], joined[-1], saved.start.settings)
    return gradients


def _sums(heads: _Heads, start: State | None) -> tuple[Array, State | None]:
    """Return [a_i, z_i] of all queries, (b, g, r, i, e + 1), and the state after all keys where one came in."""
    running, parts, by_token = Running(heads.kernel, start, heads.values), [], heads.schedule.by_token
    for chunk in heads.schedule.before:
        running.fold(*heads.of_keys(chunk))
    for n, (rows, columns) in enumerate(heads.schedule.chunks):
        queries, (keys, values) = heads.of_queries(rows), heads.of_keys(columns)
        if keys.shape[2] and by_token:
            running.fold(keys, values)
        if running.state is None:
            sums = zeros((*queries.shape[:-1], values.shape[-1]), queries)
        else:
            found = read(heads.kernel, running.state, merge_rows(queries), running.centre)
            sums = split_rows(found, queries.shape[2])
        if keys.shape[2] and not by_token:
            sums += pairs.forward(heads.kernel, queries, keys, values, heads.allowed(rows, columns))
        parts.append(sums)
        if keys.shape[2] and not by_token and (start is not None or n + 1 < len(heads.schedule.chunks)):
            running.fold(keys, values)
    last = None if start is None or running.state is None else settled(running.state, running.centre)[0]
    return namespace(parts[0]).concat(parts, axis=3), last


def _forward_in_time(heads: _Heads, start: State | None, d_sums: Array) -> tuple[list[Array | None], list[Array]]:
    """Return by chunk the gradient of its queries through what they read, None where there was no state, and centres.

    The centres are those of the state that came in and, by chunk, of those that were read.
    """
    running, d_read = Running(heads.kernel, start, heads.values), []
    centres = [running.centre]
    for chunk in heads.schedule.before:
        running.fold(*heads.of_keys(chunk))
    for n, (rows, columns) in enumerate(heads.schedule.chunks):
        queries, (keys, values) = heads.of_queries(rows), heads.of_keys(columns)
        d_part = None
        if keys.shape[2] and heads.schedule.by_token:
            running.fold(keys, values)
        centres.append(running.centre)
        if running.state is not None:
            # forward: sums = read(state, queries) + pairs(queries, keys, values)
            d_some = about_adjoint(merge_rows(d_sums[..., slice(*rows), :]), -running.centre)
            d_part = read_backward(heads.kernel, running.state, merge_rows(queries), d_some)
            d_part = split_rows(d_part, queries.shape[2])
        d_read.append(d_part)
        if keys.shape[2] and not heads.schedule.by_token and n + 1 < len(heads.schedule.chunks):
            running.fold(keys, values)
    return d_read, centres


def _back_in_time(
    heads: _Heads, d_state: State | None, d_sums: Array, d_read: list[Array | None], centres: list[Array]
) -> tuple[Array, Array, Array, State | None]:
    """Return the gradients of all queries, of all keys, of all values, and of the state that came in.

    `d_state` is that of the state after the last key, about the last centre, None for 0: nothing is folded where nobody
    reads it afterwards. `d_read` and `centres`, which are emptied, are what `_forward_in_time` found. The gradient of
    the state that came in is about its mean.
    """
    xp, kernel, by_token = namespace(d_sums), heads.kernel, heads.schedule.by_token
    d_queries, d_keys, d_values = [], [], []
    centre = centres[-1]
    for rows, columns in heads.schedule.chunks[::-1]:
        queries, (keys, values) = heads.of_queries(rows), heads.of_keys(columns)
        d_some, d_part, own = d_sums[..., slice(*rows), :], d_read.pop(), centres.pop()
        if by_token:
            d_query_part, d_key_part, d_value_part = (xp.zeros_like(x) for x in (queries, keys, values))
        else:
            # forward: sums = read(state, queries) + pairs(queries, keys, values)
            allowed = heads.allowed(rows, columns)
            d_query_part, d_key_part, d_value_part = pairs.backward(kernel, queries, keys, values, allowed, d_some)
            if d_state is not None and keys.shape[2]:
                # forward: state = fold(state, keys, values), after its queries have read the state
                d_folded = fold_backward(kernel, keys, values, d_state, centre)
                d_key_part, d_value_part = d_key_part + d_folded[0], d_value_part + d_folded[1]
        d_state = recentred(d_state, centre, own)
        if d_part is not None:
            d_query_part = d_part if by_token else d_query_part + d_part
            d_state = read_adjoint(kernel, d_state, merge_rows(queries), about_adjoint(merge_rows(d_some), -own))
        if by_token and d_state is not None and keys.shape[2]:
            # forward: state = fold(state, keys, values), before its query reads the state
            d_key_part, d_value_part = fold_backward(kernel, keys, values, d_state, own)
        d_keys.append(d_key_part)
        d_values.append(d_value_part)
        centre = own
        d_queries.append(d_query_part)
    for chunk in heads.schedule.before[::-1]:
        assert d_state is not None
        d_key_part, d_value_part = fold_backward(kernel, *heads.of_keys(chunk), d_state, centre)
        d_keys.append(d_key_part)
        d_values.append(d_value_part)
    d_state = recentred(d_state, centre, centres.pop())
    unseen = heads.keys[..., heads.schedule.seen :, :], heads.values[..., heads.schedule.seen :, :]
    d_keys.insert(0, xp.zeros_like(unseen[0]))
    d_values.insert(0, xp.zeros_like(unseen[1]))
    whole = (xp.concat(parts[::-1], axis=axis) for parts, axis in ((d_queries, 3), (d_keys, 2), (d_values, 2)))
    return *whole, d_state
