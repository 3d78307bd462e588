"""Higher-order attention in linear time, not causal: all keys are folded into one state, which all queries read.

    S = sum_j psi(k+_j) [v_j, 1],    [a_i, z_i] = phi(q+_i)^T S + constant sum_j [v_j, 1]

where `state` has the values about their mean.
Work and memory are linear in the lengths: no array is of size queries x keys, and none of size tokens x features, for
features live a chunk long. Adjoints, with da, dz of the dense implementation side by side in d_sums::

    R = dS = sum_i phi(q+_i) d_sums_i,    dphi_i = S d_sums_i,    dpsi_j = R [v_j, 1],    d[v_j, 1] = psi_j^T R + ...

Source: Katharopoulos et al. 2020 (arXiv:2006.16236), equations 5 and 6, with the features of `kernel`; Mercat 2020,
equation 3.
"""

from __future__ import annotations

from refattn import equations
from refattn.mechanisms.higher_order.implementations import common
from refattn.mechanisms.higher_order.implementations.common import (
    Saved,
    keys_attended,
    merge_rows,
    split_rows,
    with_ones,
)
from refattn.mechanisms.higher_order.implementations.kernel import Kernel
from refattn.mechanisms.higher_order.implementations.schedule import chunks, plan
from refattn.mechanisms.higher_order.implementations.state import (
    State,
    about_adjoint,
    empty,
    fold,
    fold_backward,
    mean,
    of_heads,
    read,
    read_adjoint,
    read_backward,
    settings,
)
from refattn.mechanisms.higher_order.options import Options
from refattn.ops.heads import group_heads
from refattn.ops.tiles import Tile
from refattn.xp import Array, namespace


def forward(
    q: Array, k: Array, v: Array, *, key_mask: Array | None, offset: int | None, options: Options
) -> tuple[Array, Array, Saved]:
    """Return (out, normaliser, saved): (b, h, i, e), (b, h, i) and what `backward` reads. `offset` is None."""
    assert offset is None
    xp = namespace(q, k, v)
    kernel = Kernel(options, q.shape[3])
    grid, size = plan(kernel, q, k)
    queries = group_heads(q, k.shape[1])
    attended = keys_attended(key_mask, None, q, k) if options.normaliser.counts else None

    def task(tile: Tile) -> tuple[Array, ...]:
        keys, values, rows = kernel.lift(tile.of(k))[0], with_ones(v, key_mask, tile), kernel.lift(tile.of(queries))[0]
        state = empty(kernel, (*keys.shape[:2], v.shape[3]), keys)
        centre = mean(xp.sum(values, axis=-2, keepdims=True))
        for a, b in chunks(k.shape[2], size):
            state = fold(kernel, state, keys[..., a:b, :], values[..., a:b, :], centre)
        sums = [
            split_rows(read(kernel, state, merge_rows(rows[..., a:b, :]), centre), rows.shape[2])
            for a, b in chunks(q.shape[2], size)
        ]
        counts = None if attended is None else tile.of(attended)
        results = equations.active(common).forward(xp.concat(sums, axis=3), counts, options)
        return *results, state.products, state.values

    out, total, products, sums = grid.from_heads(task, q)
    state = State(products, sums, settings(kernel, q))
    return Saved(q, k, v, key_mask, None, options, out, total, attended, state=state).results


def backward(saved: Saved, d_out: Array) -> dict[str, Array]:
    """Return the gradients of q, k, v, and of alpha and delta where these are learned, for given d_out."""
    q, k, v, options = saved.q, saved.k, saved.v, saved.options
    xp = namespace(q, k, v)
    kernel = Kernel(options, q.shape[3])
    grid, size = plan(kernel, q, k)
    queries, d_out_rows = group_heads(q, k.shape[1]), group_heads(d_out, k.shape[1])
    assert saved.state is not None
    of_all = saved.state

    def task(tile: Tile) -> tuple[Array, ...]:
        (rows, q_normal), (keys, k_normal) = kernel.lift(tile.of(queries)), kernel.lift(tile.of(k))
        values, state = with_ones(v, saved.key_mask, tile), of_heads(of_all, tile)
        out, total, d_tile_out = (tile.of(x) for x in (saved.out, saved.total, d_out_rows))
        counts = None if saved.attended is None else tile.of(saved.attended)
        d_sums = equations.active(common).backward(out, total, counts, options, d_tile_out)
        centre = mean(xp.sum(values, axis=-2, keepdims=True))
        d_state = empty(kernel, (*keys.shape[:2], v.shape[3]), keys)
        d_rows, d_keys, d_values = [], [], []
        for a, b in chunks(q.shape[2], size):
            some, d_some = merge_rows(rows[..., a:b, :]), about_adjoint(merge_rows(d_sums[..., a:b, :]), -centre)
            # forward: sums = read(state, rows)
            d_rows.append(split_rows(read_backward(kernel, state, some, d_some), rows.shape[2]))
            d_state = read_adjoint(kernel, d_state, some, d_some)
        for a, b in chunks(k.shape[2], size):
            # forward: state = fold(state, keys, values)
            d_part, d_value_part = fold_backward(kernel, keys[..., a:b, :], values[..., a:b, :], d_state, centre)
            d_keys.append(d_part)
            d_values.append(d_value_part[..., :-1])
        d_query_rows, d_key_rows = xp.concat(d_rows, axis=3), xp.concat(d_keys, axis=2)
        found = kernel.lift_backward(q_normal, d_query_rows), kernel.lift_backward(k_normal, d_key_rows)
        if not options.learned:
            return *found, xp.concat(d_values, axis=2)
        pairs, sums = ((rows, d_query_rows), (keys, d_key_rows)), state.values[:, :, None, ...]
        return *found, xp.concat(d_values, axis=2), common.parts_of_numbers(kernel, pairs, d_sums, sums)

    return equations.active(common).gradients_of(grid.from_heads(task, q), options)
