"""Decoding with a cache of keys and values, and of an operator's state of constant size where the kernel allows it.

With the kernel "linear" or "polynomial", the space "keys" or "full" and the fit "separable" all keys so far come into
the operator through one matrix, to which each further key adds a product of two vectors (`implementations.features`). A
token then costs its weights over the keys and values, as in softmax attention, and an update of one cost for any
length; otherwise the operator of each token is fitted to all keys again.

Several tokens at once, masks and draws go the way of all keys, and so does what is traced; the matrix is of all tokens
that came.

Axes: b batch, n new token, j key, h head, g key/value head, m width of the model, d width of a head, f feature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from refattn import equations
from refattn.mechanisms.cache import KeysAndValues, KeyValueStream
from refattn.mechanisms.context import Context
from refattn.mechanisms.koopman import core, dense
from refattn.mechanisms.koopman.implementations import features
from refattn.mechanisms.koopman.layer import block
from refattn.mechanisms.koopman.options.fits import Separable
from refattn.mechanisms.koopman.options.perturbation import STALLED, failure_of
from refattn.ops.heads import merge_heads, repeat_heads, split_heads
from refattn.ops.linear import linear_forward
from refattn.xp import Array, namespace, zeros


@dataclass(frozen=True)
class Cache(KeysAndValues):
    """Keys and values of the tokens so far, and S of `features` for them; None where it cannot serve."""

    span: Array | None  # (b, g, f, f)


class Stream(KeyValueStream):
    """A block that is given a few tokens at a time."""

    Cache: type = Cache

    def start_cache(self, params: Any, batch: int) -> Any:
        """Return the cache before the first token."""
        found, count = super().start_cache(params, batch), count_of(params.config)
        span = None if count is None else zeros((batch, found.k.shape[1], count, count), found.k)  # (b, g, f, f)
        return Cache(found.k, found.v, span)

    def advance(self, params: Any, cache: Any, state: Any, context: Context) -> tuple[Any, Any]:
        """Return the next state of new tokens (b, n, m), and the cache with them."""
        if cache.span is None:
            following, longer = super().advance(params, cache, state, context)
            return following, Cache(longer.k, longer.v, None)
        longer = self.longer(params, cache, state, context)
        options = options_of(params, longer.k)
        delta = options.jitter * options.kernel.unit()
        new = features.features_of(options.kernel, longer.k[:, :, cache.k.shape[2] :, :])  # (b, g, n, f)
        span = features.with_keys(cache.span, new, delta)  # (b, g, f, f)
        given = (context.mask, context.key_mask, context.draws)
        if state.x.shape[1] > 1 or equations.is_active() or any(x is not None for x in given):
            x, _ = equations.active(block).attend(params, state.x, longer.k, longer.v, context)  # (b, n, m)
        else:
            x = attend(params, state.x, longer, span, options)  # (b, n, m)
        return replace(state, x=x), Cache(longer.k, longer.v, span)


def count_of(config: block.Config) -> int | None:
    """Return how many features a block's kernel has; None where its operator cannot live in them."""
    families = config.families
    fit, perturbation = families["fit"], families["perturbation"]
    fits = config.updates > 1 and config.space in ("keys", "full") and type(fit) is Separable
    fits = fits and fit.limits() is None and config.draws is None
    if not fits or perturbation.certify or config.jitter == 0.0:
        return None
    return features.count_of(families["kernel"], config.sizes[2])


def options_of(params: block.Params, like: Array) -> dense.Options:
    """Return what the core would be given, with its numbers."""
    plain = {name: getattr(params.config, name) for name in ("updates", "space", "similarity", "jitter")}
    return core.placed(like, **plain, **block.families_of(params))[0]


def attend(params: block.Params, x: Array, among: KeysAndValues, span: Array, options: dense.Options) -> Array:
    """Return the next x of a token x (b, 1, m), as `block.attend` does."""
    xp, h = namespace(x), params.config.heads
    queries = split_heads(linear_forward(x, params.w_q, params.b_q), h)  # (b, h, 1, d)
    keys, values, own = (repeat_heads(part, h) for part in (among.k, among.v, span))  # (b, h, j, d), -, (b, h, f, f)
    last, saved = features.forward(queries, keys, values, own, options)
    for number, left in enumerate(saved.left, start=2):
        if failure := failure_of(left, partial(xp.isnan, 0.0 * left), number):
            raise failure
        last = xp.where((left <= STALLED)[..., None], last, float("nan"))  # (b, h, 1, d)
    out = linear_forward(merge_heads(last), params.w_o, params.b_o)  # (b, 1, m)
    return x + out if params.config.residual else out
