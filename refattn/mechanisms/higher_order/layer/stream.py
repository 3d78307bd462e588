"""Decoding in a state of constant size.

The keys of all tokens so far stand in the sums of `state`, but for the last few, which wait in a buffer: a query reads
the state and attends the buffer pair by pair. Once `BUFFER` tokens wait, they are folded in by one matrix product,
where token by token the whole state would be read and written again each time. Time and memory of a token do not grow
with the number of tokens before it.

Several tokens at once go through the chunked form, which takes the state in and gives the next one.

A key mask covers the new tokens, or the past and the new ones; what it says of the past is not read again.

Axes: b batch, n new token, h head, g key/value head, r query head of a group, d and e widths of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refattn import equations
from refattn.mechanisms.block import new_tokens
from refattn.mechanisms.context import Context
from refattn.mechanisms.higher_order import core
from refattn.mechanisms.higher_order.forms import common, pairs
from refattn.mechanisms.higher_order.forms.common import merge_rows, split_rows, whole, with_ones
from refattn.mechanisms.higher_order.forms.kernel import Kernel
from refattn.mechanisms.higher_order.forms.state import State, check_state, empty, fold, mean, read, settled
from refattn.mechanisms.higher_order.layer import block
from refattn.mechanisms.higher_order.options import check_sign
from refattn.ops.heads import group_heads, ungroup_heads
from refattn.xp import Array, namespace, raised, zeros

BUFFER = 64
"""Tokens that wait before they are folded in."""


@dataclass(frozen=True)
class Cache:
    """What is kept of the tokens so far: a tree of arrays, the same size after a thousand tokens as after a million."""

    state: State
    keys: Array  # (b, g, n, d): k+ of the tokens that wait, fewer than BUFFER
    values: Array  # (b, g, n, e + 1): their [v, 1]


def start(params: block.Params, batch: int) -> Cache:
    """Return the cache before the first token."""
    check_sign(block.options_of(params), True)
    _, g, d, e = params.config.sizes
    like = raised(params.w_q)
    state = empty(Kernel(block.options_of(params).like(like), d), (batch, g, e), like)
    return Cache(state, zeros((batch, g, 0, d), like), zeros((batch, g, 0, e + 1), like))


def prefill(params: block.Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of new tokens (b, n, m), and the cache with them."""
    own, x = equations.active(block), state.x
    kernel, key_mask = _check(params, cache, x, context)
    keys, values = own.keys_and_values(params, x)
    past = _folded(kernel, cache.state, cache.keys, cache.values)
    attended, saved = core.attend(
        own.queries_of(params, x), keys, values, options=kernel.options, key_mask=key_mask, causal=True, state=past
    )
    assert saved.state is not None
    return replace(state, x=own.output(params, x, attended)[0]), _emptied(cache, saved.state)


def step(params: block.Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of one new token (b, 1, m), and the cache with it."""
    own, x = equations.active(block), state.x
    xp = namespace(x)
    kernel, key_mask = _check(params, cache, x, context)
    queries, (keys, values) = own.queries_of(params, x), own.keys_and_values(params, x)
    if key_mask is not None:
        values = xp.where(key_mask[:, None, :, None], values, 0.0)
    rows = kernel.lift(group_heads(raised(queries), keys.shape[1]))[0]
    waiting = xp.concat([cache.keys, kernel.lift(raised(keys))[0]], axis=2)
    waiting_values = xp.concat([cache.values, with_ones(raised(values), key_mask, whole(queries, keys))], axis=2)
    sums = split_rows(read(kernel, cache.state, merge_rows(rows), mean(cache.state.values)), rows.shape[2])
    sums += pairs.forward(kernel, rows, waiting, waiting_values, None)
    counts = None
    if kernel.options.normaliser.counts:
        counts = (cache.state.values + xp.sum(waiting_values, axis=2, keepdims=True))[:, :1, None, :, -1:]
    attended = ungroup_heads(equations.active(common).forward(sums, counts, kernel.options)[0])
    result, _ = own.output(params, x, xp.astype(attended, x.dtype, copy=False))
    if waiting.shape[2] < BUFFER:
        return replace(state, x=result), Cache(cache.state, waiting, waiting_values)
    return replace(state, x=result), _emptied(cache, _folded(kernel, cache.state, waiting, waiting_values))


def _folded(kernel: Kernel, state: State, keys: Array, values: Array) -> State:
    centre = mean(state.values)
    return settled(fold(kernel, state, keys, values, centre), centre)[0]


def _emptied(cache: Cache, state: State) -> Cache:
    return Cache(state, cache.keys[:, :, :0, :], cache.values[:, :, :0, :])


def _check(params: block.Params, cache: Cache, x: Array, context: Context) -> tuple[Kernel, Array | None]:
    """Return the kernel and the mask (b, n) of the new tokens; raise where something does not fit."""
    if context.mask is not None:
        raise ValueError("context.mask was given to a stream, whose tokens attend themselves")
    _, g, d, e = params.config.sizes
    kernel = Kernel(block.options_of(params).like(raised(x)), d)
    check_state(cache.state, kernel, (x.shape[0], g, e), raised(x))
    return kernel, new_tokens(context, x)
