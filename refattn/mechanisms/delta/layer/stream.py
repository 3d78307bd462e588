"""Decoding in a state of constant size: that of the core, and the last rows before the convolutions.

One token is one step of the recurrence; several go through the chunked form. Time and memory of a token do not grow
with the number of tokens before it. A cache belongs to the rule that made it.

A key mask covers the new tokens, or the past and the new ones; what it says of the past is not read again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refattn import equations
from refattn.mechanisms.block import new_tokens
from refattn.mechanisms.context import Context
from refattn.mechanisms.delta.layer import block
from refattn.mechanisms.projections import check_params
from refattn.xp import Array, raised, zeros


@dataclass(frozen=True)
class Cache:
    """What is kept of the tokens so far: a tree of arrays, the same size after a thousand tokens as after a million."""

    state: Array  # (b, g, d, e), with momentum (b, g, 2, d, e)
    tails: dict[str, Array]  # (b, taps - 1, channels) of q, k and v; empty without convolutions
    gates: tuple[str, ...]  # what the tokens had


def start(params: block.Params, batch: int) -> Cache:
    """Return the cache before the first token."""
    _, g, d, e = params.config.sizes
    shape = (batch, g, 2, d, e) if params.config.rule == "momentum" else (batch, g, d, e)
    state = zeros(shape, raised(params.w_q))  # (b, g, d, e)
    return Cache(state, block.tails_of(params, batch, params.w_q), params.config.gates)


def prefill(params: block.Params, cache: Cache, state: block.State, context: Context) -> tuple[block.State, Cache]:
    """Return the next state of new tokens (b, n, m), and the cache with them."""
    x, config = state.x, params.config
    check_params(params)
    if cache.gates != config.gates:
        raise ValueError(f"cache: got one with the gates {cache.gates}, needs {config.gates} of the rule {config.rule}")
    mask = new_tokens(context, x)
    following, memory, tails, _ = equations.active(block).advance(params, x, mask, cache.tails, cache.state)
    return replace(state, x=following), Cache(memory, tails, cache.gates)
