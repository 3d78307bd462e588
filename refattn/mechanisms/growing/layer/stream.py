"""Decoding with a cache: the keys and values of all tokens so far.

The queries of n new tokens attend the keys of the past and of these n, aligned bottom right, so that what comes out is
what the block gives for these tokens in the whole sequence. Time and memory of a token grow with the number of tokens
before it. A key mask covers the tokens of the past and the new ones. A cache belongs to the weights that made it: after
a growth it starts anew.

Axes: b batch, n new token, j key, h head, d and e widths of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refattn import equations
from refattn.mechanisms.context import Context
from refattn.mechanisms.growing.layer import block
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far."""

    k: Array  # (b, h, j, d)
    v: Array  # (b, h, j, e)


def start(params: block.Params, batch: int) -> Cache:
    """Return the cache before the first token."""
    h, d, e = params.config.sizes
    return Cache(zeros((batch, h, 0, d), params.w_q), zeros((batch, h, 0, e), params.w_q))


def prefill(params: block.Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of new tokens (b, n, m), and the cache with them."""
    if state.x.shape[0] != cache.k.shape[0]:
        raise ValueError(f"state.x: got a batch of {state.x.shape[0]}, the cache is of {cache.k.shape[0]}")
    if cache.k.shape[3] != params.config.sizes[1]:
        got = f"one of queries and keys of width {cache.k.shape[3]}"
        raise ValueError(
            f"cache: got {got}, these weights are {params.config.sizes[1]} wide: start anew after a growth"
        )
    xp, own = namespace(state.x, cache.k), equations.active(block)
    y, k_new, v_new = own.keys_and_values(params, state.x)
    k = xp.concat([cache.k, k_new], axis=2)  # (b, h, j, d)
    v = xp.concat([cache.v, v_new], axis=2)  # (b, h, j, e)
    result, _ = own.attend(params, state.x, y, k, v, context)
    return replace(state, x=result), Cache(k, v)


def step(params: block.Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of one new token (b, 1, m), and the cache with it."""
    return prefill(params, cache, state, context)
