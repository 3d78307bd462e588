"""Decoding with a cache of keys and values: the stream of every mechanism whose tokens attend all tokens so far.

The queries of n new tokens attend the keys of the past and of these n, aligned bottom right, so that what comes out is
what the block gives for these tokens in the whole sequence. Time and memory of a token grow with the number of tokens
before it. A key mask covers the tokens of the past and the new ones. A cache belongs to the weights that made it.

A block that can be streamed so has the functions ``keys_and_values(params, x)``, which returns the keys (b, g, n, d)
and values (b, g, n, e) of tokens x (b, n, m), and ``attend(params, x, k, v, context)``, which returns the next x of
tokens that attend keys and values, and what the block saves.

Axes: b batch, n new token, j key, g key/value head, m width of the model, d and e widths of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from refattn import equations
from refattn.mechanisms.block import Stream
from refattn.mechanisms.context import Context
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class KeysAndValues:
    """Keys and values of the tokens so far."""

    k: Array  # (b, g, j, d)
    v: Array  # (b, g, j, e)


class KeyValueStream(Stream):
    """A block that is given a few tokens at a time, and keeps their keys and values."""

    Cache: type = KeysAndValues

    def start_cache(self, params: Any, batch: int) -> KeysAndValues:
        """Return the cache before the first token."""
        nothing = zeros((batch, 0, params.config.width), params.w_o)  # (b, 0, m)
        return KeysAndValues(*self.block.module.keys_and_values(params, nothing))

    def advance(self, params: Any, cache: KeysAndValues, state: Any, context: Context) -> tuple[Any, KeysAndValues]:
        """Return the next state of new tokens (b, n, m), and the cache with them."""
        longer = self.longer(params, cache, state, context)
        block = equations.active(self.block.module)
        x, _ = block.attend(params, state.x, longer.k, longer.v, context)  # (b, n, m)
        return replace(state, x=x), longer

    def longer(self, params: Any, cache: KeysAndValues, state: Any, context: Context) -> KeysAndValues:
        """Return the keys and values of the tokens so far and of new ones (b, n, m)."""
        block = equations.active(self.block.module)
        k_new, v_new = block.keys_and_values(params, state.x)  # (b, g, n, d), (b, g, n, e)
        for name, past, new in (("k", cache.k, k_new), ("v", cache.v, v_new)):
            needs = (*new.shape[:2], past.shape[2] if len(past.shape) == 4 else "tokens", new.shape[3])
            if tuple(past.shape) != needs:
                raise ValueError(f"cache.{name}: got shape {tuple(past.shape)}, these tokens and weights need {needs}")
        xp = namespace(state.x, cache.k)
        k = xp.concat([cache.k, k_new], axis=2)  # (b, g, j, d)
        v = xp.concat([cache.v, v_new], axis=2)  # (b, g, j, e)
        return KeysAndValues(k, v)
