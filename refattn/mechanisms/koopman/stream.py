"""Decoding with a cache: the keys and values of all tokens so far.

The queries of n new tokens start their trajectories among the keys of the past and of these n, aligned bottom right, so
that what comes out is what the block gives for these tokens in the whole sequence: rows of the past do not change. A
key mask covers the tokens of the past and the new ones.

Axes: b batch, n new token, j key, h head, g key/value head, d width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refattn import equations
from refattn.mechanisms.context import Context
from refattn.mechanisms.koopman import block
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far."""

    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, d)


def start(params: block.Params, batch: int) -> Cache:
    """Return the cache before the first token."""
    _, g, d = params.config.sizes
    return Cache(zeros((batch, g, 0, d), params.w_q), zeros((batch, g, 0, d), params.w_q))


def prefill(params: block.Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of new tokens (b, n, m), and the cache with them."""
    for name in ("memory", "memory_mask"):
        if getattr(context, name) is not None:
            raise ValueError(f"context.{name} was given to a stream, whose tokens attend themselves")
    if state.x.shape[0] != cache.k.shape[0]:
        raise ValueError(f"state.x: got a batch of {state.x.shape[0]}, the cache is of {cache.k.shape[0]}")
    xp, own = namespace(state.x, cache.k), equations.active(block)
    k_new, v_new = own.keys_and_values(params, state.x)
    k = xp.concat([cache.k, k_new], axis=2)  # (b, g, j, d)
    v = xp.concat([cache.v, v_new], axis=2)  # (b, g, j, d)
    result, _, _ = own.attend(params, state.x, k, v, context)
    return replace(state, x=result), Cache(k, v)


def step(params: block.Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of one new token (b, 1, m), and the cache with it."""
    return prefill(params, cache, state, context)
